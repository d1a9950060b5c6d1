"""Low-rank adapters: what is trained, what others see of the weights, checkpoints, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nemo_rl.config import LoraConfig
from nemo_rl.models.dtensor.dtensor_lora import AdaptedLinear, apply_adapters, chosen_layers
from nemo_rl.models.generation.vllm.extension import AdapterMismatchError, ArrivedAdapters
from nemo_rl.models.policy.lora import base_model, drawn_factors
from nemo_rl.models.policy.model_config import UnsupportedModelError
from tests.conftest import example
from tests.models.engines import colocated
from tests.models.lora_ranks import told_of_adapters
from tests.ranks import run_ranks

CASES = {
    "one rank": (1, []),
    "two ranks, recomputed, packed": (
        2,
        ["policy.dtensor_cfg.activation_checkpointing=true", "policy.sequence_packing.enabled=true"],
    ),
}


@pytest.fixture(scope="module", params=CASES)
def told(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    world, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp("adapters")
    arguments: list[Any] = [str(tiny_model), world, str(folder), overrides]
    if world == 1:
        example("make_tiny_model").save_tiny_model(folder / "other", layers=2, hidden=32)
        arguments.append(str(folder / "other"))
    return run_ranks(told_of_adapters, world, *arguments), folder, world


@pytest.mark.slow
def test_only_adapters_are_trained_and_they_begin_as_the_base_model(told: Any) -> None:
    for story in told[0]:
        assert story["same names"] and story["base untouched"] and story["grad_norm"] > 0
        np.testing.assert_array_equal(story["base logprobs"], story["first logprobs"])
        assert np.abs(story["logprobs"] - story["first logprobs"]).max() > 1e-3
        # Two layers of seven projections, two factors each.
        assert story["trained"] == 2 * 7 * 2


@pytest.mark.slow
def test_the_reference_is_the_base_model(told: Any) -> None:
    for story in told[0]:
        np.testing.assert_allclose(story["reference"], story["base logprobs"], atol=1e-6)


@pytest.mark.slow
def test_what_is_sent_scores_like_the_policy(told: Any) -> None:
    stories, folder, _ = told
    weights = load_file(folder / "merged" / "model.safetensors")
    for name, tensor in stories[0]["exported"].items():
        np.testing.assert_allclose(tensor, weights[name].numpy(), atol=1e-6)
    for story in stories:
        np.testing.assert_allclose(story["logprobs"], story["merged logprobs"], atol=1e-5)


@pytest.mark.slow
def test_adapters_alone_make_of_the_models_files_what_is_sent_merged(told: Any, tiny_model: Path) -> None:
    for story in told[0]:
        assert {name: tensor.shape for name, tensor in story["sent"].items()} == {
            name: shape for name, (shape, _) in story["sent metas"].items()
        }
        arrived = ArrivedAdapters()
        sent = ((name, torch.from_numpy(tensor)) for name, tensor in story["sent"].items())
        assert list(arrived.take(sent)) == [] and arrived
        files = load_file(tiny_model / "model.safetensors")
        merged = dict(arrived.merged(files.items(), torch.device("cpu")))
        assert merged.keys() == files.keys()
        for name, tensor in story["exported"].items():
            np.testing.assert_allclose(merged[name].float().numpy(), tensor, atol=1e-6)


def test_adapters_of_another_model_are_refused_by_the_engine() -> None:
    def arrive(**factors: torch.Tensor) -> ArrivedAdapters:
        arrived = ArrivedAdapters()
        list(arrived.take((name.replace("__", "."), tensor) for name, tensor in factors.items()))
        return arrived

    files = {"q_proj.weight": torch.zeros(4, 6), "norm.weight": torch.zeros(4)}
    fitting = {"q_proj__lora_A": torch.ones(2, 6), "q_proj__lora_B": torch.ones(4, 2)}
    host = torch.device("cpu")
    merged = dict(arrive(**fitting).merged(files.items(), host))
    assert torch.equal(merged["q_proj.weight"], torch.full((4, 6), 2.0))
    for wrong, reason in (
        (fitting | {"k_proj__lora_A": torch.ones(2, 6)}, "adapters of k_proj came"),
        (fitting | {"q_proj__lora_B": torch.ones(5, 2)}, r"q_proj.weight \(4, 6\) came as"),
        ({"q_proj__lora_A": torch.ones(2, 6)}, r"came as \{'lora_A': \(2, 6\)\}"),
    ):
        with pytest.raises(AdapterMismatchError, match=reason):
            dict(arrive(**wrong).merged(files.items(), host))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_engines_score_alike_whether_adapters_come_alone_or_merged(tiny_model: Path, ray_session: None) -> None:
    lora = ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=2"]
    answers, sent = {}, {}
    for sync in ("merged", "adapter"):
        with colocated(tiny_model, 1, *lora, f"policy.dtensor_cfg.lora_cfg.sync={sync}") as both:
            requests = both.requests(6)
            both.refitter.release_device()
            both.train_step()
            both.refitter.bring_to(1)
            results = both.run(requests)
            assert both.disagreement(requests, results) <= 1.001
            answers[sync] = [(result.token_ids, result.logprobs) for result in results]
            sent[sync] = sum(meta.nbytes for meta in both.policy.tensor_metas())
    assert sent["adapter"] <= 0.05 * sent["merged"]
    for (tokens, logprobs), (same_tokens, same_logprobs) in zip(answers["merged"], answers["adapter"], strict=True):
        assert list(tokens) == list(same_tokens)
        np.testing.assert_allclose(logprobs, same_logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_a_peft_adapter_from_which_training_goes_on_bit_for_bit(told: Any, tiny_model: Path) -> None:
    stories, folder, _ = told
    written = json.loads((folder / "weights/adapter_config.json").read_text())
    assert written["peft_type"] == "LORA" and written["base_model_name_or_path"] == str(tiny_model)
    assert (written["r"], written["lora_alpha"]) == (4, 32) and "q_proj" in written["target_modules"]
    tensors = load_file(folder / "weights/adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[0] == 4
    whole = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    assert (folder / "weights/adapter_model.safetensors").stat().st_size < whole / 2
    for story in stories:
        np.testing.assert_array_equal(story["logprobs"], story["resumed logprobs"])
        assert story["second"] == story["resumed second"]
        assert story["weights"][0] == story["weights"][1]


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_refused_with_its_reason(told: Any, tiny_model: Path) -> None:
    stories, folder, world = told
    if world > 1:
        pytest.skip("once is enough")
    seen, other = stories[0]["refused"], folder / "other"
    assert f"is an adapter of {tiny_model}, not of policy.model_name {other}" in seen["another base"]
    assert "the adapter has dim 4 and alpha 32, policy.dtensor_cfg.lora_cfg has 2 and 32" in seen["another rank"]
    assert "is of other layers than policy.dtensor_cfg.lora_cfg chooses" in seen["other layers"]
    assert "holds an adapter alone; set policy.dtensor_cfg.lora_cfg.enabled" in seen["all weights"]
    assert "holds no adapter" in seen["no adapter"] and "goes on from adapters" in seen["no adapter"]
    assert "q_prj matches no linear layer" in seen["no such layer"] and "q_proj" in seen["no such layer"]


class Small(nn.Module):
    """Three linear layers under names that patterns can tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(6, 6), "out_proj": nn.Linear(6, 6, bias=False)})
        self.lm_head = nn.Linear(6, 9)


def test_layers_are_chosen_by_name_part_or_pattern_and_never_the_output_projection() -> None:
    model = Small()
    assert chosen_layers(model, LoraConfig()) == ["attn.q_proj", "attn.out_proj"]
    assert chosen_layers(model, LoraConfig(exclude_modules=["*out_proj*"])) == ["attn.q_proj"]
    assert chosen_layers(model, LoraConfig(match_all_linear=False, target_modules=["out_proj"])) == ["attn.out_proj"]
    assert chosen_layers(model, LoraConfig(match_all_linear=False, exclude_modules=["*out_proj"])) == ["attn.q_proj"]
    with pytest.raises(UnsupportedModelError, match="chooses no layer"):
        chosen_layers(model, LoraConfig(match_all_linear=False))
    with pytest.raises(UnsupportedModelError, match=r"exclude_modules: lm_head matches no linear layer"):
        chosen_layers(model, LoraConfig(exclude_modules=["lm_head"]))


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_layer_adds_the_scaled_product_and_drops_only_in_training(position: Any) -> None:
    torch.manual_seed(0)
    model = Small()
    cfg = LoraConfig(dim=2, alpha=6, dropout=0.5, dropout_position=position)
    before = model.attn["q_proj"](torch.ones(1, 6))
    model.load_state_dict(drawn_factors(apply_adapters(model, cfg), cfg.dim, cfg.lora_A_init), strict=False)
    layer: Any = model.attn["q_proj"]
    assert isinstance(layer, AdaptedLinear) and torch.equal(layer(torch.ones(1, 6)), before)
    nn.init.normal_(layer.lora_B)
    change = 3.0 * (layer.lora_B @ layer.lora_A).sum(1)
    torch.testing.assert_close(layer.eval()(torch.ones(1, 6)), before + change)
    assert not torch.allclose(layer.train()(torch.ones(1, 6)), before + change)
    with base_model([model]):
        assert torch.equal(layer(torch.ones(1, 6)), before)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"attn.{name}.lora_{factor}" for name in ("q_proj", "out_proj") for factor in "AB"
    ]
