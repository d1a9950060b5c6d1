"""Known failures of earlier time-sharing schedulers, each as a case by name.

These failures were in decisions: the gap-ratio rule, kept for simulation, still shows each, and the planner does not.
Those in carrying out are in `test_known_failures_in_execution`.
"""

from __future__ import annotations

from fleet import Fleet

from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.protocol.types import Priority
from nemo_rl.time_sharing.simulation import gap_ratio


def old_rule(fleet: Fleet, now: float = 100.0) -> Plan:
    return gap_ratio.plan(Snapshot.of(fleet.state), now)


def expanded(plan: Plan) -> set[str]:
    return {expand.pipeline for expand in plan.expands}


# In decisions: the old rule fails, ours passes.


def test_wasted_preemption_and_thrash() -> None:
    fleet = Fleet(3)
    fleet.add("a", [0, 1], [0, 1, 2])
    fleet.add("generator", [2], [0, 2], demand=100)
    fleet.add("trainer", [1], [0, 1, 2])
    fleet.wake("generator", 0)
    fleet.hold("trainer")
    fleet.want("a")
    assert old_rule(fleet).shrinks and not old_rule(fleet).grants
    assert not fleet.plan().shrinks


def test_a_narrow_request_overtakes_a_wide_one_for_ever() -> None:
    fleet = Fleet(4)
    fleet.add("wide", [0, 1, 2], [0, 1, 2, 3])
    fleet.add("narrow", [0], [0, 1, 2, 3])
    fleet.add("holder", [2], [0, 1, 2, 3])
    fleet.hold("holder")
    fleet.want("wide", Priority.INITIALIZATION, at=10.0)
    fleet.want("narrow", Priority.ACTOR_TRAINING, at=50.0)
    assert [grant.pipeline for grant in old_rule(fleet).grants] == ["narrow"]
    assert not fleet.plan().grants


def test_with_more_pipelines_than_gpus_the_newcomer_starves() -> None:
    fleet = Fleet(2)
    for name in ("a", "b", "newcomer"):
        fleet.add(name, [], [0, 1])
    for rank, name in enumerate(("a", "b")):
        fleet.demand(name, 100, 90)
        fleet.wake(name, rank)
    fleet.demand("newcomer", 100, at=50.0)
    assert "newcomer" not in expanded(old_rule(fleet))
    assert "newcomer" in expanded(fleet.plan())


def test_a_finished_pipeline_keeps_a_worker() -> None:
    fleet = Fleet(2)
    fleet.add("finished", [], [0])
    fleet.add("busy", [], [0, 1])
    fleet.demand("finished", 100, 100)
    fleet.wake("finished", 0)
    fleet.demand("busy", 100)
    fleet.wake("busy", 1)
    assert not old_rule(fleet).shrinks
    assert {(s.pipeline, s.rank) for s in fleet.plan().shrinks} == {("finished", 0)}


def test_a_pipeline_that_never_reported_neither_gives_nor_takes() -> None:
    fleet = Fleet(1)
    fleet.add("silent", [], [0])
    fleet.add("busy", [], [0], demand=100)
    fleet.wake("silent", 0)
    assert not old_rule(fleet).expands
    assert expanded(fleet.plan()) == {"busy"}


def test_more_than_a_thousand_activations_end_the_cluster() -> None:
    fleet = Fleet(1200)
    fleet.add("a", [0], list(range(1200)), demand=10_000)
    assert len(old_rule(fleet).expands) == 1000
    assert len(fleet.plan().expands) == 1200


def test_requiring_every_worker_before_waking_deadlocks() -> None:
    """A part of the ranks is a valid answer to a demand."""
    fleet = Fleet(3)
    fleet.add("a", [], [0, 1, 2], demand=100)
    fleet.add("b", [0], [0, 1])
    fleet.hold("b")
    assert {expand.rank for expand in fleet.plan().expands} == {1, 2}


def test_no_donor_is_put_to_sleep_for_a_receiver_that_proves_ineligible() -> None:
    fleet = Fleet(2)
    fleet.add("donor", [], [0, 1], demand=1)
    fleet.add("leaving", [], [0, 1], demand=100)
    fleet.wake("donor", 0, 1)
    fleet.state.pipelines["leaving"].leaving = True
    assert fleet.plan().empty


def test_one_gpu_is_not_counted_free_twice() -> None:
    fleet = Fleet(2)
    fleet.add("a", [0, 1], [0, 1])
    fleet.add("b", [0], [0, 1])
    fleet.add("generator", [], [0, 1], tp=2, demand=100)
    fleet.wake("generator", 0)
    fleet.want("a", at=1.0)
    fleet.want("b", at=2.0)
    plan = fleet.plan()
    assert [grant.pipeline for grant in plan.grants] == ["a"] and len(plan.shrinks) == 1
