"""The client of a job that is no RL pipeline: what it holds, what it is asked for, and what its mistakes raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from local_scheduler import LocalScheduler

from nemo_rl.time_sharing.agents.agent import ProtocolError
from nemo_rl.time_sharing.agents.external import ExternalJob
from nemo_rl.time_sharing.agents.runtime import Dismissed
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Limits, Phase, Priority
from nemo_rl.utils.record import NullRecord

LIMITS = Limits(heartbeat_s=0.02, lease_s=1e6, retry_s=0.02, plan_interval_s=0.0, max_hold_s=1e6, min_hold_s=0.0)


class Bench:
    """A scheduler of two GPUs and an external job on both, which yields at once unless `stubborn`."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = LocalScheduler(LIMITS)
        self.asked: list[int] = []
        self.stubborn = False
        topology = self.scheduler.register("job", {ACTOR_INFER: [0, 1]}, **options)
        self.job = ExternalJob(topology, 0, self.scheduler, NullRecord(), LIMITS, asked_to_yield=self._asked)
        self.scheduler.agents["job"] = self.job

    def phases(self) -> dict[int, Phase]:
        return {rank: awake.phase for rank, awake in self.scheduler.core.state.pipelines["job"].awake.items()}

    def train_on_gpu_0(self) -> Callable[[], None]:
        """A pipeline takes GPU 0 for training; returns what gives it back."""
        other = self.scheduler.start("other")
        other.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
        return lambda: other.release(ACTOR_TRAIN)

    def _asked(self, rank: int) -> None:
        self.asked.append(rank)
        if not self.stubborn:
            self.job.yielded(rank)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.job._runtime.closed.set()
    bench.scheduler.close()


def test_acquire_waits_for_all_ranks_or_for_as_many_as_are_said_to_be_enough(bench: Bench) -> None:
    give_back = bench.train_on_gpu_0()
    with pytest.raises(TimeoutError, match=r"job: [01] of 2 ranks within 0.3 s; the request stands"):
        bench.job.acquire(2, 0.3)
    assert bench.job.acquire(2, 60.0, at_least=1) == [(1,)]
    give_back()
    assert bench.job.acquire(2, 60.0) == [(0,), (1,)]


@pytest.mark.parametrize("rank_batch", [1, 8])
def test_as_many_ranks_are_given_as_were_asked_for_whatever_one_of_them_holds(rank_batch: int) -> None:
    bench = Bench(rank_batch=rank_batch)
    assert bench.job.acquire(2, 60.0) == [(0,), (1,)]
    bench.job.release(60.0)
    bench.scheduler.close()


@pytest.mark.parametrize(
    ("ranks", "at_least"),
    [(99, None), (3, None), (0, None), (-1, None), (1.5, None), (True, None), ("2", None), (1, 2), (2, 0)],
)
def test_a_number_of_ranks_that_there_cannot_be_is_refused(bench: Bench, ranks: Any, at_least: Any) -> None:
    with pytest.raises(ProtocolError, match="it is registered with 2: ask for 1 to 2"):
        bench.job.acquire(ranks, 60.0, at_least=at_least)


def test_ranks_that_are_wanted_by_others_are_asked_for_yielded_and_come_back(bench: Bench) -> None:
    bench.job.acquire(2, 60.0)
    give_back = bench.train_on_gpu_0()
    assert bench.asked == [0] and bench.job.held() == [(1,)]
    give_back()
    assert bench.job.acquire(2, 60.0) == [(0,), (1,)]


@pytest.mark.parametrize("rank", [0, 17, -1, None])
def test_a_rank_that_was_not_asked_for_cannot_be_yielded(bench: Bench, rank: Any) -> None:
    bench.job.acquire(2, 60.0)
    with pytest.raises(ProtocolError, match=r"was not asked for; asked for: \[\], held: \[0, 1\]"):
        bench.job.yielded(rank)
    assert bench.job.held() == [(0,), (1,)]
    bench.scheduler.wait_until(lambda: set(bench.phases().values()) == {Phase.SERVING})


def test_a_rank_may_be_yielded_after_the_call_that_asked_for_it_and_more_than_once(bench: Bench) -> None:
    bench.job.acquire(2, 60.0)
    bench.stubborn = True
    trained = threading.Thread(target=bench.train_on_gpu_0)
    trained.start()
    bench.scheduler.wait_until(lambda: bench.asked == [0])
    assert bench.job.held() == [(0,), (1,)], "it may be used until it was yielded"
    for _ in range(2):
        bench.job.yielded(0)
    trained.join(60.0)
    assert bench.job.held() == [(1,)]


def test_a_fenced_job_holds_nothing_and_is_told_so(bench: Bench) -> None:
    bench.job.acquire(2, 60.0)
    bench.scheduler.unregister("job")
    bench.scheduler.wait_until(lambda: bench.job.fenced)
    assert bench.job.held() == []
    with pytest.raises(Dismissed, match="job: incarnation 0 is no longer registered"):
        bench.job.acquire(1, 60.0)
    bench.job.release(60.0)


def test_a_job_that_is_fenced_while_it_waits_is_told_at_once(bench: Bench) -> None:
    bench.train_on_gpu_0()
    ending = threading.Timer(0.1, bench.scheduler.unregister, ("job",))
    ending.start()
    with pytest.raises(Dismissed):
        bench.job.acquire(2, 600.0)
    ending.join()


def test_a_job_that_is_released_while_it_waits_is_told_at_once(bench: Bench) -> None:
    bench.train_on_gpu_0()
    ending = threading.Timer(0.1, bench.job.release, (60.0,))
    ending.start()
    with pytest.raises(ProtocolError, match="was released"):
        bench.job.acquire(2, 600.0)
    ending.join()


def test_after_the_release_nothing_is_held_and_nothing_can_be_acquired(bench: Bench) -> None:
    bench.job.acquire(2, 60.0)
    for _ in range(2):
        bench.job.release(60.0)
    assert bench.job.held() == [] and "job" not in bench.scheduler.core.state.pipelines and not bench.asked
    bench.job.set_routable(0, True)
    bench.job.drain(0)
    assert bench.job.held() == [] and not bench.asked, "a rank that came up meanwhile is nobody's to yield"
    with pytest.raises(ProtocolError, match="job: was released; register it again, under an incarnation above 0"):
        bench.job.acquire(1, 60.0)


def test_a_rank_whose_processes_were_ended_is_held_no_more(bench: Bench) -> None:
    bench.job.acquire(2, 60.0)
    bench.job.rank_ended(0)
    assert bench.job.held() == [(1,)]


def test_the_scheduler_hears_of_open_samples_and_never_of_less_than_the_ranks_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    set_demand = bench.job._runtime.set_demand
    monkeypatch.setattr(bench.job._runtime, "set_demand", lambda target: (heard.append(target), set_demand(target)))
    bench.job.report_open(7)
    assert heard == [], "it has asked for nothing"
    bench.job.acquire(2, 60.0)
    for samples in (7, 24, 0):
        bench.job.report_open(samples)
    least = 2 * bench.job._topology.spec.rank_batch
    assert heard == [max(least, 7), max(least, 24), least]
    heard.clear()
    bench.job.withdraw()
    bench.job.report_open(9)
    assert heard == [0], "a job that yields waits for nothing"
    assert bench.job.held() == [(0,), (1,)]
