"""Asynchronous runs of `examples/run_grpo.py`: engines and trainer agree below refits, and a killed run trains every
prompt exactly once, on the data plane too.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import GroupAdmitted, GroupTrained, StepFinished
from tests.end_to_end.test_runs import Command
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, PROMPTS = 5, 4
# The age bound keeps two steps of groups in the buffer, so that a checkpoint has something to hold.
# At a gentle rate weights two versions apart still agree about most tokens.
ASYNC = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "checkpointing.save_period=1",
    "loss_fn.reference_policy_kl_penalty=0.0",
    "policy.optimizer.kwargs.lr=0.001",
)


def test_a_killed_run_goes_on_and_trains_every_prompt_exactly_once(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, config="grpo_arithmetic_async_cpu.yaml")
    process = command.start(*ASYNC)
    command.wait_for_checkpoint(process, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(command.left(), timeout_s=60.0)
    # The checkpoint carries whole groups, so a run may go on with its rows elsewhere.
    command.finish(*ASYNC, "data_plane.enabled=true")
    assert not command.left()

    steps = command.metrics()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for metrics in steps.values():
        # Samples of the weights that train agree; older weights drew the others, so that their ratio is near one and
        # not one.
        assert 1.0 <= metrics["train/token_mult_prob_error"] < (1.001 if metrics["train/lag/max"] == 0 else 2.0)
        assert metrics["train/lag/max"] <= 2
    first, second = [
        list(read_record(path, recover=True)) for path in sorted(command.folder.glob("logs/exp_*/record.jsonl"))
    ]
    resumed_at = next(entry.event.step for entry in second if isinstance(entry.event, StepFinished))
    trained: Counter[str] = Counter()
    for entries, steps_of in ((first, range(resumed_at)), (second, range(resumed_at, STEPS))):
        prompt_of = {
            entry.event.group_id: entry.event.prompt_id for entry in entries if isinstance(entry.event, GroupAdmitted)
        }
        trained.update(
            prompt_of[e.event.group_id]
            for e in entries
            if isinstance(e.event, GroupTrained) and e.event.step in steps_of
        )
    assert len(trained) == STEPS * PROMPTS and set(trained.values()) == {1}
