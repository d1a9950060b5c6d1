"""Loaders that continue exactly where they stopped, in the middle of an epoch and in the same shuffled order; and their
batches: of prompts for the rollout, and of conversations for supervised fine-tuning.

Built on torchdata's StatefulDataLoader; the order of an epoch is a function of seed and epoch alone. B is rows, S
tokens of the longest one, padded. Invariants: a loader restored from `state_dict()` yields the very batches the first
one would have yielded next; row i of every column is datum i of the list; a padded token has mask 0.
"""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from nemo_rl.data.interfaces import DataError, DatumSpec
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log, batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

Batch = BatchedDataDict
CustomLoader = Callable[..., tuple[Batch, dict[str, Iterator[Batch]]]]


class HasState(Protocol):
    """Something whose state goes into a checkpoint."""

    def state_dict(self) -> dict[str, object]:
        """Plain values."""
        ...


class Loader(HasState, Protocol):
    """Batches, from where its state says."""

    def __iter__(self) -> Iterator[Batch]: ...

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Continues from `state_dict()`."""
        ...


class EpochBatches:
    """Batches of row indices, epoch after epoch: the batch sampler of a resumable loader. `shuffle`: whether each epoch
    has its own order, drawn from seed and epoch. `drop_last`: leave out a last batch that is not full.
    """

    def __init__(self, rows: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.next_epoch = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, self.batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> _EpochIterator:
        return _EpochIterator(self)

    def order(self, epoch: int, seed: int) -> list[int]:
        """Row indices of an epoch, in the order they are visited."""
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator()
        generator.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.rows, generator=generator).tolist()


class _EpochIterator:
    """One epoch; it takes its number at the first batch, because the loader makes iterators that it never uses.

    An epoch that goes on from a state keeps the order it began with and goes on at the row where it was, whatever
    batch size and seed are now: no row is repeated or left out.
    """

    def __init__(self, batches: EpochBatches) -> None:
        self._batches = batches
        self._epoch: int | None = None
        self._seed = batches.seed
        self._row = 0
        self._order: list[int] = []

    def __iter__(self) -> _EpochIterator:
        return self

    def __next__(self) -> list[int]:
        if self._epoch is None:
            self._start(self._batches.next_epoch)
        batch = self._order[self._row : self._row + self._batches.batch_size]
        if not batch or (self._batches.drop_last and len(batch) < self._batches.batch_size):
            raise StopIteration
        self._row += len(batch)
        return batch

    def state_dict(self) -> dict[str, int]:
        epoch = self._batches.next_epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "next_row": self._row, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._seed = state["seed"]
        self._start(state["epoch"])
        self._row = state["next_row"]

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = self._batches.order(epoch, self._seed)
        self._batches.next_epoch = epoch + 1


def make_loader(
    dataset: Any,
    batch_size: int,
    collate_fn: Callable[[Sequence[DatumSpec]], Batch],
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    num_workers: int = 0,
    name: str = "the dataset",
) -> StatefulDataLoader[Batch]:
    """A resumable loader over a map-style dataset; each `iter()` is the next epoch, or the rest of a restored one.

    Args:
        dataset: has a length and gives row i at `[i]`.
        collate_fn: joins rows into a batch.
        shuffle: see `EpochBatches`; also `seed` and `drop_last`.
        num_workers: processes that prepare batches; 0 prepares them here.

    Raises DataError: there is no row, or no full batch although only full ones count.
    """
    rows = len(dataset) if isinstance(dataset, Sized) else 0
    if rows == 0:
        raise DataError(f"{name} is empty")
    batches = EpochBatches(rows, batch_size, shuffle, seed, drop_last)
    if len(batches) == 0:
        raise DataError(
            f"{name} has {rows} rows, fewer than one batch of {batch_size}; take more data or smaller batches"
        )
    with warnings.catch_warnings():
        # torchdata calls a function that torch has deprecated; it cannot be changed here.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate_fn,
            num_workers=num_workers,
            worker_init_fn=_leave_signals_to_the_driver,
        )


def _leave_signals_to_the_driver(_: int) -> None:
    """Takes a worker out of the command's process group, whose signals are the driver's: torch raises an error in the
    driver, wherever it is, when one ends a worker. So SIGTERM, by which Python ends the workers at the driver's exit,
    is an exit with code 0.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


class MultipleLoaders:
    """Several loaders as one endless iterator of batches, for `data.use_multiple_dataloader`.

    Args:
        loaders_per_batch: how many loaders, in turn, make up one batch.
        custom: `data.custom_dataloader`; called with the iterators and the loaders, it returns a batch and the
            iterators, and restarts exhausted ones itself.
    """

    def __init__(
        self,
        loaders: Mapping[str, StatefulDataLoader[Batch]],
        loaders_per_batch: int = 1,
        custom: CustomLoader | None = None,
    ) -> None:
        if not loaders:
            raise DataError("data.use_multiple_dataloader needs at least one dataset in data.train")
        self.loaders = dict(loaders)
        self._loaders_per_batch = loaders_per_batch
        self._custom = custom
        self._turn = 0
        self._iterators: dict[str, Iterator[Batch]] | None = None

    def __iter__(self) -> MultipleLoaders:
        return self

    def __next__(self) -> Batch:
        if self._iterators is None:
            self._iterators = {name: iter(loader) for name, loader in self.loaders.items()}
        if self._custom is not None:
            batch, self._iterators = self._custom(self._iterators, self.loaders)
            return batch
        return BatchedDataDict.from_batches(
            [self._from_next_loader(self._iterators) for _ in range(self._loaders_per_batch)]
        )

    def _from_next_loader(self, iterators: dict[str, Iterator[Batch]]) -> Batch:
        name = list(self.loaders)[self._turn % len(self.loaders)]
        self._turn += 1
        batch = next(iterators[name], None)
        if batch is None:
            iterators[name] = iter(self.loaders[name])
            batch = next(iterators[name])
        return batch

    def state_dict(self) -> dict[str, object]:
        """The state of every loader, and whose turn it is."""
        return {"turn": self._turn, "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict()`; loaders that the state does not know start afresh."""
        self._turn = state["turn"]
        self._iterators = None
        for name, loader in self.loaders.items():
            if name in state["loaders"]:
                loader.load_state_dict(state["loaders"][name])


def rl_collate_fn(data_batch: Sequence[DatumSpec]) -> BatchedDataDict:
    """Joins prompts into columns. Returns `message_log`, `extra_env_info`, `task_name`, `stop_strings` (lists of B),
    `length` and `idx` (int64 [B] and list), `loss_multiplier` (float32 [B]), and `batch_max_length` (int64 [B], the
    longest prompt in every row).
    """
    length = torch.tensor([datum["length"] for datum in data_batch], dtype=torch.int64)
    return BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        length=length,
        loss_multiplier=torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32),
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        task_name=[datum.get("task_name") for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
        batch_max_length=torch.ones_like(length) * (length.max() if len(data_batch) else 0),
        stop_strings=[datum.get("stop_strings") for datum in data_batch],
    )


# Problems of an evaluation are prompts as others are; NeMo-RL has a name for them.
eval_collate_fn = rl_collate_fn


def sft_collate_fn(
    data_batch: Sequence[DatumSpec],
    pad_token_id: int,
    make_sequence_length_divisible_by: int = 1,
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> BatchedDataDict:
    """Joins conversations into padded columns. Returns `input_ids` (int64 [B, S]), `input_lengths` (int32 [B]),
    `token_mask` (int64 [B, S], 1 on tokens of trained roles), `sample_mask` (float32 [B], 0 for conversations that were
    too long).
    """
    logs = [datum["message_log"] for datum in data_batch]
    add_loss_mask_to_message_log(logs, roles_to_train_on, only_unmask_final)
    flat, lengths = batched_message_log_to_flat_message(
        logs, {"token_ids": pad_token_id}, make_sequence_length_divisible_by
    )
    return BatchedDataDict(
        input_ids=flat["token_ids"],
        input_lengths=lengths,
        token_mask=flat["token_loss_mask"],
        sample_mask=torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32),
    )


def sft_collate(
    pad_token_id: int, make_sequence_length_divisible_by: int = 1, only_unmask_final: bool = False
) -> Callable[[Sequence[DatumSpec]], BatchedDataDict]:
    """`sft_collate_fn` with its settings bound, as a loader takes it."""
    return functools.partial(
        sft_collate_fn,
        pad_token_id=pad_token_id,
        make_sequence_length_divisible_by=make_sequence_length_divisible_by,
        only_unmask_final=only_unmask_final,
    )
