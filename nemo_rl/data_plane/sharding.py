"""Plans which rows of the data plane go to which data-parallel rank, from lengths alone.

The driver plans once for all ranks, and each rank's meta carries its plan. Invariant: every rank has the same number of
microbatches per global batch; otherwise gradient collectives would hang.
"""

from __future__ import annotations

from nemo_rl.data_plane.column_io import batch_width
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed import batch_sharding
from nemo_rl.distributed.batch_sharding import DynamicBatchingArgs, SequencePackingArgs, ShardPlan

WIDTH = "global_forward_pad_seqlen"
PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
"""What a rank's meta carries in `extra_info`: the width of token columns, the same on every rank; and the fields of its
`ShardPlan`, where its microbatches are planned.
"""


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
    width = batch_width(meta)
    plans = batch_sharding.plan_shards(
        meta.sequence_lengths, dp_world, batch_size, sequence_packing_args, dynamic_batching_args, width=width
    )
    order = batch_sharding.permutation(plans)
    shards = [_shard(meta, plan, width) for plan in plans]
    return shards, None if order == list(range(meta.size)) else order


def _shard(meta: KVBatchMeta, plan: ShardPlan, width: int) -> KVBatchMeta:
    shard = meta.subset(plan.rows)
    shard.extra_info[WIDTH] = width
    if plan.micro_batch_indices is not None:
        shard.extra_info |= {name: getattr(plan, name) for name in PLAN}
    return shard
