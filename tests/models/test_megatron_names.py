"""Names and layouts of Hugging Face's weights and Megatron's, both ways, for every family that the backend knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from nemo_rl.models.megatron.families import Naming, Sizes, prediction_weights_of, weights_of
from nemo_rl.models.megatron.prediction import drawn
from tests.conftest import example

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


@pytest.fixture(params=MODELS)
def files(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Configuration, and the tensors as transformers writes them."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # norms and biases too
    model.save_pretrained(tmp_path)
    return model.config, load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("naming", [Naming(), Naming(fused_norms=True, grouped_experts=True)], ids=["local", "engine"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tensor_of_the_files_comes_back_bit_for_bit(
    files: tuple[Any, dict[str, torch.Tensor]], naming: Naming, ranks: int
) -> None:
    config, tensors = files
    sizes = Sizes.of(config)
    predicting = list(prediction_weights_of(sizes, naming, 2))
    further = {name: drawn(name, shape, 1.0) for weight in predicting for name, shape in weight.parts}
    assert not further.keys() & tensors.keys()
    tensors = tensors | further
    found: dict[str, torch.Tensor] = {}
    names = []
    for weight in [*weights_of(sizes, naming), *predicting]:
        names.append(weight.name)
        whole = weight.join([tensors[name] for name, _ in weight.parts])
        shards = [weight.shard(whole, rank, ranks) for rank in range(ranks)]
        if weight.cut != "whole":
            assert sum(shard.numel() for shard in shards) == whole.numel()
        for (name, shape), part in zip(weight.parts, weight.split(weight.paste(shards)), strict=True):
            assert tuple(part.shape) == shape
            found[name] = part
    assert len(set(names)) == len(names)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_demos_model_is_of_a_known_family(tmp_path: Any) -> None:
    from transformers import AutoConfig

    example("make_tiny_model").save_tiny_model(tmp_path, layers=1, hidden=32)
    assert Sizes.of(AutoConfig.from_pretrained(tmp_path)).layers == 1
