"""Rules of the history checker about what ends, who gets ranks and who is let past, each on the smallest record that
breaks it; and what a state or a simulation says when it contradicts itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fleet import Fleet

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import Claim, QueuedWant, SchedulerState
from nemo_rl.time_sharing.planning.plan import Snapshot
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    ClusterSpec,
    Command,
    CommandOutcome,
    Limits,
    Phase,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.watch import Misbehaviour, SchedulerWatch, problems
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry, MemoryRecord

LIMITS = {"aging_s": 1.0, "max_backfills": 4, "lease_s": 30.0, "quarantine_s": 20.0, "reap_s": 60.0}
LIMITS |= {"min_hold_s": 10.0, "max_slice_s": 10.0}
Line = tuple[float, object]


def registered(name: str, infer: tuple[int, ...] = (0, 1, 2, 3), train: tuple[int, ...] = ()) -> Line:
    clusters = [ClusterSpec(ACTOR_TRAIN, 1, train)] if train else []
    return 0.0, ev.Registered(name, 0, "ns", (*clusters, ClusterSpec(ACTOR_INFER, 1, infer)))


def demand(name: str, at: float = 1.0, target: int = 8) -> Line:
    return at, ev.DemandReported(name, target, 0, 1, 1)


def claimed(at: float, name: str, rank: int, plan: int = 1, *, guaranteed: bool = False, ahead: bool = False) -> Line:
    return at, ev.Claimed(plan, name, ACTOR_INFER, rank, -1, (rank,), guaranteed=guaranteed, ahead=ahead)


def moved(at: float, name: str, rank: int, *phases: Phase, epoch: int = 1) -> list[Line]:
    return [(at, ev.RankMoved(name, rank, phase, epoch)) for phase in phases]


def serves(at: float, name: str, rank: int, epoch: int) -> list[Line]:
    rising = (Phase.RISING, Phase.SERVING)
    return [claimed(at, name, rank, epoch), *moved(at, name, rank, *rising, epoch=epoch)]


def reap(at: float, rank: int, *outcome: str, key: str = "1.1", incarnation: int = 0) -> list[Line]:
    sent = ev.CommandSent(key, "a", "reap", rank, "", 1, at + 60, incarnation)
    return [(at, sent), *((at, ev.CommandEnded(key, how)) for how in outcome)]


FAILS = [*serves(1.0, "a", 0, 1), *moved(2.0, "a", 0, Phase.FALLING, Phase.FAILED)]
REAPED = ev.Unregistered("a", 0, "reaped")
FENCED = (3.0, ev.Fenced("a", 0, "it was unregistered"))
WITHHELD = (3.0, ev.GpusQuarantined((3,), "a", 0, 3, 23.0, "their processes could not be ended"))
SHARED = [registered("a", (0, 1)), registered("b", (0, 1)), demand("a", target=1), demand("b", target=1)]

BROKEN: dict[str, list[Line]] = {
    "which may be in what is lost": [(5.0, ev.SchedulerStarted(2, complete=False))],
    "taken stock 20.0 s too early": [(5.0, ev.SchedulerStarted(1001, complete=False)), (15.0, ev.InventoryDone(1001))],
    "rank 1 is still to get GPUs": [registered("a"), demand("a"), claimed(2.0, "a", 1), FENCED],
    "while reap (1.1) to it is open": [
        registered("a"),
        FENCED,
        *reap(3.0, -1),
        *reap(4.0, -1, "done", key="1.2", incarnation=1),
        (4.0, ev.Unregistered("a", 0, "reaped")),
    ],
    "without having been ended": [registered("a"), FENCED, (4.0, ev.Unregistered("a", 0, "reaped"))],
    "its processes were not ended": [registered("a"), demand("a"), *FAILS, *moved(3.0, "a", 0, Phase.ASLEEP)],
    "the processes of a were not ended": [
        registered("a"),
        WITHHELD,
        *reap(24.0, 3, "failed"),
        (24.0, ev.GpusCleared((3,), "a", 0, 3)),
    ],
    "not ended": [registered("a"), WITHHELD, *reap(60.0, 2, "done")],
    "a quarantine of no GPUs": [registered("a"), (3.0, ev.GpusQuarantined((), "a", 0, -1, 23.0, "nothing"))],
    "is guaranteed, its pipeline has waited": [registered("a"), demand("a"), claimed(2.0, "a", 1, guaranteed=True)],
    "is not guaranteed, though": [registered("a"), demand("a"), claimed(9.0, "a", 1)],
    "goes to b after 1.00 s": [
        *SHARED,
        *serves(2.0, "a", 0, 1),
        *moved(3.0, "a", 0, Phase.FALLING),
        claimed(3.0, "b", 0, 2),
        (4.0, ev.Leaving("a")),
    ],
    "its share of what both have is 2.0": [
        registered("a"),
        registered("b"),
        demand("a"),
        demand("b"),
        *(line for rank in range(4) for line in serves(2.0, "a", rank, rank + 1)),
        *moved(20.0, "a", 0, Phase.FALLING),
        *serves(20.0, "b", 0, 9),
        *(line for rank in (1, 2, 3) for line in moved(40.0, "a", rank, Phase.FALLING, epoch=rank + 1)),
        *(claimed(40.0, "b", rank, 10) for rank in (1, 2, 3)),
        demand("b", 41.0),
    ],
}


def said(lines: list[Line]) -> str:
    opened: list[Line] = [(0.0, ev.PoolOpened(1, 4, LIMITS)), (0.0, ev.SchedulerStarted(1))]
    entries = [
        Entry(i, at, "a/driver" if isinstance(event, rec.WaitBegun | rec.WaitEnded) else "scheduler", event)
        for i, (at, event) in enumerate([*opened, *lines])
    ]
    return "\n".join(map(str, check(entries, ended=False)))


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule_names_what_breaks_it(what: str) -> None:
    assert what in said(BROKEN[what])


def test_what_follows_from_the_end_of_its_processes_breaks_none_of_these_rules() -> None:
    asleep = [*reap(3.0, 0, "done"), *moved(3.0, "a", 0, Phase.ASLEEP)]
    assert "not ended" not in said([registered("a"), demand("a"), *FAILS, *asleep])
    gone = [FENCED, *reap(3.0, -1, "done"), (3.0, ev.Unregistered("a", 0, "reaped"))]
    assert not said([registered("a"), *gone])
    looked = [*reap(24.0, 3, "done"), (24.0, ev.GpusCleared((3,), "a", 0, 3))]
    assert not said([registered("a"), WITHHELD, *looked, *reap(90.0, 2, "done", key="1.2")])


def contradict(how: Callable[[SchedulerState], None]) -> list[str]:
    made = Fleet(4)
    made.add("a", [0], [0, 1, 2, 3], demand=8)
    made.add("b", [1], [1, 2], demand=8)
    made.wake("a", 2)
    made.want("b")
    assert not list(problems(made.state))
    how(made.state)
    return list(problems(made.state))


CLAIM = Claim(1, "a", ACTOR_INFER, 3, -1, (3,))


def _fences(state: SchedulerState) -> None:
    state.pipelines["b"].fenced = True


def _asks_from_the_past(state: SchedulerState) -> None:
    state.pipelines["a"].wants[ACTOR_TRAIN] = QueuedWant(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 9), 0.0)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (lambda state: state.give_back("a", [2]), "GPU 2 is on the ledger of None"),
        (lambda state: setattr(state, "epoch", 0), "the newest is said to be 0"),
        (
            lambda state: state.claims.update({("a", ACTOR_INFER, 3): Claim(1, "a", ACTOR_INFER, 3, -1, (3,))}),
            "claimed",
        ),
        (lambda state: state.quarantines.append(ev.GpusQuarantined((3,), "a", 0, 3, 9.0)), "are withheld"),
        (lambda state: state.trainers.__setitem__(0, 2), "that train on each GPU"),
        (lambda state: state.incarnations.clear(), "is registered as incarnation 0"),
        (_fences, "is fenced and waits for"),
        (_asks_from_the_past, "waits for request 9, its newest is -1"),
        (lambda state: setattr(state.pipelines["a"], "unscheduled_since", 1.0), "wait for a first rank since 1.0"),
    ],
)
def test_a_state_that_contradicts_itself_says_where(how: Callable[[SchedulerState], None], what: str) -> None:
    assert any(what in problem for problem in contradict(how)), contradict(how)


def test_more_whole_ranks_than_there_are_gpus_are_refused() -> None:
    made = Fleet(4)
    made.add("a", [], [0, 1], demand=8)
    made.add("b", [], [2, 3], demand=8)
    plan = made.plan()
    assert sum(plan.in_ranks.values()) == 4 and not validate(Snapshot.of(made.state), plan)
    plan.in_ranks["a"] += 1
    assert "rule 16" in str(validate(Snapshot.of(made.state), plan)[0])


def test_a_pipeline_whose_leave_was_lost_may_leave_anew_and_no_third_time() -> None:
    left = ev.Unregistered("a", 0, "left")
    lines = [registered("a"), (1.0, left), (5.0, ev.SchedulerStarted(1001, complete=False))]
    lines += [(40.0, ev.InventoryDone(1001)), (41.0, ev.Leaving("a")), (41.0, left)]
    assert not said(lines)
    assert said([*lines, (42.0, left)]).count("'a' is not registered") == 1
    assert said([lines[0], lines[1], *lines[4:]]).count("'a' is not registered") == 2


def test_a_pipeline_that_has_left_may_still_cancel_its_wait_and_no_other() -> None:
    lines = [registered("a"), (1.0, rec.WaitBegun("a.0.1", "rank 0", 90.0)), (2.0, ev.Unregistered("a", 0, "left"))]
    ended = (4.0, rec.WaitEnded("a.0.1", "cancelled"))
    assert not said([*lines, ended])
    assert "had not begun" in said([*lines, ended, ended])
    assert "had not begun" in said([*lines[:2], FENCED, *reap(2.0, -1, "done"), (3.0, REAPED), ended])


# What a simulation sees that no record says.


def test_a_clock_that_runs_ahead_and_a_silence_that_was_none_are_seen() -> None:
    entries: list[Entry] = []
    watch = SchedulerWatch(Limits(), entries, 0.0, 0.0)
    with pytest.raises(Misbehaviour, match=r"1\.0 s passed, and 9\.0 s on the steady clock"):
        watch.observe(SchedulerState(), 9.0, 1.0)
    watch = SchedulerWatch(Limits(), entries, 0.0, 0.0)
    watch.jumped()
    watch.jumped()
    watch.observe(SchedulerState(), 1.0 + 2 * Limits().max_tick_s, 1.0)
    with pytest.raises(Misbehaviour, match="on the steady clock"):
        watch.observe(SchedulerState(), 3.0 + 2 * Limits().max_tick_s, 1.5)
    made = Fleet(4)
    made.add("a", [0], [0, 1])
    watch = SchedulerWatch(Limits(), entries, 9.0, 9.0)
    watch.status_comes(made.state, Status("a", 0, 1), 9.0)
    entries.append(Entry(0, 10.0, "scheduler", ev.Fenced("a", 0, "no heartbeat for 31.0 s (lease 30 s)")))
    with pytest.raises(Misbehaviour, match=r"a was heard at 9\.0 s and is fenced at 10\.0 s"):
        watch.observe(made.state, 10.0, 10.0)
    watch = SchedulerWatch(Limits(), entries, 11.0, 11.0)
    made.state.recovering, made.state.term = True, 3
    began = watch.status_comes(made.state, Status("a", 0, 2, term=2), 11.0)
    entries.append(Entry(1, 11.0, "scheduler", ev.Released("a", ACTOR_TRAIN, 1, 0)))
    with pytest.raises(Misbehaviour, match="of term 2 is taken for an inventory of term 3"):
        watch.status_taken(made.state, Status("a", 0, 2, term=2), began)


def test_an_agent_that_breaks_its_contract_is_seen() -> None:
    world = World(random_scenario(3), 3, lambda clock: MemoryRecord(clock=clock))
    world.run(max_events=60)
    process = next(job.process for job in world.jobs.values() if job.process is not None)
    watch, name = process.watch, process.agent.topology.pipeline
    watch.heard(Reply(name, 0, 9, True))
    late = Command("1.900", 1, name, 0, Verb.VACATE, 0)
    with pytest.raises(Misbehaviour, match="is none for this incarnation now"):
        watch.obeys(late, lambda command: process.agent._answer(command, CommandOutcome.DONE))
    new = Command("9.1", 9, name, 0, Verb.VACATE, 0, epoch=1 << 60)
    with pytest.raises(Misbehaviour, match="may always be vacated, and is refused"):
        watch.obeys(new, lambda command: process.agent._answer(command, CommandOutcome.REFUSED))
    foreign = Command("9.2", 9, name, 0, Verb.GRANT, -1, 1, ACTOR_TRAIN, (0,), request=999)
    process.agent.holds.clear()
    with pytest.raises(Misbehaviour, match="is a grant that was not asked for"):
        watch.obeys(foreign, lambda command: process.agent._answer(command, CommandOutcome.DONE))


def step_of_an_adapter() -> list[object]:
    return [
        rec.RecordOpened("one/driver"),
        rec.SyncStarted("one@0", 0, (0,), "adapter", adapter="one"),
        rec.SyncFinished("one@0", 0),
        rec.StepBegun(0, "one"),
        rec.GroupAdmitted("g", "p", 1, 0, "one"),
        rec.RequestSubmitted("r", 0, "s", "one"),
        rec.RequestFinished("r", 0, "done", 3),
        rec.TokensGenerated("s", "g", (rec.RecordedSpan(0, 0, 3),), adapter="one"),
        rec.GroupCommitted("g", 0, 3),
        rec.GroupTrained("g", 0, "one"),
        rec.StepFinished(0, 1, 1, "one"),
        rec.StepBegun(1, "one"),
    ]


def adapter_said(*changes: tuple[int, object]) -> str:
    """What is found in one step of an adapter, with some of its entries replaced."""
    events = step_of_an_adapter()
    for position, event in changes:
        events[position] = event
    entries = [Entry(n, float(n), "one/driver", event) for n, event in enumerate(events)]
    return " | ".join(violation.message for violation in check(entries))


def test_tokens_steps_and_syncs_of_another_adapter_are_seen() -> None:
    assert adapter_said() == ""
    other = rec.TokensGenerated("s", "g", (rec.RecordedSpan(0, 0, 3),), adapter="two")
    assert adapter_said((7, other)) == "sample s of adapter one was drawn with adapter two"
    assert "its shards held []" in adapter_said((1, rec.SyncStarted("one@0", 0, (0,), "adapter", adapter="two")))
    assert "its shards held []" in adapter_said((5, rec.RequestSubmitted("r", 0, "s", "two")))
    assert "trained in a step of adapter two" in adapter_said((9, rec.GroupTrained("g", 0, "two")))
    assert "step 2 of adapter one begins, which is at version 1" in adapter_said((11, rec.StepBegun(2, "one")))


def test_adapters_of_equal_names_are_told_apart_by_their_jobs() -> None:
    events = step_of_an_adapter()
    both = [(f"{job}:one/driver", event) for event in events for job in ("first", "second")]
    assert check([Entry(n, float(n), source, event) for n, (source, event) in enumerate(both)]) == []
    mixed = check([Entry(n, float(n), "one/driver", event) for n, (_, event) in enumerate(both)])
    assert any("admitted twice" in violation.message for violation in mixed)


def test_an_adapter_of_a_pool_draws_and_trains_only_while_its_job_holds_gpus() -> None:
    def said(*around: object) -> list[str]:
        inside = [("job:one/driver", event) for event in step_of_an_adapter()]
        before = [("scheduler", ev.PoolOpened(1, 2, LIMITS)), *(("job/agent", event) for event in around)]
        entries = [Entry(n, float(n), source, event) for n, (source, event) in enumerate([*before, *inside])]
        return [v.message for v in check(entries) if v.invariant in (3, 5, 7)]

    assert said(rec.ShardWoken(1)) == []
    assert (
        said()
        == said(rec.ShardWoken(1), rec.ShardSlept(1))
        == [
            "job:one/driver sends request r, and its job holds no GPUs",
            "job:one/driver finishes step 0, and its job holds no GPUs",
        ]
    )
