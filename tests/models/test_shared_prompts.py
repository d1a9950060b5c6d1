"""Samples of a prompt share its tokens in a packed row: the same scores and gradients, with less to compute."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data_plane.field_schema import PROMPT, PROMPT_TOKENS, TAG
from nemo_rl.distributed import batch_sharding
from nemo_rl.distributed.batch_sharding import BinPackingError, PackingAlgorithm, SharedPrefixes, plan_packed
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.attention import Kernel, Segments, packed_attention
from nemo_rl.models.policy.batches import shard_batch
from nemo_rl.models.policy.packed import SharedRun, pack, shared_runs
from tests.models.policy_ranks import grouped_batch, grouped_splits, run_config
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_sharding, "WORTHWHILE", 1)


@st.composite
def grouped(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Rows of few different tokens, many of which begin alike."""
    beginnings = draw(st.lists(st.lists(st.integers(1, 3), max_size=6), min_size=1, max_size=3))
    rows = [
        [*beginning, *draw(st.lists(st.integers(1, 3), max_size=4))]
        for beginning in beginnings
        for _ in range(draw(st.integers(1, 4)))
    ]
    if not any(rows):
        rows[0] = [1]
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    mask = draw(st.lists(st.booleans(), min_size=len(rows) * width, max_size=len(rows) * width))
    return {
        "input_ids": torch.tensor([row + [9] * (width - len(row)) for row in rows]),
        "input_lengths": torch.tensor([len(row) for row in rows]),
        "token_mask": torch.tensor(mask).view(len(rows), width).long(),
        "sample_mask": torch.ones(len(rows)),
    }


def _saved(runs: list[SharedRun]) -> int:
    return sum((run.end - run.first - 1) * run.shared for run in runs)


def _best(rows: list[list[int]]) -> int:
    """The most tokens that any way to cut the rows into runs saves, by trying all."""

    def common(part: list[list[int]]) -> int:
        first = 0
        while all(len(row) > first and row[first] == part[0][first] for row in part):
            first += 1
        return max(first - 1, 0)

    best = [0]
    for end in range(1, len(rows) + 1):
        best.append(max(best[k] + (end - k - 1) * (common(rows[k:end]) if end - k > 1 else 0) for k in range(end)))
    return best[-1]


@given(grouped())
def test_runs_save_as_much_as_any_can(data: dict[str, torch.Tensor]) -> None:
    lengths = data["input_lengths"].tolist()
    rows = [row[:length] for row, length in zip(data["input_ids"].tolist(), lengths, strict=True)]
    runs = shared_runs(data["input_ids"], lengths)
    assert [run.first for run in runs] + [len(rows)] == [0] + [run.end for run in runs]
    assert _saved(runs) == _best(rows)
    for run in runs:
        assert all(row[: run.shared + 1] == rows[run.first][: run.shared + 1] for row in rows[run.first : run.end])


@given(grouped(), st.integers(1, 8))
def test_every_token_comes_back_where_it_was_and_predicts_the_next(
    data: dict[str, torch.Tensor], multiple: int
) -> None:
    packed, apart = (pack(data, CPU, multiple=multiple, share=share, trained_only=True) for share in (True, False))
    for name in ("input_ids_T", "position_ids_T", "target_ids_T"):
        torch.testing.assert_close(packed.unpack(getattr(packed, name)), apart.unpack(getattr(apart, name)))
    assert packed.work.tokens == int(data["input_lengths"].sum()) - _saved(
        shared_runs(data["input_ids"], data["input_lengths"].tolist())
    )
    assert packed.wanted_W is not None and apart.wanted_W is not None
    marks = [torch.zeros_like(row.input_ids_T).index_fill(0, row.wanted_W, 1) for row in (packed, apart)]
    assert bool((packed.unpack(marks[0]) >= apart.unpack(marks[1]))[:, :-1].all()), "a trained token has no score"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(grouped(), st.sampled_from(["sdpa", "eager"]), st.integers(1, 4))
def test_tokens_attend_as_in_their_own_sequence(data: dict[str, torch.Tensor], kernel: Kernel, multiple: int) -> None:
    shared, apart = (_attended(data, kernel, multiple, share=share) for share in (True, False))
    torch.testing.assert_close(shared[0], apart[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared[1], apart[1], atol=1e-4, rtol=1e-4)


def _attended(
    data: dict[str, torch.Tensor], kernel: Kernel, multiple: int, *, share: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention makes of states that depend on a token and those before it, and their gradients, those of one
    state together.
    """
    packed = pack(data, CPU, multiple=multiple, share=share)
    places = packed.place_N if packed.place_N is not None else torch.arange(packed.source_N.numel())
    width, ids = data["input_ids"].shape[1], data["input_ids"].tolist()
    beginnings = [tuple(ids[n // width][: n % width + 1]) for n in packed.source_N.tolist()]
    numbers = {beginning: number for number, beginning in enumerate(sorted(set(beginnings)))}
    states = torch.randn(len(numbers), 8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    state_T = torch.zeros(packed.input_ids_T.shape[0], dtype=torch.long)
    state_T[places] = torch.tensor([numbers[beginning] for beginning in beginnings])
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in states[state_T].split([4, 2, 2], dim=1))
    segments = Segments(packed.cu_seqlens, packed.max_seqlen, shared=packed.keys)
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, segments=segments, kernel=kernel)
    result = packed.unpack(out[0])
    (result * torch.arange(1.0, 1 + result.numel()).view_as(result).cos()).sum().backward()
    assert states.grad is not None
    return result.detach(), states.grad


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.sampled_from([1, 4]),
    st.sampled_from(list(PackingAlgorithm)),
)
def test_plans_keep_prompts_together_and_rows_under_the_cap(
    groups: list[tuple[int, int, int]], ranks: int, multiple: int, algorithm: PackingAlgorithm
) -> None:
    lengths = [prompt + response for samples, prompt, response in groups for _ in range(samples)]
    numbers = [number for number, (samples, _, _) in enumerate(groups) for _ in range(samples)]
    prompts = [prompt for samples, prompt, _ in groups for _ in range(samples)]
    try:
        plans = plan_packed(
            lengths,
            ranks,
            None,
            max_tokens=64,
            algorithm=algorithm,
            pad_multiple=multiple,
            prefixes=SharedPrefixes(numbers, prompts),
        )
    except BinPackingError:
        assert len(lengths) < 3 * ranks, "enough rows for every rank"
        return
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))
    assert len({len(plan.micro_batch_indices[0]) for plan in plans if plan.micro_batch_indices}) == 1
    for plan in plans:
        assert plan.micro_batch_indices is not None and plan.micro_batch_lengths is not None
        for (start, end), tokens in zip(plan.micro_batch_indices[0], plan.micro_batch_lengths[0], strict=True):
            rows = plan.rows[start:end]
            seen = [numbers[row] for row in rows]
            assert sum(a != b for a, b in pairwise(seen)) == len(set(seen)) - 1, "a prompt's samples lie apart"
            computed = sum(lengths[row] for row in rows)
            for number in set(seen):
                computed -= (seen.count(number) - 1) * max(groups[number][1] - 1, 0)
            assert computed <= tokens <= 64


def test_a_batch_without_tags_is_packed_as_ever_and_tags_do_not_reach_workers(tiny_model: Path) -> None:
    config = run_config(tiny_model, 1, "policy.sequence_packing.enabled=true").policy
    data = grouped_batch()
    tagged, _ = shard_batch(data, config, 1, None, training=True, share=True)
    bare = BatchedDataDict({name: column for name, column in data.items() if not name.startswith(TAG)})
    plain, _ = shard_batch(bare, config, 1, None, training=True, share=True)
    ignored, _ = shard_batch(data, config, 1, None, training=True)
    assert all(not name.startswith(TAG) for name in tagged[0])
    assert plain[0].micro_batch_indices == ignored[0].micro_batch_indices
    assert len(tagged[0].micro_batch_indices[0]) < len(plain[0].micro_batch_indices[0])
    assert {TAG + PROMPT, TAG + PROMPT_TOKENS} <= set(data)


ON, OFF = (f"policy.sequence_packing.share_prompts={value}" for value in ("true", "false"))
PACKED = "policy.sequence_packing.enabled=true"
# One row holds all samples of a prompt, or some of samples without it.
WIDE = [f"policy.sequence_packing.{which}_mb_tokens=64" for which in ("train", "logprob")]
CASES = {
    "apart": [PACKED, OFF, *WIDE],
    "shared": [PACKED, ON, *WIDE],
    "by hand": [PACKED, ON, *WIDE, "policy.dtensor_cfg.automodel_kwargs.backend.attn=eager"],
    "checkpointing": [PACKED, ON, *WIDE, "policy.dtensor_cfg.activation_checkpointing=true"],
}
TWO = {
    "dp 2": [PACKED, ON],
    "tp 2 sequence parallel": [
        PACKED,
        ON,
        *WIDE,
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.dtensor_cfg.sequence_parallel=true",
    ],
}


@pytest.mark.slow
def test_a_step_is_the_same_with_less_to_compute(tiny_model: Path) -> None:
    one = run_ranks(grouped_splits, 1, str(tiny_model), 1, CASES)[0]
    two = run_ranks(grouped_splits, 2, str(tiny_model), 2, TWO)[0]
    want = one["apart"]
    cases: dict[str, dict[str, Any]] = {**one, **two}
    for name, got in cases.items():
        np.testing.assert_allclose(got["gradient"], want["gradient"], atol=2e-5, rtol=2e-4, err_msg=name)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5), name
        assert got["next_loss"] == pytest.approx(want["next_loss"], rel=1e-4), name
    np.testing.assert_allclose(one["shared"]["logprobs"], want["logprobs"], atol=2e-5)
    assert want["tokens"] == int(grouped_batch()["input_lengths"].sum())
    assert one["shared"]["tokens"] == want["tokens"] - 6 * 16
