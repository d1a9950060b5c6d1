"""A sync session brings a version to every target, or to none: real senders, receivers and shared memory, a model made
of a dict.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nemo_rl.distributed.devices import device_uuid
from nemo_rl.weight_sync.layout import LayoutError, TensorMeta
from nemo_rl.weight_sync.receiver import ChecksumMismatchError, SyncProtocolError, WeightReceiver
from nemo_rl.weight_sync.sender import SendSpec, WeightSender
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncSession, SyncTimeoutError, steady_window
from nemo_rl.weight_sync.transports import HostOpener, HostStaging, TransportError, remove_stale_segments
from tests.weight_sync.models import DictModel, Engines, weights

CPU = torch.device("cpu")
OPTIONS = SyncOptions(bucket_bytes=4096, verify=True, timeout_s=120.0)


class Trainer:
    """A source of one rank."""

    maps_host_memory = False

    def __init__(self, weights: dict[str, torch.Tensor], budget: int = 8192) -> None:
        self.weights = weights
        self.budget = budget
        self.sender: WeightSender | None = None
        self.closed = 0
        self.tamper: Callable[[int, WeightSender], None] = lambda index, sender: None

    def tensor_metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in self.weights.items()]

    def devices(self) -> list[str]:
        return [device_uuid(CPU)]

    def staging_budget(self) -> int:
        return self.budget

    def rendezvous(self) -> tuple[str, int]:
        raise AssertionError("the host transport needs no group")

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        self.sender = WeightSender(spec, iter(self.weights.items()), CPU, source=0)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        assert self.sender is not None
        window = self.sender.export_window(index)
        self.tamper(index, self.sender)
        return [window]

    def send_window(self, index: int, timeout_s: float) -> None:
        raise AssertionError("the host transport does not push")

    def kept_group(self, timeout_s: float) -> str | None:
        raise AssertionError("the host transport needs no group")

    def close(self, *, failed: bool = False) -> None:
        self.closed += 1
        if self.sender is not None:
            self.sender.close(failed=failed)


def segments() -> set[str]:
    return set(glob.glob(f"/dev/shm/nemo_rl-{os.getpid()}-*"))


@pytest.fixture(autouse=True)
def _no_segment_is_left() -> Iterator[None]:
    before = segments()
    yield
    assert segments() == before


def sync(trainer: Trainer, engines: Engines, version: int = 1, options: SyncOptions = OPTIONS) -> Any:
    return SyncSession(trainer, engines, version=version, options=options).run()


def test_every_target_has_every_weight_bit_for_bit_and_the_version() -> None:
    trainer, engines = Trainer(weights()), Engines(DictModel(), DictModel())
    report = sync(trainer, engines, version=7)
    assert engines.versions == [7, 7]
    for model in engines.models:
        assert list(model.weights) == list(trainer.weights)
        assert all(torch.equal(model.weights[name], tensor) for name, tensor in trainer.weights.items())
    assert report.windows == engines.models[0].windows > 2
    assert report.nbytes == sum(tensor.nbytes for tensor in trainer.weights.values())
    assert (trainer.closed, engines.aborted) == (1, 0)


def test_a_window_is_never_packed_over_one_that_is_being_read() -> None:
    trainer = Trainer(weights(), budget=4096)
    reading: list[int] = []
    exported: list[int] = []
    trainer.tamper = lambda index, sender: exported.append(index)

    def slow_load() -> None:
        reading.append(len(reading))
        limit = time.monotonic() + 0.1
        while time.monotonic() < limit:
            # While window i is read only i+1 may be packed: i+2 would go into i's buffer.
            assert not exported or max(exported) <= reading[-1] + 1
            time.sleep(0.005)

    engines = Engines(DictModel(slow_load))
    report = sync(trainer, engines)
    assert report.windows == len(reading) > 3
    assert all(torch.equal(engines.models[0].weights[name], tensor) for name, tensor in trainer.weights.items())


def test_what_is_staged_on_the_host_is_two_buckets_however_much_memory_there_is() -> None:
    trainer, sizes = Trainer(weights(), budget=1 << 30), []
    report = sync(
        trainer,
        Engines(
            DictModel(
                lambda: sizes.append([os.path.getsize(path) for path in glob.glob(f"/dev/shm/nemo_rl-{os.getpid()}-*")])
            )
        ),
    )
    assert report.windows == len(sizes) > 3
    assert all(len(present) == 2 and max(present) <= OPTIONS.bucket_bytes for present in sizes)


def test_the_next_window_is_packed_while_one_is_read() -> None:
    trainer = Trainer(weights(), budget=4096)
    second_packed = threading.Event()
    trainer.tamper = lambda index, sender: second_packed.set() if index == 1 else None
    sync(
        trainer,
        Engines(
            DictModel(
                lambda: (
                    None if second_packed.wait(60.0) else pytest.fail("window 1 was not packed while window 0 was read")
                )
            )
        ),
    )


def test_bytes_that_a_receiver_copies_travel_while_those_before_them_are_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class CopyingOpener(HostOpener):
        """As on a GPU."""

        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.copies = True

        def open(self, handle: dict[str, Any]) -> torch.Tensor:
            told.append("open")
            return super().open(handle).clone()

    monkeypatch.setattr("nemo_rl.weight_sync.receiver.HostOpener", CopyingOpener)
    for staged in (False, True):
        told.clear()
        trainer, engines = Trainer(weights(), budget=4096), Engines(DictModel(lambda: told.append("load")))
        engines.before_finish = lambda: told.append("finish")
        session = SyncSession(trainer, engines, version=3, options=OPTIONS, staged=staged)
        windows = session.run().windows
        loads = ["load"] * windows
        expected = (
            [*["open"] * windows, "finish", *loads]
            if staged
            else ["open", *["open", "load"] * (windows - 1), "load", "finish"]
        )
        assert told == expected
        assert engines.receivers[0].version == 3
        assert all(torch.equal(engines.models[0].weights[name], tensor) for name, tensor in trainer.weights.items())


def test_windows_stay_the_same_while_free_memory_wanders() -> None:
    assert {steady_window(budget, 256) for budget in range(1024, 2048)} == {1024}
    assert [steady_window(budget, 256) for budget in (100, 255, 256, 511, 512)] == [100, 255, 256, 256, 512]


def test_a_flipped_byte_is_caught_and_no_target_takes_the_version() -> None:
    trainer, engines = Trainer(weights()), Engines(DictModel(), DictModel())
    sync(trainer, engines, version=1)

    def flip(index: int, sender: WeightSender) -> None:
        if index == 1:
            sender._stagings[1][0].buffer_B[40] ^= 1

    later = Trainer(weights(fill=1.0))
    later.tamper = flip
    with pytest.raises(ChecksumMismatchError, match=r"bucket with 'w\d': received .*, sent .*"):
        sync(later, engines, version=2)
    assert engines.versions == [1, 1]
    assert (later.closed, engines.aborted) == (1, 1)
    sync(Trainer(weights(fill=1.0)), engines, version=2)
    assert engines.versions == [2, 2]


def test_a_target_that_fails_ends_the_session_for_all() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    trainer, engines = Trainer(weights()), Engines(DictModel(), DictModel(fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        sync(trainer, engines)
    assert engines.versions == [None, None]
    assert (trainer.closed, engines.aborted) == (1, 1)
    # Nothing of the broken load is left for the next one.
    assert [model.loading for model in engines.models] == [None, None]


def test_an_export_that_differs_from_its_layout_is_refused() -> None:
    trainer, engines = Trainer(weights()), Engines(DictModel())
    metas = trainer.tensor_metas()
    trainer.tensor_metas = lambda: metas[::-1]  # type: ignore[method-assign]
    with pytest.raises(LayoutError, match="the export gave 'w0' where the layout has 'w8'"):
        sync(trainer, engines)
    assert engines.versions == [None]


def test_the_whole_session_has_one_deadline() -> None:
    trainer, engines = Trainer(weights(), budget=4096), Engines(DictModel(lambda: time.sleep(0.2)))
    with pytest.raises(SyncTimeoutError, match=r"version 3 passed weight_sync.timeout_s=0"):
        sync(trainer, engines, version=3, options=SyncOptions(bucket_bytes=4096, timeout_s=0.3))
    assert engines.versions == [None]
    assert engines.aborted == 1


def test_a_receiver_refuses_messages_out_of_order() -> None:
    model = DictModel()
    receiver = WeightReceiver(model, CPU)
    session = {"id": "a", "transport": "host", "windows": 2, "verify": False, "timeout_s": 5.0, "group": None}
    with pytest.raises(SyncProtocolError, match="window 0 arrived, expected a begin"):
        receiver.receive({"index": 0, "buckets": [], "senders": {}})
    receiver.begin(session)
    with pytest.raises(SyncProtocolError, match="session b cannot begin: session a is open"):
        receiver.begin({**session, "id": "b"})
    with pytest.raises(SyncProtocolError, match="window 1 arrived, expected 0"):
        receiver.receive({"index": 1, "buckets": [], "senders": {}})
    with pytest.raises(SyncProtocolError, match="no weights are staged at host:"):
        receiver.receive({"index": 0, "buckets": [], "senders": {"another": {}}})
    with pytest.raises(SyncProtocolError, match="finish after 0 of 2 windows"):
        receiver.finish(1)
    receiver.abort()
    receiver.abort()
    assert receiver.version is None
    receiver.begin({**session, "id": "b"})


@pytest.mark.slow
def test_segments_of_killed_senders_are_removed_and_those_of_living_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.weight_sync.transports._STALE_AFTER_S", 0.0)
    make = (
        "import os, torch; from nemo_rl.weight_sync.transports import HostStaging; s = "
        "HostStaging(4096, torch.device('cpu')); "
        "print(s.publish(1)['path'], flush=True); os.kill(os.getpid(), 9)"
    )
    path = subprocess.run([sys.executable, "-c", make], capture_output=True, text=True, check=False).stdout.strip()
    assert os.path.exists(path)
    mine = HostStaging(4096, CPU)
    assert not os.path.exists(path)
    remove_stale_segments()
    assert os.path.exists(mine.publish(1)["path"])
    mine.close()


def test_a_staging_buffer_that_shared_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(TransportError, match="/dev/shm has .* MiB free, .* lower weight_sync.bucket_bytes"):
        HostStaging(1 << 50, CPU)


@pytest.mark.slow
def test_a_source_that_hangs_is_named_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engines = Trainer(weights()), Engines(DictModel())
    monkeypatch.setattr(trainer, "begin", lambda spec, timeout_s: time.sleep(1.0))
    with pytest.raises(SyncTimeoutError, match=r"waited for the sources to begin until weight_sync.timeout_s=0"):
        sync(trainer, engines, version=3, options=SyncOptions(bucket_bytes=4096, timeout_s=0.3))
