"""The byte layout of weights and their checksum: nothing is lost, moved or changed unseen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.weight_sync.layout import (
    ALIGNMENT,
    LayoutError,
    TensorMeta,
    align,
    checksum,
    pack_tensor,
    plan_buckets,
    plan_windows,
    unpack,
)
from nemo_rl.weight_sync.receiver import decode_buckets, encode_buckets

DTYPES = ["float32", "bfloat16", "float16", "int8"]

metas = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=12
).map(lambda shapes: [TensorMeta(f"layer.{index}", tuple(shape), dtype) for index, (shape, dtype) in enumerate(shapes)])


@given(metas, st.integers(1, 4096))
def test_buckets_hold_every_tensor_once_in_order_and_apart(tensors: list[TensorMeta], bucket_bytes: int) -> None:
    buckets = plan_buckets(tensors, bucket_bytes)
    assert [meta for bucket in buckets for meta in bucket.tensors] == tensors
    for bucket in buckets:
        end = 0
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset >= end and offset % ALIGNMENT == 0
            end = offset + meta.nbytes
        assert bucket.nbytes == end
        assert bucket.nbytes <= bucket_bytes or len(bucket.tensors) == 1


@given(metas, st.integers(1, 4096), st.integers(1, 8192))
def test_windows_hold_every_bucket_once_in_order(
    tensors: list[TensorMeta], bucket_bytes: int, window_bytes: int
) -> None:
    buckets = plan_buckets(tensors, bucket_bytes)
    windows = plan_windows(buckets, window_bytes)
    assert [bucket for window in windows for bucket in window] == buckets
    for window in windows:
        assert sum(align(bucket.nbytes) for bucket in window) <= window_bytes or len(window) == 1


@given(metas, st.integers(0, 100))
def test_a_packed_bucket_gives_back_every_tensor_bit_for_bit(tensors: list[TensorMeta], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for bucket in plan_buckets(tensors, 2048):
        buffer = torch.randint(0, 256, (bucket.nbytes,), dtype=torch.uint8, generator=draw)
        originals = {
            meta.name: (100 * torch.randn(meta.shape, generator=draw)).to(getattr(torch, meta.dtype))
            for meta in bucket.tensors
        }
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            pack_tensor(buffer, offset, meta, originals[meta.name])
        for name, tensor in unpack(buffer, decode_buckets(encode_buckets([bucket]))[0]):
            assert torch.equal(tensor, originals[name])


@given(metas)
def test_the_same_weights_have_the_same_checksum_whatever_lay_in_the_buffer(tensors: list[TensorMeta]) -> None:
    for bucket in plan_buckets(tensors, 2048):
        sums = set()
        for garbage in (0, 255):
            buffer = torch.full((align(bucket.nbytes),), garbage, dtype=torch.uint8)
            for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                pack_tensor(buffer, offset, meta, torch.ones(meta.shape))
            sums.add(checksum(buffer, bucket.nbytes))
        assert len(sums) == 1


def test_tensors_that_do_not_fit_the_layout_are_refused_by_name() -> None:
    meta = TensorMeta("head", (2, 2), "float32")
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"head: exported with shape \(4,\), the layout says \(2, 2\)"):
        pack_tensor(buffer, 0, meta, torch.zeros(4))
    gone = torch.zeros(2, 2)
    gone.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="head: its storage is empty"):
        pack_tensor(buffer, 0, meta, gone)
    with pytest.raises(LayoutError, match="'head' is exported twice"):
        plan_buckets([meta, meta], 1024)
    with pytest.raises(LayoutError, match="weight_sync.bucket_bytes must be positive"):
        plan_buckets([meta], 0)
    with pytest.raises(LayoutError, match="unknown dtype name 'float31'"):
        plan_buckets([TensorMeta("head", (1,), "float31")], 1024)


@given(st.integers(1, 70_000), st.data())
def test_any_changed_byte_changes_the_checksum(nbytes: int, data: st.DataObject) -> None:
    buffer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    before = checksum(buffer, nbytes)
    assert checksum(buffer.clone(), nbytes) == before
    buffer[data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(buffer, nbytes) != before


@given(st.integers(0, 17_000), st.integers(0, 17_000))
def test_two_words_that_change_places_change_the_checksum(first: int, second: int) -> None:
    words = torch.arange(17_001, dtype=torch.int32)
    before = checksum(words.view(torch.uint8), words.numel() * 4)
    words[[first, second]] = words[[second, first]]
    assert (checksum(words.view(torch.uint8), words.numel() * 4) == before) == (first == second)


def test_blocks_that_change_places_across_chunks_change_the_checksum() -> None:
    words = torch.randint(
        -(2**31), 2**31 - 1, (9 << 20,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    before = checksum(words.view(torch.uint8), words.numel() * 4)
    block = 8191 * 512
    words[:block], words[block : 2 * block] = words[block : 2 * block].clone(), words[:block].clone()
    assert checksum(words.view(torch.uint8), words.numel() * 4) != before
