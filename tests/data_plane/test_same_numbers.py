"""The same recorded rollouts give the same training, bit for bit, whether rows lie in the driver or on the data
plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.grpo.assembly import setup
from nemo_rl.algorithms.grpo.loop import drive
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.config import load_master_config
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.experience.rollouts import SampleOutcome
from nemo_rl.utils.metrics_file import read_metrics
from tests.data_plane.conftest import SMALL_MOONCAKE, require_mooncake
from tests.models.policy_ranks import MEGATRON, RaisingLoss

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
STEPS, PROMPTS, SAMPLES, LONGEST = 2, 4, 4, 24
BASE = (
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "data.validation=null",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=4",
    "policy.make_sequence_length_divisible_by=4",
    "policy.sequence_packing.enabled=false",
    "policy.sequence_packing.train_mb_tokens=64",
    "policy.sequence_packing.logprob_mb_tokens=64",
    "policy.dynamic_batching.train_mb_tokens=64",
    "policy.dynamic_batching.logprob_mb_tokens=96",
    "policy.dynamic_batching.sequence_length_round=4",
    "policy.optimizer.kwargs.lr=0.01",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
    "cluster.cpu_slots=4",
)
WHITENED = (
    "grpo.adv_estimator.name=reinforce_plus_plus",
    "loss_fn.use_kl_in_reward=true",
    "grpo.overlong_filtering=true",
)
ROUTES = "policy.router_replay.enabled=true"
COMPARED = "policy.router_replay.compare_period=2"
MASKS = ("policy.sampling_mask_replay=true", "policy.generation.top_p=0.9")
CASES = {
    "packed_tp2": (
        "cluster.gpus_per_node=2",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.sequence_packing.enabled=true",
        *MASKS,
    ),
    "dynamic_dp2_whitened": (
        "cluster.gpus_per_node=2",
        "policy.dynamic_batching.enabled=true",
        "loss_fn.class=tests.data_plane.plane_ranks.LossOfMore",
        *WHITENED,
        ROUTES,
        COMPARED,
        *MASKS,
    ),
    "megatron_pp2_packed": (
        *MEGATRON,
        "cluster.gpus_per_node=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.sequence_packing.enabled=true",
    ),
}
TEACHER_KL = (
    "loss_fn.teacher_kl_penalty=0.5",
    "loss_fn.reference_policy_kl_penalty=0",
    "loss_fn.zero_outside_topk=true",
    "grpo.topk_logits_k=5",
    "teacher.sequence_packing.enabled=false",
    "teacher.logprob_batch_size=4",
)
TEACHERS_BY_TASK = (
    "grpo.adv_estimator.name=opd",
    "loss_fn.reference_policy_kl_penalty=0",
    "loss_fn.disable_ppo_ratio=true",
    "on_policy_distillation.enabled=true",
    "on_policy_distillation.default_teacher_alias=odd",
)
CASES |= {
    "teacher_dp2_dynamic_sampling": (
        "cluster.gpus_per_node=2",
        "grpo.use_dynamic_sampling=true",
        *TEACHER_KL,
    ),
    "teachers_by_task_dp2_packed": (
        "cluster.gpus_per_node=2",
        "policy.sequence_packing.enabled=true",
        *TEACHERS_BY_TASK,
    ),
}
# A storage knows nothing of how batches are cut: each way is tried on one.
BACKENDS = {
    "packed_tp2": "mooncake_cpu",
    "dynamic_dp2_whitened": "simple",
    "megatron_pp2_packed": "simple",
    "teacher_dp2_dynamic_sampling": "simple",
    "teachers_by_task_dp2_packed": "simple",
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts as a run records them: rows of different lengths, groups that differ and groups that do not."""
    folder = tmp_path_factory.mktemp("recording")
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS + 1):
        for attempt in range(6):
            torch.save(_batch(draw), folder / f"rollout_step{step + 1}_{attempt}.pt")
    return folder


def _batch(draw: torch.Generator) -> dict[str, Any]:
    rows = PROMPTS * SAMPLES
    lengths = torch.randint(6, LONGEST + 1, (rows,), generator=draw)
    width = -(-int(lengths.max()) // 4) * 4
    real = torch.arange(width) < lengths[:, None]
    trained = (real & (torch.arange(width) >= 3)).long()
    rewards = torch.randint(0, 2, (rows,), generator=draw).float()
    rewards[:SAMPLES] = 1.0  # a group that teaches nothing
    tokens = {
        "input_ids": torch.randint(0, 256, (rows, width), generator=draw).masked_fill(~real, 256),
        "input_lengths": lengths,
        "token_mask": trained,
        "generation_logprobs": (-5.7 + 0.2 * torch.randn(rows, width, generator=draw)) * trained,
        "content": [f"sample {row}" for row in range(rows)],
        "bonus": torch.arange(rows),
        "hint": [{"bonus": row} for row in range(rows)],
    }
    # Of a model with four experts in each of its two layers.
    known = real & (torch.rand(rows, width, generator=draw) < 0.9)
    experts = torch.rand(rows, width, 2, 4, generator=draw).topk(2).indices.to(torch.uint8)
    sampled = [row[mask != 0].tolist() for row, mask in zip(tokens["input_ids"], trained, strict=True)]
    kept = [[{token, 7, 9} for token in row] for row in sampled]
    counts = torch.zeros((rows, width), dtype=torch.int32)
    counts[trained != 0] = torch.tensor([len(ids) for row in kept for ids in row], dtype=torch.int32)
    tokens |= {
        "routed_experts": torch.where(known[..., None, None], experts, 0),
        "routed_experts_valid": known,
        "sampling_mask_counts": counts,
        "sampling_mask_ids": [torch.tensor([n for ids in row for n in sorted(ids)], dtype=torch.int32) for row in kept],
    }
    columns = {
        "total_reward": rewards,
        "truncated": torch.rand(rows, generator=draw) < 0.2,
        "sample_mask": torch.ones(rows),
        "prompt_lengths": torch.full((rows,), 3),
        "response_lengths": lengths - 3,
        "generated_lengths": lengths - 3,
        "total_lengths": lengths.clone(),
        "prompt_number": torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        "sample_number": torch.arange(SAMPLES).repeat(PROMPTS),
        "weight_version": torch.zeros(rows, dtype=torch.int64),
        # Neither teacher's samples divide over two ranks.
        "task_name": ["even" if row < 5 else "odd" for row in range(rows)],
    }
    samples = [
        list(SampleOutcome(1, [length - 3], 0, length, reward, {}, False, True, False, False, None))
        for length, reward in zip(lengths.tolist(), rewards.tolist(), strict=True)
    ]
    return {"tokens": tokens, "rows": columns, "samples": samples, "metrics": {}}


@pytest.fixture
def train(
    recording: Path, tiny_model: Path, tiny_moe_model: Path, tmp_path: Path, ray_session: None
) -> Callable[..., dict[str, Any]]:
    """Trains on the recording; metrics of every step, digests of the weights and the lines of the sample logs."""

    def run(name: str, *overrides: str, then: Callable[[GRPORun], None] | None = None) -> dict[str, Any]:
        places = [
            f"policy.model_name={tiny_moe_model if ROUTES in overrides else tiny_model}",
            f"logger.log_dir={tmp_path / name}",
            f"grpo.rollout_replay={recording}",
        ]
        if TEACHER_KL[0] in overrides:
            places.append(f"teacher.model_name={tiny_moe_model}")
        if TEACHERS_BY_TASK[0] in overrides:
            models = f"{{even: {tiny_moe_model}, odd: {tiny_model}}}"
            places.append(f"on_policy_distillation.teacher_model_by_agent_name={models}")
        config = load_master_config(CONFIG, [*BASE, *places, *overrides])
        built = setup(config)
        try:
            drive(built)
            seen: dict[str, Any] = {"weights": built.policy.worker_group.run("weight_checksums")[0]}
            if then is not None:
                then(built)
        finally:
            built.close()
        series = read_metrics(Path(config.logger.log_dir)).series
        seen["metrics"] = {name: values for name, values in series.items() if name.startswith("train/")}
        seen["samples"] = [
            (Path(config.logger.log_dir) / "samples" / f"train_data_step{step}.jsonl").read_text()
            for step in range(1, STEPS + 1)
        ]
        return seen

    return run


def leaves_no_row(built: GRPORun) -> None:
    """Neither after its steps, nor after one in the middle of which a worker raises."""
    client: Any = getattr(built.policy, "dp_client", None)
    assert client.list_samples("train") == {}
    built.loss_fn = RaisingLoss(built.config.loss_fn)
    built.config.grpo.max_num_steps += 1
    with pytest.raises(WorkerError, match="planted"):
        drive(built)
    assert client.list_samples("train") == {}


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_bit_for_bit_and_leaves_no_row(case: str, train: Callable[..., dict[str, Any]]) -> None:
    if BACKENDS[case] == "mooncake_cpu":
        require_mooncake()
    plain = train("driver", *CASES[case])
    assert ("train/bonus" in plain["metrics"]) is ("loss_fn.class" in str(CASES[case])), (
        "columns that nobody knows reach the loss that asks for them"
    )
    assert (
        len(plain["metrics"]["train/loss"]) == STEPS and len(set(plain["metrics"]["train/grad_norm"].values())) == STEPS
    )
    backend = BACKENDS[case]
    sizes = [f"data_plane.{name}={size}" for name, size in SMALL_MOONCAKE.items()]
    plane = ("data_plane.enabled=true", f"data_plane.backend={backend}", "data_plane.num_storage_units=1", *sizes)
    stored = train(backend, *CASES[case], *plane, then=leaves_no_row)
    assert stored["metrics"] == plain["metrics"]
    assert ("train/router_replay_share" in plain["metrics"]) is (ROUTES in CASES[case])
    natural = plain["metrics"].get("train/gen_kl_error_natural_routing", {})
    assert list(natural) == ([2] if COMPARED in CASES[case] else [])
    # Random experts were recorded, so that natural routing is another computation.
    replayed = plain["metrics"]["train/gen_kl_error"]
    assert all(math.isfinite(value) and value != replayed[step] for step, value in natural.items())
    assert ("train/sampling_mask_share" in plain["metrics"]) is (MASKS[0] in CASES[case])
    assert stored["weights"] == plain["weights"]
    assert stored["samples"] == plain["samples"]
