"""What sleeps leaves no group of a sync session on its GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.distributed.ports import free_ports
from nemo_rl.models.generation.interfaces import WakeError
from nemo_rl.models.generation.vllm.worker import EngineMemory
from nemo_rl.models.policy.policy_worker import PolicyWorker
from nemo_rl.weight_sync import transports
from nemo_rl.weight_sync.transports import BroadcastGroup, GroupMeeting, KeptGroup


class Gpu:
    """Bytes on one GPU, and the engine there, whose KV cache may find no room."""

    def __init__(self) -> None:
        self.weights, self.kv_cache, self.group = 30, 60, 5
        self.full = False

    async def rpc(self, method: str, *args: object) -> list[Any]:
        if method == "nrl_receiver":
            self.group = 0
        used = self.weights + self.kv_cache + self.group
        return [{"weights": 30, "kv_cache": 60} if method == "nrl_model_bytes" else used]

    async def sleep(self, level: int) -> None:
        self.weights = self.kv_cache = 0

    async def wake_up(self, tags: list[str]) -> None:
        if self.full and "kv_cache" in tags:
            raise RuntimeError("out of memory")
        self.weights = 30 if "weights" in tags else self.weights
        self.kv_cache = 60 if "kv_cache" in tags else self.kv_cache


async def alive(call: Coroutine[object, object, object]) -> object:
    return await call


def memory_of(gpu: Gpu) -> EngineMemory:
    memory = EngineMemory(gpu, gpu.rpc, alive, shard=0, cuda=True, sleep_level=2)
    memory.holds_group = True
    return memory


def test_an_engine_that_sleeps_drops_its_group() -> None:
    gpu = Gpu()
    assert asyncio.run(memory_of(gpu).sleep(2))["after"] == 0
    assert gpu.group == 0


def test_an_engine_that_cannot_wake_drops_its_group_before_it_sleeps_again() -> None:
    gpu = Gpu()
    memory = memory_of(gpu)
    memory.asleep, gpu.kv_cache, gpu.full = {"kv_cache"}, 0, True
    with pytest.raises(WakeError, match="kv_cache"):
        asyncio.run(memory.wake(["kv_cache"]))
    assert (gpu.weights, gpu.kv_cache, gpu.group) == (0, 0, 0)


@pytest.mark.slow
def test_a_trainer_that_gives_its_communicators_back_keeps_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "nccl_group", BroadcastGroup)
    cpu = torch.device("cpu")
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.step = SimpleNamespace(is_open=False)  # type: ignore[assignment]
    worker.backend = SimpleNamespace(drop_communicators=lambda: None, device=cpu)  # type: ignore[assignment]
    worker._sender, worker._groups = None, KeptGroup()
    worker._groups.join(GroupMeeting("a-1", 1, "127.0.0.1", free_ports(1)[0], keep=True), 0, 20.0, cpu)
    assert worker.kept_group() == "a-1"
    worker.drop_communicators()
    assert worker.kept_group() is None
