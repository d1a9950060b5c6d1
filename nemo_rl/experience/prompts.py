"""Batches of prompts across epochs, and where the loader stands.

Knows the loader by its iterator and its state, and nothing of steps. Invariant: from a saved position the very batches
follow that would have followed then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class Position:
    """Where a loader stands: its own state, and how many epochs are over."""

    loader_state: dict[str, Any]
    epoch: int

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, so that a position is saved as a loader is."""
        return self.loader_state


class PromptSource(Protocol):
    """Where prompts come from."""

    epoch: int
    batch_size: int

    def next(self) -> BatchedDataDict[Any]:
        """The next batch; StopIteration after the last epoch."""
        ...

    def position(self) -> Position:
        """Where the source stands."""
        ...


class EpochPrompts:
    """The batches of a loader, epoch after epoch.

    Args:
        loader: Iterable with `state_dict`.
        batch_size: Prompts per batch.
        epoch: Epochs that are over.
        max_epochs: Passes over the data.
    """

    def __init__(self, loader: Any, *, batch_size: int, epoch: int, max_epochs: int) -> None:
        self._loader = loader
        self._iterator: Iterator[BatchedDataDict[Any]] = iter(loader)
        self._max_epochs = max_epochs
        self.batch_size = batch_size
        self.epoch = epoch

    def next(self) -> BatchedDataDict[Any]:
        """The next batch; at an epoch's end the next epoch's first.

        Raises:
            StopIteration: The last epoch is over.
        """
        batch = next(self._iterator, None) if self.epoch < self._max_epochs else None
        while batch is None:
            self.epoch += 1
            if self.epoch >= self._max_epochs:
                raise StopIteration
            self._iterator = iter(self._loader)
            batch = next(self._iterator, None)
        return batch

    def position(self) -> Position:
        """Where the loader stands."""
        return Position(copy.deepcopy(self._loader.state_dict()), self.epoch)
