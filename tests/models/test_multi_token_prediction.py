"""Multi-token prediction on Megatron-Core: its gradient is that of one plain pass over the whole batch, however the
batch is cut and over which ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import example
from tests.models.policy_ranks import ALL_ROWS, MEGATRON
from tests.models.prediction_ranks import DEPTHS, PREDICTS, plain_step, predictions_of_one, predictions_of_two, untied
from tests.models.replay_ranks import REPLAY, SHARES, recorded_batch
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEY = "policy.megatron_cfg"
CORE = [*MEGATRON, *PREDICTS, f"{KEY}.optimizer.use_distributed_optimizer=false"]
PACKED = ["policy.sequence_packing.enabled=true"]
RECOMPUTED = [f"{KEY}.activation_checkpointing=true"]
WEIGHT = 0.5
BALANCED = [f"{KEY}.moe_router_load_balancing_type=aux_loss", f"{KEY}.moe_aux_loss_coeff={WEIGHT}"]
LEVELS = {"tokens": "loss_fn.token_level_loss=true", "sequences": "loss_fn.token_level_loss=false"}
TP2 = [*ALL_ROWS, f"{KEY}.tensor_model_parallel_size=2"]
SP2 = [*TP2, f"{KEY}.sequence_parallel=true"]
PP2 = [*ALL_ROWS, f"{KEY}.pipeline_model_parallel_size=2"]
ONE = {
    "dense": ("tokens", ["policy.train_micro_batch_size=8"]),
    "dense, recomputed": ("tokens", ["policy.train_micro_batch_size=1", *RECOMPUTED]),
    "dense, packed": ("sequences", PACKED),
    "experts, recomputed and balanced": ("sequences", ["policy.train_micro_batch_size=8", *RECOMPUTED, *BALANCED]),
}
TWO = {
    "dense, dp 2": ("sequences", PACKED),
    "dense, tp 2": ("tokens", TP2),
    "dense, tp 2, sequence parallel": ("sequences", [*SP2, *RECOMPUTED]),
    "dense, cp 2": ("tokens", [f"{KEY}.context_parallel_size=2", *ALL_ROWS, *PACKED]),
    "dense, pp 2": ("tokens", PP2),
    "untied, pp 2": ("tokens", PP2),
    "deep, pp 2 in two parts each": (
        "sequences",
        [*PP2, f"{KEY}.model_overrides={{virtual_pipeline_model_parallel_size: 2}}"],
    ),
    "experts, ep 2": ("tokens", [f"{KEY}.expert_model_parallel_size=2"]),
    "experts, tp 2": ("sequences", [*SP2, f"{KEY}.expert_tensor_parallel_size=2"]),
}


STORIES = {
    "dp 2, optimizer shared out": [*MEGATRON],
    "pp 2, bfloat16": [*MEGATRON, *PP2, "policy.precision=bfloat16"],
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("predicting")
    example("make_tiny_model").save_tiny_model(folder / "deep", layers=4, hidden=64)
    return {
        "dense": str(tiny_model),
        "experts": str(tiny_moe_model),
        "untied": str(untied(tiny_model, folder / "untied")),
        "deep": str(folder / "deep"),
    }


def _cases(models: dict[str, str], how: dict[str, tuple[str, list[str]]]) -> dict[str, tuple[str, list[str]]]:
    return {
        name: (models[name.partition(",")[0]], [*CORE, LEVELS[level], *overrides])
        for name, (level, overrides) in how.items()
    }


@pytest.fixture(scope="module")
def one(models: dict[str, str]) -> list[dict[str, Any]]:
    data = {"recorded": recorded_batch(models["experts"], noise=0.3)}
    replayed = [*MEGATRON, REPLAY]
    both = {"plain": (replayed, "recorded"), "predicts": ([*replayed, *PREDICTS], "recorded")}
    return run_ranks(predictions_of_one, 1, _cases(models, ONE), models["experts"], both, data)


@pytest.fixture(scope="module")
def two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("resumed"))
    return run_ranks(predictions_of_two, 2, _cases(models, TWO), models["dense"], folder, STORIES)


@pytest.fixture(scope="module")
def seen(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [rank["steps"][name] for rank in ranks] for ranks in (one, two) for name in ranks[0]["steps"]}


@pytest.mark.parametrize("case", [*ONE, *TWO])
def test_the_gradient_is_that_of_one_plain_pass(
    seen: dict[str, list[dict[str, Any]]], models: dict[str, str], case: str
) -> None:
    level, model = (ONE | TWO)[case][0], models[case.partition(",")[0]]
    balanced = WEIGHT if "balanced" in case else 0.0
    want, losses, count = plain_step(model, LEVELS[level], tokens=level == "tokens", balanced=balanced)
    norm = sum(float(np.linalg.norm(gradient)) ** 2 for gradient in want.values()) ** 0.5 / count
    assert any(name.startswith(f"mtp.layers.{DEPTHS - 1}.") for name in want)
    for rank in seen[case]:
        assert rank["gradient"].keys() == want.keys()
        for name, gradient in want.items():
            size = np.linalg.norm(gradient)
            assert size > 0, name
            assert np.linalg.norm(rank["gradient"][name] - gradient) <= 1e-5 * size, name
        assert rank["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert len(losses) == DEPTHS
        assert not [name for name in rank["exported"] if "mtp" in name]


@pytest.mark.parametrize("case", STORIES)
def test_a_run_resumes_bit_for_bit_and_other_readers_see_a_plain_model(two: list[dict[str, Any]], case: str) -> None:
    for rank in (rank["stories"][case] for rank in two):
        predicting = {name for name in rank["first"] if name.startswith("mtp.")}
        assert len(predicting) == 15 * DEPTHS
        assert not [name for name in rank["first"] if rank["first"][name] == rank["start"][name]]
        assert rank["resumed"] == rank["first"] != rank["second"]
        assert rank["resumed second"] == rank["second"]
        plain = {name: digest for name, digest in rank["first"].items() if name not in predicting}
        assert rank["without"] == rank["not training"] == plain
        np.testing.assert_array_equal(rank["scored"], rank["scored without"])
        for refused, held, wanted in (("one layer", DEPTHS, 1), ("no layer", 0, DEPTHS)):
            said = f"holds {held} layers of multi-token prediction, and policy.megatron_cfg.mtp_num_layers is {wanted}"
            assert said in rank[refused]


def test_recorded_routes_reach_the_same_layers_as_without_prediction(one: list[dict[str, Any]]) -> None:
    seen = one[0]["replayed"]
    plain, predicts = seen["plain"], seen["predicts"]
    np.testing.assert_array_equal(predicts["logprobs"], plain["logprobs"])
    assert {name: predicts[name] for name in SHARES} == {name: plain[name] for name in SHARES}
    assert predicts["router_replay_share"] > 0.5 and predicts["loss"] == plain["loss"]
    assert predicts["gradient"].size > plain["gradient"].size
