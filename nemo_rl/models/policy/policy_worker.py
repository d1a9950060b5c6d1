"""Ray actor class of one rank of a policy, for both backends.

Cuts rows into microbatches, runs steps and scoring on a `Backend`, and opens weight exports and caches; its methods
take plain values. Invariant: collective methods are called on all ranks in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import parallel_sizes
from nemo_rl.data_plane.field_schema import SAMPLING_MASK_FIELDS
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.distributed.devices import (
    device_name,
    device_of_process,
    device_uuid,
    free_memory,
    keep_to_slot,
    memory_in_use,
    release_cached_memory,
    synchronize,
    total_memory,
)
from nemo_rl.distributed.nsight import capture
from nemo_rl.distributed.processes import keep_living
from nemo_rl.loss.interfaces import LossFunction, count_valid, normalize_metrics
from nemo_rl.models.policy.backend import BackendOptions, backend_spec
from nemo_rl.models.policy.batches import RECORDED, microbatches, without_routes
from nemo_rl.models.policy.memory_estimate import explained, row_tokens
from nemo_rl.models.policy.model_config import compute_dtype
from nemo_rl.models.policy.train_step import (
    StepResult,
    TrainStep,
    TrainStepStateError,
    step_report,
    total_work,
)
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture
from nemo_rl.utils.route_trace import route_trace
from nemo_rl.weight_sync.cache import CACHE_OWNER, CacheBuilder, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sender import SendSpec, WeightSender, check_room
from nemo_rl.weight_sync.transports import KeptGroup

if TYPE_CHECKING:
    from nemo_rl.weight_sync.transports import Published

logger = logging.getLogger(__name__)

_STAGING_SHARE = 0.3


class PolicyWorker(TQWorkerMixin):
    """One rank. The constructor only imports; `build` makes it usable. `options`: of `BackendOptions`."""

    def __init__(self, cfg: PolicyConfig, **options: Any) -> None:
        self.cfg = cfg
        self._options = BackendOptions(**options)
        self._mbs = cfg.train_micro_batch_size
        self._sender: WeightSender | None = None
        self._groups = KeptGroup()
        self._cache: CacheBuilder | None = None
        self._has_stepped = False
        backend_spec(cfg).load()

    def build(self, last_step: int | None = None) -> None:
        """Loads the model onto the accelerator. Collective.

        Args:
            last_step: Of the run, if there is one.

        Raises ModelNotFoundError: there is no such model; CheckpointMismatchError: the checkpoint is of another model
        or optimizer; KernelUnavailableError: a kernel that is asked for does not run here.
        """
        prepare_process()
        compiled = keep_compiled() if torch.cuda.is_available() else "none"
        spec, sizes = backend_spec(self.cfg), parallel_sizes(self.cfg, int(os.environ["WORLD_SIZE"]))
        self.backend = spec.build(self.cfg, sizes, replace(self._options, last_step=last_step))
        self.step = TrainStep(self.backend)
        keep_living()
        if self.backend.rank == 0:
            kernels = self.backend.kernels()
            logger.info("backend=%s kernels=%s sizes=%s compiled_code=%s", spec.name, kernels, sizes, compiled)

    def describe(self) -> dict[str, object]:
        """This rank's device identity and name, its backend and kernels, and the model's sizes (None if unknown)."""
        try:
            shape = TransformerShape.from_hf_config(self.backend.model_config)
        except UnknownArchitecture as error:
            logger.warning("flops=unknown reason=%s", error)
            shape = None
        device = self.backend.device
        return {
            "device": device_uuid(device),
            "device_name": device_name(device),
            "rank": self.backend.rank,
            "pid": os.getpid(),
            "shape": shape,
            "backend": backend_spec(self.cfg).name,
            "kernels": self.backend.kernels(),
        }

    def device_bytes(self) -> int:
        """Memory of this rank's device in bytes, of which nothing is taken."""
        return total_memory(device_of_process())

    def warm_up(self, loss_fn: LossFunction) -> float:
        """Compiles the first step's code; returns the seconds that it took, 0 if nothing is compiled. Collective.
        `loss_fn`: the clipped policy-gradient loss.
        """
        began = time.monotonic()
        model = self.backend.model_config.get_text_config()
        longest = min(row_tokens(self.cfg), max(LONG_ROW_TOKENS, 3 * model.hidden_size))
        long_rows = warm_up_rows(self.cfg, model.vocab_size, longest) if longest > WARM_UP_TOKENS else None
        rows = warm_up_rows(self.cfg, model.vocab_size, WARM_UP_TOKENS)
        return time.monotonic() - began if self.backend.warm_up(rows, long_rows, loss_fn) else 0.0

    def profile(self, on: bool) -> None:
        """Begins or ends what Nsight Systems records of this rank."""
        capture(on)

    def _local_coords(self) -> dict[str, int]:
        return self.backend.groups.coordinates()

    def _make_replica_group(self) -> torch.distributed.ProcessGroup | None:
        return self.backend.groups.make_replica_group()

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _cut(
        self, data: BatchedDataDict, size: int, *, replayed: Sequence[str] = RECORDED
    ) -> tuple[list[BatchedDataDict], int]:
        """The microbatches of these rows, and how many more another rank has."""
        self.backend.rebuild_communicators()
        parts = microbatches(data, self.cfg, size, replayed=replayed)
        return parts, self.backend.groups.max_over_data(len(parts)) - len(parts)

    def _score(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None,
        *,
        policy: bool = False,
        reference: bool = False,
        natural: bool = False,
    ) -> BatchedDataDict:
        """Log-probabilities under the current weights, the initial ones, or the current ones with natural routing, of
        the same microbatches.
        """
        if policy and (trace := route_trace()) is not None:
            trace.fetched("prev_lp", data)
        parts, idle = self._cut(
            data, micro_batch_size or self.cfg.logprob_batch_size, replayed=RECORDED if policy else SAMPLING_MASK_FIELDS
        )

        def rows(parts: list[BatchedDataDict], *, filtered: bool) -> torch.Tensor:
            with explained(self.cfg, self.backend.device, "scoring", training=False):
                scored = self.backend.logprobs(parts, filtered=filtered, idle=idle)
            return stacked_rows(scored, data)

        scores: dict[str, torch.Tensor] = {"logprobs": rows(parts, filtered=True)} if policy else {}
        unrouted = [without_routes(part) for part in parts] if natural or reference else []
        if natural:
            scores["naturally_routed_logprobs"] = rows(unrouted, filtered=True)
        if reference:
            # The reference's own routes: recorded ones are those of another model.
            with self.backend.reference_weights():
                scores["reference_logprobs"] = rows(unrouted, filtered=False)
        return BatchedDataDict(scores)

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`logprobs [B, S]` under the current weights."""
        return self._score(data, micro_batch_size, policy=True)

    def get_naturally_routed_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`naturally_routed_logprobs [B, S]` under the current weights, whose routers choose for themselves."""
        return self._score(data, micro_batch_size, natural=True)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs [B, S]` under the initial weights. Raises RuntimeError: no reference was kept."""
        return self._score(data, micro_batch_size, reference=True)

    def get_policy_and_reference_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`logprobs` and `reference_logprobs`, [B, S] each, of the same microbatches. Raises RuntimeError: no reference
        was kept.
        """
        return self._score(data, micro_batch_size, policy=True, reference=True)

    def get_topk_logits(self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`topk_logits` (as log-probabilities) and `topk_indices` of the k most likely tokens, [B, S, k]."""
        batches, idle = self._cut(data, micro_batch_size or self.cfg.logprob_batch_size, replayed=())
        with explained(self.cfg, self.backend.device, "scoring", training=False):
            parts = self.backend.topk_logits(batches, k, idle=idle)
        logits = stacked_rows((logprobs for logprobs, _ in parts), data, k)
        indices = stacked_rows((ids for _, ids in parts), data, k, dtype=torch.int32)
        return BatchedDataDict({"topk_logits": logits, "topk_indices": indices})

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self, data: SlicedDataDict, loss_fn: LossFunction, *, eval_mode: bool, gbs: int, mbs: int
    ) -> dict[str, object]:
        """One step per local global-batch part; `gbs` counts samples over all data-parallel ranks."""
        local = gbs // self.backend.sizes.dp
        results: list[StepResult] = []
        rates = self.backend.rates()
        # A packed shard may hold more or fewer rows than its equal part of a global batch; its plan says how many
        # batches there are.
        steps = data.size // local if data.elem_counts_per_gb is None else len(data.elem_counts_per_gb)
        for index in range(steps):
            batch = data.get_batch(index, local)
            if eval_mode:
                results.append(self._evaluate(batch, loss_fn, mbs))
                continue
            self.begin_train_step(loss_fn, mbs=mbs)
            self.train_microbatches(batch)
            results.append(self._step_optimizer())
        if not eval_mode and (trace := route_trace()) is not None:
            trace.step_done()
        if any(result.stepped for result in results) and not eval_mode:
            self.backend.step_schedule()
        return step_report(results, rates, {} if eval_mode else self.backend.router_metrics())

    def begin_train_step(self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None) -> None:
        """Opens a step. `gbs` is part of NeMo-RL's call; the step is as large as the chunks that arrive."""
        self.backend.rebuild_communicators()
        self.step.begin(loss_fn)
        self._mbs = mbs or self.cfg.train_micro_batch_size

    def train_microbatches(self, data: BatchedDataDict) -> None:
        """Adds one chunk of samples to the open step; this rank's part may have no rows."""
        if (trace := route_trace()) is not None:
            trace.fetched("train", data)
        with explained(self.cfg, self.backend.device, "training", training=True):
            self.step.microbatches(microbatches(data, self.cfg, self._mbs))

    def _step_optimizer(self) -> StepResult:
        with explained(self.cfg, self.backend.device, "stepping the optimizer", training=True):
            return self.step.finish(self.cfg.max_grad_norm)

    def finish_train_step(self) -> dict[str, object]:
        """Steps the optimizer and the schedule."""
        rates = self.backend.rates()
        result = self._step_optimizer()
        if (trace := route_trace()) is not None:
            trace.step_done()
        if result.stepped:
            self.backend.step_schedule()
        if not self._has_stepped:
            # Compiled kernels and the optimizer's state are there now.
            self._has_stepped = True
            keep_living()
        if self.backend.rank == 0:
            logger.info("step=finished chunks=%d grad_norm=%.6g", result.chunks, result.grad_norm)
        return step_report([result], rates, self.backend.router_metrics())

    def abort_train_step(self) -> None:
        """Closes an open step without stepping."""
        self.step.abort()

    def _evaluate(self, batch: BatchedDataDict, loss_fn: LossFunction, mbs: int) -> StepResult:
        counts = torch.stack(count_valid(batch)).to(self.backend.device)
        counts = self.backend.groups.sum_over_data(counts).tolist()
        parts, idle = self._cut(batch, mbs)
        evaluated = self.backend.evaluate(parts, loss_fn, idle=idle)
        sums = [result.metrics for result in evaluated]
        metrics = {
            name: [float(v) for v in values]
            for name, values in normalize_metrics(
                {n: torch.stack([s[n].double() for s in sums]) for n in sums[0]}, loss_fn, *counts
            ).items()
        }
        loss = self.backend.groups.sum_over_data(
            torch.tensor(sum(metrics["loss"]), dtype=torch.float64, device=self.backend.device)
        )
        return StepResult(float(loss), 0.0, metrics, *counts, work=total_work(evaluated))

    # -- residency ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Model and optimizer on the device, communicators in place."""
        self.backend.rebuild_communicators()
        with explained(self.cfg, self.backend.device, "bringing training state to the GPU", training=True):
            self.backend.to_device(optimizer=True)

    def prepare_for_lp_inference(self) -> None:
        """Model on the device; the optimizer too unless `policy.offload_optimizer_for_logprob`."""
        self.backend.rebuild_communicators()
        stays = not self.cfg.offload_optimizer_for_logprob
        self.backend.to_device(optimizer=stays)
        if not stays:
            self.backend.offload(model=False, optimizer=True, keep_gradients=True)

    def offload_optimizer(self) -> None:
        """Optimizer state to the host, freed memory given back."""
        self.backend.offload(model=False, optimizer=True, keep_gradients=self.step.is_open)

    def offload_all(self) -> None:
        """Model and optimizer to the host, freed memory given back; the gradients of an open step survive."""
        self.backend.offload(model=True, optimizer=True, keep_gradients=self.step.is_open)

    def _bring_weights(self) -> None:
        self.backend.rebuild_communicators()
        self.backend.to_device(optimizer=False)

    def drop_communicators(self) -> None:
        """Gives the memory of device communicators back until they are needed; none may be in use."""
        if self.step.is_open:
            raise TrainStepStateError("a train step is open: finish or abort it before communicators are dropped")
        self.close_export(failed=True)
        self._groups.drop()
        self.backend.drop_communicators()
        release_cached_memory(self.backend.device)

    def release_cached_memory(self) -> None:
        """Gives cached memory back without moving anything."""
        release_cached_memory(self.backend.device)

    def free_memory(self) -> int:
        """Bytes free on this rank's device."""
        return free_memory(self.backend.device)

    def memory_in_use(self) -> int:
        """Bytes in use on this rank's device."""
        return memory_in_use(self.backend.device)

    # -- weight export ------------------------------------------------------------------------------------------------

    def _export_dtype(self) -> torch.dtype:
        return compute_dtype(self.cfg.precision)

    def tensor_metas(self) -> list[TensorMeta]:
        """Metadata of an export's tensors, in order."""
        return self.backend.tensor_metas(self._export_dtype())

    def staging_budget(self) -> int:
        """Bytes this rank may spend on one staging window (there are two)."""
        if self.cfg.refit_buffer_size_gb is not None:
            return int(self.cfg.refit_buffer_size_gb * (1 << 30))
        return int(_STAGING_SHARE * free_memory(self.backend.device) / 2)

    def begin_export(self, spec: SendSpec) -> None:
        """Starts a session's export on this rank."""
        self._bring_weights()
        self.close_export(failed=True)
        weights = self.backend.export(self._export_dtype())
        self._sender = WeightSender(spec, weights, self.backend.device, source=self.backend.rank, groups=self._groups)

    def build_cpu_bucket_cache(
        self, step: int, bucket_bytes: int, served: str | None = None, *, checksums: bool = True
    ) -> CacheManifest | None:
        """Packs the current weights as version `step` into host memory on the first rank; every rank takes part in the
        export.

        Args:
            served: Path of the buffer that sessions read, which stays unchanged; None before the first.

        Returns the cache's manifest, on the rank that owns it.
        """
        self._bring_weights()
        weights = self.backend.export(self._export_dtype())
        if self.backend.rank != 0:
            for _ in weights:
                pass
            return None
        if self._cache is None:
            self._cache = CacheBuilder(bucket_bytes, self.backend.device, checksums=checksums)
        return self._cache.build(step, self.tensor_metas(), weights, served=served)

    def begin_cached_export(self, spec: SendSpec, manifest: CacheManifest) -> None:
        """Starts a session that sends a built version from this rank."""
        self.close_export(failed=True)
        check_room(spec, CACHE_OWNER, self.backend.device)
        weights = iter(manifest.weights())
        self._sender = WeightSender(spec, weights, self.backend.device, source=CACHE_OWNER, groups=self._groups)

    def export_window(self, index: int) -> dict[str, Published] | None:
        """Packs and publishes one window."""
        return self._open_sender().export_window(index)

    def send_window(self, index: int) -> None:
        """Pushes one window where the transport pushes."""
        self._open_sender().send_window(index)

    def _open_sender(self) -> WeightSender:
        if self._sender is None:
            raise RuntimeError("no weight export is open on this rank")
        return self._sender

    def close_export(self, failed: bool = False) -> None:
        """Ends an open export, after a failure without keeping its group; nothing to do when there is none."""
        if self._sender is not None:
            self._sender.close(failed=failed)
            self._sender = None

    def kept_group(self) -> str | None:
        """Id of the group that this rank holds for the next session, if it does."""
        return self._groups.group_id

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None, save_format: str = "safetensors") -> None:
        """Snapshots weights and optimizer; files follow in the background."""
        self.prepare_for_training()
        self.backend.save(weights_path, optimizer_path, save_format)

    def checkpoint_written(self) -> bool:
        """Whether the files of the last snapshot are written; polled, so that training goes on meanwhile."""
        return self.backend.poll_saved()

    def weight_checksums(self) -> dict[str, str]:
        """A digest of every full weight, equal on every rank; for tests of exact equality."""
        self._bring_weights()
        return {
            name: hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.backend.full_weights(None)
        }

    def shutdown(self) -> None:
        """Leaves the data plane and the process groups."""
        self.backend.wait_saved()
        if self._cache is not None:
            self._cache.close()
        self.close_data_plane()
        self._groups.drop()
        synchronize(self.backend.device)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def prepare_process() -> None:
    """Seeds torch, and keeps it to its threads or to its slot of a GPU."""
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_to_slot(device_of_process())


def stacked_rows(
    parts: Iterable[torch.Tensor], data: BatchedDataDict, *further: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, S, *further] of the microbatches of a rank's rows, of which it may have none; zeros beyond a part's own
    width.
    """
    width = data["input_ids"].shape[1] if data.size else 0
    padded = [torch.nn.functional.pad(part, (*[0, 0] * len(further), 0, width - part.shape[1])) for part in parts]
    return torch.cat([torch.zeros((0, width, *further), dtype=dtype), *padded])


WARM_UP_TOKENS = 2048
"""Most tokens of the row that passes through all layers. A longer one takes memory that engines have."""
LONG_ROW_TOKENS = 8192
"""Most tokens of the row that passes through some layers, of a model whose width is at most a third of it. Inductor
makes other kernels for rows of more than 4,096 tokens, or than twice the model's width."""


def warm_up_rows(config: PolicyConfig, vocabulary: int, most: int) -> BatchedDataDict[Any]:
    """At least two sequences of random tokens, with the columns that the clipped policy-gradient loss reads.
    `vocabulary`: number of token ids of the model; `most`: tokens of all sequences.

    The total number of tokens is prime: compiled code would otherwise specialise on a row length that equals some
    dimension of the model.
    """
    width = min(config.max_total_sequence_length, most // 2)
    rows = max(2, most // width)
    tokens = next(count for count in range(rows * width, 0, -1) if _is_prime(count))
    fewer, some = divmod(rows * width - tokens, rows)
    lengths = torch.tensor([width - fewer - (row < some) for row in range(rows)])
    draw = torch.Generator().manual_seed(0)
    trained_BS = torch.ones(rows, width)
    trained_BS[:, 0] = 0.0
    columns = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return BatchedDataDict(
        input_ids=torch.randint(0, vocabulary, (rows, width), generator=draw),
        input_lengths=lengths,
        token_mask=trained_BS * (torch.arange(width) < lengths[:, None]),
        sample_mask=torch.ones(rows),
        **{name: torch.zeros(rows, width) for name in columns},
    )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that say where torch and Triton keep what they compile, and our folder for each."""


def keep_compiled() -> str:
    """Keeps this process's compiled kernels in the home directory, as engines keep theirs, unless the variables name
    other places or it cannot be written. Returns the folder, for the log.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_rl"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return "a temporary folder"
    if os.access(home, os.W_OK):
        for name, folder in CACHES.items():
            os.environ.setdefault(name, str(home / folder))
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "a temporary folder")
