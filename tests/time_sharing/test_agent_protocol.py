"""Conformance of a pipeline agent: what it is told, what it must answer, and what it must refuse. A real agent has to
pass the same cases.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nemo_rl.time_sharing.agents.agent import Agent, LocalPhase, Operation, ProtocolError, RankStep
from nemo_rl.time_sharing.protocol.topology import Pool, register
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    EndedRequest,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
)
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import MemoryRecord


class RecordingHost:
    """Remembers what the agent did; operations are finished by the test."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.answers: list[Answer] = []
        self.statuses: list[Status] = []
        self.grants: list[tuple[str, Priority]] = []
        self.routed: set[int] = set()
        self.published: list[int] = []
        self.left: bool | None = None
        self.ended: list[tuple[Want, str]] = []

    def perform(self, operation: Operation) -> None:
        self.operations.append(operation)

    def answer(self, answer: Answer) -> None:
        self.answers.append(answer)

    def status(self, status: Status) -> None:
        self.statuses.append(status)

    def granted(self, cluster: str, priority: Priority, step: int) -> None:
        self.grants.append((cluster, priority))

    def request_ended(self, want: Want, reason: str) -> None:
        self.ended.append((want, reason))

    def routing_changed(self, rank: int, active: bool) -> None:
        (self.routed.add if active else self.routed.discard)(rank)

    def refreshed(self, version: int) -> None:
        self.published.append(version)

    def dismissed(self, left: bool) -> None:
        self.left = left


class Bench:
    def __init__(self) -> None:
        self.host, self.record = RecordingHost(), MemoryRecord()
        topology = register(
            Pool(1, 4), "p", "ns", {ACTOR_TRAIN: 1, "actor_infer": 1}, {ACTOR_TRAIN: [0], "actor_infer": [0, 1, 2, 3]}
        )
        self.agent = Agent(topology, 0, self.host, self.record)
        self.number = 0

    def tell(
        self,
        verb: Verb,
        rank: int = -1,
        epoch: int = 1,
        *,
        finish: bool = True,
        ok: bool = True,
        command: Command | None = None,
        **fields: object,
    ) -> Answer | None:
        before = len(self.host.answers)
        if command is None:
            self.number += 1
            command = Command(f"1.{self.number}", 1, "p", 0, verb, rank, epoch, **fields)  # type: ignore[arg-type]
        self.last = command
        self.agent.command(command)
        if finish:
            self.finish(ok=ok)
        return self.host.answers[-1] if len(self.host.answers) > before else None

    def finish(self, *, ok: bool = True, until: RankStep | None = None) -> None:
        """Ends operations, and those that follow them, as far as `until`, which stays open."""
        while self.host.operations and self.host.operations[0].kind is not until:
            self.agent.performed(self.host.operations.pop(0), ok)

    def route(self, rank: int, epoch: int = 1) -> None:
        answer = self.tell(Verb.SERVE, rank, epoch)
        assert answer is not None and answer.outcome is CommandOutcome.DONE, answer

    def rises(self, rank: int, until: RankStep) -> None:
        """The rank is told to serve, and has come as far as `until`."""
        self.tell(Verb.SERVE, rank, finish=False)
        self.finish(until=until)

    def grant(self, priority: Priority = Priority.ACTOR_TRAINING, epoch: int = 9) -> Answer | None:
        request = self.agent.wants[ACTOR_TRAIN].request
        what = {"cluster": ACTOR_TRAIN, "gpus": (0,), "priority": priority, "request": request}
        return self.tell(Verb.GRANT, epoch=epoch, finish=False, **what)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def outcome(answer: Answer | None) -> CommandOutcome | None:
    return None if answer is None else answer.outcome


def test_a_rank_wakes_syncs_publishes_and_is_routed_last(bench: Bench) -> None:
    bench.route(1)
    kinds = [type(entry.event).__name__ for entry in bench.record.entries]
    assert kinds == ["MemoryTaken", "ShardWoken", "SyncStarted", "SyncFinished", "VersionPublished", "ShardRouted"]
    assert bench.host.routed == {1}


def test_a_rank_drains_before_it_sleeps_and_takes_no_request_from_the_start(bench: Bench) -> None:
    bench.route(1)
    assert bench.tell(Verb.VACATE, 1, finish=False) is None
    assert bench.host.routed == set() and [operation.kind for operation in bench.host.operations] == [RankStep.DRAIN]
    bench.finish(until=RankStep.SLEEP)
    assert bench.host.operations and bench.agent.ranks[1].phase is LocalPhase.SLEEPING
    bench.finish()
    assert outcome(bench.host.answers[-1]) is CommandOutcome.DONE
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP and bench.agent.ranks[1].version == -1


def test_a_repeated_command_is_answered_from_memory_and_done_once(bench: Bench) -> None:
    bench.tell(Verb.SERVE, 1)
    first = bench.host.answers[-1]
    bench.tell(Verb.SERVE, command=bench.last)
    assert bench.host.answers[-1] == first and not bench.host.operations


def test_a_repeated_command_in_progress_is_not_begun_twice(bench: Bench) -> None:
    bench.tell(Verb.SERVE, 1, finish=False)
    bench.tell(Verb.SERVE, command=bench.last, finish=False)
    assert len(bench.host.operations) == 1


def test_a_command_of_a_past_epoch_term_or_incarnation_is_not_obeyed(bench: Bench) -> None:
    bench.route(1, epoch=5)
    assert outcome(bench.tell(Verb.VACATE, 1, epoch=4)) is CommandOutcome.REFUSED
    answers = len(bench.host.answers)
    bench.agent.heard(Reply("p", 0, 3, True))
    bench.tell(Verb.VACATE, 1, epoch=5)
    bench.tell(Verb.VACATE, command=Command("9.1", 9, "p", 7, Verb.VACATE, 1, 5))
    assert len(bench.host.answers) == answers and bench.host.routed == {1}


def test_a_command_overtaken_on_the_wire_does_not_undo_the_later_one(bench: Bench) -> None:
    bench.tell(Verb.VACATE, command=Command("1.2", 1, "p", 0, Verb.VACATE, 1, 1))
    overtaken = Command("1.1", 1, "p", 0, Verb.SERVE, 1, 1)
    assert outcome(bench.tell(Verb.SERVE, command=overtaken)) is CommandOutcome.REFUSED
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP


def test_unknown_ranks_and_commands_that_make_no_sense_are_refused_with_a_reason(bench: Bench) -> None:
    assert bench.tell(Verb.SERVE, 4).detail == "there is no rank 4; ranks are 0..3"  # type: ignore[union-attr]
    assert bench.tell(Verb.REAP, 1).detail == "reap is not for an agent"  # type: ignore[union-attr]
    bench.route(2)
    assert "its engine is built" in bench.tell(Verb.BUILD, 2).detail  # type: ignore[union-attr]
    bench.tell(Verb.VACATE, 2, ok=False)
    assert bench.tell(Verb.SERVE, 2).detail == "rank 2 is draining; it has to sleep first"  # type: ignore[union-attr]


def test_a_lease_that_ended_before_its_serve_came_is_not_begun_by_a_later_scheduler(bench: Bench) -> None:
    """The SERVE was lost on its way, and the next scheduler knows of no VACATE, since its log has lost its end."""
    assert outcome(bench.tell(Verb.VACATE, 1, epoch=5)) is CommandOutcome.DONE
    again = Command("1001.1", 1001, "p", 0, Verb.SERVE, 1, 5)
    assert outcome(bench.tell(Verb.SERVE, command=again)) is CommandOutcome.REFUSED
    built = Command("1001.2", 1001, "p", 0, Verb.BUILD, 1, 5)
    assert outcome(bench.tell(Verb.BUILD, command=built)) is CommandOutcome.DONE
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP and not bench.record.entries
    later = Command("1001.3", 1001, "p", 0, Verb.SERVE, 1, 6)
    assert outcome(bench.tell(Verb.SERVE, command=later)) is CommandOutcome.DONE


@pytest.mark.parametrize("step", [RankStep.WAKE, RankStep.SYNC])
def test_a_vacate_that_meets_a_step_of_the_rise_waits_for_it_and_wins(bench: Bench, step: RankStep) -> None:
    bench.rises(1, step)
    assert bench.tell(Verb.VACATE, 1, finish=False) is None
    bench.finish()
    assert [answer.outcome for answer in bench.host.answers] == [CommandOutcome.REFUSED, CommandOutcome.DONE]
    assert bench.host.answers[0].detail == "command 1.2 takes over" and not bench.host.routed
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP


def test_a_serve_of_a_new_scheduler_goes_on_where_the_rank_is(bench: Bench) -> None:
    bench.rises(1, RankStep.SYNC)
    bench.tell(Verb.SERVE, command=Command("2.1", 2, "p", 0, Verb.SERVE, 1, 1), finish=False)
    assert [operation.kind for operation in bench.host.operations] == [RankStep.SYNC]
    bench.finish()
    assert bench.host.answers[-1].command == "2.1" and bench.host.routed == {1}
    assert sum(isinstance(entry.event, rec.ShardWoken) for entry in bench.record.entries) == 1


def test_a_vacate_of_a_new_scheduler_goes_on_where_the_rank_is(bench: Bench) -> None:
    bench.route(1)
    bench.tell(Verb.VACATE, 1, finish=False)
    bench.tell(Verb.VACATE, command=Command("2.1", 2, "p", 0, Verb.VACATE, 1, 1), finish=False)
    kinds = []
    while bench.host.operations:
        kinds.append(bench.host.operations[0].kind)
        bench.agent.performed(bench.host.operations.pop(0), True)
    assert kinds == [RankStep.DRAIN, RankStep.SLEEP] and bench.host.answers[-1].command == "2.1"
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP


def test_a_rank_that_did_not_drain_is_drained_again(bench: Bench) -> None:
    bench.route(1)
    assert outcome(bench.tell(Verb.VACATE, 1, ok=False)) is CommandOutcome.FAILED
    bench.tell(Verb.VACATE, 1, finish=False)
    assert [operation.kind for operation in bench.host.operations] == [RankStep.DRAIN]


def test_a_wake_that_failed_is_tried_again_and_not_taken_for_done(bench: Bench) -> None:
    assert outcome(bench.tell(Verb.SERVE, 1, ok=False)) is CommandOutcome.FAILED
    bench.tell(Verb.SERVE, 1, finish=False)
    assert [operation.kind for operation in bench.host.operations] == [RankStep.WAKE]


def test_a_sync_that_failed_can_be_repeated(bench: Bench) -> None:
    bench.rises(1, RankStep.SYNC)
    bench.finish(ok=False)
    assert outcome(bench.host.answers[-1]) is CommandOutcome.FAILED
    bench.tell(Verb.SERVE, 1, finish=False)
    assert [operation.kind for operation in bench.host.operations] == [RankStep.SYNC]
    bench.finish()
    assert outcome(bench.host.answers[-1]) is CommandOutcome.DONE


def test_a_rank_that_broke_serves_again_only_after_it_slept(bench: Bench) -> None:
    bench.route(1)
    bench.agent.rank_broken(1)
    assert bench.tell(Verb.SERVE, 1).detail == "rank 1 is broken; it has to sleep first"  # type: ignore[union-attr]
    bench.tell(Verb.VACATE, 1)
    bench.route(1, epoch=2)


def train(bench: Bench, version: int) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, version - 1, 0.0)
    bench.grant(epoch=100 + version)
    bench.agent.cache_built(version)


def test_a_rank_that_synced_before_new_weights_takes_them_before_it_is_routed(bench: Bench) -> None:
    bench.route(3)
    bench.rises(1, RankStep.SYNC)
    train(bench, 1)
    bench.agent.performed(bench.host.operations.pop(0), True)
    assert [(operation.kind, operation.version) for operation in bench.host.operations] == [(RankStep.SYNC, 1)]
    bench.finish()
    assert bench.host.routed == {3} and bench.agent.ranks[1].version == 1
    bench.agent.refresh()
    bench.finish()
    assert bench.host.routed == {1, 3}


def test_a_rank_with_newer_weights_is_published_when_the_refresh_is_done(bench: Bench) -> None:
    bench.route(3)
    bench.rises(1, RankStep.SYNC)
    bench.host.operations.clear()
    train(bench, 1)
    bench.agent.performed(bench.agent.ranks[1].busy, True, 1)
    assert bench.agent.ranks[1].phase is LocalPhase.READY and bench.host.routed == {3}
    bench.agent.refresh()
    bench.finish()
    assert bench.host.published == [1] and bench.host.routed == {1, 3}
    assert bench.host.answers[-1].outcome is CommandOutcome.DONE and bench.host.answers[-1].version == 1


def test_refresh_reaches_every_serving_rank_before_the_version_is_out(bench: Bench) -> None:
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.refresh()
    assert [operation.kind for operation in bench.host.operations] == [
        RankStep.REFRESH,
        RankStep.REFRESH,
    ] and not bench.host.published
    bench.finish()
    assert bench.host.published == [1] and {bench.agent.ranks[r].version for r in (1, 2)} == {1}


def refreshed_while_rank_2_takes_the_version_before(bench: Bench) -> Operation:
    """Rank 1 has version 1 and takes version 2; rank 2's operation, which still brings version 1."""
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.refresh()
    first, second = bench.host.operations
    bench.host.operations.clear()
    bench.agent.performed(first, True)
    bench.agent.cache_built(2)
    bench.agent.refresh()
    return second


def test_a_version_that_comes_while_a_rank_takes_the_one_before_reaches_it_too(bench: Bench) -> None:
    second = refreshed_while_rank_2_takes_the_version_before(bench)
    assert not bench.host.published
    bench.agent.performed(second, True)
    assert [(operation.rank, operation.version) for operation in bench.host.operations] == [(1, 2), (2, 2)]
    bench.finish()
    assert bench.host.published == [2] and {bench.agent.ranks[r].version for r in (1, 2)} == {2}


def test_a_rank_that_drains_while_it_takes_old_weights_holds_up_no_publication(bench: Bench) -> None:
    second = refreshed_while_rank_2_takes_the_version_before(bench)
    bench.tell(Verb.VACATE, 2, finish=False)
    bench.agent.performed(second, True)
    bench.finish()
    assert bench.host.published == [2] and bench.host.routed == {1}
    assert (bench.agent.ranks[1].version, bench.agent.ranks[2].phase) == (2, LocalPhase.ASLEEP)


def test_with_no_rank_awake_the_refresh_is_nothing_and_publishes(bench: Bench) -> None:
    train(bench, 1)
    bench.agent.refresh()
    assert bench.host.published == [1]


def test_a_rank_that_is_ended_between_cache_and_refresh_does_not_publish_for_the_others(bench: Bench) -> None:
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.rank_ended(2)
    assert not bench.host.published and bench.agent.published == 0
    bench.agent.refresh()
    bench.finish()
    assert bench.host.published == [1] and bench.agent.ranks[1].version == 1


def test_a_rank_whose_refresh_fails_serves_no_more_and_the_scheduler_is_told(bench: Bench) -> None:
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.refresh()
    failing = bench.host.operations.pop(0)
    bench.agent.performed(failing, False)
    bench.finish()
    assert bench.host.published == [1] and bench.host.routed == {2}
    assert bench.host.statuses[-1].broken == (1,)


def test_training_gpus_cannot_be_given_back_before_the_publication(bench: Bench) -> None:
    bench.route(1)
    train(bench, 1)
    with pytest.raises(ProtocolError, match="publish before the release"):
        bench.agent.release(ACTOR_TRAIN)
    bench.agent.refresh()
    bench.finish()
    bench.agent.release(ACTOR_TRAIN)
    assert bench.host.statuses[-1].given_back[0].version == 1


def test_a_cache_is_built_only_on_held_training_gpus_and_versions_grow(bench: Bench) -> None:
    with pytest.raises(ProtocolError, match="while the training GPUs are held"):
        bench.agent.cache_built(1)
    train(bench, 1)
    with pytest.raises(ProtocolError, match="does not follow"):
        bench.agent.cache_built(1)


def test_a_grant_that_nobody_waits_for_any_more_is_refused(bench: Bench) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    request = bench.agent.wants[ACTOR_TRAIN].request
    bench.agent.withdraw(ACTOR_TRAIN)
    assert (
        outcome(
            bench.tell(
                Verb.GRANT, epoch=3, cluster=ACTOR_TRAIN, gpus=(0,), priority=Priority.ACTOR_TRAINING, request=request
            )
        )
        is CommandOutcome.REFUSED
    )
    assert not bench.agent.holds


def test_a_grant_repeated_under_another_command_trains_once(bench: Bench) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    bench.grant()
    bench.tell(Verb.GRANT, epoch=9, cluster=ACTOR_TRAIN, gpus=(0,), priority=Priority.ACTOR_TRAINING, request=1)
    assert bench.host.grants == [(ACTOR_TRAIN, Priority.ACTOR_TRAINING)]


def test_a_held_cluster_goes_from_log_probs_to_training_in_place(bench: Bench) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.OLD_LOG_PROBS, 0, 0.0)
    bench.grant(Priority.OLD_LOG_PROBS)
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    bench.grant(Priority.ACTOR_TRAINING)
    assert bench.host.grants == [(ACTOR_TRAIN, Priority.OLD_LOG_PROBS), (ACTOR_TRAIN, Priority.ACTOR_TRAINING)]
    assert sum(type(entry.event).__name__ == "MemoryTaken" for entry in bench.record.entries) == 1


def test_a_grant_for_log_probs_that_a_new_scheduler_repeats_too_late_does_not_undo_training(bench: Bench) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.OLD_LOG_PROBS, 0, 0.0)
    first = bench.agent.wants[ACTOR_TRAIN].request
    bench.grant(Priority.OLD_LOG_PROBS)
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    bench.grant()
    late = bench.tell(
        Verb.GRANT, epoch=9, cluster=ACTOR_TRAIN, gpus=(0,), priority=Priority.OLD_LOG_PROBS, request=first
    )
    assert outcome(late) is CommandOutcome.DONE
    assert bench.agent.holds[ACTOR_TRAIN].priority is Priority.ACTOR_TRAINING
    assert bench.host.grants == [(ACTOR_TRAIN, Priority.OLD_LOG_PROBS), (ACTOR_TRAIN, Priority.ACTOR_TRAINING)]


def test_what_cannot_be_asked_for_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(ProtocolError, match="cannot be requested"):
        bench.agent.want("critic", Priority.CRITIC_TRAINING, 0, 0.0)
    with pytest.raises(ProtocolError, match="cannot be requested"):
        bench.agent.want("actor_infer", Priority.GENERATION, 0, 0.0)
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    with pytest.raises(ProtocolError, match="requested already"):
        bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)


def test_progress_is_sent_every_two_percent_and_any_other_demand_at_once(bench: Bench) -> None:
    bench.agent.set_demand(200)
    sent = len(bench.host.statuses)
    for done in range(201):
        bench.agent.set_demand(200, done)
    assert len(bench.host.statuses) - sent == 51, "the first of them is no progress"
    for demand in ((200, 199), (201, 199), (201, 199, 2), (201, 199, 2), (0, 0), (0, 0)):
        sent = len(bench.host.statuses)
        bench.agent.set_demand(*demand)
        assert len(bench.host.statuses) == sent + 1 and bench.host.statuses[-1].demand[:2] == demand[:2]
    with pytest.raises(ProtocolError, match="target=-1 must be a whole number from 0"):
        bench.agent.set_demand(-1)


def test_each_new_demand_has_a_larger_sequence_number(bench: Bench) -> None:
    for call in (
        lambda: bench.agent.set_demand(10),
        lambda: bench.agent.set_demand(10, 5),
        lambda: bench.agent.set_demand(0),
        bench.agent.leave,
    ):
        before = bench.agent.demand.seq
        call()
        assert bench.agent.demand.seq == before + 1


def test_an_agent_that_is_no_longer_registered_stops_obeying(bench: Bench) -> None:
    bench.agent.heard(Reply("p", 0, 1, False))
    assert bench.host.left is False
    assert bench.tell(Verb.SERVE, 1) is None and not bench.host.operations


def test_a_rank_whose_processes_were_ended_is_asleep_and_can_wake_again(bench: Bench) -> None:
    bench.route(1)
    bench.agent.rank_ended(1)
    assert bench.host.routed == set() and bench.agent.ranks[1].phase is LocalPhase.ASLEEP
    bench.route(1, epoch=2)


def test_every_wait_is_recorded_with_its_deadline(bench: Bench) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 10.0)
    begun = bench.record.entries[-1].event
    assert isinstance(begun, rec.WaitBegun) and begun.deadline > 10.0
    bench.grant()
    assert any(isinstance(entry.event, rec.WaitEnded) for entry in bench.record.entries)


@pytest.mark.parametrize(
    ("cluster", "priority"),
    [
        ("actor_infer", Priority.INITIALIZATION),
        ("actor_infer", Priority.ACTOR_TRAINING),
        (ACTOR_TRAIN, Priority.GENERATION),
        (ACTOR_TRAIN, 1),
        (ACTOR_TRAIN, None),
    ],
)
def test_generation_is_no_request_and_a_request_names_a_fixed_purpose(
    bench: Bench, cluster: str, priority: Priority
) -> None:
    said = len(bench.host.statuses)
    with pytest.raises(
        ProtocolError,
        match=r"cannot be requested: requests are for one of the registered fixed clusters \['actor_train'\]",
    ) as caught:
        bench.agent.want(cluster, priority, 0, 0.0)
    assert ("report demand (set_demand) instead" in str(caught.value)) == (
        cluster == "actor_infer" or priority is Priority.GENERATION
    )
    assert not bench.agent.wants and len(bench.host.statuses) == said


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, "5", None, -1, 10**400])
def test_progress_that_is_no_count_is_refused(bench: Bench, value: Any) -> None:
    bench.agent.set_demand(100)
    demand, said = bench.agent.demand, len(bench.host.statuses)
    for report in (
        lambda: bench.agent.set_demand(value),
        lambda: bench.agent.set_demand(10, value),
        lambda: bench.agent.set_demand(10, 0, value),
        lambda: bench.agent.batch_measured(value),
    ):
        with pytest.raises(ProtocolError, match="must be a whole number"):
            report()
    assert bench.agent.demand == demand and len(bench.host.statuses) == said


def test_a_measured_batch_is_said_with_every_demand_from_the_next_one_on(bench: Bench) -> None:
    bench.agent.set_demand(100)
    bench.agent.batch_measured(16)
    assert bench.agent.demand.rank_batch == 0
    bench.agent.set_demand(100, 50)
    bench.agent.set_demand(0)
    bench.agent.set_demand(100)
    assert [status.demand.rank_batch for status in bench.host.statuses[-3:]] == [16, 16, 16]
    with pytest.raises(ProtocolError, match="rank_batch=0 must be a whole number from 1"):
        bench.agent.batch_measured(0)


def test_counts_of_an_array_are_counts(bench: Bench) -> None:
    bench.agent.set_demand(np.int64(10), np.int32(2))
    assert bench.agent.demand[:3] == (10, 2, 1) and type(bench.agent.demand.target) is int


def test_a_request_that_the_scheduler_has_ended_is_told_to_the_host_and_may_be_made_again(bench: Bench) -> None:
    first = bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 3, 0.0)
    reply = Reply("p", 0, 1, True, (EndedRequest(first, "it waited too long"),))
    bench.agent.heard(reply)
    assert [(want.request, want.step, reason) for want, reason in bench.host.ended] == [
        (first, 3, "it waited too long")
    ]
    assert bench.record.entries[-1].event == rec.WaitEnded(f"p.0.{first}", "expired")
    second = bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 3, 0.0)
    assert second > first and bench.host.statuses[-1].wants[0].request == second
    bench.agent.heard(reply)
    assert ACTOR_TRAIN in bench.agent.wants and len(bench.host.ended) == 1, "a late reply ends no newer request"
    bench.grant()
    assert bench.host.grants == [(ACTOR_TRAIN, Priority.ACTOR_TRAINING)]


def test_an_engine_that_is_built_ahead_wakes_and_falls_without_weights_and_may_do_so_before_the_first_version() -> None:
    bench = Bench()
    bench.agent.builds_ahead()
    assert bench.host.statuses[-1].builds
    bench.tell(Verb.BUILD, 1, 1, finish=False)
    # Training is initialised meanwhile.
    bench.agent.begin_at(7)
    bench.finish()
    assert outcome(bench.host.answers[-1]) is CommandOutcome.DONE
    assert bench.agent.ranks[1].phase is LocalPhase.ASLEEP and bench.host.routed == set()
    assert not [e for e in bench.record.entries if isinstance(e.event, (rec.SyncStarted, rec.ShardRouted))]
    # Its first rise brings the weights that there are by then.
    bench.route(1, epoch=2)
    assert bench.agent.ranks[1].version == 7 and bench.host.routed == {1}
    with pytest.raises(ProtocolError, match="ranks have weights"):
        bench.agent.begin_at(8)


@pytest.mark.parametrize("step", [RankStep.WAKE, RankStep.SYNC])
def test_a_step_that_does_not_end_fails_its_command_and_those_that_follow_until_the_processes_are_ended(
    bench: Bench, step: RankStep
) -> None:
    bench.rises(1, step)
    bench.agent.step_overdue(bench.host.operations[0])
    assert outcome(bench.host.answers[-1]) is CommandOutcome.FAILED
    assert bench.host.answers[-1].detail == f"{step.value} of rank 1 does not end"
    # It cannot fall either, so that its processes are ended at once and not after another deadline.
    assert outcome(bench.tell(Verb.VACATE, 1, finish=False)) is CommandOutcome.FAILED
    late = bench.host.operations.pop()
    bench.agent.rank_ended(1)
    bench.agent.performed(late, True)
    bench.route(1, epoch=2)


def test_a_step_that_ends_after_all_leaves_the_rank_to_the_next_command(bench: Bench) -> None:
    bench.rises(1, RankStep.SYNC)
    bench.tell(Verb.VACATE, 1, finish=False)
    bench.agent.step_overdue(bench.host.operations[0])
    assert [answer.outcome for answer in bench.host.answers] == [CommandOutcome.FAILED, CommandOutcome.FAILED]
    bench.finish()
    assert bench.agent.ranks[1].phase is LocalPhase.READY and not bench.host.routed
    assert outcome(bench.tell(Verb.VACATE, 1)) is CommandOutcome.DONE


def test_a_refresh_that_does_not_end_takes_the_rank_out_of_service(bench: Bench) -> None:
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.refresh()
    hangs, ends = bench.host.operations
    bench.host.operations.clear()
    bench.agent.performed(ends, True)
    bench.agent.step_overdue(hangs)
    assert bench.host.routed == {2} and bench.host.statuses[-1].broken == (1,)
    assert bench.host.published == [1]
