"""The DTensor backend: a Hugging Face model under FSDP2 with tensor, context and expert parallelism.

Ties loading, passes, residency, export and checkpoints of one rank together behind the policy's `Backend` protocol;
counts and normalisation belong to the step. Invariant: accumulated gradients are sums over all data-parallel ranks,
once each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import CPU, CUDA
from nemo_rl.distributed.devices import release_cached_memory
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.dtensor.dtensor_checkpoint import DTensorCheckpointWriter, load_optimizer
from nemo_rl.models.dtensor.dtensor_lora import AdaptedLinear
from nemo_rl.models.dtensor.export import adapter_factors, adapter_metas, full_weights, tensor_metas
from nemo_rl.models.dtensor.model_loading import load_scorer
from nemo_rl.models.dtensor.parallelize import (
    HEADWISE_NORMS,
    ParallelMesh,
    is_compiled,
    is_tensor_parallel,
    local_tensor,
    one_layer_of_each_kind,
)
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.policy.attention import ATTENTION_NAME, kernel_in_use
from nemo_rl.models.policy.backend import Backend, BackendOptions
from nemo_rl.models.policy.batches import shares_prompts
from nemo_rl.models.policy.checkpoint_files import write_adapter_directory, write_model_directory
from nemo_rl.models.policy.lora import base_model, sent_factors
from nemo_rl.models.policy.model_config import compute_dtype
from nemo_rl.models.policy.optimizer import advance_scheduler, build_optimizer, build_scheduler
from nemo_rl.models.policy.packed import (
    PackedBatch,
    idle_microbatch,
    likely_rows,
    logprob_rows,
    microbatch_loss,
    pack,
    row_round,
    wants_logits,
)
from nemo_rl.models.policy.residency import MovableStorages, ReferenceWeights
from nemo_rl.models.policy.scoring import LogitTransform, TokenScores, logit_transform
from nemo_rl.models.policy.train_step import MicrobatchResult
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.weight_sync.layout import TensorMeta

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_backend(cfg: PolicyConfig, sizes: ParallelSizes, options: BackendOptions) -> DTensorBackend:
    """This rank's model, optimizer and schedule, from the base model or a checkpoint. Collective. Raises
    ModelNotFoundError: there is no such model; CheckpointMismatchError: the checkpoint is of another model or
    optimizer.
    """
    parallel = cfg.dtensor_cfg
    mesh = ParallelMesh(sizes, CUDA if torch.cuda.is_available() else CPU, dp_replicate=parallel.dp_replicate_size)
    keeps, weights_path, lora = options.init_reference_model, options.weights_path, parallel.lora_cfg
    # With adapters the reference is the policy without them, and needs no weights of its own.
    copies = keeps and not lora.enabled
    scorer = load_scorer(cfg, mesh, weights_path=None if copies else weights_path)
    # The reference is the model the run started from, also when the policy resumes from a checkpoint.
    initial = ReferenceWeights(shards(scorer)) if copies else None
    if copies and weights_path is not None:
        scorer = load_scorer(cfg, mesh, weights_path=weights_path)
    trains = options.init_optimizer and cfg.optimizer is not None
    trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(cfg.optimizer, trained) if trains and cfg.optimizer is not None else None
    scheduler = build_scheduler(cfg.scheduler, optimizer) if optimizer is not None else None
    if optimizer is not None and options.optimizer_path is not None:
        load_optimizer(scorer, optimizer, scheduler, options.optimizer_path)
    elif scheduler is not None:
        advance_scheduler(scheduler, options.steps_done)
    if initial is not None:
        reference = partial(_swapped_in, initial, scorer)
    else:
        reference = partial(base_model, [scorer]) if keeps else None
    return DTensorBackend(scorer, mesh, cfg, optimizer=optimizer, scheduler=scheduler, reference=reference)


def _swapped_in(reference: ReferenceWeights, scorer: CausalLMScorer) -> AbstractContextManager[None]:
    return reference.swapped_in(shards(scorer))


class DTensorBackend(Backend):
    """One rank: a `Backend` and a `StepBackend`.

    Args:
        optimizer: None for a policy that only scores.
        scheduler: Of the learning rate; None keeps it constant.
        reference: Has the model compute with the run's initial weights in a block; None without them.
    """

    def __init__(
        self,
        scorer: CausalLMScorer,
        mesh: ParallelMesh,
        cfg: PolicyConfig,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        reference: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        parallel, lora, generation = cfg.dtensor_cfg, cfg.dtensor_cfg.lora_cfg, cfg.generation
        self.scorer = scorer
        self.groups = self.mesh = mesh
        self.transform = logit_transform(generation.temperature, generation.top_p, generation.top_k, scorer.lm.config)
        self.optimizer, self.scheduler, self._reference = optimizer, scheduler, reference
        self.snapshots = self.writer = DTensorCheckpointWriter(mesh)
        self._dtype = compute_dtype(cfg.precision)
        self._stays_on_host = parallel.cpu_offload
        # Every rank then holds whole gradients until the end of a step. A single rank has no peer to wait for.
        self._defers = parallel.defer_fsdp_grad_sync and mesh.gradient_mesh.size() > 1
        self._clear_every, self._microbatches = parallel.clear_cache_every_n_steps, 0
        adapted = [name for name, part in scorer.named_modules() if isinstance(part, AdaptedLinear)]
        self._adapter = AdapterInfo.of(cfg.model_name, lora.dim, lora.alpha, adapted) if lora.enabled else None
        self._sends_adapters = lora.enabled and lora.sync == "adapter"
        self._share_prompts = shares_prompts(cfg, cuda=mesh.device.type == "cuda")
        self._row_multiple = math.lcm(scorer.row_multiple(), row_round(cfg.sequence_packing, mesh.device))
        # State that is on the host at present.
        self._model_memory: MovableStorages | None = None
        self._optimizer_memory: MovableStorages | None = None

    @property
    def model_config(self) -> PretrainedConfig:
        return self.scorer.lm.config

    def kernels(self) -> str:
        lm = self.scorer.lm
        attention = str(getattr(lm.config, "_attn_implementation", "")).removeprefix(f"{ATTENTION_NAME}_")
        kernel = kernel_in_use(self.device, self._dtype, attention)
        return f"transformers:{type(lm).__name__}, packed attention ({kernel})"

    # -- training -----------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        self.discard_gradients()
        self.scorer.synchronize_gradients(not self._defers)
        if self.scorer.replay is not None:
            self.scorer.replay.start_counting()

    def router_metrics(self) -> dict[str, float]:
        return {} if self.scorer.replay is None else self.scorer.replay.shares(self.device)

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        # Every time: log-probabilities may have been computed since the last chunk.
        self.scorer.train()
        results = []
        for data in microbatches:
            loss, result = self._loss(data, loss_fn)
            loss.backward()
            results.append(result)
            self._microbatches += 1
            if self._clear_every is not None and self._microbatches % self._clear_every == 0:
                release_cached_memory(self.device)
        for _ in range(idle):
            self._idle_backward()
        self.scorer.drop_gathered()
        return results

    def _loss(self, data: Mapping[str, torch.Tensor], loss_fn: LossFunction) -> tuple[torch.Tensor, MicrobatchResult]:
        logits = wants_logits(loss_fn)
        batch = self._packed(data, trained_only=not logits, share=not logits, loss_fn=loss_fn)
        output = self.scorer(batch, self.transform, logits=logits)
        return microbatch_loss(data, loss_fn, batch, output, filters=self.transform.filters, device=self.device)

    def _idle_backward(self) -> None:
        scores: TokenScores = self.scorer(self._packed(idle_microbatch()), self.transform)
        (scores.unfiltered_T.sum() * 0.0).backward()

    def _packed(
        self,
        data: Mapping[str, torch.Tensor],
        *,
        trained_only: bool = False,
        share: bool = False,
        loss_fn: LossFunction | None = None,
    ) -> PackedBatch:
        return pack(
            data,
            self.device,
            multiple=self._row_multiple,
            trained_only=trained_only,
            share=share and self._share_prompts,
            loss_fn=loss_fn,
        )

    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm: squares of shards summed over the axes that cut them, each element once."""
        if self._defers:
            # Which microbatch is a step's last is known only now: an empty one carries the sums of all.
            self.scorer.synchronize_gradients(True)
            self._idle_backward()
            self.scorer.drop_gathered()
        self._sum_headwise_norms()
        cut = torch.zeros((), dtype=torch.float64, device=self.device)
        whole = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.scorer.parameters():
            if parameter.grad is None:
                continue
            square = (
                torch.linalg.vector_norm(local_tensor(parameter.grad), dtype=torch.float32)
                .double()
                .square()
                .to(self.device)
            )
            if is_tensor_parallel(parameter):
                cut += square
            else:
                whole += square
        if self.mesh.tp_group is not None:
            dist.all_reduce(cut, group=self.mesh.tp_group)
        total = cut + whole
        dist.all_reduce(total, group=self.mesh.shard_mesh.get_group())
        return total.sqrt()

    def _sum_headwise_norms(self) -> None:
        group = self.mesh.tp_group
        if group is None:
            return
        for name, parameter in self.scorer.named_parameters():
            if parameter.grad is not None and any(norm in name for norm in HEADWISE_NORMS):
                dist.all_reduce(local_tensor(parameter.grad), group=group)

    @torch.no_grad()
    def apply_gradients(self, factor: float) -> None:
        if self.optimizer is None:
            raise RuntimeError("this policy was built without an optimizer (init_optimizer=False) and cannot train")
        gradients = [local_tensor(p.grad) for p in self.scorer.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        self.discard_gradients()

    def trained_weights(self) -> list[torch.Tensor]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [local_tensor(parameter) for group in groups for parameter in group["params"]]

    def discard_gradients(self) -> None:
        """Drops accumulated gradients, and whatever a pass that failed left gathered."""
        self.scorer.drop_gathered()
        self.scorer.drop_deferred_gradients()
        for parameter in self.scorer.parameters():
            parameter.grad = None

    @torch.no_grad()
    def evaluate(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        self.scorer.eval()
        results = [self._loss(data, loss_fn)[1] for data in microbatches]
        self._idle_passes(idle)
        return results

    @torch.no_grad()
    def logprobs(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], *, filtered: bool, idle: int
    ) -> list[torch.Tensor]:
        self.scorer.eval()
        transform = self.transform if filtered else self.transform.unfiltered()
        rows = []
        for data in microbatches:
            batch = self._packed(data, share=True)
            rows.append(logprob_rows(data, batch, self.scorer(batch, transform)))
        self._idle_passes(idle)
        return rows

    @torch.no_grad()
    def topk_logits(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], k: int, *, idle: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.scorer.eval()
        parts = []
        for data in microbatches:
            batch = self._packed(data, share=True)
            parts.append(likely_rows(batch, self.scorer(batch, self.transform.unfiltered(), likely=k)))
        self._idle_passes(idle)
        return parts

    def _idle_passes(self, count: int) -> None:
        for _ in range(count):
            self.scorer(self._packed(idle_microbatch()), LogitTransform())
        self.scorer.drop_gathered()

    def warm_up(
        self, rows: Mapping[str, torch.Tensor], long_rows: Mapping[str, torch.Tensor] | None, loss_fn: LossFunction
    ) -> bool:
        """On GPUs, and where layers are compiled. Draws of dropout do not count."""
        cuda = self.device.type == "cuda"
        if self.scorer.replay is not None or not (cuda or is_compiled(self.scorer.lm)):
            return False
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            self._passes(rows, loss_fn)
            if long_rows is not None:
                with one_layer_of_each_kind(self.scorer.lm):
                    self._passes(long_rows, loss_fn)
        self.discard_gradients()
        self._microbatches = 0
        release_cached_memory(self.device)
        return True

    def _passes(self, rows: Mapping[str, torch.Tensor], loss_fn: LossFunction) -> None:
        self.logprobs([rows], filtered=True, idle=0)
        if self._adapter is not None and self._reference is not None:
            # The model without its adapters is other code; with other weights it is the same.
            with self.reference_weights():
                self.logprobs([rows], filtered=True, idle=0)
        self.start_step()
        self.forward_backward([rows], loss_fn, idle=0)

    # -- weights, optimizer and schedule ------------------------------------------------------------------------------

    def tensor_metas(self, dtype: torch.dtype) -> list[TensorMeta]:
        return adapter_metas(self.scorer) if self._sends_adapters else tensor_metas(self.scorer, dtype)

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapter is not None and self._sends_adapters:
            return sent_factors(adapter_factors(self.scorer, self.device), self._adapter.scale)
        return full_weights(self.scorer, dtype, self.device)

    def full_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        return full_weights(self.scorer, dtype, self.device)

    def rates(self) -> dict[str, float]:
        if self.optimizer is None:
            return {}
        group = self.optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "wd": float(group.get("weight_decay", 0.0))}

    def step_schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    # -- residency ----------------------------------------------------------------------------------------------------

    def to_device(self, *, optimizer: bool) -> None:
        if self._model_memory is not None:
            self._model_memory.to_device()
            self._model_memory = None
        if optimizer and self._optimizer_memory is not None:
            self._optimizer_memory.to_device()
            self._optimizer_memory = None

    def offload(self, *, model: bool, optimizer: bool, keep_gradients: bool) -> None:
        """Gradients are stored with their parameters and move with them."""
        if not self._stays_on_host:
            if optimizer and self.optimizer is not None and self._optimizer_memory is None:
                self._optimizer_memory = MovableStorages.on_gpu(optimizer_tensors(self.optimizer))
                self._optimizer_memory.to_host()
            if model and self._model_memory is None:
                if not keep_gradients:
                    self.discard_gradients()
                self.scorer.drop_gathered()
                self._model_memory = MovableStorages.on_gpu(model_tensors(self.scorer))
                self._model_memory.to_host()
        release_cached_memory(self.device)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, weights_path: str, optimizer_path: str | None, save_format: str) -> None:
        lm, writer = self.scorer.lm, self.writer
        # The caller that asks for a new snapshot has waited for the previous one.
        writer.drop()
        if self._adapter is not None:
            factors = adapter_factors(self.scorer, self.device)
            writer.submit_whole(factors, write_adapter_directory, lm.config, weights_path, self._adapter)
        else:
            weights = self.full_weights(None)
            writer.submit_whole(weights, write_model_directory, lm, weights_path, self._dtype, save_format)
        if optimizer_path is not None and self.optimizer is not None:
            writer.save_optimizer(self.scorer, self.optimizer, self.scheduler, optimizer_path)


def model_tensors(scorer: CausalLMScorer) -> Iterator[torch.Tensor]:
    """This rank's parameters, their gradients, those that were not reduced yet, and buffers."""
    for parameter in scorer.parameters():
        yield local_tensor(parameter.detach())
        if parameter.grad is not None:
            yield local_tensor(parameter.grad.detach())
    for gradient in scorer.deferred_gradients():
        yield local_tensor(gradient.detach())
    yield from scorer.buffers()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of the optimizer's state; step counters stay where the optimizer put them."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield local_tensor(value)


def shards(scorer: CausalLMScorer) -> list[torch.Tensor]:
    """This rank's parameters."""
    return [local_tensor(parameter.detach()) for parameter in scorer.parameters()]
