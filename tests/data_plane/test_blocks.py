"""Columns to bytes and back, for every dtype, shape and raggedness; and which of several blocks holds a column's latest
value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data_plane.blocks import (
    ColumnSlot,
    Jagged,
    Layout,
    Padded,
    decode_jagged,
    decode_padded,
    encode,
    holders,
    next_generation,
)
from nemo_rl.data_plane.interfaces import MissingColumnsError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
]
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)
shapes = st.sampled_from([(), (2,), (3, 2)])


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.randint(0, 2, shape).to(dtype)
        if dtype in (torch.bool, torch.float8_e4m3fn)
        else (torch.randn(shape) * 50).to(dtype)
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


@settings(max_examples=40)
@given(
    lengths,
    st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 3),
)
def test_padded_columns_come_back_bit_for_bit(
    counts: list[int],
    tokens: list[tuple[torch.dtype, tuple[int, ...]]],
    dtype: torch.dtype,
    inner: tuple[int, ...],
    extra: int,
) -> None:
    rows, width = len(counts), max(counts) + extra
    columns: dict[str, Any] = {
        f"t{i}": Padded(values((rows, width, *shape), kind), tuple(counts)) for i, (kind, shape) in enumerate(tokens)
    }
    columns["row"] = values((rows, *inner), dtype)
    ((layout, buffers),) = encode(columns, rows).items()
    assert Layout.parse(layout.name) == layout
    got = decode_padded(layout, [bytes(buffer) for buffer in buffers], layout.columns, width, {})
    jagged = decode_jagged(layout, buffers, layout.columns)
    assert same(got["row"], columns["row"]) and same(jagged["row"], columns["row"])
    for name, column in columns.items():
        if isinstance(column, Padded):
            for row, length in enumerate(counts):
                assert same(got[name][row, :length], column.values[row, :length])
            assert not got[name].float()[torch.arange(width) >= torch.tensor(counts)[:, None]].any()
            assert jagged[name].lengths == tuple(counts)
            assert same(
                jagged[name].values, torch.cat([column.values[row, :length] for row, length in enumerate(counts)])
            )


def test_columns_of_different_lengths_lie_in_blocks_of_their_own_and_padding_is_the_readers_choice() -> None:
    columns = {"a": Jagged(torch.arange(4), (1, 3)), "b": Jagged(torch.arange(5), (5, 0)), "c": torch.tensor([7, 8])}
    blocks = encode(columns, 2)
    assert sorted(layout.columns for layout in blocks) == [("b",), ("c", "a")]
    for layout, buffers in blocks.items():
        if "a" in layout.columns:
            got = decode_padded(layout, buffers, ["a"], 5, {"a": 9})
            assert list(got) == ["a"] and got["a"].tolist() == [[0, 9, 9, 9, 9], [1, 2, 3, 9, 9]]


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner), max_leaves=6
)


@settings(max_examples=40)
@given(st.lists(trees, min_size=1, max_size=4))
def test_objects_come_back_with_their_types(objects: list[Any]) -> None:
    ((layout, buffers),) = encode({"o": objects}, len(objects)).items()
    got = decode_jagged(layout, buffers, ["o"])["o"]
    assert got == objects and [type(value) for value in got] == [type(value) for value in objects]


def test_a_view_is_stored_without_what_it_is_a_view_of() -> None:
    batch = torch.zeros(1000, 100)
    ((layout, buffers),) = encode({"o": [{"image": batch[3], "more": (batch[4, :2], ["x"])}]}, 1).items()
    assert len(buffers[0]) < 20_000 < batch.nbytes
    got = decode_jagged(layout, buffers, ["o"])["o"][0]
    assert torch.equal(got["image"], batch[3]) and got["more"][0].shape == (2,) and got["more"][1] == ["x"]


def test_nothing_is_stored_that_would_have_to_be_unpickled() -> None:
    class Own:
        pass

    with pytest.raises(TypeError, match=r"column 'images', row 1: non-tensor value of type .*Own cannot be stored"):
        encode({"images": [torch.ones(2), {"a": [Own()]}]}, 2)


def layout_of(*columns: str) -> Layout:
    return Layout(tuple(ColumnSlot(column, "r", "float32") for column in columns))


def test_a_column_is_read_from_the_block_written_last() -> None:
    first = layout_of("a", "b")
    again = next_generation(layout_of("b"), [first.name])
    third = next_generation(layout_of("b", "c"), [first.name, again.name])
    assert (first.generation, again.generation, third.generation) == (0, 1, 2)
    assert next_generation(layout_of("b"), [first.name, again.name]) == again
    assert next_generation(layout_of("b"), [first.name, again.name, third.name]).generation == 3
    chosen = holders([third.name, again.name, first.name], ["a", "b"], where="rows")
    assert chosen == {first.name: ["a"], third.name: ["b"]}
    with pytest.raises(
        MissingColumnsError, match=r"\['d'\] are not written for all of rows; there are \['a', 'b', 'c'\]"
    ):
        holders([first.name, third.name], ["d"], where="rows")
