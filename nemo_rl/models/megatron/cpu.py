"""Runs Megatron-Core without CUDA: every change to it, in one place.

Megatron asks `torch.cuda` for the device of every buffer it makes, names devices "cuda", and checks the precision of
parameters by their CUDA type names. None of that is arithmetic, so the answers can be the host's:

1. The name `torch` inside Megatron's own modules becomes a view of torch whose `cuda` answers for the host and whose
   factories take "cuda" to mean the host. torch itself is not changed for other modules.
2. `Tensor.cuda()` and `Module.cuda()`, which only fail here, return what they are called on.
3. The tracker of CUDA random states is Megatron's own for inference, which keeps none: nothing here draws numbers on a
   device, for dropout is refused.
4. A parameter's `type()` is that of a CUDA parameter, by which Megatron's optimizer sorts precisions.
5. Numbers of tokens that experts exchange become numpy arrays, as they do where they come from a device.
6. Pieces of unequal size, which ranks with different experts exchange where each expert is cut too, travel one by one:
   gloo's own gather and scatter take equal ones alone.
7. Fused functions are not compiled (`options`): on a host compiling them costs more than they save.

Invariant: with CUDA every function here does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_HOST = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn", "zeros_like", "empty_like")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def _nothing_happens(*_: object, **__: object) -> None: ...


class _Nothing:
    """A stream or event of a device that does everything in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, *_: object) -> _Nothing:
        return _Nothing()

    def __getattr__(self, name: str) -> Any:
        return _nothing_happens


class _HostDevice(ModuleType):
    """`torch.cuda`, answering for the host."""

    Stream = _Nothing
    Event = _Nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _HOST

    def synchronize(self, *_: object) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed(self, _: int) -> None: ...

    def current_stream(self, *_: object) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    def stream(self, _: object) -> Any:
        return nullcontext()

    def get_rng_state(self, *_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, *_: object, **__: object) -> None: ...

    @property
    def random(self) -> _HostDevice:
        return self

    @property
    def nvtx(self) -> _Nothing:
        return _Nothing()


class _HostDistributed(ModuleType):
    """`torch.distributed`, with pieces of unequal size."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(
        self, pieces: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None = None, **options: object
    ) -> object:
        if len({piece.shape for piece in pieces}) == 1:
            return dist.all_gather(pieces, own, group=group, **options)
        for source, piece in zip(dist.get_process_group_ranks(group), pieces, strict=True):
            if source == dist.get_rank():
                piece.copy_(own)
            dist.broadcast(piece, src=source, group=group)
        return None

    def reduce_scatter(
        self, own: torch.Tensor, pieces: list[torch.Tensor], group: dist.ProcessGroup | None = None, **options: Any
    ) -> object:
        if len({piece.shape for piece in pieces}) == 1:
            return dist.reduce_scatter(own, pieces, group=group, **options)
        for target, piece in zip(dist.get_process_group_ranks(group), pieces, strict=True):
            summed = piece.clone()
            dist.reduce(summed, dst=target, group=group)
            if target == dist.get_rank():
                own.copy_(summed)
        return None


def _on_host(make: Callable[..., object]) -> object:
    def made(*args: object, **kwargs: object) -> object:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _HOST
        return make(*args, **kwargs)

    return made


class _HostTorch(ModuleType):
    """torch as Megatron's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _HostDevice("torch.cuda")
        self.distributed = _HostDistributed("torch.distributed")
        for name in _FACTORIES:
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_VIEW = _HostTorch()


def install() -> None:
    """Changes the Megatron modules that are imported so far; called again after further ones are."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = _VIEW
    from megatron.core.tensor_parallel import random

    random.__dict__["_lazy_call"] = _nothing_happens
    random.initialize_rng_tracker(inference_rng_tracker=True)
    dispatcher = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is not None:
        dispatcher.__dict__["maybe_move_tensor_to_cpu"] = _as_host_value
    setattr(torch.Tensor, "cuda", _itself)  # noqa: B010 - torch's stub declares a method
    setattr(nn.Module, "cuda", _itself)  # noqa: B010


def _itself(self: object, *_: object, **__: object) -> object:
    return self


def _as_host_value(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def name_types(module: nn.Module) -> None:
    """Gives every parameter of a module the type name of its precision on CUDA; called before an optimizer is built."""
    if torch.cuda.is_available():
        return
    for parameter in module.parameters():
        parameter.__dict__["type"] = _TypeName(_TYPE_NAMES[parameter.dtype])


class _TypeName:
    """A parameter's `type()`; a class, so that the parameter can still be copied and pickled."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> str:
        return self._name


def options() -> dict[str, object]:
    """Fields of Megatron's transformer configuration that a host needs; none with CUDA."""
    if torch.cuda.is_available():
        return {}
    return {
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "gradient_accumulation_fusion": False,
        "async_tensor_model_parallel_allreduce": False,
        "batch_p2p_comm": True,
        "deallocate_pipeline_outputs": False,
    }
