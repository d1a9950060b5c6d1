"""NeMo-RL's codec functions, message logs as columns, and the field registry."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.data_plane import materialize
from nemo_rl.data_plane.codec import (
    object_array,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    round_up,
    stack_or_nest,
    to_nested_by_length,
)
from nemo_rl.data_plane.column_io import attach_message_log_view, decompose_message_log
from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, fields_with_optional_routed_experts, pad_values
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


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
    assert stack_or_nest([]).numel() == 0 and stack_or_nest([torch.ones(2), torch.ones(2)]).shape == (2, 2)
    assert stack_or_nest([torch.ones(2), torch.ones(3)]).is_nested
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    full = torch.nested.as_nested_tensor([torch.arange(5), torch.arange(4)], layout=torch.jagged)
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert rows_of(response_from_nested(full, mask)) == [[2, 3], [0, 1, 2]]


def test_message_logs_travel_as_columns_and_come_back_as_views() -> None:
    def message(role: str, *ids: int) -> dict[str, object]:
        return {"role": role, "content": role[0], "token_ids": torch.tensor(ids)}

    logs = [
        [message("user", 1, 2), message("assistant", 3)],
        [message("user", 4), message("assistant", 5, 6), message("environment", 7)],
    ]
    columns = decompose_message_log(logs)
    assert columns["turn_lengths"].tolist() == [[2, 1, 0], [1, 2, 1]] and columns[
        "response_token_lengths"
    ].tolist() == [1, 2]
    batch = BatchedDataDict(
        columns | {"input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]), "generation_logprobs": torch.zeros(2, 4)}
    )
    attach_message_log_view(batch)
    attach_message_log_view(batch)
    second = batch["message_log"][1]
    assert [m["token_ids"].tolist() for m in second] == [[4], [5, 6], [7]] and [m["content"] for m in second] == [
        "u",
        "a",
        "e",
    ]
    assert [("generation_logprobs" in m) for m in second] == [False, True, False]
    batch["input_ids"][1, 1] = 50
    assert second[1]["token_ids"].tolist() == [50, 6]
    with pytest.raises(KeyError, match="message 0 of row 0 has no role"):
        decompose_message_log([[{"content": "x"}]])


def test_fetch_sets_and_padding_follow_from_the_registry() -> None:
    assert set(LP_SEED_FIELDS) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}
    assert set(DP_TRAIN_FIELDS) == {
        *LP_SEED_FIELDS,
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
    }
    assert fields_with_optional_routed_experts(["a", "routed_experts"], enabled=True) == ["a", "routed_experts"]
    assert fields_with_optional_routed_experts(["a"], enabled=False) == ["a"]
    assert pad_values(7) == {"input_ids": 7, "prompt_ids_for_adv": 7, "token_versions": -1}
