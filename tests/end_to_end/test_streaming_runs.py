"""Whole streaming runs, with a real engine: under Megatron-Core one trains what DTensor does in turns, with a whole
record; a killed one, of a mixture of experts with recorded routes, trains every prompt exactly once, on the data plane
too.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import GroupAdmitted, GroupTrained, StepFinished
from nemo_rl.utils.report import write_report
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING, read_timeline
from tests.end_to_end.test_runs import Command
from tests.glossary import undocumented
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, PROMPTS = 2, 4
STREAMING = (
    "async_rl.sampler.max_lookahead_versions=0",
    "async_rl.min_groups_for_streaming_train=1",
    "async_rl.max_buffered_rollouts=8",
    "loss_fn.use_importance_sampling_correction=false",
    "loss_fn.truncated_importance_sampling_type=null",
    "loss_fn.truncated_importance_sampling_ratio=null",
)
MEGATRON = (
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.optimizer=null",
    "policy.scheduler=null",
    "policy.megatron_cfg.optimizer={lr: 0.001, min_lr: 0.001, weight_decay: 0.0, adam_beta1: 0.9, adam_beta2: 0.99}",
    # A decay without a length ends with the run, which a policy has to be told.
    "policy.megatron_cfg.scheduler={lr_warmup_iters: 4, lr_warmup_init: 2.0e-4, lr_decay_style: cosine}",
    "policy.megatron_cfg.scheduler.lr_decay_iters=null",
)


def test_streaming_on_policy_under_megatron_trains_what_a_run_in_turns_trains(
    tiny_model: Path, tmp_path: Path, whole: Command
) -> None:
    streamed = Command(tiny_model, tmp_path, config="grpo_arithmetic_streaming_cpu.yaml")
    streamed.finish(f"grpo.max_num_steps={STEPS}", *STREAMING, *MEGATRON)

    expected, found = whole.metrics(), streamed.metrics()
    for step in range(1, STEPS + 1):
        for name in ("train/reward", "train/grad_norm", "train/loss", "train/global_valid_toks"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), (step, name)
        assert found[step]["train/lag/max"] == 0
    assert found[1]["train/grad_norm"] == pytest.approx(expected[1]["train/grad_norm"], rel=1e-5)
    assert all(1 <= metrics["train/streaming/parts"] <= PROMPTS for metrics in found.values())
    got = streamed.weights(STEPS)
    for name, tensor in whole.weights(STEPS).items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    (log_dir,) = (tmp_path / "logs").glob("exp_*")
    entries = list(read_record(log_dir / "record.jsonl"))
    assert check(entries) == []
    timeline = read_timeline(entries)
    assert [step.step for step in timeline.steps] == list(range(STEPS))
    for step in timeline.steps:
        assert len(step.groups) == PROMPTS and step.parts[LOGPROBS] and step.parts[TRAINING]
    assert 0 <= timeline.hidden_share() < 1
    assert "data:image/png;base64," in write_report(log_dir).html.read_text()
    series = read_metrics(log_dir).series
    assert series["train/loss"] and undocumented(series) == []


KILLED_STEPS = 5
# The bound keeps two steps of groups in the buffer, so that a checkpoint has something to hold.
KILLED = (
    f"grpo.max_num_steps={KILLED_STEPS}",
    "async_rl.sampler.max_lookahead_versions=2",
    "async_rl.min_groups_for_streaming_train=1",
    "async_rl.max_inflight_prompts=16",
    "async_rl.max_buffered_rollouts=16",
    "checkpointing.save_period=1",
    "loss_fn.reference_policy_kl_penalty=0.0",
    # Groups that wait keep the experts and the tokens that generation chose among.
    "policy.router_replay.enabled=true",
    "policy.sampling_mask_replay=true",
    "policy.generation.top_p=0.9",
)


def test_a_killed_run_goes_on_and_trains_every_prompt_exactly_once(tiny_moe_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_moe_model, tmp_path, config="grpo_arithmetic_streaming_cpu.yaml")
    process = command.start(*KILLED)
    command.wait_for_checkpoint(process, 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(command.left())
    # The checkpoint carries whole groups, so a run may go on with its rows elsewhere.
    command.finish(*KILLED, "data_plane.enabled=true")
    assert not command.left()

    steps = command.metrics()
    assert sorted(steps) == list(range(1, KILLED_STEPS + 1))
    for metrics in steps.values():
        # Samples of the weights that train agree; older weights drew the others, so that their ratio is near one and
        # not one.
        assert 1.0 <= metrics["train/token_mult_prob_error"] < (1.001 if metrics["train/lag/max"] == 0 else 2.0)
        assert metrics["train/lag/max"] <= 2
        assert metrics["train/routed_tokens_share"] == 1.0 and 0.0 < metrics["train/sampling_mask_share"] <= 1.0
    first, second = [
        list(read_record(path, recover=True)) for path in sorted(command.folder.glob("logs/exp_*/record.jsonl"))
    ]
    assert check(first, ended=False) == check(second) == []
    resumed_at = next(entry.event.step for entry in second if isinstance(entry.event, StepFinished))
    trained: Counter[str] = Counter()
    for entries, steps_of in ((first, range(resumed_at)), (second, range(resumed_at, KILLED_STEPS))):
        prompt_of = {
            entry.event.group_id: entry.event.prompt_id for entry in entries if isinstance(entry.event, GroupAdmitted)
        }
        trained.update(
            prompt_of[e.event.group_id]
            for e in entries
            if isinstance(e.event, GroupTrained) and e.event.step in steps_of
        )
    assert len(trained) == KILLED_STEPS * PROMPTS and set(trained.values()) == {1}
