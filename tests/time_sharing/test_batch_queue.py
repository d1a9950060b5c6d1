"""The batch queue: who starts when, and on which GPUs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.simulation.baselines import BatchQueue, user_limit
from nemo_rl.time_sharing.simulation.scenario import ScenarioJob


def job(name: str, width: int, *, tp: int = 1) -> ScenarioJob:
    gpus = tuple(range(width))
    return ScenarioJob(name=name, infer=gpus, train=gpus[:1], tp=tp)


def queue(limits: dict[str, float], *jobs: ScenarioJob, gpus: int = 8) -> BatchQueue:
    made = BatchQueue(Pool(1, gpus), limits)
    for each in jobs:
        made.submit(each)
    return made


def started(of: BatchQueue, now: float) -> dict[str, tuple[int, ...]]:
    return {placed.name: placed.infer for placed in of.start(now)}


def test_jobs_start_in_order_on_any_free_gpus() -> None:
    waiting = queue({"a": 10.0, "b": 10.0, "c": 10.0}, job("a", 4), job("b", 4), job("c", 2))
    assert started(waiting, 0.0) == {"a": (0, 1, 2, 3), "b": (4, 5, 6, 7)}
    waiting.ended("b")
    assert started(waiting, 5.0) == {"c": (4, 5)}


def test_a_later_job_is_let_past_only_if_the_head_starts_no_later_for_it() -> None:
    limits = {"runs": 100.0, "head": 50.0, "short": 90.0, "long": 200.0}
    waiting = queue(limits, job("runs", 6), job("head", 8), job("long", 1), job("short", 1))
    assert started(waiting, 0.0) == {"runs": (0, 1, 2, 3, 4, 5), "short": (6,)}
    waiting.ended("runs")
    assert started(waiting, 60.0) == {}
    waiting.ended("short")
    assert started(waiting, 90.0) == {"head": tuple(range(8))}


def test_a_long_job_is_let_past_on_gpus_that_the_head_will_not_need() -> None:
    limits = {"a": 100.0, "b": 300.0, "head": 50.0, "long": 1000.0}
    waiting = queue(limits, job("a", 4), job("b", 2), job("head", 4), job("long", 2))
    assert started(waiting, 0.0) == {"a": (0, 1, 2, 3), "b": (4, 5), "long": (6, 7)}
    waiting.ended("a")
    assert started(waiting, 100.0) == {"head": (0, 1, 2, 3)}


def test_a_wide_rank_lies_within_a_node_and_training_moves_with_it() -> None:
    waiting = BatchQueue(Pool(2, 4), {"small": 10.0, "wide": 10.0})
    waiting.submit(job("small", 1))
    waiting.submit(ScenarioJob(name="wide", infer=(0, 1, 2, 3), train=(2, 3), tp=4))
    placed = {each.name: each for each in waiting.start(0.0)}
    assert placed["wide"].infer == (4, 5, 6, 7) and placed["wide"].train == (6, 7)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.floats(1, 50), st.floats(0.3, 1.0)), max_size=14
    )
)
def test_no_gpu_is_given_twice_and_every_job_starts(drawn: list[tuple[int, int, float, float]]) -> None:
    """Whatever the widths and however wrong the limits: each starts in the end, the head never later than the limits
    allow.
    """
    jobs = {f"j{n}": job(f"j{n}", tp * ranks, tp=tp) for n, (tp, ranks, _, _) in enumerate(drawn)}
    limits = {f"j{n}": limit for n, (_, _, limit, _) in enumerate(drawn)}
    ends = {f"j{n}": limit * part for n, (_, _, limit, part) in enumerate(drawn)}
    waiting = BatchQueue(Pool(2, 8), limits)
    for each in jobs.values():
        waiting.submit(each)
    now, running, seen = 0.0, {}, set()
    while len(seen) < len(jobs) or running:
        for placed in waiting.start(now):
            taken = [gpu for gpus, _ in running.values() for gpu in gpus]
            assert not set(taken) & set(placed.infer) and placed.name not in seen
            assert len(placed.infer) == len(jobs[placed.name].infer)
            seen.add(placed.name)
            running[placed.name] = (placed.infer, now + ends[placed.name])
        assert running
        first = min(running, key=lambda name: running[name][1])
        now = running.pop(first)[1]
        waiting.ended(first)


def test_a_users_limit_is_never_too_short_and_always_the_same() -> None:
    assert 100.0 <= user_limit(100.0, job("a", 1), 0) == user_limit(100.0, job("a", 1), 0) <= 300.0
