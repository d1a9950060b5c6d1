"""Loss and gradient of one global batch do not depend on how it is split: over ranks, microbatches or packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.policy_ranks import ALL_ROWS, many_splits, training_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PACKED = ["policy.sequence_packing.enabled=true"]
DYNAMIC = ["policy.dynamic_batching.enabled=true"]
TP2 = ["policy.dtensor_cfg.tensor_parallel_size=2", *ALL_ROWS]
SP = [*TP2, "policy.dtensor_cfg.sequence_parallel=true"]
CP2 = ["policy.dtensor_cfg.context_parallel_size=2", *ALL_ROWS]
FILTERS = ["policy.generation.temperature=0.7", "policy.generation.top_p=0.9", "policy.generation.top_k=40"]
DEFERRED = ["policy.dtensor_cfg.defer_fsdp_grad_sync=true"]
BY_SEQUENCE = ["loss_fn.token_level_loss=false"]

ONE = {
    "padded, 2 a microbatch": [],
    "padded, 1 a microbatch": ["policy.train_micro_batch_size=1"],
    "packed": PACKED,
    "dynamic": DYNAMIC,
    "activation checkpointing": ["policy.dtensor_cfg.activation_checkpointing=true"],
    "logits 7 tokens at a time": [*PACKED, "policy.logprob_chunk_size=7"],
    "attention by hand": ["policy.dtensor_cfg.automodel_kwargs.backend.attn=eager"],
    "filtered": FILTERS,
    "by sequence": BY_SEQUENCE,
    "gradients kept whole": DEFERRED,
}
TWO = {
    "dp 2": [],
    "dp 2 packed": PACKED,
    "dp 2 dynamic": DYNAMIC,
    "dp 2 by sequence": [*PACKED, *BY_SEQUENCE],
    "dp 2 gradients reduced once": [*DEFERRED, "policy.train_micro_batch_size=1"],
    "hsdp 2 gradients reduced once": [*DEFERRED, *PACKED, "policy.dtensor_cfg.dp_replicate_size=2"],
    "tp 2 gradients reduced once": [*DEFERRED, *TP2],
    "tp 2 sequence parallel": [*SP, *DYNAMIC],
    "tp 2 filtered": [*TP2, *FILTERS],
    "tp 2 checkpointing": [*SP, *PACKED, "policy.dtensor_cfg.activation_checkpointing=true"],
    "cp 2": CP2,
    "cp 2 attention by hand": [*CP2, *PACKED, "policy.dtensor_cfg.automodel_kwargs.backend.attn=eager"],
    "cp 2 filtered": [*CP2, *PACKED, *FILTERS],
}
FOUR = {
    "dp 2 x cp 2": [*CP2, *PACKED],
    "cp 2 x tp 2": [*SP, *CP2, *PACKED, "policy.make_sequence_length_divisible_by=8"],
}


@pytest.fixture(scope="module")
def one(tiny_model: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(many_splits, 1, str(tiny_model), 1, ONE)[0]


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(many_splits, 2, str(tiny_model), 2, TWO)


@pytest.fixture(scope="module")
def four(tiny_model: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(many_splits, 4, str(tiny_model), 4, FOUR)


def _reference(one: dict[str, dict[str, Any]], case: str) -> dict[str, Any]:
    return one[
        "filtered" if "filtered" in case else "by sequence" if "by sequence" in case else "padded, 2 a microbatch"
    ]


def _assert_same_step(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert got["next_loss"] == pytest.approx(want["next_loss"], rel=1e-4, abs=1e-5)
    distance = np.linalg.norm(got["gradient"] - want["gradient"]) / np.linalg.norm(want["gradient"])
    assert distance <= 1e-5


@pytest.mark.parametrize("case", ONE)
def test_one_rank_computes_the_same_step_however_rows_are_batched(one: dict[str, dict[str, Any]], case: str) -> None:
    _assert_same_step(one[case], _reference(one, case))


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_compute_the_step_of_one(
    one: dict[str, dict[str, Any]], two: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in two:
        _assert_same_step(rank[case], _reference(one, case))


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_compute_the_step_of_one(
    one: dict[str, dict[str, Any]], four: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in four:
        _assert_same_step(rank[case], _reference(one, case))


def test_metrics_of_the_microbatches_add_up_to_the_same_step(
    one: dict[str, dict[str, Any]], two: list[dict[str, dict[str, Any]]]
) -> None:
    want = one["padded, 2 a microbatch"]["metrics"]
    for name in ("loss", "probs_ratio", "token_mult_prob_error", "approx_entropy", "num_valid_samples"):
        over_ranks = sum(sum(rank["dp 2 packed"]["metrics"][name]) for rank in two)
        assert over_ranks == pytest.approx(sum(want[name]), rel=1e-5, abs=1e-6), name
    assert want["global_valid_seqs"] == [7.0]
    assert two[1]["dp 2"]["metrics"]["global_valid_toks"] == want["global_valid_toks"]


def test_packed_logprobs_are_those_of_each_sequence_alone(one: dict[str, dict[str, Any]], tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    data = training_batch()
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :length]
        with torch.no_grad():
            alone = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        np.testing.assert_allclose(one["padded, 2 a microbatch"]["logprobs"][row, 1:length], alone.numpy(), atol=2e-5)
        assert not one["padded, 2 a microbatch"]["logprobs"][row, length:].any()
