"""What the schedule alone makes of long-tailed and of equal lengths, on a virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.streaming_schedule import measure, workload
from nemo_rl.experience.prompt_queue import Step, worth_a_pass
from nemo_rl.experience.replay_buffer import GroupKey


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
