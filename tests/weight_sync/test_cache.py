"""The weight cache serves exactly the version it says, to sessions that read it while the next one is built."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nemo_rl.weight_sync import cache as cache_module
from nemo_rl.weight_sync import transports
from nemo_rl.weight_sync.cache import BucketCache, CacheBuilder, CacheError, CacheManifest
from nemo_rl.weight_sync.layout import LayoutError, TensorMeta
from nemo_rl.weight_sync.receiver import ChecksumMismatchError, SyncProtocolError, WeightReceiver
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncSession, pause_quantiles
from nemo_rl.weight_sync.transports import TransportError
from tests.weight_sync.models import DictModel, Engines, weights

CPU = torch.device("cpu")
OPTIONS = SyncOptions(bucket_bytes=4096, verify=True, timeout_s=120.0)


class Owner:
    """A cache of made-up weights: version v holds the base weights plus v."""

    def __init__(self) -> None:
        self.builder = CacheBuilder(OPTIONS.bucket_bytes, CPU)
        self.cache = BucketCache(self.build, timeout_s=0.3)
        self.during_build: Callable[[], None] = lambda: None

    def build(self, version: int, served: str | None) -> CacheManifest:
        self.during_build()
        tensors = weights(float(version))
        metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
        return self.builder.build(version, metas, tensors.items(), served=served)

    def sync(self, engines: Engines, version: int, *, staged: bool = False) -> Any:
        return SyncSession(self.cache.source(version), engines, version=version, options=OPTIONS, staged=staged).run()


@pytest.fixture
def owner() -> Iterator[Owner]:
    one = Owner()
    yield one
    one.builder.close()


def holds(model: DictModel, version: int) -> bool:
    wanted = weights(float(version))
    return list(model.weights) == list(wanted) and all(
        torch.equal(model.weights[name], tensor) for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("staged", [False, True])
def test_some_targets_get_the_cached_version_and_the_others_notice_nothing(owner: Owner, staged: bool) -> None:
    engines = Engines(DictModel(), DictModel(), DictModel())
    owner.cache.build(1)
    owner.sync(engines, 1)
    owner.cache.build(2)
    report = owner.sync(engines.only(0, 2), 2, staged=staged)
    assert engines.versions == [2, 1, 2]
    assert [holds(model, version) for model, version in zip(engines.models, (2, 1, 2), strict=True)] == [True] * 3
    assert report.transport == "host" and report.nbytes == sum(tensor.nbytes for tensor in weights().values())


def test_staged_windows_leave_the_live_weights_alone_until_the_end(owner: Owner) -> None:
    engines = Engines(DictModel())
    owner.cache.build(1)
    owner.sync(engines, 1)
    owner.cache.build(2)
    seen = []
    engines.before_finish = lambda: seen.append((holds(engines.models[0], 1), engines.models[0].loading))
    owner.sync(engines, 2, staged=True)
    assert seen == [(True, None)]
    assert holds(engines.models[0], 2)


def test_bytes_and_version_change_together_and_not_below_a_session(owner: Owner) -> None:
    owner.cache.build(1)
    manifest = owner.cache.open(1)
    before = {name: tensor.clone() for name, tensor in manifest.weights()}
    with pytest.raises(CacheError, match="version 2 is built, but a session has been reading version 1 for 0 s"):
        owner.cache.build(2)
    # Nor is it packed over by those who try again.
    with pytest.raises(CacheError, match="version 3 is built, but a session has been reading version 1"):
        owner.cache.build(3)
    assert owner.cache.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in manifest.weights())
    owner.cache.release()
    owner.cache.build(2)
    with pytest.raises(CacheError, match="version 1 was asked for, the weight cache serves version 2"):
        owner.cache.open(1)


def test_a_source_that_cannot_begin_is_found_out_before_any_target_is_touched(owner: Owner) -> None:
    engines = Engines(DictModel())
    owner.cache.build(2)
    with pytest.raises(CacheError, match="version 1 was asked for"):
        owner.sync(engines, 1)
    assert engines.models[0].loading is None and engines.versions == [None]


def test_one_build_at_a_time_and_never_backwards(owner: Owner) -> None:
    owner.cache.build(3)
    with pytest.raises(CacheError, match="version 2 cannot be built: the cache already serves version 3"):
        owner.cache.build(2)
    begun, go_on = threading.Event(), threading.Event()

    def slow_build() -> None:
        begun.set()
        go_on.wait(60.0)

    owner.during_build = slow_build
    thread = threading.Thread(target=owner.cache.build, args=(4,))
    thread.start()
    begun.wait(60.0)
    with pytest.raises(CacheError, match="another build is under way, and there is room for one"):
        owner.cache.build(5)
    go_on.set()
    thread.join()
    assert owner.cache.version == 4


def test_there_are_two_segments_whatever_the_number_of_versions(owner: Owner) -> None:
    paths = {owner.cache.build(version).path for version in range(6)}
    assert len(paths) == 2
    owner.builder.close()
    assert not any(os.path.exists(path) for path in paths)


def test_two_copies_that_do_not_fit_are_refused_before_anything_is_allocated(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "free_memory", lambda _: 30_000)
    with pytest.raises(CacheError, match="needs 2 x 0 MiB of host memory, more than 80%"):
        owner.cache.build(1)
    assert owner.cache.version is None


def test_an_empty_cache_says_so(owner: Owner) -> None:
    with pytest.raises(CacheError, match="the weight cache is empty; build a version first"):
        owner.sync(Engines(DictModel()), 1)


def test_weights_that_are_not_resident_are_never_cached(owner: Owner) -> None:
    tensors = weights()
    tensors["w3"].untyped_storage().resize_(0)
    metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
    with pytest.raises(LayoutError, match="w3: its storage is empty; weights must be resident"):
        owner.builder.build(1, metas, tensors.items(), served=None)


def test_a_cache_that_was_damaged_is_caught_by_its_version_checksums(owner: Owner) -> None:
    engines = Engines(DictModel())
    owner.cache.build(1)
    owner.sync(engines, 1)
    manifest = owner.cache.build(2)
    with open(manifest.path, "r+b") as segment:
        segment.seek(100)
        byte = segment.read(1)[0]
        segment.seek(100)
        segment.write(bytes([byte ^ 1]))
    with pytest.raises(ChecksumMismatchError, match="bucket with 'w0'"):
        owner.sync(engines, 2)
    assert engines.versions == [1]
    # The session's reading has ended all the same.
    owner.cache.build(3)
    owner.sync(engines, 3)
    assert holds(engines.models[0], 3)


def test_two_sessions_at_once_do_not_disturb_each_other(owner: Owner) -> None:
    receiver = WeightReceiver(DictModel(), CPU)
    session = {"id": "first", "transport": "host", "windows": 1, "verify": False, "timeout_s": 5.0, "group": None}
    receiver.begin(session)
    with pytest.raises(SyncProtocolError, match="session second cannot begin: session first is open"):
        receiver.begin({**session, "id": "second"})
    receiver.abort("second")
    with pytest.raises(SyncProtocolError, match="session third cannot begin"):
        receiver.begin({**session, "id": "third"})
    receiver.abort("first")
    receiver.begin({**session, "id": "third"})


def test_a_tensor_larger_than_the_staging_that_is_allowed_is_named(owner: Owner) -> None:
    owner.cache.build(1)
    source = owner.cache.source(1)
    source.staging_budget = lambda: 1000  # type: ignore[method-assign]
    with pytest.raises(LayoutError, match="w0 alone needs 1564 bytes of staging, 1000 are allowed"):
        SyncSession(source, Engines(DictModel()), version=1, options=OPTIONS).run()


def test_pauses_are_told_as_quantiles() -> None:
    assert pause_quantiles([]) == pause_quantiles([0.0]) == {}
    assert pause_quantiles([0.5]) == {"pause_s/p50": 0.5, "pause_s/p99": 0.5}
    assert pause_quantiles([0.1 * n for n in range(1, 102)])["pause_s/p50"] == pytest.approx(5.1)


@pytest.mark.parametrize("fails_in", ["the second buffer", "pinning"])
def test_a_cache_that_cannot_be_allocated_leaves_no_shared_memory(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segments() -> set[str]:
        return set(glob.glob(f"/dev/shm/nemo_rl-{os.getpid()}-*"))

    before, descriptors = segments(), len(os.listdir("/proc/self/fd"))
    made = []

    def refuse(tensor_B: torch.Tensor, device: torch.device) -> None:
        made.append(1)
        if fails_in == "pinning" or len(made) == 2:
            raise TransportError("planted: CUDA refused")

    monkeypatch.setattr(transports, "_pin", refuse)
    builder = CacheBuilder(1 << 20, torch.device("cpu"))
    with pytest.raises(TransportError, match="planted"):
        builder.build(0, [TensorMeta("w", (8,), "float32")], [("w", torch.ones(8))], served=None)
    assert segments() == before and len(os.listdir("/proc/self/fd")) == descriptors
    monkeypatch.undo()
    assert builder.build(1, [TensorMeta("w", (8,), "float32")], [("w", torch.ones(8))], served=None).version == 1
    builder.close()
    assert segments() == before
