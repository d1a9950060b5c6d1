"""A step in chunks is the step that `train` makes, on both backends, however it is cut and over which ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.policy_ranks import ALL_ROWS, MEGATRON, steps_of_two
from tests.models.streamed_ranks import step_gradients
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

DEFERRED = ["policy.dtensor_cfg.defer_fsdp_grad_sync=true"]
WHOLE = [*MEGATRON, "policy.megatron_cfg.optimizer.use_distributed_optimizer=false"]
PACKED = ["policy.sequence_packing.enabled=true"]
SEQUENCES = ["loss_fn.token_level_loss=false"]
MEGATRON_TP2 = [*WHOLE, "policy.megatron_cfg.tensor_model_parallel_size=2"]
DTENSOR_TP2 = [*DEFERRED, "policy.dtensor_cfg.tensor_parallel_size=2", *ALL_ROWS]
CASES = {
    "dtensor dp 2": DEFERRED,
    "dtensor dp 2 packed, sequences": [*DEFERRED, *PACKED, *SEQUENCES],
    "dtensor tp 2 packed, sequences": [*DTENSOR_TP2, *PACKED, *SEQUENCES],
    "megatron dp 2": WHOLE,
    "megatron tp 2 packed, sequences": [*MEGATRON_TP2, *PACKED, *SEQUENCES],
    "megatron cp 2": [*WHOLE, "policy.megatron_cfg.context_parallel_size=2"],
    "megatron pp 2": [*WHOLE, "policy.megatron_cfg.pipeline_model_parallel_size=2"],
}
RANKS_WITH_OTHER_SAMPLES = {case: 2 if " dp 2" in case else 1 for case in CASES}


BACKENDS: dict[str, list[str]] = {"dtensor": [], "megatron": list(MEGATRON)}


@pytest.fixture(scope="module")
def of_two(tiny_model: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(steps_of_two, 2, str(tiny_model), CASES, BACKENDS)


@pytest.fixture(scope="module")
def two(of_two: list[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    return [rank["split"] for rank in of_two]


def _metric(ranks: list[dict[str, Any]], name: str) -> float:
    values = [value for rank in ranks for value in rank["all_mb_metrics"][name]]
    return max(values) if "_max" in name else min(values) if "_min" in name else sum(values)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunks", ["one", "many"])
def test_a_step_in_chunks_equals_the_step_of_train(
    two: list[dict[str, dict[str, Any]]], case: str, chunks: str
) -> None:
    ranks = two[: RANKS_WITH_OTHER_SAMPLES[case]]
    whole, split = [rank[case]["train"] for rank in ranks], [rank[case][chunks] for rank in ranks]
    for got, want in zip(split, whole, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6, abs=1e-7)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-6)
        error = np.linalg.norm(got["gradient"] - want["gradient"])
        assert error <= 1e-6 * np.linalg.norm(want["gradient"])
        for name in ("global_valid_seqs", "global_valid_toks"):
            assert got["all_mb_metrics"][name] == want["all_mb_metrics"][name]
    names = set().union(*(rank["all_mb_metrics"] for rank in whole)) - {"global_valid_seqs", "global_valid_toks"}
    for name in names:
        with_rows = [rank for rank in split if name in rank["all_mb_metrics"]]
        assert _metric(with_rows, name) == pytest.approx(_metric(whole, name), rel=2e-6, abs=1e-6), name


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("dtensor tp")])
def test_gradients_are_reduced_over_ranks_once_per_step(two: list[dict[str, dict[str, Any]]], case: str) -> None:
    groups = two[0][case]["train"]["reductions"]
    # FSDP reduces each layer and the rest of the model; Megatron has one bucket for a model as small as this.
    assert groups == (3 if case.startswith("dtensor") else 1)
    assert {two[0][case][chunks]["reductions"] for chunks in ("one", "many")} == {groups}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_a_trained_token_changes_nothing(of_two: list[dict[str, dict[str, Any]]], backend: str) -> None:
    for rank in of_two:
        assert rank["empty"][backend] == {
            "unchanged": True,
            "skipped": 2,
            "grad_norm": 0.0,
            "loss": [0.0],
            "open": False,
        }


def test_a_streamed_step_has_the_gradient_of_a_step_in_turns(tiny_model: Path, tmp_path: Path) -> None:
    cases = {"dtensor": [*DEFERRED, *PACKED], "megatron": [*WHOLE, *PACKED]}
    (seen,) = run_ranks(step_gradients, 1, str(tiny_model), str(tmp_path), cases)
    for case, steps in seen.items():
        assert steps["parts"] == [3, 3], case
        assert len(steps["turns"]) == len(steps["streams"]) == 2
        for step, (got, want) in enumerate(zip(steps["streams"], steps["turns"], strict=True)):
            norm = np.linalg.norm(want)
            assert norm > 0 and np.linalg.norm(got - want) <= 1e-6 * norm, (case, step)
        turns, streams = steps["grad_norms"]
        assert streams == pytest.approx(turns, rel=1e-6)
