"""The known columns: shape, padding and readers of each.

Token alignment, padding and fetch sets follow from this registry; a new column is one line here. Other columns can be
stored too, with the values they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

TAG = "tag/"
"""Begins the name of a column of a batch in this process that is a tag of its rows: for the code that selects rows, not
for workers.
"""
TOPK_IDS, TOPK_LOGPROBS = "teacher_topk_ids", "teacher_topk_logprobs"
"""Columns [S, k] of a teacher: its k most likely tokens after each token, and their log-probabilities."""
PROMPT, PROMPT_TOKENS = "prompt", "prompt_tokens"
"""Tags of rows: the number of their prompt, which the samples of a group have in common, and its tokens."""


class Axis(Enum):
    """Granularity of a column's values: one per row, one per token of a row, or one object per row."""

    ROW = "row"
    TOKEN = "token"
    OBJECT = "object"


class Consumer(Enum):
    """Readers of columns on the workers."""

    LOGPROB = "logprob"
    TRAIN = "train"
    # The model's forward, beyond token ids: what images, video and audio were turned into.
    MODEL = "model"


@dataclass(frozen=True)
class FieldSchema:
    """A known column. `dtype`: name of its torch dtype where it is always the same; a writer may choose another width
    of the same kind (bfloat16 for float32).
    """

    name: str
    axis: Axis  # granularity of its values
    dtype: str | None = None
    pad: int = 0  # padding value
    pad_with_token: bool = False  # padded with the tokenizer's pad id instead
    consumers: frozenset[Consumer] = frozenset()  # who reads it by default


_ALL = frozenset({Consumer.LOGPROB, Consumer.TRAIN})
_TRAIN = frozenset({Consumer.TRAIN})
_MEDIA = frozenset({Consumer.MODEL})

SCHEMA: dict[str, FieldSchema] = {
    field.name: field
    for field in (
        FieldSchema("input_ids", Axis.TOKEN, "int64", pad_with_token=True, consumers=_ALL),
        FieldSchema("input_lengths", Axis.ROW, "int64", consumers=_ALL),
        FieldSchema("generation_logprobs", Axis.TOKEN, "float32", consumers=_TRAIN),
        FieldSchema("prev_logprobs", Axis.TOKEN, "float32", consumers=_TRAIN),
        FieldSchema("reference_policy_logprobs", Axis.TOKEN, "float32", consumers=_TRAIN),
        FieldSchema("advantages", Axis.TOKEN, "float32", consumers=_TRAIN),
        FieldSchema("token_versions", Axis.TOKEN, "int32", pad=-1),
        FieldSchema("token_mask", Axis.TOKEN, consumers=_ALL),
        FieldSchema("sample_mask", Axis.ROW, consumers=_ALL),
        FieldSchema("unwhitened_advantages", Axis.TOKEN, "float32"),
        FieldSchema("teacher_logprobs", Axis.TOKEN, "float32"),
        FieldSchema("naturally_routed_logprobs", Axis.TOKEN, "float32"),
        FieldSchema("routed_experts", Axis.TOKEN),
        FieldSchema("routed_experts_valid", Axis.TOKEN, "bool"),
        FieldSchema("sampling_mask_counts", Axis.TOKEN, "int32"),
        FieldSchema("sampling_mask_ids", Axis.OBJECT),
        FieldSchema(TOPK_IDS, Axis.TOKEN, "int32"),
        FieldSchema(TOPK_LOGPROBS, Axis.TOKEN, "float32"),
        FieldSchema("row_advantages", Axis.ROW, "float32"),
        FieldSchema("rewards", Axis.ROW, "float32"),
        FieldSchema("positive_nll_scale", Axis.ROW),
        FieldSchema("sample_index", Axis.ROW, "int64"),
        FieldSchema("total_reward", Axis.ROW, "float32"),
        # As wide as the longest prompt, so not aligned with the row's tokens.
        FieldSchema("prompt_ids_for_adv", Axis.ROW, "int64", pad_with_token=True),
        FieldSchema("content", Axis.OBJECT),
        FieldSchema("conversation", Axis.OBJECT),
        FieldSchema("multi_modal_inputs", Axis.OBJECT, consumers=_MEDIA),
        FieldSchema("pixel_values", Axis.ROW, consumers=_MEDIA),
        FieldSchema("pixel_values_videos", Axis.ROW, consumers=_MEDIA),
        FieldSchema("pixel_attention_mask", Axis.ROW, consumers=_MEDIA),
        FieldSchema("image_sizes", Axis.ROW, consumers=_MEDIA),
        FieldSchema("image_grid_thw", Axis.ROW, consumers=_MEDIA),
        FieldSchema("video_grid_thw", Axis.ROW, consumers=_MEDIA),
        FieldSchema("second_per_grid_ts", Axis.ROW, consumers=_MEDIA),
        FieldSchema("input_features", Axis.ROW, consumers=_MEDIA),
        FieldSchema("feature_attention_mask", Axis.ROW, consumers=_MEDIA),
    )
}

ROUTE_FIELDS = ("routed_experts", "routed_experts_valid")
"""`[B, S, L, K]`, uint8 up to 256 experts, else int16: which experts generation chose for each token, in each layer
that has experts, in the model's order; and `[B, S]`, whether that is known. It is not for padding, for a row's last
token and for observations after it, which no engine has computed; the routes are 0 there.
"""
SAMPLING_MASK_FIELDS = ("sampling_mask_counts", "sampling_mask_ids")
"""`[B, S]`: of how many tokens each sampled token was drawn; 0 where that was the whole vocabulary, and where nothing
was sampled. And for each row an int32 tensor of their ids, in the order of its positions, ascending in each.
"""

TOKEN_ALIGNED_FIELDS = frozenset(name for name, field in SCHEMA.items() if field.axis is Axis.TOKEN)


def default_fields(consumer: Consumer) -> list[str]:
    """The columns that a consumer reads by default, in the registry's order."""
    return [name for name, field in SCHEMA.items() if consumer in field.consumers]


def model_inputs(names: Iterable[str]) -> list[str]:
    """Columns that the model's forward reads besides token ids."""
    return [name for name in names if name in SCHEMA and Consumer.MODEL in SCHEMA[name].consumers]


def columns_of_others(names: Iterable[str]) -> list[str]:
    """The columns that training passes through: inputs of the model, and columns that are not in the registry."""
    return [name for name in names if name not in SCHEMA or Consumer.MODEL in SCHEMA[name].consumers]


def replayed_fields(names: Iterable[str], *, routes: bool = True) -> list[str]:
    """Columns of recorded decisions, for a forward pass that replays them. `routes`: False for a pass that chooses
    experts for itself, as the reference's does.
    """
    fields = ROUTE_FIELDS + SAMPLING_MASK_FIELDS if routes else SAMPLING_MASK_FIELDS
    present = set(names)
    return [name for name in fields if name in present]


DP_TRAIN_FIELDS = default_fields(Consumer.TRAIN)
LP_SEED_FIELDS = default_fields(Consumer.LOGPROB)


def pad_values(pad_token_id: int) -> dict[str, int]:
    """Padding of each column that is not padded with 0."""
    return {
        name: pad_token_id if field.pad_with_token else field.pad
        for name, field in SCHEMA.items()
        if field.pad_with_token or field.pad
    }
