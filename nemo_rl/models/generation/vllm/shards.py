"""Takes shards out of generation and returns them, singly or together, at any moment.

Each shard has one state; moves are idempotent and one at a time. A shard leaves in the order unroute, end its requests,
verify that it is idle, sleep, verify that the memory is free; it returns by wake weights, (the caller's sync), wake the
KV cache, publish its version, route. Invariants: no engine sleeps with a request; no shard without current weights is
routed; a failing shard is quarantined and the others are unaffected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_calls import (
    WorkerDiedError,
    WorkerError,
    WorkerIdentity,
    WorkerTimeoutError,
    wait_for_workers,
)
from nemo_rl.models.generation.interfaces import ShardStateError, WakeError
from nemo_rl.models.generation.vllm.dispatch import Dispatcher
from nemo_rl.models.generation.vllm.request_state import is_engine_death
from nemo_rl.utils.record_events import ShardSlept, ShardWoken, VersionPublished

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


class ShardState(Enum):
    """Where a shard is on its way."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    WAKING = "waking"
    ASLEEP = "asleep"
    FAILED = "failed"


class ElasticShards:
    """The shards of one generation backend.

    Args:
        workers: Generation actors, one per shard.
        dispatcher: Routes requests; used only on its own loop.
        on_loop: Runs a coroutine there and waits.
        timeout_s: Deadline of each step of a move.
        start: Starts or restarts the engine of a shard and waits until it is up.
        built: Whether the engines are up already, awake and routed.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle[object]],
        identities: Sequence[WorkerIdentity],
        dispatcher: Dispatcher,
        on_loop: Callable[[Coroutine[object, object, object]], Any],
        *,
        timeout_s: float = 180.0,
        start: Callable[[int], None] | None = None,
        built: bool = True,
    ) -> None:
        self._workers = workers
        self._identities = identities
        self._dispatcher = dispatcher
        self._on_loop = on_loop
        self._timeout_s = timeout_s
        self._start = start
        self._unbuilt = set() if built else set(range(len(workers)))
        self._state = dict.fromkeys(range(len(workers)), ShardState.ACTIVE if built else ShardState.ASLEEP)
        self._served = dict.fromkeys(range(len(workers)), 0)

    def state(self, shard: int) -> ShardState:
        """Where a shard is."""
        return ShardState.FAILED if shard in self._dispatcher.failed else self._state[shard]

    def having(self, *states: ShardState) -> list[int]:
        """The shards in any of these states, in order."""
        return [shard for shard in self._state if self.state(shard) in states]

    def healthy(self) -> list[int]:
        """Shards that are not quarantined."""
        return [shard for shard in self._state if shard not in self._dispatcher.failed]

    def call(
        self, shards: Sequence[int], method: str, *, timeout_s: float | None = None, **kwargs: object
    ) -> list[Any]:
        """Calls a method of these shards' workers. Raises WorkerError: a worker raised, died or hung."""
        refs = [getattr(self._workers[shard], method).remote(**kwargs) for shard in shards]
        return wait_for_workers(
            refs,
            [self._identities[shard] for shard in shards],
            what=f"generation.{method}",
            timeout_s=timeout_s or self._timeout_s,
        )

    def call_healthy(self, method: str, shards: Iterable[int] | None = None, **kwargs: object) -> dict[int, Any]:
        """Calls a method of the shards (all by default) that are not quarantined. One that is gone or does not answer
        is quarantined and left out of the result. Raises WorkerError: a live worker raised, or none is left.
        """
        deadline = time.monotonic() + self._timeout_s
        called = [shard for shard in self.healthy() if shards is None or shard in shards]
        refs = {shard: getattr(self._workers[shard], method).remote(**kwargs) for shard in called}
        answers: dict[int, object] = {}
        lost: WorkerError | None = None
        raised: WorkerError | None = None
        for shard, ref in refs.items():
            who, left = [self._identities[shard]], max(1.0, deadline - time.monotonic())
            try:
                answers[shard] = wait_for_workers([ref], who, what=f"generation.{method}", timeout_s=left)[0]
            except WorkerError as error:
                if is_lost(error):
                    lost = error
                    self.quarantine([shard], first_line(error))
                else:
                    raised = raised or error
        if raised is not None:
            raise raised
        if lost is not None and not self.healthy():
            raise lost
        return answers

    def _check(self, shards: Iterable[int]) -> list[int]:
        wanted = sorted(set(shards))
        unknown = [shard for shard in wanted if shard not in self._state]
        if unknown:
            raise ShardStateError(f"shards {unknown} do not exist; there are {len(self._state)}")
        return wanted

    def quarantine(self, shards: Iterable[int], reason: str) -> None:
        """These shards take no request any more; theirs go on elsewhere."""

        async def now() -> None:
            for shard in shards:
                self._dispatcher.quarantine(shard, reason)

        self._on_loop(now())

    # -- built when they are needed -----------------------------------------------------------------------------------

    def ended(self, shard: int) -> None:
        """Marks a shard whose processes were killed; it sleeps until it is rebuilt."""
        self._unbuilt.add(shard)
        self._state[shard] = ShardState.ASLEEP

    def await_rebuild(self, rebuilds: bool) -> None:
        """Whether requests wait for lost shards from here on, or fail once all are lost."""

        async def change() -> None:
            self._dispatcher.await_rebuild(rebuilds)

        self._on_loop(change())

    def rebuilt(self, shard: int) -> None:
        """A quarantined shard has a new engine: awake, without weights, not routed."""
        self._state[shard] = ShardState.INACTIVE
        self._end_quarantine(shard)

    def _end_quarantine(self, shard: int) -> None:
        async def revive() -> None:
            self._dispatcher.revive(shard)

        self._on_loop(revive())

    def build(self, shards: Iterable[int]) -> list[int]:
        """Starts the engines of shards without one or with a failed one, awake, without weights, not routed; returns
        these shards. Raises WorkerError: an engine did not start; the shard is quarantined.
        """
        built = []
        for shard in self._check(shards):
            if self._start is None or (shard not in self._unbuilt and self.state(shard) is not ShardState.FAILED):
                continue
            self._unbuilt.add(shard)
            self._end_quarantine(shard)
            try:
                self._start(shard)
            except WorkerError as error:
                self.quarantine([shard], f"its engine did not start: {error}")
                raise
            self._unbuilt.discard(shard)
            self._state[shard] = ShardState.INACTIVE
            built.append(shard)
        return built

    # -- away ---------------------------------------------------------------------------------------------------------

    def deactivate(self, shards: Iterable[int]) -> int:
        """Shards take no new request; running ones go on elsewhere with what they have. The router's generation number.
        Raises ShardStateError: a request did not end; the shard is quarantined.
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
                    self._state[shard] = ShardState.INACTIVE
            return generation

        generation: int = self._on_loop(leave())
        return generation

    async def _leave(self, shard: int) -> None:
        await asyncio.wait_for(_answer(self._workers[shard].leave.remote(self._timeout_s / 2)), self._timeout_s)
        await self._dispatcher.until_idle([shard], self._timeout_s)

    def sleep(self, shards: Iterable[int], level: int | None = None) -> dict[int, dict[str, int]]:
        """Takes shards away and gives their memory back; bytes in use before and after, per shard that was awake.
        Raises WorkerError: a shard did not sleep or its memory did not come back; it is quarantined.
        """
        wanted = self._check(shards)
        self.deactivate(wanted)
        awake = [shard for shard in wanted if self.state(shard) in (ShardState.INACTIVE, ShardState.WAKING)]
        reports: dict[int, dict[str, int]] = {}

        def slept(shard: int, report: dict[str, int]) -> None:
            reports[shard] = report
            self._state[shard] = ShardState.ASLEEP
            self._dispatcher.record.emit(ShardSlept(shard, level or 2, max(0, report["before"] - report["after"])))

        self._each(awake, "sleep", slept, level=level)
        return reports

    def _each(self, shards: Sequence[int], method: str, done: Callable[[int, Any], None], **kwargs: object) -> None:
        """Calls shards at the same time; those that fail are quarantined, and the first failure is raised once all have
        ended.
        """
        refs = {shard: getattr(self._workers[shard], method).remote(**kwargs) for shard in shards}
        failure: WorkerError | None = None
        for shard, ref in refs.items():
            try:
                done(
                    shard,
                    wait_for_workers(
                        [ref], [self._identities[shard]], what=f"generation.{method}", timeout_s=self._timeout_s
                    )[0],
                )
            except WorkerError as error:
                failure = failure or error
                if isinstance(error.__cause__, WakeError):
                    self._state[shard] = ShardState.ASLEEP
                    logger.error("shard=%s wake=failed reason=%s", self._identities[shard], error.__cause__)
                else:
                    self.quarantine([shard], f"{method} failed: {error}")
        if failure is not None:
            raise failure

    # -- and back -----------------------------------------------------------------------------------------------------

    def wake(self, shards: Iterable[int], tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Makes the memory behind `tags` resident; the shards take no requests yet. Raises WorkerError: a shard could
        not wake (its cause is a `WakeError`: it sleeps as before), or died.
        """
        wanted = [shard for shard in self._check(shards) if self.state(shard) in (ShardState.ASLEEP, ShardState.WAKING)]

        def woken(shard: int, _: object) -> None:
            if self._state[shard] == ShardState.ASLEEP:
                self._dispatcher.record.emit(ShardWoken(shard))
            self._state[shard] = ShardState.WAKING if "kv_cache" not in tags else ShardState.INACTIVE

        self._each(wanted, "wake_up", woken, tags=list(tags))

    def activate(self, shards: Iterable[int]) -> int:
        """Shards take requests again; the router's generation number. Raises ShardStateError: a shard is quarantined;
        WorkerError: a shard sleeps or has no weights.
        """
        wanted = self._check(shards)
        bad = [shard for shard in wanted if self.state(shard) is ShardState.FAILED]
        if bad:
            raise ShardStateError(
                f"shards {bad} are quarantined and take no requests: "
                f"{'; '.join(self._dispatcher.failed[shard] for shard in bad)}"
            )
        versions = self.accept(wanted)
        for version in sorted(set(versions)):
            self._dispatcher.record.emit(
                VersionPublished(version, tuple(s for s, v in zip(wanted, versions, strict=True) if v == version))
            )

        async def route() -> int:
            self._dispatcher.allow_routing(wanted)
            return self._dispatcher.route(wanted, versions)

        generation: int = self._on_loop(route())
        for shard in wanted:
            self._state[shard] = ShardState.ACTIVE
        return generation

    def accept(self, shards: Sequence[int]) -> list[int]:
        """Shards that are awake take requests again, once they are routed; the versions that they serve. Raises
        WorkerError: a shard sleeps or has no weights.
        """
        versions: list[int] = self.call(shards, "accept")
        self._served |= dict(zip(shards, versions, strict=True))
        return versions

    def set_routable(
        self, shard: int, active: bool, start_on_loop: Callable[[Coroutine[object, object, object]], object]
    ) -> None:
        """Routes an accepting shard, or takes it out of routing, without waiting: both happen on the dispatcher's loop
        in the order of the calls. `deactivate` afterwards ends the requests of one that was taken out.
        """

        async def change() -> None:
            if not active:
                self._dispatcher.unroute([shard])
            elif shard not in self._dispatcher.failed:
                self._dispatcher.route([shard], [self._served[shard]])

        if active:
            self._state[shard] = ShardState.ACTIVE
            self._dispatcher.allow_routing([shard])
        else:
            self._dispatcher.stop_routing([shard])
        start_on_loop(change())


async def _answer(ref: ObjectRef[object]) -> object:
    return await ref


def is_lost(error: WorkerError) -> bool:
    """Whether a failure means that the shard is gone: its process or engine died, or it does not answer."""
    return isinstance(error, (WorkerDiedError, WorkerTimeoutError)) or is_engine_death(error.__cause__)
