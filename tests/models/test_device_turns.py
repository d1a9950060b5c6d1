"""Engines of one device move one after the other, and what one gives back is measured as if it were alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.generation.vllm import worker
from nemo_rl.models.generation.vllm.worker import EngineMemory, device_turn

HOLDER = """
import asyncio, sys
from nemo_rl.models.generation.vllm.worker import device_turn

async def hold():
    async with device_turn(sys.argv[1]):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(hold())
"""


def name() -> str:
    return uuid.uuid4().hex


def test_turns_of_one_device_never_overlap_and_those_of_others_do() -> None:
    inside: list[int] = []
    most: list[int] = []

    async def take(device: str | None) -> None:
        async with device_turn(device):
            inside.append(1)
            most.append(len(inside))
            await asyncio.sleep(0.03)
            inside.pop()

    async def all_at_once(devices: list[str | None]) -> int:
        most.clear()
        await asyncio.gather(*(take(device) for device in devices))
        return max(most)

    one, other = name(), name()
    assert asyncio.run(all_at_once([one] * 3)) == 1
    assert asyncio.run(all_at_once([one, other, one])) == 2
    assert asyncio.run(all_at_once([None] * 3)) == 3


@pytest.mark.slow
def test_the_turn_of_a_process_that_was_killed_is_over() -> None:
    device = name()

    async def wait(timeout_s: float) -> None:
        async with device_turn(device, timeout_s=timeout_s):
            pass

    with subprocess.Popen([sys.executable, "-c", HOLDER, device], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(GenerationError, match=r"engines_per_gpu\) did not end to start, sleep or wake within 0 s"):
            asyncio.run(wait(0.1))
        holder.kill()
    asyncio.run(wait(20.0))


class Device:
    """Memory that engines share; every reading is of all of it."""

    def __init__(self) -> None:
        self.used = 0


class Engine:
    """An engine of 100 bytes of weights and as many of KV cache, whose moves take a moment."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.used += 200

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0.06)
        self._device.used -= 200

    async def wake_up(self, tags: list[str]) -> None:
        await asyncio.sleep(0.04)
        self._device.used += 100 * len(tags)

    async def reset_prefix_cache(self) -> None:
        return

    async def rpc(self, method: str, *_: object) -> list[Any]:
        await asyncio.sleep(0.01)
        return [self._device.used] if method == "nrl_memory" else [{"weights": 100, "kv_cache": 100}]


async def _alive(call: Coroutine[object, object, object]) -> object:
    return await call


def neighbours() -> tuple[EngineMemory, EngineMemory]:
    device, shared = Device(), name()
    one, other = (
        EngineMemory(engine, engine.rpc, _alive, shard=shard, cuda=True, sleep_level=2, device=shared)
        for shard, engine in enumerate([Engine(device), Engine(device)])
    )
    return one, other


def test_a_neighbour_that_sleeps_or_wakes_changes_nothing_of_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_FREED_WITHIN_S", 0.1)

    async def both_sleep_then_one_wakes() -> list[Any]:
        one, other = neighbours()
        slept = await asyncio.gather(one.sleep(2), other.sleep(2))
        await one.wake(["weights", "kv_cache"])
        _, again = await asyncio.gather(other.wake(["weights", "kv_cache"]), one.sleep(2))
        return [*slept, again]

    reports = asyncio.run(both_sleep_then_one_wakes())
    assert [report["before"] - report["after"] for report in reports] == [200, 200, 200]
