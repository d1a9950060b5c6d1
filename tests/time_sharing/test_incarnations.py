"""A name is registered under a larger incarnation each time, so that nothing late that concerns an earlier life is
taken for the present one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench import Bench

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import replay
from nemo_rl.time_sharing.protocol.topology import IncarnationUsed, Pool, StillRegistered
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    ClusterSpec,
    CommandOutcome,
    Demand,
    Limits,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import MemoryRecord


def test_an_incarnation_is_used_once_also_by_a_scheduler_that_follows() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1], incarnation=3)
    bench.status("a", leaving=True)
    assert not bench.state.pipelines
    again = Bench(2)
    again.scheduler.recover(bench.record.entries, bench.now)
    for scheduler in (bench, again):
        for used in (0, 3):
            with pytest.raises(IncarnationUsed, match=rf"incarnation={used} .* the next free one is 4"):
                scheduler.register("a", [0], [0, 1], incarnation=used)
        scheduler.register("a", [0], [0, 1], incarnation=4)


def test_a_pipeline_whose_processes_could_not_be_ended_does_not_come_back_under_its_old_incarnation() -> None:
    """Once the reaping of the second life was taken for that of the first one's quarantine, and the pipeline stayed
    fenced for ever.
    """
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=1e6, reap_s=5.0, quarantine_s=50.0, plan_interval_s=0.0)
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.failing.add(("a", Verb.REAP))
    bench.scheduler.unregister("a", bench.now)
    bench.settle(1.0)
    assert bench.state.quarantined == {0} and "a" not in bench.state.pipelines
    with pytest.raises(IncarnationUsed, match="the next free one is 1"):
        bench.register("a", [0], [0, 1])
    bench.register("a", [0], [0, 1], incarnation=1)
    bench.scheduler.unregister("a", bench.now)
    bench.settle(1.0)
    bench.failing.clear()
    bench.settle(120.0)
    assert "a" not in bench.state.pipelines and not bench.state.quarantined
    assert bench.serves("good")


def test_a_life_whose_registration_the_log_has_lost_is_ended_before_its_gpus_are_given_on() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.record.entries[0] = replace(
        bench.record.entries[0],
        event=ev.PoolOpened(1, 2, {"lease_s": 10.0, "isolation_s": 0.0, "plan_interval_s": 0.0}),
    )
    again = Bench(2)
    again.scheduler.recover(bench.record.entries, bench.now, complete=False)
    again.scheduler.status(Status("a", 1, 1, awake=((0, 7),)), again.now)
    (reap,) = again.inbox
    assert (reap.verb, reap.incarnation) == (Verb.REAP, 1)
    again.silent.add("a")
    for second in range(1, 15):
        again.scheduler.tick(float(second))
    assert again.state.pipelines["a"].fenced and again.state.recovering, "nothing is granted while it is being ended"
    again.now = 15.0
    again.settle()
    again.settle(10.0)
    assert not again.state.recovering and "a" not in again.state.pipelines
    terms = [entry.event.term for entry in again.record.entries if isinstance(entry.event, ev.SchedulerStarted)]
    assert terms[-1] > 100, "what agents answer from memory is of other terms"


def test_nothing_is_given_on_while_a_life_that_the_log_has_lost_is_being_ended_though_the_next_is_registered() -> None:
    bench = Bench(2)
    limits = {"lease_s": 10.0, "isolation_s": 0.0, "plan_interval_s": 0.0}
    log = [replace(bench.record.entries[0], event=ev.PoolOpened(1, 2, limits)), *bench.record.entries[1:]]
    again = Bench(2)
    again.scheduler.recover(log, 0.0, complete=False)
    again.scheduler.status(Status("a", 1, 1, awake=((0, 7),)), 0.0)
    (reap,) = again.inbox
    again.inbox.clear()
    again.register("a", [0], [0, 1], incarnation=2)
    for second in range(1, 11):
        again.scheduler.tick(float(second))
    assert again.state.recovering and reap.incarnation == 1
    again.now = 10.0
    again._answer(reap)
    assert not again.state.recovering


def test_a_log_in_which_an_incarnation_was_used_twice_does_not_keep_its_pipeline_for_ever() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    record = bench.record
    record.emit(ev.Fenced("a", 0, "silent"))
    record.emit(ev.Unregistered("a", 0, "could not be ended"))
    record.emit(ev.GpusQuarantined((0,), "a", 0, -1, 1e6, "their processes could not be ended"))
    record.emit(ev.Registered("a", 0, "ns", (ClusterSpec(ACTOR_INFER, 1, (0, 1)),)))
    record.emit(ev.Fenced("a", 0, "silent"))
    again = Bench(2)
    again.scheduler.recover(record.entries, bench.now)
    again.settle(5.0)
    assert "a" not in again.state.pipelines and not again.state.quarantined


def test_a_registration_that_comes_too_early_is_told_to_wait() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.silent.add("a")
    with pytest.raises(StillRegistered):
        bench.register("a", [0], [0, 1], incarnation=1)
    bench.settle(5.0)
    bench.register("a", [0], [0, 1], incarnation=1)


def test_what_is_noted_of_a_pipeline_goes_with_it_and_its_late_messages_still_change_nothing() -> None:
    bench = Bench(2)
    for number in range(20):
        name = f"job{number}"
        bench.register(name, [0], [0, 1])
        bench.status(name, demand=Demand(10, 0, 1, 1))
        bench.scheduler.unregister(name, bench.now) if number % 2 else bench.status(name, leaving=True)
        bench.settle(2.0)
    assert not bench.state.pipelines
    scheduler: Any = bench.scheduler
    assert not any((scheduler._liveness._seen, scheduler._seqs, scheduler._answered, scheduler._inventoried))
    before = len(bench.record.entries)
    for command in list(bench.sent):
        scheduler.answer(Answer(command.command, command.pipeline, command.incarnation, CommandOutcome.DONE), bench.now)
        assert not scheduler.status(Status(command.pipeline, command.incarnation, 99), bench.now).registered
    assert len(bench.record.entries) == before


def test_the_fold_of_a_log_knows_the_incarnations() -> None:
    record = MemoryRecord()
    scheduler = Scheduler(record, lambda command: None, SteadyClock())
    scheduler.open(Pool(1, 2), Limits(), 0.0)
    scheduler.register("a", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0]}, 0.0, incarnation=7)
    assert replay(record.entries).incarnations == {"a": 7}
