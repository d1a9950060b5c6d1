"""NeMo-RL's codec functions and the field registry."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.data_plane import materialize
from nemo_rl.data_plane.codec import (
    object_array,
    pack_jagged_fields,
    pack_per_token_field,
    round_up,
    to_nested_by_length,
)
from nemo_rl.data_plane.field_schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, pad_values


def rows_of(nested: torch.Tensor) -> list[list[int]]:
    return [row.tolist() for row in nested.unbind()]


def test_padding_is_cut_by_length_also_where_parallel_ranks_widened_the_rows() -> None:
    padded = torch.arange(12).view(2, 6)
    assert rows_of(to_nested_by_length(padded, torch.tensor([2, 3]))) == [[0, 1], [6, 7, 8]]
    assert rows_of(pack_per_token_field(padded, [2, 3])) == [[0, 1], [6, 7, 8]]
    assert torch.equal(pack_per_token_field(padded, [7, 3]), padded)
    assert torch.equal(pack_per_token_field(torch.tensor([1, 2]), [1, 1]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="lengths"):
        to_nested_by_length(padded, [1, 2, 3])


def test_only_token_columns_become_jagged_and_the_consumer_pads_them() -> None:
    images = torch.randn(2, 4, 3)
    td = pack_jagged_fields(
        {"input_ids": torch.arange(8).view(2, 4), "image": images, "names": ["a", ["b"]], "n": torch.ones(2)},
        lengths=[1, 3],
    )
    assert td["input_ids"].is_nested and torch.equal(td["image"], images)
    batch = materialize(td, pad_value_dict={"input_ids": 9}, pad_to_seqlen=5)
    assert batch["input_ids"].tolist() == [[0, 9, 9, 9, 9], [4, 5, 6, 9, 9]]
    assert list(batch["names"]) == ["a", ["b"]] and batch["names"].dtype == object and batch["n"].tolist() == [1, 1]
    assert materialize(td, layout="jagged")["input_ids"].is_nested
    with pytest.raises(TypeError, match="column 'x' is a int"):
        pack_jagged_fields({"x": 3}, lengths=None)


def test_jagged_columns_made_of_offsets_are_padded_to_the_longest_row() -> None:
    column = torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([0, 3, 5, 9, 10]))
    padded = materialize({"input_ids": column}, pad_value_dict={"input_ids": -1})["input_ids"]
    assert padded.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1], [5, 6, 7, 8], [9, -1, -1, -1]]
    wide = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert materialize({"x": wide})["x"].shape == (2, 2, 3)


def test_small_helpers_keep_their_edges() -> None:
    assert [round_up(5, m) for m in (0, 1, 4, 5)] == [5, 5, 8, 5]
    assert object_array([[1, 2], [3, 4]]).shape == (2,)


def test_fetch_sets_and_padding_follow_from_the_registry() -> None:
    assert set(LP_SEED_FIELDS) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}
    assert set(DP_TRAIN_FIELDS) == {
        *LP_SEED_FIELDS,
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
    }
    assert pad_values(7) == {"input_ids": 7, "prompt_ids_for_adv": 7, "token_versions": -1}
