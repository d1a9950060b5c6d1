"""GPUs whose processes cannot be ended: kept from everybody until each quarantine is over, and no reason to end more
than what is stuck.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nemo_rl.time_sharing.agents import scheduler_actor
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Demand,
    Limits,
    Phase,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.utils.record import Entry, RecordWriter, read_record
from tests.time_sharing.bench import Bench
from tests.time_sharing.test_checker_judges import LIMITS, broken, record, registered

STUCK_RANK = ev.GpusQuarantined((0,), "a", 0, 0, 9.0, "x")
CONTESTED = ev.GpusQuarantined((0, 1), "a", 0, -1, 9.0, "x")
OTHERS = ev.GpusQuarantined((0,), "b", 0, -1, 9.0, "x")


def state_after(*events: object) -> SchedulerState:
    state = SchedulerState()
    for event in (ev.PoolOpened(1, 2, LIMITS), *events):
        state.apply(event, 1.0)
    return state


def test_a_gpu_comes_back_when_the_last_of_its_quarantines_is_over() -> None:
    state = state_after(STUCK_RANK, CONTESTED, ev.GpusCleared((0, 1), "a", 0, -1))
    assert state.quarantined == {0} and [q.gpus for q in state.quarantines] == [(0,)]
    assert (
        state_after(
            STUCK_RANK, CONTESTED, ev.GpusCleared((0, 1), "a", 0, -1), ev.GpusCleared((0,), "a", 0, 0)
        ).quarantined
        == set()
    )
    state = state_after(STUCK_RANK, OTHERS, ev.GpusCleared((0,), "b", 0, -1))
    assert [q.pipeline for q in state.quarantines] == ["a"], "the processes of both are to be ended"


def stuck_rank() -> Bench:
    """One pipeline with two ranks, one of which can neither be sent to sleep nor ended."""
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=1e6, reap_s=5.0, quarantine_s=50.0, plan_interval_s=0.0)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    bench.settle(5.0)
    assert bench.phases("a") == {0: "serving", 1: "serving"}
    bench.failing |= {("a", Verb.VACATE), ("a", Verb.REAP)}
    bench.status("a", demand=Demand(100, 0, 1, 1), awake=awake(bench), serving=(0, 1), broken=(1,))
    bench.settle(2.0)
    assert bench.state.quarantined == {1} and bench.phases("a") == {0: "serving"}
    return bench


def awake(bench: Bench) -> tuple[tuple[int, int], ...]:
    return tuple((rank, lease.epoch) for rank, lease in sorted(bench.state.pipelines["a"].awake.items()))


def test_a_rank_that_cannot_be_ended_costs_its_pipeline_nothing_more_when_the_scheduler_is_restarted() -> None:
    bench = stuck_rank()
    (epoch,) = {
        entry.event.epoch
        for entry in bench.record.entries
        if isinstance(entry.event, ev.RankMoved) and entry.event.rank == 1
    }
    again = Bench(2)
    again.now = bench.now
    again.scheduler.recover(bench.record.entries, bench.now)
    again.failing = bench.failing
    again.settle()
    # Its agent cannot know better than that the rank is awake.
    again.status("a", demand=Demand(100, 0, 1, 1), awake=(*awake(again), (1, epoch)), serving=(0,))
    again.settle(2.0)
    assert not again.state.recovering and not again.state.pipelines["a"].fenced
    assert again.state.quarantined == {1} and again.phases("a") == {0: "serving"}
    again.failing.clear()
    again.settle(120.0)
    assert not again.state.quarantined and again.phases("a") == {0: "serving", 1: "serving"}


def test_a_rank_whose_quarantine_is_the_last_line_of_the_log_gives_its_gpu_back_when_it_is_ended() -> None:
    bench = stuck_rank()
    last = next(i for i, entry in enumerate(bench.record.entries) if isinstance(entry.event, ev.GpusQuarantined))
    again = Bench(2)
    again.now = bench.record.entries[last].time
    again.scheduler.recover(bench.record.entries[: last + 1], again.now)
    assert again.phases("a")[1] == "failed"
    again.settle()
    again.status("a", demand=Demand(100, 0, 1, 1), awake=awake(again), serving=(0,))
    again.settle(120.0)
    assert not again.state.quarantined and again.phases("a") == {0: "serving", 1: "serving"}


def test_what_a_later_life_occupies_is_kept_while_an_earlier_one_is_being_ended() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1], incarnation=1)
    for event in (ev.GpusQuarantined((0, 1), "a", 0, -1, 1e6, "x"), ev.SchedulerStarted(2, complete=False)):
        bench.record.emit(event)
    again = Bench(2)
    again.failing.add(("a", Verb.REAP))
    again.scheduler.recover(bench.record.entries, 0.0)
    # In the part that is lost the quarantine had ended, and its second life had got both.
    again.status("a", awake=((0, 1 << 40), (1, 1 << 41)))
    again.settle(5.0)
    assert "a" not in again.state.pipelines and {q.whose for q in again.state.quarantines} == {
        ("a", 0, -1),
        ("a", 1, -1),
    }


def test_what_others_had_before_the_log_lost_its_end_is_kept_with_a_pipeline_that_cannot_be_ended() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [0], [0, 1])
    bench.status("b", demand=Demand(100, 0, 1, 1))
    bench.settle(5.0)
    assert bench.phases("b") == {0: "serving", 1: "serving"}
    again = Bench(2)
    again.failing.add(("a", Verb.REAP))
    again.scheduler.recover(bench.record.entries, bench.now, complete=False)
    again.now = bench.now
    # In the part that is lost the ranks may have gone to sleep for those of the other.
    again.scheduler.unregister("a", again.now)
    again.settle(5.0)
    assert "a" not in again.state.pipelines and again.state.quarantined == {0, 1}
    assert again.phases("b") == {0: "serving", 1: "serving"}


def test_the_end_of_a_pipeline_is_the_end_of_its_stuck_ranks() -> None:
    bench = stuck_rank()
    bench.failing.clear()
    bench.scheduler.unregister("a", bench.now)
    bench.settle(1.0)
    assert "a" not in bench.state.pipelines and not bench.state.quarantined


# What the checker says of it.


def ended_before(event: object) -> list[object]:
    """The end of the processes from which a quarantine, or its end, follows."""
    if not isinstance(event, ev.GpusQuarantined | ev.GpusCleared):
        return []
    outcome = "done" if isinstance(event, ev.GpusCleared) else "failed"
    reap = ev.CommandSent("1.1", event.pipeline, "reap", event.rank, "", 1, 60.0, event.incarnation)
    return [reap, ev.CommandEnded("1.1", outcome)]


def judged(*events: object) -> set[int]:
    wakes = [ev.RankMoved("a", 0, phase, 1) for phase in (Phase.RISING, Phase.FALLING, Phase.FAILED)]
    taken = [(1.0, ev.MemoryTaken("rank 0", (0,)), "a/driver")]
    behind_reaps = [event for given in events for event in (*ended_before(given), given)]
    lines = [(2.0, event, "a/reaper" if isinstance(event, ev.MemoryFreed) else "scheduler") for event in behind_reaps]
    others = registered("b", infer=(0,))
    entries: list[Entry] = record(
        (0.5, registered("a")), (0.6, others), (1.0, wakes[0]), *taken, (1.5, wakes[1]), (1.6, wakes[2]), *lines
    )
    return broken(check(entries, ended=False))


def test_the_checker_knows_each_quarantine_of_a_gpu() -> None:
    freed, asleep = ev.MemoryFreed(ev.EVERYTHING, (0,)), ev.RankMoved("a", 0, Phase.ASLEEP, 1)
    first, second = ev.GpusCleared((0, 1), "a", 0, -1), ev.GpusCleared((0,), "a", 0, 0)
    wants = ev.DemandReported("b", 1, 0, 1, 1)
    given_on = [wants, ev.Claimed(1, "b", ACTOR_INFER, 0, -1, (0,)), ev.RankMoved("b", 0, Phase.RISING, 2)]
    kept = (STUCK_RANK, asleep, CONTESTED)
    assert judged(*kept, freed, first, second, *given_on) == set()
    assert judged(*kept, freed, first, *given_on) == {1}, "the second quarantine is not over"
    assert judged(*kept, first, second) == {10}, "the memory is still occupied"
    assert judged(*kept, first) == set()


@pytest.mark.slow
def test_the_scheduler_records_that_quarantined_memory_is_free_although_its_pipeline_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([False, *[True] * 9])
    monkeypatch.setattr(scheduler_actor, "_tell_agent", lambda *_: None)
    monkeypatch.setattr(scheduler_actor.Reaper, "ends_single_ranks", lambda *_: False)
    monkeypatch.setattr(scheduler_actor.Reaper, "end", lambda *_, **__: next(ends))
    scheduler = scheduler_actor.SchedulerActor(str(tmp_path), 1, 2, Limits(quarantine_s=0.2, plan_interval_s=0.0))
    try:
        scheduler.register("a", "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}, {})
        scheduler.status(Status("a", 0, 1, wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),)))
        with RecordWriter(tmp_path / "a.jsonl", source="a/driver") as agent:
            agent.emit(ev.MemoryTaken(ACTOR_TRAIN, (0,)))
        scheduler.unregister("a")
        deadline = time.monotonic() + 120
        while not (cleared := "ts_gpus_cleared" in (tmp_path / "scheduler.jsonl").read_text()):
            assert time.monotonic() < deadline
            scheduler._record.flush()
            time.sleep(0.05)
    finally:
        scheduler.stop()
    entries = sorted(
        (entry for name in ("scheduler", "a") for entry in read_record(tmp_path / f"{name}.jsonl")),
        key=lambda entry: entry.time,
    )
    assert cleared and any(entry.event == ev.Unregistered("a", 0, "could not be ended") for entry in entries)
    assert check(entries) == []
    # Without the daemon's word the checker could not know that they are free.
    assert {
        violation.invariant
        for violation in check([entry for entry in entries if not isinstance(entry.event, ev.MemoryFreed)])
    } == {10}
