"""Engines are built ahead of their first wake where nobody has a use for the GPUs, and cost nobody anything."""

from __future__ import annotations

import pytest
from bench import Bench
from fleet import Fleet

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.events import BuildsAhead, RankMoved
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot, explain
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Demand, Phase, Priority, Verb, Want
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

GENERATES = {"rank_batch": 64}


def neighbours(*, generation_s: float, build_s: float | None) -> Fleet:
    """`a` and `b` train on GPU 0 and 1 and generate on both. At 100 s `b` gives GPU 1 back and generates on GPU 0 for
    its next step, for which one rank is enough; the last time that took `generation_s`. `a` is asleep.
    """
    fleet = Fleet(2)
    for name, train in (("a", 0), ("b", 1)):
        fleet.add(name, [train], [0, 1], rank_batch=64)
    fleet.state.apply(BuildsAhead("a"), 0.0)
    fleet.state.pipelines["a"].build_s = build_s
    fleet.demand("b", 40, at=80.0 - generation_s)
    fleet.want("b", at=80.0)
    fleet.hold("b", at=80.0)
    fleet.demand("b", 0, at=100.0)
    fleet.demand("b", 40, at=100.0)
    fleet.release("b", at=100.0)
    fleet.wake("b", 0, at=100.0)
    return fleet


def built(plan: Plan) -> list[tuple[str, int]]:
    return [(expand.pipeline, expand.rank) for expand in plan.expands if expand.ahead]


def test_an_engine_is_built_where_a_neighbour_has_trained_and_will_not_for_a_while() -> None:
    fleet = neighbours(generation_s=70.0, build_s=60.0)
    plan = fleet.plan(101.0)
    assert built(plan) == [("a", 1)]
    assert validate(Snapshot.of(fleet.state), plan) == []
    [line] = list(explain(plan, 101.0))
    assert line == (
        "the engine of rank 1 of a is built on GPUs 1: the GPUs are idle now, and it will wake at once "
        "when it is wanted."
    )


@pytest.mark.parametrize(
    ("generation_s", "build_s", "now"), [(50.0, 60.0, 101.0), (70.0, 60.0, 115.0), (70.0, None, 101.0)]
)
def test_no_build_begins_that_may_keep_a_neighbour_from_training(
    generation_s: float, build_s: float | None, now: float
) -> None:
    assert built(neighbours(generation_s=generation_s, build_s=build_s).plan(now)) == []


def test_how_long_builds_and_batches_take_is_learned_from_the_log() -> None:
    fleet = neighbours(generation_s=70.0, build_s=None)
    known = fleet.state.pipelines
    assert known["b"].generation_s == 70.0
    fleet.wake("a", 1, at=110.0, phase=Phase.RISING)
    fleet.state.apply(RankMoved("a", 1, Phase.SERVING, fleet.epoch), 150.0)
    assert known["a"].build_s == 40.0
    # A batch goes on while it is reported: it was begun at 100 s.
    fleet.demand("b", 40, 30, at=160.0)
    fleet.want("b", at=200.0)
    assert 70.0 < known["b"].generation_s < 100.0


def test_whoever_wants_the_gpus_goes_first() -> None:
    fleet = neighbours(generation_s=70.0, build_s=60.0)
    fleet.demand("b", 100, at=101.0)
    plan = fleet.plan(101.0)
    assert built(plan) == [] and [(e.pipeline, e.rank) for e in plan.expands] == [("b", 1)]
    fleet = neighbours(generation_s=70.0, build_s=60.0)
    fleet.add("late", [1], [0, 1])
    fleet.want("late", Priority.INITIALIZATION, at=101.0)
    plan = fleet.plan(101.0)
    assert built(plan) == [] and [grant.pipeline for grant in plan.grants] == ["late"]


class Pool(Bench):
    """`a` and `b` train on GPU 0 and 2 when they want to; `a` may generate on 0 and 1, `b` does on 3, and `c` will want
    GPU 1 among others.
    """

    def __init__(self) -> None:
        super().__init__(4)
        self.register("a", [0], [0, 1])
        self.register("b", [2], [2, 3])
        self.status("b", demand=Demand(1, 0, 1, 1))
        self.settle(2.0)
        self.hears_of_it = [Verb.BUILD]

    def told(self, name: str, rank: int) -> list[Verb]:
        return [command.verb for command in self.sent if (command.pipeline, command.rank) == (name, rank)]


def test_a_build_wakes_and_falls_and_gives_the_gpu_back() -> None:
    pool = Pool()
    assert pool.phases("b") == {1: "serving"}
    pool.status("a", builds=True)
    pool.settle(1.0)
    assert pool.told("a", 1) == pool.hears_of_it and pool.phases("a") == {}
    assert pool.state.pipelines["a"].warm == {1} and pool.state.owner[1] is None
    pool.settle(30.0)
    assert pool.told("a", 1) == pool.hears_of_it, "once"
    # Nothing of it is a rank that serves: demand wakes it as any other.
    pool.status("a", demand=Demand(4, 0, 1, 1))
    pool.settle(1.0)
    assert pool.phases("a")[1] == "serving"


def test_a_request_that_comes_in_the_middle_is_granted_when_the_engine_stands_and_nothing_is_built_twice() -> None:
    pool = Pool()
    pool.silent.add("a")
    pool.status("a", builds=True)
    pool.settle(1.0)
    assert pool.phases("a") == {1: "building"}
    [build] = [command for command in pool.sent if command.pipeline == "a" and command.verb is Verb.BUILD][-1:]
    pool.register("c", [1, 3], [0, 1, 3])
    pool.status("c", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    pool.settle(3.0)
    assert not pool.state.pipelines["c"].held and pool.phases("b") == {1: "serving"}, "nobody is evicted meanwhile"
    pool.silent.clear()
    pool.inbox.append(build)
    pool.settle(2.0)
    assert ACTOR_TRAIN in pool.state.pipelines["c"].held and pool.phases("a") == {}
    assert pool.state.pipelines["a"].warm == {1}


def test_demand_in_the_middle_waits_for_the_engine_and_begins_no_other() -> None:
    pool = Pool()
    pool.silent.add("a")
    pool.status("a", builds=True)
    pool.settle(1.0)
    pool.status("a", demand=Demand(1, 0, 1, 1))
    pool.settle(3.0)
    assert pool.phases("a") == {1: "building"} and pool.state.claims == {}
    # Where more ranks are of use, the others are woken meanwhile.
    pool.status("a", demand=Demand(2, 0, 1, 2))
    pool.settle(3.0)
    assert pool.phases("a") == {0: "rising", 1: "building"}


def test_an_engine_that_cannot_be_built_is_left_alone_for_a_while() -> None:
    pool = Pool()
    pool.failing.add(("a", Verb.BUILD))
    pool.status("a", builds=True)
    pool.settle(40.0)
    assert pool.told("a", 1) == [Verb.BUILD, Verb.VACATE] and pool.state.pipelines["a"].warm == set()
    pool.failing.clear()
    pool.settle(30.0)
    assert pool.state.pipelines["a"].warm == {1}


@pytest.mark.parametrize("cut", ["building", "after"])
def test_a_restarted_scheduler_finishes_a_build(cut: str) -> None:
    pool = Pool()
    pool.silent.add("a")
    pool.status("a", builds=True)
    pool.settle(1.0)
    entries = [
        entry for entry in pool.record.entries if cut == "building" or not isinstance(entry.event, ev.CommandSent)
    ]
    again = Pool()
    again.scheduler.recover(entries, again.now)
    again.status("a", builds=True, awake=((1, pool.state.pipelines["a"].awake[1].epoch),))
    again.status("b", demand=Demand(1, 0, 1, 1), awake=((1, pool.state.pipelines["b"].awake[1].epoch),), serving=(1,))
    again.settle(2.0)
    assert again.phases("a") == {} and again.state.pipelines["a"].warm == {1}


def test_in_the_simulator_it_saves_the_time_in_which_engines_start() -> None:
    """Engines take as long to build as the trainer takes to start."""

    def finished_at(*, ahead: bool) -> float:
        job = {"name": "a", "train": [0], "infer": [0, 1, 2, 3], "steps": 2, "init_s": 40.0}
        job |= {"builds_ahead": ahead, "engine": {"half_batch": 1024.0}}
        costs = {"start_s": 40.0, "jitter": 0.0}
        scenario = parse_scenario({"pool": {"gpus_per_node": 4}, "jobs": [job], "costs": costs})
        world = World(scenario, 0, lambda clock: MemoryRecord(clock=clock))
        world.run()
        finished = world.jobs["a"].finished_at
        assert finished is not None
        return finished

    assert finished_at(ahead=False) - finished_at(ahead=True) == pytest.approx(40.0, abs=2.0)
