"""One session reaches targets on the sender's GPU, beside it and on another host, each by a transport of its own.

GPUs are CPU devices with numbers here, IPC is a dictionary and the group a set of queues; shared memory, senders,
receivers and the session are the real ones.
"""

from __future__ import annotations

import glob
import os
import queue
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.distributed.devices import host_memory_of
from nemo_rl.weight_sync import receiver as receiver_module
from nemo_rl.weight_sync import sender as sender_module
from nemo_rl.weight_sync import transports
from nemo_rl.weight_sync.cache import CACHE_OWNER, BucketCache, CacheBuilder, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta, plan_buckets, plan_windows
from nemo_rl.weight_sync.receiver import ChecksumMismatchError, WeightReceiver
from nemo_rl.weight_sync.sender import SendSpec, WeightSender, check_room
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncSession, plan_routes
from nemo_rl.weight_sync.transports import Opener, Staging, TransportError
from tests.weight_sync.models import DictModel, Engines, weights

NAMES = {0: "gpu0@a", 1: "gpu1@a", 2: "gpu2@a", 8: "gpu8@b", 9: "gpu9@b"}
OPTIONS = SyncOptions(bucket_bytes=4096, verify=True, timeout_s=120.0, keep_group=False)


class Wires:
    """What the fakes share, and what is still open."""

    def __init__(self) -> None:
        self.mapped: dict[int, torch.Tensor] = {}
        self.queues: dict[int, queue.Queue[torch.Tensor]] = {}
        self.groups_open = 0
        self.sent = 0


class IpcStaging(Staging):
    def __init__(self, wires: Wires, nbytes: int) -> None:
        self._wires = wires
        self.buffer_B = torch.empty(nbytes, dtype=torch.uint8)
        wires.mapped[id(self)] = self.buffer_B

    def publish(self, nbytes: int) -> dict[str, Any]:
        return {"mapped": id(self), "nbytes": nbytes}

    def close(self) -> None:
        self._wires.mapped.pop(id(self))


class IpcOpener(Opener):
    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def open(self, handle: dict[str, Any]) -> torch.Tensor:
        return self._wires.mapped[handle["mapped"]][: handle["nbytes"]]

    def close(self) -> None:
        pass


class Group:
    """A group of queues in place of a communicator."""

    def __init__(self, wires: Wires, rank: int, world_size: int) -> None:
        self._wires, self._rank = wires, rank
        self.device = torch.device("cpu")
        self._others = [wires.queues.setdefault(other, queue.Queue()) for other in range(1, world_size)]
        wires.groups_open += 1

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self._rank == 0:
            self._wires.sent += 1
            for other in self._others:
                other.put(tensor.clone())
        else:
            tensor.copy_(self._wires.queues[self._rank].get(timeout=60.0))

    def close(self) -> None:
        self._wires.groups_open -= 1


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    shared = Wires()
    make_staging, make_opener = sender_module.make_staging, receiver_module.make_opener
    monkeypatch.setattr(
        sender_module,
        "make_staging",
        lambda name, n, device: IpcStaging(shared, n) if name != "host" else make_staging(name, n, device),
    )
    monkeypatch.setattr(
        receiver_module,
        "make_opener",
        lambda name, device: IpcOpener(shared) if name == "cuda_ipc" else make_opener(name, device),
    )
    monkeypatch.setattr(
        transports,
        "nccl_group",
        lambda address, port, rank, world_size, timeout_s, device: Group(shared, rank, world_size),
    )
    monkeypatch.setattr(receiver_module, "device_uuid", lambda device: NAMES[device.index])
    yield shared
    assert not shared.mapped and not shared.groups_open
    assert not glob.glob(f"/dev/shm/nemo_rl-{os.getpid()}-*")


class Placed(Engines):
    """Receivers on numbered devices."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(*(DictModel() for _ in numbers))
        self._numbers = numbers
        self.receivers = [
            WeightReceiver(model, torch.device("cpu", number))
            for model, number in zip(self.models, numbers, strict=True)
        ]

    def devices(self) -> list[str]:
        return [NAMES[number] for number in self._numbers]

    def hold(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(
            list(m.weights) == list(tensors) and all(torch.equal(m.weights[n], t) for n, t in tensors.items())
            for m in self.models
        )


class TwoRanks:
    """A live source of two ranks on GPUs 0 and 1, both of which take part in the export."""

    maps_host_memory = False

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.senders: list[WeightSender] = []

    def tensor_metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in self.tensors.items()]

    def devices(self) -> list[str]:
        return [NAMES[0], NAMES[1]]

    def staging_budget(self) -> int:
        return 4096

    def rendezvous(self) -> tuple[str, int]:
        return "a", 1

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        self.senders = [
            WeightSender(spec, iter(self.tensors.items()), torch.device("cpu", rank), source=rank) for rank in (0, 1)
        ]

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        return [sender.export_window(index) for sender in self.senders]

    def send_window(self, index: int, timeout_s: float) -> None:
        self.senders[0].send_window(index)

    def kept_group(self, timeout_s: float) -> str | None:
        return None

    def close(self, *, failed: bool = False) -> None:
        for sender in self.senders:
            sender.close(failed=failed)


def test_live_weights_reach_three_kinds_of_targets_in_one_session(wires: Wires) -> None:
    source, engines = TwoRanks(weights()), Placed(1, 9, 2, 0, 8)
    report = SyncSession(source, engines, version=3, options=OPTIONS).run()
    assert report.transport == "cuda_ipc+host+nccl"
    assert engines.versions == [3] * 5 and engines.hold(source.tensors)
    assert wires.sent == report.windows > 2


def test_a_target_that_fails_on_one_transport_ends_the_session_on_all(wires: Wires) -> None:
    source, engines = TwoRanks(weights()), Placed(0, 2, 9)
    window = source.export_window

    def flip(index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        published = window(index, timeout_s)
        if index == 1:
            # The copy in host memory, not the one that IPC and the group share.
            slot = source.senders[0]._stagings[1]
            slot[source.senders[0]._staged.index("host")].buffer_B[40] ^= 1
        return published

    source.export_window = flip  # type: ignore[method-assign]
    with pytest.raises(ChecksumMismatchError):
        SyncSession(source, engines, version=1, options=OPTIONS).run()
    assert engines.versions == [None] * 3 and engines.aborted == 1


class Owner:
    """The rank on GPU 0 that owns a cache and pushes it where it cannot be mapped."""

    def __init__(self, *, stages: bool = True) -> None:
        self.builder = CacheBuilder(OPTIONS.bucket_bytes, torch.device("cpu"))
        self.cache = BucketCache(self.build, timeout_s=1.0, owner=self, may_stage=stages)
        self.sender: WeightSender | None = None
        self.begun = 0

    def build(self, version: int, served: str | None) -> CacheManifest:
        tensors = weights(float(version))
        metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
        return self.builder.build(version, metas, tensors.items(), served=served)

    def devices(self) -> list[str]:
        return [NAMES[0], NAMES[1]]

    def rendezvous(self) -> tuple[str, int]:
        return "a", 1

    def on_first(self, method: str, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return getattr(self, method)(**kwargs)

    def begin_cached_export(self, spec: SendSpec, manifest: CacheManifest) -> None:
        self.begun += 1
        self.sender = WeightSender(spec, iter(manifest.weights()), torch.device("cpu", 0), source=CACHE_OWNER)

    def export_window(self, index: int) -> dict[str, Any] | None:
        assert self.sender is not None
        return self.sender.export_window(index)

    def send_window(self, index: int) -> None:
        assert self.sender is not None
        self.sender.send_window(index)

    def kept_group(self) -> str | None:
        return None

    def close_export(self, failed: bool) -> None:
        assert self.sender is not None
        self.sender.close(failed=failed)


@pytest.mark.parametrize(
    ("numbers", "transport", "used", "owner_pushes"),
    [
        ((0, 2), "auto", "host", False),
        ((0, 2, 9), "auto", "host+nccl", True),
        ((0, 2, 9), "nccl", "cuda_ipc+nccl", True),
        ((0,), "cuda_ipc", "cuda_ipc", True),
    ],
)
def test_a_cache_disturbs_its_owner_only_for_targets_that_cannot_map_it(
    wires: Wires, numbers: tuple[int, ...], transport: str, used: str, owner_pushes: bool
) -> None:
    owner, engines = Owner(), Placed(*numbers)
    owner.cache.build(5)
    options = replace(OPTIONS, transport=transport)
    report = SyncSession(owner.cache.source(5), engines, version=5, options=options).run()
    owner.builder.close()
    assert report.transport == used and bool(owner.begun) == owner_pushes
    assert engines.versions == [5] * len(numbers) and engines.hold(weights(5.0))


def test_a_cache_whose_owner_has_lent_its_gpu_sends_from_host_memory() -> None:
    source = Owner(stages=False).cache.source(5)
    assert source.devices() == [host_memory_of(NAMES[0])]
    assert plan_routes("auto", source.devices(), [NAMES[2], NAMES[9]]).summary == "host+tcp"


@pytest.mark.parametrize(("lanes", "free", "fits"), [(("nccl",), 1 << 30, False), (("cuda_ipc",), 1 << 20, True)])
def test_a_buffer_or_group_that_does_not_fit_beside_others_is_refused_before_it_is_made(
    lanes: tuple[Any, ...], free: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "allowed_memory", lambda device: free)
    metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in weights().items()]
    windows = plan_windows(plan_buckets(metas, OPTIONS.bucket_bytes), OPTIONS.bucket_bytes)
    spec = SendSpec(windows, False, 5.0, {CACHE_OWNER: lanes})
    gpu: Any = SimpleNamespace(type="cuda")
    with nullcontext() if fits else pytest.raises(TransportError, match="communicator 1024 MiB, and 1024 MiB are free"):
        check_room(spec, CACHE_OWNER, gpu)
    check_room(spec, 0, gpu)
