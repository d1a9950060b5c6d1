"""Families that only the package megatron-bridge knows: the same numbers as the backend's own way, resumed too, and
one clear line where the package is missing or does not help. The package itself needs Transformer Engine and does not
run here; a stand-in has its names and signatures (0.3.1).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl.models.megatron.bridge import Bridge
from nemo_rl.models.megatron.megatron_checks import check_policy
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError, model_config
from tests.models import bridge_ranks
from tests.models.bridge_ranks import AutoMapping, bridged_stories, modules
from tests.models.policy_ranks import MEGATRON, run_config
from tests.ranks import run_ranks

KEY = "policy.megatron_cfg"
CASES = {
    "tp 2": [*MEGATRON, f"{KEY}.tensor_model_parallel_size=2"],
    "pp 2": [*MEGATRON, f"{KEY}.pipeline_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same weights as a Llama and as a Mistral."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**shape))
    mistral = MistralForCausalLM(MistralConfig(**shape, sliding_window=None))
    mistral.load_state_dict(llama.state_dict())
    folder = tmp_path_factory.mktemp("bridge")
    for name, model in (("llama", llama), ("mistral", mistral)):
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("llama", "mistral")}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core  # noqa: F401 - the namespace that both packages share

    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.slow
def test_a_bridged_family_trains_exports_and_resumes_as_one_of_our_own(models: dict[str, str], tmp_path: Path) -> None:
    for rank in run_ranks(bridged_stories, 2, models, 2, str(tmp_path), CASES):
        for story in rank.values():
            own, bridged, resumed = story["own"], story["bridged"], story["resumed"]
            assert own["metas"] == bridged["metas"] and list(own["exported"]) == list(bridged["exported"])
            for name, tensor in own["exported"].items():
                np.testing.assert_allclose(bridged["exported"][name], tensor, atol=5e-6, err_msg=name)
            np.testing.assert_allclose(bridged["logprobs"], own["logprobs"], atol=1e-5)
            assert bridged["second"]["loss"] == pytest.approx(own["second"]["loss"], abs=1e-6)
            assert bridged["second"]["grad_norm"] == pytest.approx(own["second"]["grad_norm"], rel=1e-5)
            assert resumed["second"]["loss"] == bridged["second"]["loss"]
            assert resumed["weights"] == bridged["weights"]


def _checked(models: dict[str, str], *overrides: str, **changes: Any) -> None:
    cfg = run_config(models["mistral"], 4, *MEGATRON, *overrides).policy
    model = model_config(cfg)
    for name, value in changes.items():
        setattr(model, name, value)
    check_policy(cfg, model)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_what_a_bridged_family_cannot_do_here_is_refused_before_anything_starts(models: dict[str, str]) -> None:
    _checked(models)
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads=2; possible: 1, 2"):
        _checked(models, f"{KEY}.tensor_model_parallel_size=4")
    with pytest.raises(UnsupportedModelError, match="has window_size=64 in Megatron's configuration"):
        _checked(models, sliding_window=64)
    with pytest.raises(UnsupportedModelError, match=r"does not take the model type 'mistral' \(Model architecture not"):
        _checked(models, architectures=["OtherForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"policy\.hf_config_overrides changes a model of type 'mistral'"):
        _checked(models, "+policy.hf_config_overrides.rms_norm_eps=1e-5")
    with pytest.raises(UnsupportedModelError, match="adapters are not built for the model type 'mistral'"):
        _checked(models, f"{KEY}.peft.enabled=true")
    with pytest.raises(UnsupportedModelError, match="mtp_num_layers=1: layers of multi-token prediction are not built"):
        _checked(models, f"{KEY}.mtp_num_layers=1", f"{KEY}.mtp_loss_scaling_factor=0.1")


def test_a_family_that_needs_the_package_says_so_without_it(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UnsupportedModelError, match="'mistral' is not known; possible: llama.* pip install megatron-br"
    ):
        _checked(models)
    broken = modules()["megatron.bridge"]
    del broken.__dict__["AutoBridge"]
    monkeypatch.setitem(sys.modules, "megatron.bridge", broken)
    with pytest.raises(KernelUnavailableError, match="installed and cannot be imported here"):
        _checked(models)


@pytest.mark.usefixtures("package")
def test_the_packages_own_layers_attend_over_packed_rows(models: dict[str, str]) -> None:
    from nemo_rl.models.megatron.packed_layers import PackedAttention

    cfg = run_config(models["mistral"], 1, *MEGATRON).policy
    bridge = Bridge(cfg, model_config(cfg), engine=True)
    assert AutoMapping.registered == {"RowNorm": "replicated"}
    layer = bridge.layers(None)
    assert layer.submodules.self_attention.submodules.core_attention is PackedAttention


def _changed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Makes the stand-in's configurations with other options."""
    made = bridge_ranks._provider

    def changed(config: Any) -> Any:
        provider = made(config)
        provider.__dict__.update(options)
        return provider

    monkeypatch.setattr(bridge_ranks, "_provider", changed)


@pytest.mark.usefixtures("package")
def test_what_a_package_sets_for_pretraining_is_off(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretraining = {"moe_z_loss_coeff": 1e-3, "moe_input_jitter_eps": 0.1, "moe_router_bias_update_rate": 1e-3}
    _changed(monkeypatch, **pretraining, moe_expert_capacity_factor=1.5)
    cfg = run_config(models["mistral"], 1, *MEGATRON).policy
    config = Bridge(cfg, model_config(cfg), engine=False).config({})
    assert (config.moe_z_loss_coeff, config.moe_input_jitter_eps, config.moe_expert_capacity_factor) == (None,) * 3
    assert config.moe_router_bias_update_rate == 0


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("option", "value"), [("mtp_num_layers", 1), ("experimental_attention_variant", "gated_delta_net")]
)
def test_a_package_whose_model_has_other_parts_is_refused(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, option: str, value: object
) -> None:
    _changed(monkeypatch, **{option: value})
    with pytest.raises(UnsupportedModelError, match=f"has {option}={value!r} in Megatron's configuration"):
        _checked(models)


@pytest.mark.usefixtures("package")
def test_a_package_that_builds_a_model_by_a_way_of_its_own_is_refused(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bridge_ranks._provider

    def scaled(config: Any) -> Any:
        provider = made(config)
        provider.__class__ = type("GemmaModelProvider", (type(provider),), {"provide": lambda self: None})
        return provider

    monkeypatch.setattr(bridge_ranks, "_provider", scaled)
    with pytest.raises(UnsupportedModelError, match=r"by a way of its own \(GemmaModelProvider\.provide\)"):
        _checked(models)
