"""A language-model policy over a group of workers, one per accelerator slot.

Shards batches over data-parallel ranks (plainly, by dynamic batching or by packing) and gathers the results.
`PolicyWeights` has residency and exports. Invariant: rows are returned in the given order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.nsight_variables import POLICY_WORKERS, Profile
from nemo_rl.config.world_sizes import parallel_sizes, training_backend
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import (
    MultiWorkerFuture,
    PendingCall,
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerTimeoutError,
    wait_for_workers,
)
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.batches import InProcessRows, Rows, shares_prompts
from nemo_rl.models.policy.interfaces import BatchHandle, PolicyInterface, Scores, TrainResult
from nemo_rl.models.policy.weights import PolicyWeights
from nemo_rl.utils.flops import TransformerShape, Work, peak_tflops
from nemo_rl.utils.record_events import PolicyStarted
from nemo_rl.utils.timer import timed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.utils.timer import Timer

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.models.policy.policy_worker.PolicyWorker"
_AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
_REPLICAS = ("pipeline_parallel", "context_parallel", "tensor_parallel")
_SAVE_TIMEOUT_S = 1800.0
_SAVE_POLL_S = 0.1
_PROFILE_S = 60.0


def start_policy_actors(
    cluster: RayVirtualCluster,
    config: PolicyConfig,
    name_prefix: str = POLICY_WORKERS,
    *,
    init_optimizer: bool = True,
    weights_path: str | None = None,
    optimizer_path: str | None = None,
    steps_done: int = 0,
    init_reference_model: bool = True,
    worker_extension_cls_fqn: str | None = None,
    bundle_indices_list: Sequence[tuple[int, list[int]]] | None = None,
    profile: Profile | None = None,
) -> RayWorkerGroup:
    """Starts the actors of a policy, which import their libraries and touch no accelerator until they become a
    `Policy`.

    Args:
        cluster: Slots; all of them, unless `bundle_indices_list` names some (overlapping placement).
        weights_path: Checkpoint weights to start from.
        optimizer_path: Checkpoint optimizer state to start from.
        steps_done: Steps behind the weights, for a start without optimizer state.
        init_reference_model: Whether the initial weights are kept for reference log-probabilities.
        worker_extension_cls_fqn: Dotted name of a worker class to use instead of `PolicyWorker`.
        bundle_indices_list: Slots to use, as `(node_rank, [bundle])`.
        profile: Which workers start under Nsight Systems; none by default.
    """
    world = cluster.world_size() if bundle_indices_list is None else len(bundle_indices_list)
    builder = RayWorkerBuilder(
        worker_extension_cls_fqn or WORKER,
        config,
        init_optimizer=init_optimizer,
        init_reference_model=init_reference_model,
        weights_path=weights_path,
        optimizer_path=optimizer_path,
        steps_done=steps_done,
    )
    return RayWorkerGroup(
        cluster,
        builder,
        name_prefix=name_prefix,
        bundle_indices_list=bundle_indices_list,
        sharding_annotations=_rank_grid(config, world),
        env_vars=dict(training_backend(config).env_vars or {}),
        profile=profile,
    )


class Policy(PolicyWeights, PolicyInterface):
    """A policy on the slots of a cluster. `actors`: what `start_policy_actors` started; by default it is called here,
    with `options`. `last_step`: of the run, at which schedules end that have no length of their own.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        actors: RayWorkerGroup | None = None,
        last_step: int | None = None,
        **options: Any,
    ) -> None:
        self.cfg = config
        self.tokenizer = tokenizer
        self.shares_prompts = shares_prompts(config, cuda=cluster.accelerator.is_cuda)
        workers = actors or start_policy_actors(cluster, config, **options)
        self.sharding_annotations = workers.sharding_annotations
        super().__init__(workers, cluster)
        self._building = workers.run_all_workers_single_data("build", last_step=last_step)
        self._devices: list[str] | None = None
        self.started: PolicyStarted | None = None
        self.device_name = ""
        self._shape: TransformerShape | None = None

    def wait_until_started(self) -> None:
        """Waits until every worker has loaded its model. Raises WorkerError: a worker could not start, e.g. because the
        model does not exist.
        """
        if self._devices is None:
            self.worker_group.get_all_worker_results(self._building)
            answers = self.worker_group.run("describe")
            self._devices = [answer["device"] for answer in answers]
            self.device_name = answers[0]["device_name"]
            self._shape = answers[0]["shape"]
            self.started = PolicyStarted(answers[0]["backend"], answers[0]["kernels"], len(answers))
            logger.info("policy=started backend=%s kernels=%s", self.started.backend, self.started.kernels)

    def submit_warm_up(self, loss_fn: LossFunction) -> PendingCall[float]:
        """Compiles the first step's code in the background; the result is the seconds of the slowest worker. `loss_fn`:
        the clipped policy-gradient loss.
        """
        future = self.worker_group.run_all_workers_single_data("warm_up", loss_fn=loss_fn)
        return PendingCall(self.worker_group, future, max, on_error=lambda: None)

    def devices(self) -> list[str]:
        self.wait_until_started()
        return list(self._devices or [])

    def profile(self, on: bool) -> None:
        """Starts or stops recording in the workers that run under Nsight Systems; stopping writes the profile. Raises
        WorkerError: a worker failed.
        """
        group = self.worker_group
        refs = [group.run_single_worker_single_data("profile", rank, on=on) for rank in group.profiled]
        wait_for_workers(
            refs, [group.identities[rank] for rank in group.profiled], what="policy.profile", timeout_s=_PROFILE_S
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.sharding_annotations.get_axis_size("data_parallel")

    # -- sharding -----------------------------------------------------------------------------------------------------

    def _rows(self, data: BatchHandle) -> Rows:
        """How the rows of a handle reach the workers; the one place that tells its kinds apart."""
        if not isinstance(data, BatchedDataDict):
            raise TypeError(
                f"a policy without data plane takes batches, got a reference to {data.size} rows; see TQPolicy"
            )
        return InProcessRows(data, self.cfg, self.data_parallel_size, share=self.shares_prompts)

    def _call_sharded(
        self, method: str, shards: Sequence[object], *, argument: str = "data", **common: object
    ) -> MultiWorkerFuture:
        return self.worker_group.run_all_workers_sharded_data(
            method,
            in_sharded_axes=("data_parallel",),
            replicate_on_axes=_REPLICAS,
            output_is_replicated=_REPLICAS,
            common_kwargs=common,
            **{argument: list(shards)},
        )

    def _run_sharded(
        self, method: str, shards: Sequence[object], *, argument: str = "data", **common: object
    ) -> list[Any]:
        return self.worker_group.get_all_worker_results(self._call_sharded(method, shards, argument=argument, **common))

    def _score(self, method: str, data: BatchHandle, timer: Timer | None, **options: Any) -> Scores:
        rows = self._rows(data)
        with timed(timer, f"{method}/{rows.labels[1]}"):
            cut = rows.cut_to_score(method)
        # As in NeMo-RL's dashboards.
        reference = "reference_policy_" if method == "get_reference_policy_logprobs" else ""
        with timed(timer, f"{method}/submit_{reference}logprob_futures"):
            results = self._run_sharded(
                method + rows.suffix, cut.shards, argument=rows.argument, **cut.arguments, **options
            )
        return cut.scores(results)

    def get_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        """`logprobs [B, S]` under the current weights."""
        return self._score("get_logprobs", data, timer)

    def get_reference_policy_logprobs(
        self, data: BatchHandle, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores:
        """`reference_logprobs [B, S]` under the initial weights."""
        return self._score("get_reference_policy_logprobs", data, timer, micro_batch_size=micro_batch_size)

    def get_policy_and_reference_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        """`logprobs` and `reference_logprobs`, [B, S] each, of the same microbatches."""
        return self._score("get_policy_and_reference_logprobs", data, timer)

    def get_naturally_routed_logprobs(self, data: BatchHandle, timer: Timer | None = None) -> Scores:
        """`naturally_routed_logprobs [B, S]` under the current weights, whose routers choose for themselves."""
        return self._score("get_naturally_routed_logprobs", data, timer)

    def get_topk_logits(
        self, data: BatchHandle, k: int, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Scores:
        """`topk_indices` [B, S, k], the k most likely tokens after each position before generation's filters, and
        `topk_logits`, as log-probabilities.
        """
        return self._score("get_topk_logits", data, timer, k=k, micro_batch_size=micro_batch_size)

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchHandle,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainResult:
        """`submit_train` and its result. Raises WorkerError: a worker failed; a step whose loss is not finite names the
        samples.
        """
        return self.submit_train(data, loss_fn, eval_mode, gbs=gbs, mbs=mbs, timer=timer).result()

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
        """Sends a batch to the workers for training: one optimizer step per global batch. Returns at once. `eval_mode`:
        compute losses only. `gbs`, `mbs`: samples of an optimizer step and of a microbatch; by default as configured.

        Raises ValueError: the batch does not divide into global batches over the data-parallel ranks;
        UnsupportedColumnsError: it has inputs of the model that the backend does not take.
        """
        rows = self._rows(data)
        gbs, mbs = self._batch_sizes(rows.size, gbs, mbs)
        with timed(timer, f"policy_training/{rows.labels[0]}"):
            shards = rows.cut(gbs)
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs}
        with timed(timer, "policy_training/submit_training_futures"):
            future = self._call_sharded("train" + rows.suffix, shards, argument=rows.argument, **options)
        report = partial(self._aggregate, training=not eval_mode)
        return PendingCall(self.worker_group, future, report, on_error=lambda: None)

    def _batch_sizes(self, samples: int, gbs: int | None, mbs: int | None) -> tuple[int, int]:
        gbs = gbs or self.cfg.train_global_batch_size
        if samples % gbs:
            raise ValueError(
                f"{samples} samples do not divide into global batches of policy.train_global_batch_size={gbs}"
            )
        return gbs, mbs or self.cfg.train_micro_batch_size

    def _add_flops(self, result: TrainResult, work: Work, *, training: bool) -> None:
        """Adds the operations that the ranks computed and the devices' peak, where both are known."""
        if self._shape is None:
            return
        megatron = self.cfg.megatron_cfg
        ahead = megatron.mtp_num_layers if megatron.enabled else 0
        result["total_flops"] = self._shape.train_flops(work, ahead) if training else self._shape.forward_flops(work)
        peak = peak_tflops(self.device_name, self.cfg.precision) if self.device_name not in ("", "cpu") else None
        if peak is not None:
            result["theoretical_tflops"] = peak * self.worker_group.world_size

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step on every worker. Raises WorkerError: a step is open already."""
        self.worker_group.run("begin_train_step", loss_fn=loss_fn, gbs=gbs, mbs=mbs)

    def submit_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> PendingCall[None]:
        """`train_microbatches` without waiting."""
        rows = self._rows(data)
        with timed(timer, f"policy_training/{rows.labels[0]}"):
            shards = rows.cut_chunk()
        with timed(timer, "policy_training/submit_microbatch_futures"):
            future = self._call_sharded("train_microbatches" + rows.suffix, shards, argument=rows.argument)
        return PendingCall(self.worker_group, future, lambda _: None, on_error=self._abandon_step)

    def train_microbatches(self, data: BatchHandle, timer: Timer | None = None) -> None:
        """Adds a chunk of any number of samples to the open step. Raises WorkerError: a worker failed; the step is
        closed on all of them.
        """
        self.submit_microbatches(data, timer).result()

    def train_microbatch(self, data: BatchHandle, timer: Timer | None = None) -> None:
        """NeMo-RL's name of `train_microbatches`."""
        self.train_microbatches(data, timer)

    def submit_finish_train_step(self) -> PendingCall[TrainResult]:
        """`finish_train_step` without waiting."""
        future = self.worker_group.run_all_workers_sharded_data(
            "finish_train_step", replicate_on_axes=_AXES, output_is_replicated=_REPLICAS
        )
        report = partial(self._aggregate, training=True)
        return PendingCall(self.worker_group, future, report, on_error=self._abandon_step)

    def finish_train_step(self) -> TrainResult:
        """Steps the optimizer once for everything since `begin_train_step`. Raises WorkerError: a worker failed, or the
        step is not finite; it is closed, and the weights are as before.
        """
        return self.submit_finish_train_step().result()

    def abort_train_step(self) -> None:
        """Closes an open step without changing the weights."""
        self.worker_group.run("abort_train_step")

    def _abandon_step(self) -> None:
        """Closes the step behind a failed call on every worker that still answers. It does not wait: a worker may hang
        in a collective with the one that failed until that collective's own deadline.
        """
        self.worker_group.run_all_workers_single_data("abort_train_step")

    def _aggregate(self, results: Sequence[dict[str, Any]], *, training: bool) -> TrainResult:
        metrics: dict[str, list[float]] = {}
        for index, result in enumerate(results):
            for name, values in result["all_mb_metrics"].items():
                # Global counts are the same on every rank already.
                if index == 0 or not name.startswith("global_valid_"):
                    metrics.setdefault(name, []).extend(values)
        first = results[0]
        result = cast(
            TrainResult,
            {
                "loss": torch.tensor(first["loss"], dtype=torch.float32),
                "grad_norm": first["grad_norm"],
                "all_mb_metrics": metrics,
                "num_ranks": self.worker_group.world_size,
                "skipped_steps": first["skipped_steps"],
                **{key: first[key] for key in ("lr", "wd") if key in first},
            },
        )
        self._add_flops(result, sum((part["work"] for part in results), start=Work()), training=training)
        return result

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        save_format: str = "safetensors",
    ) -> None:
        """Snapshots the policy; the files are complete after `finalize_async_save`."""
        self.worker_group.run(
            "save_checkpoint", weights_path=weights_path, optimizer_path=optimizer_path, save_format=save_format
        )
        # The weights directory is a whole Hugging Face model: it carries the tokenizer too.
        for path in (tokenizer_path, weights_path):
            if path is not None and self.tokenizer is not None:
                self.tokenizer.save_pretrained(path)

    def finalize_async_save(self) -> None:
        """Waits until the last snapshot is on disk. Raises WorkerError: the disk is full or the directory cannot be
        written; WorkerTimeoutError: the files are not complete after half an hour.
        """
        deadline = time.monotonic() + _SAVE_TIMEOUT_S
        while not all(self.worker_group.run("checkpoint_written")):
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"{self.worker_group.name_prefix}: the checkpoint is not on disk after {_SAVE_TIMEOUT_S:.0f} s"
                )
            time.sleep(_SAVE_POLL_S)

    def shutdown(self) -> bool:
        """Ends the workers; those that still load their model, at once: what they hold ends with them."""
        return self.worker_group.shutdown(cleanup_method="shutdown", force=self._devices is None)


def _rank_grid(config: PolicyConfig, world: int) -> NamedSharding:
    sizes = parallel_sizes(config, world)
    return NamedSharding(np.arange(world).reshape(sizes.pp, sizes.dp, sizes.cp, sizes.tp), _AXES)
