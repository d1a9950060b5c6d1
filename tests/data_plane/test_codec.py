"""NeMo-RL's codec functions and the field registry."""

from __future__ import annotations

import torch

from nemo_rl.data_plane import materialize
from nemo_rl.data_plane.codec import object_array, round_up
from nemo_rl.data_plane.field_schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS, pad_values


def test_the_consumer_pads_jagged_columns_and_gets_objects_as_arrays() -> None:
    images = torch.randn(2, 4, 3)
    ids = torch.nested.nested_tensor_from_jagged(torch.tensor([0, 4, 5, 6]), torch.tensor([0, 1, 4]))
    found = {"input_ids": ids, "image": images, "names": ["a", ["b"]], "n": torch.ones(2)}
    batch = materialize(found, pad_value_dict={"input_ids": 9}, pad_to_seqlen=5)
    assert batch["input_ids"].tolist() == [[0, 9, 9, 9, 9], [4, 5, 6, 9, 9]]
    assert batch["image"].shape == (2, 5, 3) and torch.equal(batch["image"][:, :4], images)
    assert list(batch["names"]) == ["a", ["b"]] and batch["names"].dtype == object and batch["n"].tolist() == [1, 1]
    assert materialize(found, layout="jagged")["input_ids"].is_nested


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
