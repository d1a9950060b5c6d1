"""A prompt group: one prompt's samples on their way to the step that trains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.record_events import GroupCommitted

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle


class StaleGroupError(RuntimeError):
    """A group is older than the staleness bound allows at its step."""


class GroupKey(NamedTuple):
    """A prompt group's identity: the batch that it was drawn with, its attempt (from 0), its number in the batch.

    The batch is the step that trains it where steps take their groups in order. The attempt counts further generation
    batches of one step, or how often the group was started again; numbers follow those of the attempt before.
    """

    target: int
    attempt: int
    number: int


@dataclass
class BufferedGroup:
    """One finished group."""

    key: GroupKey  # its place in the run
    tokens: BatchHandle  # handle of its token columns, pending in the store
    rows: BatchedDataDict  # its small columns [G]
    metrics: dict[str, Any] = field(default_factory=dict)
    generated_at: int = 0  # version that was published when its generation began

    @property
    def oldest(self) -> int:
        """Oldest version among its tokens; -1 if no sample has tokens, because their prompts fill the sequence."""
        versions_G = self.rows["weight_version"]
        with_tokens_N = versions_G[versions_G >= 0]
        return int(with_tokens_N.min()) if len(with_tokens_N) else -1

    def is_stale(self, step: int, max_age: int | None) -> bool:
        """Whether a token is more than `max_age` versions older than the weights that `step` starts from."""
        return max_age is not None and 0 <= self.oldest < step - max_age

    def committed(self, *, restored: bool = False) -> GroupCommitted:
        """The record event of its end, or of its return from a checkpoint."""
        newest, tokens = int(self.rows["newest_version"].max()), int(self.rows["generated_lengths"].sum())
        return GroupCommitted(group_name(self.key), newest, tokens, restored)


def group_name(key: GroupKey) -> str:
    """Identity of a group in the run record."""
    return group_id(key.target, key.number)


def group_id(step: int, prompt: int) -> str:
    """Identity of the group of prompt `prompt` that is drawn for step `step`."""
    return f"{step}-{prompt}"
