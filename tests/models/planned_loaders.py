"""Makes a copy plan of a vLLM model with experts, as its constructor leaves it, and compares the replay with its
loader, and loads weights where layers quantise them; ends with an error where something differs. A process of its own:
vLLM's parallel state is one per process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.utils import initialize_model

from nemo_rl.models.generation.vllm.extension import _VllmModel
from nemo_rl.weight_sync.layout import Window
from tests.models.quantized_loaders import check_quantized
from tests.weight_sync.test_copy_plan import equal, state, windows

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 259,
    "max_position_embeddings": 128,
}
# vLLM makes its group for experts only where the first model has some.
CONFIGS: list[PretrainedConfig] = [
    Qwen3MoeConfig(
        **SMALL,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    Qwen2Config(**SMALL, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]),
]


def sent(config: PretrainedConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as a policy sends them: experts one by one."""
    torch.manual_seed(seed)
    for name, weight in AutoModelForCausalLM.from_config(config).named_parameters():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            yield name, weight.detach()
            continue
        for number, expert in enumerate(weight.detach()):
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)) if "gate" in kind else {}
            for part, tensor in (parts or {kind: expert}).items():
                yield f"{layer}.{number}.{part}.weight", tensor.contiguous()


def main() -> None:
    """Checks every configuration."""
    for number, config in enumerate(CONFIGS):
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            model_config = ModelConfig(model=folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True)
            vllm_config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
            with set_current_vllm_config(vllm_config):
                if not number:
                    init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
                    initialize_model_parallel(1)
                model = initialize_model(vllm_config)
                check(config, vllm_config, model)
            if isinstance(config, Qwen2Config):
                check_quantized(folder, [dict(sent(config, seed)) for seed in (1, 2, 3)])


def check(config: PretrainedConfig, vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """A second session of a model with experts is replayed, and leaves what the loader leaves."""
    # Only the kind of device matters: on CPU slots the layer-wise reload takes the place of plans.
    runner = SimpleNamespace(get_model=lambda: model)
    worker = SimpleNamespace(device=torch.device("cuda"), vllm_config=vllm_config, model_runner=runner)
    first, later = (windows(dict(sent(config, seed)), bucket_bytes=64 << 10, together=2) for seed in (1, 2))
    target = _VllmModel(worker)
    if isinstance(config, Qwen2Config):
        assert target._plans is None
        return
    take(target, model, first)
    assert target._plans is not None and len(target._plans) == len(first) > 1, target._plans
    own = model.load_weights
    model.load_weights = lambda weights: sys.exit("the loader ran again")
    replayed = take(target, model, later)
    model.load_weights = own
    assert equal(replayed, take(_VllmModel(worker), model, later))


def take(target: _VllmModel, model: torch.nn.Module, parts: list[Window]) -> dict[str, torch.Tensor]:
    """What a session leaves in a model that had lost its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    target.begin_load()
    for window in parts:
        target.load_weights(window)
    target.finish_load()
    return state(model)


if __name__ == "__main__":
    main()
