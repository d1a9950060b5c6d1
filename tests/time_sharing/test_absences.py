"""Nodes that leave and come back: what the planner, the scheduler, the checker and the simulator make of them."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.segments import saved
from nemo_rl.time_sharing.log.state import InconsistentLog, replay
from nemo_rl.time_sharing.planning.job_placement import Mapped, place
from nemo_rl.time_sharing.planning.plan import Expand, Plan, Shrink, Snapshot, explain
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    ClusterSpec,
    Command,
    CommandOutcome,
    GivenBack,
    Held,
    Limits,
    Phase,
    Priority,
    Status,
    Want,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.results import AloneTimes, run_way
from nemo_rl.time_sharing.simulation.scenario import Absence, Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import ScenarioError, parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.utils.record import Entry, MemoryRecord, decode_line, encode_entry

LEAVES = {"notice_at_s": 60.0, "leaves_at_s": 120.0, "returns_at_s": 300.0}


def leaving() -> Fleet:
    """Node 1 of two nodes of four GPUs is to leave; `a` generates on both and trains on node 0."""
    made = Fleet(8, nodes=2)
    made.add("a", [0], list(range(8)), demand=1000)
    made.wake("a", 0, 1, 5, 6)
    made.state.apply(ev.NodeDraining(1, 500.0), 100.0)
    return made


def away() -> Fleet:
    """`a` trains on node 0, `b` on node 1, `c` on both; node 1 is away."""
    made = Fleet(8, nodes=2)
    made.add("a", [0], list(range(8)), demand=1000)
    made.add("b", [4], list(range(8)), demand=1000)
    made.add("c", [3, 4], list(range(8)))
    made.state.apply(ev.NodeAway(1), 100.0)
    return made


def test_engines_on_a_node_that_leaves_go_to_sleep_and_none_wakes_there() -> None:
    made = leaving()
    plan = made.plan()
    assert {(s.pipeline, s.rank) for s in plan.shrinks} >= {("a", 5), ("a", 6)}
    assert all(gpu < 4 for expand in plan.expands for gpu in expand.gpus) and plan.expands
    assert sum(plan.in_ranks.values()) <= 4
    assert validate(Snapshot.of(made.state), plan) == []
    assert "rank 5 of a goes to sleep: its node is leaving." in list(explain(plan))


def test_an_engine_that_is_being_built_stands_before_it_sleeps() -> None:
    made = leaving()
    made.epoch += 1
    made.state.apply(ev.RankMoved("a", 7, Phase.BUILDING, made.epoch), 100.0)
    assert ("a", 7) not in {(s.pipeline, s.rank) for s in made.plan().shrinks}


def test_a_request_for_gpus_that_are_away_waits_and_keeps_none_from_others() -> None:
    made = away()
    made.want("b", at=100.0)
    made.want("c", at=100.0)
    made.want("a", at=101.0)
    plan = made.plan(102.0)
    assert [grant.pipeline for grant in plan.grants] == ["a"] and plan.grants[0].passed == ()
    assert [explained for explained in explain(plan) if "waits" in explained] == [
        f"{name} waits for actor_train: the node of GPU 4 is leaving or away." for name in "bc"
    ]


def test_what_trains_on_a_node_that_is_to_leave_has_it_until_it_has_left() -> None:
    made = leaving()
    made.add("b", [4, 5], list(range(8)), demand=1000)
    made.wake("b", 4, 7, at=99.0)
    made.want("b", at=101.0)
    plan = made.plan(102.0)
    assert [grant.pipeline for grant in plan.grants] == ["b"] and validate(Snapshot.of(made.state), plan) == []
    assert {(s.pipeline, s.rank) for s in plan.shrinks} == {("a", 5), ("a", 6), ("b", 4)}
    assert not {expand.rank for expand in plan.expands if expand.pipeline == "b"} & {4, 5, 6, 7}
    made.state.apply(ev.Unregistered("b", 0, "left"), 103.0)
    made.state.apply(ev.Unregistered("a", 0, "left"), 103.0)
    made.state.apply(ev.NodeAway(1), 104.0)
    made.add("b", [4, 5], list(range(8)), demand=1000)
    made.want("b", at=105.0)
    assert made.plan(106.0).grants == []


def test_the_validator_refuses_what_is_given_on_a_node_that_leaves() -> None:
    snapshot = Snapshot.of(leaving().state)
    assert "rule 17" in validate(snapshot, Plan(expands=[Expand("a", 4, (4,), False, ("free",))]))[0]
    assert validate(snapshot, Plan(shrinks=[Shrink("a", 5, ("node",))])) == []
    assert "rule 13" in validate(snapshot, Plan(shrinks=[Shrink("a", 1, ("node",))]))[0]
    assert "rule 16" in validate(snapshot, Plan(shrinks=[Shrink("a", 5, ("node",))], in_ranks={"a": 5}))[0]


def test_the_nodes_that_leave_are_saved_with_the_state() -> None:
    made = Fleet(12, nodes=3)
    made.state.apply(ev.NodeDraining(1, 500.0), 100.0)
    made.state.apply(ev.NodeAway(2), 101.0)
    entry = Entry(0, 101.0, "scheduler", saved(made.state))
    again = replay([decode_line(encode_entry(entry), 0)])
    assert (again.draining, again.away, again.withheld) == ({1: 500.0}, {2}, set(range(4, 12)))
    again.apply(ev.NodeHere(1), 102.0)
    assert (again.draining, again.withheld) == ({}, {8, 9, 10, 11})


def test_a_log_in_which_a_node_leaves_under_a_holder_contradicts_itself() -> None:
    with pytest.raises(InconsistentLog, match="node 1 is away while a holds GPUs of it"):
        leaving().state.apply(ev.NodeAway(1), 101.0)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_node_has_its_slots_and_training_turns(slots: int) -> None:
    pool = Pool(2, 2, slots)
    units = pool.units_of([1])
    assert units | pool.units_of([0]) == set(range(pool.size)) and not units & pool.units_of([0])
    assert {pool.gpu_of(unit) for unit in units} == {2, 3}


class OneJob:
    """A scheduler of two nodes of two GPUs and one job that trains on node 1."""

    def __init__(self) -> None:
        self.record = MemoryRecord()
        self.sent: list[Command] = []
        self.scheduler = Scheduler(self.record, self.sent.append, SteadyClock())
        self.scheduler.open(Pool(2, 2), Limits(), 0.0)
        self.register(0, 0.0)
        self.seq = 0

    def register(self, incarnation: int, now: float) -> None:
        mapping, self.incarnation = {ACTOR_TRAIN: [2], ACTOR_INFER: [0, 1, 2, 3]}, incarnation
        self.scheduler.register("a", "ns", dict.fromkeys(mapping, 1), mapping, now, incarnation=incarnation)

    def says(self, now: float, **parts: Any) -> None:
        self.seq += 1
        self.scheduler.status(Status("a", self.incarnation, self.seq, term=1, **parts), now)
        self.scheduler.tick(now)

    def trains(self) -> None:
        self.says(0.1, wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
        grant = self.sent.pop()
        self.scheduler.answer(Answer(grant.command, "a", 0, CommandOutcome.DONE), 0.2)
        self.held = (Held(ACTOR_TRAIN, grant.epoch, Priority.ACTOR_TRAINING),)

    def kinds(self, *kinds: type) -> list[object]:
        return [entry.event for entry in self.record.entries if isinstance(entry.event, kinds)]


def test_a_node_leaves_when_its_trainer_has_given_its_gpus_back() -> None:
    one = OneJob()
    one.trains()
    one.scheduler.drain_node(1, 1.0, 60.0)
    one.scheduler.drain_node(1, 2.0, 5.0)
    assert one.kinds(ev.NodeDraining) == [ev.NodeDraining(1, 61.0)]
    one.says(3.0, holds=one.held)
    assert not one.scheduler.node_leaves(1, 3.0) and one.scheduler.state.on(1) == {"a"}
    one.says(4.0, given_back=(GivenBack(ACTOR_TRAIN, one.held[0].epoch, 1),))
    assert not one.scheduler.node_leaves(1, 4.0)
    one.says(4.0, leaving=True)
    assert one.scheduler.node_leaves(1, 4.0) and one.scheduler.node_leaves(1, 5.0)
    one.register(1, 5.0)
    one.says(6.0, wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 1),))
    assert len(one.kinds(ev.Granted)) == 1
    seconds, why = one.scheduler.expected_start("new", (2,), 6.0)
    assert seconds == float("inf") and why == "the node of GPU 2 is leaving or away"
    one.scheduler.node_comes(1, 7.0)
    one.scheduler.tick(7.0)
    assert len(one.kinds(ev.Granted)) == 2 and not one.kinds(ev.Fenced)


def test_what_still_trains_when_its_node_has_to_be_free_is_ended() -> None:
    one = OneJob()
    one.trains()
    one.scheduler.drain_node(1, 1.0, 5.0)
    one.says(5.5, holds=one.held)
    assert not one.kinds(ev.Fenced)
    one.says(6.6, holds=one.held)
    assert one.kinds(ev.Fenced) == [ev.Fenced("a", 0, "node 1 leaves, and it still trains there")]
    assert not one.scheduler.node_leaves(1, 6.2)


def test_a_pool_may_open_without_some_of_its_nodes() -> None:
    scheduler = Scheduler(record := MemoryRecord(), lambda command: None, SteadyClock())
    scheduler.open(Pool(3, 2), Limits(), 0.0, away=[1, 2])
    assert scheduler.state.withheld == {2, 3, 4, 5} and scheduler.node_leaves(1, 1.0)
    assert check(record.entries) == []


CLUSTERS = (ClusterSpec(ACTOR_TRAIN, 1, (2,)), ClusterSpec(ACTOR_INFER, 1, (0, 1, 2, 3)))
WANT = ev.Requested("a", ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0)
CLAIM = ev.Claimed(1, "a", ACTOR_TRAIN, -1, 1, (2,))
GRANT = ev.Granted("a", ACTOR_TRAIN, 1, (2,), Priority.ACTOR_TRAINING, 0, 1, 1000.0)
RANK = ev.Claimed(1, "a", ACTOR_INFER, 3, -1, (3,))
BROKEN: dict[str, list[object]] = {
    "are promised to a/actor_train, and the node of GPU 2 is leaving or away": [ev.NodeAway(1), WANT, CLAIM],
    "are promised to a/actor_infer, and the node of GPU 3 is leaving or away": [ev.NodeDraining(1), RANK],
    "go to a/actor_infer, and a node of theirs is leaving or away": [
        RANK, ev.NodeDraining(1), ev.RankMoved("a", 3, Phase.RISING, 1),
    ],
    "node 1 is away while a/actor_train is on its GPU 2": [WANT, CLAIM, GRANT, ev.NodeDraining(1), ev.NodeAway(1)],
    "a held actor_train until 30.0 s, it had to end by 8.0 s": [
        WANT, CLAIM, GRANT, ev.NodeDraining(1, 8.0), 30.0, ev.Released("a", ACTOR_TRAIN, 1, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_the_checker_names_what_a_node_that_leaves_forbids(what: str) -> None:
    at, entries = 1.0, [
        Entry(0, 0.0, "scheduler", ev.PoolOpened(2, 2, {"max_hold_s": 1000.0})),
        Entry(1, 0.0, "scheduler", ev.SchedulerStarted(1)),
        Entry(2, 0.0, "scheduler", ev.Registered("a", 0, "ns", CLUSTERS)),
    ]  # fmt: skip
    for event in BROKEN[what]:
        if isinstance(event, float):
            at = event
        else:
            entries.append(Entry(len(entries), at, "scheduler", event))
    assert any(what in str(violation) for violation in check(entries, ended=False))


def test_a_job_is_placed_without_the_gpus_of_a_node_that_leaves() -> None:
    busy = [Mapped((0, 1), (0, 1, 2, 3))]
    assert place(range(8), 2, busy) == (4, 5)
    assert place(range(8), 2, busy, {4, 5, 6, 7}) == (2, 3)
    with pytest.raises(ValueError, match="no 4 neighbours among the 8 GPUs are there"):
        place(range(8), 4, busy, {1, 6})


def mix(*, train_s: float = 10.0, absences: tuple[dict[str, Any], ...] = ({"node": 1} | LEAVES,)) -> Scenario:
    """`wide` may generate anywhere, `named` stays where its file says, `narrow` lies on one node; these three train on
    node 1, the others on node 0.
    """
    job = {"steps": 8, "groups": 4, "samples_per_group": 4, "train_s": train_s}
    return parse_scenario(
        {
            "pool": {"nodes": 2, "gpus_per_node": 4},
            "jobs": [
                job | {"name": "wide", "train": [4, 5], "infer": list(range(8)), "placed": True, "arrive_s": 5.0},
                job | {"name": "named", "train": [6], "infer": [4, 5, 6, 7]},
                job | {"name": "narrow", "train": [4], "infer": [4, 5], "placed": True},
                job | {"name": "beside", "train": [0, 1], "infer": list(range(8)), "arrive_s": 1.0},
                job | {"name": "left", "train": [0, 1], "infer": [0, 1, 2, 3], "arrive_s": 1.0},
                job | {"name": "right", "train": [2, 3], "infer": [0, 1, 2, 3], "arrive_s": 1.0},
            ],
            "absences": list(absences),
        }
    )


def run(scenario: Scenario, seed: int = 0) -> tuple[World, list[Entry]]:
    records: list[MemoryRecord] = []

    def remember(clock: Any) -> MemoryRecord:
        records.append(MemoryRecord(clock=clock))
        return records[0]

    world = World(scenario, seed, remember)
    world.run()
    return world, records[0].entries


def test_jobs_move_to_the_nodes_that_stay_or_wait_and_train_each_step_once() -> None:
    world, entries = run(mix())
    assert check(entries) == []
    said = [text for _, _, text in build_timeline(entries).decisions if text.startswith("node ")]
    assert said == ["node 1 is to leave", "node 1 is away", "node 1 is here"]
    assert {name: job.fate for name, job in world.jobs.items()} == dict.fromkeys(world.jobs, "")
    kinds = {ev.NodeDraining: 60.0, ev.NodeAway: 120.0, ev.NodeHere: 300.0}
    for entry in entries:
        if type(entry.event) in kinds:
            assert entry.time == pytest.approx(kinds[type(entry.event)], abs=0.01)
    again = {e.event.pipeline: e for e in entries if isinstance(e.event, ev.Registered) and e.event.incarnation}
    assert again["named"].time >= 300.0
    trains = {c.name: c.gpus for c in again["wide"].event.clusters}[ACTOR_TRAIN]
    assert again["wide"].time < 120.0 and max(trains) < 4
    assert "beside" not in again


def test_a_step_that_outlasts_the_notice_is_trained_again() -> None:
    world, entries = run(mix(train_s=200.0))
    assert check(entries) == [] and not any(job.fate for job in world.jobs.values())
    fences = [entry.event for entry in entries if isinstance(entry.event, ev.Fenced)]
    assert fences and {fence.reason for fence in fences} == {"node 1 leaves, and it still trains there"}


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 400),
    node=st.integers(0, 1),
    notice=st.floats(0.0, 400.0),
    warning=st.floats(0.0, 60.0),
    gone=st.floats(1.0, 200.0),
    placed=st.booleans(),
)
def test_no_job_is_lost_and_every_invariant_kept(
    seed: int, node: int, notice: float, warning: float, gone: float, placed: bool
) -> None:
    drawn = random_scenario(seed)
    pool = drawn.pool.model_copy(update={"nodes": 2, "gpus_per_node": max(drawn.pool.gpus_per_node, 4)})
    jobs = tuple(job.model_copy(update={"placed": placed, "steps": min(job.steps, 6)}) for job in drawn.jobs)
    leaves = Absence(node=node, notice_at_s=notice, leaves_at_s=notice + warning, returns_at_s=notice + warning + gone)
    scenario = drawn.model_copy(update={"jobs": jobs, "absences": (leaves,), "pool": pool})
    world, entries = run(scenario, seed)
    assert check(entries) == []
    assert world.open_jobs == 0


def test_only_running_by_the_scheduler_has_absences_and_busy_counts_the_gpus_there_were() -> None:
    away = {"node": 1, "notice_at_s": 0.0, "leaves_at_s": 0.0}
    job = {"name": "a", "train": [0], "infer": [0, 1], "steps": 4}
    scenario = parse_scenario({"pool": {"nodes": 2, "gpus_per_node": 2}, "jobs": [job], "absences": [away]})
    whole = scenario.model_copy(update={"absences": ()})
    busy = [run_way(s, "time_sharing", 0, AloneTimes(s)) for s in (scenario, whole)]
    assert busy[0].total_s == busy[1].total_s and busy[0].gpu_busy == pytest.approx(2 * busy[1].gpu_busy, rel=0.01)
    static = [run_way(s, "static_split", 0, AloneTimes(s)).total_s for s in (scenario, whole)]
    assert static[0] == static[1]


WRONG: dict[str, tuple[dict[str, Any], ...]] = {
    "absences.0.node: 2 is none of the pool's nodes 0 to 1": ({"node": 2} | LEAVES,),
    "absences.0.leaves_at_s: 50 s is before notice_at_s (60 s)": ({"node": 1} | LEAVES | {"leaves_at_s": 50.0},),
    "absences.0.returns_at_s: 120 s is not after leaves_at_s (120 s)": (
        {"node": 1} | LEAVES | {"returns_at_s": 120.0},
    ),
    "absences.1.notice_at_s: node 1 is away then already; let it come back first": (
        {"node": 1} | LEAVES,
        {"node": 1} | LEAVES | {"notice_at_s": 100.0},
    ),
    "absences.1.notice_at_s: no other node is left then; let one come back first": (
        {"node": 1} | LEAVES,
        {"node": 0} | LEAVES | {"notice_at_s": 100.0},
    ),
    "absences.0.returns_at_s: job 'named' (jobs.1) has nowhere to train once node 1 is away for good": (
        {"node": 1, "notice_at_s": 60.0, "leaves_at_s": 120.0},
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_absences_that_cannot_be_are_refused(said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        mix(absences=WRONG[said])
    assert said in str(error.value)
