"""Known failures of earlier time-sharing schedulers in carrying decisions out, each as a case by name: the scheduler's
core is driven by hand.
"""

from __future__ import annotations

import pytest
from bench import Bench

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.events import RequestDropped
from nemo_rl.time_sharing.log.state import replay
from nemo_rl.time_sharing.protocol.topology import RegistrationError
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    CommandOutcome,
    Demand,
    GivenBack,
    Held,
    Limits,
    Phase,
    Priority,
    Verb,
    Want,
)
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord, NullRecord


def test_a_planned_release_during_a_hand_over_is_acknowledged_only_when_every_rank_sleeps() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1, 2])
    bench.silent.add("a")
    bench.status("a", demand=Demand(100, 0, 1, 1))
    assert set(bench.phases("a").values()) == {"rising"}
    bench.status("a", demand=Demand(0, 0, 1, 2), leaving=True)
    assert "a" in bench.state.pipelines and set(bench.phases("a").values()) == {"falling"}
    bench.silent.clear()
    bench.settle(5.0)
    assert "a" not in bench.state.pipelines and bench.state.owner == [None] * 4


def test_a_planned_release_with_nothing_awake_ends_at_once() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1])
    bench.status("a", leaving=True)
    assert not bench.state.pipelines


def test_a_release_counts_even_if_the_request_beside_it_is_refused() -> None:
    bench = Bench()
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    epoch = bench.state.pipelines["a"].held[ACTOR_TRAIN].epoch
    bench.status(
        "a", given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),), wants=(Want("critic", Priority.CRITIC_TRAINING, 2, 0),)
    )
    assert not bench.state.pipelines["a"].held and bench.state.owner[0] is None


def test_a_failed_expand_leaves_the_books_true_and_the_donor_can_come_back() -> None:
    bench = Bench(2)
    bench.register("donor", [0], [0, 1])
    bench.register("taker", [1], [0, 1])
    bench.status("donor", demand=Demand(100, 0, 1, 1))
    assert bench.phases("donor") == {0: "serving", 1: "serving"}
    bench.failing.add(("taker", Verb.SERVE))
    bench.settle(20.0)
    bench.status("taker", demand=Demand(100, 0, 1, 1))
    bench.settle(5.0)
    assert bench.phases("taker") == {} and bench.state.pipelines["taker"].cooling
    bench.settle(30.0)
    assert bench.phases("donor") == {0: "serving", 1: "serving"}
    bench.failing.clear()
    bench.settle(100.0)
    assert bench.phases("taker")


def test_log_probs_to_training_never_frees_the_gpus_on_paper() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.OLD_LOG_PROBS, 1, 0),))
    bench.status("b", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    epoch = bench.state.pipelines["a"].held[ACTOR_TRAIN].epoch
    bench.status(
        "a",
        holds=(Held(ACTOR_TRAIN, epoch, Priority.OLD_LOG_PROBS),),
        wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 0),),
    )
    assert (
        bench.state.owner[0].pipeline == "a"
        and bench.state.pipelines["a"].held[ACTOR_TRAIN].priority is Priority.ACTOR_TRAINING
    )
    assert not bench.state.pipelines["b"].held


def test_one_slow_drain_does_not_hold_up_unrelated_pipelines() -> None:
    bench = Bench(4)
    bench.register("slow", [0], [0, 1])
    bench.register("taker", [0], [0, 1])
    bench.register("other", [2], [2, 3])
    bench.status("slow", demand=Demand(100, 0, 1, 1))
    bench.silent.add("slow")
    bench.status("taker", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert bench.phases("slow")[0] == "falling"
    bench.status("other", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert bench.state.pipelines["other"].held
    bench.settle(200.0)
    assert bench.state.pipelines["taker"].held, "the rank that never drained was ended"


def test_a_dead_pipeline_costs_nobody_else_and_its_gpus_come_back() -> None:
    bench = Bench(4)
    bench.state.limits = Limits(lease_s=10.0, isolation_s=0.0, plan_interval_s=0.0)
    bench.register("dead", [0], [0, 1])
    bench.register("alive", [0], [0, 1, 2, 3])
    bench.status("dead", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    for _ in range(20):
        bench.settle(2.0)
        bench.status("alive", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert "dead" not in bench.state.pipelines and bench.state.pipelines["alive"].held
    assert any(command.verb is Verb.REAP and command.pipeline == "dead" for command in bench.sent)


def test_gpus_whose_processes_cannot_be_ended_are_quarantined_and_come_back_when_they_can() -> None:
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=10.0, isolation_s=0.0, reap_s=5.0, quarantine_s=30.0, plan_interval_s=0.0)
    bench.register("stuck", [0], [0, 1])
    bench.status("stuck", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.failing.add(("stuck", Verb.REAP))
    bench.settle(30.0)
    assert bench.state.quarantined == {0} and "stuck" not in bench.state.pipelines
    bench.failing.clear()
    bench.settle(40.0)
    assert not bench.state.quarantined


def test_standing_demand_brings_the_ranks_back_after_a_preemption_without_a_watchdog() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    bench.status("b", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    assert bench.phases("a") == {1: "serving"}
    epoch = bench.state.pipelines["b"].held[ACTOR_TRAIN].epoch
    bench.status("b", given_back=(GivenBack(ACTOR_TRAIN, epoch, 0),))
    assert bench.phases("a") == {0: "serving", 1: "serving"}


def test_a_late_demand_does_not_raise_a_ghost() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(0, 0, 1, 5))
    bench.status("a", demand=Demand(100, 0, 1, 4))
    assert bench.state.pipelines["a"].demand.remaining == 0 and not bench.phases("a")


def test_an_old_incarnation_is_taken_down_before_the_new_one_is_registered() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    with pytest.raises(RegistrationError, match="still registered"):
        bench.register("a", [0], [0, 1], incarnation=1)
    bench.settle(2.0)
    bench.register("a", [0], [0, 1], incarnation=1)
    assert bench.state.pipelines["a"].incarnation == 1


def test_the_log_folds_to_the_state_that_wrote_it() -> None:
    bench = Bench(4)
    bench.register("a", [0], [0, 1])
    bench.register("b", [2], [1, 2, 3])
    bench.status("a", demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.status("b", demand=Demand(50, 0, 1, 1))
    bench.settle(30.0)
    again = replay(bench.record.entries)
    for field in ("owner", "claims", "commands", "epoch", "term", "quarantined"):
        assert getattr(again, field) == getattr(bench.state, field), field
    assert {name: (p.awake, p.held, p.wants, p.demand) for name, p in again.pipelines.items()} == {
        name: (p.awake, p.held, p.wants, p.demand) for name, p in bench.state.pipelines.items()
    }
    assert all(phase in {p.value for p in Phase} for phase in bench.phases("a").values())


def test_a_first_demand_whose_message_is_lost_is_heard_with_the_next_heartbeat() -> None:
    """Once a first generation request without an estimate was skipped by the planner and never repeated."""
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.settle(5.0)
    assert not bench.phases("a")
    bench.status("a", demand=Demand(100, 0, 1, 3))
    assert bench.phases("a") == {0: "serving", 1: "serving"}


def test_engines_are_built_inside_a_grant_only() -> None:
    """Once a second pipeline built its engine beside the training memory of the first, and found no room for its KV
    cache.
    """
    bench = Bench(2)
    bench.register("leader", [0], [0, 1])
    bench.register("follower", [0], [0, 1])
    bench.status("leader", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.status("follower", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    bench.settle(5.0)
    assert not bench.state.pipelines["follower"].held
    epoch = bench.state.pipelines["leader"].held[ACTOR_TRAIN].epoch
    bench.status("leader", given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),))
    assert bench.state.pipelines["follower"].held


def test_no_rank_awake_is_a_legal_state() -> None:
    """Once a refusal of the empty set blocked training on every GPU of a pipeline."""
    bench = Bench(1)
    bench.scheduler.register(
        "a",
        "ns",
        {"actor_train": 1, "actor_infer": 1},
        {"actor_train": [0], "actor_infer": [0]},
        0.0,
        full_overlap=True,
    )
    bench.status("a", demand=Demand(100, 0, 1, 1))
    assert bench.phases("a") == {0: "serving"}
    bench.status("a", demand=Demand(100, 9, 1, 2), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    assert not bench.phases("a") and bench.state.pipelines["a"].held
    epoch = bench.state.pipelines["a"].held[ACTOR_TRAIN].epoch
    bench.status("a", demand=Demand(100, 9, 1, 2), given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),))
    assert bench.phases("a") == {0: "serving"}


def test_a_pipeline_that_dies_while_it_leaves_is_taken_down_once() -> None:
    """Once the automatic and the graceful unregistration met, and the second one failed."""
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=10.0, isolation_s=0.0, plan_interval_s=0.0)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    bench.silent.add("a")
    bench.status("a", demand=Demand(0, 0, 1, 2), leaving=True)
    for _ in range(2):
        bench.scheduler.unregister("a", bench.now)
        bench.scheduler.drain("a", bench.now)
    assert not bench.state.pipelines["a"].fenced, "it is leaving already"
    bench.settle(30.0)
    assert "a" not in bench.state.pipelines and bench.state.owner == [None] * 2
    for _ in range(2):
        bench.scheduler.unregister("a", bench.now)
        bench.scheduler.drain("a", bench.now)


def test_an_answer_that_comes_after_its_pipeline_was_unregistered_changes_nothing() -> None:
    """Once an expand that was committed after the unregistration was taken for corruption of the ledger."""
    bench = Bench(2)
    bench.register("gone", [0], [0, 1])
    bench.register("other", [1], [0, 1])
    bench.silent.add("gone")
    bench.status("gone", demand=Demand(100, 0, 1, 1))
    late = [command for command in bench.sent if command.verb is Verb.SERVE]
    bench.scheduler.unregister("gone", bench.now)
    bench.settle()
    assert "gone" not in bench.state.pipelines
    bench.status("other", demand=Demand(100, 0, 1, 1))
    owners = list(bench.state.owner)
    for command in late:
        bench.scheduler.answer(Answer(command.command, "gone", 0, CommandOutcome.DONE), bench.now)
    bench.settle(5.0)
    assert bench.state.owner == owners and bench.phases("other") == {0: "serving", 1: "serving"}


def test_a_pipeline_that_leaves_gets_nothing_more_whatever_it_still_says() -> None:
    """Once a watchdog's request of a finished run woke its ranks again behind the planned release."""
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.register("b", [1], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    bench.silent.add("a")
    bench.status("a", leaving=True)
    bench.status(
        "a", demand=Demand(100, 0, 1, 7), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 5, 0),), leaving=True
    )
    bench.silent.clear()
    bench.settle(20.0)
    assert "a" not in bench.state.pipelines
    assert not any(command.pipeline == "a" and command.verb is Verb.GRANT for command in bench.sent)


def test_a_drained_pipeline_finishes_the_step_it_holds_gpus_for() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.OLD_LOG_PROBS, 1, 0),))
    bench.scheduler.drain("a", bench.now)
    bench.status("a", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 0),))
    held = bench.state.pipelines["a"].held[ACTOR_TRAIN]
    assert held.priority is Priority.ACTOR_TRAINING
    bench.status("a", given_back=(GivenBack(ACTOR_TRAIN, held.epoch, 1),), demand=Demand(100, 0, 1, 1))
    assert "a" not in bench.state.pipelines


def test_a_job_that_is_lost_ends_nobody_else() -> None:
    """Once waiting for all runs together let the crash of one end them all, and the death of a finished one killed the
    cluster.
    """
    job = {"steps": 3, "groups": 2, "samples_per_group": 4, "train_s": 3.0, "tokens": {"median": 200}}
    jobs = [
        {"name": "lost", "train": [0], "infer": [0, 1], **job, "steps": 100},
        {"name": "kept", "train": [1], "infer": [0, 1], **job},
    ]
    limits = {"lease_s": 12.0, "heartbeat_s": 2.0}
    world = World(
        parse_scenario({"pool": {"gpus_per_node": 2}, "jobs": jobs, "limits": limits, "faults": {"restarts": 0}}),
        0,
        lambda clock: NullRecord(),
    )
    world.loop.at(20.0, world.jobs["lost"].crash)
    world.run()
    assert {name: run.outcome for name, run in world.jobs.items()} == {"lost": "lost: crashed", "kept": "done"}


def test_two_books_of_what_is_awake_are_squared_after_a_restart() -> None:
    """Once five copies of the set of active ranks were kept together by hope."""
    bench = Bench(3)
    bench.register("a", [0], [0, 1, 2])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    epochs = {rank: awake.epoch for rank, awake in bench.state.pipelines["a"].awake.items()}
    again = Bench(3)
    again.seqs = bench.seqs
    again.scheduler.recover(bench.record.entries, bench.now)
    # Rank 0 is as the ledger says, rank 1 sleeps, rank 2 was told to drain in a part of the log that is lost.
    again.status("a", demand=Demand(100, 0, 1, 1), awake=((0, epochs[0]), (2, epochs[2])), serving=(0,))
    assert again.state.pipelines["a"].awake[0].epoch == epochs[0]
    assert {(c.verb, c.rank) for c in again.sent} >= {(Verb.VACATE, 2), (Verb.SERVE, 1)} and (Verb.VACATE, 0) not in {
        (c.verb, c.rank) for c in again.sent
    }
    again.settle(20.0)
    assert set(again.phases("a").values()) == {Phase.SERVING.value}


def test_a_request_that_expires_costs_its_pipeline_no_more_than_asking_again() -> None:
    """Once the pipeline went on asking under the expired number, which counted for nothing, while the GPU it wanted was
    free.
    """
    job = {"steps": 3, "groups": 2, "samples_per_group": 4, "train_s": 5.0, "tokens": {"median": 200}}
    jobs = [{"name": name, "train": [0], "infer": [0, 1], **job} for name in ("a", "b")]
    records: list[MemoryRecord] = []
    limits = {"request_s": 1.0, "lease_s": 12.0, "heartbeat_s": 2.0}
    world = World(
        parse_scenario({"pool": {"gpus_per_node": 2}, "jobs": jobs, "limits": limits, "horizon_s": 2000.0}),
        0,
        lambda clock: records.append(MemoryRecord(clock=clock)) or records[0],
    )
    world.run()
    assert any(
        isinstance(entry.event, RequestDropped) and entry.event.reason == "expired" for entry in records[0].entries
    ), "or this tests nothing"
    assert {name: run.outcome for name, run in world.jobs.items()} == {"a": "done", "b": "done"}
    assert list(check(records[0].entries)) == []
