"""A whole streaming run, with real engines and trainers: it trains what one in turns does, and its record is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.time_sharing.history.check import check
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import read_record
from nemo_rl.utils.report import write_report
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING, read_timeline
from tests.end_to_end.test_runs import Command

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, PROMPTS = 3, 4
SAME = (f"grpo.max_num_steps={STEPS}", "checkpointing.save_period=3", "policy.optimizer.kwargs.lr=0.001")
STREAMING = (
    "async_rl.sampler.max_lookahead_versions=0",
    "async_rl.min_groups_for_streaming_train=1",
    "async_rl.max_buffered_rollouts=8",
    "loss_fn.use_importance_sampling_correction=false",
    "loss_fn.truncated_importance_sampling_type=null",
    "loss_fn.truncated_importance_sampling_ratio=null",
)


def test_streaming_on_policy_trains_what_a_run_in_turns_trains(tiny_model: Path, tmp_path: Path) -> None:
    folders = tmp_path / "turns", tmp_path / "streamed"
    for folder in folders:
        folder.mkdir()
    turns = Command(tiny_model, folders[0])
    turns.finish(*SAME)
    streamed = Command(tiny_model, folders[1], config="grpo_arithmetic_streaming_cpu.yaml")
    streamed.finish(*SAME, *STREAMING)

    expected, found = turns.metrics(), streamed.metrics()
    for step in range(1, STEPS + 1):
        for name in ("train/reward", "train/grad_norm", "train/loss", "train/global_valid_toks"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)
        assert found[step]["train/lag/max"] == 0
    assert found[1]["train/grad_norm"] == pytest.approx(expected[1]["train/grad_norm"], rel=1e-5)
    assert all(1 <= metrics["train/streaming/parts"] <= PROMPTS for metrics in found.values())
    weights = [
        load_file(command.checkpoint(STEPS) / "policy" / "weights" / "model.safetensors")
        for command in (turns, streamed)
    ]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    (log_dir,) = (folders[1] / "logs").glob("exp_*")
    entries = list(read_record(log_dir / "record.jsonl"))
    assert check(entries) == []
    timeline = read_timeline(entries)
    assert [step.step for step in timeline.steps] == list(range(STEPS))
    for step in timeline.steps:
        assert len(step.groups) == PROMPTS and step.parts[LOGPROBS] and step.parts[TRAINING]
    assert 0 <= timeline.hidden_share() < 1
    assert "data:image/png;base64," in write_report(log_dir).html.read_text()
    assert read_metrics(log_dir).series["train/loss"]
