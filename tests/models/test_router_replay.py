"""Training on recorded routes computes what the engine computed, on both backends, however ranks share the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import example
from tests.models.policy_ranks import ALL_ROWS, MEGATRON
from tests.models.replay_ranks import REPLAY, recorded_batch, replayed_steps, steps_and_references
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PACKED = "policy.sequence_packing.enabled=true"
DTENSOR = ["policy.scheduler=null"]
KEY, D = "policy.megatron_cfg", "policy.dtensor_cfg"
CORE = [*MEGATRON, f"{KEY}.optimizer.use_distributed_optimizer=false"]
TP2 = [
    *ALL_ROWS,
    f"{KEY}.tensor_model_parallel_size=2",
    f"{KEY}.sequence_parallel=true",
    f"{KEY}.expert_tensor_parallel_size=2",
]
PP2 = [*ALL_ROWS, f"{KEY}.pipeline_model_parallel_size=2"]
VIRTUAL = f"{KEY}.model_overrides={{virtual_pipeline_model_parallel_size: 2}}"
RECOMPUTE = f"{KEY}.activation_checkpointing=true"
EXPERTS_ALONE = [RECOMPUTE, f"{KEY}.recompute_granularity=selective", f"{KEY}.recompute_modules=[moe]"]
ONE = {
    "dtensor": ([*DTENSOR, REPLAY], "noisy"),
    "dtensor, routes ignored": (DTENSOR, "noisy"),
    "dtensor, same routes": ([*DTENSOR, REPLAY], "natural"),
    "dtensor, some routes": ([*DTENSOR, REPLAY, PACKED], "partial"),
    "megatron": ([*CORE, REPLAY], "noisy"),
    "megatron, routes ignored": (CORE, "noisy"),
    "megatron, same routes": ([*CORE, REPLAY], "natural"),
    "megatron, some routes": ([*CORE, REPLAY, PACKED], "partial"),
}
TWO = {
    "dtensor dp 2, layers recomputed, packed": [*DTENSOR, f"{D}.activation_checkpointing=true", PACKED],
    "dtensor ep 2": [*DTENSOR, f"{D}.expert_parallel_size=2"],
    "dtensor tp 2": [*DTENSOR, *ALL_ROWS, f"{D}.tensor_parallel_size=2", f"{D}.sequence_parallel=true"],
    "dtensor cp 2, packed": [*DTENSOR, *ALL_ROWS, f"{D}.context_parallel_size=2", PACKED],
    "megatron ep 2": [*CORE, f"{KEY}.expert_model_parallel_size=2"],
    "megatron tp 2, packed": [*CORE, *TP2, PACKED],
    "megatron cp 2": [*CORE, *ALL_ROWS, f"{KEY}.context_parallel_size=2"],
    "megatron pp 2, experts recomputed, packed": [*CORE, *PP2, *EXPERTS_ALONE, PACKED],
    "megatron pp 2 of two parts, layers recomputed, packed": [*CORE, *PP2, VIRTUAL, RECOMPUTE, PACKED],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "moe"
    example("make_tiny_model").save_tiny_model(folder, layers=4, hidden=64, heads=2, experts=4)
    return str(folder)


@pytest.fixture(scope="module")
def batches(model: str) -> dict[str, Any]:
    noisy, natural = (recorded_batch(model, noise=noise) for noise in (0.3, 0.0))
    partial = recorded_batch(model, noise=0.3)
    # As if a prefix had come from an engine's cache.
    partial["routed_experts_valid"][:, :4] = False
    return {"noisy": noisy, "natural": natural, "partial": partial}


@pytest.fixture(scope="module")
def alone(model: str, batches: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    both = {"dtensor": [*DTENSOR, REPLAY], "megatron": [*CORE, REPLAY]}
    cases = {name: ([*ALL_ROWS, *overrides], batch) for name, (overrides, batch) in ONE.items()}
    return run_ranks(steps_and_references, 1, model, cases, batches, both)[0]


@pytest.fixture(scope="module")
def one(alone: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return alone[0]


@pytest.fixture(scope="module")
def two(model: str, batches: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    cases = {name: ([*overrides, REPLAY], "noisy") for name, overrides in TWO.items()}
    return run_ranks(replayed_steps, 2, model, 2, cases, batches)


def _difference(got: dict[str, Any], want: dict[str, Any]) -> float:
    return float(np.linalg.norm(got["gradient"] - want["gradient"]) / np.linalg.norm(want["gradient"]))


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_replayed_routes_give_the_engines_probabilities(one: dict[str, dict[str, Any]], backend: str) -> None:
    replayed, ignored = one[backend], one[f"{backend}, routes ignored"]
    assert replayed["error"] <= 1.0001
    assert ignored["error"] >= 1.01
    assert replayed["router_replay_share"] == 1.0
    assert 0.2 < replayed["router_replay_changed"] < 0.6
    assert ignored["router_replay_share"] is None
    some = one[f"{backend}, some routes"]
    assert 1.0001 < some["error"] < ignored["error"]
    assert 0.5 < some["router_replay_share"] < 0.8


def test_both_backends_replay_alike(one: dict[str, dict[str, Any]]) -> None:
    for case in ("", ", some routes"):
        got, want = one[f"megatron{case}"], one[f"dtensor{case}"]
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        # Their gradients are in another order, so that only norms compare.
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=1e-4)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_the_gradient_is_natural_routings_where_routes_agree(one: dict[str, dict[str, Any]], backend: str) -> None:
    same, natural = one[f"{backend}, same routes"], one[f"{backend}, routes ignored"]
    assert same["router_replay_changed"] == 0.0
    assert _difference(same, natural) <= 1e-6
    assert _difference(one[backend], natural) > 0.01


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_the_reference_and_the_pass_that_compares_route_naturally(
    alone: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]], backend: str
) -> None:
    steps, references = alone
    scores, trained = references[backend], steps[backend]["logprobs"] != 0
    for name in ("reference_logprobs", "reference alone", "natural"):
        natural = steps[f"{backend}, routes ignored"]["logprobs"][trained]
        np.testing.assert_allclose(scores[name][trained], natural, atol=1e-5)
    np.testing.assert_allclose(scores["logprobs"][trained], steps[backend]["logprobs"][trained], atol=1e-5)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_replay_the_step_of_one(
    one: dict[str, dict[str, Any]], two: list[dict[str, dict[str, Any]]], case: str
) -> None:
    want = one[case.split()[0]]
    for rank in two:
        got = rank[case]
        assert got["error"] <= 1.0001
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert _difference(got, want) <= 1e-5
        assert got["router_replay_share"] == 1.0
        assert got["router_replay_changed"] == pytest.approx(want["router_replay_changed"])
