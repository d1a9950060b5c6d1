"""The engines of a job with many adapters: versions of adapters in them, and generation as one adapter sees it.

Only an adapter whose optimizer stepped is sent. The job keeps the newest version of each on the host, so that rebuilt
and woken shards get all of them before they take requests. Invariant: after `bring_to` every shard that takes requests
has that version of the adapter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import ray

from nemo_rl.algorithms.accelerators import Accelerators, DemandKind, ReportProgress
from nemo_rl.algorithms.multi_lora.passes import AdapterPolicy
from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.models.generation.interfaces import GenerationError, GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.fleet import is_lost
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import RequestFinished, RequestSubmitted, SyncFinished, SyncStarted, VersionPublished
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from ray import ObjectRef

    from nemo_rl.experience.collector import Collector

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.2
_WATCH_S = 1.0
_CLOSE_S = 60.0
_ROLLOUT_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class _Held:
    """The newest version of an adapter, on the host."""

    version: int
    info: AdapterInfo
    factors: ObjectRef[object]
    nbytes: int
    record: Record


class AdapterEngines:
    """The versions of adapters in the engines of one generation backend."""

    def __init__(self, generation: VllmGeneration, policy: MultiLoraPolicy) -> None:
        self.generation, self._policy = generation, policy
        self._held: dict[str, _Held] = {}
        self._lock = threading.RLock()
        self._restored = 0
        self._fleet = generation.fleet
        self._fleet.enable_rebuilds()
        self._fleet.await_rebuild(True)
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep_repaired, name="adapter-engines", daemon=True)
        self._watch.start()

    def version(self, name: str) -> int | None:
        """The version of an adapter that the engines have; None where they have none."""
        held = self._held.get(name)
        return None if held is None else held.version

    def nbytes(self, name: str) -> int:
        """Bytes of an adapter's newest version."""
        held = self._held.get(name)
        return 0 if held is None else held.nbytes

    def bring_to(self, name: str, slot: int, info: AdapterInfo, version: int, record: Record) -> None:
        """Sends a version of an adapter. Engines that are lost meanwhile get it when they are rebuilt. Raises
        WorkerError: an engine refused it.
        """
        factors = self._policy.slot_factors(slot)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in factors.values())
        with self._lock:
            self._held[name] = _Held(version, info, ray.put(factors), nbytes, record)
            shards = self._fleet.healthy()
        # Adapters are sent beside each other. A shard that comes back meanwhile gets the new version by `restore`.
        try:
            self._load(shards, name)
        except WorkerError as error:
            if not is_lost(error):
                raise
            # Requests wait for a rebuilt shard, and fail by themselves where there will be none.
            logger.warning("adapter=%s version=%d engines=lost reason=%s", name, version, first_line(error))

    def _load(self, shards: Sequence[int], name: str) -> None:
        held = self._held[name]
        self._fleet.call_healthy(
            "load_adapter", shards, name=name, version=held.version, info=held.info, factors=held.factors
        )

    def remove(self, name: str) -> None:
        """Takes an adapter out of the engines; nothing to do when they do not have it."""
        with self._lock:
            if self._held.pop(name, None) is None:
                return
            try:
                self._fleet.call_healthy("remove_adapter", name=name)
            except WorkerError as error:
                # The engines go on with an adapter that nothing asks for.
                logger.warning("adapter=%s removal=failed reason=%s", name, first_line(error))

    def restore(self, shards: Iterable[int]) -> None:
        """Sends the newest version of every adapter to shards, which take requests afterwards. Raises WorkerError: one
        refused.
        """
        with self._lock:
            wanted = tuple(shards)
            self._restored += 1
            for name, held in self._held.items():
                sync = f"{name}@{held.version}.{self._restored}"
                held.record.emit(SyncStarted(sync, held.version, wanted, "adapter", recompute_kv=True, adapter=name))
                self._load(wanted, name)
                held.record.emit(SyncFinished(sync, held.version, "done", held.nbytes))
            self._fleet.activate_healthy(wanted)

    def _keep_repaired(self) -> None:
        """Rebuilds shards that were lost; requests wait for them until none can be rebuilt."""
        while not self._over.wait(_WATCH_S):
            try:
                self._fleet.rebuild_in_background(self.restore)
            except (WorkerError, GenerationError) as error:
                logger.error("shards=rebuild failed reason=%s", first_line(error))

    def close(self) -> None:
        """Stops rebuilding shards."""
        self._over.set()
        self._fleet.close()
        self._watch.join(timeout=_CLOSE_S)


class AdapterGeneration:
    """Generation as the run of one adapter sees it: every request is drawn with the adapter, and recorded with it."""

    lent = False

    def __init__(
        self, engines: AdapterEngines, name: str, removed: threading.Event, policy: AdapterPolicy, record: Record
    ) -> None:
        self._generation, self._name, self._removed, self._policy = engines.generation, name, removed, policy
        self._record = record
        self.cfg, self.colocated = self._generation.cfg, False

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt with the adapter. Raises AdapterRemoved: the adapter was removed."""
        self._policy.require_present()
        # Adapters count their requests alike.
        named = replace(request, request_id=f"{self._name}/{request.request_id}", adapter=self._name)
        result = await self._generation.generate_one(named)
        strangers = {span.adapter for span in result.spans} - {self._name}
        if strangers:
            raise GenerationError(f"adapter {self._name}: request {request.request_id} was drawn with {strangers}")
        # The shard that answered is known only now; versions change between the rollouts of an adapter alone.
        sample = request.sample_id or request.request_id
        self._record.emit(RequestSubmitted(request.request_id, result.shard, sample, self._name))
        self._record.emit(RequestFinished(request.request_id, result.shard, "done", len(result.token_ids)))
        return replace(result, request_id=request.request_id)

    def start_on_dispatch_loop(self, work: Coroutine[object, object, T]) -> Future[T]:
        return self._generation.start_on_dispatch_loop(work)

    def run_on_dispatch_loop(self, work: Coroutine[object, object, T], timeout_s: float = _ROLLOUT_TIMEOUT_S) -> T:
        """Runs a coroutine on the dispatcher's loop and waits. Raises AdapterRemoved: the adapter was removed
        meanwhile, and its requests were ended; GenerationError: it did not end within `timeout_s`.
        """
        future = self._generation.start_on_dispatch_loop(work)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(_POLL_S)
            except NotDone:
                if future.done():
                    raise
                if self._removed.is_set() or time.monotonic() > deadline:
                    future.cancel()
                    self._policy.require_present()
                    raise GenerationError(
                        f"adapter {self._name}: its rollouts did not end within {timeout_s:.0f} s"
                    ) from None

    def engine_metrics(self) -> dict[str, float]:
        return self._generation.engine_metrics()

    def shutdown(self) -> bool:
        """Does nothing: the job ends the engines."""
        return True


class AdapterAccelerators(Accelerators):
    """The accelerators of one adapter, which it shares with the others pass by pass; sends its new versions to the
    engines, which keep serving the others. `progress`: called with the prompt groups that are there and those that are
    waited for.
    """

    def __init__(
        self,
        engines: AdapterEngines,
        name: str,
        slot: int,
        info: AdapterInfo,
        timer: Timer,
        record: Record,
        progress: Callable[[int, int], None] = lambda ready, of: None,
    ) -> None:
        self._engines, self._name, self._slot, self._info = engines, name, slot, info
        self._timer, self._record, self._progress = timer, record, progress

    def start(self, collector: Collector | None, version: int) -> None:
        """Sends the first version."""
        self.serve(version)

    def serve(self, version: int) -> None:
        """Sends the adapter unless the engines have that version."""
        if self._engines.version(self._name) == version:
            return
        shards, sync = tuple(self._engines.generation.fleet.healthy()), f"{self._name}@{version}"
        self._record.emit(SyncStarted(sync, version, shards, "adapter", recompute_kv=True, adapter=self._name))
        outcome = "failed"
        try:
            with self._timer.time("prepare_for_generation/transfer_and_update_weights"):
                self._engines.bring_to(self._name, self._slot, self._info, version, self._record)
            outcome = "done"
        finally:
            self._record.emit(SyncFinished(sync, version, outcome, self._engines.nbytes(self._name)))
        self._record.emit(VersionPublished(version, shards))

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Generator[ReportProgress]:
        """Passes the progress on."""
        self._progress(ready, groups)
        try:
            yield self._progress
        finally:
            self._progress(0, 0)

    def publish(self, step: int, waited_for: Callable[[], tuple[int, int]]) -> None:
        """Sends the new version."""
        self.serve(step + 1)

    def metrics(self) -> Mapping[str, float]:
        return {
            "gib": self._engines.nbytes(self._name) / (1 << 30),
            "version": float(self._engines.version(self._name) or 0),
        }
