"""Experts that are shared out over ranks: the same step, weights, checkpoint and export as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.config import DTensorConfig
from nemo_rl.models.dtensor.parallelize import apply_activation_checkpointing
from nemo_rl.models.policy.model_config import UnsupportedModelError, check_experts, model_config
from tests.models.policy_ranks import ALL_ROWS, experts_of_one, experts_of_two, many_splits, run_config, training_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PACKED = ["policy.sequence_packing.enabled=true"]
EP2 = ["policy.dtensor_cfg.expert_parallel_size=2"]
TP2 = ["policy.dtensor_cfg.tensor_parallel_size=2", *ALL_ROWS]
CP2 = ["policy.dtensor_cfg.context_parallel_size=2", *ALL_ROWS]
SP = [*TP2, "policy.dtensor_cfg.sequence_parallel=true"]
CHECKPOINTING = ["policy.dtensor_cfg.activation_checkpointing=true"]

TWO = {
    "dp 2": [],
    "ep 2 gradients reduced once": [*EP2, *PACKED, "policy.dtensor_cfg.defer_fsdp_grad_sync=true"],
    "ep 2 dynamic": [*EP2, "policy.dynamic_batching.enabled=true"],
    "ep 2, all kept": [*EP2, *PACKED, "policy.dtensor_cfg.moe_parallelizer.reshard_after_forward=false"],
    "ep 2 checkpointing but for the router": [
        *EP2,
        *CHECKPOINTING,
        "policy.dtensor_cfg.moe_parallelizer.ignore_router_for_ac=true",
    ],
    "ep 2 over cp 2": [*EP2, *CP2, *PACKED],
    "tp 2 sequence parallel": [*SP, *PACKED],
}
FOUR = {
    "ep 2 of 4": [*EP2, *PACKED],
    "ep 2 x tp 2": [*EP2, *SP, *PACKED],
    "ep 2 x replicate 2": [*EP2, *PACKED, "policy.dtensor_cfg.dp_replicate_size=2"],
}


HALF = ["policy.precision=bfloat16"]
ONE = {
    "one": [],
    "half": HALF,
    "half but for the head": [*HALF, "policy.dtensor_cfg.moe_parallelizer.lm_head_precision=float32"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def of_two(tiny_moe_model: Path, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(experts_of_two, 2, str(tiny_moe_model), str(folder), TWO, EP2)


@pytest.fixture(scope="module")
def of_one(tiny_moe_model: Path, folder: Path, of_two: list[dict[str, Any]]) -> dict[str, Any]:
    return run_ranks(experts_of_one, 1, str(tiny_moe_model), str(folder), ONE)[0]


@pytest.fixture(scope="module")
def alone(of_one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = of_one["cases"]
    return cases


@pytest.fixture(scope="module")
def one(alone: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return alone["one"]


@pytest.fixture(scope="module")
def two(of_two: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    return [rank["cases"] for rank in of_two]


@pytest.fixture(scope="module")
def four(tiny_moe_model: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(many_splits, 4, str(tiny_moe_model), 4, FOUR)


def _assert_same_step(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert got["next_loss"] == pytest.approx(want["next_loss"], rel=1e-4, abs=1e-5)
    assert np.linalg.norm(got["gradient"] - want["gradient"]) / np.linalg.norm(want["gradient"]) <= 1e-5


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_with_experts_compute_the_step_of_one(
    one: dict[str, Any], two: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in two:
        _assert_same_step(rank[case], one)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_with_experts_compute_the_step_of_one(
    one: dict[str, Any], four: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in four:
        _assert_same_step(rank[case], one)


def test_an_output_projection_in_float32_changes_the_rounding_of_the_last_layer_alone(
    alone: dict[str, dict[str, Any]],
) -> None:
    half, head = (alone[case]["logprobs"] for case in ("half", "half but for the head"))
    assert 0.0 < np.abs(head - half).max() < 0.1
    # The layers below round alike, which is most of the error; how much the head adds depends on the processor.
    error, error_of_head = (np.abs(one - alone["one"]["logprobs"]).mean() for one in (half, head))
    assert error_of_head == pytest.approx(error, rel=0.1)
    assert error < 0.1


@pytest.fixture(scope="module")
def whole_story(of_one: dict[str, Any]) -> dict[str, Any]:
    story: dict[str, Any] = of_one["story"]
    return story


@pytest.fixture(scope="module")
def cut_story(of_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["story"] for rank in of_two]


def test_the_export_of_experts_that_are_shared_out_is_the_export_of_one_rank(
    whole_story: dict[str, Any], cut_story: list[dict[str, Any]]
) -> None:
    for rank in cut_story:
        assert list(rank["exported"]) == list(whole_story["exported"]) == list(rank["metas"])
        for name, weight in rank["exported"].items():
            assert weight.shape == rank["metas"][name]
            # The learning rate bounds what a step of Adam does to a weight whose gradient is rounding noise.
            np.testing.assert_allclose(weight, whole_story["exported"][name], atol=2e-4, err_msg=name)


def test_exported_names_are_those_of_the_models_own_files(
    tiny_moe_model: Path, cut_story: list[dict[str, Any]]
) -> None:
    from safetensors import safe_open

    with safe_open(tiny_moe_model / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping, only the method
    assert cut_story[0]["metas"] == shapes
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in shapes


def test_a_checkpoint_of_shared_out_experts_loads_in_transformers(
    folder: Path, cut_story: list[dict[str, Any]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    data = training_batch()
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        with torch.no_grad():
            alone = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        rank, local = divmod(row, len(data["input_lengths"]) // 2)
        np.testing.assert_allclose(cut_story[rank]["logprobs"][local, 1:length], alone.numpy(), atol=2e-5)


def test_a_resumed_run_goes_on_bit_for_bit(of_two: list[dict[str, Any]], cut_story: list[dict[str, Any]]) -> None:
    resumed = [rank["resumed"] for rank in of_two]
    assert resumed[0]["second"]["loss"] == cut_story[0]["second"]["loss"]
    assert resumed[0]["weights"] == cut_story[0]["weights"]


def test_a_checkpoint_resumes_with_another_number_of_ranks_for_the_experts(
    of_one: dict[str, Any], cut_story: list[dict[str, Any]]
) -> None:
    resumed = of_one["resumed"]
    assert (cut_story[0]["groups"], resumed["groups"]) == (2, 1)
    assert resumed["second"]["loss"] == pytest.approx(cut_story[0]["second"]["loss"], rel=1e-5)
    assert resumed["second"]["grad_norm"] == pytest.approx(cut_story[0]["second"]["grad_norm"], rel=1e-5)
    assert resumed["second"]["lr"] == cut_story[0]["second"]["lr"]


@pytest.mark.parametrize(
    ("experts", "size", "message"),
    [
        (4, 3, "expert_parallel_size=3 does not divide the model's 4 experts; possible: 1, 2, 4"),
        (0, 2, "has no experts; set it to 1"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_refused(
    tiny_model: Path, tiny_moe_model: Path, experts: int, size: int, message: str
) -> None:
    model = tiny_moe_model if experts else tiny_model
    with pytest.raises(UnsupportedModelError) as caught:
        check_experts(model_config(run_config(model, 1).policy), DTensorConfig(expert_parallel_size=size))
    assert message in str(caught.value) and "policy.dtensor_cfg.expert_parallel_size" in str(caught.value)


class _RouterProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default and args[1].shape == (128, 4)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep_routing", "products"), [(False, 4), (True, 2)])
def test_a_kept_router_is_computed_once_per_layer(tiny_moe_model: Path, keep_routing: bool, products: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_moe_model, dtype=torch.float32)
    apply_activation_checkpointing(model, keep_routing=keep_routing)
    with _RouterProducts() as router:
        model(torch.arange(6)[None], use_cache=False).logits.sum().backward()
    assert router.count == products
