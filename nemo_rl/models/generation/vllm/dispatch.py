"""Sends requests from an event loop to shards and returns results, while shards come and go.

Requests for a shard that arrive together are one call, and a long poll per shard fetches results, so the cost per
sample is small. The router has the active shards with a generation number and each one's outstanding work; choosing a
shard and booking are one step. Invariants: only active shards are chosen; outstanding work is never negative; a booking
is released exactly once; a request on a shard that leaves, hangs or dies continues on another with its tokens; a shard
that joins takes its even part of the requests under way; every wait has a deadline. `DetachedGenerator` sends requests
from another process than the one that owns the engines.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from nemo_rl.config.errors import UserError, first_line
from nemo_rl.models.generation.interfaces import (
    REQUEST_TIMEOUT_VARIABLE,
    GenerationError,
    GenerationRequest,
    GenerationResult,
    NewTokens,
    OnTokens,
    ShardPreemptedError,
    ShardStateError,
)
from nemo_rl.models.generation.vllm.request_state import OnPreempt, RequestFailure, ResumableRequest
from nemo_rl.utils.record import NullRecord, Record
from nemo_rl.utils.record_events import RequestFinished, RequestSubmitted, ShardRouted, ShardUnrouted

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

RouterPolicy = Literal["least_outstanding_tokens", "round_robin"]


class NoActiveShardError(UserError, RuntimeError):
    """No shard takes requests at present."""


class Router:
    """Books requests on active shards. `shards`: number of data-parallel shards; all are active at first. `policy`:
    `least_outstanding_tokens` or `round_robin`.
    """

    def __init__(self, shards: int, policy: RouterPolicy = "least_outstanding_tokens") -> None:
        self._policy = policy
        self._outstanding = dict.fromkeys(range(shards), 0)
        self._requests = dict.fromkeys(range(shards), 0)
        self._active = set(range(shards))
        self._closed: set[int] = set()
        self._next = 0
        self.generation = 0

    @property
    def active(self) -> frozenset[int]:
        """Shards that take requests."""
        return frozenset(self._active)

    def outstanding(self, shard: int) -> int:
        """Token budget booked on a shard and not yet finished."""
        return self._outstanding[shard]

    def requests(self, shard: int) -> int:
        """Requests booked on a shard and not yet finished."""
        return self._requests[shard]

    def set_active(self, shards: Iterable[int]) -> int:
        """Replaces the active set, without closed shards; the new generation number. Raises ValueError: a shard does
        not exist.
        """
        wanted = set(shards)
        unknown = wanted - set(self._outstanding)
        if unknown:
            raise ValueError(f"shards {sorted(unknown)} do not exist; there are {len(self._outstanding)}")
        wanted -= self._closed
        if wanted != self._active:
            self._active = wanted
            self.generation += 1
        return self.generation

    def close(self, shards: Iterable[int]) -> int:
        """Shards leave the active set and stay out of it until `reopen`; the new generation number."""
        self._closed |= set(shards)
        return self.set_active(self._active)

    def reopen(self, shards: Iterable[int]) -> None:
        """`set_active` may name these shards again."""
        self._closed -= set(shards)

    def reserve(self, tokens: int) -> int:
        """Chooses an active shard and reserves `tokens` of work on it. Raises NoActiveShardError: the active set is
        empty.
        """
        if not self._active:
            raise NoActiveShardError("no shard is active")
        if self._policy == "round_robin":
            ordered = sorted(self._active)
            shard = next((s for s in ordered if s >= self._next), ordered[0])
            self._next = shard + 1
        else:
            shard = min(self._active, key=lambda s: (self._outstanding[s], self._requests[s], s))
        self._outstanding[shard] += tokens
        self._requests[shard] += 1
        return shard

    def finish(self, shard: int, tokens: int) -> None:
        """Takes finished (or failed) work off a shard. Raises ValueError: more is finished than was booked."""
        if self._requests[shard] < 1 or self._outstanding[shard] < tokens:
            raise ValueError(f"shard {shard}: {tokens} tokens finished, {self._outstanding[shard]} were booked")
        self._outstanding[shard] -= tokens
        self._requests[shard] -= 1


_SLOWER = 0.25
"""At good speed a token takes so much longer than one of a request that runs alone."""
_FEWEST, _NEWEST = 256, 1024
"""Requests that a figure is of, at least and at most."""
_SHORTEST = 16
"""Tokens that a request must have drawn: those of shorter ones say more of calls than of the engine."""
_TELLS = 1.5
"""The worst candidate must fit so many times worse than the best, or requests ran under too equal conditions."""
_CLOSE = 1.1
"""Candidates fit as well as the best one up to so many times its misfit; the smallest of them counts."""
_CANDIDATES = np.unique(np.geomspace(1, 1024, 41).astype(int))
"""Requests at once at good speed."""

Times = NDArray[np.float64]


@dataclass(slots=True)
class _Load:
    """Requests on one shard: how many run, and for each candidate the time until `at` that one of them had."""

    running: int = 0
    at: float = 0.0
    had_s: Times = field(default_factory=lambda: np.zeros(len(_CANDIDATES)))

    def change(self, now: float, by: int) -> Times:
        self.had_s = self.had_s + (now - self.at) / (1 + _SLOWER * self.running / _CANDIDATES)
        self.at, self.running = now, self.running + by
        return self.had_s


class BatchMeter:
    """Watches the requests of equal engines, on one thread; any thread may ask for the figure.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[int, _Load] = {}
        self._seen: deque[Times] = deque(maxlen=_NEWEST)

    def begin(self, shard: int) -> Times:
        """A request goes to a shard. Returns what `end` needs to know of that moment."""
        now = self._clock()
        return self._loads.setdefault(shard, _Load(at=now)).change(now, 1)

    def end(self, shard: int, began: Times, tokens: int) -> None:
        """A request ended on the shard with `tokens` new tokens; requests with few tokens are not counted."""
        had_s = self._loads[shard].change(self._clock(), -1) - began
        if tokens >= _SHORTEST and had_s.min() > 0:
            self._seen.append(np.log(had_s / tokens))

    def good_batch(self) -> int | None:
        """Number of concurrent requests, from 1 to 1,024, at which a token takes 1.25 times as long as alone; None with
        too few observations.
        """
        if len(self._seen) < _FEWEST:
            return None
        paces = np.array(list(self._seen))
        # Medians, as a request may have stood still while its engine was refitted.
        misfit = np.median(np.abs(paces - np.median(paces, axis=0)), axis=0)
        if misfit.max() < _TELLS * misfit.min() or misfit.max() == 0:
            return None
        # Engines that are woken in vain cost less than samples that crowd on one of them.
        return int(_CANDIDATES[np.argmax(misfit <= _CLOSE * misfit.min())])


T = TypeVar("T")

# Every request has a deadline of its own; this one only ends a wait for rollouts whose loop hangs.
LOOP_TIMEOUT_S = 6 * 3600.0


async def answer_of(ref: ObjectRef[object]) -> Any:
    """An actor's answer as a coroutine, so that it can have a deadline."""
    return await ref


def wait_on_loop(work: Coroutine[object, object, T], loop: asyncio.AbstractEventLoop, timeout_s: float) -> T:
    """Runs a coroutine on a dispatcher's loop, from another thread, and waits. Raises GenerationError: it has not ended
    after `timeout_s`, and was cancelled.
    """
    name = getattr(work, "__qualname__", type(work).__name__)
    future = asyncio.run_coroutine_threadsafe(work, loop)
    done, _ = wait([future], timeout=timeout_s)
    if not done:
        future.cancel()
        raise GenerationError(
            f"the loop that dispatches requests did not finish {name} within {timeout_s:.0f} s: it is blocked, or what "
            "it waits for hangs"
        )
    return future.result()


logger = logging.getLogger(__name__)

_POLL_S = 20.0
_GATHER_S = 0.03
_HANG_S = 120.0
_FOLLOW_S = 60.0


@dataclass
class _Pending:
    """A request under way."""

    answer: asyncio.Future[GenerationResult]
    shard: int
    tokens: int
    on_new: Callable[[NewTokens], None]


class Dispatcher:
    """Runs on one event loop; every method but `stop_routing` and `allow_routing` must be called there.

    Args:
        workers: Generation actors, one per shard.
        on_preempt: Whether a request keeps its tokens when its shard leaves.
        hang_s: Seconds after which an engine that does not answer counts as hung.
        poll_s: Seconds that a shard holds an empty poll.
        on_failure: Called with a quarantined shard and the reason; must not block.

    Attributes:
        lends_shards: Whether a scheduler takes shards away and returns them: requests then wait without deadline while
            all are away.
        rebuilds: Whether lost shards are rebuilt while requests wait: a request then waits until its deadline even if
            all are lost. Set by `await_rebuild`.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle[object]],
        router: Router,
        names: Sequence[str],
        *,
        on_preempt: OnPreempt = "continue",
        record: Record | None = None,
        hang_s: float = _HANG_S,
        poll_s: float = _POLL_S,
        on_failure: Callable[[int, str], None] = lambda shard, reason: None,
    ) -> None:
        self._workers = workers
        self.router, self.meter = router, BatchMeter()
        self._names = names
        self._on_preempt: OnPreempt = on_preempt
        self.record: Record = record or NullRecord()
        self.hang_s, self.poll_s, self.on_failure = hang_s, poll_s, on_failure
        self.lends_shards = self.rebuilds = False
        self._client = uuid.uuid4().hex
        self._pending: dict[str, _Pending] = {}
        self._under_way: set[str] = set()
        self._outgoing: dict[int, list[GenerationRequest]] = {}
        self._pollers: dict[int, asyncio.Task[None]] = {}
        self._moves: set[asyncio.Task[None]] = set()
        self._routed = asyncio.Event()
        # Another thread that stops routing must see a request either booked and recorded, or neither.
        self._booking = threading.Lock()
        self._last_result: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        self.preempted = 0
        if router.active:
            self._routed.set()

    @property
    def under_way(self) -> int:
        """Requests that run, or wait for a shard; from any thread."""
        return len(self._under_way)

    async def run(
        self, request: GenerationRequest, timeout_s: float, on_tokens: OnTokens | None = None
    ) -> GenerationResult:
        """Serves one request, on as many shards as it takes.

        Args:
            timeout_s: How long it waits for a shard, and for its result while its shard finishes no other request:
                requests queue in the engine, and a long queue that moves is no failure.
            on_tokens: Called with tokens as they are drawn; those that it did not get are the end of the result. Never
                called where a token may be taken back (`redo_turn`) or its decisions are recorded.

        Raises GenerationError: the request failed, no shard is left, or there was neither a shard nor a result in time;
        ValueError: a request of this id is under way.
        """
        if request.request_id in self._under_way:
            raise ValueError(f"request {request.request_id} is already under way; ids are unique within a run")
        streams = on_tokens is not None and self._on_preempt == "continue" and request.record_from is None
        way = ResumableRequest(replace(request, streams=streams), self._on_preempt)

        def pass_on(new: NewTokens) -> None:
            way.extend(new)
            if on_tokens is not None:
                on_tokens(new.token_ids, new.logprobs)

        self._under_way.add(request.request_id)
        try:
            while True:
                try:
                    result = await self._serve(way.next_request(), timeout_s, pass_on)
                except ShardPreemptedError:
                    way.cut(None)
                    continue
                if result.finish_reason != "abort":
                    return way.finish(result)
                way.cut(result)
                self.preempted += 1
                if way.complete:
                    return way.as_it_is(result.shard)
        finally:
            self._under_way.discard(request.request_id)

    async def _serve(
        self, request: GenerationRequest, timeout_s: float, on_new: Callable[[NewTokens], None]
    ) -> GenerationResult:
        loop = asyncio.get_running_loop()
        tokens = len(request.prompt_ids) + request.max_new_tokens
        shard = await self._booked(request, tokens, timeout_s)
        began = self.meter.begin(shard)
        answer: asyncio.Future[GenerationResult] = loop.create_future()
        self._pending[request.request_id] = _Pending(answer, shard, tokens, on_new)
        if shard not in self._outgoing:
            self._outgoing[shard] = []
            loop.call_soon(lambda: asyncio.ensure_future(self._send(shard)))
        self._outgoing[shard].append(request)
        outcome, count = "failed", 0
        try:
            result = await self._result(answer, shard, timeout_s)
            outcome, count = ("preempted" if result.finish_reason == "abort" else "done"), len(result.token_ids)
            return result
        except ShardPreemptedError:
            outcome = "preempted"
            raise
        except TimeoutError as error:
            self._cancel(shard, request.request_id)
            raise GenerationError(
                f"{self._names[shard]}: request {request.request_id} has no result after {timeout_s:.0f} s, "
                "in which the shard finished nothing else; "
                f"where single responses take longer, set {REQUEST_TIMEOUT_VARIABLE}"
            ) from error
        except asyncio.CancelledError:
            outcome = "aborted"
            self._cancel(shard, request.request_id)
            raise
        finally:
            self._pending.pop(request.request_id, None)
            self.router.finish(shard, tokens)
            self.meter.end(shard, began, count)
            self.record.emit(RequestFinished(request.request_id, shard, outcome, count))

    async def _result(self, answer: asyncio.Future[GenerationResult], shard: int, timeout_s: float) -> GenerationResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not answer.done():
            left = max(began, self._last_result.get(shard, 0.0)) + timeout_s - loop.time()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([answer], timeout=left)
        return answer.result()

    async def _booked(self, request: GenerationRequest, tokens: int, timeout_s: float) -> int:
        sample = request.sample_id or request.request_id.partition("+")[0]
        while True:
            await self._until_routed(request, timeout_s)
            with self._booking:
                try:
                    shard = self.router.reserve(tokens)
                except NoActiveShardError:
                    continue
                self.record.emit(RequestSubmitted(request.request_id, shard, sample))
            return shard

    async def _until_routed(self, request: GenerationRequest, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self.router.active:
            if self._nobody_comes_back():
                raise self._none_left(request)
            left = deadline - asyncio.get_running_loop().time()
            # Another thread may have stopped routing a moment ago.
            self._routed.clear()
            try:
                await asyncio.wait_for(self._routed.wait(), None if self.lends_shards else max(0.0, left))
            except TimeoutError as error:
                if len(self.failed) == len(self._workers):
                    raise self._none_left(request) from error
                raise GenerationError(
                    f"request {request.request_id}: no shard took requests within {timeout_s:.0f} s; all of "
                    "them sleep or left"
                ) from error
            if self.lends_shards:
                # Shards that were woken together are routed one after the other.
                await asyncio.sleep(_GATHER_S)

    def _nobody_comes_back(self) -> bool:
        return len(self.failed) == len(self._workers) and not self.lends_shards and not self.rebuilds

    def _none_left(self, request: GenerationRequest) -> GenerationError:
        name = request.request_id.partition("+")[0]
        reasons = "; ".join(
            f"{self._names[shard]} is gone while request {name} ran: {why}" for shard, why in self.failed.items()
        )
        return GenerationError(f"no shard is left to serve: {reasons}")

    def _cancel(self, shard: int, request_id: str) -> None:
        self._take_back(shard, {request_id})
        self._workers[shard].cancel.remote([request_id])

    def _take_back(self, shard: int, request_ids: set[str]) -> set[str]:
        """Withdraws the requests that were not handed to the shard yet; returns them."""
        waiting = self._outgoing.get(shard, [])
        if waiting:
            self._outgoing[shard] = [request for request in waiting if request.request_id not in request_ids]
        return {request.request_id for request in waiting} & request_ids

    async def _send(self, shard: int) -> None:
        requests = self._outgoing.pop(shard, [])
        if not requests:
            return
        if shard not in self._pollers or self._pollers[shard].done():
            self._pollers[shard] = asyncio.create_task(self._poll(shard))
        try:
            await self._workers[shard].submit.remote(self._client, requests)
        except RayError as error:
            self.quarantine(shard, first_line(error))

    async def _poll(self, shard: int) -> None:
        worker = self._workers[shard]
        while any(pending.shard == shard for pending in self._pending.values()):
            try:
                results = await asyncio.wait_for(
                    answer_of(worker.collect.remote(self._client, self.poll_s)), self.poll_s + self.hang_s
                )
                if not results:
                    await asyncio.wait_for(answer_of(worker.check_engine.remote(self.hang_s)), 2 * self.hang_s)
            except TimeoutError:
                self.quarantine(shard, f"it hangs: no answer within {self.hang_s:.0f} s")
                return
            except RayError as error:
                self.quarantine(shard, first_line(error))
                return
            for result in results:
                self._deliver(shard, result)

    def _deliver(self, shard: int, result: GenerationResult | NewTokens | RequestFailure) -> None:
        pending = self._pending.get(result.request_id)
        if pending is None or pending.shard != shard:
            return
        if isinstance(result, RequestFailure) and result.engine_dead:
            self.quarantine(shard, result.message)
            return
        self._last_result[shard] = asyncio.get_running_loop().time()
        if isinstance(result, NewTokens):
            pending.on_new(result)
            return
        # Taken out here rather than when the waiter wakes, so that the poller sees at once whether anything is left.
        del self._pending[result.request_id]
        if pending.answer.done():
            return
        if isinstance(result, RequestFailure):
            pending.answer.set_exception(
                GenerationError(f"{self._names[shard]}: request {result.request_id} failed: {result.message}")
            )
        else:
            pending.answer.set_result(result)

    # -- shards come and go -------------------------------------------------------------------------------------------

    def route(self, shards: Sequence[int], versions: Sequence[int | None] | None = None) -> int:
        """Lets shards take requests; returns the router's generation number. Recorded only if versions are given.
        Raises ShardStateError: a shard is quarantined.
        """
        bad = [shard for shard in shards if shard in self.failed]
        if bad:
            raise ShardStateError(
                f"shards {bad} are quarantined and take no requests: {'; '.join(self.failed[shard] for shard in bad)}"
            )
        with self._booking:
            before = self.router.active
            generation = self.router.set_active(before | set(shards))
            new = self.router.active - before
        for shard, version in zip(shards, versions or [None] * len(shards), strict=True):
            if shard in new and version is not None:
                self.record.emit(ShardRouted(shard, generation, version))
        if self.router.active:
            self._routed.set()
        if new:
            self._even_out()
        return generation

    def _even_out(self) -> None:
        """Moves requests from shards that have more than their even part. A synchronous step hands out all of its
        requests at once: without this, a shard that comes a moment later has nothing to do until the next step.
        """
        held: dict[int, list[str]] = {shard: [] for shard in self.router.active}
        for request_id, pending in self._pending.items():
            if pending.shard in held:
                held[pending.shard].append(request_id)
        part = -(-sum(map(len, held.values())) // len(held))
        for shard, request_ids in held.items():
            # The youngest have the fewest tokens, which the other shard has to compute again.
            surplus = set(request_ids[part:])
            if not surplus:
                continue
            unsent = self._take_back(shard, surplus)
            for request_id in unsent:
                self._preempt(request_id)
            if surplus - unsent:
                move = asyncio.create_task(self._release(shard, sorted(surplus - unsent)))
                self._moves.add(move)
                move.add_done_callback(self._moves.discard)

    async def _release(self, shard: int, request_ids: list[str]) -> None:
        try:
            await self._workers[shard].release.remote(request_ids)
        except RayError as error:
            self.quarantine(shard, first_line(error))

    def unroute(self, shards: Sequence[int]) -> int:
        """Stops routing to shards and moves requests that were not yet handed to them; returns the router's generation
        number.
        """
        gone = sorted(set(shards) & self.router.active)
        with self._booking:
            generation = self.router.set_active(self.router.active - set(shards))
        if not self.router.active:
            self._routed.clear()
        for shard in gone:
            self.record.emit(ShardUnrouted(shard, generation))
        for shard in shards:
            for request in self._outgoing.pop(shard, []):
                self._preempt(request.request_id)
        return generation

    def stop_routing(self, shards: Sequence[int]) -> None:
        """Closes shards to new requests until `allow_routing`, also for a `route` that is still on its way to the loop.
        From any thread; `unroute` on the loop does the rest.
        """
        with self._booking:
            self.router.close(shards)

    def allow_routing(self, shards: Sequence[int]) -> None:
        """The next `route` of these shards counts again. From any thread."""
        with self._booking:
            self.router.reopen(shards)

    async def until_idle(self, shards: Sequence[int], timeout_s: float) -> None:
        """Waits until no result of these shards is outstanding. Raises ShardStateError: results are outstanding after
        `timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while busy := sorted({pending.shard for pending in self._pending.values()} & set(shards)):
            if asyncio.get_running_loop().time() > deadline:
                raise ShardStateError(f"shards {busy} still owe results after {timeout_s:.0f} s")
            await asyncio.sleep(0.002)

    def quarantine(self, shard: int, reason: str) -> None:
        """A shard that hung, died or has wrong weights takes no request any more; its requests go on elsewhere."""
        if shard in self.failed:
            return
        self.failed[shard] = reason
        logger.error("shard=%s quarantined=%s", self._names[shard], reason)
        self.unroute([shard])
        self._tell_those_who_wait()
        for request_id in [name for name, pending in self._pending.items() if pending.shard == shard]:
            self._preempt(request_id)
        self.on_failure(shard, reason)

    def await_rebuild(self, rebuilds: bool) -> None:
        """From here on requests wait for lost shards, or fail where all are lost."""
        self.rebuilds = rebuilds
        self._tell_those_who_wait()

    def _tell_those_who_wait(self) -> None:
        if self._nobody_comes_back():
            self._routed.set()

    def revive(self, shard: int) -> None:
        """Ends the quarantine of a rebuilt shard; it takes requests once it is routed."""
        self.failed.pop(shard, None)
        poller = self._pollers.pop(shard, None)
        if poller is not None:
            poller.cancel()

    def _preempt(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(
                ShardPreemptedError(f"{self._names[pending.shard]} was taken away from request {request_id}")
            )

    async def close(self) -> None:
        """Stops polling and fails the remaining requests."""
        tasks = [*self._pollers.values(), *self._moves]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_id, pending in self._pending.items():
            if not pending.answer.done():
                pending.answer.set_exception(
                    GenerationError(f"generation was shut down while request {request_id} ran")
                )


class ServingShard(NamedTuple):
    """A shard that takes requests: how often its engine was started, and its actor."""

    started: int
    worker: ActorHandle[object]


class DetachedGenerator:
    """Continues prompts on shards that another process started. `record`: pickled with this, so events are collected
    where it runs.
    """

    def __init__(
        self,
        serving: Mapping[int, ServingShard],
        names: Sequence[str],
        policy: RouterPolicy,
        request_timeout_s: float,
        on_preempt: OnPreempt = "continue",
        record: Record | None = None,
    ) -> None:
        self._serving = dict(serving)
        self._workers: list[Any] = [serving[shard].worker if shard in serving else None for shard in range(len(names))]
        self._names = list(names)
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._on_preempt: OnPreempt = on_preempt
        self._record = record
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatcher: Dispatcher | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_loop": None, "_dispatcher": None}

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Dispatcher]:
        if self._loop is None or self._dispatcher is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="generation-dispatch", daemon=True).start()
            router = Router(len(self._workers), self._policy)
            router.set_active(self._serving)
            self._dispatcher = Dispatcher(
                self._workers, router, self._names, on_preempt=self._on_preempt, record=self._record
            )
        return self._loop, self._dispatcher

    def follow(self, serving: Mapping[int, ServingShard]) -> None:
        """Restricts requests to these shards; a rebuilt one is used again."""
        loop, dispatcher = self._started()
        known = self._serving
        changed = [shard for shard, now in serving.items() if shard not in known or known[shard].started != now.started]

        async def change() -> None:
            for shard in changed:
                self._workers[shard] = serving[shard].worker
                dispatcher.revive(shard)
            dispatcher.unroute([shard for shard in range(len(self._workers)) if shard not in serving])
            dispatcher.route([shard for shard in serving if shard not in dispatcher.failed])

        wait_on_loop(change(), loop, _FOLLOW_S)
        self._serving |= serving

    def lost(self) -> dict[int, str]:
        """The shards that were found dead here, and why."""
        return dict(self._dispatcher.failed) if self._dispatcher is not None else {}

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt; may be awaited on any event loop."""
        loop, dispatcher = self._started()
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(dispatcher.run(request, self._request_timeout_s), loop)
        )

    def run_on_dispatch_loop(self, work: Coroutine[object, object, T]) -> T:
        """Runs a coroutine on the dispatcher's loop and waits. Raises GenerationError: it hangs."""
        loop, _ = self._started()
        return wait_on_loop(work, loop, LOOP_TIMEOUT_S)
