"""The planner: each rule by example, and what must hold for every state by property."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
from fleet import Fleet
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.log.events import Claimed, RankMoved
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot, explain
from nemo_rl.time_sharing.planning.planner import plan, queue
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Phase, Priority


def shrunk(result: Plan) -> set[tuple[str, int]]:
    return {(s.pipeline, s.rank) for s in result.shrinks}


def expanded(result: Plan) -> set[tuple[str, int]]:
    return {(e.pipeline, e.rank) for e in result.expands}


def test_a_fixed_request_evicts_exactly_what_stands_on_its_gpus() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0, 1], [0, 1, 2, 3])
    fleet.add("b", [2], [0, 1, 2, 3], demand=100)
    fleet.wake("b", 0, 3)
    fleet.want("a")
    result = fleet.plan()
    assert [(g.pipeline, g.gpus) for g in result.grants] == [("a", (0, 1))]
    assert shrunk(result) == {("b", 0)}


def test_nobody_is_evicted_for_a_request_that_stays_infeasible() -> None:
    """The same request would evict rank 0 for ever if the donors were taken one by one."""
    fleet = Fleet(3)
    fleet.add("a", [0, 1], [0, 1, 2])
    fleet.add("b", [2], [0, 1, 2], demand=100)
    fleet.add("c", [1], [0, 1, 2])
    fleet.wake("b", 0)
    fleet.hold("c")
    fleet.want("a")
    result = fleet.plan()
    assert not result.grants and not result.shrinks
    assert any("GPU 1 is held by actor_train of c" in line for line in explain(result))


def test_a_later_request_does_not_take_gpus_reserved_for_the_head_of_the_queue() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder")
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    fleet.want("narrow", Priority.ACTOR_TRAINING, at=11.0)
    assert fleet.plan().grants == []


def test_a_short_request_is_let_past_when_it_ends_before_the_head_can_start() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder", at=95.0)
    fleet.state.pipelines["holder"].hold_estimates[Priority.ACTOR_TRAINING] = 60.0
    fleet.state.pipelines["narrow"].hold_estimates[Priority.ACTOR_TRAINING] = 5.0
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    fleet.want("narrow", Priority.ACTOR_TRAINING, at=11.0)
    grants = fleet.plan(100.0).grants
    assert [(g.pipeline, g.passed) for g in grants] == [("narrow", ("wide#1",))]
    fleet.state.pipelines["narrow"].hold_estimates[Priority.ACTOR_TRAINING] = 90.0
    assert fleet.plan(100.0).grants == []


def test_a_request_is_let_past_only_so_often() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder", at=95.0)
    fleet.state.pipelines["holder"].hold_estimates[Priority.ACTOR_TRAINING] = 60.0
    fleet.state.pipelines["narrow"].hold_estimates[Priority.ACTOR_TRAINING] = 5.0
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    fleet.want("narrow", at=11.0)
    fleet.state.pipelines["wide"].wants[ACTOR_TRAIN].passed = fleet.state.limits.max_backfills
    assert fleet.plan(100.0).grants == []


def test_requests_that_are_let_past_in_one_plan_count_together() -> None:
    fleet = Fleet(5)
    fleet.add("wide", [0, 1, 2, 3], [0, 1, 2, 3, 4])
    fleet.add("holder", [3], [0, 1, 2, 3, 4])
    fleet.hold("holder", at=95.0)
    fleet.state.pipelines["holder"].hold_estimates[Priority.ACTOR_TRAINING] = 60.0
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    for number, name in enumerate(("first", "second", "third")):
        fleet.add(name, [number], [0, 1, 2, 3, 4])
        fleet.state.pipelines[name].hold_estimates[Priority.ACTOR_TRAINING] = 5.0
        fleet.want(name, at=11.0 + number)
    fleet.state.pipelines["wide"].wants[ACTOR_TRAIN].passed = fleet.state.limits.max_backfills - 2
    assert [(g.pipeline, g.passed) for g in fleet.plan(100.0).grants] == [
        ("first", ("wide#1",)),
        ("second", ("wide#1",)),
    ]


def test_old_requests_of_low_priority_come_before_young_ones_of_high_priority() -> None:
    fleet = Fleet(2, aging_s=60.0)
    fleet.add("old", [0], [0, 1])
    fleet.add("young", [0], [0, 1])
    fleet.want("old", Priority.VALUE_COMPUTE, at=0.0)
    fleet.want("young", Priority.ACTOR_TRAINING, at=241.0)
    assert [item.name for item in queue(Snapshot.of(fleet.state))] == ["old", "young"]
    fleet.state.pipelines["young"].wants[ACTOR_TRAIN].since = 239.0
    assert [item.name for item in queue(Snapshot.of(fleet.state))] == ["young", "old"]


def test_training_waits_for_an_expand_of_its_own_pipeline_and_no_new_one_begins() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0], [0, 1, 2, 3], demand=100)
    fleet.wake("a", 2, phase=Phase.RISING)
    fleet.want("a")
    result = fleet.plan()
    assert not result.grants and not result.expands
    assert result.waits[0].because == ("expanding",)


def test_a_rank_that_is_waking_on_the_training_gpu_is_turned_round() -> None:
    fleet = Fleet(2)
    fleet.add("a", [0], [0, 1], demand=100)
    fleet.wake("a", 0, phase=Phase.RISING)
    fleet.want("a")
    assert shrunk(fleet.plan()) == {("a", 0)}


def test_nobody_else_stops_for_a_request_while_an_engine_is_being_built_on_its_gpus() -> None:
    """A first wake cannot be cut short: it turns round, and the other victims work on until it does."""
    fleet = Fleet(4)
    fleet.add("a", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("b", [3], [0, 1, 2, 3], demand=100)
    fleet.wake("b", 0, 1)
    fleet.wake("b", 2, phase=Phase.RISING)
    fleet.want("a")
    result = fleet.plan()
    assert not result.grants and shrunk(result) == {("b", 2)}
    assert result.waits[0].because == ("building", 2, "b") and not validate(Snapshot.of(fleet.state), result)
    fleet.state.apply(RankMoved("b", 2, Phase.FALLING, 3), 100.0)
    result = fleet.plan(110.0)
    assert not result.grants and not result.shrinks
    fleet.state.apply(RankMoved("b", 2, Phase.ASLEEP, 3), 120.0)
    result = fleet.plan(120.0)
    assert [g.pipeline for g in result.grants] == ["a"] and shrunk(result) == {("b", 0), ("b", 1)}


def test_an_engine_that_was_built_before_is_turned_round_together_with_the_others() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0, 1], [0, 1, 2, 3])
    fleet.add("b", [3], [0, 1, 2, 3], demand=100)
    fleet.wake("b", 0, 1)
    fleet.state.apply(RankMoved("b", 1, Phase.ASLEEP, 2), 50.0)
    fleet.wake("b", 1, phase=Phase.RISING, at=60.0)
    fleet.want("a")
    result = fleet.plan()
    assert result.grants and shrunk(result) == {("b", 0), ("b", 1)}


def test_a_turn_is_worth_its_hand_over_and_begins_when_the_rank_serves() -> None:
    """Four hand-overs of 7 s; the 40 s in which its engine was built are none of it."""
    fleet = Fleet(1, min_hold_s=10.0)
    fleet.add("a", [], [0], demand=100)
    fleet.add("b", [], [0])
    fleet.state.pipelines["a"].handover_s = 7.0
    fleet.wake("a", 0, at=0.0, phase=Phase.RISING)
    fleet.state.apply(RankMoved("a", 0, Phase.SERVING, 1), 40.0)
    fleet.demand("b", 100, at=41.0)
    fleet.state.pipelines["a"].handover_s = 7.0
    assert fleet.plan(67.0).empty and fleet.plan(67.0).wake_at == pytest.approx(68.0)
    assert shrunk(fleet.plan(68.5)) == {("a", 0)}


def test_a_rank_that_is_about_to_wake_does_not_make_a_reservation_endless() -> None:
    """Or every later request could be let past meanwhile."""
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("waker", [3], [0, 1, 2, 3], demand=100)
    fleet.state.apply(Claimed(1, "waker", ACTOR_INFER, 2, -1, (2,)), 90.0)
    fleet.state.pipelines["narrow"].hold_estimates[Priority.ACTOR_TRAINING] = 5.0
    fleet.want("wide", at=91.0)
    fleet.want("narrow", at=92.0)
    assert fleet.plan(100.0).grants == []


def test_a_first_hold_is_expected_to_last_as_long_as_those_of_others() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder", at=95.0)
    fleet.state.pipelines["narrow"].hold_estimates[Priority.ACTOR_TRAINING] = 30.0
    fleet.want("wide", at=96.0)
    fleet.want("narrow", at=97.0)
    assert fleet.plan(100.0).grants == []
    assert [g.pipeline for g in fleet.plan(95.0).grants] == ["narrow"]


def test_a_held_cluster_changes_its_priority_in_place() -> None:
    fleet = Fleet(2)
    fleet.add("a", [0], [0, 1])
    fleet.hold("a", priority=Priority.OLD_LOG_PROBS)
    fleet.want("a", Priority.ACTOR_TRAINING)
    result = fleet.plan()
    assert [(r.pipeline, r.priority) for r in result.priority_changes] == [("a", Priority.ACTOR_TRAINING)]
    assert not result.grants


def test_generation_gets_what_is_free_up_to_its_use_and_partial_is_enough() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0], [0, 1, 2, 3], demand=2)
    fleet.add("b", [1], [1, 2])
    fleet.hold("b")
    assert len(expanded(fleet.plan())) == 2


def settled(fleet: Fleet, *, until: float = 400.0) -> dict[str, int]:
    """How many ranks each pipeline has once every plan has been carried out and none wants to change anything."""
    now = 100.0
    while now < until:
        fleet.carry_out(fleet.plan(now), now)
        now += 20.0
    last = fleet.plan(now)
    assert not last.expands and not last.shrinks
    return {name: len(pipeline.awake) for name, pipeline in fleet.state.pipelines.items()}


@pytest.mark.parametrize("pool", [12, 100])
def test_shares_follow_weight_and_work_and_minimum_on_the_gpus_that_are_contended(pool: int) -> None:
    """A pool that has room elsewhere changes nothing for those who want the same GPUs."""
    gpus = list(range(12))
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = [
        ({"demand": 100}, {"demand": 100, "weight": 3.0}, {"a": 3, "b": 9}),
        ({"demand": 12}, {"demand": 1200}, {"a": 1, "b": 11}),
        ({"demand": 100, "min_share": 0.75}, {"demand": 100}, {"a": 9, "b": 3}),
        ({"demand": 100, "min_share": 0.75}, {"demand": 100, "min_share": 0.75}, {"a": 6, "b": 6}),
        ({"demand": 100}, {"demand": 100, "max_share": 0.25}, {"a": 9, "b": 3}),
    ]
    for first, second, ranks in cases:
        fleet = Fleet(pool, min_hold_s=1.0)
        fleet.add("a", [0], gpus, **first)
        fleet.add("b", [1], gpus, **second)
        assert settled(fleet) == ranks


def test_shares_are_the_same_beside_a_pipeline_that_touches_few_of_the_gpus() -> None:
    fleet = Fleet(100, min_hold_s=1.0)
    fleet.add("light", [0], list(range(12)), demand=100)
    fleet.add("heavy", [1], list(range(12)), weight=3.0, demand=100)
    fleet.add("wide", [50], list(range(8, 100)), demand=100)
    assert settled(fleet) == {"light": 3, "heavy": 9, "wide": 88}


def test_ranks_move_to_whoever_is_served_less_and_stay_there() -> None:
    fleet = Fleet(40, min_hold_s=1.0)
    fleet.add("first", [0], list(range(12)), demand=100)
    fleet.wake("first", *range(12))
    fleet.add("second", [1], list(range(12)), demand=100, weight=2.0)
    assert settled(fleet) == {"first": 4, "second": 8}


def test_a_small_difference_moves_nothing() -> None:
    """Six against six is left alone when seven against five would be only a little fairer."""
    fleet = Fleet(12, min_hold_s=1.0, hysteresis=0.25)
    fleet.add("a", [0], list(range(12)), demand=100)
    fleet.add("b", [1], list(range(12)), demand=118)
    fleet.wake("a", *range(6))
    fleet.wake("b", *range(6, 12))
    assert fleet.plan(300.0).empty


def test_no_move_is_made_that_its_reverse_would_undo() -> None:
    fleet = Fleet(3, min_hold_s=1.0, hysteresis=0.0)
    fleet.add("a", [], [0, 1, 2], demand=100)
    fleet.add("b", [], [0, 1, 2], demand=100)
    fleet.wake("a", 0, 1)
    fleet.wake("b", 2)
    assert fleet.plan(300.0).empty


def test_a_wide_rank_can_be_had_whose_first_gpu_is_free_already() -> None:
    fleet = Fleet(7, min_hold_s=1.0)
    fleet.add("narrow", [], [1, 4, 5, 6], demand=10)
    fleet.add("wide", [], [0, 1, 2, 3], tp=2, demand=1000)
    fleet.wake("narrow", 0, 1, 2, 3)
    fleet.wake("wide", 1)
    assert settled(fleet) == {"narrow": 3, "wide": 2}


def test_gpus_on_which_a_pipeline_trains_count_as_its_share() -> None:
    fleet = Fleet(8, min_hold_s=1.0)
    fleet.add("trains", [0, 1, 2, 3], list(range(8)), demand=100)
    fleet.add("other", [], list(range(8)), demand=100)
    fleet.hold("trains")
    fleet.wake("trains", 4)
    assert [expand.pipeline for expand in fleet.plan(300.0).expands] == ["other"] * 4


def test_a_turn_lasts_four_hand_overs_and_a_heavy_pipeline_keeps_others_waiting_four_turns_at_most() -> None:
    for weight, handover_s, ends in ((1.0, None, 10.0), (1.0, 0.5, 2.0), (2.0, None, 20.0), (1000.0, None, 40.0)):
        fleet = Fleet(1, min_hold_s=10.0)
        fleet.add("holder", [], [0], weight=weight, demand=1000)
        fleet.wake("holder", 0, at=100.0)
        fleet.state.pipelines["holder"].handover_s = handover_s
        fleet.add("waits", [], [0], demand=10, at=100.0)
        assert fleet.plan(100.0 + ends - 0.1).empty
        assert expanded(fleet.plan(100.0 + ends + 0.1)) == {("waits", 0)}


def test_one_that_leaves_gets_nothing_more_unless_it_finishes_a_step() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0], [0, 1])
    fleet.want("a")
    fleet.state.pipelines["a"].leaving = True
    assert fleet.plan().empty
    fleet.hold("a", priority=Priority.OLD_LOG_PROBS)
    fleet.want("a")
    assert [(change.cluster, change.priority) for change in fleet.plan().priority_changes] == [
        (ACTOR_TRAIN, Priority.ACTOR_TRAINING)
    ]


def test_a_finished_pipeline_gives_its_ranks_to_one_with_work() -> None:
    fleet = Fleet(2)
    fleet.add("done", [0], [0, 1])
    fleet.add("busy", [1], [0, 1], demand=100)
    fleet.wake("done", 0, 1, at=99.0)
    result = fleet.plan(100.0)
    assert shrunk(result) and {name for name, _ in expanded(result)} == {"busy"}


def test_a_wide_rank_does_not_take_the_last_ranks_of_a_pipeline_that_has_work() -> None:
    fleet = Fleet(8, min_hold_s=10.0)
    fleet.add("narrow", [], [0, 1], demand=3, rank_batch=8)
    fleet.add("wide", [], list(range(8)), tp=2, demand=1000)
    fleet.wake("narrow", 0, 1, at=50.0)
    fleet.wake("wide", 1, 2, 3, at=50.0)
    assert fleet.plan(100.0).empty
    fleet.add("third", [], [0, 1], demand=1, at=99.0)
    result = fleet.plan(100.0)
    assert len(shrunk(result)) == 1 and {name for name, _ in expanded(result)} == {"third"}


def test_what_a_wide_rank_takes_in_turn_is_more_than_its_giver_needs() -> None:
    fleet = Fleet(3, min_hold_s=10.0)
    fleet.add("narrow", [], [0, 1, 2], demand=16, rank_batch=8)
    fleet.add("wide", [], [0, 1], tp=2, demand=1000)
    fleet.wake("narrow", 0, 1, 2, at=99.0)
    assert not shrunk(fleet.plan(100.0))
    fleet.demand("narrow", 16, done=8)
    assert shrunk(fleet.plan(100.0)) == {("narrow", 0), ("narrow", 1)}


def test_a_pipeline_that_has_given_what_it_had_too_many_keeps_the_rest_for_its_turn() -> None:
    fleet = Fleet(4, min_hold_s=10.0)
    fleet.add("some", [], [0, 1, 2], demand=16, rank_batch=8)
    fleet.add("more", [], [0, 1, 2, 3], demand=1000)
    fleet.wake("some", 0, 1, 2, at=99.0)
    fleet.wake("more", 3, at=50.0)
    assert len(shrunk(fleet.plan(100.0))) == 1
    assert len(shrunk(fleet.plan(110.0))) == 2


@pytest.mark.parametrize(("measured", "ranks"), [(0, 2), (4, 4), (32, 1)])
def test_samples_are_gathered_on_as_few_engines_as_hold_them_at_good_speed(measured: int, ranks: int) -> None:
    fleet = Fleet(4)
    fleet.add("tail", [], [0, 1, 2, 3], rank_batch=8)
    fleet.demand("tail", 100, done=84, rank_batch=measured)
    assert len(expanded(fleet.plan())) == ranks


def test_without_demand_nothing_moves() -> None:
    fleet = Fleet(2)
    fleet.add("a", [0], [0, 1])
    fleet.wake("a", 0, 1)
    assert fleet.plan().empty


def test_a_rank_keeps_its_turn_and_then_gives_way_to_the_longest_waiting() -> None:
    fleet = Fleet(1, min_hold_s=10.0)
    for name in ("a", "b", "c"):
        fleet.add(name, [], [0])
    fleet.demand("a", 100, at=90.0)
    fleet.wake("a", 0, at=90.0)
    fleet.demand("c", 100, at=91.0)
    fleet.demand("b", 100, at=92.0)
    early = fleet.plan(95.0)
    assert early.empty and early.wake_at == 100.0
    late = fleet.plan(100.5)
    assert shrunk(late) == {("a", 0)} and expanded(late) == {("c", 0)}


def test_more_pipelines_than_gpus_take_turns_and_none_starves() -> None:
    fleet = Fleet(2, min_hold_s=10.0)
    names = [f"p{i}" for i in range(7)]
    for name in names:
        fleet.add(name, [], [0, 1], demand=1000)
    had: set[str] = set()
    for now in range(100):
        fleet.carry_out(fleet.plan(float(now)), float(now))
        had |= {name for name in names if fleet.state.pipelines[name].awake}
        if now == 45:
            assert had == set(names)


def test_a_starved_pipeline_reserves_gpus_against_a_stream_of_training() -> None:
    fleet = Fleet(2, aging_s=1.0, min_hold_s=10.0)
    fleet.add("starved", [], [0], demand=10, at=0.0)
    fleet.add("x", [0], [0, 1])
    fleet.add("y", [0], [0, 1])
    fleet.hold("x", at=50.0)
    fleet.want("y", at=99.0)
    result = fleet.plan(100.0)
    assert any(w.because[0] in ("held", "reserved") for w in result.waits)
    fleet.state.pipelines["x"].held.clear()
    fleet.state.give_back("x", [0])
    result = fleet.plan(101.0)
    assert expanded(result) == {("starved", 0)} and result.expands[0].guaranteed and not result.grants


def test_planned_releases_shrink_every_rank() -> None:
    fleet = Fleet(3)
    fleet.add("a", [0], [0, 1, 2], demand=100)
    fleet.wake("a", 0, 1)
    fleet.state.pipelines["a"].leaving = True
    result = fleet.plan()
    assert shrunk(result) == {("a", 0), ("a", 1)} and not result.expands


def test_every_decision_is_explained() -> None:
    fleet = Fleet(4)
    fleet.add("a", [0], [0, 1], demand=100)
    fleet.add("b", [2], [1, 2, 3], demand=50)
    fleet.want("b")
    result = fleet.plan()
    lines = list(explain(result))
    assert len(lines) == len(result.grants) + len(result.expands) + len(result.shrinks) + len(result.waits)
    assert any(line.startswith("b gets actor_train (GPUs 2) for ACTOR_TRAINING") for line in lines)


@pytest.mark.slow
def test_planner_and_validator_need_neither_ray_nor_torch() -> None:
    import subprocess

    names = ("planning.planner", "planning.validator", "simulation.world")
    modules = ", ".join(f"nemo_rl.time_sharing.{name}" for name in names)
    code = f"import sys, {modules}; print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def random_fleet(seed: int) -> Fleet:
    rng = random.Random(seed)
    gpus = rng.choice((2, 4, 8, 16))
    fleet = Fleet(gpus, min_hold_s=rng.choice((0.0, 10.0)), aging_s=rng.choice((1.0, 60.0)))
    free = set(range(gpus))
    for number in range(rng.randint(1, 8)):
        name, tp = f"p{number}", rng.choice((1, 1, 2))
        starts = sorted(rng.sample(range(gpus // tp), rng.randint(1, gpus // tp)))
        infer = [start * tp + i for start in starts for i in range(tp)]
        train = sorted(rng.sample(infer, rng.randint(1, len(infer))))
        fleet.add(
            name,
            train,
            infer,
            tp=tp,
            weight=rng.choice((1.0, 2.0)),
            demand=rng.choice((0, 1, 30, 500)),
            at=rng.uniform(0, 50),
        )
        for rank in range(len(infer) // tp):
            bundle = set(infer[rank * tp : (rank + 1) * tp])
            if bundle <= free and rng.random() < 0.4:
                phase = rng.choice((Phase.RISING, Phase.SERVING, Phase.SERVING, Phase.FALLING))
                fleet.wake(name, rank, at=rng.uniform(50, 99), phase=phase, guaranteed=rng.random() < 0.1)
                free -= bundle
        if set(train) <= free and rng.random() < 0.3:
            fleet.hold(name, at=rng.uniform(50, 99))
            free -= set(train)
        elif rng.random() < 0.5:
            fleet.want(name, rng.choice(list(Priority)[:6]), at=rng.uniform(50, 99))
        fleet.state.pipelines[name].leaving = rng.random() < 0.1
    return fleet


@pytest.mark.slow
@given(st.integers(0, 10**9))
@settings(max_examples=120, deadline=None)
def test_every_plan_is_valid_and_pure(seed: int) -> None:
    fleet = random_fleet(seed)
    snapshot = Snapshot.of(fleet.state)
    before = copy.deepcopy(fleet.state.__dict__)
    result = plan(snapshot, 100.0)
    assert validate(snapshot, result) == []
    assert plan(snapshot, 100.0) == result
    assert {name: vars_of(p) for name, p in fleet.state.pipelines.items()} == {
        name: vars_of(p) for name, p in before["pipelines"].items()
    }


@given(st.integers(0, 10**9))
@example(1640095)
@settings(max_examples=60, deadline=None)
def test_plans_settle_once_everybody_has_had_a_rank(seed: int) -> None:
    """With no time slices to take, carrying plans out comes to a plan that moves nothing."""
    fleet = random_fleet(seed)
    for name, pipeline in fleet.state.pipelines.items():
        pipeline.wants.clear()
        for rank in [
            rank for rank, awake in pipeline.awake.items() if awake.phase is not Phase.SERVING or pipeline.leaving
        ]:
            fleet.state.apply(RankMoved(name, rank, Phase.ASLEEP, pipeline.awake[rank].epoch), 100.0)
    plans = []
    for now in range(200, 1200, 50):
        plans.append(fleet.plan(float(now)))
        fleet.carry_out(plans[-1], float(now))
    # Where pipelines take turns, a plan between two turns may give to one what the last turn has left.
    turns = any(shrink.because[0] == "time_slice" for last in plans[-4:] for shrink in last.shrinks)
    assert turns or plans[-1].empty


def vars_of(pipeline: object) -> dict[str, object]:
    return {
        name: repr(getattr(pipeline, name))
        for name in ("awake", "held", "wants", "demand", "unscheduled_since", "claimed_ranks", "cooling")
    }


def test_only_so_many_pipelines_initialise_at_a_time_first_come_first_served() -> None:
    fleet = Fleet(6, max_initialising=2)
    for number in range(3):
        fleet.add(f"p{number}", [2 * number], [2 * number, 2 * number + 1])
        fleet.want(f"p{number}", Priority.INITIALIZATION, at=float(number))
    plan = fleet.plan()
    assert [grant.pipeline for grant in plan.grants] == ["p0", "p1"]
    assert [sentence for sentence in explain(plan) if "p2" in sentence] == [
        "p2 waits for actor_train: p0, p1 initialise now, as many as may at the same time."
    ]
    fleet.carry_out(plan, 100.0)
    fleet.release("p0", at=110.0)
    fleet.add("late", [1], [0, 1])
    fleet.want("late", Priority.INITIALIZATION, at=105.0)
    assert [grant.pipeline for grant in fleet.plan(111.0).grants] == ["p2"]
