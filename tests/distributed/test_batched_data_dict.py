"""BatchedDataDict: row operations, sharding as NeMo-RL's users know it, and microbatch iterators."""

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from tests.ranks import run_ranks

CAP = 48


def batch_of(lengths: Sequence[int], width: int | None = None) -> BatchedDataDict[Any]:
    size = len(lengths)
    width = max(lengths) if width is None else width
    ids = torch.zeros(size, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths),
            "row": torch.arange(size),
            "name": [f"r{i}" for i in range(size)],
        }
    )


def packing(
    algorithm: str = "modified_first_fit_decreasing", cap: int = CAP, multiple: int = 4, **more: Any
) -> dict[str, Any]:
    return {
        "max_tokens_per_microbatch": cap,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
        **more,
    }


def dynamic(cap: int = CAP, length_round: int = 8) -> dict[str, Any]:
    return {
        "max_tokens_per_microbatch": cap,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_round": length_round,
    }


@st.composite
def sharded_rows(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, shards, and a batch size that divides the rows and that the shards divide."""
    shards = draw(st.integers(1, 4))
    batch_size = shards * draw(st.integers(3, 6))
    rows = batch_size * draw(st.integers(1, 3))
    # At most a third of the cap: then packing never needs more bins than there are rows, whatever the ranks.
    return draw(st.lists(st.integers(1, CAP // 3), min_size=rows, max_size=rows)), shards, batch_size


def test_sharding_deals_each_global_batch_in_equal_parts() -> None:
    batch = BatchedDataDict({"x": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])})
    assert [shard["x"].tolist() for shard in batch.shard_by_batch_size(2, batch_size=4)] == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [shard["x"].tolist() for shard in batch.shard_by_batch_size(2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]


@given(case=sharded_rows())
def test_plain_shards_hold_every_row_once(case: tuple[list[int], int, int]) -> None:
    lengths, shards, batch_size = case
    parts = batch_of(lengths).shard_by_batch_size(shards, batch_size=batch_size)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(len(lengths)))
    for part in parts:
        assert part["name"] == [f"r{row}" for row in part["row"].tolist()]
        for i in range(len(lengths) // batch_size):
            rows = part.get_batch(i, batch_size // shards)["row"].tolist()
            assert all(row // batch_size == i for row in rows)


@given(rows=st.integers(1, 20), shards=st.integers(1, 8))
def test_uneven_shards_are_contiguous_and_hold_every_row_once(rows: int, shards: int) -> None:
    parts = BatchedDataDict({"x": list(range(rows))}).shard_by_batch_size(shards, allow_uneven_shards=True)
    assert [x for part in parts for x in part["x"]] == list(range(rows))
    assert max(part.size for part in parts) == math.ceil(rows / shards)


@given(
    case=sharded_rows(),
    algorithm=st.sampled_from(
        ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
    ),
)
def test_packed_shards_keep_rows_order_capacity_and_equal_microbatch_counts(
    case: tuple[list[int], int, int], algorithm: str
) -> None:
    lengths, shards, batch_size = case
    batch = batch_of(lengths)
    parts, permutation = batch.shard_by_batch_size(
        shards, batch_size=batch_size, sequence_packing_args=packing(algorithm)
    )
    assert sorted(permutation) == list(range(len(lengths)))
    restored = BatchedDataDict.from_batches(parts).reorder_data(permutation)
    assert restored["row"].tolist() == list(range(len(lengths)))
    for i in range(len(lengths) // batch_size):
        counts = {part.get_batch(i).make_microbatch_iterator_for_packable_sequences_len() for part in parts}
        assert len(counts) == 1
    for part in parts:
        seen = []
        for i, count in enumerate(part.elem_counts_per_gb):
            global_batch = part.get_batch(i)
            assert global_batch.size == count
            for microbatch, tokens in zip(
                global_batch.make_microbatch_iterator_for_packable_sequences(),
                global_batch.micro_batch_lengths[0],
                strict=True,
            ):
                padded = sum(math.ceil(length / 4) * 4 for length in microbatch["input_lengths"].tolist())
                assert padded == tokens <= CAP
                assert all(row // batch_size == i for row in microbatch["row"].tolist())
                seen += microbatch["row"].tolist()
        assert seen == part["row"].tolist()
        whole = [
            row
            for microbatch in part.make_microbatch_iterator_for_packable_sequences()
            for row in microbatch["row"].tolist()
        ]
        assert whole == seen


@given(case=sharded_rows())
def test_dynamic_shards_share_one_microbatch_plan_under_the_token_cap(case: tuple[list[int], int, int]) -> None:
    lengths, shards, batch_size = case
    batch = batch_of(lengths)
    parts, permutation = batch.shard_by_batch_size(shards, batch_size=batch_size, dynamic_batching_args=dynamic())
    assert BatchedDataDict.from_batches(parts).reorder_data(permutation)["row"].tolist() == list(range(len(lengths)))
    assert all(
        part.micro_batch_indices == parts[0].micro_batch_indices
        and part.micro_batch_lengths == parts[0].micro_batch_lengths
        for part in parts
    )
    for part in parts:
        assert part.make_microbatch_iterator_with_dynamic_shapes_len() == sum(
            len(spans) for spans in part.micro_batch_indices
        )
        seen = []
        for microbatch in part.make_microbatch_iterator_with_dynamic_shapes():
            assert microbatch["input_ids"].numel() <= CAP
            assert microbatch["input_ids"].shape[1] >= int(microbatch["input_lengths"].max())
            seen += microbatch["row"].tolist()
        assert seen == part["row"].tolist()


def test_dynamic_batching_rounds_lengths_and_closes_at_the_cap() -> None:
    batch = batch_of([10, 3, 9, 4], width=16)
    [part], permutation = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(cap=20, length_round=4))
    assert permutation == [1, 3, 2, 0]
    assert part.micro_batch_indices == [[(0, 2), (2, 3), (3, 4)]]
    assert part.micro_batch_lengths == [[4, 12, 12]]


def test_the_rounded_length_never_passes_the_width_of_the_rows() -> None:
    [part], _ = batch_of([10, 10], width=10).shard_by_batch_size(
        1, dynamic_batching_args=dynamic(cap=20, length_round=64)
    )
    assert part.micro_batch_lengths == [[10]]


def test_largest_first_orders_the_bins_by_tokens() -> None:
    args = packing("concatenative", cap=12, multiple=1, microbatch_order="largest_first")
    [part], _ = batch_of([2, 12, 11]).shard_by_batch_size(1, sequence_packing_args=args)
    assert part["row"].tolist() == [1, 2, 0]
    assert part.micro_batch_lengths == [[12, 11, 2]]


def test_largest_first_leaves_each_rank_the_bins_that_the_packer_gave_it() -> None:
    args = packing("concatenative", cap=12, multiple=1, microbatch_order="largest_first")
    parts, _ = batch_of([5, 12, 9, 7]).shard_by_batch_size(2, sequence_packing_args=args)
    assert [part["row"].tolist() for part in parts] == [[2, 0], [1, 3]]
    assert [part.micro_batch_lengths for part in parts] == [[[9, 5]], [[12, 7]]]


def test_reordering_is_in_place_and_can_be_chained() -> None:
    batch = BatchedDataDict(row=torch.tensor([10, 11, 12]), name=["a", "b", "c"])
    assert batch.reorder_data([2, 0, 1]) is batch
    assert batch["row"].tolist() == [11, 12, 10] and batch["name"] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 3}, "not a multiple of shards=3"),
        ({"shards": 2, "batch_size": 3}, "not a multiple of batch_size=3"),
        ({"shards": 2, "batch_size": 2, "allow_uneven_shards": True}, "allow_uneven_shards"),
        ({"shards": 1, "dynamic_batching_args": dynamic(cap=3)}, "a sequence of 5 tokens"),
        ({"shards": 1, "sequence_packing_args": packing(cap=3)}, "rows 0 to 3: sequence"),
        ({"shards": 8, "sequence_packing_args": packing()}, "cannot fill 8"),
        ({"shards": 1, "sequence_packing_args": packing(microbatch_order="random")}, "microbatch_order"),
        ({"shards": 1, "sequence_packing_args": packing(), "dynamic_batching_args": dynamic()}, "exclude"),
    ],
)
def test_impossible_sharding_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of([5, 4, 3, 2]).shard_by_batch_size(**arguments)


def test_from_batches_pads_concatenates_and_extends() -> None:
    first = BatchedDataDict(
        {"ids": torch.tensor([[1, 2]]), "reward": torch.tensor([1.0]), "log": ["a"], "image": torch.ones(1, 1, 3)}
    )
    second = BatchedDataDict(
        {
            "ids": torch.tensor([[3], [4]]),
            "reward": torch.tensor([2.0, 3.0]),
            "log": ["b", "c"],
            "image": torch.ones(2, 2, 3),
        }
    )
    joined = BatchedDataDict.from_batches([first, second], pad_value_dict={"ids": 9})
    assert joined["ids"].tolist() == [[1, 2], [3, 9], [4, 9]]
    assert joined["reward"].tolist() == [1.0, 2.0, 3.0]
    assert joined["log"] == ["a", "b", "c"]
    assert joined["image"].shape == (3, 2, 3)
    assert joined["image"][0, 1].tolist() == [0.0, 0.0, 0.0]


def test_from_batches_skips_empty_batches_and_names_a_missing_column() -> None:
    assert BatchedDataDict.from_batches([BatchedDataDict(), BatchedDataDict({"x": [1]})])["x"] == [1]
    with pytest.raises(KeyError, match="'y' is missing from batch 0"):
        BatchedDataDict.from_batches([{"x": [1]}, {"x": [1], "y": [2]}])
    with pytest.raises(ValueError, match="'x' is a tensor"):
        BatchedDataDict.from_batches([{"x": [1]}, {"x": torch.ones(1)}])


def test_repeated_rows_own_their_objects() -> None:
    batch = BatchedDataDict({"log": [["hello"]], "x": torch.tensor([7])}).repeat_interleave(2)
    batch["log"][0].append("there")
    assert batch["log"] == [["hello", "there"], ["hello"]]
    assert batch["x"].tolist() == [7, 7]


@given(order=st.permutations(list(range(6))))
def test_reorder_undoes_select(order: list[int]) -> None:
    batch = batch_of([1, 2, 3, 4, 5, 6])
    back = batch.select_indices(order).reorder_data(order)
    assert back["row"].tolist() == list(range(6))
    assert back["name"] == batch["name"]
    with pytest.raises(ValueError, match="permutation of 6"):
        batch.reorder_data([0, 0, 1, 2, 3, 4])


@given(rows=st.integers(0, 20), chunks=st.integers(1, 7))
def test_chunks_are_contiguous_and_differ_by_one_row_at_most(rows: int, chunks: int) -> None:
    parts = [BatchedDataDict({"x": list(range(rows))}).chunk(rank, chunks) for rank in range(chunks)]
    assert [x for part in parts for x in part["x"]] == list(range(rows))
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1


def test_microbatches_must_divide_the_rows() -> None:
    batch = batch_of([1, 2, 3, 4])
    assert [part["row"].tolist() for part in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="does not divide"):
        batch.make_microbatch_iterator(3)
    with pytest.raises(ValueError, match="no microbatch plan"):
        batch.make_microbatch_iterator_with_dynamic_shapes()


def test_truncation_leaves_columns_without_that_dimension_alone() -> None:
    batch = batch_of([1, 2])
    batch.truncate_tensors(dim=1, truncated_len=1)
    assert batch["input_ids"].shape == (2, 1)
    assert batch["input_lengths"].tolist() == [1, 2]


def test_a_shard_keeps_its_plan_over_pickling_and_copying() -> None:
    [part], _ = batch_of([3, 4]).shard_by_batch_size(1, sequence_packing_args=packing())
    for twin in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert isinstance(twin, SlicedDataDict)
        assert twin.micro_batch_indices == part.micro_batch_indices
        assert twin["row"].tolist() == part["row"].tolist()


def _gather() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        local = batch_of([3, 4, 5][: rank + 1], width=5)
        gathered = local.all_gather(dist.group.WORLD)
        if (
            gathered["row"].tolist() != [0, 0, 1]
            or gathered["name"] != ["r0", "r0", "r1"]
            or gathered["input_ids"].shape != (3, 5)
        ):
            raise ValueError(f"rank {rank} gathered {gathered}")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_all_gather_joins_uneven_rows_in_rank_order() -> None:
    run_ranks(_gather, 2)
