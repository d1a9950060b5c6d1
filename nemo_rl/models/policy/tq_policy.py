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
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.data_plane.schema import (
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    pad_values,
    replayed_fields,
)
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import PendingCall
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.batches import chunk_rows, microbatch_arguments, prefixes_of, refuse_model_inputs
from nemo_rl.models.policy.interfaces import BatchHandle, Scores, StoredColumns, TrainResult
from nemo_rl.models.policy.lm_policy import Policy, submit_label
from nemo_rl.utils.timer import timed

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

    # -- rows ---------------------------------------------------------------------------------------------------------

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Declares the training partition."""
        self.dp_client.register_partition(
            self.tq_partition_id, DP_TRAIN_FIELDS, num_samples, ["prev_lp", "ref_lp", "train"], group_size
        )

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Declares the validation partition."""
        self.dp_client.register_partition(partition_id, [], num_samples, ["val"])

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

    def _score(self, method: str, data: BatchHandle, timer: Timer | None, **options: object) -> Scores:
        """See `Policy`; the results for a meta stay with its rows."""
        if not isinstance(data, KVBatchMeta):
            return super()._score(method, data, timer, **options)
        refuse_model_inputs(data.fields or ())
        columns = self._columns[method]
        present = set(data.fields or LP_SEED_FIELDS)
        replayed = replayed_fields(present, routes="logprobs" in columns)
        seed = data.only_fields([*(name for name in LP_SEED_FIELDS if name in present), *replayed])
        with timed(timer, f"{method}/shard_meta"):
            shards = self._shard_chunk_meta(seed, training=False)
        with timed(timer, submit_label(method)):
            self._run_sharded(f"{method}_presharded", shards, argument="meta", columns=columns, **options)
        return StoredColumns(columns)

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
        return self._submit_train_meta(meta, loss_fn, eval_mode, gbs, mbs, timer, train_fields).result()

    def _submit_train_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFunction,
        eval_mode: bool,
        gbs: int | None,
        mbs: int | None,
        timer: Timer | None,
        train_fields: Sequence[str] | None = None,
    ) -> PendingCall[TrainResult]:
        refuse_model_inputs(meta.fields or ())
        gbs, mbs = self._batch_sizes(meta.size, gbs, mbs)
        with timed(timer, "policy_training/shard_meta"):
            shards = self._shard_meta(
                meta.only_fields(train_fields or meta.fields or DP_TRAIN_FIELDS), gbs, training=True
            )
        with timed(timer, "policy_training/submit_training_futures"):
            future = self._call_sharded(
                "train_presharded", shards, argument="meta", loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs
            )
        return self._pending_training(future, training=not eval_mode)

    def submit_train(
        self,
        data: BatchHandle,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> PendingCall[TrainResult]:
        """See `Policy`; takes metas and batches."""
        if not isinstance(data, KVBatchMeta):
            return super().submit_train(data, loss_fn, eval_mode, gbs=gbs, mbs=mbs, timer=timer)
        return self._submit_train_meta(data, loss_fn, eval_mode, gbs, mbs, timer)

    def submit_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> PendingCall[None]:
        if not isinstance(data, KVBatchMeta):
            return super().submit_microbatches(data, timer)
        refuse_model_inputs(data.fields or ())
        with timed(timer, "policy_training/shard_meta"):
            shards = self._shard_chunk_meta(data.only_fields(data.fields or DP_TRAIN_FIELDS))
        with timed(timer, "policy_training/submit_microbatch_futures"):
            return self._submit_chunk("train_microbatches_presharded", shards, "meta")

    def begin_train_step_from_meta(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """NeMo-RL's name of `begin_train_step` on the data plane."""
        self.begin_train_step(loss_fn, gbs, mbs)

    def train_microbatches_from_meta(self, meta: KVBatchMeta, timer: Timer | None = None) -> None:
        """Adds a chunk of rows to the open step."""
        self.train_microbatches(meta, timer)

    train_microbatch_from_meta = train_microbatches_from_meta

    def finish_train_step_from_meta(self) -> TrainResult:
        """NeMo-RL's name of `finish_train_step` on the data plane."""
        return self.finish_train_step()

    def abort_train_step_from_meta(self) -> None:
        """NeMo-RL's name of `abort_train_step` on the data plane."""
        self.abort_train_step()

    def _shard_chunk_meta(self, meta: KVBatchMeta, *, training: bool = True) -> list[KVBatchMeta]:
        rows = chunk_rows(meta.sequence_lengths or [], self.data_parallel_size)
        if rows is None:
            return self._shard_meta(meta, None, training=training)
        return [
            self._shard_meta(meta.subset(own), None, training=training, ranks=1)[0] if own else meta.subset([])
            for own in rows
        ]

    def _shard_meta(
        self, meta: KVBatchMeta, batch_size: int | None, *, training: bool, ranks: int | None = None
    ) -> list[KVBatchMeta]:
        prefixes = prefixes_of(meta.common_tags()) if self.shares_prompts else None
        shards, _ = shard_meta_for_dp(
            meta,
            dp_world=ranks or self.data_parallel_size,
            batch_size=batch_size,
            **microbatch_arguments(self.cfg, training=training, prefixes=prefixes),
        )
        return shards

    def shutdown(self) -> bool:
        """Ends the workers, then the data plane."""
        clean = super().shutdown()
        if self._owns_client:
            self.dp_client.close()
        return clean
