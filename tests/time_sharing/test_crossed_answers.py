"""Answers that cross what came after them."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    GivenBack,
    Limits,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import MemoryRecord

TPS, GPUS = {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}


def scheduler_and_commands(record: MemoryRecord | None = None) -> tuple[Scheduler, list[Command]]:
    sent: list[Command] = []
    clock = SteadyClock(max_step_s=1e3)
    record = record or MemoryRecord(clock=lambda: clock.now)
    return Scheduler(record, sent.append, clock), sent


def asks(request: int) -> Status:
    return Status("a", 0, request, wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, request),))


def test_the_refusal_of_a_grant_takes_nothing_back_from_the_request_that_came_after_it() -> None:
    """A job takes its request back and asks anew while the first grant is on its way, and refuses that."""
    scheduler, sent = scheduler_and_commands()
    scheduler.open(Pool(1, 2), Limits(), 0.0)
    scheduler.register("a", "a_NS", TPS, GPUS, 0.0)
    scheduler.status(asks(1), 0.0)
    (first,) = (command for command in sent if command.verb is Verb.GRANT)
    scheduler.status(asks(2), 1.0)
    second = sent[-1]
    assert (second.verb, second.request, second.epoch) == (Verb.GRANT, 2, first.epoch)
    scheduler.answer(Answer(second.command, "a", 0, CommandOutcome.DONE), 1.1)
    scheduler.answer(Answer(first.command, "a", 0, CommandOutcome.REFUSED), 1.2)
    assert ACTOR_TRAIN in scheduler.state.pipelines["a"].held and not scheduler.state.free(0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_grant_whose_hold_is_over_is_neither_waited_for_nor_sent_again(restarted: bool) -> None:
    """The answer to the grant is lost. The status that gives its GPUs back comes, and asks for the next step; a
    scheduler that was restarted then sent the old grant anew, in the words of the new one.
    """
    record = MemoryRecord()
    scheduler, sent = scheduler_and_commands(record)
    scheduler.open(Pool(1, 2), Limits(lease_s=1e6, isolation_s=0.0), 0.0)
    scheduler.register("a", "a_NS", TPS, GPUS, 0.0)
    scheduler.status(asks(1), 0.0)
    first = next(command for command in sent if command.verb is Verb.GRANT)
    back = (GivenBack(ACTOR_TRAIN, first.epoch, 1),)
    scheduler.status(dataclasses.replace(asks(2), given_back=back), 1.0)
    second = sent[-1]
    assert (second.verb, second.request) == (Verb.GRANT, 2) and second.epoch > first.epoch
    if restarted:
        scheduler, sent = scheduler_and_commands()
        scheduler.recover(list(record.entries), 2.0)
        assert [(c.epoch, c.request) for c in sent if c.verb is Verb.GRANT] == [(second.epoch, 2)]
    else:
        scheduler.answer(Answer(second.command, "a", 0, CommandOutcome.DONE), 1.1)
        scheduler.tick(2 * Limits().grant_s)
        assert not scheduler.state.pipelines["a"].fenced
    assert ACTOR_TRAIN in scheduler.state.pipelines["a"].held
