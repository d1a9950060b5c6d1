"""Batches of prompts across epochs, and where the loader stands.

Invariant: from a saved position the very batches follow that would have followed then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from nemo_rl.data.loader import Loader


@dataclass(frozen=True)
class Position:
    """Where a loader stands: its own state, and how many epochs are over."""

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
    """The batches of a loader, epoch after epoch.

    Args:
        loader: Iterable with `state_dict`.

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
        """Fetches the next batch while something else takes time; whether there is one. What fails is for `next` to
        raise, and nothing is drawn yet.
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
        """Where the loader stood after the batch that was drawn last."""
        if self._fetched is not None:
            return self._fetched.before
        return Position(copy.deepcopy(self._loader.state_dict()), self.epoch)
