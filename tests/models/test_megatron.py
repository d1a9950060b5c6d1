"""The Megatron backend computes what the DTensor backend does, however its ranks share the model, and over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import example
from tests.models.policy_ranks import (
    ALL_ROWS,
    MEGATRON,
    first_step,
    megatron_of_one,
    megatron_of_two,
    training_batch,
)
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEY = "policy.megatron_cfg"
PACKED = ["policy.sequence_packing.enabled=true"]
# Where ranks share gradients out, only one of them has each in full: the step's result shows them all the same.
WHOLE = [*MEGATRON, f"{KEY}.optimizer.use_distributed_optimizer=false"]
PLAIN = ["policy.scheduler=null", "policy.optimizer.kwargs={lr: 0.005, weight_decay: 0.0, betas: [0.9, 0.999]}"]
FILTERED = [f"policy.generation.{key}" for key in ("top_k=200", "top_p=0.95", "temperature=1.3")]
_ROPE = "rope_type: yarn, factor: 4.0, original_max_position_embeddings: 16, rope_theta: 10000.0"
YARN = [f"++policy.hf_config_overrides.rope_parameters={{{_ROPE}}}"]
ALONE = {"dtensor": [*PLAIN, *ALL_ROWS], "megatron": [*WHOLE, *ALL_ROWS]}
ONE = ALONE | {
    f"{backend} {name}": [*ALONE[backend], *how]
    for backend, name, how in (
        ("dtensor", "yarn", YARN),
        ("megatron", "yarn", YARN),
        ("dtensor", "packed", PACKED),
        ("megatron", "packed", PACKED),
        ("dtensor", "filtered", FILTERED),
    )
}
TP2 = [*ALL_ROWS, f"{KEY}.tensor_model_parallel_size=2"]
PP2 = [*ALL_ROWS, f"{KEY}.pipeline_model_parallel_size=2"]
CP2 = [*ALL_ROWS, f"{KEY}.context_parallel_size=2"]
TWO = {
    "dp 2, optimizer shared out": list(MEGATRON),
    "dp 2 packed": [*WHOLE, *PACKED],
    "tp 2 filtered": [*WHOLE, *TP2, *FILTERED],
    "tp 2, sequence parallel, packed": [*WHOLE, *TP2, *PACKED, f"{KEY}.sequence_parallel=true"],
    "pp 2 packed, layers recomputed": [*WHOLE, *PACKED, *PP2, f"{KEY}.activation_checkpointing=true"],
    "cp 2": [*WHOLE, *CP2],
    "cp 2 packed": [*WHOLE, *PACKED, *CP2],
}
EXPERTS = {
    "ep 2 packed": [*WHOLE, *PACKED, f"{KEY}.expert_model_parallel_size=2"],
    "tp 2": [*WHOLE, *TP2, f"{KEY}.sequence_parallel=true", f"{KEY}.expert_tensor_parallel_size=2"],
}


DEEP = {
    "two stages of two parts each": [
        *WHOLE,
        *PP2,
        f"{KEY}.model_overrides={{virtual_pipeline_model_parallel_size: 2}}",
    ],
    "stages of one layer and of three": [
        *WHOLE,
        *PP2,
        f"{KEY}.num_layers_in_first_pipeline_stage=1",
    ],
}
STORIES = {
    "dp 2, optimizer shared out": list(MEGATRON),
    "pp 2": [*WHOLE, f"{KEY}.pipeline_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_moe_model: Path, folder: Path) -> dict[str, str]:
    example("make_tiny_model").save_tiny_model(folder / "deep", layers=4, hidden=64)
    return {"tiny": str(tiny_model), "experts": str(tiny_moe_model), "deep": str(folder / "deep")}


@pytest.fixture(scope="module")
def two(models: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    return run_ranks(megatron_of_two, 2, models, str(folder), TWO, EXPERTS, DEEP, STORIES, timeout_s=280.0)


@pytest.fixture(scope="module")
def one(models: dict[str, str], folder: Path, two: list[dict[str, Any]]) -> dict[str, Any]:
    return run_ranks(megatron_of_one, 1, models, str(folder), ONE, ALONE)[0]


def _assert_same_step(got: dict[str, Any], want: dict[str, Any], *, gradient: bool = True) -> None:
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert got["next_loss"] == pytest.approx(want["next_loss"], rel=1e-3, abs=1e-4)
    if gradient:
        error = np.linalg.norm(got["gradient"] - want["gradient"])
        assert error <= 1e-4 * np.linalg.norm(want["gradient"])


@pytest.mark.parametrize("how", ["", " packed", " yarn"])
def test_both_backends_compute_the_same_step(one: dict[str, Any], how: str) -> None:
    got, want = one["cases"][f"megatron{how}"], one["cases"][f"dtensor{how}"]
    _assert_same_step(got, want)
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-4)
    for name, values in want["metrics"].items():
        assert got["metrics"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_positions_of_yarn_change_what_is_computed(one: dict[str, Any]) -> None:
    plain, yarn = one["cases"]["megatron"], one["cases"]["megatron yarn"]
    assert np.abs(yarn["logprobs"] - plain["logprobs"]).max() > 1e-3


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_of_megatron_compute_the_step_of_one_of_dtensor(
    one: dict[str, Any], two: list[dict[str, Any]], case: str
) -> None:
    want = one["cases"]["dtensor filtered" if "filtered" in case else "dtensor"]
    for rank in two:
        _assert_same_step(rank["cases"][case], want, gradient="shared out" not in case)


@pytest.mark.parametrize("case", DEEP)
def test_stages_of_several_parts_or_of_unequal_ones_compute_the_same_step(
    one: dict[str, Any], two: list[dict[str, Any]], case: str
) -> None:
    for rank in two:
        _assert_same_step(rank["deep"][case], one["deep"])


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_two_ranks_of_megatron_compute_the_step_of_one(
    one: dict[str, Any], two: list[dict[str, Any]], case: str
) -> None:
    alone = one["experts"]
    # transformers stacks a layer's experts in memory, Megatron gives those of the files: their gradients differ in
    # order, so that only norms compare across backends.
    _assert_same_step(alone["megatron"], alone["dtensor"], gradient=False)
    for rank in two:
        _assert_same_step(rank["experts"][case], alone["megatron"])


@pytest.fixture(params=STORIES)
def story(request: pytest.FixtureRequest, two: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = two[0]["stories"][request.param]
    return found


def test_ranks_that_share_experts_and_each_expert_compute_the_step_of_one(
    one: dict[str, Any], models: dict[str, str]
) -> None:
    shared = [*TP2, f"{KEY}.sequence_parallel=true", f"{KEY}.expert_model_parallel_size=2"]
    overrides = [*WHOLE, *shared, f"{KEY}.expert_tensor_parallel_size=2"]
    want = one["experts"]["megatron"]
    for got in run_ranks(first_step, 4, models["experts"], 4, overrides):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_gradients_of_half_precision_weights_are_added_up_in_float32(one: dict[str, Any]) -> None:
    seen, whole = one["bfloat16"], one["cases"]["megatron"]
    assert seen["weights"] == {"torch.bfloat16"} and seen["gradients"] == {"torch.float32"}
    assert seen["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    assert seen["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-2)


def test_errors_leave_the_worker_as_before_the_step(story: dict[str, Any]) -> None:
    assert story["whole weights"] == story["chunked weights"]
    assert "no train step open" in story["finish without begin"] and "already open" in story["begin twice"]
    assert "samples of the step with values that are not finite: [6]" in story["nan"]
    assert "planted" in story["loss raises"]
    assert "weights are not finite after the optimizer's step" in story["damaged optimizer"]
    for after in ("abort", "nan", "raise"):
        assert story[f"weights after {after}"] == story["chunked weights"]
    first, second = story["second weights"]
    assert first == second != story["whole weights"]


def test_a_resumed_run_goes_on_bit_for_bit(story: dict[str, Any]) -> None:
    assert story["resumed weights"] == story["second weights"][1]
    assert story["resumed third"]["loss"] == story["third"]["loss"]
    assert story["resumed third"]["lr"] == story["third"]["lr"]
    assert story["resumed third weights"] == story["third weights"]


def test_a_checkpoint_resumes_on_another_grid(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    saved, resumed = two[0]["expert story"], one["resumed experts"]
    assert resumed["second"]["loss"] == pytest.approx(saved["second"]["loss"], rel=1e-5)
    assert resumed["second"]["grad_norm"] == pytest.approx(saved["second"]["grad_norm"], rel=1e-5)
    for name, weight in saved["exported"].items():
        assert weight.shape == saved["metas"][name]
        np.testing.assert_array_equal(resumed["exported"][name], weight)


def test_exported_names_are_those_of_the_models_own_files(tiny_moe_model: Path, two: list[dict[str, Any]]) -> None:
    from safetensors import safe_open

    with safe_open(tiny_moe_model / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping, only the method
    assert [rank["expert story"]["metas"] for rank in two] == [shapes, shapes]


def test_a_checkpoint_loads_in_transformers(one: dict[str, Any], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "ep" / "weights", dtype=torch.float32)
    data = training_batch()
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        with torch.no_grad():
            alone = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        np.testing.assert_allclose(one["resumed experts"]["logprobs"][row, 1:length], alone.numpy(), atol=2e-5)


def test_reference_weights_and_largest_logits_are_those_of_dtensor(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    got, want = two[0]["reference"], one["reference"]
    assert got["weights untouched"]
    np.testing.assert_array_equal(got["reference before"], got["reference after"])
    assert got["one call scores as two"]
    for name in ("reference before", "topk_logits"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-4)
    np.testing.assert_array_equal(got["topk_indices"], want["topk_indices"])
