"""An engine's resident memory: puts its weights and KV cache to sleep, and wakes them.

Engines of one device take turns where one reads how much memory is free or in use, and another would change it. A turn
is an abstract Unix socket, which one process of a machine holds at a time and which the system takes back when that
process ends, however it ends. Invariants: of the engines of one device at most one starts, sleeps or wakes; slept
memory is verified to be free, or an error is raised; an engine that could not wake stays asleep.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.interfaces import GenerationError, MemoryNotFreedError, WakeError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# Several engines that compile for the first time are minutes apart.
_WAIT_S = 1800.0
_POLL_S = 0.01


@asynccontextmanager
async def device_turn(device: str | None, *, timeout_s: float = _WAIT_S) -> AsyncGenerator[None]:
    """Waits for the others of a device, and has them wait until the block ends.

    Args:
        device: Its name, which no other device of the machine has; None where there are no others.
        timeout_s: How long to wait, in seconds.

    Raises GenerationError: the others did not end in time.
    """
    if device is None:
        yield
        return
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while not _taken(turn, device):
            if time.monotonic() > deadline:
                raise GenerationError(
                    f"the other engines of this device (policy.generation.vllm_cfg.engines_per_gpu) did not end to "
                    f"start, sleep or wake within {timeout_s:.0f} s"
                )
            await asyncio.sleep(_POLL_S)
        yield


def _taken(turn: socket.socket, device: str) -> bool:
    try:
        turn.bind(f"\0nemo_rl_device_{device}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


_FREED_SHARE = 0.9
_FREED_WITHIN_S = 10.0


class EngineMemory:
    """Memory of one engine.

    Args:
        rpc: A method's answer of every rank.
        alive: Awaits a call of the engine's process, or raises if that died.
        cuda: Whether vLLM itself frees memory; on CPU slots the worker extension does.
        sleep_level: 2 drops the weights, 1 keeps them on the host.
        device: Name of a device shared with other engines; None for one of its own.
        has_neighbours: Whether other jobs use the device; free memory then cannot be verified by measuring.

    Attributes:
        asleep: Which of `weights` and `kv_cache` are not resident.
        holds_group: Whether ranks may hold a sync session's group, which they drop before they sleep.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        rpc: Callable[..., Awaitable[list[Any]]],
        alive: Callable[[Coroutine[object, object, object]], Awaitable[object]],
        *,
        shard: int,
        cuda: bool,
        sleep_level: int,
        device: str | None = None,
        has_neighbours: bool = False,
    ) -> None:
        self._has_neighbours = has_neighbours
        self._engine, self._rpc, self._alive, self._shard = engine, rpc, alive, shard
        self._cuda, self._sleep_level, self._device = cuda, sleep_level, device
        self.asleep: set[str] = set()
        self.holds_group = False

    async def sleep(self, level: int) -> dict[str, int]:
        """Drops weights and KV cache (level 1: keeps the weights on the host); bytes in use before and after, over
        ranks, and `kept`: what the rank that keeps most holds while it sleeps. Raises MemoryNotFreedError: the memory
        did not come back.
        """
        async with device_turn(self._device):
            return await self._sleep(level)

    async def _sleep(self, level: int) -> dict[str, int]:
        await self._drop_group()
        if self.asleep and self._cuda:
            # vLLM 0.26 does not put an engine to sleep a part of which sleeps.
            await self._alive(self._engine.wake_up(["kv_cache"]))
        resident = await self._rpc("nrl_model_bytes")
        before = await self.allocated()
        await self._alive(self._engine.sleep(level=level))
        if not self._cuda:
            await self._rpc("nrl_release_memory", level)
        # The host copy of level 1 counts as resident memory on a CPU slot.
        expected = sum(rank["kv_cache"] + (rank["weights"] if level == 2 or self._cuda else 0) for rank in resident)
        self.asleep = {"weights", "kv_cache"}
        after = await self._freed(before, expected)
        # On a CPU slot that is all of its process.
        kept = await self._rpc("nrl_kept_bytes" if self._cuda else "nrl_allocated_bytes")
        return {"before": before, "after": after, "kept": max(kept)}

    async def _drop_group(self) -> None:
        if self.holds_group:
            await self._rpc("nrl_drop_group")
            self.holds_group = False

    async def allocated(self) -> int:
        """Bytes over ranks (`allocated_bytes`)."""
        return sum(await self._rpc("nrl_allocated_bytes"))

    async def _freed(self, before: int, expected: int) -> int:
        deadline = time.monotonic() + _FREED_WITHIN_S
        while True:
            after = await self.allocated()
            if self._has_neighbours or before - after >= _FREED_SHARE * expected:
                return after
            if time.monotonic() > deadline:
                raise MemoryNotFreedError(
                    f"shard {self._shard} slept, but only {(before - after) >> 20} of {expected >> 20} MiB "
                    f"came back within {_FREED_WITHIN_S:.0f} s; "
                    "its memory must not be given to anybody"
                )
            await asyncio.sleep(0.05)
            if not self._cuda:
                # What the last requests held may be freed only now, and the system gets it only when that is asked for.
                await self._rpc("nrl_release_memory", self._sleep_level)

    async def wake(self, tags: list[str]) -> None:
        """Makes memory resident again. Raises WakeError: the memory is not there; the engine sleeps as before."""
        async with device_turn(self._device):
            await self._wake([tag for tag in ("weights", "kv_cache") if tag in tags and tag in self.asleep])

    async def _wake(self, wanted: list[str]) -> None:
        if not wanted:
            return
        try:
            if self._cuda:
                await self._alive(self._engine.wake_up(wanted))
            elif "weights" in wanted:
                await self._rpc("nrl_restore_memory")
        # vLLM passes errors of its engine process on as plain Exception.
        except Exception as error:
            await self._back_to_sleep()
            raise WakeError(
                f"shard {self._shard} could not wake {' and '.join(wanted)}: {error}; it sleeps again"
            ) from error
        self.asleep -= set(wanted)
        if not self.asleep:
            if not self._cuda:
                await self._alive(self._engine.wake_up(None))
            await self._alive(self._engine.reset_prefix_cache())

    async def _back_to_sleep(self) -> None:
        await self._drop_group()
        resident = (
            0 if "weights" in self.asleep else sum(rank["weights"] for rank in await self._rpc("nrl_model_bytes"))
        )
        before = await self.allocated()
        self.asleep = {"weights", "kv_cache"}
        if self._cuda:
            await self._engine.sleep(level=self._sleep_level)
        else:
            await self._rpc("nrl_release_memory", self._sleep_level)
        await self._freed(before, resident)
