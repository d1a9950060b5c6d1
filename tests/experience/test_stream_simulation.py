"""Random schedules of a streaming run, each checked; and what the schedule alone makes of long-tailed and of equal
lengths, on a virtual clock.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.streaming_schedule import measure, workload
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits, QueueProtocolError, Step, worth_a_pass
from nemo_rl.experience.prompts import GroupKey
from nemo_rl.experience.samplers import (
    InOrder,
    Slot,
    SlotStatus,
    WeightFifo,
    Windowed,
)
from tests.virtual_world import Schedule

SCHEDULES = 1_000


@pytest.mark.slow
def test_every_prompt_is_trained_once_or_accounted_for_in_every_schedule() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        ended = schedule.run()
        what = f"seed {seed}"
        prompts = Counter([*ended.trained, *ended.failed, *ended.left])
        assert max(prompts.values(), default=1) == 1, what
        assert set(prompts) <= set(range(schedule.batches * schedule.wanted)), what
        limits, sampler = schedule.limits, schedule.sampler
        if sampler.max_lag is not None:
            assert max(schedule.lags, default=0) <= sampler.max_lag, what
        lost = len(ended.failed)
        assert ended.steps == limits.last_step or lost, what
        if sampler.in_order and not limits.replaces and not lost:
            assert ended.trained == sorted(ended.trained, key=lambda prompt: prompt // schedule.wanted), what
        if not lost:
            assert len(ended.trained) == limits.last_step * schedule.wanted, what
            assert sorted(ended.trained) == list(range(len(ended.trained))) or not sampler.in_order, what
        seen[type(sampler).__name__] += 1
        seen.update(crash=schedule.crashes, failed=lost, evicted=schedule.evicted, lag=max(schedule.lags, default=0))
    # None of what is checked goes unseen.
    assert min(seen[what] for what in ("InOrder", "WeightFifo", "Windowed", "ReadyFirst")) > SCHEDULES / 20, seen
    assert min(seen[what] for what in ("crash", "failed", "evicted", "lag")) > SCHEDULES / 20, seen


def slot(number: int, started: int | None, *, ready: bool = True, place: int | None = None) -> Slot:
    status = SlotStatus.READY if ready else SlotStatus.ROLLING
    return Slot(GroupKey(0, 0, number), number if place is None else place, status, started, number if ready else None)


def numbers(slots: object) -> list[int]:
    return [one.key.number for one in slots]  # type: ignore[attr-defined]


def test_samplers_choose_as_they_say() -> None:
    slots = [slot(0, 3, place=2), slot(1, 4, place=0), slot(2, 2, place=4), slot(3, 3, ready=False, place=1)]
    assert numbers(InOrder(1).eligible(slots, 4, 0, 3)) == [0, 1]
    assert numbers(InOrder(1).eligible(slots, 4, 3, 3)) == [2]
    assert numbers(WeightFifo(2).eligible(slots, 4, 0, 3)) == [2]
    assert numbers(WeightFifo(1).eligible(slots, 4, 0, 3)) == [0], "waits for the slow one of version 3"
    assert numbers(Windowed(1).eligible(slots, 4, 0, 3)) == [0, 1]
    assert numbers(Windowed(1, True).eligible(slots, 4, 0, 3)) == [1, 0]
    assert numbers(Windowed(1).stale(slots, 4)) == [2] and InOrder(1).stale(slots, 4) == ()


def test_the_queue_refuses_what_cannot_be() -> None:
    queue = PromptQueue(InOrder(0), QueueLimits(wanted=2, last_step=2, capacity=2))
    first, second = queue.draw(2)
    with pytest.raises(QueueProtocolError, match="waiting, expected rolling"):
        queue.ready(first)
    assert queue.to_launch(0) == [first, second] and not queue.wants_batch()
    queue.launched(first, 0)
    queue.ready(first)
    with pytest.raises(QueueProtocolError, match="ready, expected rolling"):
        queue.ready(first)
    assert queue.select(lambda keys: False) is None, "the other one may come"
    assert queue.select(lambda keys: True) == [first]
    with pytest.raises(QueueProtocolError, match="unknown"):
        queue.give_up(first)


def test_a_prompt_that_was_given_up_makes_its_own_step_smaller_and_no_other() -> None:
    queue = PromptQueue(InOrder(1), QueueLimits(wanted=2, last_step=3, capacity=4))
    first = [*queue.draw(2), *queue.draw(2)]
    for key in queue.to_launch(0):
        queue.launched(key, 0)
    queue.give_up(first[1])
    queue.give_up(first[2])
    queue.ready(first[0])
    assert queue.step.missing == 1 and queue.select(lambda keys: True) == [first[0]] and queue.select(bool) == []
    assert queue.finish_step().dropped == [first[1]]
    assert queue.step.dropped == [first[2]] and queue.step.missing == 1
    queue.ready(first[3])
    assert queue.select(lambda keys: True) == [first[3]]
    queue.finish_step()
    assert queue.step.dropped == [] and queue.step.missing == 2


@pytest.mark.slow
@pytest.mark.parametrize(("lookahead", "share"), [(0, 0.25), (0, 0.5), (1, 0.25), (1, 0.5), (1, 1.0)])
def test_training_hides_under_a_long_tail_of_generation(lookahead: int, share: float) -> None:
    for seed in range(3):
        row = measure(workload(10, share, even=False, seed=seed), lookahead)
        assert row.hidden >= 0.9 and row.of_slower <= 1.1, (seed, row)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_equal_lengths_cost_a_streaming_run_nothing(share: float) -> None:
    for lookahead in (0, 1):
        assert measure(workload(10, share, even=True), lookahead).of_synchronous <= 1.03


def test_the_end_of_a_step_is_trained_in_halves_and_everything_else_in_whole_passes() -> None:
    step = Step(version=0, wanted=64)
    assert [worth_a_pass(ready, step, 16) for ready in (15, 16, 20)] == [False, True, True]
    # Whoever asks for the whole step at once gets it at once.
    assert not worth_a_pass(63, step, 64)
    step.taken = [GroupKey(0, 0, number) for number in range(40)]
    assert [worth_a_pass(ready, step, 16) for ready in (15, 16)] == [False, True]
    step.taken = [GroupKey(0, 0, number) for number in range(50)]
    assert [worth_a_pass(ready, step, 16) for ready in (6, 7)] == [False, True]
    step.taken = [GroupKey(0, 0, number) for number in range(63)]
    assert worth_a_pass(1, step, 16)


def test_no_more_groups_roll_than_may_and_none_waits_beside_free_room() -> None:
    queue = PromptQueue(InOrder(1), QueueLimits(wanted=8, last_step=9, capacity=6, max_inflight=3))
    keys = queue.draw(8)
    assert queue.to_launch(0) == keys[:3]
    for key in keys[:2]:
        queue.launched(key, 0)
    assert queue.to_launch(0) == keys[2:3]
    queue.ready(keys[0])
    assert queue.to_launch(0) == keys[2:4]
    queue.ready(keys[1])
    for key in keys[2:5]:
        queue.launched(key, 0)
        queue.ready(key)
    assert (queue.live(), queue.to_launch(0)) == (5, keys[5:6])


def test_a_group_that_begins_again_keeps_its_place_and_its_failures() -> None:
    queue = PromptQueue(InOrder(1), QueueLimits(wanted=2, last_step=9, capacity=6))
    first, second = queue.draw(2)
    queue.launched(first, 0)
    assert queue.failed(first) == 1
    fresh = queue.again(first)
    assert fresh == GroupKey(0, 1, 2) and queue.to_launch(0) == [fresh, second]
    queue.launched(fresh, 0)
    assert queue.failed(fresh) == 2
