"""Adapters in PEFT's format that other programs wrote: merged with their own scale, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.models.policy.lora import read_factors
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from nemo_rl.utils.adapter_files import AdapterError, AdapterInfo, write_adapter
from nemo_rl.utils.convert import to_hugging_face

LAYER = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 4, 8.0


def adapter(folder: Path, base: Path, **written: Any) -> dict[str, torch.Tensor]:
    """Writes an adapter of one layer, whose configuration says these things besides."""
    weight = load_file(base / "model.safetensors")[f"{LAYER}.weight"]
    draw = torch.Generator().manual_seed(0)
    factors = {
        f"{LAYER}.lora_A": torch.randn(RANK, weight.shape[1], generator=draw),
        f"{LAYER}.lora_B": torch.randn(weight.shape[0], RANK, generator=draw),
    }
    write_adapter(folder, AdapterInfo(str(base), RANK, ALPHA, ["q_proj"]), factors)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | written))
    return factors


HARMLESS = {
    "use_dora": False,
    "alpha_pattern": {},
    "modules_to_save": None,
    "init_lora_weights": True,
    "revision": None,
}


@pytest.mark.parametrize(
    ("written", "scale"),
    [
        ({}, ALPHA / RANK),
        (HARMLESS, ALPHA / RANK),
        ({"init_lora_weights": "gaussian"}, ALPHA / RANK),
        ({"use_rslora": False}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
    ],
)
def test_a_merged_weight_has_the_adapters_own_scale(
    written: dict[str, Any], scale: float, tiny_model: Path, tmp_path: Path
) -> None:
    factors = adapter(tmp_path / "adapter", tiny_model, **written)
    merged = load_file(to_hugging_face(tmp_path / "adapter", tmp_path / "whole", "float32") / "model.safetensors")
    base = load_file(tiny_model / "model.safetensors")
    change = scale * factors[f"{LAYER}.lora_B"] @ factors[f"{LAYER}.lora_A"]
    torch.testing.assert_close(merged[f"{LAYER}.weight"], base[f"{LAYER}.weight"].float() + change)
    other = LAYER.replace("q_proj", "k_proj")
    torch.testing.assert_close(merged[f"{other}.weight"], base[f"{other}.weight"].float())


@pytest.mark.parametrize(
    "written",
    [
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"alpha_pattern": {"q_proj": 16}},
        {"rank_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"peft_type": "ADALORA"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_what_makes_it_one(
    written: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    adapter(tmp_path / "adapter", tiny_model, **written)
    with pytest.raises(AdapterError, match=f"adapter_config.json: {next(iter(written))} is .* merge it with PEFT"):
        to_hugging_face(tmp_path / "adapter", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(("rslora", "alpha", "fits"), [(True, 16.0, True), (True, 8.0, False), (False, 8.0, True)])
def test_a_run_goes_on_from_an_adapter_of_its_scale_alone(
    rslora: bool, alpha: float, fits: bool, tiny_model: Path, tmp_path: Path
) -> None:
    factors = adapter(tmp_path / "adapter", tiny_model, use_rslora=rslora)
    wanted = AdapterInfo(str(tiny_model), RANK, alpha, ["q_proj"])
    if fits:
        assert read_factors(str(tmp_path / "adapter"), wanted, factors.keys(), "lora_cfg").keys() == factors.keys()
    else:
        with pytest.raises(CheckpointMismatchError, match=r"alpha 8 \(over the root of dim\), lora_cfg has 4 and 8"):
            read_factors(str(tmp_path / "adapter"), wanted, factors.keys(), "lora_cfg")
