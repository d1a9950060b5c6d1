"""Plans which rows of the data plane go to which data-parallel rank, from lengths alone.

The driver plans once for all ranks, and each rank's meta carries its plan. Invariant: every rank has the same number of
microbatches per global batch; otherwise gradient collectives would hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.data_plane.column_io import batch_width
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed import batch_sharding
from nemo_rl.distributed.batch_sharding import DynamicBatchingArgs, SequencePackingArgs, ShardPlan
from nemo_rl.distributed.batched_data_dict import SlicedDataDict

WIDTH = "global_forward_pad_seqlen"
_PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")


@dataclass(frozen=True)
class BatchPlan:
    """How a rank lays its rows out.

    Attributes:
        micro_batch_indices: Per global batch, `[start, end)` of each microbatch; None for equal microbatches.
        micro_batch_lengths: Per global batch and microbatch, its padded length or its tokens in all.
    """

    width: int  # width of token columns, the same on every rank
    micro_batch_indices: list[list[tuple[int, int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None  # rows of each global batch

    @staticmethod
    def of(meta: KVBatchMeta) -> BatchPlan:
        """The plan that a rank's meta carries; rows without one are padded to their own longest."""
        info = meta.extra_info
        return BatchPlan(info.get(WIDTH) or batch_width(meta), *(info.get(name) for name in _PLAN))

    def apply_to(self, batch: SlicedDataDict) -> SlicedDataDict:
        """The batch with this plan's microbatches."""
        batch.micro_batch_indices = self.micro_batch_indices
        batch.micro_batch_lengths = self.micro_batch_lengths
        batch.elem_counts_per_gb = self.elem_counts_per_gb
        return batch


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: SequencePackingArgs | None = None,
    dynamic_batching_args: DynamicBatchingArgs | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """One meta per data-parallel rank.

    Args:
        dp_world: Ranks that see different rows.
        batch_size: Rows of a global batch, which is cut on its own; None takes all.
        dynamic_batching_args: Sort rows by length into microbatches.

    Returns the metas in rank order, and the permutation with which `reorder_data` restores the caller's order of
    results joined in rank order; None when they are in order. Raises ValueError: there are no rows or no lengths, sizes
    do not divide, or both kinds of microbatches are asked for.
    """
    if not meta.size:
        raise ValueError(f"partition {meta.partition_id!r}: there are no rows to shard")
    if meta.sequence_lengths is None:
        raise ValueError(
            f"partition {meta.partition_id!r}: sharding needs sequence_lengths, one for each of the {meta.size} rows"
        )
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ValueError("sequence_packing_args and dynamic_batching_args exclude each other")
    width = batch_width(meta)
    plans = _plans(meta.sequence_lengths, width, dp_world, batch_size, sequence_packing_args, dynamic_batching_args)
    order = batch_sharding.permutation(plans)
    shards = [_shard(meta, plan, width) for plan in plans]
    return shards, None if order == list(range(meta.size)) else order


def _plans(
    lengths: Sequence[int],
    width: int,
    dp_world: int,
    batch_size: int | None,
    packing: SequencePackingArgs | None,
    dynamic: DynamicBatchingArgs | None,
) -> list[ShardPlan]:
    if packing is not None:
        return batch_sharding.plan_packed(
            lengths,
            dp_world,
            batch_size,
            max_tokens=packing["max_tokens_per_microbatch"],
            algorithm=packing["algorithm"],
            pad_multiple=packing["sequence_length_pad_multiple"],
            order=packing.get("microbatch_order", "packer"),
            prefixes=packing.get("prefixes"),
        )
    if dynamic is not None:
        return batch_sharding.plan_dynamic(
            lengths,
            dp_world,
            batch_size,
            max_tokens=dynamic["max_tokens_per_microbatch"],
            length_round=dynamic["sequence_length_round"],
            max_length=width,
        )
    return batch_sharding.plan_even(len(lengths), dp_world, batch_size)


def _shard(meta: KVBatchMeta, plan: ShardPlan, width: int) -> KVBatchMeta:
    shard = meta.subset(plan.rows)
    shard.extra_info[WIDTH] = width
    if plan.micro_batch_indices is not None:
        shard.extra_info |= {name: getattr(plan, name) for name in _PLAN}
    return shard
