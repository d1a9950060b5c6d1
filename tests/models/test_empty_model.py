"""Models without weights leave whatever else is built in the process alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.models.policy.model_config import empty_model


def _config(**changed: object) -> PretrainedConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=2, head_dim=8, vocab_size=64, **changed)


def test_parameters_are_shapes_and_buffers_are_real() -> None:
    model = empty_model(_config(), dtype=torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad for parameter in model.parameters())
    frequencies = model.get_buffer("model.rotary_emb.inv_freq")
    assert frequencies.device.type == "cpu" and frequencies[0] == 1


@pytest.mark.slow
def test_threads_that_build_models_change_nothing_for_each_other_nor_afterwards() -> None:
    def build(turn: int) -> tuple[str, str]:
        other = nn.Linear(3, 3)
        return empty_model(_config(), dtype=torch.bfloat16).lm_head.weight.device.type, other.weight.device.type

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(build, range(40))) == {("meta", "cpu")}
    assert nn.Linear(2, 2).weight.type() == "torch.FloatTensor" and torch.get_default_dtype() == torch.float32


def test_a_model_that_cannot_be_built_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError, match="no such function"):
        empty_model(_config(hidden_act="no such function"))
    assert nn.Linear(2, 2).weight.device.type == "cpu"
