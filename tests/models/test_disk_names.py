"""Weights leave under the names of the model's own files, whatever transformers calls them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.dtensor.experts import expert_modules
from nemo_rl.models.dtensor.export import on_disk, remember_disk_names
from nemo_rl.models.policy.model_config import number_of_experts

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "eos_token_id": 1, "pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_have_the_names_and_values_of_the_files_that_transformers_writes(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    remember_disk_names(model)
    parts = {
        name: part
        for key, weight in model.named_parameters()
        for name, part in on_disk(model, key, weight.detach()).items()
    }
    files = load_file(tmp_path / "model.safetensors")
    assert sorted(parts) == sorted(files)
    assert all(torch.equal(parts[name], files[name]) for name in files)
    shapes = [
        (name, part.shape)
        for key, weight in model.named_parameters()
        for name, part in on_disk(model, key, torch.empty(weight.shape, device="meta")).items()
    ]
    assert shapes == [(name, part.shape) for name, part in parts.items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_family_are_found_in_its_configuration_and_in_its_layers(family: str) -> None:
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family]))
    with torch.device("meta"):
        found = expert_modules(AutoModelForCausalLM.from_config(config))
    dense = family in ("llama", "qwen3")
    assert (number_of_experts(config), len(found)) == ((0, 0) if dense else (4, 2))
