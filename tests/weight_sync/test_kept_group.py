"""Sessions of the same members share one group; whatever changes a member, or fails, ends it without anybody waiting.

The groups are real ones over gloo, their members threads or processes; GPUs are CPU devices with numbers.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

from nemo_rl.distributed.ports import free_ports
from nemo_rl.weight_sync import receiver as receiver_module
from nemo_rl.weight_sync import transports
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.receiver import WeightReceiver
from nemo_rl.weight_sync.sender import SendSpec, WeightSender
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncSession
from nemo_rl.weight_sync.transports import BroadcastGroup, GroupMeeting, KeptGroup, TransportError
from tests.weight_sync.models import DictModel, Engines, weights

OPTIONS = SyncOptions("nccl", bucket_bytes=4096, verify=True, timeout_s=120.0)


def gpu(number: int) -> torch.device:
    return torch.device("cpu", number)


def name_of(device: torch.device) -> str:
    return f"gpu{device.index}@host{device.index}"


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks in the order in which they met."""
    ranks: list[int] = []

    def meet(
        address: str, port: int, rank: int, world_size: int, timeout_s: float, device: torch.device
    ) -> BroadcastGroup:
        ranks.append(rank)
        return BroadcastGroup(address, port, rank, world_size, timeout_s, torch.device("cpu"))

    monkeypatch.setattr(transports, "nccl_group", meet)
    monkeypatch.setattr(receiver_module, "device_uuid", name_of)
    yield ranks


class Sender:
    """A source of one rank, which holds its group as a training rank does."""

    maps_host_memory = False

    def __init__(self) -> None:
        self.weights = weights()
        self.groups = KeptGroup()
        self.sender: WeightSender | None = None

    def tensor_metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in self.weights.items()]

    def devices(self) -> list[str]:
        return [name_of(gpu(0))]

    def staging_budget(self) -> int:
        return 8192

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", free_ports(1)[0]

    def kept_group(self, timeout_s: float) -> str | None:
        return self.groups.group_id

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        self.sender = WeightSender(spec, iter(self.weights.items()), gpu(0), source=0, groups=self.groups)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        assert self.sender is not None
        return [self.sender.export_window(index)]

    def send_window(self, index: int, timeout_s: float) -> None:
        assert self.sender is not None
        self.sender.send_window(index)

    def close(self, *, failed: bool = False) -> None:
        if self.sender is not None:
            self.sender.close(failed=failed)


class Receivers(Engines):
    """Receivers that answer at the same time, as those of several engines do."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(*(DictModel() for _ in numbers))
        self.numbers = numbers
        self.receivers = [WeightReceiver(m, gpu(n)) for m, n in zip(self.models, numbers, strict=True)]

    def rebuild(self, index: int) -> None:
        """One receiver is another process now."""
        self.receivers[index].drop_group()
        self.receivers[index] = WeightReceiver(self.models[index], gpu(self.numbers[index]))

    def first(self, count: int) -> Receivers:
        some = Receivers()
        some.models, some.numbers = self.models[:count], self.numbers[:count]
        some.receivers = self.receivers[:count]
        return some

    def devices(self) -> list[str]:
        return [name_of(gpu(number)) for number in self.numbers]

    def begin(self, session: dict[str, Any], routes: Sequence[dict[str, Any]], timeout_s: float) -> None:
        calls = zip(self.receivers, routes, strict=True)
        self._together([lambda r=receiver, route=route: r.begin(session | route) for receiver, route in calls])

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        self._together([lambda r=receiver: r.receive(window) for receiver in self.receivers])

    @staticmethod
    def _together(calls: list[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(calls)) as pool:
            for answer in [pool.submit(call) for call in calls]:
                answer.result()

    @property
    def held(self) -> set[str | None]:
        return {receiver.kept_group() for receiver in self.receivers}


def sync(sender: Sender, receivers: Any, version: int, **changed: Any) -> None:
    SyncSession(sender, receivers, version=version, options=replace(OPTIONS, **changed)).run()
    assert receivers.versions == [version] * len(receivers.receivers)
    for model in receivers.models:
        assert all(torch.equal(model.weights[name], tensor) for name, tensor in sender.weights.items())


def test_members_meet_once_for_all_their_sessions(met: list[int]) -> None:
    sender, receivers = Sender(), Receivers(1, 2)
    for version in (1, 2, 3):
        sender.weights = weights(fill=float(version))
        sync(sender, receivers, version)
    assert sorted(met) == [0, 1, 2]
    assert receivers.held == {sender.groups.group_id} and sender.groups.group_id is not None


@pytest.mark.slow
def test_an_idle_group_outlives_the_deadline_of_its_sessions(met: list[int]) -> None:
    sender, receivers = Sender(), Receivers(1)
    sync(sender, receivers, 1, timeout_s=2.0)
    time.sleep(2.5)
    sync(sender, receivers, 2, timeout_s=2.0)
    assert sorted(met) == [0, 1]


@pytest.mark.slow
def test_other_members_or_another_deadline_make_a_group_of_their_own(met: list[int]) -> None:
    sender, receivers = Sender(), Receivers(1, 2)
    sync(sender, receivers, 1)
    sync(sender, receivers.first(1), 2)
    assert sorted(met) == [0, 0, 1, 1, 2]
    sync(sender, receivers, 3)
    assert sorted(met) == [0, 0, 0, 1, 1, 1, 2, 2]
    sync(sender, receivers, 4, timeout_s=60.0)
    assert met.count(0) == 4
    assert receivers.held == {sender.groups.group_id}


def test_a_failed_session_drops_the_group_on_all_sides(met: list[int]) -> None:
    sender, receivers = Sender(), Receivers(1, 2)
    sync(sender, receivers, 1)

    def broken() -> None:
        raise RuntimeError("planted")

    receivers.before_finish = broken
    with pytest.raises(RuntimeError, match="planted"):
        sync(sender, receivers, 2)
    assert receivers.held == {None} and sender.groups.group_id is None
    receivers.before_finish = lambda: None
    sync(sender, receivers, 3)
    assert sorted(met) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("end", ["rebuilt", "slept", "communicators dropped"])
def test_a_member_that_lost_the_group_meets_the_others_anew(met: list[int], end: str) -> None:
    sender, receivers = Sender(), Receivers(1, 2)
    sync(sender, receivers, 1)
    if end == "rebuilt":
        receivers.rebuild(1)
    elif end == "slept":
        receivers.receivers[1].drop_group()
    else:
        sender.groups.drop()
    sync(sender, receivers, 2)
    assert sorted(met) == [0, 0, 1, 1, 2, 2]
    assert receivers.held == {sender.groups.group_id}


def test_no_group_is_kept_where_a_gpu_is_lent(met: list[int]) -> None:
    sender, receivers = Sender(), Receivers(1)
    for version in (1, 2):
        sync(sender, receivers, version, keep_group=False)
        assert receivers.held == {None} and sender.groups.group_id is None
    assert sorted(met) == [0, 0, 1, 1]


def test_a_member_that_is_counted_on_in_vain_says_so_at_once(met: list[int]) -> None:
    with pytest.raises(TransportError, match="rank 1 does not hold group a-1"):
        KeptGroup().join(GroupMeeting("a-1", 2, held=True), 1, 20.0, gpu(1))
    assert not met


def test_members_that_lost_the_group_between_the_question_and_the_session_end_it_at_once(
    met: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receivers = Sender(), Receivers(1, 2)
    sync(sender, receivers, 1)
    asked = receivers.kept_groups

    def ask(timeout_s: float) -> list[str | None]:
        said = asked(timeout_s)
        receivers.receivers[1].drop_group()
        return said

    monkeypatch.setattr(receivers, "kept_groups", ask)
    began = time.monotonic()
    with pytest.raises(TransportError, match="does not hold group"):
        sync(sender, receivers, 2)
    assert time.monotonic() - began < 20.0
    assert receivers.held == {None} and sender.groups.group_id is None
    sync(sender, receivers, 3)


def _serve(number: int, pipe: Any) -> None:
    transports.nccl_group = lambda address, port, rank, size, timeout_s, device: BroadcastGroup(
        address, port, rank, size, timeout_s, torch.device("cpu")
    )
    receiver_module.device_uuid = name_of
    model = DictModel()
    receiver = WeightReceiver(model, gpu(number))
    while True:
        method, args = pipe.recv()
        try:
            found = getattr(receiver, method)
            pipe.send((found(*args) if callable(found) else found, None))
        except RuntimeError as error:
            pipe.send((None, repr(error)))


class Processes:
    """Receivers that are processes."""

    def __init__(self, *numbers: int) -> None:
        # One process imports what they need.
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.numbers = numbers
        self.members = [self._start(number) for number in numbers]

    def _start(self, number: int) -> Any:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(number, there), daemon=True)
        process.start()
        return process, here

    def kill(self, index: int) -> None:
        process, _ = self.members[index]
        process.kill()
        process.join()

    def end(self) -> None:
        for index in range(len(self.members)):
            self.kill(index)
        forkserver._forkserver._stop()  # pyrefly: ignore[missing-attribute]

    def rebuild(self, index: int) -> None:
        self.kill(index)
        self.members[index] = self._start(self.numbers[index])

    def ask(self, method: str, *args: list[Any]) -> list[Any]:
        for number, (_, pipe) in enumerate(self.members):
            pipe.send((method, tuple(values[number] for values in args)))
        answers = []
        for _, pipe in self.members:
            assert pipe.poll(180.0), f"no answer to {method}"
            answers.append(pipe.recv())
        failures = [error for _, error in answers if error is not None]
        if failures:
            raise RuntimeError("; ".join(failures))
        return [value for value, _ in answers]

    def devices(self) -> list[str]:
        return [name_of(gpu(number)) for number in self.numbers]

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        return self.ask("kept_group")

    def begin(self, session: dict[str, Any], routes: Sequence[dict[str, Any]], timeout_s: float) -> None:
        self.ask("begin", [session | route for route in routes])

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        self.ask("receive", [window] * len(self.members))

    def finish(self, version: int, timeout_s: float) -> list[float]:
        self.ask("finish", [version] * len(self.members))
        return [0.0] * len(self.members)

    def abort(self, session_id: str) -> None:
        self.ask("abort", [session_id] * len(self.members))


@pytest.mark.slow
def test_processes_share_a_group_until_one_dies_and_is_built_anew(met: list[int]) -> None:
    sender, receivers = Sender(), Processes(1, 2)
    try:
        for version, rebuilt in ((1, False), (2, False), (3, True), (4, False)):
            if rebuilt:
                receivers.rebuild(1)
            began = time.monotonic()
            SyncSession(sender, receivers, version=version, options=replace(OPTIONS, timeout_s=180.0)).run()
            assert time.monotonic() - began < 120.0
            assert receivers.kept_groups(1.0) == [sender.groups.group_id] * 2
        assert met == [0, 0]
    finally:
        receivers.end()
        sender.groups.drop()
