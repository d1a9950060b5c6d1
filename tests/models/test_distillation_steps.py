"""A step towards a teacher equals plain PyTorch on whole logits, on both backends, however ranks and rows are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.config.algorithms import TeacherKLConfig
from nemo_rl.data_plane.field_schema import TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.loss.distillation_loss import DistillationLossFn
from tests.models.policy_ranks import ALL_ROWS, MEGATRON, ROWS, WIDTH, trained_step, training_batch
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VOCABULARY = 258
KEY, PACKED = "policy.megatron_cfg", "policy.sequence_packing.enabled=true"
WHOLE = [*MEGATRON, f"{KEY}.optimizer.use_distributed_optimizer=false"]
PLAIN = ["policy.scheduler=null", "policy.optimizer.kwargs={lr: 0.005, weight_decay: 0.0, betas: [0.9, 0.999]}"]
LOSSES: dict[str, tuple[dict[str, Any], int]] = {
    "mixed, top 5": ({}, 5),
    "reverse, all outside": ({"kl_type": "reverse", "zero_outside_topk": True}, 5),
    "forward, whole vocabulary": ({"kl_type": "forward"}, VOCABULARY),
    "mixed, top 1, all outside": ({"zero_outside_topk": True, "mixed_kl_weight": 0.2}, 1),
}
# A backend and a split meet the loss in what it asks to be scored: some tokens, or some and the mass of all others.
# Its kinds are compared on one rank, and in tests/loss/test_distillation.py.
ASKED = ("mixed, top 5", "mixed, top 1, all outside")
ONE = {
    name: [*how, *ALL_ROWS]
    for name, how in {"dtensor": PLAIN, "dtensor packed": [*PLAIN, PACKED], "megatron packed": [*WHOLE, PACKED]}.items()
}
TWO = {
    "dtensor tp 2": [*PLAIN, *ALL_ROWS, "policy.dtensor_cfg.tensor_parallel_size=2"],
    "dtensor cp 2 packed": [*PLAIN, *ALL_ROWS, PACKED, "policy.dtensor_cfg.context_parallel_size=2"],
    "dtensor dp 2 packed": [*PLAIN, PACKED],
    "megatron tp 2 packed": [*WHOLE, *ALL_ROWS, PACKED, f"{KEY}.tensor_model_parallel_size=2"],
    "megatron cp 2": [*WHOLE, *ALL_ROWS, f"{KEY}.context_parallel_size=2"],
    "megatron pp 2": [*WHOLE, *ALL_ROWS, f"{KEY}.pipeline_model_parallel_size=2"],
}


def _losses(case: str) -> tuple[str, ...]:
    return tuple(LOSSES) if case == "dtensor" else ASKED if case in ONE or " tp 2" in case else ASKED[1:]


def _teacher() -> torch.Tensor:
    return 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(3))


def _data() -> Any:
    data = training_batch()
    # transformers keeps the embedding of its padding token at 0, whose norm has no useful gradient.
    data["input_ids"][0, 10] = 5
    return data


def distillation_batch(k: int) -> Any:
    """The training batch with a teacher's columns."""
    data = _data()
    logprobs, ids = _teacher().log_softmax(-1).topk(k)
    data[TOPK_IDS], data[TOPK_LOGPROBS] = ids.int(), logprobs
    return data


def steps(model: str, world: int, cases: dict[str, list[str]]) -> dict[str, Any]:
    """Loss and gradient of every case and loss."""
    seen = {}
    for case, overrides in cases.items():
        for name in _losses(case):
            keys, k = LOSSES[name]
            loss = DistillationLossFn(TeacherKLConfig(**keys))
            seen[case, name] = trained_step(model, world, overrides, loss, distillation_batch(k))
    return seen


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> dict[str, tuple[float, np.ndarray]]:
    """Loss and gradient of every loss by plain PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    data, teacher = _data(), _teacher()
    found = {}
    for name, (keys, k) in LOSSES.items():
        cfg = TeacherKLConfig(**keys)
        model.zero_grad()
        total, count = torch.zeros(()), 0
        for row, length in enumerate(data["input_lengths"].tolist()):
            logits = model(data["input_ids"][row : row + 1, :length]).logits[0, :-1]
            values, ids = teacher[row, : length - 1].topk(k)
            t, whole = values.log_softmax(-1), logits.log_softmax(-1)
            p = whole.gather(-1, ids) if cfg.zero_outside_topk else logits.gather(-1, ids).log_softmax(-1)
            forward = (t.exp() * (t - p)).sum(-1)
            reverse = (p.exp() * (p - t)).sum(-1)
            if cfg.zero_outside_topk:
                outside = torch.ones_like(whole).scatter(-1, ids, 0.0)
                reverse = reverse + (outside * whole.exp() * (whole + 100.0)).sum(-1)
            weight = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.mixed_kl_weight}[cfg.kl_type]
            mask = data["token_mask"][row, 1:length] * data["sample_mask"][row]
            total = total + ((weight * forward + (1 - weight) * reverse) * mask).sum()
            count += int(mask.sum())
        (total / count).backward()
        named = sorted((name, parameter.grad) for name, parameter in model.named_parameters())
        found[name] = float(total.detach() / count), torch.cat([grad.flatten() for _, grad in named]).numpy() * count
    return found


@pytest.fixture(scope="module")
def computed(tiny_model: Path) -> dict[tuple[str, str], Any]:
    both = run_ranks(steps, 2, str(tiny_model), 2, TWO, timeout_s=240.0)
    return run_ranks(steps, 1, str(tiny_model), 1, ONE)[0] | both[0]


@pytest.mark.parametrize(("case", "loss"), [(case, loss) for case in [*ONE, *TWO] for loss in _losses(case)])
def test_a_step_towards_a_teacher_is_that_of_whole_logits(
    wanted: dict[str, Any], computed: dict[tuple[str, str], Any], case: str, loss: str
) -> None:
    got, (want_loss, want_gradient) = computed[case, loss], wanted[loss]
    assert got["loss"] == [pytest.approx(want_loss, rel=1e-6, abs=1e-6)]
    # Weights that are shared by hundreds of tokens gather their rounding.
    assert np.linalg.norm(got["gradient"] - want_gradient) / np.linalg.norm(want_gradient) <= 1e-5
