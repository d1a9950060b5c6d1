"""Kernels by configuration: attention, Liger's layers, the precision of the output projection; and what a machine
cannot run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_rl.config import DTensorConfig, PolicyConfig
from nemo_rl.models.dtensor.dtensor_checks import check_device, check_packages
from nemo_rl.models.dtensor.model_loading import apply_liger
from nemo_rl.models.policy.attention import Kernel, Segments, SharedKeys, packed_attention
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError


def _liger() -> DTensorConfig:
    return DTensorConfig.model_validate({"automodel_kwargs": {"use_liger_kernel": True}})


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of a stand-in for the package liger-kernel that knows Qwen3 models and no others."""
    calls: list[dict[str, Any]] = []

    def apply_to_qwen3(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        calls.append(
            {
                "rope": rope,
                "loss": cross_entropy or fused_linear_cross_entropy,
                "rms_norm": rms_norm,
                "swiglu": swiglu,
                "model": model,
            }
        )

    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply_to_qwen3}  # type: ignore[attr-defined]
    layers = ModuleType("liger_kernel.transformers")
    layers.monkey_patch = patches  # type: ignore[attr-defined]
    for name, module in {
        "liger_kernel": ModuleType("liger_kernel"),
        "liger_kernel.transformers": layers,
        patches.__name__: patches,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def _model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize("keep_experts", [False, True])
def test_liger_replaces_layers_and_never_the_loss(applied: list[dict[str, Any]], keep_experts: bool) -> None:
    model = _model("qwen3")
    apply_liger(model, keep_experts=keep_experts)
    assert applied == [{"rope": True, "loss": False, "rms_norm": True, "swiglu": not keep_experts, "model": model}]


def test_a_model_without_layers_in_liger_is_refused(applied: list[dict[str, Any]]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"automodel_kwargs.use_liger_kernel=true, but the installed liger-kernel has no layers for "
        r"'llama' models",
    ):
        apply_liger(_model("llama"), keep_experts=False)
    assert not applied


def test_real_liger_replaces_the_norms_and_feed_forwards_of_a_model() -> None:
    pytest.importorskip("liger_kernel")
    model = _model("qwen3")
    forward, layer = type(model).forward, model.model.layers[0]
    apply_liger(model, keep_experts=False)
    assert (
        "liger" in layer.mlp.forward.__func__.__module__
        and "liger" in layer.input_layernorm.forward.__func__.__module__
    )
    assert model.forward.__func__ is forward


def test_liger_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages(DTensorConfig())
    with pytest.raises(
        KernelUnavailableError,
        match="use_liger_kernel=true needs the package liger-kernel, which is not installed; pip install",
    ):
        check_packages(_liger())


@pytest.mark.parametrize(
    "kwargs", [{"use_liger_kernel": True}, {"backend": {"attn": "flash_attention_2"}}, {"backend": {"attn": "flex"}}]
)
def test_kernels_of_gpus_are_refused_on_cpu_slots(kwargs: dict[str, Any]) -> None:
    cfg = PolicyConfig.model_validate({"dtensor_cfg": {"automodel_kwargs": kwargs}})
    check_device(cfg, cuda=True)
    with pytest.raises(KernelUnavailableError, match=r"policy.dtensor_cfg.automodel_kwargs.*CPU slots; set it to"):
        check_device(cfg, cuda=False)


SHARED = SharedKeys(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, *range(6, 12)]), torch.tensor([0, 5, 11, 17]).int())


@pytest.mark.slow
@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.parametrize("kernel", ["eager", "flex"])
def test_attention_does_not_depend_on_the_kernel(kernel: Kernel, shared: SharedKeys | None) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 16, generator=draw) for heads in (4, 2, 2))
    segments = Segments(torch.tensor([0, 5, 6, 12], dtype=torch.int32), 6, shared=shared)
    with torch.no_grad():
        want, _ = packed_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.2, segments=segments, kernel="sdpa"
        )
        got, _ = packed_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.2, segments=segments, kernel=kernel
        )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_flash_attention_off_a_gpu_is_refused() -> None:
    query = torch.zeros(1, 2, 4, 16)
    with pytest.raises(NotImplementedError, match="flash_attention_2 needs a GPU and half precision"):
        packed_attention(
            torch.nn.Module(),
            query,
            query,
            query,
            None,
            segments=Segments(torch.tensor([0, 4], dtype=torch.int32), 4),
            kernel="varlen",
        )
