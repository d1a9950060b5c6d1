"""Low-rank adapters on Megatron's layers: DTensor's steps, however ranks share the model; checkpoints and refits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen2Config

from nemo_rl.config.megatron import MegatronPeftConfig
from nemo_rl.models.generation.vllm.extension import ArrivedAdapters
from nemo_rl.models.megatron.families import Naming, Sizes, weights_of
from nemo_rl.models.megatron.megatron_lora import chosen_layers, factors_of
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.utils.adapter_files import AdapterInfo, write_adapter
from nemo_rl.utils.convert import to_hugging_face
from tests.models.lora_ranks import megatron_adapters_of_one, megatron_adapters_of_two
from tests.models.policy_ranks import ALL_ROWS, MEGATRON
from tests.ranks import run_ranks

KEY = "policy.megatron_cfg"
LORA = [f"{KEY}.peft.{key}" for key in ("enabled=true", "dim=4", "alpha=8")]
DTENSOR = [f"policy.dtensor_cfg.lora_cfg.{key}" for key in ("enabled=true", "dim=4", "alpha=8")]
WHOLE = [*MEGATRON, *LORA, f"{KEY}.optimizer.use_distributed_optimizer=false"]
PLAIN = ["policy.scheduler=null", "policy.optimizer.kwargs={lr: 0.005, weight_decay: 0.0, betas: [0.9, 0.999]}"]
TP2 = [*ALL_ROWS, f"{KEY}.tensor_model_parallel_size=2"]
PACKED = ["policy.sequence_packing.enabled=true"]
RECOMPUTED = [f"{KEY}.activation_checkpointing=true"]
TWO = {
    "dp 2, optimizer shared out": [*MEGATRON, *LORA],
    "tp 2": [*WHOLE, *TP2],
    "cp 2": [*WHOLE, *ALL_ROWS, f"{KEY}.context_parallel_size=2"],
    "tp 2, sequence parallel, layers recomputed": [*WHOLE, *TP2, f"{KEY}.sequence_parallel=true", *RECOMPUTED],
    "pp 2, layers recomputed": [*WHOLE, *ALL_ROWS, f"{KEY}.pipeline_model_parallel_size=2", *RECOMPUTED],
}
# Beside experts, whose layers have no adapters.
ATTENTION = [*WHOLE, f"{KEY}.peft.exclude_modules=['*.experts.*']"]
STORY = [*MEGATRON, *TP2, *PACKED, f"{KEY}.sequence_parallel=true"]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROWS = ("o_proj", "down_proj")


def _write(model: Path, folder: Path, kinds: tuple[str, ...], *, shared: bool = True) -> str:
    """An adapter of a model's layers of some kinds, none of whose factors is 0. `shared`: whether projections that
    Megatron fuses have the same `lora_A`.
    """
    draw, factors, first = torch.Generator().manual_seed(0), {}, {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            parent, _, kind = module.rpartition(".")
            if kind not in kinds:
                continue
            outputs, inputs = file.get_slice(name).get_shape()
            fused = next((group for group in FUSED if kind in group and shared), (kind,))
            down = 0.3 * torch.randn(4, inputs, generator=draw)
            factors[f"{module}.lora_A"] = first.setdefault((parent, fused), down).clone()
            factors[f"{module}.lora_B"] = 0.1 * torch.randn(outputs, 4, generator=draw)
    write_adapter(folder, AdapterInfo(str(model), 4, 8, sorted(kinds)), factors)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron_lora")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_moe_model: Path) -> dict[str, str]:
    return {"tiny": str(tiny_model), "experts": str(tiny_moe_model)}


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, folder: Path) -> str:
    return _write(tiny_model, folder / "all", (*FUSED[0], *FUSED[1], *ROWS))


@pytest.fixture(scope="module")
def two(models: dict[str, str], folder: Path, adapter: str) -> list[dict[str, Any]]:
    experts = [*ATTENTION, f"{KEY}.expert_model_parallel_size=2"]
    return run_ranks(megatron_adapters_of_two, 2, models, str(folder), TWO, experts, STORY, LORA, adapter)


@pytest.fixture(scope="module")
def one(
    models: dict[str, str], tiny_model: Path, folder: Path, adapter: str, two: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = _write(tiny_model, folder / "rows", ROWS)
    targets = "policy.dtensor_cfg.lora_cfg.match_all_linear=false", "policy.dtensor_cfg.lora_cfg.target_modules"
    cases = {
        "dtensor": (adapter, [*PLAIN, *DTENSOR, *ALL_ROWS]),
        "megatron": (adapter, [*WHOLE, *ALL_ROWS]),
        "dtensor rows": (rows, [*PLAIN, *DTENSOR, *ALL_ROWS, targets[0], f"{targets[1]}=[{','.join(ROWS)}]"]),
        "megatron rows": (rows, [*WHOLE, *ALL_ROWS, f"{KEY}.peft.target_modules=[linear_proj,'*.mlp.linear_fc2']"]),
    }
    unequal = _write(tiny_model, folder / "unequal", (*FUSED[0], *FUSED[1], *ROWS), shared=False)
    return run_ranks(megatron_adapters_of_one, 1, models, str(folder), cases, ATTENTION, PACKED, unequal)[0]


def _assert_same_step(got: dict[str, Any], want: dict[str, Any], *, gradient: bool = True) -> None:
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert got["next_loss"] == pytest.approx(want["next_loss"], rel=1e-3, abs=1e-4)
    if gradient:
        error = np.linalg.norm(got["gradient"] - want["gradient"])
        assert error <= 1e-4 * np.linalg.norm(want["gradient"])


@pytest.mark.slow
def test_layers_that_nothing_fuses_have_the_step_of_dtensors_adapters(one: dict[str, Any]) -> None:
    got, want = one["cases"]["megatron rows"], one["cases"]["dtensor rows"]
    _assert_same_step(got, want)
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-4)


@pytest.mark.slow
def test_fused_layers_have_the_gradients_of_dtensors_adapters_with_one_first_factor(one: dict[str, Any]) -> None:
    got, want = one["cases"]["megatron"], one["cases"]["dtensor"]
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-4)
    gradients, squares = dict(want["gradients"]), 0.0
    for kinds in FUSED:
        for layer in {name.rpartition(f".{kinds[0]}.")[0] for name in gradients if f".{kinds[0]}." in name}:
            names = [f"{layer}.{kind}.lora_A" for kind in kinds]
            total = sum(gradients[name] for name in names)
            squares -= (len(names) - 1) * np.square(total).sum()
            gradients |= dict.fromkeys(names, total)
    assert got["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(got["gradients"][name] - gradient) <= 1e-4 * np.linalg.norm(gradient), name
        squares += np.square(gradient).sum()
    tokens = np.linalg.norm(want["gradient"]) / want["grad_norm"]
    assert got["grad_norm"] == pytest.approx(np.sqrt(squares) / tokens, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO)
def test_two_ranks_compute_the_step_of_one(one: dict[str, Any], two: list[dict[str, Any]], case: str) -> None:
    for rank in two:
        _assert_same_step(rank["cases"][case], one["cases"]["megatron"], gradient="shared out" not in case)


@pytest.mark.slow
def test_adapters_beside_experts_on_two_ranks_have_the_step_of_one(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for rank in two:
        _assert_same_step(rank["experts"], one["experts"])


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_reference_is_the_base_model(two: list[dict[str, Any]]) -> None:
    for rank in two:
        story = rank["story"]
        assert story["same names"] and story["base untouched"] and story["grad_norm"] > 0
        # Two layers of four linear layers, two factors each.
        assert story["trained"] == 2 * 4 * 2
        np.testing.assert_array_equal(story["first logprobs"], story["reference"])
        np.testing.assert_allclose(story["base logprobs"], story["reference"], atol=1e-5)
        assert np.abs(story["logprobs"] - story["first logprobs"]).max() > 1e-3


@pytest.mark.slow
def test_a_checkpoint_is_a_peft_adapter_from_which_training_goes_on_bit_for_bit(
    one: dict[str, Any], two: list[dict[str, Any]], folder: Path, tiny_model: Path
) -> None:
    written = json.loads((folder / "story/weights/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (4, 8, str(tiny_model))
    assert written["target_modules"] == sorted([*FUSED[0], *FUSED[1], *ROWS])
    for rank in two:
        story = rank["story"]
        np.testing.assert_array_equal(story["logprobs"], story["resumed logprobs"])
        assert story["second"] == story["resumed second"]
        assert story["weights"][0] == story["weights"][1]
        np.testing.assert_allclose(one["story in dtensor"], story["logprobs"], atol=1e-4)


@pytest.mark.slow
def test_a_refit_sends_merged_weights_or_the_adapters_that_make_them(
    two: list[dict[str, Any]], folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    weights = load_file(to_hugging_face(folder / "story/weights", tmp_path / "merged") / "model.safetensors")
    for rank in two:
        story = rank["story"]
        assert {name: tensor.shape for name, tensor in story["sent"].items()} == {
            name: shape for name, (shape, _) in story["sent metas"].items()
        }
        arrived = ArrivedAdapters()
        assert list(arrived.take((name, torch.from_numpy(tensor)) for name, tensor in story["sent"].items())) == []
        merged = dict(arrived.merged(load_file(tiny_model / "model.safetensors").items(), torch.device("cpu")))
        for name, tensor in story["exported"].items():
            np.testing.assert_allclose(tensor, weights[name].numpy(), atol=1e-6)
            np.testing.assert_allclose(tensor, merged[name].float().numpy(), atol=1e-6)


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused_with_their_reason(one: dict[str, Any]) -> None:
    assert "q_proj.lora_A" in one["unequal"] and "differ; Megatron computes them by one layer" in one["unequal"]
    assert "holds an adapter alone; set policy.megatron_cfg.peft.enabled: true" in one["all weights"]


@pytest.mark.slow
def test_the_adapter_of_a_layer_that_begins_with_a_norm_takes_what_the_weight_takes(one: dict[str, Any]) -> None:
    adapted, merged = one["layer with a norm"]
    np.testing.assert_allclose(adapted, merged, atol=1e-5)


SMALL = Qwen2Config(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("naming", [Naming(), Naming(fused_norms=True)], ids=["local", "engine"])
def test_a_ranks_parts_of_the_factors_give_its_part_of_their_product(naming: Naming) -> None:
    sizes, chosen = Sizes.of(SMALL), set(chosen_layers(Sizes.of(SMALL), MegatronPeftConfig()))
    assert len(chosen) == 2 * 4
    for weight in weights_of(sizes, naming):
        if weight.name.removesuffix(".weight") not in chosen:
            continue
        down, up = factors_of(weight, 3)
        given = {name: torch.randn(shape) for factor in (up, down) for name, shape in factor.parts}
        first = given[down.parts[0][0]]
        whole = {factor.name: factor.join([given[name] for name, _ in factor.parts]) for factor in (down, up)}
        product = weight.join([given[name] @ first for name, _ in up.parts])
        for rank in range(2):
            shards = [factor.shard(whole[factor.name], rank, 2) for factor in (up, down)]
            torch.testing.assert_close(shards[0] @ shards[1], weight.shard(product, rank, 2))
        for factor in (down, up):
            shards = [factor.shard(whole[factor.name], rank, 2) for rank in range(2)]
            parts = factor.split(factor.paste(shards))
            assert [tuple(part.shape) for part in parts] == [shape for _, shape in factor.parts]
            assert all(
                torch.equal(part, first if factor is down else given[name])
                for part, (name, _) in zip(parts, factor.parts, strict=True)
            )


def test_layers_are_chosen_by_megatrons_names_and_a_pattern_that_chooses_none_is_refused() -> None:
    def chosen(**lists: list[str]) -> list[str]:
        return chosen_layers(Sizes.of(SMALL), MegatronPeftConfig(**lists))

    layers = [f"decoder.layers.{layer}" for layer in range(2)]
    assert chosen(target_modules=["linear_qkv"]) == [f"{layer}.self_attention.linear_qkv" for layer in layers]
    assert chosen(exclude_modules=["*.self_attention.*", "linear_fc1"]) == [
        f"{layer}.mlp.linear_fc2" for layer in layers
    ]
    with pytest.raises(
        UnsupportedModelError, match="target_modules: q_proj matches no .*; it has linear_fc1, linear_fc2"
    ):
        chosen(target_modules=["q_proj"])
    with pytest.raises(UnsupportedModelError, match="chooses no layer"):
        chosen(exclude_modules=["*"])
