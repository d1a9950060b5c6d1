"""A policy on the data plane: the driver sends references, workers fetch rows and write results back.

Same workers, plans and results as `Policy`. Owns the run's data plane. Invariant: no tensor with a token axis passes
the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.config import DataPlaneConfig, PolicyConfig
from nemo_rl.data_plane.column_io import read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.field_schema import (
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    pad_values,
    replayed_fields,
)
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.batches import (
    REPLAYS_ROUTES,
    CutToScore,
    Rows,
    chunk_rows,
    microbatch_arguments,
    prefixes_of,
    refuse_model_inputs,
)
from nemo_rl.models.policy.interfaces import BatchHandle, StoredColumns, TrainResult
from nemo_rl.models.policy.lm_policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.utils.timer import Timer

_PREVIOUS = {"logprobs": "prev_logprobs"}
_REFERENCE = {"reference_logprobs": "reference_policy_logprobs"}
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "get_logprobs": _PREVIOUS,
    "get_reference_policy_logprobs": _REFERENCE,
    "get_policy_and_reference_logprobs": _PREVIOUS | _REFERENCE,
    "get_naturally_routed_logprobs": {"naturally_routed_logprobs": "naturally_routed_logprobs"},
    "get_topk_logits": {"topk_logits": TOPK_LOGPROBS, "topk_indices": TOPK_IDS},
}
"""Where the results of each scoring method go."""


class StoredRows:
    """Rows on the data plane: workers fetch them, and store their results beside them.

    Args:
        columns: Where the results of each scoring method go.
    """

    suffix, argument = "_presharded", "meta"
    labels: tuple[str, str] = ("shard_meta", "shard_meta")

    def __init__(
        self,
        meta: KVBatchMeta,
        config: PolicyConfig,
        ranks: int,
        columns: Mapping[str, Mapping[str, str]],
        *,
        share: bool,
    ) -> None:
        refuse_model_inputs(meta.fields or ())
        self._meta, self._config, self._ranks, self._columns, self._share = meta, config, ranks, columns, share

    @property
    def size(self) -> int:
        return self._meta.size

    def cut(self, batch_size: int) -> Sequence[object]:
        return self._shard(self._trained, batch_size, self._ranks, training=True)

    def cut_chunk(self) -> Sequence[object]:
        return self._chunk(self._trained, training=True)

    def cut_to_score(self, method: str) -> CutToScore:
        columns = self._columns[method]
        present = set(self._meta.fields or LP_SEED_FIELDS)
        replayed = replayed_fields(present, routes=method in REPLAYS_ROUTES)
        seed = self._meta.only_fields([*(name for name in LP_SEED_FIELDS if name in present), *replayed])

        def stored(results: list[Any]) -> StoredColumns:
            return StoredColumns(columns)

        return CutToScore(self._chunk(seed, training=False), {"columns": columns}, stored)

    @property
    def _trained(self) -> KVBatchMeta:
        return self._meta.only_fields(self._meta.fields or DP_TRAIN_FIELDS)

    def _chunk(self, meta: KVBatchMeta, *, training: bool) -> list[KVBatchMeta]:
        rows = chunk_rows(meta.sequence_lengths or [], self._ranks)
        if rows is None:
            return self._shard(meta, None, self._ranks, training=training)
        return [
            self._shard(meta.subset(own), None, 1, training=training)[0] if own else meta.subset([]) for own in rows
        ]

    def _shard(self, meta: KVBatchMeta, batch_size: int | None, ranks: int, *, training: bool) -> list[KVBatchMeta]:
        prefixes = prefixes_of(meta.common_tags()) if self._share else None
        arguments = microbatch_arguments(self._config, training=training, prefixes=prefixes)
        return shard_meta_for_dp(meta, dp_world=ranks, batch_size=batch_size, **arguments)[0]


class TQPolicy(Policy):
    """A policy that takes metas; batches in this process work as with `Policy`.

    Args:
        tokenizer: Saved beside checkpoints; its padding fills token columns.
        dp_cfg: The `data_plane` section, enabled.
        client: Another policy's data plane, which this one uses and leaves open; None starts the run's.
        logprobs_column: Where `get_logprobs` of a meta goes.
        options: Of `Policy`.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dp_cfg: DataPlaneConfig,
        tq_partition_id: str = "train",
        client: DataPlaneClient | None = None,
        logprobs_column: str = "prev_logprobs",
        **options: Any,
    ) -> None:
        super().__init__(cluster, config, tokenizer, **options)
        self.dp_cfg = dp_cfg
        self.tq_partition_id = tq_partition_id
        self._attached = False
        self._owns_client = client is None
        self._columns = {**_COLUMNS, "get_logprobs": {"logprobs": logprobs_column}}
        try:
            self.dp_client = build_data_plane_client(dp_cfg, bootstrap=True) if client is None else client
        except BaseException:
            super().shutdown()
            raise

    def wait_until_started(self) -> None:
        """Waits for the workers, and attaches them."""
        super().wait_until_started()
        if not self._attached:
            self.worker_group.run("setup_data_plane", client=self.dp_client, pad_token_id=self._pad_token_id)
            self._attached = True

    @property
    def _pad_token_id(self) -> int:
        return int(getattr(self.tokenizer, "pad_token_id", 0) or 0)

    def _rows(self, data: BatchHandle) -> Rows:
        if not isinstance(data, KVBatchMeta):
            return super()._rows(data)
        return StoredRows(data, self.cfg, self.data_parallel_size, self._columns, share=self.shares_prompts)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def finish_step(self, meta: KVBatchMeta) -> None:
        """Clears a meta's rows."""
        self.discard_samples(meta.sample_ids, meta.partition_id)

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Clears rows."""
        self.dp_client.clear_samples(list(sample_ids), partition_id)

    def read_from_dataplane(
        self, meta: KVBatchMeta, *, select_fields: Sequence[str], pad_value_dict: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """Columns of a meta's rows, in this process."""
        return read_columns(
            self.dp_client, meta, select_fields, pad_value_dict=pad_value_dict or pad_values(self._pad_token_id)
        )

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, object]) -> None:
        """Adds columns from this process."""
        write_columns(self.dp_client, meta, fields)

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def get_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `prev_logprobs`, or the one that this policy was made with."""
        self._score("get_logprobs", meta, timer, micro_batch_size=micro_batch_size)

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Adds the column `reference_policy_logprobs`."""
        self._score("get_reference_policy_logprobs", meta, timer, micro_batch_size=micro_batch_size)

    # -- training -----------------------------------------------------------------------------------------------------

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        train_fields: Sequence[str] | None = None,
    ) -> TrainResult:
        """`train` on rows of the data plane.

        Args:
            gbs: Samples of an optimizer step.
            mbs: Samples of a microbatch, unless the configuration packs.
            train_fields: Columns that workers fetch; by default those the meta names, or else all that training may
                need.

        Raises ValueError: the rows do not divide into global batches; UnsupportedColumnsError: they have inputs of the
        model that the backend does not take; WorkerError: a worker failed.
        """
        refuse_model_inputs(meta.fields or ())
        rows = meta.only_fields(train_fields) if train_fields else meta
        return self.train(rows, loss_fn, eval_mode, gbs=gbs, mbs=mbs, timer=timer)

    def train_microbatches_from_meta(self, meta: KVBatchMeta, timer: Timer | None = None) -> None:
        """Adds a chunk of rows to the open step."""
        self.train_microbatches(meta, timer)

    train_microbatch_from_meta = train_microbatches_from_meta

    def shutdown(self) -> bool:
        """Ends the workers, then the data plane."""
        clean = super().shutdown()
        if self._owns_client:
            self.dp_client.close()
        return clean
