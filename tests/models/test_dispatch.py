"""The dispatcher against shards made of a coroutine: whatever comes and goes, each request is answered once and with
every token in its order.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from nemo_rl.distributed.worker_groups import WorkerIdentity
from nemo_rl.models.generation.interfaces import (
    GenerationError,
    GenerationRequest,
    GenerationResult,
    NewTokens,
    ShardStateError,
    VersionSpan,
)
from nemo_rl.models.generation.vllm.dispatch import DetachedGenerator, Dispatcher, Router, ServingShard, wait_on_loop
from nemo_rl.models.generation.vllm.fleet import EngineFleet
from nemo_rl.models.generation.vllm.request_state import OnPreempt, RequestFailure
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import RequestFinished, RequestSubmitted, ShardRouted, ShardUnrouted
from tests.virtual_time import run_in_virtual_time


class Remote:
    """A method as Ray shows it."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*args, **kwargs))


class Shard:
    """Draws token n at position n of the whole response, one every millisecond; can leave, hang and die."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leaving = False
        self.dead = False
        self.hung = asyncio.Event()
        self.hung.set()
        self.served: list[str] = []
        self.cancelled: list[str] = []
        self.refused_while_leaving = 0
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop: dict[str, asyncio.Event] = {}

    def __getattr__(self, name: str) -> Remote:
        return Remote(object.__getattribute__(self, f"do_{name}"))

    async def _alive(self) -> None:
        await self.hung.wait()
        if self.dead:
            raise RayActorError()

    async def do_submit(self, client: str, requests: list[GenerationRequest]) -> None:
        await self._alive()
        for request in requests:
            if self.leaving:
                self.refused_while_leaving += 1
                self._results.put_nowait(GenerationResult(request.request_id, [], [], "abort", (), self.number))
                continue
            self.served.append(request.request_id)
            self._stop[request.request_id] = asyncio.Event()
            self._tasks[request.request_id] = asyncio.ensure_future(self._draw(request))

    async def _draw(self, request: GenerationRequest) -> None:
        drawn: list[int] = []
        first = len(request.prompt_ids) - 2
        while len(drawn) < request.max_new_tokens and not self._stop[request.request_id].is_set():
            await asyncio.sleep(0.001)
            await self.hung.wait()
            drawn.append(first + len(drawn))
            if request.streams:
                # The last tokens are still on their way when the shard leaves or dies.
                new, spans = drawn[-1:], (VersionSpan(self.number, 0, len(drawn)),)
                self._results.put_nowait(NewTokens(request.request_id, new, [-0.5 * t for t in new], spans))
        reason: Any = "length" if len(drawn) == request.max_new_tokens else "abort"
        spans = (VersionSpan(self.number, 0, len(drawn)),) if drawn else ()
        del self._tasks[request.request_id]
        self._results.put_nowait(
            GenerationResult(request.request_id, drawn, [-0.5 * t for t in drawn], reason, spans, self.number)
        )

    async def do_collect(self, client: str, max_wait_s: float) -> list[Any]:
        await self._alive()
        try:
            found = [await asyncio.wait_for(self._results.get(), max_wait_s)]
        except TimeoutError:
            found = []
        await self._alive()
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    async def do_check_engine(self, timeout_s: float) -> None:
        await self._alive()

    async def do_cancel(self, request_ids: list[str]) -> None:
        self.cancelled += request_ids

    async def do_release(self, request_ids: list[str]) -> None:
        await self._alive()
        for request_id in set(request_ids) & set(self._tasks):
            self._stop[request_id].set()

    async def do_leave(self, timeout_s: float) -> int:
        self.leaving = True
        tasks = list(self._tasks.values())
        for stop in self._stop.values():
            stop.set()
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)


def request(name: str, tokens: int = 20) -> GenerationRequest:
    return GenerationRequest(name, [7, 7], tokens, seed=1)


class Fleet:
    """A dispatcher over some shards."""

    def __init__(self, shards: int, **options: Any) -> None:
        self.shards = [Shard(number) for number in range(shards)]
        self.record = MemoryRecord()
        self.router = Router(shards)
        names = [f"shard {number}" for number in range(shards)]
        workers: Any = self.shards
        self.dispatcher = Dispatcher(
            workers, self.router, names, record=self.record, **({"hang_s": 30.0, "poll_s": 0.1} | options)
        )

    async def leave(self, *numbers: int) -> None:
        self.dispatcher.unroute(numbers)
        await asyncio.gather(*(self.shards[number].do_leave(1.0) for number in numbers))
        await self.dispatcher.until_idle(numbers, 30.0)

    def come_back(self, *numbers: int) -> None:
        for number in numbers:
            self.shards[number].leaving = False
        self.dispatcher.route(numbers, [0] * len(numbers))

    async def run(self, *requests: GenerationRequest, timeout_s: float = 60.0) -> list[Any]:
        return await asyncio.gather(*(self.dispatcher.run(one, timeout_s) for one in requests), return_exceptions=True)


def whole(result: Any, tokens: int = 20) -> bool:
    return (
        isinstance(result, GenerationResult)
        and result.token_ids == list(range(tokens))
        and result.logprobs == [-0.5 * t for t in range(tokens)]
    )


def test_a_leaving_shards_requests_go_on_elsewhere_from_where_they_were() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}") for n in range(8))))
        await asyncio.sleep(0.01)
        await fleet.leave(1)
        results = await running
        assert all(whole(result) for result in results)
        moved = [result for result in results if len(result.spans) == 2]
        assert moved and all([span.version for span in result.spans] == [1, 0] for result in moved)
        assert fleet.dispatcher.preempted == len(moved)
        assert [fleet.router.outstanding(shard) for shard in (0, 1)] == [0, 0]
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01])
def test_shards_that_join_take_their_even_part_of_what_runs(after_s: float) -> None:
    async def story() -> None:
        fleet = Fleet(3)
        await fleet.leave(1, 2)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 60) for n in range(30))))
        # Before the requests are booked, before they are handed over, and while they run.
        await asyncio.sleep(after_s)
        fleet.come_back(1)
        await asyncio.sleep(0.005)
        fleet.come_back(2)
        results = await running
        assert all(whole(result, 60) for result in results)
        last = [sum(result.shard == shard for result in results) for shard in range(3)]
        assert min(last) >= 9, last
        assert [fleet.router.outstanding(shard) for shard in range(3)] == [0, 0, 0]
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_requests_that_waited_for_lent_shards_begin_on_all_that_come_together() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        fleet.dispatcher.lends_shards = True
        await fleet.leave(0, 1)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 20) for n in range(10))))
        await asyncio.sleep(0.01)
        fleet.come_back(0)
        await asyncio.sleep(0.01)
        fleet.come_back(1)
        assert all(whole(result) for result in await running)
        assert [len(shard.served) for shard in fleet.shards] == [5, 5]
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_the_youngest_requests_move_and_a_shard_that_dies_meanwhile_loses_none() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        await fleet.leave(1)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 200) for n in range(8))))
        await asyncio.sleep(0.02)
        fleet.come_back(1)
        await asyncio.sleep(0.02)
        assert {name.partition("+")[0] for name in fleet.shards[1].served} == {f"r{n}" for n in range(4, 8)}
        await fleet.leave(1)
        fleet.come_back(1)
        fleet.shards[0].dead = True
        assert all(whole(result, 200) for result in await running)
        assert list(fleet.dispatcher.failed) == [0]
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_no_request_reaches_a_shard_that_is_leaving() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        running = [asyncio.ensure_future(fleet.dispatcher.run(request(f"r{n}", 3), 10.0)) for n in range(20)]
        # Booked on shard 1 in this very moment, but not yet handed over.
        await asyncio.sleep(0)
        fleet.dispatcher.unroute([1])
        fleet.shards[1].leaving = True
        assert all(whole(result, 3) for result in await asyncio.gather(*running))
        assert fleet.shards[1].served == [] and fleet.shards[1].refused_while_leaving == 0
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_shard_taken_away_stays_away_while_its_routing_is_still_on_its_way(calls: list[bool]) -> None:
    """The scheduler's thread calls; the dispatcher's loop has work and hears of it later."""

    async def story() -> None:
        fleet = Fleet(2)
        on_loop: list[Coroutine[Any, Any, Any]] = []
        workers: Any = fleet.shards
        identities = [WorkerIdentity("generation", number, "127.0.0.1") for number in (0, 1)]
        engines = EngineFleet(
            workers,
            identities,
            fleet.dispatcher,
            run_in_virtual_time,
            on_loop.append,
            start=lambda shard, restart: [],
            end=lambda shard: None,
        )
        for active in calls:
            engines.set_routable(1, active)
            if not active:
                assert fleet.router.active == {0}
        for change in on_loop:
            await change
            assert calls[-1] or fleet.router.active == {0}
        assert fleet.router.active == ({0, 1} if calls[-1] else {0})
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


@pytest.mark.parametrize("on_preempt", ["continue", "redo_turn"])
def test_a_streamed_answer_has_each_token_once_although_its_shards_leave_and_die(on_preempt: OnPreempt) -> None:
    async def story() -> None:
        fleet = Fleet(3, on_preempt=on_preempt)
        passed: dict[str, list[tuple[int, float]]] = {f"r{n}": [] for n in range(9)}

        def run(name: str) -> Coroutine[Any, Any, GenerationResult]:
            def take(ids: list[int], logprobs: list[float]) -> None:
                passed[name] += zip(ids, logprobs, strict=True)

            return fleet.dispatcher.run(request(name, 60), 60.0, take)

        running = [asyncio.ensure_future(run(name)) for name in passed]
        await asyncio.sleep(0.01)
        await fleet.leave(1)
        await asyncio.sleep(0.01)
        fleet.come_back(1)
        fleet.shards[0].dead = True
        for name, result in zip(passed, await asyncio.gather(*running), strict=True):
            assert whole(result, 60) and result.spans[-1].end == 60
            assert [span.start for span in result.spans[1:]] == [span.end for span in result.spans[:-1]]
            assert passed[name] == list(zip(result.token_ids, result.logprobs, strict=True))[: len(passed[name])]
        # What would be taken back is not passed on before its end.
        assert all(passed.values()) if on_preempt == "continue" else not any(passed.values())
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_without_a_shard_requests_wait_and_with_none_in_time_they_say_so() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        await fleet.leave(0, 1)
        running = asyncio.ensure_future(fleet.run(request("patient"), timeout_s=5.0))
        (late,) = await fleet.run(request("hasty"), timeout_s=0.1)
        assert isinstance(late, GenerationError) and "hasty: no shard took requests within 0 s" in str(late)
        fleet.come_back(1)
        assert whole((await running)[0])
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_a_shard_that_dies_or_hangs_is_quarantined_and_its_requests_go_on() -> None:
    async def story() -> None:
        # Long enough that a shard which only waits for the processor does not count as hung.
        fleet = Fleet(3, hang_s=3.0)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 60) for n in range(9)), timeout_s=60.0))
        await asyncio.sleep(0.01)
        fleet.shards[0].dead = True
        fleet.shards[1].hung.clear()
        assert all(whole(result, 60) for result in await running)
        assert sorted(fleet.dispatcher.failed) == [0, 1] and "hangs" in fleet.dispatcher.failed[1]
        with pytest.raises(ShardStateError, match=r"shards \[0\] are quarantined"):
            fleet.dispatcher.route([0], [0])
        fleet.shards[1].hung.set()
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_the_owner_of_shards_that_another_process_uses_hears_who_died_and_says_who_came_back() -> None:
    shards: list[Any] = [Shard(0), Shard(1)]
    record = MemoryRecord()
    serving = {shard.number: ServingShard(0, shard) for shard in shards}
    # One of them takes no requests yet.
    generator = DetachedGenerator({0: serving[0]}, ["shard 0", "shard 1"], "round_robin", 60.0, record=record)

    async def run(*names: str) -> set[int]:
        results = await asyncio.gather(*(generator.generate_one(request(name)) for name in names))
        assert all(whole(result) for result in results)
        return {result.shard for result in results}

    generator.follow(serving)
    assert asyncio.run(run("a", "b")) == {0, 1}
    shards[1].dead = True
    assert asyncio.run(run("c", "d")) == {0}
    assert list(generator.lost()) == [1]
    # The owner leaves a shard out, and brings one back with a new engine: not before is it used.
    generator.follow({0: serving[0]})
    assert asyncio.run(run("e", "f")) == {0}
    generator.follow({1: ServingShard(1, Shard(1))})
    assert asyncio.run(run("g", "h")) == {1} and generator.lost() == {}
    submitted = [entry.event.request_id for entry in record.entries if isinstance(entry.event, RequestSubmitted)]
    finished = [entry.event for entry in record.entries if isinstance(entry.event, RequestFinished)]
    assert {name.partition("+")[0] for name in submitted} == set("abcdefgh") and len(finished) == len(submitted)


def test_when_no_shard_is_left_everybody_hears_of_it_at_once() -> None:
    async def story() -> None:
        fleet = Fleet(1)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 60) for n in range(3)), timeout_s=60.0))
        await asyncio.sleep(0.01)
        fleet.shards[0].dead = True
        for error in await asyncio.wait_for(running, 5.0):
            assert isinstance(
                error, GenerationError
            ) and "no shard is left to serve: shard 0 is gone while request r" in str(error)
        (next_one,) = await fleet.run(request("later"))
        assert isinstance(next_one, GenerationError)
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_requests_that_lost_every_shard_wait_while_one_is_built_anew_and_no_longer() -> None:
    async def story() -> None:
        fleet = Fleet(1)
        fleet.dispatcher.await_rebuild(True)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 60) for n in range(3)), timeout_s=60.0))
        await asyncio.sleep(0.01)
        fleet.shards[0].dead = True
        while not fleet.dispatcher.failed:
            await asyncio.sleep(0.01)
        (late,) = await fleet.run(request("hasty"), timeout_s=0.1)
        assert isinstance(late, GenerationError) and "no shard is left to serve: shard 0 is gone" in str(late)
        fleet.shards[0].dead = False
        fleet.dispatcher.revive(0)
        fleet.come_back(0)
        assert all(whole(result, 60) for result in await asyncio.wait_for(running, 5.0))

        fleet.dispatcher.quarantine(0, "it died again")
        running = asyncio.ensure_future(fleet.run(request("given up"), timeout_s=60.0))
        await asyncio.sleep(0.01)
        assert not running.done()
        fleet.dispatcher.await_rebuild(False)
        (left,) = await asyncio.wait_for(running, 5.0)
        assert isinstance(left, GenerationError) and "it died again" in str(left)
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_an_engine_that_died_under_a_living_actor_counts_as_dead() -> None:
    async def story() -> None:
        fleet = Fleet(2)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", 40) for n in range(4))))
        await asyncio.sleep(0.01)
        fleet.shards[0]._results.put_nowait(RequestFailure("r0", "EngineDeadError: gone", engine_dead=True))
        assert all(whole(result, 40) for result in await running)
        assert fleet.dispatcher.failed == {0: "EngineDeadError: gone"}
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_a_refused_request_fails_alone_and_an_unwanted_one_is_cancelled_at_its_shard() -> None:
    async def story() -> None:
        fleet = Fleet(1)
        refused = asyncio.ensure_future(fleet.run(request("bad", 500)))
        unwanted = asyncio.ensure_future(fleet.dispatcher.run(request("unwanted", 500), 10.0))
        await asyncio.sleep(0.02)
        fleet.shards[0]._results.put_nowait(RequestFailure("bad", "ValueError: top_p"))
        unwanted.cancel()
        (error,) = await refused
        assert isinstance(error, GenerationError) and "shard 0: request bad failed: ValueError: top_p" in str(error)
        (late,) = await fleet.run(request("slow", 500), timeout_s=0.05)
        assert isinstance(late, GenerationError) and "has no result after 0 s" in str(late)
        await asyncio.sleep(0.01)
        assert fleet.shards[0].cancelled == ["unwanted", "slow"]
        assert (fleet.router.requests(0), fleet.router.outstanding(0)) == (0, 0)
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_a_request_may_take_long_while_its_shard_finishes_others() -> None:
    async def story() -> None:
        fleet = Fleet(1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        slow = asyncio.ensure_future(fleet.run(request("slow", 1_000_000), timeout_s=2.0))
        while loop.time() < began + 4.5:
            assert [whole(result, 1) for result in await fleet.run(request(f"short {loop.time()}", 1))] == [True]
            await asyncio.sleep(0.05)
        assert not slow.done()
        (late,) = await slow
        assert (
            "no result after 2 s, in which the shard finished nothing else; where single responses take "
            "longer, set NRL_VLLM_ASYNC_TIMEOUT" in str(late)
        )
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_in_any_unrest_every_request_is_answered_once_and_whole(seed: int) -> None:
    async def story() -> None:
        draw = random.Random(seed)
        fleet = Fleet(3)
        running = asyncio.ensure_future(fleet.run(*(request(f"r{n}", draw.randint(1, 30)) for n in range(20))))
        away: set[int] = set()
        while not running.done():
            await asyncio.sleep(draw.uniform(0, 0.01))
            if away and (draw.random() < 0.5 or len(away) == 3):
                back = draw.choice(sorted(away))
                away.discard(back)
                fleet.come_back(back)
            else:
                gone = draw.choice(sorted({0, 1, 2} - away))
                away.add(gone)
                await fleet.leave(gone)
        for result in await running:
            assert whole(result, len(result.token_ids)) and result.finish_reason == "length"
            assert [span.start for span in result.spans] == [0, *[span.end for span in result.spans[:-1]]]
        submitted = [
            entry.event.request_id for entry in fleet.record.entries if isinstance(entry.event, RequestSubmitted)
        ]
        finished = [
            entry.event.request_id for entry in fleet.record.entries if isinstance(entry.event, RequestFinished)
        ]
        assert sorted(submitted) == sorted(finished) and len(set(submitted)) == len(submitted)
        generations = [
            entry.event.generation
            for entry in fleet.record.entries
            if isinstance(entry.event, (ShardRouted, ShardUnrouted))
        ]
        assert generations == sorted(generations)
        await fleet.dispatcher.close()

    run_in_virtual_time(story())


def test_work_that_hangs_on_the_dispatchers_loop_is_given_up_by_name() -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def hangs() -> None:
        await asyncio.sleep(60.0)

    with pytest.raises(GenerationError, match=r"did not finish .*hangs within 0 s"):
        wait_on_loop(hangs(), loop, 0.2)
    loop.call_soon_threadsafe(loop.stop)
