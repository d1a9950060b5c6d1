"""The engines of one generation backend: the one place that knows where each shard is and moves it.

Runs with slots of their own and lent pools move shards by the same calls. Moves are idempotent. A shard leaves in the
order unroute, end its requests, verify that it is idle, sleep, verify that the memory is free. `bring` wakes its
weights, syncs it and wakes its KV cache; `activate` publishes its version and routes it. A sync session reaches shards
as `ShardTargets`, which sends its calls to the workers of these shards only and reports which failed. Invariants: no
engine sleeps with a request; no shard without current weights is routed; a failing shard is quarantined and the others
are unaffected; every session is recorded with its end; one build at a time per shard; an engine that does not start is
tried a few times and then given up; one that keeps more and more memory while it sleeps is rebuilt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import ray

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_groups import (
    WorkerDiedError,
    WorkerError,
    WorkerIdentity,
    WorkerTimeoutError,
    wait_for_workers,
    worker_failure,
)
from nemo_rl.models.generation.interfaces import ShardStateError, WakeError
from nemo_rl.models.generation.vllm.dispatch import Dispatcher, answer_of
from nemo_rl.models.generation.vllm.request_state import is_engine_death
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import (
    EngineOutgrown,
    ShardSlept,
    ShardWoken,
    SyncFinished,
    SyncStarted,
    VersionPublished,
)
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.cache import CacheError
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncReport, SyncSession, WeightSource, WeightTargets

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


class ShardState(Enum):
    """State of a shard."""

    UNBUILT = "unbuilt"  # its actor stands, its engine was never started
    ASLEEP = "asleep"
    WAKING = "waking"  # its weights are resident, its KV cache is not
    INACTIVE = "inactive"  # awake, takes no requests
    ACTIVE = "active"
    FAILED = "failed"  # quarantined until it is built again


@dataclass
class Shard:
    """State of a shard, except failures, which the dispatcher finds out."""

    state: ShardState
    version: int | None = None  # of its weights; None where it has none, or its version is not known
    half_new: bool = False  # whether a session broke off that may have replaced some of its weights
    freed: int = 0  # bytes that its last sleep gave back
    kept_at_first: int | None = None  # bytes that a rank of its engine kept at its first sleep
    outgrown: bool = False  # whether it keeps too much since, so that it is rebuilt before it wakes
    ranks: list[dict[str, Any]] = field(default_factory=list)  # device and process id of each rank of its engine
    starts: int = 0  # by `build` and `rebuild`
    attempts: int = 0  # rebuilds that failed since its engine last stood
    build: Future[None] | None = None  # the rebuild under way

    def has(self, version: int | None, *, half_new: bool = False) -> None:
        """Writes down what weights it has from here on."""
        self.version, self.half_new = version, half_new


def is_lost(error: WorkerError) -> bool:
    """Whether a failure means that the shard is gone: its process or engine died, or it does not answer."""
    return isinstance(error, (WorkerDiedError, WorkerTimeoutError)) or is_engine_death(error.__cause__)


_ABSENT = (ShardState.UNBUILT, ShardState.ASLEEP, ShardState.FAILED)
_ANSWER_S = 30.0
_CULPRITS_S = 5.0
_STAGING_MARGIN = 1.2


class ShardTargets(WeightTargets):
    """Targets of one session.

    Args:
        known: Its fleet's state of each shard that is to take weights, by number.
        state: Where a shard is now.
        recompute_kv: Whether running requests recompute keys and values under the new weights.

    Attributes:
        culprits: After a failure, the shards that caused it and their errors.
        died: Whether the culprits are gone rather than raised.
    """

    def __init__(
        self,
        known: Mapping[int, Shard],
        workers: Sequence[ActorHandle[object]],
        identities: Sequence[WorkerIdentity],
        state: Callable[[int], ShardState],
        *,
        recompute_kv: bool = True,
    ) -> None:
        self.shards, self._known, self._state = tuple(known), [*known.values()], state
        self._workers, self._identities = workers, identities
        self._devices = [[rank["device"] for rank in known.ranks] for known in self._known]
        self._recompute_kv, self._staged = recompute_kv, False
        self.culprits: dict[int, str] = {}
        self.died = False

    def devices(self) -> list[str]:
        return [device for shard in self._devices for device in shard]

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        refs: list[ObjectRef[object]] = [worker.kept_groups.remote(timeout_s=timeout_s) for worker in self._workers]
        return [held for shard in self._wait(refs, "kept_groups", timeout_s) for held in shard]

    def begin(self, session: dict[str, object], routes: Sequence[dict[str, object]], timeout_s: float) -> None:
        """Opens the session on every target, each rank by its own route. Raises ShardStateError: a target sleeps or is
        quarantined; WorkerError: a target refused: its version is newer, or another session is open.
        """
        states = {shard: self._state(shard) for shard in self.shards}
        out = {shard: state.value for shard, state in states.items() if state in _ABSENT}
        if out:
            # One may have died since it was chosen.
            self.culprits = {shard: "it is quarantined" for shard, state in out.items() if state == "failed"}
            self.died = bool(self.culprits)
            raise ShardStateError(
                f"session {session['id']} cannot sync shards that are {out}; wake their weights first, or "
                "leave them out"
            )
        self._staged = bool(session["staged"])
        message = session | {"recompute_kv": self._recompute_kv}
        refs: list[ObjectRef[object]] = []
        first = 0
        for worker, devices in zip(self._workers, self._devices, strict=True):
            refs.append(
                worker.begin_sync.remote(
                    session=message, routes=list(routes[first : first + len(devices)]), timeout_s=timeout_s
                )
            )
            first += len(devices)
        self._wait(refs, "begin_sync", timeout_s)

    def receive_window(self, window: dict[str, object], timeout_s: float) -> None:
        if not self._staged:
            self._have(None, half_new=True)
        self._wait(
            [worker.receive_window.remote(window=window, timeout_s=timeout_s) for worker in self._workers],
            "receive_window",
            timeout_s,
        )

    def finish(self, version: int, timeout_s: float) -> list[float]:
        # Staged windows are loaded by this call.
        self._have(None, half_new=True)
        pauses_s = self._wait(
            [worker.finish_sync.remote(version=version, timeout_s=timeout_s) for worker in self._workers],
            "finish_sync",
            timeout_s,
        )
        self._have(version)
        return pauses_s

    def _have(self, version: int | None, *, half_new: bool = False) -> None:
        for known in self._known:
            known.has(version, half_new=half_new)

    def abort(self, session_id: str) -> None:
        refs: list[ObjectRef[object]] = [worker.abort_sync.remote(session_id) for worker in self._workers]
        ray.wait(refs, num_returns=len(refs), timeout=30.0)

    def staging_fits(self, nbytes: int) -> bool:
        """Whether every target has memory for a second copy of the weights."""
        free = self._wait([worker.free_memory.remote() for worker in self._workers], "free_memory", _ANSWER_S)
        # Copies on one device add up: on a GPU that several engines share, in the one memory of a host's CPU slots.
        copies = Counter(self.devices())
        return all(
            rank > _STAGING_MARGIN * nbytes * copies[device]
            for shard, devices in zip(free, self._devices, strict=True)
            for rank, device in zip(shard, devices, strict=True)
        )

    def _wait(self, refs: list[ObjectRef[object]], what: str, timeout_s: float) -> list[Any]:
        try:
            return wait_for_workers(refs, self._identities, what=f"generation.{what}", timeout_s=timeout_s)
        except WorkerError:
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=_CULPRITS_S)
            failures = {
                shard: worker_failure(ref, who, what)
                for shard, ref, who in zip(self.shards, refs, self._identities, strict=True)
                if ref in ended
            }
            lost = {shard: failure for shard, failure in failures.items() if failure is not None and is_lost(failure)}
            if lost:
                # The others may wait for the dead one, in a collective for example: it alone is to blame.
                self.culprits, self.died = {shard: first_line(failure) for shard, failure in lost.items()}, True
                raise
            self.culprits = {shard: first_line(failure) for shard, failure in failures.items() if failure is not None}
            # Beside one that raised, the others wait for it; where none did, those that do not answer hang.
            self.died = not self.culprits
            self.culprits |= {
                shard: f"no answer to {what}" for shard, ref in zip(self.shards, refs, strict=True) if ref not in ended
            }
            raise


@dataclass(frozen=True)
class Weights:
    """Weights that shards are brought to, and how they travel."""

    version: Callable[[], int]  # asked before each session: a cache may serve a newer version by then
    source: Callable[[int], WeightSource]  # the source of that version
    options: SyncOptions
    record: Record  # of sessions
    recompute_kv: bool = True  # whether running requests recompute keys and values
    timer: Timer | None = None  # takes the time of sessions


@dataclass
class Moved:
    """Result of a move of shards."""

    shards: list[int]  # those that made the move
    failed: dict[int, str] = field(default_factory=dict)  # those that did not, and why
    sync: SyncReport | None = None  # the session that brought weights, if one was needed


def sync(weights: Weights, targets: ShardTargets, version: int, *, stages: bool = False) -> SyncReport:
    """Runs one session and records it. `stages`: whether windows are staged beside the live weights, where both fit.
    Raises as `SyncSession.run`.
    """
    source, options, record = weights.source(version), weights.options, weights.record
    staged = stages and targets.staging_fits(sum(meta.nbytes for meta in source.tensor_metas()))
    session = SyncSession(source, targets, version=version, options=options, staged=staged)
    record.emit(SyncStarted(session.session_id, version, targets.shards, options.transport, weights.recompute_kv))
    finished = SyncFinished(session.session_id, version, "failed")
    timer = weights.timer
    try:
        with timer.time("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
            report = session.run()
        checksums = {str(shard): report.checksum for shard in targets.shards} if report.checksum else {}
        finished = SyncFinished(session.session_id, version, "done", report.nbytes, checksums)
    finally:
        record.emit(finished)
    return report


logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_TAGS = ("weights", "kv_cache")


class EngineFleet:
    """The shards of one generation backend.

    Args:
        workers: Generation actors, one per shard; a restarted actor takes its place in this list.
        dispatcher: Routes requests; used only on its own loop.
        on_loop: Runs a coroutine there and waits.
        start_on_loop: Starts a coroutine there.
        start: Starts the engine of a shard and waits until it is up; device and process id of its ranks. The second
            argument says whether the shard's processes must be ended and started first.
        end: Ends the processes of a shard.
        sleep_level: Level at which shards sleep by default.
        timeout_s: Deadline of each step of a move.
        growth_bytes: How much more than at its first sleep a rank of an engine may keep while it sleeps.
        built: Whether the engines are started already, awake and routed.

    Attributes:
        shards: State of each shard, by number.
        rebuilds: Whether lost shards are rebuilt; see `enable_rebuilds`.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle[object]],
        identities: Sequence[WorkerIdentity],
        dispatcher: Dispatcher,
        on_loop: Callable[[Coroutine[object, object, object]], Any],
        start_on_loop: Callable[[Coroutine[object, object, object]], object],
        *,
        start: Callable[[int, bool], list[dict[str, Any]]],
        end: Callable[[int], None],
        sleep_level: int = 2,
        timeout_s: float = 180.0,
        growth_bytes: int = 1 << 30,
        built: bool = True,
    ) -> None:
        self.workers, self.identities = workers, identities
        self._dispatcher, self._on_loop, self._start_on_loop = dispatcher, on_loop, start_on_loop
        self._start, self._end = start, end
        self._sleep_level, self._timeout_s, self._growth_bytes = sleep_level, timeout_s, growth_bytes
        state = ShardState.ACTIVE if built else ShardState.UNBUILT
        self.shards = {shard: Shard(state) for shard in range(len(workers))}
        self._builds = ThreadPoolExecutor(thread_name_prefix="shard-repair")
        self.rebuilds = False

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, shard: int) -> ShardState:
        """State of a shard."""
        return ShardState.FAILED if shard in self._dispatcher.failed else self.shards[shard].state

    def having(self, *states: ShardState) -> list[int]:
        """The shards in any of these states, in order."""
        return [shard for shard in self.shards if self.state(shard) in states]

    def healthy(self, shards: Iterable[int] | None = None) -> list[int]:
        """Shards, of all by default, that are not quarantined."""
        wanted = self.shards if shards is None else shards
        return [shard for shard in wanted if self.state(shard) is not ShardState.FAILED]

    def set_version(self, shards: Iterable[int], version: int | None) -> None:
        """Writes down what weights shards have from here on; see `Shard`."""
        for shard in shards:
            self.shards[shard].has(version)

    def _check(self, shards: Iterable[int]) -> list[int]:
        wanted = sorted(set(shards))
        unknown = [shard for shard in wanted if shard not in self.shards]
        if unknown:
            raise ShardStateError(f"shards {unknown} do not exist; there are {len(self.shards)}")
        return wanted

    def _dispatch(self, change: Callable[[], Any]) -> Any:
        async def now() -> Any:
            return change()

        return self._on_loop(now())

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, shards: Sequence[int], method: str, *, timeout_s: float | None = None, **kwargs: object
    ) -> list[Any]:
        """Calls a method of these shards' workers. Raises WorkerError: a worker raised, died or hung."""
        return self._wait(self._begin(shards, method, kwargs), method, timeout_s or self._timeout_s)

    def _begin(self, shards: Iterable[int], method: str, kwargs: Mapping[str, object]) -> dict[int, ObjectRef[object]]:
        return {shard: getattr(self.workers[shard], method).remote(**kwargs) for shard in shards}

    def _wait(self, refs: Mapping[int, ObjectRef[object]], method: str, timeout_s: float) -> list[Any]:
        who = [self.identities[shard] for shard in refs]
        return wait_for_workers([*refs.values()], who, what=f"generation.{method}", timeout_s=timeout_s)

    def _call_each(
        self,
        shards: Iterable[int],
        method: str,
        answered: Callable[[int, Any], None],
        *,
        only_lost: bool = False,
        **kwargs: object,
    ) -> None:
        """Calls shards at the same time. Those that fail are quarantined; with `only_lost` those that are gone or do
        not answer. Raises WorkerError once all have ended: a shard failed; with `only_lost`, a live one, or none is
        left.
        """
        deadline = time.monotonic() + self._timeout_s
        lost = raised = None
        for shard, ref in self._begin(shards, method, kwargs).items():
            try:
                answered(shard, self._wait({shard: ref}, method, max(1.0, deadline - time.monotonic()))[0])
            except WorkerError as error:
                if only_lost and is_lost(error):
                    lost = error
                    self.fail({shard: first_line(error)})
                    continue
                raised = raised or error
                if isinstance(error.__cause__, WakeError):
                    self.shards[shard].state = ShardState.ASLEEP
                    logger.error("shard=%s wake=failed reason=%s", self.identities[shard], error.__cause__)
                elif not only_lost:
                    self.fail({shard: f"{method} failed: {error}"})
        if raised is not None:
            raise raised
        if lost is not None and not self.healthy():
            raise lost

    def call_healthy(self, method: str, shards: Iterable[int] | None = None, **kwargs: object) -> dict[int, Any]:
        """Calls a method of the shards (all by default) that are not quarantined. One that is gone or does not answer
        is quarantined and left out of the result. Raises WorkerError: a live worker raised, or none is left.
        """
        answers: dict[int, Any] = {}
        self._call_each(self.healthy(shards), method, answers.__setitem__, only_lost=True, **kwargs)
        return answers

    def targets(self, shards: Sequence[int], *, recompute_kv: bool = True) -> ShardTargets:
        """Shards as the targets of a sync session. `recompute_kv`: whether running requests recompute keys and
        values.
        """
        known = {shard: self.shards[shard] for shard in shards}
        workers, who = [self.workers[shard] for shard in shards], [self.identities[shard] for shard in shards]
        return ShardTargets(known, workers, who, self.state, recompute_kv=recompute_kv)

    # -- failed and rebuilt -------------------------------------------------------------------------------------------

    def fail(self, reasons: Mapping[int, str]) -> None:
        """Quarantines shards: they take no request any more, and theirs go on elsewhere."""
        for shard, reason in reasons.items():
            self._dispatch(lambda shard=shard, reason=reason: self._dispatcher.quarantine(shard, reason))

    def failures(self, shards: Iterable[int]) -> dict[int, str]:
        """Quarantined shards with their reasons."""
        return {shard: self._dispatcher.failed[shard] for shard in shards if shard in self._dispatcher.failed}

    def on_failure(self, notify: Callable[[int, str], None]) -> None:
        """Calls `notify` with every shard that is quarantined later, and the reason; it must not block."""
        self._dispatcher.on_failure = notify

    def enable_rebuilds(self) -> None:
        """From here on shards that fail are ended at once, so that their memory is free, and `rebuild` starts them."""
        self.rebuilds = True
        self.on_failure(lambda shard, reason: self._end(shard))

    def await_rebuild(self, rebuilds: bool) -> None:
        """Whether requests wait for lost shards from here on, or fail once all are lost."""
        self._dispatch(lambda: self._dispatcher.await_rebuild(rebuilds))

    def build(self, shards: Iterable[int]) -> list[int]:
        """Starts the engines of shards without one, or with one that failed or keeps too much, awake, without weights,
        not routed; returns these shards. Raises WorkerError: an engine did not start; the shard is quarantined.
        """
        none = ShardState.UNBUILT, ShardState.FAILED
        built = [s for s in self._check(shards) if self.state(s) in none or self.shards[s].outgrown]
        for shard in built:
            restart = self.state(shard) is ShardState.FAILED or self.shards[shard].outgrown
            self.shards[shard].state = ShardState.UNBUILT
            self._dispatch(lambda shard=shard: self._dispatcher.revive(shard))
            try:
                self._start_engine(shard, restart)
            except WorkerError as error:
                self.fail({shard: f"its engine did not start: {error}"})
                raise
            self.shards[shard].state = ShardState.INACTIVE
        return built

    def _start_engine(self, shard: int, restart: bool) -> None:
        self.started(shard, self._start(shard, restart))
        self.shards[shard].starts += 1

    def started(self, shard: int, ranks: list[dict[str, Any]]) -> None:
        """A shard's engine is up. `ranks`: see `Shard`."""
        known = self.shards[shard]
        known.ranks, known.kept_at_first, known.outgrown = ranks, None, False
        known.has(None)

    def lost(self) -> list[int]:
        """Quarantined shards that are rebuilt, and not given up."""
        failed = self.having(ShardState.FAILED) if self.rebuilds else []
        return [shard for shard in failed if self.shards[shard].attempts < _ATTEMPTS]

    def rebuild(self) -> None:
        """Starts an engine, in the background, for every lost shard that has none under way."""
        for shard in self.lost():
            if self.shards[shard].build is None:
                logger.warning("shard=%d rebuild=begun", shard)
                self.shards[shard].build = self._builds.submit(self._start_engine, shard, True)

    def take_back(self, wait_s: float = 0.0) -> list[int]:
        """The shards whose new engines are up: awake, without weights, not routed. `wait_s`: how long to wait for those
        under way.
        """
        builds = {shard: known.build for shard, known in self.shards.items() if known.build is not None}
        wait(builds.values(), timeout=wait_s)
        back: list[int] = []
        for shard, build in builds.items():
            if not build.done():
                continue
            known = self.shards[shard]
            known.build, error = None, build.exception()
            if error is None:
                known.state, known.attempts = ShardState.INACTIVE, 0
                self._dispatch(lambda shard=shard: self._dispatcher.revive(shard))
                back.append(shard)
                logger.warning("shard=%d rebuild=done", shard)
                continue
            if not isinstance(error, WorkerError):
                raise error
            known.attempts += 1
            logger.error(
                "shard=%d rebuild=failed attempt=%d of=%d%s reason=%s",
                shard,
                known.attempts,
                _ATTEMPTS,
                "" if known.attempts < _ATTEMPTS else " given_up=true",
                first_line(error),
            )
        return back

    def rebuild_in_background(self, bring_back: Callable[[list[int]], object]) -> None:
        """One turn of rebuilding in the background, for engines that no refit takes back: `bring_back` gives the new
        ones their weights and routes them. Once all are given up, requests fail instead of waiting.
        """
        if back := self.take_back():
            bring_back(back)
        self.rebuild()
        if not self.healthy() and not self.lost():
            self.await_rebuild(False)

    def close(self) -> None:
        """Begins no more rebuilds."""
        self._builds.shutdown(wait=False, cancel_futures=True)

    # -- away ---------------------------------------------------------------------------------------------------------

    def drain(self, shards: Iterable[int]) -> int:
        """Stops routing to shards and moves their running requests, with the tokens so far, to others; returns the
        router's generation number. A shard whose requests do not end is quarantined.
        """
        wanted = self._check(shards)

        async def leave() -> int:
            generation = self._dispatcher.unroute(wanted)
            alive = [shard for shard in wanted if self.state(shard) == ShardState.ACTIVE]
            outcomes = await asyncio.gather(*(self._leave(shard) for shard in alive), return_exceptions=True)
            for shard, outcome in zip(alive, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    self._dispatcher.quarantine(shard, f"it did not leave: {outcome}")
                else:
                    self.shards[shard].state = ShardState.INACTIVE
            return generation

        return self._on_loop(leave())

    async def _leave(self, shard: int) -> None:
        await asyncio.wait_for(answer_of(self.workers[shard].leave.remote(self._timeout_s / 2)), self._timeout_s)
        await self._dispatcher.until_idle([shard], self._timeout_s)

    def sleep(
        self, shards: Iterable[int], level: int | None = None, *, in_place: bool = False
    ) -> dict[int, dict[str, int]]:
        """Takes shards away and gives their memory back. `in_place`: they stay routed, since no requests are sent
        until they wake, and one that is gone is quarantined without an error.

        Returns bytes in use before and after, per shard that was awake. Raises WorkerError: a shard did not sleep or
        its memory did not come back; it is quarantined unless it sleeps in place.
        """
        wanted, level = self._check(shards), level or self._sleep_level
        if not in_place:
            self.drain(wanted)
        away = self.having(ShardState.UNBUILT, ShardState.ASLEEP, ShardState.FAILED)
        reports: dict[int, dict[str, int]] = {}

        def slept(shard: int, report: dict[str, int]) -> None:
            reports[shard], known = report, self.shards[shard]
            known.state, known.version = ShardState.ASLEEP, None if level == 2 else known.version
            known.freed = max(0, report["before"] - report["after"])
            if not in_place:
                self._dispatcher.record.emit(ShardSlept(shard, level, known.freed))
            if "kept" in report:
                self._see_growth(shard, report["kept"])

        awake = [shard for shard in wanted if shard not in away]
        self._call_each(awake, "sleep", slept, only_lost=in_place, level=level)
        return reports

    def _see_growth(self, shard: int, kept: int) -> None:
        known = self.shards[shard]
        first = known.kept_at_first = kept if known.kept_at_first is None else known.kept_at_first
        if kept - first <= self._growth_bytes:
            return
        self._dispatcher.record.emit(EngineOutgrown(shard, kept, first))
        says = f"asleep it keeps {kept >> 20} MiB, and kept {first >> 20} at its first sleep"
        logger.warning("shard=%s outgrown reason=%s", self.identities[shard], says)
        if self.rebuilds:
            self.fail({shard: f"{says}; it is rebuilt (policy.generation.vllm_cfg.asleep_growth_gib)"})
        else:
            known.outgrown = True

    # -- and back -----------------------------------------------------------------------------------------------------

    def wake(self, shards: Iterable[int], tags: Sequence[str] = _TAGS, *, in_place: bool = False) -> None:
        """Makes the memory behind `tags` resident; the shards take no requests yet, or where they slept `in_place` as
        before. Raises WorkerError: a shard could not wake (its cause is a `WakeError`: it sleeps as before), or died;
        in place, none is left.
        """
        wanted = [shard for shard in self._check(shards) if self.state(shard) in (ShardState.ASLEEP, ShardState.WAKING)]

        def woken(shard: int, _: object) -> None:
            if not in_place and self.shards[shard].state is ShardState.ASLEEP:
                self._dispatcher.record.emit(ShardWoken(shard))
            awake = ShardState.ACTIVE if shard in self._dispatcher.router.active else ShardState.INACTIVE
            self.shards[shard].state = awake if "kv_cache" in tags else ShardState.WAKING

        self._call_each(wanted, "wake_up", woken, only_lost=in_place, tags=list(tags))

    def bring(
        self,
        shards: Iterable[int],
        weights: Weights | None,
        *,
        serving: bool = False,
        in_place: bool = False,
        revive: Callable[[], object] | None = None,
        before_cache: Callable[[], object] = lambda: None,
    ) -> Moved:
        """Brings shards to the version of `weights`, awake: wakes the weights of those that sleep, syncs all in one
        session, and wakes their KV caches. Shards that are not routed yet are routed by `activate` afterwards. One that
        cannot wake sleeps on; the culprits of a failed session are quarantined, and the others are synced again. Shards
        that slept in place, or that `revive` can rebuild, are not quarantined where all of them fail together, but
        once where they died and can be rebuilt: engines that a session itself ends would be built for ever.

        Args:
            weights: None where the shards have theirs.
            serving: Whether they serve meanwhile: none is woken, and windows are staged where a second copy fits.
            in_place: Whether they slept in place; see `wake` for its errors.
            revive: Called where no shard is left, to rebuild some.
            before_cache: Called when all have their weights, before the KV caches take their memory.

        Returns which shards have the version. Raises what the last session raised: it failed through no shard's fault,
        and shards that this woke sleep as before unless in place; or no shard is left of those that are routed.
        """
        wanted, failed = self._check(shards), dict[int, str]()
        report = None
        woken = wanted if serving else self._woken(wanted, "weights", failed, in_place)
        if weights is not None:
            try:
                report = self._synced(woken, weights, serving, in_place, revive)
            except Exception:
                left = self.healthy(woken)
                if left and not serving and not in_place:
                    self.sleep(left)
                if left or serving or in_place:
                    raise
        failed |= self.failures(woken)
        have = self.healthy(woken)
        if have and not serving:
            before_cache()
            have = self._woken(have, "kv_cache", failed, in_place)
        return Moved(have, failed, report)

    def _synced(
        self,
        wanted: Sequence[int],
        weights: Weights,
        serving: bool,
        in_place: bool,
        revive: Callable[[], object] | None,
    ) -> SyncReport | None:
        """Syncs shards until a session succeeds, without the culprits of those that failed. None if no shard is
        left.
        """
        failure: Exception | None = None
        revived = False
        while True:
            if revive is not None and not self.healthy(wanted):
                revive()
                revived = True
            shards = self.healthy(wanted)
            if not shards:
                break
            version, targets = weights.version(), self.targets(shards, recompute_kv=weights.recompute_kv)
            try:
                report = sync(weights, targets, version, stages=serving)
            except Exception as error:
                if isinstance(error, CacheError) and weights.version() != version:
                    # Nothing was loaded yet.
                    continue
                lost = targets.culprits
                spares = in_place or (revive is not None and (revived or not targets.died))
                if not lost or (len(lost) == len(shards) and spares):
                    raise
                self.fail(lost)
                failure = error
                continue
            if serving or in_place:
                # They are routed already.
                weights.record.emit(VersionPublished(version, targets.shards))
            return report
        if failure is not None:
            raise failure
        return None

    def _woken(self, wanted: list[int], tag: str, failed: dict[int, str], in_place: bool) -> list[int]:
        """Wakes one tag on those that lack it; all without those that could not."""
        asleep = [shard for shard in wanted if self.state(shard) in (ShardState.ASLEEP, ShardState.WAKING)]
        if not asleep:
            return wanted
        try:
            self.wake(asleep, [tag], in_place=in_place)
        except WorkerError as error:
            lost = [shard for shard in wanted if self.state(shard) in (ShardState.ASLEEP, ShardState.FAILED)]
            if in_place or not lost:
                raise
            failed |= dict.fromkeys(lost, f"{tag} did not wake: {error}")
            return [shard for shard in wanted if shard not in lost]
        return wanted

    def activate(self, shards: Iterable[int]) -> int:
        """Shards take requests again; the router's generation number. Raises ShardStateError: a shard is quarantined;
        WorkerError: a shard sleeps or has no weights.
        """
        wanted = self._check(shards)
        if bad := self.failures(wanted):
            raise ShardStateError(f"shards {list(bad)} are quarantined and take no requests: {'; '.join(bad.values())}")
        versions = self.accept(wanted)
        for version in sorted(set(versions)):
            self._dispatcher.record.emit(
                VersionPublished(version, tuple(s for s, v in zip(wanted, versions, strict=True) if v == version))
            )
        self._dispatcher.allow_routing(wanted)
        generation: int = self._dispatch(lambda: self._dispatcher.route(wanted, versions))
        for shard in wanted:
            self.shards[shard].state = ShardState.ACTIVE
        return generation

    def activate_healthy(self, shards: Iterable[int]) -> int:
        """Routes to the healthy ones of the shards again; returns the router's generation number."""
        return self.activate(self.call_healthy("accept", shards))

    def accept(self, shards: Sequence[int]) -> list[int]:
        """Shards that are awake take requests again, once they are routed; the versions that they serve. Raises
        WorkerError: a shard sleeps or has no weights.
        """
        versions: list[int] = self.call(shards, "accept")
        for shard, version in zip(shards, versions, strict=True):
            self.shards[shard].has(version)
        return versions

    def set_routable(self, shard: int, active: bool) -> None:
        """Routes an accepting shard, or takes it out of routing, without waiting: both happen on the dispatcher's loop
        in the order of the calls. `drain` afterwards ends the requests of one that was taken out.
        """

        async def change() -> None:
            if not active:
                self._dispatcher.unroute([shard])
            elif shard not in self._dispatcher.failed:
                self._dispatcher.route([shard], [self.shards[shard].version])

        if active:
            self.shards[shard].state = ShardState.ACTIVE
            self._dispatcher.allow_routing([shard])
        else:
            self._dispatcher.stop_routing([shard])
        self._start_on_loop(change())
