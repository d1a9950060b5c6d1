"""The worker extension of vLLM: loads weights, and frees the memory of CPU slots.

Runs in vLLM's worker process; its methods are called by `collective_rpc` with plain values. The base weights of a
policy with adapters never change, and every engine has their files: a refit then sends the factors, whose product is
added to the base. Invariants: after a release the memory is back with the system; after restore and reload the model
computes exactly the same; adapted weights equal merged ones up to the rounding of one float32 product.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.devices import (
    allocated_bytes,
    device_uuid,
    free_memory,
    memory_in_use,
    release_cached_memory,
)
from nemo_rl.distributed.nsight import capture
from nemo_rl.models.generation.vllm.engine_processes import end_without_last_collection, follow_owner
from nemo_rl.models.generation.vllm.receiver_methods import ReceiverMethods
from nemo_rl.models.generation.vllm.recorder import StepRecorder, Taken
from nemo_rl.weight_sync.copy_plan import CopyPlans
from nemo_rl.weight_sync.layout import Window
from nemo_rl.weight_sync.receiver import LoadTarget, WeightReceiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

FACTORS = ("lora_A", "lora_B")


class AdapterMismatchError(UserError, RuntimeError):
    """Adapters arrived that do not fit the engine's model files."""


class ArrivedAdapters:
    """Factors of one refit: `lora_A` [rank, in] and `lora_B` [out, rank], the scale of their product in the latter."""

    def __init__(self) -> None:
        self._factors: dict[str, dict[str, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._factors)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Keeps copies of the factors among the weights; yields the others."""
        for name, tensor in weights:
            layer, _, kind = name.rpartition(".")
            if kind in FACTORS:
                self._factors.setdefault(layer, {})[kind] = tensor.detach().float().clone()
            else:
                yield name, tensor

    def merged(
        self, files: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The files' tensors in order, those with an adapter in float32 with its product added. Raises
        AdapterMismatchError: a layer is not in the files, is of another shape, or lacks a factor.
        """
        left = dict(self._factors)
        for name, tensor in files:
            factors = left.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
            if factors is None:
                yield name, tensor
                continue
            down, up = (factors.get(kind) for kind in FACTORS)
            if down is None or up is None or (up.shape[0], down.shape[1]) != tuple(tensor.shape):
                raise AdapterMismatchError(
                    f"the adapter of {name} {tuple(tensor.shape)} came as "
                    f"{ {kind: tuple(factor.shape) for kind, factor in factors.items()} }; the engine's model files "
                    "are of another model than policy.model_name"
                )
            yield name, tensor.to(device).float() + up @ down
        if left:
            raise AdapterMismatchError(
                f"adapters of {', '.join(sorted(left)[:3])} came, which the engine's model files do not have; they are "
                "of another model than policy.model_name"
            )

    def forget(self) -> None:
        """Drops what arrived."""
        self._factors.clear()


class _VllmModel:
    """vLLM's model as a `LoadTarget`."""

    def __init__(self, worker: WorkerBase) -> None:
        self._worker = worker
        self._cpu = worker.device.type == "cpu"
        config = worker.vllm_config
        # On CPU vLLM repacks linear weights when it loads them and empties the originals, and quantised weights have
        # another type and layout than those that arrive: a plain load_weights would copy nothing, or values without
        # their scales. vLLM's layer-wise reload rebuilds a layer as it was before its first load, and repacks or
        # quantises it again into the memory that kernels and CUDA graphs read.
        self._layerwise = self._cpu or config.quant_config is not None
        self._adapters = ArrivedAdapters()
        # Layers that are rebuilt and experts that move leave nothing to replay. Dense models have few tensors, whose
        # loading hides under the transfer.
        replays = config.model_config.is_moe and not self._layerwise and not config.parallel_config.enable_eplb
        self._plans = CopyPlans(worker.model_runner.get_model) if replays else None

    def begin_load(self) -> None:
        self._adapters.forget()
        if self._plans is not None:
            self._plans.begin()
        if self._layerwise:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self._worker.model_runner.get_model())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._plans is not None and isinstance(weights, Window):
            self._plans.load(weights, self._take)
        else:
            self._take(weights)

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        whole = list(self._adapters.take(weights))
        if whole:
            self._load(whole)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        if self._layerwise:
            # The layer-wise reload keeps what it is given until a layer is complete, longer than the staging buffer
            # lives.
            weights = ((name, tensor.clone()) for name, tensor in weights)
        with set_current_vllm_config(self._worker.vllm_config):
            self._worker.model_runner.get_model().load_weights(weights)

    def finish_load(self) -> None:
        if self._plans is not None:
            self._plans.finish()
        if self._adapters:
            self._load(self._adapters.merged(self._files(), self._worker.device))
            self._adapters.forget()
        if self._layerwise:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            model = self._worker.model_runner.get_model()
            with set_current_vllm_config(self._worker.vllm_config):
                finalize_layerwise_reload(model, self._worker.model_config)
            if self._cpu:
                _repack_embeddings(model)
                _repack_experts(model)

    def _files(self) -> Iterable[tuple[str, torch.Tensor]]:
        from vllm.config import LoadConfig
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        return loader.get_all_weights(self._worker.model_config, self._worker.model_runner.get_model())

    def abandon_load(self) -> None:
        self._adapters.forget()
        if self._plans is not None:
            self._plans.abandon()
        # Layers keep what came of their weights until they have all of it; the next load would count that in.
        if self._layerwise:
            from vllm.config import set_current_vllm_config
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
            from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

            model = self._worker.model_runner.get_model()
            for layer in model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights.clear()
                info.load_numel = 0
            with set_current_vllm_config(self._worker.vllm_config):
                finalize_layerwise_reload(model, self._worker.model_config)


def _repack_embeddings(model: torch.nn.Module) -> None:
    # An output projection tied to the embedding gets no weights of its own in a layer-wise reload, so its packed copy
    # would keep the old ones: the engine would then sample from a model that is neither old nor new.
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: torch.nn.Module) -> None:
    # vLLM packs experts for the CPU's grouped products at their first load only; after a reload the packed kernel would
    # read plain weights.
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


class VllmInternalWorkerExtension(ReceiverMethods):
    """Mixed into vLLM's worker class; `self` is the worker."""

    device: torch.device
    rank: int
    model_runner: GPUModelRunner
    vllm_config: VllmConfig

    def __new__(cls, *_: object, **__: object) -> object:
        """vLLM offers no hook at a worker's start but its construction; from here on the engine does not outlive its
        actor.
        """
        follow_owner()
        end_without_last_collection()
        return super().__new__(cls)

    def nrl_describe(self) -> dict[str, object]:
        """Process id, tensor-parallel rank and device identity of this worker. Raises UserError: the kernels that were
        asked for do not run here.
        """
        if self.vllm_config.quant_config is not None and os.environ.get("VLLM_USE_DEEP_GEMM") == "1":
            from vllm.utils.deep_gemm import is_deep_gemm_supported

            if not is_deep_gemm_supported():
                raise UserError(
                    "policy.generation.vllm_cfg.use_deep_gemm: DeepGEMM is not installed, or not for this GPU (Hopper "
                    "and Blackwell); set it to false"
                )
        return {"pid": os.getpid(), "rank": self.rank, "device": device_uuid(self.device)}

    def nrl_profile(self, on: bool) -> None:
        """Begins or ends what Nsight Systems records of this worker."""
        capture(on)

    def nrl_record_decisions(self, routes: bool, masks: bool) -> None:
        """From here on keeps which experts tokens take and of which tokens they are drawn; of the ranks that compute
        the same, the first keeps them.
        """
        if self.rank == 0:
            self._nrl_recorder = StepRecorder(self.model_runner, routes=routes, masks=masks)

    def nrl_take_decisions(self, ended: list[tuple[str, int, int, int]], forgotten: list[str]) -> list[Taken]:
        """Recorded decisions of ended requests (key, first position, tokens of prompt and of response); drops those of
        forgotten requests.
        """
        if self.rank != 0:
            return []
        self._nrl_recorder.forget(forgotten)
        return [self._nrl_recorder.take(*request) for request in ended]

    def nrl_memory_in_use(self) -> int:
        """Bytes in use on this worker's device (resident memory on a CPU slot)."""
        return memory_in_use(self.device)

    def nrl_allocated_bytes(self) -> int:
        """Bytes that sleeping gives back are missing from this figure at once (see `allocated_bytes`)."""
        return allocated_bytes(self.device)

    def nrl_free_memory(self) -> int:
        """Bytes that this worker could still allocate on its device."""
        return free_memory(self.device)

    def nrl_kept_bytes(self) -> int | None:
        """Bytes that this rank keeps on its GPU while it sleeps: all that PyTorch has reserved but weights and KV
        cache. None on a CPU slot.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        if self.device.type != "cuda":
            return None
        sleeping = CuMemAllocator.get_instance().get_current_usage() if CuMemAllocator.instance is not None else 0
        return max(0, torch.cuda.memory_reserved(self.device) - sleeping)

    def nrl_model_bytes(self) -> dict[str, int]:
        """Bytes of weights (parameters and buffers) and of KV cache in this worker."""
        model = self.model_runner.get_model()
        weights = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in [*model.parameters(), *model.buffers()]
        }
        return {
            "weights": sum(weights.values()),
            "kv_cache": sum(s.nbytes() for s in _storages(self.model_runner.kv_caches)),
        }

    def nrl_load_target(self) -> LoadTarget:
        """The model that takes weights."""
        return _VllmModel(self)

    def _nrl_receiver(self) -> WeightReceiver:
        if not hasattr(self, "_nrl_weight_receiver"):
            self._nrl_weight_receiver = WeightReceiver(self.nrl_load_target(), self.device)
        return self._nrl_weight_receiver

    def nrl_begin_sync(self, session: dict[str, object], routes: list[dict[str, object]]) -> None:
        """Opens a sync session; `routes` holds the weights' route to every rank of this engine."""
        self._nrl_receiver().begin(session | routes[self.rank])

    def nrl_receive_window(self, window: dict[str, object]) -> None:
        """Loads one window."""
        self._nrl_receiver().receive(window)

    def nrl_finish_sync(self, version: int) -> int:
        """Finalises the model; the version it now has."""
        return self._nrl_receiver().finish(version)

    def nrl_abort_sync(self, session_id: str) -> None:
        """Ends a session without a new version, if it is the open one."""
        self._nrl_receiver().abort(session_id)

    def nrl_kept_group(self) -> str | None:
        """Id of the group that this rank holds for the next session, if it does."""
        return self._nrl_receiver().kept_group

    def nrl_drop_group(self) -> None:
        """Gives the memory of the held group back."""
        self._nrl_receiver().drop_group()

    def nrl_release_memory(self, level: int) -> None:
        """CPU slots: frees the KV cache and, at level 2, the weights, and gives the memory back to the system."""
        if not hasattr(self, "_nrl_released"):
            model = self.model_runner.get_model()
            dropped = [*model.parameters(), *model.buffers()] if level == 2 else []
            buffers = (
                {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers() if buffer.numel()}
                if level == 2
                else {}
            )
            sizes = [(storage, storage.nbytes()) for storage in _storages([*dropped, self.model_runner.kv_caches])]
            self._nrl_released = buffers, sizes
        for storage, _ in self._nrl_released[1]:
            storage.resize_(0)
        release_cached_memory(self.device)

    def nrl_restore_memory(self) -> None:
        """CPU slots: makes the memory resident again with buffers restored and KV cache zeroed; dropped weights need a
        sync. Raises MemoryError: the machine has not as much left; nothing has changed then.
        """
        if not hasattr(self, "_nrl_released"):
            return
        buffers, sizes = self._nrl_released
        needed, available = sum(nbytes for _, nbytes in sizes), free_memory(self.device)
        if needed > available:
            raise MemoryError(f"{needed >> 20} MiB are needed to wake, the machine has {available >> 20} MiB left")
        # vLLM's weight loading copies into these very tensors, so their storages grow back in place.
        for storage, nbytes in sizes:
            storage.resize_(nbytes)
        for buffer, saved in buffers.values():
            buffer.copy_(saved)
        for storage in _storages(self.model_runner.kv_caches):
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        del self._nrl_released


def _storages(tree: object) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}

    def visit(node: object) -> None:
        if isinstance(node, torch.Tensor):
            storage = node.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
        elif isinstance(node, dict):
            for item in node.values():
                visit(item)
        elif isinstance(node, (list, tuple)):
            for item in node:
                visit(item)

    visit(tree)
    return list(found.values())
