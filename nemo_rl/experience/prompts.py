"""Batches of prompts across epochs, and where the loader stands; and prompt groups: one prompt's samples on their way
to the step that trains them.

Invariant: from a saved position the very batches follow that would have followed then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.record_events import GroupCommitted

if TYPE_CHECKING:
    from nemo_rl.data.loader import Loader
    from nemo_rl.experience.rollouts import SampleOutcome
    from nemo_rl.models.policy.interfaces import BatchHandle


@dataclass(frozen=True)
class Position:
    """Position of a loader: its own state, and the number of completed epochs."""

    loader_state: dict[str, object]
    epoch: int

    def state_dict(self) -> dict[str, object]:
        """The loader's state, so that a position is saved as a loader is."""
        return self.loader_state


@dataclass(frozen=True)
class _Fetched:
    """A prefetched batch, or why there is none, and the loader's position before it."""

    before: Position
    epoch: int
    batch: BatchedDataDict | None
    error: Exception | None = None


class EpochPrompts:
    """The batches of a loader, epoch after epoch. `loader`: iterable with `state_dict`.

    Attributes:
        epoch: Of the batch that was drawn last.
    """

    def __init__(self, loader: Loader, *, batch_size: int, epoch: int, max_epochs: int) -> None:
        self._loader = loader
        self._iterator: Iterator[BatchedDataDict] = iter(loader)
        self._max_epochs = max_epochs
        self._fetched: _Fetched | None = None
        self.batch_size = batch_size
        self.epoch = epoch

    def prefetch(self) -> bool:
        """Fetches the next batch in advance; returns whether there is one. Errors are raised by `next`, and nothing is
        drawn yet.
        """
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched.batch is not None

    def next(self) -> BatchedDataDict:
        """The next batch; at an epoch's end the next epoch's first. Raises StopIteration: the last epoch is over;
        whatever the loader raised.
        """
        fetched, self._fetched = self._fetched or self._fetch(), None
        self.epoch = fetched.epoch
        if fetched.batch is None:
            raise fetched.error or StopIteration
        return fetched.batch

    def _fetch(self) -> _Fetched:
        before, epoch, batch = self.position(), self.epoch, None
        try:
            batch = next(self._iterator, None) if epoch < self._max_epochs else None
            while batch is None and epoch < self._max_epochs:
                epoch += 1
                if epoch < self._max_epochs:
                    self._iterator = iter(self._loader)
                    batch = next(self._iterator, None)
        except Exception as error:  # noqa: BLE001 - the next draw raises it
            return _Fetched(before, epoch, None, error)
        return _Fetched(before, epoch, batch)

    def position(self) -> Position:
        """Position of the loader after the last drawn batch."""
        if self._fetched is not None:
            return self._fetched.before
        return Position(copy.deepcopy(self._loader.state_dict()), self.epoch)


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
    samples: list[SampleOutcome] = field(default_factory=list)
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
