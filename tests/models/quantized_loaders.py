"""Weights arrive again and again in a model of vLLM's whose linear layers are quantised to fp8 as they arrive.

Only the kernels that would multiply them are left out, which need a GPU. Runs where `planned_loaders` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from nemo_rl.config import GenerationConfig, PolicyConfig
from nemo_rl.config.generation import VllmConfig as VllmOptions
from nemo_rl.models.generation.vllm.engine_actors import quantization_arguments
from nemo_rl.models.generation.vllm.extension import _VllmModel
from nemo_rl.weight_sync.layout import Window
from tests.weight_sync.test_copy_plan import windows

_BLOCK = 128
_ROUNDING = 2**-4  # half of the last of three bits after the point, of numbers up to twice their power of two


def check_quantized(folder: str, sessions: list[dict[str, torch.Tensor]]) -> None:
    """Every session leaves its own weights, quantised in place, whatever the sessions before left, one of them without
    an end.
    """
    vllm = VllmOptions(precision="fp8", quantization_ignored_layer_kws=["o_proj"], num_last_layers_in_bf16=1)
    policy = PolicyConfig(model_name=folder, generation=GenerationConfig(vllm_cfg=vllm))
    quantization: dict[str, Any] = quantization_arguments(policy, cuda=True)
    options: dict[str, Any] = {"dtype": vllm.dtype, "skip_tokenizer_init": True, "enforce_eager": True}
    given = AsyncEngineArgs(model=folder, **options, **quantization)
    model_config = given.create_model_config()
    vllm_config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(vllm_config), _without_kernels():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config)
        finally:
            torch.set_default_dtype(torch.float32)
        DummyModelLoader(vllm_config.load_config).load_weights(model, model_config)
        layerwise.finalize_layerwise_processing(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
        runner = SimpleNamespace(get_model=lambda: model)
        worker = SimpleNamespace(
            device=torch.device("cuda"), vllm_config=vllm_config, model_runner=runner, model_config=model_config
        )
        target = _VllmModel(worker)
        assert target._plans is None
        addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for number, sent in enumerate(sessions):
            if number == 1:
                parts = _windows(sent)
                _load(target, parts[: len(parts) // 2], ends=False)
            _load(target, _windows(sent), ends=True)
            _compare(model, sent)
            assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Layers as they are on GPUs: on CPUs vLLM packs those in bfloat16, and has no kernels for fp8."""
    none = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    with ExitStack() as patches:
        patches.enter_context(patch.object(fp8, "init_fp8_linear_kernel", lambda **_: none))
        for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            patches.enter_context(patch.object(method, "process_weights_after_loading", lambda self, layer: None))
        yield


def _windows(sent: dict[str, torch.Tensor]) -> list[Window]:
    return windows(sent, bucket_bytes=64 << 10, together=2)


def _load(target: _VllmModel, parts: list[Window], *, ends: bool) -> None:
    target.begin_load()
    for window in parts:
        target.load_weights(window)
        window.bytes_B.zero_()  # a buffer of the next window
    (target.finish_load if ends else target.abandon_load)()


def _compare(model: torch.nn.Module, sent: dict[str, torch.Tensor]) -> None:
    assert torch.equal(model.model.embed_tokens.weight[:259], sent["model.embed_tokens.weight"].bfloat16())
    for number, layer in enumerate(model.model.layers):
        own = {
            name.removeprefix(f"model.layers.{number}."): tensor
            for name, tensor in sent.items()
            if name.startswith(f"model.layers.{number}.")
        }
        attention, mlp = layer.self_attn, layer.mlp
        gates = torch.cat([own[f"mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(
            attention.qkv_proj.bias, torch.cat([own[f"self_attn.{part}_proj.bias"] for part in "qkv"]).bfloat16()
        )
        assert torch.equal(attention.o_proj.weight, own["self_attn.o_proj.weight"].bfloat16())
        for projection, weight in ((mlp.gate_up_proj, gates), (mlp.down_proj, own["mlp.down_proj.weight"])):
            if number:
                assert torch.equal(projection.weight, weight.bfloat16()), "the last layer is left as it is"
            else:
                _assert_quantized(projection, weight)


def _assert_quantized(layer: torch.nn.Module, sent: torch.Tensor) -> None:
    weight, scale = layer.weight, layer.weight_scale_inv
    assert weight.dtype == torch.float8_e4m3fn and tuple(weight.shape) == tuple(sent.shape)
    rows, columns = weight.shape
    scales = scale.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    error = (weight.float() * scales - sent.float()).abs()
    # Below the smallest normal number of a block what is rounded is a share of that number.
    assert (error <= _ROUNDING * sent.abs().clamp(min=float(sent.abs().max()) * 2**-6)).all()
