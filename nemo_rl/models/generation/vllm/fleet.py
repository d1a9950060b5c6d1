"""The engines of one generation backend: the one place that knows where each shard is and moves it.

Runs with slots of their own and lent pools move shards by the same calls. Moves are idempotent. A shard leaves in the
order unroute, end its requests, verify that it is idle, sleep, verify that the memory is free; it returns by wake
weights, (the caller's sync), wake the KV cache, publish its version, route. Invariants: no engine sleeps with a
request; no shard without current weights is routed; a failing shard is quarantined and the others are unaffected; one
build at a time per shard; an engine that does not start is tried a few times and then given up; one that keeps more and
more memory while it sleeps is rebuilt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_calls import WorkerError, WorkerIdentity, wait_for_workers
from nemo_rl.models.generation.interfaces import ShardStateError, WakeError
from nemo_rl.models.generation.vllm.dispatch import Dispatcher
from nemo_rl.models.generation.vllm.loops import answer_of
from nemo_rl.models.generation.vllm.shard_state import Shard, ShardState, is_lost
from nemo_rl.models.generation.vllm.targets import ShardTargets, Target
from nemo_rl.utils.record_events import EngineOutgrown, ShardSlept, ShardWoken, VersionPublished

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

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
        shards: What is known of each shard, by number.
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

    # -- what is known ------------------------------------------------------------------------------------------------

    def state(self, shard: int) -> ShardState:
        """Where a shard is."""
        return ShardState.FAILED if shard in self._dispatcher.failed else self.shards[shard].state

    def having(self, *states: ShardState) -> list[int]:
        """The shards in any of these states, in order."""
        return [shard for shard in self.shards if self.state(shard) in states]

    def healthy(self, shards: Iterable[int] | None = None) -> list[int]:
        """Those of the shards, of all by default, that are not quarantined."""
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
        chosen = [Target(shard, self.workers[shard], self.identities[shard], self.shards[shard]) for shard in shards]
        return ShardTargets(chosen, self.state, recompute_kv=recompute_kv)

    # -- failed and rebuilt -------------------------------------------------------------------------------------------

    def fail(self, reasons: Mapping[int, str]) -> None:
        """Quarantines shards: they take no request any more, and theirs go on elsewhere."""
        for shard, reason in reasons.items():
            self._dispatch(lambda shard=shard, reason=reason: self._dispatcher.quarantine(shard, reason))

    def failures(self, shards: Iterable[int]) -> dict[int, str]:
        """Those of the shards that are quarantined, and why."""
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
        """Shards take no new request; running ones go on elsewhere with what they have. The router's generation number.
        One whose requests do not end is quarantined.
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
        """Those of the shards that are not quarantined take requests again; the router's generation number."""
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
