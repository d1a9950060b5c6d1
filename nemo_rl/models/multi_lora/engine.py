"""Several adapters in one vLLM engine: its actor's class, and which version of which adapter a request is drawn with.

A version of an adapter is one of vLLM's adapters, under a number of its own, so that vLLM's prefix cache keeps versions
apart. A request keeps the version that it began with; the one before is removed once no request uses it. Invariant:
every token of a request with an adapter is of the version that its span names.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, ShardStateError, StaleVersionError
from nemo_rl.models.generation.vllm.engine_actors import Rendezvous
from nemo_rl.models.generation.vllm.request_state import ResultBuffer
from nemo_rl.models.generation.vllm.worker import VllmGenerationWorker
from nemo_rl.models.multi_lora.cpu_kernels import use_grouped_products
from nemo_rl.utils.adapter_files import AdapterInfo, write_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

WORKER = "nemo_rl.models.multi_lora.engine.MultiLoraGenerationWorker"
LAYERS = "lora_target_modules"
"""Engine argument: kinds of layers that adapters may have; the others compute nothing for them."""


@dataclass(frozen=True)
class HeldAdapter:
    """One version of an adapter in the engine."""

    name: str
    version: int
    number: int  # vLLM's
    folder: str  # PEFT directory on this host

    def request(self) -> LoRARequest:
        """The adapter as vLLM names it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"{self.name}@{self.version}", self.number, self.folder)


@dataclass
class AdapterTable:
    """The newest version of each adapter, and what requests use."""

    newest: dict[str, HeldAdapter] = field(default_factory=dict)
    used: dict[str, HeldAdapter] = field(default_factory=dict)  # by request
    _numbers: int = 0

    def number(self) -> int:
        """A number that no version had before."""
        self._numbers += 1
        return self._numbers

    def bind(self, request_id: str, name: str) -> HeldAdapter:
        """A request begins. Raises ShardStateError: the engine has no such adapter."""
        if name not in self.newest:
            raise ShardStateError(
                f"the engine has no adapter {name}; it has {', '.join(sorted(self.newest)) or 'none'}: the adapter was "
                "removed, or the shard was rebuilt and not restored"
            )
        self.used[request_id] = self.newest[name]
        return self.newest[name]

    def release(self, request_id: str) -> HeldAdapter | None:
        """A request ends; the version that nothing needs any more, if any."""
        held = self.used.pop(request_id)
        return held if self.idle(held) else None

    def put(self, held: HeldAdapter) -> HeldAdapter | None:
        """A new version; the one before if nothing needs it any more."""
        before = self.newest.get(held.name)
        self.newest[held.name] = held
        return before if before is not None and self.idle(before) else None

    def remove(self, name: str) -> HeldAdapter | None:
        """Forgets an adapter; its newest version if nothing needs it any more."""
        held = self.newest.pop(name, None)
        return held if held is not None and self.idle(held) else None

    def idle(self, held: HeldAdapter) -> bool:
        """Whether a version is neither the newest of its adapter nor used by a request."""
        return self.newest.get(held.name) != held and held not in self.used.values()


class _EngineWithAdapters:
    """vLLM's engine, with the adapter that each request is bound to."""

    def __init__(self, engine: AsyncLLM, table: AdapterTable) -> None:
        self._engine, self._table = engine, table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: object, sampling: object, request_id: str) -> AsyncIterator[RequestOutput]:
        held = self._table.used.get(request_id)
        lora = None if held is None else held.request()
        return self._engine.generate(prompt, sampling, request_id, lora_request=lora)


class MultiLoraGenerationWorker(VllmGenerationWorker):
    """One engine with adapters. See `VllmGenerationWorker`."""

    def __init__(self, *args: Any, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._adapters = AdapterTable()
        self._folder = Path(tempfile.mkdtemp(prefix="nemo-rl-adapters-"))
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._dropping: set[asyncio.Task[None]] = set()

    @override
    def _new_engine(self, kwargs: dict[str, object], rendezvous: Rendezvous | None) -> _EngineWithAdapters:
        from vllm.engine.arg_utils import AsyncEngineArgs

        # Older vLLM adapts all layers.
        known = {field.name for field in fields(AsyncEngineArgs)}
        kwargs = {key: value for key, value in kwargs.items() if key != LAYERS or key in known}
        if not torch.cuda.is_available():
            use_grouped_products()
        return _EngineWithAdapters(super()._new_engine(kwargs, rendezvous), self._adapters)

    async def load_adapter(
        self, name: str, version: int, info: AdapterInfo, factors: Mapping[str, torch.Tensor]
    ) -> None:
        """Takes a version of an adapter; requests that begin from here on are drawn with it. Other adapters' requests
        run on. Loading the version that is there changes nothing.

        Args:
            factors: By `<layer>.lora_A` and `<layer>.lora_B`.

        Raises StaleVersionError: a newer version is there.
        """
        async with self._loading[name]:
            there = self._adapters.newest.get(name)
            if there is not None and there.version >= version:
                if there.version > version:
                    raise StaleVersionError(f"adapter {name}: version {version} came after version {there.version}")
                return
            number = self._adapters.number()
            held = HeldAdapter(name, version, number, str(self._folder / str(number)))
            await asyncio.to_thread(write_adapter, held.folder, info, factors)
            await self._alive(self._engine.add_lora(held.request()))
            # Nothing needs the version before, and its removal waits for a step of the engine.
            self._drop_soon(self._adapters.put(held))

    async def remove_adapter(self, name: str) -> None:
        """Forgets an adapter; nothing to do when it is not there."""
        async with self._loading[name]:
            await self._drop(self._adapters.remove(name))

    async def adapter_versions(self) -> dict[str, int]:
        """The newest version of each adapter here."""
        return {name: held.version for name, held in self._adapters.newest.items()}

    def _drop_soon(self, held: HeldAdapter | None) -> None:
        if held is not None:
            task = asyncio.get_running_loop().create_task(self._drop(held))
            self._dropping.add(task)
            task.add_done_callback(self._dropped)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._dropping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An engine that has died is found by its next request.
            logger.warning("adapter removal=failed reason=%s", error)

    async def _drop(self, held: HeldAdapter | None) -> None:
        if held is not None:
            await self._alive(self._engine.remove_lora(held.number))
            await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)

    @override
    async def _generate(self, request: GenerationRequest, result_buffer: ResultBuffer) -> GenerationResult:
        if not request.adapter:
            # vLLM on CPU would draw it with an adapter of another request of its batch.
            raise ShardStateError(f"request {request.request_id} names no adapter, and these engines serve no other")
        held = self._adapters.bind(request.request_id, request.adapter)
        try:
            result = await super()._generate(request, result_buffer)
        finally:
            unused = self._adapters.release(request.request_id)
            if unused is not None:
                await self._drop(unused)
        spans = tuple(replace(span, version=held.version, adapter=held.name) for span in result.spans)
        return replace(result, spans=spans)

    @override
    async def wake_up(self, tags: list[str]) -> None:
        """See `VllmGenerationWorker.wake_up`; loads the adapters again with the weights."""
        asleep = "weights" in self._memory.asleep
        await super().wake_up(tags)
        if asleep and "weights" not in self._memory.asleep:
            for name in list(self._adapters.newest):
                async with self._loading[name]:
                    held = self._adapters.newest.get(name)
                    if held is not None:
                        await self._alive(self._engine.remove_lora(held.number))
                        await self._alive(self._engine.add_lora(held.request()))

    @override
    async def shutdown(self) -> None:
        await super().shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
