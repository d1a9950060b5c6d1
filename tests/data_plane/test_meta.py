"""Metas: transforms keep lengths and tags with their rows and never touch the original."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.data_plane import KVBatchMeta


def meta(rows: int = 4, start: int = 0) -> KVBatchMeta:
    numbers = range(start, start + rows)
    return KVBatchMeta(
        "train", None, [f"r{n}" for n in numbers], ["x"], list(numbers), {"k": 1}, [{"n": n} for n in numbers]
    )


@given(st.lists(st.integers(0, 7), max_size=12))
def test_a_subset_takes_lengths_and_tags_along(rows: list[int]) -> None:
    part = meta(8).subset(rows)
    assert (
        part.sample_ids == [f"r{n}" for n in rows]
        and part.sequence_lengths == rows
        and [tag["n"] for tag in part.tags or []] == rows
    )


@given(st.lists(st.integers(-8, 7), max_size=12))
def test_what_is_dropped_and_what_is_left_make_the_whole(rows: list[int]) -> None:
    gone = {row % 8 for row in rows}
    left = meta(8).drop(rows)
    assert (left.sequence_lengths if left else []) == [n for n in range(8) if n not in gone]


def test_transforms_leave_the_original_alone() -> None:
    whole = meta()
    before = pickle.loads(pickle.dumps(whole))
    changed = whole.with_fields(["y", "x"])
    changed.set_tags({"n": [9, 9, 9, 9]})
    changed.extra_info["k"] = 2
    changed.sample_ids.append("more")
    whole.slice(1, 3).set_tags({"n": [7, 7]})
    assert whole == before and changed.fields == ["x", "y"]


def test_a_tag_that_rows_do_not_have_is_named_with_the_rows() -> None:
    assert meta(3).tag("n") == [0, 1, 2]
    mixed = meta(3)
    mixed.tags = [{"n": 0}, {}, {"n": 2}]
    with pytest.raises(KeyError, match=r"partition 'train': 1 of 3 rows have no tag 'n', \['r1'\] among them"):
        mixed.tag("n")
    with pytest.raises(KeyError, match="2 of 2 rows have no tag 'n'"):
        KVBatchMeta("train", None, ["a", "b"]).tag("n")


def test_joining_keeps_what_all_parts_have() -> None:
    joined = meta(2).concat(meta(1, start=2), meta(1, start=3))
    assert joined == meta(4)
    bare = KVBatchMeta("train", None, ["z"])
    assert meta(2).concat(bare).tags is None and meta(2).concat(bare).sequence_lengths is None
    with pytest.raises(ValueError, match="partition_ids must match"):
        meta().concat(KVBatchMeta("val", None, ["z"]))


def test_values_that_do_not_match_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="align 1:1"):
        KVBatchMeta("train", None, ["a"], tags=[])
    with pytest.raises(ValueError, match="align 1:1"):
        KVBatchMeta("train", None, ["a"], sequence_lengths=[1, 2])
    stamped = meta(2)
    with pytest.raises(ValueError, match="tag 'std' must align 1:1"):
        stamped.set_tags({"n": [1, 2], "std": [1]})
    assert [tag["n"] for tag in stamped.tags or []] == [0, 1]
    empty = KVBatchMeta("train", None, [])
    assert empty.size == 0 and empty.drop([]) is None
