"""One rank of a policy on the DTensor backend: the Ray actor's class.

Ties loading, scoring, training steps, residency, weight export and checkpoints of one rank together and exposes them
as methods that take plain values. Which ranks are called with what is the policy's business. Invariant: every method
that is collective is called on all ranks in the same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.distributed.devices import CPU, CUDA, device_name, device_uuid, free_memory, memory_in_use, synchronize
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoint import CheckpointWriter, load_optimizer
from nemo_rl.models.dtensor.export import full_weights, tensor_metas
from nemo_rl.models.dtensor.load import load_scorer
from nemo_rl.models.dtensor.mesh import ParallelMesh, parallel_sizes
from nemo_rl.models.dtensor.model_config import compute_dtype
from nemo_rl.models.dtensor.residency import ReferenceWeights, move_model, move_optimizer, release
from nemo_rl.models.dtensor.scoring import LogitTransform
from nemo_rl.models.policy.optimizer import build_optimizer, build_scheduler
from nemo_rl.models.policy.train_step import StepResult, TrainStep
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture
from nemo_rl.weight_sync.cache import CACHE_OWNER, CacheBuilder, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sender import SendSpec, WeightSender

logger = logging.getLogger(__name__)

_STAGING_SHARE = 0.3


class DTensorPolicyWorker(TQWorkerMixin):
    """One rank.

    Args:
        cfg: The policy section.
        init_optimizer: Whether this policy trains.
        init_reference_model: Whether a copy of the initial weights is kept.
        weights_path: Checkpoint weights to start from.
        optimizer_path: Checkpoint optimizer state to start from.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        *,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
    ) -> None:
        self.cfg = cfg
        torch.manual_seed(0)
        if not torch.cuda.is_available():
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        parallel = cfg.dtensor_cfg
        sizes = parallel_sizes(
            int(os.environ["WORLD_SIZE"]),
            tp=parallel.tensor_parallel_size,
            cp=parallel.context_parallel_size,
            dp_replicate=parallel.dp_replicate_size,
            ep=parallel.expert_parallel_size,
        )
        self.mesh = ParallelMesh(sizes, CUDA if torch.cuda.is_available() else CPU)
        self.scorer = load_scorer(cfg, self.mesh, weights_path=None if init_reference_model else weights_path)
        # The reference is the model the run started from, also when the policy resumes from a checkpoint.
        self.reference = ReferenceWeights(self.scorer) if init_reference_model else None
        if init_reference_model and weights_path is not None:
            self.scorer = load_scorer(cfg, self.mesh, weights_path=weights_path)
        self.optimizer = build_optimizer(cfg.optimizer, self.scorer.parameters()) if init_optimizer and cfg.optimizer is not None else None
        self.scheduler = build_scheduler(cfg.scheduler, self.optimizer) if self.optimizer is not None else None
        if self.optimizer is not None and optimizer_path is not None:
            load_optimizer(self.scorer, self.optimizer, self.scheduler, optimizer_path)
        self.backend = DTensorBackend(
            self.scorer,
            self.mesh,
            self._transform(),
            self.optimizer,
            defer_gradient_sync=parallel.defer_fsdp_grad_sync,
            clear_cache_every=parallel.clear_cache_every_n_steps,
        )
        self.step = TrainStep(self.backend)
        self.writer = CheckpointWriter(self.mesh)
        self._mbs = cfg.train_micro_batch_size
        self._sender: WeightSender | None = None
        self._cache: CacheBuilder | None = None

    def _transform(self) -> LogitTransform:
        generation, model = self.cfg.generation, self.scorer.lm.config
        scaling = getattr(model, "logits_scaling", None)
        return LogitTransform(
            generation.temperature or 1.0,
            generation.top_p,
            generation.top_k,
            getattr(model, "final_logit_softcapping", None),
            getattr(model, "logit_scale", None) or (1.0 / scaling if scaling else 1.0),
        )

    def describe(self) -> dict[str, Any]:
        """Device identity and name of this rank, and the model's sizes (None where its configuration does not say)."""
        try:
            shape = TransformerShape.from_hf_config(self.scorer.lm.config)
        except UnknownArchitecture as error:
            logger.warning("flops=unknown reason=%s", error)
            shape = None
        device = self.mesh.device
        return {"device": device_uuid(device), "device_name": device_name(device), "rank": self.mesh.rank, "pid": os.getpid(), "shape": shape}

    def _local_coords(self) -> dict[str, int]:
        return self.mesh.coordinates()

    def _make_replica_group(self) -> torch.distributed.ProcessGroup | None:
        return self.mesh.make_replica_group()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _microbatches(self, data: BatchedDataDict[Any], size: int) -> tuple[Iterator[BatchedDataDict[Any]], int]:
        if self.cfg.dynamic_batching.enabled:
            return data.make_microbatch_iterator_with_dynamic_shapes(), data.make_microbatch_iterator_with_dynamic_shapes_len()
        if self.cfg.sequence_packing.enabled:
            return data.make_microbatch_iterator_for_packable_sequences(), data.make_microbatch_iterator_for_packable_sequences_len()
        return data.make_microbatch_iterator(size), data.size // size

    def _score(self, data: BatchedDataDict[Any], micro_batch_size: int | None, *, filtered: bool) -> torch.Tensor:
        batches, count = self._microbatches(data, min(micro_batch_size or self.cfg.logprob_batch_size, data.size))
        width = data["input_ids"].shape[1]
        rows = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (self.backend.logprobs(batch, filtered=filtered) for batch in batches)]
        for _ in range(self.backend.max_over_data(count) - count):
            self.backend.logprobs(data.slice(0, 1), filtered=filtered)
        self.scorer.reshard()
        return torch.cat(rows)

    def get_logprobs(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """`logprobs [B, S]` under the current weights."""
        return BatchedDataDict({"logprobs": self._score(data, micro_batch_size, filtered=True)})

    def get_reference_policy_logprobs(self, data: BatchedDataDict[Any], micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """`reference_logprobs [B, S]` under the initial weights.

        Raises:
            RuntimeError: No reference was kept.
        """
        if self.reference is None:
            raise RuntimeError("this policy keeps no reference weights (init_reference_model=False)")
        with self.reference.swapped_in(self.scorer):
            return BatchedDataDict({"reference_logprobs": self._score(data, micro_batch_size, filtered=False)})

    def get_topk_logits(self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        """`topk_logits` and `topk_indices`, [B, S, k]."""
        batches, _ = self._microbatches(data, min(micro_batch_size or self.cfg.logprob_batch_size, data.size))
        width = data["input_ids"].shape[1]
        parts = [self.backend.topk_logits(batch, k) for batch in batches]
        self.scorer.reshard()
        values, indices = (torch.cat([torch.nn.functional.pad(p[which], (0, 0, 0, width - p[which].shape[1])) for p in parts]) for which in (0, 1))
        return BatchedDataDict({"topk_logits": values, "topk_indices": indices})

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, data: SlicedDataDict[Any], loss_fn: LossFunction, *, eval_mode: bool, gbs: int, mbs: int) -> dict[str, Any]:
        """One step per local global-batch part; `gbs` counts samples over all data-parallel ranks."""
        local = gbs // self.mesh.sizes.dp
        results: list[StepResult] = []
        rates = self._rates()
        # A packed shard may hold more or fewer rows than its equal part of a global batch; its plan says how many batches there are.
        steps = data.size // local if data.elem_counts_per_gb is None else len(data.elem_counts_per_gb)
        for index in range(steps):
            batch = data.get_batch(index, local)
            if eval_mode:
                results.append(self._evaluate(batch, loss_fn, mbs))
                continue
            self.begin_train_step(loss_fn, mbs=mbs)
            self.train_microbatches(batch)
            results.append(self.step.finish(self.cfg.max_grad_norm))
        if not eval_mode:
            self._step_scheduler()
        return self._report(results, rates)

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step."""
        self._mbs = mbs or self.cfg.train_micro_batch_size
        self.step.begin(loss_fn)

    def train_microbatches(self, data: BatchedDataDict[Any]) -> None:
        """Adds one chunk of samples to the open step."""
        batches, count = self._microbatches(data, min(self._mbs, data.size))
        self.step.microbatches(batches, count)

    def finish_train_step(self) -> dict[str, Any]:
        """Steps the optimizer and the schedule."""
        rates = self._rates()
        result = self.step.finish(self.cfg.max_grad_norm)
        self._step_scheduler()
        return self._report([result], rates)

    def abort_train_step(self) -> None:
        """Closes an open step without stepping."""
        self.step.abort()

    @torch.no_grad()
    def _evaluate(self, batch: BatchedDataDict[Any], loss_fn: LossFunction, mbs: int) -> StepResult:
        from nemo_rl.loss.normalization import count_valid, normalize_metrics

        self.scorer.eval()
        counts = torch.stack(count_valid(batch)).to(self.mesh.device)
        counts = self.mesh.sum_over_data(counts).tolist()
        batches, count = self._microbatches(batch, min(mbs, batch.size))
        sums = [self.backend.evaluate(part, loss_fn).metrics for part in batches]
        for _ in range(self.backend.max_over_data(count) - count):
            self.backend.evaluate(batch.slice(0, 1), loss_fn)
        self.scorer.reshard()
        metrics = {
            name: [float(v) for v in values]
            for name, values in normalize_metrics({n: torch.stack([s[n].double() for s in sums]) for n in sums[0]}, loss_fn, *counts).items()
        }
        loss = self.mesh.sum_over_data(torch.tensor(sum(metrics["loss"]), dtype=torch.float64, device=self.mesh.device))
        return StepResult(float(loss), 0.0, metrics, *counts)

    def _rates(self) -> dict[str, float]:
        if self.optimizer is None:
            return {}
        group = self.optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "wd": float(group.get("weight_decay", 0.0))}

    def _step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _report(self, results: Sequence[StepResult], rates: dict[str, float]) -> dict[str, Any]:
        metrics: dict[str, list[float]] = {}
        for result in results:
            for name, values in result.metrics.items():
                metrics.setdefault(name, []).extend(values)
        metrics["global_valid_seqs"] = [result.valid_seqs for result in results]
        metrics["global_valid_toks"] = [result.valid_toks for result in results]
        return {
            "loss": [result.loss for result in results],
            "grad_norm": results[-1].grad_norm if results else 0.0,
            "all_mb_metrics": metrics,
            "num_steps": len(results),
            **rates,
        }

    # -- residency ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Model and optimizer on the device."""
        self._to_device(with_optimizer=True)

    def prepare_for_lp_inference(self) -> None:
        """Model on the device; the optimizer too unless `policy.offload_optimizer_for_logprob`."""
        self._to_device(with_optimizer=not self.cfg.offload_optimizer_for_logprob)
        if self.cfg.offload_optimizer_for_logprob:
            move_optimizer(self.optimizer, torch.device("cpu"))

    def _to_device(self, *, with_optimizer: bool) -> None:
        if not self.cfg.dtensor_cfg.cpu_offload:
            move_model(self.scorer, self.mesh.device)
            if with_optimizer:
                move_optimizer(self.optimizer, self.mesh.device)

    def offload_optimizer(self) -> None:
        """Optimizer state to the host, freed memory given back."""
        move_optimizer(self.optimizer, torch.device("cpu"))
        release(self.mesh.device)

    def offload_model(self) -> None:
        """Model to the host, freed memory given back."""
        move_model(self.scorer, torch.device("cpu"))
        release(self.mesh.device)

    def release_cached_memory(self) -> None:
        """Gives cached memory back without moving anything."""
        release(self.mesh.device)

    def free_memory(self) -> int:
        """Bytes free on this rank's device."""
        return free_memory(self.mesh.device)

    def memory_in_use(self) -> int:
        """Bytes in use on this rank's device."""
        return memory_in_use(self.mesh.device)

    # -- weight export ------------------------------------------------------------------------------------------------

    def _export_dtype(self) -> torch.dtype:
        return compute_dtype(self.cfg.precision)

    def tensor_metas(self) -> list[TensorMeta]:
        """What an export yields, in order."""
        return tensor_metas(self.scorer, self._export_dtype())

    def staging_budget(self) -> int:
        """Bytes this rank may spend on one staging window (there are two)."""
        if self.cfg.refit_buffer_size_gb is not None:
            return int(self.cfg.refit_buffer_size_gb * (1 << 30))
        return int(_STAGING_SHARE * free_memory(self.mesh.device) / 2)

    def begin_export(self, spec: SendSpec) -> None:
        """Starts a session's export on this rank."""
        self.close_export()
        weights = full_weights(self.scorer, self._export_dtype(), self.mesh.device)
        self._sender = WeightSender(spec, weights, self.mesh.device, source=self.mesh.rank)

    def build_cpu_bucket_cache(self, step: int, bucket_bytes: int, served: str | None = None) -> CacheManifest | None:
        """Packs the current weights as version `step` into host memory on the first rank; every rank takes part in the export.

        Args:
            step: The version.
            bucket_bytes: Size of a bucket.
            served: Path of the buffer that sessions read, which stays as it is; None before the first.

        Returns:
            What the cache holds, from the rank that owns it.
        """
        weights = full_weights(self.scorer, self._export_dtype(), self.mesh.device)
        if self.mesh.rank != 0:
            for _ in weights:
                pass
            return None
        if self._cache is None:
            self._cache = CacheBuilder(bucket_bytes, self.mesh.device)
        return self._cache.build(step, self.tensor_metas(), weights, served=served)

    def begin_cached_export(self, spec: SendSpec, manifest: CacheManifest) -> None:
        """Starts a session that sends a built version from this rank."""
        self.close_export()
        self._sender = WeightSender(spec, iter(manifest.weights()), self.mesh.device, source=CACHE_OWNER)

    def export_window(self, index: int) -> dict[str, Any] | None:
        """Packs and publishes one window."""
        return self._open_sender().export_window(index)

    def send_window(self, index: int) -> None:
        """Pushes one window where the transport pushes."""
        self._open_sender().send_window(index)

    def _open_sender(self) -> WeightSender:
        if self._sender is None:
            raise RuntimeError("no weight export is open on this rank")
        return self._sender

    def close_export(self) -> None:
        """Ends an open export; nothing to do when there is none."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None, save_format: str = "safetensors") -> None:
        """Snapshots weights and optimizer; files follow in the background."""
        self.writer.wait()
        self.writer.save_weights(self.scorer, weights_path, dtype_in_config=self._export_dtype(), save_format=save_format)
        if optimizer_path is not None and self.optimizer is not None:
            self.writer.save_optimizer(self.scorer, self.optimizer, self.scheduler, optimizer_path)

    def checkpoint_written(self) -> bool:
        """Whether the files of the last snapshot are written; asked again and again, so that training goes on meanwhile."""
        return self.writer.poll()

    def weight_checksums(self) -> dict[str, str]:
        """A digest of every full weight, equal on every rank; for tests of exact equality."""
        import hashlib

        return {
            name: hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest() for name, tensor in full_weights(self.scorer, None, self.mesh.device)
        }

    def shutdown(self) -> None:
        """Leaves the data plane and the process groups."""
        self.writer.wait()
        if self._cache is not None:
            self._cache.close()
        self.close_data_plane()
        synchronize(self.mesh.device)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
