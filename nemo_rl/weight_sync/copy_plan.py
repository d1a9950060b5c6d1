"""The effect of a model's loader on a window, as a list of copies that can be replayed without the loader.

While a loader runs for a layout that was not seen before, every tensor operation on the window and on the model is
watched. If all of them were views, copies from the window into parameters or buffers, and fills with a constant, then
the list of these is what the loader does with that layout: later windows of it are copied by a few kernels, with no
Python per tensor. Invariants: a replay leaves the bits that the loader would have left; a loader that did anything
else, in any window of a session, always runs itself; a plan never outlives the parameters that it was made for.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl.weight_sync.layout import BucketLayout, Window

if TYPE_CHECKING:
    from torch._ops import OpOverload

logger = logging.getLogger(__name__)

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], None]

# Windows may be cut differently when memory is short for a while; what no session used for so long is forgotten.
_KEPT_SESSIONS = 4
# These bypass the dispatcher: reads and writes through them are not seen there.
_ESCAPES = frozenset({"data_ptr", "numpy", "tolist", "storage", "untyped_storage", "__array__", "__dlpack__"})
_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class _Source:
    """A strided part of a window; `start` in bytes, `strides` in elements."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Stage:
    """Writes to places that do not overlap, so that they may be done in any order."""

    together: dict[torch.dtype, tuple[list[torch.Tensor], list[_Source]]] = field(default_factory=dict)
    single: list[tuple[torch.Tensor, _Source]] = field(default_factory=list)
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    def reserve(self, place: torch.Tensor) -> bool:
        """Takes the bytes from a place's first to its last; False where some are taken."""
        start, end = _span(place)
        at = bisect_left(self.taken, (start, end))
        if (at and self.taken[at - 1][1] > start) or (at < len(self.taken) and self.taken[at][0] < end):
            return False
        self.taken.insert(at, (start, end))
        return True


class CopyPlan:
    """The copies and fills of one window, in stages."""

    def __init__(self) -> None:
        self._stages = [_Stage()]

    def add_copy(self, place: torch.Tensor, source: _Source) -> None:
        """Appends a copy."""
        stage = self._stage_for(place)
        # Equal layouts on both sides are copied by one kernel for all; the rest one by one, with copy_'s own rules.
        alike = place.dtype == source.dtype and tuple(place.shape) == source.shape and place.is_contiguous()
        if alike and source.strides == place.stride():
            places, sources = stage.together.setdefault(place.dtype, ([], []))
            places.append(place)
            sources.append(source)
        else:
            stage.single.append((place, source))

    def add_fill(self, place: torch.Tensor, value: float) -> None:
        """Appends a fill with a constant."""
        self._stage_for(place).fills.append((place, value))

    def _stage_for(self, place: torch.Tensor) -> _Stage:
        if not self._stages[-1].reserve(place):
            self._stages.append(_Stage())
            self._stages[-1].reserve(place)
        return self._stages[-1]

    @torch.no_grad()
    def replay(self, window_B: torch.Tensor) -> None:
        """Copies a window of the plan's layout into the model. `window_B`: uint8, on the device that the plan was made
        on.
        """
        typed: dict[torch.dtype, torch.Tensor] = {}

        def view(source: _Source) -> torch.Tensor:
            size = source.dtype.itemsize
            if source.dtype not in typed:
                typed[source.dtype] = window_B[: window_B.numel() // size * size].view(source.dtype)
            base = typed[source.dtype]
            return base.as_strided(source.shape, source.strides, base.storage_offset() + source.start // size)

        for stage in self._stages:
            for places, sources in stage.together.values():
                torch._foreach_copy_(places, [view(source) for source in sources])
            for place, source in stage.single:
                place.copy_(view(source))
            for place, value in stage.fills:
                place.fill_(value)


class CopyPlans:
    """The plans of one model, by layout.

    Plans are believed once a whole session was loaded without a refusal; one refusal is for good, or until parameters
    are replaced: a loader may count what it was given, and must then be given everything.

    Args:
        model: The model as it is now.
    """

    def __init__(self, model: Callable[[], torch.nn.Module]) -> None:
        self._model = model
        self._plans: dict[tuple[BucketLayout, ...], CopyPlan] = {}
        self._seen: dict[tuple[BucketLayout, ...], CopyPlan] = {}
        self._used: dict[tuple[BucketLayout, ...], int] = {}
        self._session = 0
        self._known_as: object = None
        self._checked = False
        self.refusal: str | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def begin(self) -> None:
        """A session begins: parameters may have been replaced since the last one."""
        self._session += 1
        self._checked = False
        self._seen.clear()

    def load(self, window: Window, loader: Loader) -> bool:
        """Replays the window's plan, or lets the loader take it. Returns whether it was a replay."""
        if not self._checked:
            self._check_model()
        plan = self._plans.get(window.buckets)
        if plan is not None:
            plan.replay(window.bytes_B)
            self._used[window.buckets] = self._session
            return True
        if self.refusal is not None:
            loader(window)
            return False
        seen = watch(self._model(), window, loader)
        if isinstance(seen, CopyPlan):
            self._seen[window.buckets] = seen
        else:
            self.refusal = seen
            self._plans.clear()
            self._seen.clear()
            logger.warning("copy_plan=refused reason=%s", seen.replace(" ", "_"))
        return False

    def finish(self) -> None:
        """Accepts the plans seen in this session, all of whose windows were loaded."""
        if self._seen:
            logger.info("copy_plan=believed windows=%d", len(self._seen))
        self._plans |= self._seen
        self._used |= dict.fromkeys(self._seen, self._session)
        self._seen.clear()
        for old in [key for key, used in self._used.items() if self._session - used >= _KEPT_SESSIONS]:
            self._plans.pop(old, None)
            del self._used[old]

    def abandon(self) -> None:
        """The session ended half-way."""
        self._seen.clear()

    def _check_model(self) -> None:
        now = fingerprint(self._model())
        if now != self._known_as:
            self._plans.clear()
            self._seen.clear()
            self._used.clear()
            self.refusal = None
        self._known_as = now
        self._checked = True


def fingerprint(model: torch.nn.Module) -> list[object]:
    """Address and layout of every parameter and buffer. Memory that a plan refers to is not given to another tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for tensor in chain(model.parameters(), model.buffers())
        ]


def watch(model: torch.nn.Module, window: Window, loader: Loader) -> CopyPlan | str:
    """Runs the loader on a window; the copies that it made, or why they are not all that it did."""
    storage = window.bytes_B.untyped_storage()
    before, references = fingerprint(model), _references(storage)
    operations = _Operations(model, window.bytes_B)
    with _Escapes(operations), operations:
        loader(window)
    if operations.refusal is None and fingerprint(model) != before:
        operations.refusal = "parameters were replaced while weights were loaded"
    if operations.refusal is None and _references(storage) != references:
        gc.collect()
        if _references(storage) != references:
            operations.refusal = "the loader kept a tensor of the window"
    return operations.plan if operations.refusal is None else operations.refusal


def _references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class _Operations(TorchDispatchMode):
    """Sees what reaches the dispatcher, and makes a plan of it."""

    def __init__(self, model: torch.nn.Module, window_B: torch.Tensor) -> None:
        super().__init__()
        self.plan = CopyPlan()
        self.refusal: str | None = None
        self._device = window_B.device
        self._window = (window_B.data_ptr(), window_B.data_ptr() + window_B.numel())
        storages = [tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers())]
        self._model = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            touched = self.touches((args, kwargs))
            if touched:
                self._note(func, args)
            else:
                self._note_other(func, args)
            result = func(*args, **kwargs)
            # reshape and the like promise a view, and give a copy where there is none.
            if touched and func.is_view and not all(self._known(t) for t in _tensors(result)):
                self.refuse(f"{func} copied weights")
        return result

    def refuse(self, reason: str) -> None:
        """There will be no plan; the first reason is kept."""
        self.refusal = self.refusal or reason

    def touches(self, values: object) -> bool:
        """Whether a tensor is in the window or the model."""
        return any(tensor.numel() and self._known(tensor) for tensor in _tensors(values))

    def _known(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or self._in_window(tensor) or self._in_model(tensor)

    def _in_window(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self._device:
            return False
        start, end = _span(tensor)
        return self._window[0] <= start and end <= self._window[1]

    def _in_model(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self._device:
            return False
        start, end = _span(tensor)
        at = bisect_right(self._model, start, key=lambda place: place[0]) - 1
        return at >= 0 and end <= self._model[at][1]

    def _note(self, func: OpOverload[..., object], args: tuple[Any, ...]) -> None:
        if func is _COPY:
            self._note_copy(args[0], args[1])
        elif func in _FILLS and self._in_model(args[0]):
            self.plan.add_fill(_plain(args[0]), args[1] if len(args) > 1 else 0)
        elif not func.is_view:
            self.refuse(f"{func} on weights is no copy")

    def _note_other(self, func: OpOverload[..., object], args: object) -> None:
        # A tensor of the model that is neither parameter nor buffer would miss the loader's writes.
        if func._schema.is_mutable and any(tensor.numel() for tensor in _tensors(args)):
            self.refuse(f"{func} wrote beside the model")

    def _note_copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        if not place.numel():
            return
        if not self._in_model(place) or not self._in_window(source):
            self.refuse("a copy went elsewhere than from the window into the model")
        elif source.is_conj() or source.is_neg():
            self.refuse("a copy changed signs")
        else:
            start = source.data_ptr() - self._window[0]
            strided = _Source(start, tuple(source.shape), tuple(source.stride()), source.dtype)
            if start % source.element_size():
                self.refuse("a copy began within an element")
            self.plan.add_copy(_plain(place), strided)


class _Escapes(TorchFunctionMode):
    """Sees calls that hand out memory past the dispatcher."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _ESCAPES and self._operations.touches(args):
            self._operations.refuse(f"{name} of weights was taken")
        return func(*args, **(kwargs or {}))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def _tensors(values: object) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
