"""Conformance of a pipeline agent: what it is told, what it must answer, and what it must refuse. A real agent has to
pass the same cases.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.agent_ranks import REFRESH, Operation, ProtocolError
from nemo_rl.time_sharing.protocol.topology import Pool, register
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    EndedRequest,
    Phase,
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

    def finish(self, *, ok: bool = True) -> None:
        for operation in list(self.host.operations):
            self.host.operations.remove(operation)
            self.agent.performed(operation, ok)

    def route(self, rank: int, epoch: int = 1) -> None:
        for verb in (Verb.WAKE, Verb.SYNC, Verb.PUBLISH, Verb.ROUTE):
            answer = self.tell(verb, rank, epoch)
            assert answer is not None and answer.outcome is CommandOutcome.DONE, (verb, answer)

    def grant(self, priority: Priority = Priority.ACTOR_TRAINING, epoch: int = 9) -> Answer | None:
        request = self.agent.wants[ACTOR_TRAIN].request
        return self.tell(Verb.GRANT, epoch=epoch, cluster=ACTOR_TRAIN, gpus=(0,), priority=priority, request=request)


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
    assert bench.tell(Verb.DRAIN, 1, finish=False) is None
    assert bench.host.routed == set()
    bench.finish()
    assert outcome(bench.host.answers[-1]) is CommandOutcome.DONE
    assert outcome(bench.tell(Verb.SLEEP, 1)) is CommandOutcome.DONE
    assert bench.agent.ranks[1].phase is Phase.ASLEEP and bench.agent.ranks[1].version == -1


def test_a_repeated_command_is_answered_from_memory_and_done_once(bench: Bench) -> None:
    bench.tell(Verb.WAKE, 1)
    first = bench.host.answers[-1]
    bench.tell(Verb.WAKE, command=bench.last)
    assert bench.host.answers[-1] == first and not bench.host.operations


def test_a_repeated_command_in_progress_is_not_begun_twice(bench: Bench) -> None:
    bench.tell(Verb.WAKE, 1, finish=False)
    bench.tell(Verb.WAKE, command=bench.last, finish=False)
    assert len(bench.host.operations) == 1


def test_a_command_of_a_past_epoch_term_or_incarnation_is_not_obeyed(bench: Bench) -> None:
    bench.route(1, epoch=5)
    assert outcome(bench.tell(Verb.DRAIN, 1, epoch=4)) is CommandOutcome.REFUSED
    answers = len(bench.host.answers)
    bench.agent.heard(Reply("p", 0, 3, True))
    bench.tell(Verb.DRAIN, 1, epoch=5)
    bench.tell(Verb.DRAIN, command=Command("9.1", 9, "p", 7, Verb.DRAIN, 1, 5))
    assert len(bench.host.answers) == answers and bench.host.routed == {1}


def test_a_command_overtaken_on_the_wire_does_not_undo_the_later_one(bench: Bench) -> None:
    bench.tell(Verb.DRAIN, command=Command("1.2", 1, "p", 0, Verb.DRAIN, 1, 1))
    assert outcome(bench.tell(Verb.WAKE, command=Command("1.1", 1, "p", 0, Verb.WAKE, 1, 1))) is CommandOutcome.REFUSED
    assert bench.agent.ranks[1].phase is Phase.ASLEEP


def test_unknown_ranks_and_commands_out_of_order_are_refused_with_a_reason(bench: Bench) -> None:
    assert bench.tell(Verb.WAKE, 4).detail == "there is no rank 4; ranks are 0..3"  # type: ignore[union-attr]
    assert outcome(bench.tell(Verb.SYNC, 1)) is CommandOutcome.REFUSED
    assert outcome(bench.tell(Verb.ROUTE, 1)) is CommandOutcome.REFUSED
    bench.route(2)
    assert "drain it before" in bench.tell(Verb.SLEEP, 2).detail  # type: ignore[union-attr]


@pytest.mark.parametrize("ends", [(Verb.DRAIN, Verb.SLEEP), (Verb.DRAIN,), (Verb.SLEEP,)])
def test_a_lease_that_ended_before_its_wake_came_is_not_begun_by_a_later_scheduler(
    bench: Bench, ends: tuple[Verb, ...]
) -> None:
    """The wake was lost on its way, and the next scheduler knows of no drain, since its log has lost its end."""
    for verb in ends:
        assert outcome(bench.tell(verb, 1, epoch=5)) is CommandOutcome.DONE
    again = Command("1001.1", 1001, "p", 0, Verb.WAKE, 1, 5)
    assert outcome(bench.tell(Verb.WAKE, command=again)) is CommandOutcome.REFUSED
    assert bench.agent.ranks[1].phase is Phase.ASLEEP
    later = Command("1001.2", 1001, "p", 0, Verb.WAKE, 1, 6)
    assert outcome(bench.tell(Verb.WAKE, command=later)) is CommandOutcome.DONE


def test_a_drain_that_meets_a_wake_waits_for_it_and_wins(bench: Bench) -> None:
    bench.tell(Verb.WAKE, 1, finish=False)
    assert bench.tell(Verb.DRAIN, 1, finish=False) is None
    bench.finish()
    assert [answer.outcome for answer in bench.host.answers] == [CommandOutcome.DONE, CommandOutcome.DONE]
    assert bench.agent.ranks[1].phase is Phase.DRAINING


def test_a_wake_that_failed_is_tried_again_and_not_taken_for_done(bench: Bench) -> None:
    assert outcome(bench.tell(Verb.WAKE, 1, ok=False)) is CommandOutcome.FAILED
    assert outcome(bench.tell(Verb.SYNC, 1)) is CommandOutcome.REFUSED
    bench.tell(Verb.WAKE, 1, finish=False)
    assert [operation.kind for operation in bench.host.operations] == ["wake"]


def test_a_sync_that_failed_can_be_repeated(bench: Bench) -> None:
    bench.tell(Verb.WAKE, 1)
    assert outcome(bench.tell(Verb.SYNC, 1, ok=False)) is CommandOutcome.FAILED
    assert outcome(bench.tell(Verb.SYNC, 1)) is CommandOutcome.DONE


def train(bench: Bench, version: int) -> None:
    bench.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, version - 1, 0.0)
    bench.grant(epoch=100 + version)
    bench.agent.cache_built(version)


def test_a_rank_that_synced_before_new_weights_is_stale_at_publish_and_at_route(bench: Bench) -> None:
    for verb in (Verb.WAKE, Verb.SYNC):
        bench.tell(verb, 1)
    for verb in (Verb.WAKE, Verb.SYNC, Verb.PUBLISH):
        bench.tell(verb, 2)
    train(bench, 1)
    assert outcome(bench.tell(Verb.PUBLISH, 1)) is CommandOutcome.STALE
    assert outcome(bench.tell(Verb.ROUTE, 2)) is CommandOutcome.STALE


def test_a_rank_with_newer_weights_is_published_when_the_refresh_is_done(bench: Bench) -> None:
    bench.route(3)
    bench.tell(Verb.WAKE, 1)
    train(bench, 1)
    bench.tell(Verb.SYNC, 1)
    assert bench.tell(Verb.PUBLISH, 1) is None
    bench.agent.refresh()
    bench.finish()
    assert bench.host.published == [1]
    assert bench.host.answers[-1].outcome is CommandOutcome.DONE and bench.host.answers[-1].version == 1


def test_refresh_reaches_every_serving_rank_before_the_version_is_out(bench: Bench) -> None:
    bench.route(1)
    bench.route(2)
    train(bench, 1)
    bench.agent.refresh()
    assert [operation.kind for operation in bench.host.operations] == [REFRESH, REFRESH] and not bench.host.published
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
    bench.tell(Verb.DRAIN, 2, finish=False)
    bench.agent.performed(second, True)
    bench.finish()
    assert bench.host.published == [2] and bench.host.routed == {1}
    assert (bench.agent.ranks[1].version, bench.agent.ranks[2].phase) == (2, Phase.DRAINING)


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


def test_progress_is_sent_every_two_percent_and_cannot_go_back(bench: Bench) -> None:
    bench.agent.begin_progress(200)
    sent = len(bench.host.statuses)
    for done in range(201):
        bench.agent.report_progress(done)
    assert len(bench.host.statuses) - sent == 50
    with pytest.raises(ProtocolError, match="from 200 back to 3"):
        bench.agent.report_progress(3)
    with pytest.raises(ProtocolError, match="target=-1 must be a whole number from 0"):
        bench.agent.begin_progress(-1)


def test_each_new_demand_has_a_larger_sequence_number(bench: Bench) -> None:
    for call in (
        lambda: bench.agent.begin_progress(10),
        lambda: bench.agent.report_progress(5),
        bench.agent.end_progress,
    ):
        before = bench.agent.demand.seq
        call()
        assert bench.agent.demand.seq == before + 1


def test_an_agent_that_is_no_longer_registered_stops_obeying(bench: Bench) -> None:
    bench.agent.heard(Reply("p", 0, 1, False))
    assert bench.host.left is False
    assert bench.tell(Verb.WAKE, 1) is None and not bench.host.operations


def test_a_rank_whose_processes_were_ended_is_asleep_and_can_wake_again(bench: Bench) -> None:
    bench.route(1)
    bench.agent.rank_ended(1)
    assert bench.host.routed == set() and bench.agent.ranks[1].phase is Phase.ASLEEP
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
    assert ("report demand (begin_progress) instead" in str(caught.value)) == (
        cluster == "actor_infer" or priority is Priority.GENERATION
    )
    assert not bench.agent.wants and len(bench.host.statuses) == said


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.5, "5", None, -1, 10**400])
def test_progress_that_is_no_count_is_refused(bench: Bench, value: Any) -> None:
    bench.agent.begin_progress(100)
    demand, said = bench.agent.demand, len(bench.host.statuses)
    for report in (
        lambda: bench.agent.begin_progress(value),
        lambda: bench.agent.begin_progress(10, value),
        lambda: bench.agent.begin_progress(10, 0, value),
        lambda: bench.agent.report_progress(value),
        lambda: bench.agent.batch_measured(value),
    ):
        with pytest.raises(ProtocolError, match="must be a whole number"):
            report()
    assert bench.agent.demand == demand and len(bench.host.statuses) == said


def test_a_measured_batch_is_said_with_every_demand_from_the_next_one_on(bench: Bench) -> None:
    bench.agent.begin_progress(100)
    bench.agent.batch_measured(16)
    assert bench.agent.demand.rank_batch == 0
    bench.agent.report_progress(50)
    bench.agent.end_progress()
    bench.agent.begin_progress(100)
    assert [status.demand.rank_batch for status in bench.host.statuses[-3:]] == [16, 16, 16]
    with pytest.raises(ProtocolError, match="rank_batch=0 must be a whole number from 1"):
        bench.agent.batch_measured(0)


def test_counts_of_an_array_are_counts(bench: Bench) -> None:
    bench.agent.begin_progress(np.int64(10), np.int32(2))
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
    bench.tell(Verb.WAKE, 1, 1, finish=False)
    # Training is initialised meanwhile, and the command to fall finds the engine standing.
    bench.agent.begin_at(7)
    bench.finish()
    assert [bench.tell(verb, 1, 1).outcome for verb in (Verb.DRAIN, Verb.SLEEP)] == [CommandOutcome.DONE] * 2  # type: ignore[union-attr]
    assert bench.agent.ranks[1].phase is Phase.ASLEEP and bench.host.routed == set()
    assert not [e for e in bench.record.entries if isinstance(e.event, (rec.SyncStarted, rec.ShardRouted))]
    # Its first wake brings the weights that there are by then.
    for verb in (Verb.WAKE, Verb.SYNC, Verb.PUBLISH, Verb.ROUTE):
        bench.tell(verb, 1, 2)
    assert bench.agent.ranks[1].version == 7 and bench.host.routed == {1}
    with pytest.raises(ProtocolError, match="ranks have weights"):
        bench.agent.begin_at(8)
