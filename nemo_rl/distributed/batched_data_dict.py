"""A dictionary of columns over the same rows: tensors (dim 0 is the batch) and lists.

Invariant: an operation on rows is applied to every column, so row i of all columns is the same sample.
"""

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, overload

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from nemo_rl.distributed import batch_sharding
from nemo_rl.distributed.batch_sharding import DynamicBatchingArgs, SequencePackingArgs, ShardPlan

DictT = TypeVar("DictT", default=object, covariant=True)  # the TypedDict that documents the columns
Column = Any  # a tensor, or a list with one item per row


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Columns over the same rows.

    Attributes:
        micro_batch_indices: per global batch, `[start, end)` of each microbatch within it; None until sharded with
            packing or dynamic batching.
        micro_batch_lengths: per global batch and microbatch, its padded length (dynamic batching) or its tokens in all
            (packing).
        elem_counts_per_gb: rows of each global batch in this shard.
    """

    def __init__(self, *args: Any, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[tuple[int, int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    @property
    def size(self) -> int:
        """Number of rows, from the first column (0 without columns)."""
        return next((len(column) for column in self.data.values()), 0)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Column]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Join batches row-wise.

        Lists extend; 1-D tensors are concatenated; tensors of two or more dimensions are right-padded along dim 1 to
        the longest first.

        Args:
            batches: batches of the same columns; empty ones are skipped.
            pad_value_dict: padding per column, 0 where absent.

        Raises KeyError: a batch with rows lacks a column; ValueError: a column is a list in one batch and a tensor in
        another.
        """
        filled = [batch for batch in batches if any(len(column) for column in batch.values())]
        joined = cls()
        if not filled:
            return cls({key: column for batch in batches[:1] for key, column in batch.items()})
        for key in dict.fromkeys(key for batch in filled for key in batch):
            for n, batch in enumerate(filled):
                if key not in batch:
                    raise KeyError(
                        f"column {key!r} is missing from batch {n} of {len(filled)}, which has {sorted(batch)}"
                    )
            pad_value = (pad_value_dict or {}).get(key, 0)
            joined[key] = _join(key, [batch[key] for batch in filled], pad_value)
        return joined

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """Rows `[start, end)`; tensors are views."""
        return SlicedDataDict({key: column[start:end] for key, column in self.data.items()})

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows at `indices`, in that order, copied."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        as_list = rows.tolist()
        selected = type(self)()
        for key, column in self.data.items():
            selected[key] = (
                column[rows.to(column.device)] if isinstance(column, torch.Tensor) else [column[i] for i in as_list]
            )
        return selected

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row. List items are deep copies, so that changing one repeat leaves the
        others alone.
        """
        repeated = type(self)()
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                repeated[key] = column.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [copy.deepcopy(item) for item in column for _ in range(num_repeats)]
        return repeated

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """Part `rank` of `chunks` contiguous parts whose sizes differ by at most one row. Raises ValueError: `rank` is
        outside `[0, chunks)`.
        """
        if not 0 <= rank < chunks:
            raise ValueError(f"rank={rank} is outside the {chunks} chunks")
        return self.slice(self.size * rank // chunks, self.size * (rank + 1) // chunks)

    def reorder_data(self, permutation: Sequence[int] | torch.Tensor) -> Self:
        """Move row i to position `permutation[i]`, in place, and return self: undoes `select_indices(permutation)` and
        the permutation of `shard_by_batch_size`. Raises ValueError: `permutation` is not a permutation of the rows.
        """
        target = torch.as_tensor(permutation, dtype=torch.long)
        inverse = torch.argsort(target)
        if len(target) != self.size or not torch.equal(target[inverse], torch.arange(self.size)):
            raise ValueError(f"expected a permutation of {self.size} rows, got {target.tolist()}")
        self.data = self.select_indices(inverse).data
        return self

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor with dimension `dim` to its first `truncated_len` entries along it, in place (views)."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim:
                self.data[key] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self, device: torch.device | str) -> Self:
        """Move every tensor to `device` in place and return self."""
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Column]:
        """The columns as a plain dictionary (not copied)."""
        return self.data

    def all_gather(self, group: dist.ProcessGroup) -> Self:
        """Rows of every rank of `group`, joined in rank order, on every rank. Tensors must differ between ranks in dim
        0 at most.
        """
        world = dist.get_world_size(group)
        sizes = [0] * world
        dist.all_gather_object(sizes, self.size, group=group)
        gathered = type(self)()
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor):
                padded = column.new_zeros((max(sizes), *column.shape[1:]))
                padded[: len(column)] = column
                parts = [torch.empty_like(padded) for _ in range(world)]
                dist.all_gather(parts, padded, group=group)
                gathered[key] = torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])
            else:
                lists: list[list[object]] = [[]] * world
                dist.all_gather_object(lists, column, group=group)
                gathered[key] = [item for part in lists for item in part]
        return gathered

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> "list[SlicedDataDict]": ...
    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, *, dynamic_batching_args: DynamicBatchingArgs
    ) -> "tuple[list[SlicedDataDict], list[int]]": ...
    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, *, sequence_packing_args: SequencePackingArgs
    ) -> "tuple[list[SlicedDataDict], list[int]]": ...
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]":
        """Cut into chunks of `batch_size` rows, each chunk into `shards` equal parts, and join part i of every chunk
        into shard i.

        Args:
            shards: number of shards.
            batch_size: rows of one global batch; all rows when None.
            allow_uneven_shards: contiguous shards of `ceil(size / shards)` rows, the last ones short or empty;
                `batch_size` must be None.
            dynamic_batching_args: sort by length and plan microbatches of a bounded number of padded tokens.
            sequence_packing_args: pack rows into microbatches of a bounded number of tokens.

        Returns:
            A list of `SlicedDataDict`; with either args, `(that list, permutation)`, where `permutation[i]` is the
            original row at position i of the joined shards: `from_batches(results).reorder_data(permutation)` restores
            the order.

        Raises:
            ValueError: the sizes do not divide, arguments exclude each other, or a row is longer than a microbatch.

        >>> batch = BatchedDataDict({"x": [0, 0, 1, 1, 2, 2, 3, 3]})
        >>> [shard["x"] for shard in batch.shard_by_batch_size(2, batch_size=4)]
        [[0, 0, 2, 2], [1, 1, 3, 3]]
        """
        args = dynamic_batching_args or sequence_packing_args
        if allow_uneven_shards:
            if batch_size is not None or args is not None:
                raise ValueError("allow_uneven_shards takes neither batch_size nor microbatch arguments")
            return self._take(batch_sharding.plan_uneven(self.size, shards))
        if args is None:
            return self._take(batch_sharding.plan_even(self.size, shards, batch_size))
        width = None if dynamic_batching_args is None else self[dynamic_batching_args["input_key"]].shape[1]
        lengths = torch.as_tensor(self[args["input_lengths_key"]]).tolist()
        plans = batch_sharding.plan_shards(
            lengths, shards, batch_size, sequence_packing_args, dynamic_batching_args, width=width
        )
        return self._take(plans), batch_sharding.permutation(plans)

    def _take(self, plans: Sequence[ShardPlan]) -> "list[SlicedDataDict]":
        shards = []
        for plan in plans:
            shard = SlicedDataDict(self.select_indices(plan.rows).data)
            shard.elem_counts_per_gb = plan.elem_counts_per_gb
            shard.micro_batch_indices = plan.micro_batch_indices
            shard.micro_batch_lengths = plan.micro_batch_lengths
            shards.append(shard)
        return shards

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict":
        """Global batch `batch_idx` of this shard, with its microbatch plan.

        Args:
            batch_size: rows of one; may be None where the shard knows its counts (packing, dynamic batching).

        Raises ValueError: the batch is outside the shard, or `batch_size` is missing.
        """
        if self.elem_counts_per_gb is None:
            if batch_size is None:
                raise ValueError("batch_size is needed for a shard without microbatch plan")
            start, rows, batches = batch_idx * batch_size, batch_size, -(-self.size // batch_size)
        else:
            batches = len(self.elem_counts_per_gb)
            start = sum(self.elem_counts_per_gb[:batch_idx])
            rows = self.elem_counts_per_gb[batch_idx] if 0 <= batch_idx < batches else 0
        if not 0 <= batch_idx < batches:
            raise ValueError(f"global batch {batch_idx} is outside the {batches} of this shard")
        batch = self.slice(start, start + rows)
        if (
            self.micro_batch_indices is not None
            and self.micro_batch_lengths is not None
            and self.elem_counts_per_gb is not None
        ):
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.elem_counts_per_gb = [rows]
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> "Iterator[SlicedDataDict]":
        """Microbatches of `microbatch_size` rows. Raises ValueError: the size does not divide the rows."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise ValueError(f"microbatch size {microbatch_size} does not divide the {self.size} rows of this batch")
        return (self.slice(start, start + microbatch_size) for start in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self) -> "Iterator[SlicedDataDict]":
        """The planned microbatches, each cut to its own padded length along dim 1. Raises ValueError: this shard was
        not made with dynamic batching.
        """
        return self._planned_microbatches(truncate=True)

    def make_microbatch_iterator_with_dynamic_shapes_len(self) -> int:
        """Number of microbatches `make_microbatch_iterator_with_dynamic_shapes` yields."""
        return len(self._planned_spans())

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict]":
        """The planned bins, each as the rows to be packed into one sequence, still padded. Raises ValueError: this
        shard was not made with sequence packing.
        """
        return self._planned_microbatches(truncate=False)

    def make_microbatch_iterator_for_packable_sequences_len(self) -> int:
        """Number of microbatches `make_microbatch_iterator_for_packable_sequences` yields."""
        return len(self._planned_spans())

    def _planned_spans(self) -> list[tuple[int, int, int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None or self.elem_counts_per_gb is None:
            raise ValueError(
                "this batch has no microbatch plan; shard it with dynamic_batching_args or sequence_packing_args first"
            )
        spans: list[tuple[int, int, int]] = []
        offset = 0
        for indices, lengths, rows in zip(
            self.micro_batch_indices, self.micro_batch_lengths, self.elem_counts_per_gb, strict=True
        ):
            spans.extend(
                (offset + start, offset + end, length) for (start, end), length in zip(indices, lengths, strict=True)
            )
            offset += rows
        return spans

    def _planned_microbatches(self, *, truncate: bool) -> "Iterator[SlicedDataDict]":
        spans = self._planned_spans()

        def microbatches() -> "Iterator[SlicedDataDict]":
            for start, end, length in spans:
                microbatch = self.slice(start, end)
                if truncate:
                    microbatch.truncate_tensors(dim=1, truncated_len=length)
                yield microbatch

        return microbatches()


class SlicedDataDict(BatchedDataDict[DictT]):
    """Part of a `BatchedDataDict`: a shard, a global batch or a microbatch."""


def _join(key: str, columns: list[Column], pad_value: float) -> Column:
    if all(isinstance(column, torch.Tensor) for column in columns):
        if columns[0].ndim == 1:
            return torch.cat(columns)
        width = max(column.shape[1] for column in columns)
        return torch.cat([_pad_dim1(column, width, pad_value) for column in columns])
    if any(isinstance(column, torch.Tensor) for column in columns):
        raise ValueError(f"column {key!r} is a tensor in some batches and a list in others")
    return [item for column in columns for item in column]


def _pad_dim1(column: torch.Tensor, width: int, pad_value: float) -> torch.Tensor:
    if column.shape[1] == width:
        return column
    padding = column.new_full((column.shape[0], width - column.shape[1], *column.shape[2:]), pad_value)
    return torch.cat([column, padding], dim=1)
