"""Probabilities over recorded sampling masks: exact however the vocabulary is cut, and ratios without bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import example
from tests.models.policy_ranks import ALL_ROWS, MEGATRON
from tests.models.replay_ranks import (
    alternatives,
    masked_batch,
    perturbed,
    scores_and_steps,
)
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOP_P = "policy.generation.top_p=0.8"
MASKS = [TOP_P, "policy.sampling_mask_replay=true", *ALL_ROWS]
CORE = [*MEGATRON, "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"]
PLAIN = ["policy.scheduler=null"]
CHUNKED = "policy.logprob_chunk_size=3"
TP2 = {
    "dtensor": ["policy.dtensor_cfg.tensor_parallel_size=2"],
    "megatron": [
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.sequence_parallel=true",
        "policy.megatron_cfg.expert_tensor_parallel_size=2",
    ],
}
BACKENDS = {"dtensor": PLAIN, "megatron": CORE}
ONE = {name: [*how, *MASKS] for name, how in BACKENDS.items()} | {
    "filter of its own": [*PLAIN, TOP_P, *ALL_ROWS],
    "chunked": [*PLAIN, *MASKS, CHUNKED],
}
TWO = {
    f"{name}{', chunked' if chunk else ''}": [*how, *MASKS, *TP2[name], *chunk]
    for name, how in BACKENDS.items()
    for chunk in ([], [CHUNKED])
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "moe"
    example("make_tiny_model").save_tiny_model(folder, layers=2, hidden=64, heads=2, experts=4)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return perturbed(model, str(tmp_path_factory.mktemp("engine")), 0.05)


@pytest.fixture(scope="module")
def drawn(engine: str) -> Any:
    return alternatives(engine, 0.8)


@pytest.fixture(scope="module")
def ranks(model: str, engine: str, drawn: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    batch = masked_batch(engine, 0.8)
    one = run_ranks(scores_and_steps, 1, model, 1, ONE, drawn, batch)[0]
    return one, run_ranks(scores_and_steps, 2, model, 2, TWO, drawn, batch)


def test_the_ratio_of_sampled_tokens_is_unbiased_with_the_mask(
    ranks: tuple[dict[str, Any], list[dict[str, Any]]], drawn: Any
) -> None:
    generation = drawn["generation_logprobs"].double().numpy()
    assert len(generation) >= 5 and np.exp(generation).sum() == pytest.approx(1, abs=1e-5)

    def mean_ratio(logprobs: np.ndarray) -> float:
        # Over what the engine draws: each token with the probability that the engine gives it.
        return float((np.exp(generation) * np.exp(logprobs - generation)).sum())

    one, two = ranks
    for case in (*BACKENDS, "chunked"):
        assert mean_ratio(one["scores"][case]) == pytest.approx(1, abs=1e-6)
    for rank in two:
        for case in TWO:
            assert mean_ratio(rank["scores"][case]) == pytest.approx(1, abs=1e-6)
    assert abs(mean_ratio(one["scores"]["filter of its own"]) - 1) > 0.01
    # The policy differs from the engine, so that its ratios are not 1 one by one.
    assert np.abs(one["scores"]["dtensor"] - generation).max() > 0.01


@pytest.mark.parametrize("case", TWO)
def test_ranks_that_share_the_vocabulary_train_on_masks_alike(
    ranks: tuple[dict[str, Any], list[dict[str, Any]]], case: str
) -> None:
    one, two = (ranks[0]["steps"], [rank["steps"] for rank in ranks[1]])
    want = one[case.split(",")[0]]
    for rank in two:
        got = rank[case]
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        error = np.linalg.norm(got["gradient"] - want["gradient"])
        assert error <= 1e-5 * np.linalg.norm(want["gradient"])
    assert one["megatron"]["grad_norm"] == pytest.approx(one["dtensor"]["grad_norm"], rel=1e-5)
    assert np.isfinite(one["dtensor"]["logprobs"]).all()
    assert not np.isfinite(one["filter of its own"]["logprobs"]).all()
