"""The worker extension of vLLM: loads weights, and frees the memory of CPU slots.

Runs in vLLM's worker process; its methods are called by `collective_rpc` with plain values. The base weights of a
policy with adapters never change, and every engine has their files: a refit then sends the factors, whose product is
added to the base. Invariants: after a release the memory is back with the system; after restore and reload the model
computes exactly the same; adapted weights equal merged ones up to the rounding of one float32 product.

`ReceiverMethods` is for sync services that drive a receiver step by step (group, buckets, finalise, verify), by the
names and arguments that schedulers use; layout, transports and loading are those of a session. Invariants: a rank that
is not in a mask does nothing; a group is destroyed at most once; nothing is finalised twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from nemo_rl.config.errors import UserError
from nemo_rl.distributed import devices
from nemo_rl.distributed.nsight import capture
from nemo_rl.models.generation.vllm.engine_processes import end_without_last_collection, follow_owner
from nemo_rl.models.generation.vllm.recorder import StepRecorder, Taken
from nemo_rl.utils.adapter_files import FACTORS
from nemo_rl.weight_sync.copy_plan import CopyPlans
from nemo_rl.weight_sync.layout import BucketLayout, TensorMeta, Window, dtype_of, unpack
from nemo_rl.weight_sync.receiver import (
    ChecksumMismatchError,
    LoadTarget,
    SyncProtocolError,
    WeightReceiver,
    make_opener,
)
from nemo_rl.weight_sync.transports import BroadcastGroup, TransportName

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase


def bucket_stats(weights: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
    """Sum, largest and smallest value of each tensor: what `verify_model` compares."""
    return {name: (float(t.double().sum()), float(t.max()), float(t.min())) for name, t in weights.items() if t.numel()}


_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.(?P<kind>lora_[AB])(?:\.\w+)?(?:\.weight)?")


def factor_name(name: str) -> str | None:
    """The name of an adapter's factor as engines take it, `<layer>.lora_A` `[rank, in]` or `<layer>.lora_B` `[out,
    rank]`, from that or from PEFT's name; None for a whole weight. The scale of the product (alpha / rank) is in
    `lora_B`, and an engine adds the product to the weight in its own model files.
    """
    found = _PEFT.fullmatch(name)
    return None if found is None else f"{found['layer']}.{found['kind']}"


class ReceiverMethods:
    """Mixed into the worker extension; `self` is vLLM's worker."""

    device: torch.device
    rank: int

    def nrl_load_target(self) -> LoadTarget:
        """The model, ready to take weights."""
        raise NotImplementedError

    def _nrl_update(self) -> dict[str, Any]:
        if not hasattr(self, "_nrl_direct"):
            self._nrl_direct: dict[str, object] = {"groups": {}, "open": False, "stats": {}}
        return self._nrl_direct

    def _nrl_load(self, weights: dict[str, torch.Tensor], is_lora: bool) -> None:
        named = {factor_name(name) or name if is_lora else name: tensor for name, tensor in weights.items()}
        for name in weights:
            if is_lora != (factor_name(name) is not None):
                what = "is no factor of an adapter" if is_lora else "is a factor of an adapter"
                raise SyncProtocolError(f"is_lora={is_lora}: {name!r} {what}; send factors and whole weights apart")
        update = self._nrl_update()
        if not update["open"]:
            # It keeps what has come until it is finalised.
            update["target"] = self.nrl_load_target()
            update["target"].begin_load()
            update["open"] = True
            update["stats"].clear()
        update["target"].load_weights(named.items())
        update["stats"] |= bucket_stats(weights)

    def setup_collective_group(
        self, model_update_name: str, comm_plan: dict[int, dict[str, Any]], mode: str, timeout_s: float | None
    ) -> bool:
        """Joins a group that `broadcast_parameter` receives from: over NCCL, or gloo on CPU slots.

        Args:
            comm_plan: Per local rank `{address, port, rank, world_size}`; a rank that is not named takes no part.
            mode: `receiver`.
            timeout_s: Deadline of rendezvous and collectives; null is 120 s.

        Returns true: this rank is ready, as a member or because it takes no part.
        """
        if mode != "receiver":
            raise ValueError(f"mode={mode!r}: an engine worker only receives; expected 'receiver'")
        plan = comm_plan.get(self.rank)
        if plan is None:
            return True
        place = (plan["address"], plan["port"], plan["rank"], plan["world_size"], timeout_s or 120.0)
        self._nrl_update()["groups"][model_update_name] = BroadcastGroup(*place, self.device)
        return True

    def update_parameter_in_bucket(
        self,
        payload_list: Sequence[Mapping[str, Any]],
        is_lora: bool,
        ipc_local_ranks: Sequence[int],
        model_update_transport: str,
    ) -> None:
        """Loads buckets that this rank can map or is handed.

        Args:
            payload_list: Buckets `{param_names, shapes, dtypes, offsets, used_bytes}` with the bytes under
                `cpu_uint8_bucket` (bytes; `cpu_serialize`) or a staging buffer's `handle` (`cuda_ipc`, `host`).
            is_lora: Whether these are factors of low-rank adapters; see `factor_name`.
            ipc_local_ranks: Ranks that take these buckets.
            model_update_transport: `cpu_serialize`, `cuda_ipc` or `host`.
        """
        if self.rank not in ipc_local_ranks:
            return
        opener = (
            None
            if model_update_transport == "cpu_serialize"
            else make_opener(_transport(model_update_transport), self.device)
        )
        for payload in payload_list:
            metas = tuple(
                TensorMeta(n, tuple(s), d)
                for n, s, d in zip(payload["param_names"], payload["shapes"], payload["dtypes"], strict=True)
            )
            layout = BucketLayout(metas, tuple(payload["offsets"]), payload["used_bytes"])
            if opener is not None:
                received_B = opener.open(payload["handle"])
            else:
                received_B = torch.frombuffer(bytearray(payload["cpu_uint8_bucket"]), dtype=torch.uint8).to(self.device)
            if received_B.numel() < layout.nbytes:
                raise SyncProtocolError(f"a bucket of {layout.nbytes} bytes came with {received_B.numel()}")
            self._nrl_load(dict(unpack(received_B, layout)), is_lora)
        if opener is not None:
            opener.close()

    def broadcast_parameter(
        self,
        group_name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        is_lora: bool,
        broadcast_local_ranks: Sequence[int],
    ) -> None:
        """Receives tensors one by one from rank 0 of a group, and loads them; `is_lora` as for buckets."""
        if self.rank not in broadcast_local_ranks:
            return
        group = self._nrl_update()["groups"].get(group_name)
        if group is None:
            raise SyncProtocolError(f"group {group_name!r} was not set up on rank {self.rank}")
        weights = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weights[name] = torch.empty(tuple(shape), dtype=dtype_of(dtype), device=self.device)
            group.broadcast(weights[name])
        self._nrl_load(weights, is_lora)

    def destroy_collective_group(self, group_name: str) -> None:
        """Leaves a group; nothing to do on a rank that never joined."""
        group = self._nrl_update()["groups"].pop(group_name, None)
        if group is not None:
            group.close()

    def finalize_weight_update(self) -> None:
        """Finalises the model once all buckets were loaded; nothing to do when none was."""
        update = self._nrl_update()
        if update["open"]:
            update["target"].finish_load()
            update["open"] = False

    def verify_model(self, expected_stats: dict[str, Sequence[float]]) -> None:
        """Compares sum, largest and smallest value of every tensor that was received with the sender's. Raises
        ChecksumMismatchError: a tensor is missing or differs.
        """
        got = self._nrl_update()["stats"]
        for name, expected in expected_stats.items():
            if name not in got:
                raise ChecksumMismatchError(f"{name!r} was never received")
            if any(abs(a - b) > 1e-6 * max(1.0, abs(b)) for a, b in zip(got[name], expected, strict=True)):
                raise ChecksumMismatchError(f"{name!r}: received {tuple(got[name])}, sent {tuple(expected)}")


def _transport(name: str) -> TransportName:
    if name == "cuda_ipc" or name == "host":
        return name
    raise ValueError(f"model_update_transport={name!r}: choose cpu_serialize, cuda_ipc or host")


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
        return {"pid": os.getpid(), "rank": self.rank, "device": devices.device_uuid(self.device)}

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

    def nrl_memory(self, figure: str) -> int:
        """Bytes of this worker's device by a function of `distributed.devices`, such as `memory_in_use`."""
        return getattr(devices, figure)(self.device)

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
        return _VllmModel(self)

    def nrl_receiver(self, step: str, *args: object) -> object:
        """A step of a sync session: a method of this rank's `WeightReceiver`, which the first call makes."""
        if not hasattr(self, "_nrl_weight_receiver"):
            self._nrl_weight_receiver = WeightReceiver(self.nrl_load_target(), self.device)
        return getattr(self._nrl_weight_receiver, step)(*args)

    def nrl_begin_sync(self, session: dict[str, object], routes: list[dict[str, object]]) -> None:
        """Opens a sync session; `routes` holds the weights' route to every rank of this engine."""
        self.nrl_receiver("begin", session | routes[self.rank])

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
        devices.release_cached_memory(self.device)

    def nrl_restore_memory(self) -> None:
        """CPU slots: makes the memory resident again with buffers restored and KV cache zeroed; dropped weights need a
        sync. Raises MemoryError: the machine has not as much left; nothing has changed then.
        """
        if not hasattr(self, "_nrl_released"):
            return
        buffers, sizes = self._nrl_released
        needed, available = sum(nbytes for _, nbytes in sizes), devices.free_memory(self.device)
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
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())
