"""Rollouts run ahead within their bound, drawn groups arrive once, and failures are tried again or end the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience import environment_batcher
from nemo_rl.experience.collector import Collector
from nemo_rl.experience.environment_batcher import EnvironmentBatcher, EnvironmentHandle
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits
from nemo_rl.experience.prompts import BufferedGroup, EpochPrompts, GroupKey, Position, StaleGroupError
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollout_tasks import CollectorError, FailurePolicy, RefitPolicy, StallPolicy
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.samplers import InOrder
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, WaitEnded
from tests.virtual_world import PROMPTS, DispatchLoop, Loader, parts_of, rollout_of

BATCH = PROMPTS


@pytest.fixture
def loop() -> Iterator[DispatchLoop]:
    one = DispatchLoop()
    yield one
    one.close()


class Rollouts:
    """Answers with the prompt's own number; can be held, and made to fail."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.fail: list[BaseException] = []
        self.hold: asyncio.Event | None = None
        self.version = 0

    async def roll_out_group(self, batch: BatchedDataDict[Any], plan: RolloutPlan) -> Rollout:
        version = self.version
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(0.001)
        if self.fail:
            raise self.fail.pop()
        self.done.append((plan.step, int(batch["idx"][0])))
        return rollout_of(batch, version)


def collector_of(
    loop: DispatchLoop,
    rollouts: Rollouts,
    loader: Loader | None = None,
    *,
    step: int = 0,
    max_age: int = 1,
    max_failures: int = 0,
    stall_s: float = 20.0,
) -> tuple[Collector, MemoryRecord]:
    record = MemoryRecord()
    parts = parts_of(loader or Loader(), rollouts, loop.start, record, samples=2)
    queue = PromptQueue(InOrder(max_age), QueueLimits(wanted=BATCH, last_step=50), step)
    failures = FailurePolicy(in_a_row=max_failures, backoff_s=(0.1, 5.0))
    return Collector(parts, queue, failures, StallPolicy(stall_s), RefitPolicy()), record


def take(collector: Collector) -> list[BufferedGroup]:
    """A generation batch of the open step, in the order of its prompts."""
    return sorted(collector.take(), key=lambda group: group.key)


def take_more(collector: Collector) -> list[BufferedGroup]:
    """One more of the same step."""
    collector.extend_step()
    return take(collector)


def prompts_of(groups: list[BufferedGroup]) -> list[int]:
    return [int(group.tokens["input_ids"][0, 0]) for group in groups]


def admitted_steps(record: MemoryRecord) -> set[int]:
    return {entry.event.target_step for entry in record.entries if isinstance(entry.event, GroupAdmitted)}


def test_rollouts_begin_as_far_ahead_as_the_bound_allows_and_no_further(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    collector, record = collector_of(loop, rollouts, max_age=2)
    collector.set_weight_version(0)
    assert prompts_of(take(collector)) == [0, 1, 2]
    assert admitted_steps(record) == {0, 1, 2}
    collector.finish_step()
    assert prompts_of(take(collector)) == [3, 4, 5]
    assert {step for step, _ in rollouts.done} <= {0, 1, 2}, "version 1 is not published"
    collector.set_weight_version(1)
    assert admitted_steps(record) == {0, 1, 2, 3}
    collector.stop()


def test_more_generation_batches_of_one_step_have_numbers_of_their_own(loop: DispatchLoop) -> None:
    collector, _ = collector_of(loop, Rollouts())
    collector.set_weight_version(0)
    first, second = take(collector), take_more(collector)
    assert [group.key.number for group in first + second] == [0, 1, 2, 3, 4, 5]
    # Batch 1 of step 0 was asked for after batch 0 of step 1 had been drawn.
    assert prompts_of(second) == [6, 7, 8]
    collector.finish_step()
    assert prompts_of(take(collector)) == [3, 4, 5]
    collector.stop()


def test_a_failed_rollout_is_tried_again_and_too_many_in_a_row_end_the_run(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.fail = [GenerationError("planted")] * 2
    collector, _ = collector_of(loop, rollouts, max_failures=2)
    collector.set_weight_version(0)
    assert prompts_of(take(collector)) == [0, 1, 2]
    collector.stop()

    rollouts.fail = [GenerationError("planted")] * 9
    collector, _ = collector_of(loop, rollouts, max_failures=2)
    collector.set_weight_version(0)
    with pytest.raises(
        CollectorError,
        match=r"3 rollouts in a row failed, grpo.async_grpo.max_generation_failures allows 2; the last, .*: planted",
    ):
        take(collector)
    collector.stop()


def test_a_killed_rollout_and_a_stopped_collector_are_errors_of_whoever_waits(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.hold = asyncio.Event()
    collector, _ = collector_of(loop, rollouts)
    collector.set_weight_version(0)
    loop.start(asyncio.sleep(0.01)).result(timeout=60.0)
    loop.loop.call_soon_threadsafe(next(iter(collector.tasks._tasks.values())).cancel)
    with pytest.raises(CollectorError, match="the rollout of group 0-0 was cancelled"):
        take(collector)
    collector.stop()

    collector, _ = collector_of(loop, rollouts)
    collector.set_weight_version(0)
    threading.Timer(0.1, collector.stop).start()
    with pytest.raises(CollectorError, match="was stopped while the run still waits"):
        take(collector)


def test_an_error_that_nobody_expects_ends_the_run_with_it(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.fail = [KeyError("task 'riddle' has no environment")]
    collector, _ = collector_of(loop, rollouts, max_failures=5)
    collector.set_weight_version(0)
    with pytest.raises(CollectorError, match="riddle"):
        take(collector)
    collector.stop()


def test_waiting_for_groups_that_never_come_ends_at_the_deadline(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.hold = asyncio.Event()
    collector, record = collector_of(loop, rollouts, stall_s=0.2)
    collector.set_weight_version(0)
    with pytest.raises(
        CollectorError,
        match=r"for 0 s; step 0 waits for 3 of 3 groups.*rolling \['0-0', '0-1'",
    ):
        take(collector)
    assert [entry.event.outcome for entry in record.entries if isinstance(entry.event, WaitEnded)] == ["expired"]
    collector.stop()


@pytest.mark.slow
def test_a_refit_waits_for_running_rollouts_and_holds_new_ones_back(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.hold = asyncio.Event()
    collector, _ = collector_of(loop, rollouts)
    collector.set_weight_version(0)
    loop.start(asyncio.sleep(0.01)).result(timeout=60.0)
    with pytest.raises(CollectorError, match=r"\d rollouts did not end within 0 s.*in_flight_weight_updates"):
        collector.prepare_for_refit(0.2)
    loop.loop.call_soon_threadsafe(rollouts.hold.set)
    collector.prepare_for_refit(10.0)
    take(collector)
    collector.finish_step()
    collector.set_weight_version(1)
    assert {step for step, _ in rollouts.done} == {0, 1}
    rollouts.version = 1
    collector.resume_after_refit()
    take(collector)
    collector.finish_step()
    take(collector)
    assert {step for step, _ in rollouts.done} == {0, 1, 2}
    collector.stop()


def test_exhausted_prompts_end_with_what_was_drawn(loop: DispatchLoop) -> None:
    collector, _ = collector_of(loop, Rollouts(), Loader(batches=2))
    collector.set_weight_version(0)
    for step in range(2):
        assert prompts_of(take(collector)) == [3 * step, 3 * step + 1, 3 * step + 2]
        collector.finish_step()
        collector.set_weight_version(step + 1)
    with pytest.raises(StopIteration):
        take(collector)
    collector.stop()


def test_exhausted_prompts_end_a_step_that_needs_another_generation_batch(loop: DispatchLoop) -> None:
    collector, record = collector_of(loop, Rollouts(), Loader(batches=2))
    collector.set_weight_version(0)
    groups = take(collector)
    collector.hand_over(groups)
    with pytest.raises(StopIteration):
        take_more(collector)
    collector.stop()
    dropped = {entry.event.group_id for entry in record.entries if isinstance(entry.event, GroupDropped)}
    assert dropped == {"1-0", "1-1", "1-2"}, "the step says what becomes of its own"


def test_a_position_is_where_the_next_batch_begins() -> None:
    loader = Loader(batches=2)
    prompts = EpochPrompts(loader, batch_size=BATCH, epoch=0, max_epochs=2)
    first = prompts.position()
    seen = [prompts.next()["idx"][0] for _ in range(3)]
    assert (seen, prompts.epoch) == ([0, 3, 0], 1)
    assert first == Position({"at": 0}, 0) and prompts.position() == Position({"at": 1}, 1)
    prompts.next()
    for _ in range(2):
        with pytest.raises(StopIteration):
            prompts.next()


def test_a_group_older_than_the_bound_is_never_trained(loop: DispatchLoop) -> None:
    rollouts = Rollouts()
    rollouts.version = 2
    collector, _ = collector_of(loop, rollouts, step=4)
    collector.set_weight_version(4)
    with pytest.raises(StaleGroupError, match="has tokens of version 2; step 4 allows at most 1 versions of age"):
        take(collector)
    collector.stop()


def test_a_sample_without_tokens_does_not_hide_how_old_its_group_is() -> None:
    def group(*versions: int) -> BufferedGroup:
        return BufferedGroup(GroupKey(5, 0, 0), None, BatchedDataDict(weight_version=torch.tensor(versions)))

    assert group(-1, 3, 4).is_stale(5, 1) and group(-1, 3, 4).oldest == 3
    assert not group(-1, 4).is_stale(5, 1)
    assert not group(-1, -1).is_stale(5, 1)


def test_environments_that_hang_hold_up_no_other_thread_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one another: each has threads of its own."""
    released = threading.Event()

    def call(handle: Any, logs: Any, metadata: Any, *, timeout_s: float, name: str) -> Any:
        if name == "hangs":
            assert released.wait(60.0)
        raise EnvironmentFailure("planted")

    monkeypatch.setattr(environment_batcher, "step_environment", call)

    async def story() -> None:
        hung = [EnvironmentBatcher(EnvironmentHandle("hangs", (None,))).step([], {}) for _ in range(40)]
        waiting = asyncio.gather(*hung, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10.0) == "free"
        with pytest.raises(EnvironmentFailure):
            await asyncio.wait_for(EnvironmentBatcher(EnvironmentHandle("works", (None,))).step([], {}), 10.0)
        released.set()
        await waiting

    asyncio.run(story())
