"""Packed rows: what goes in comes back where it was, and attention keeps sequences apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nemo_rl.config import SequencePackingConfig
from nemo_rl.models.policy.attention import Segments, _side_by_side, _slice_borders, packed_attention
from nemo_rl.models.policy.packed import PackedBatch, pack, row_round

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    width = max(lengths) + draw(st.integers(0, 3))
    ids = torch.arange(1, len(lengths) * width + 1).view(len(lengths), width)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=ids.numel(), max_size=ids.numel()))).view_as(ids)
    used = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(lengths), max_size=len(lengths))))
    return {"input_ids": ids, "input_lengths": torch.tensor(lengths), "token_mask": mask.long(), "sample_mask": used}


@given(batches(), st.integers(1, 8))
def test_what_is_packed_comes_back_where_it_was(data: dict[str, torch.Tensor], multiple: int) -> None:
    packed = pack(data, CPU, multiple=multiple)
    real = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    assert packed.input_ids_T.shape[0] % multiple == 0
    torch.testing.assert_close(packed.unpack(packed.input_ids_T), data["input_ids"] * real)


@pytest.mark.slow
@given(batches(), st.integers(1, 8))
def test_targets_are_the_next_token_inside_each_sequence(data: dict[str, torch.Tensor], multiple: int) -> None:
    packed = pack(data, CPU, multiple=multiple)
    borders = packed.cu_seqlens.tolist()
    assert borders[0] == 0 and borders[-1] == packed.input_ids_T.shape[0]
    assert packed.max_seqlen == max(end - start for start, end in pairwise(borders))
    for start, end in pairwise(borders):
        torch.testing.assert_close(packed.position_ids_T[start:end], torch.arange(end - start))
        torch.testing.assert_close(packed.target_ids_T[start : end - 1], packed.input_ids_T[start + 1 : end])
        assert packed.target_ids_T[end - 1] == 0


@given(batches())
def test_only_positions_before_trained_tokens_are_wanted(data: dict[str, torch.Tensor]) -> None:
    packed = pack(data, CPU, trained_only=True)
    assert packed.wanted_W is not None
    marks = torch.zeros_like(packed.input_ids_T)
    marks[packed.wanted_W] = 1
    real = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    trained = (data["token_mask"] * data["sample_mask"][:, None]).bool() & real
    assert bool((packed.unpack(marks)[:, :-1].bool() >= trained[:, 1:]).all()), "a trained token would have no score"


def test_rows_are_rounded_up_on_gpus_alone_and_only_where_packing_is_on() -> None:
    packing = SequencePackingConfig(sequence_length_round=96)
    assert row_round(packing, torch.device("cuda", 0)) == 96
    assert row_round(packing, CPU) == 1
    assert row_round(SequencePackingConfig(enabled=False), torch.device("cuda", 0)) == 1


def test_gradients_flow_back_through_unpack() -> None:
    packed = pack(
        {"input_ids": torch.ones(2, 3, dtype=torch.long), "input_lengths": torch.tensor([2, 3])}, CPU, multiple=4
    )
    values = torch.zeros(packed.input_ids_T.shape[0], requires_grad=True)
    (packed.unpack(values) * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 1, 3, 4, 5, 0, 0, 0]


def _row(lengths: list[int], heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedBatch]:
    draw = torch.Generator().manual_seed(sum(lengths))
    width = max(lengths)
    packed = pack(
        {"input_ids": torch.ones(len(lengths), width, dtype=torch.long), "input_lengths": torch.tensor(lengths)},
        CPU,
        multiple=4,
    )
    tokens = packed.input_ids_T.shape[0]
    query, key, value = (torch.randn(1, h, tokens, 8, generator=draw) for h in (heads, kv_heads, kv_heads))
    return query, key, value, packed


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_attention_over_a_packed_row_is_attention_over_each_sequence_alone(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    query, key, value, packed = _row(lengths, *heads)
    out, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, segments=Segments(packed.cu_seqlens, packed.max_seqlen)
    )
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = F.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2), atol=1e-5, rtol=1e-5)
        start += length


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_slices_of_a_row_attend_to_what_the_whole_row_does(lengths: list[int], slices: int) -> None:
    query, key, value, packed = _row(lengths, 4, 2)
    whole, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, segments=Segments(packed.cu_seqlens, packed.max_seqlen)
    )
    tokens = packed.input_ids_T.shape[0] // slices
    for index in range(slices):
        start = tokens * index
        borders_q, borders_k, first = _slice_borders(
            Segments(packed.cu_seqlens, packed.max_seqlen, None, start), tokens
        )
        assert int(borders_q[-1]) == tokens
        assert first + int(borders_k[-1]) == start + tokens
        mine = query[0, :, start : start + tokens].transpose(0, 1)
        keys, values = (t[0, :, first : first + int(borders_k[-1])].transpose(0, 1) for t in (key, value))
        torch.testing.assert_close(
            _side_by_side(mine, keys, values, borders_q, borders_k, None),
            whole[0, start : start + tokens],
            atol=1e-5,
            rtol=1e-5,
        )


def test_what_the_packed_attention_cannot_do_is_refused() -> None:
    query, key, value, packed = _row([9, 3], 4, 2)
    segments = Segments(packed.cu_seqlens, packed.max_seqlen)
    with pytest.raises(NotImplementedError, match="soft-capped"):
        packed_attention(torch.nn.Module(), query, key, value, None, segments=segments, softcap=30.0)
    with pytest.raises(NotImplementedError, match="sliding window 4"):
        packed_attention(torch.nn.Module(), query, key, value, None, segments=segments, sliding_window=4)
    packed_attention(torch.nn.Module(), query, key, value, None, segments=segments, sliding_window=16)
