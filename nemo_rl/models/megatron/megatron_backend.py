"""The Megatron backend: Megatron-Core's model, pipeline schedules and optimizer behind the policy's `Backend` protocol.

Ties building, passes, residency, export and checkpoints of one rank together; counts and normalisation belong to the
step. Gradients stay local until the step is finished: Megatron's own hooks that would reduce or scale them after every
schedule are left empty. Invariant: gradients are reduced over ranks exactly once per step.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import CPU, CUDA
from nemo_rl.distributed.devices import release_cached_memory
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.megatron import cpu
from nemo_rl.models.megatron.bridge import BridgedWeights
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.megatron_checkpoint import ModelWeights, OptimizerState, load_optimizer, save_optimizer
from nemo_rl.models.megatron.megatron_lora import KEY, AdaptedWeights
from nemo_rl.models.megatron.megatron_optimizer import build_optimizer, build_schedule, inner_optimizers, with_gradients
from nemo_rl.models.megatron.model import BuiltModel, build_model, is_frozen_router
from nemo_rl.models.megatron.pipeline_passes import Pipeline
from nemo_rl.models.megatron.prediction import FOLDER, PredictingWeights
from nemo_rl.models.megatron.routers import Routers
from nemo_rl.models.megatron.sharded_weights import ShardedWeights
from nemo_rl.models.policy.attention import kernel_in_use
from nemo_rl.models.policy.backend import Backend, BackendOptions
from nemo_rl.models.policy.checkpoint_files import (
    BackgroundWriter,
    write_adapter_directory,
    write_model_directory,
    write_tensors,
)
from nemo_rl.models.policy.lora import base_model, is_factor
from nemo_rl.models.policy.model_config import (
    CheckpointMismatchError,
    compute_dtype,
    generation_config,
    model_config,
)
from nemo_rl.models.policy.packed import (
    PackedBatch,
    likely_rows,
    logprob_rows,
    microbatch_loss,
    row_round,
    wants_logits,
)
from nemo_rl.models.policy.residency import MovableStorages, ReferenceWeights
from nemo_rl.models.policy.scoring import logit_transform
from nemo_rl.models.policy.train_step import MicrobatchResult
from nemo_rl.utils.adapter_files import is_adapter
from nemo_rl.weight_sync.layout import TensorMeta

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from transformers import PretrainedConfig

_WORKSPACES = ("transformer_engine.pytorch.module.base", "transformer_engine.pytorch.cpp_extensions.gemm")


def build_backend(cfg: PolicyConfig, sizes: ParallelSizes, options: BackendOptions) -> MegatronBackend:
    """This rank's model, optimizer and schedule, from the base model or a checkpoint. Collective. Raises
    ModelNotFoundError: there is no such model; CheckpointMismatchError: the checkpoint is of another model or
    optimizer.
    """
    virtual = cfg.megatron_cfg.model_overrides.get("virtual_pipeline_model_parallel_size")
    groups = MegatronGroups(sizes, CUDA if torch.cuda.is_available() else CPU, virtual)
    hf = model_config(cfg)
    # A policy that does not train predicts no further tokens.
    depths = cfg.megatron_cfg.mtp_num_layers if options.init_optimizer else 0
    model = build_model(cfg, hf, groups, depths=depths)
    keeps, weights_path = options.init_reference_model, options.weights_path
    if cfg.megatron_cfg.peft.enabled:
        adapted = AdaptedWeights(model.chunks, model.sizes, model.naming, groups, cfg)
        adapted.load(cfg.model_name)
        adapted.load_factors(weights_path)
        # The reference is the policy without adapters, and needs no weights of its own.
        return MegatronBackend(
            cfg, groups, hf, model, adapted, partial(base_model, model.chunks) if keeps else None, options
        )
    if weights_path is not None and is_adapter(weights_path):
        raise CheckpointMismatchError(f"{weights_path}: holds an adapter alone; set {KEY}.enabled: true")
    weights: ModelWeights
    if model.bridge is not None:
        weights = BridgedWeights(model.chunks, model.bridge, groups)
    elif depths:
        weights = PredictingWeights(
            model.chunks,
            model.sizes,
            model.naming,
            groups,
            depths=depths,
            start=cfg.model_name,
            spread=float(getattr(hf, "initializer_range", 0.02)),
        )
    else:
        weights = ShardedWeights(model.chunks, model.sizes, model.naming, groups)
    weights.load(weights_path if weights_path is not None and not keeps else cfg.model_name)
    # The reference is the model the run started from, also when the policy resumes from a checkpoint.
    own = [held for name, held in weights.own().items() if not name.startswith("mtp.")]
    reference = partial(ReferenceWeights(own).swapped_in, own) if keeps else None
    if keeps and weights_path is not None:
        weights.load(weights_path)
    return MegatronBackend(cfg, groups, hf, model, weights, reference, options)


class MegatronBackend(Backend):
    """One rank: a `Backend` and a `StepBackend`.

    Args:
        hf: The model's Hugging Face configuration.
        model: This rank's part of the model, with weights.
        reference: Has the model compute with the run's initial weights in a block; None without them.
        options: Whether it trains, and what it resumes from.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        groups: MegatronGroups,
        hf: PretrainedConfig,
        model: BuiltModel,
        weights: ModelWeights,
        reference: Callable[[], AbstractContextManager[None]] | None,
        options: BackendOptions,
    ) -> None:
        self.groups = groups
        self.weights = weights
        self._hf = hf
        self._dtype = compute_dtype(cfg.precision)
        self._model = model
        self._clears_cache = cfg.megatron_cfg.empty_unused_memory_level
        generation = cfg.generation
        self.transform = logit_transform(generation.temperature, generation.top_p, generation.top_k, hf)
        self._routers = Routers(model, groups, replays=cfg.router_replay.enabled)
        rounded = row_round(cfg.sequence_packing, groups.device)
        self._pipeline = Pipeline(model, groups, cfg.logprob_chunk_size, rounded, self._routers)
        peft = cfg.megatron_cfg.peft
        self._adapters = weights if isinstance(weights, AdaptedWeights) else None
        self._sends_adapters = peft.enabled and peft.sync == "adapter"
        self._trained = {weight.name: _is_trained(weight.name, cfg.megatron_cfg) for weight in weights.described}
        self.chunks: list[DistributedDataParallel] = model.chunks
        self.optimizer: MegatronOptimizer = None  # where it trains
        self.schedule: OptimizerParamScheduler = None  # where it trains
        if options.init_optimizer:
            self.chunks = self._pipeline.chunks = with_gradients(model, cfg)
            self.optimizer = build_optimizer(self.chunks, cfg)
            self.schedule = build_schedule(self.optimizer, cfg, options.last_step)
            if options.optimizer_path is not None:
                load_optimizer(self._state(), self.schedule, self._trained, options.optimizer_path)
            else:
                self.schedule.step(increment=options.steps_done)
        self._reference = reference
        self.snapshots = self.writer = BackgroundWriter(whole=self.rank == 0)
        self._described = SimpleNamespace(config=hf, generation_config=generation_config(cfg, hf))
        tensors = [*(p.data for chunk in model.chunks for p in chunk.parameters())]
        tensors += [buffer for chunk in model.chunks for buffer in chunk.buffers()]
        self._model_memory = MovableStorages.on_gpu(tensors)
        self._gradient_memory = MovableStorages.on_gpu(buffer.grad_data for buffer in self._gradient_buffers())
        self._optimizer_memory: MovableStorages | None = None
        self._model_tensors = tensors

    @property
    def model_config(self) -> PretrainedConfig:
        return self._hf

    def kernels(self) -> str:
        return f"{self._model.kernels}, packed attention ({kernel_in_use(self.device, self._dtype)})"

    # -- passes -------------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        self._require_optimizer()
        self.discard_gradients()
        self._routers.start_counting()

    def router_metrics(self) -> dict[str, float]:
        return self._routers.metrics()

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        results = self._losses(microbatches, loss_fn, idle, backward=True)
        if self._clears_cache == 2:
            release_cached_memory(self.device)
        return results

    def _losses(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, idle: int, *, backward: bool
    ) -> list[MicrobatchResult]:
        # Every time: log-probabilities may have been computed since the last chunk.
        self._set_training(backward)
        logits = wants_logits(loss_fn)

        def end(
            data: Mapping[str, torch.Tensor], batch: PackedBatch, output: Any
        ) -> tuple[torch.Tensor, MicrobatchResult]:
            loss, result = microbatch_loss(
                data, loss_fn, batch, output, filters=self.transform.filters, device=self.device
            )
            return loss, _for_other_stages(result, self.sizes.pp)

        return self._pipeline.run(
            microbatches,
            idle,
            end,
            self.transform,
            backward=backward,
            logits=logits,
            trained_only=not logits,
            loss_fn=loss_fn,
        )

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    @torch.no_grad()
    def evaluate(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        return self._losses(microbatches, loss_fn, idle, backward=False)

    @torch.no_grad()
    def logprobs(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], *, filtered: bool, idle: int
    ) -> list[torch.Tensor]:
        self._set_training(False)
        transform = self.transform if filtered else self.transform.unfiltered()

        def end(data: Mapping[str, torch.Tensor], batch: PackedBatch, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return output.logprobs_T.sum(), logprob_rows(data, batch, output)

        return self._pipeline.run(microbatches, idle, end, transform, backward=False)

    @torch.no_grad()
    def topk_logits(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], k: int, *, idle: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self._set_training(False)

        def end(_: Mapping[str, torch.Tensor], batch: PackedBatch, output: Any) -> tuple[torch.Tensor, Any]:
            return output.logprobs_Tk.sum(), likely_rows(batch, output)

        return self._pipeline.run(microbatches, idle, end, self.transform.unfiltered(), backward=False, likely=k)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def gradient_norm(self) -> torch.Tensor:
        """See `StepBackend`: Megatron's one reduction of a step, then its norm, each element once."""
        from megatron.core.distributed import finalize_model_grads

        cpu.install()
        finalize_model_grads(self.chunks, None)
        if self.device.type == "cuda":
            # The reduction runs on streams of its own, which the norm would not wait for.
            torch.cuda.synchronize(self.device)
        self.optimizer.prepare_grads()
        return torch.as_tensor(self.optimizer.get_grad_norm(), dtype=torch.float64)

    @torch.no_grad()
    def apply_gradients(self, factor: float) -> None:
        gradients = [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step_with_ready_grads()
        self.discard_gradients()
        self._optimizer_memory = None
        if self._clears_cache >= 1:
            release_cached_memory(self.device)

    def trained_weights(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def discard_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _require_optimizer(self) -> None:
        if self.optimizer is None:
            raise RuntimeError("this policy was built without an optimizer (init_optimizer=False) and cannot train")

    def _gradient_buffers(self) -> list[_ParamAndGradBuffer]:
        if self.optimizer is None:
            return []
        return [buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def rates(self) -> dict[str, float]:
        if self.optimizer is None:
            return {}
        group = self.optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "wd": float(self.schedule.get_wd())}

    def step_schedule(self) -> None:
        self.schedule.step(increment=1)

    # -- weights ------------------------------------------------------------------------------------------------------

    def tensor_metas(self, dtype: torch.dtype) -> list[TensorMeta]:
        if self._adapters is not None and self._sends_adapters:
            return self._adapters.sent_metas()
        return self.weights.metas(dtype)

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapters is not None and self._sends_adapters:
            return self._adapters.sent_factors(self.device)
        return self.full_weights(dtype)

    def full_weights(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        return self.weights.full(dtype, self.device)

    # -- residency ----------------------------------------------------------------------------------------------------

    def to_device(self, *, optimizer: bool) -> None:
        self._model_memory.to_device()
        self._gradient_memory.to_device()
        if optimizer and self._optimizer_memory is not None:
            self._optimizer_memory.to_device()

    def offload(self, *, model: bool, optimizer: bool, keep_gradients: bool) -> None:
        if optimizer and self.optimizer is not None:
            if self._optimizer_memory is None:
                inner = inner_optimizers(self.optimizer)
                self._optimizer_memory = MovableStorages.on_gpu(optimizer_tensors(inner, self._model_tensors))
            self._optimizer_memory.to_host()
        if model:
            self._gradient_memory.to_host(keep=keep_gradients)
            self._model_memory.to_host()
            forget_workspaces()
        release_cached_memory(self.device)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, weights_path: str, optimizer_path: str | None, save_format: str) -> None:
        writer = self.writer
        # The caller that asks for a new snapshot has waited for the previous one.
        writer.drop()
        if self._adapters is not None:
            factors, info = self._adapters.factors(self.device), self._adapters.info
            writer.submit_whole(factors, write_adapter_directory, self._hf, weights_path, info)
        else:
            whole = self.full_weights(None)
            writer.submit_whole(whole, write_model_directory, self._described, weights_path, self._dtype, save_format)
        if isinstance(self.weights, PredictingWeights):
            # The layers of multi-token prediction stand beside the model.
            writer.submit_whole(self.weights.predicting(self.device), write_tensors, os.path.join(weights_path, FOLDER))
        if optimizer_path is not None and self.optimizer is not None:
            save_optimizer(writer, self._state(), self.schedule, self._trained, optimizer_path, self.rank)

    def _state(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self.weights, self.device)


def _is_trained(name: str, cfg: MegatronConfig) -> bool:
    if cfg.peft.enabled:
        return is_factor(name)
    return not (cfg.freeze_moe_router and is_frozen_router(name))


def _for_other_stages(result: MicrobatchResult, stages: int) -> MicrobatchResult:
    """The result on the host where it travels to ranks that have another device."""
    if stages == 1:
        return result
    metrics = {name: value.cpu() for name, value in result.metrics.items()}
    return MicrobatchResult(metrics, result.bad_rows_B.cpu(), result.work)


# Megatron's parameters and gradients are views into a few large buffers, and its optimizer keeps views of those: they
# move by `policy.residency`, storage by storage.
def optimizer_tensors(optimizers: Iterable[object], model: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """An optimizer's tensors beside the model's own memory: state, and float32 parameters."""
    known = {tensor.untyped_storage()._cdata for tensor in model}
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            continue
        found += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        found += [parameter.data for group in inner.param_groups for parameter in group["params"]]
    return [tensor for tensor in found if tensor.dim() > 0 and tensor.untyped_storage()._cdata not in known]


def forget_workspaces() -> None:
    """Lets go of the workspaces that Transformer Engine keeps for its matrix products, tens of MiB for each stream; it
    makes new ones when it needs them.
    """
    for name in _WORKSPACES:
        if name not in sys.modules:
            continue
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if "workspace" not in attribute:
                continue
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, (list, dict)):
                value.clear()
            elif isinstance(value, torch.Tensor):
                setattr(module, attribute, None)
