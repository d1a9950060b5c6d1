"""A cache owner brings weights to ranks on a host that shares no memory with it: another Ray node of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from nemo_rl.weight_sync.cache import BucketCache, CacheBuilder, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.receiver import WeightReceiver
from nemo_rl.weight_sync.sender import SendSpec, WeightSender
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncSession
from nemo_rl.weight_sync.transports import TransportError
from tests.two_nodes import on_node, second_node
from tests.weight_sync.models import DictModel

pytestmark = pytest.mark.ray

_TENSORS, _BUCKET = 6, 4096
_TIMEOUT_S = 60.0


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {f"w{number}": torch.randn(40, 13, generator=draw) for number in range(_TENSORS)}


class Owner:
    """The rank that owns the cache."""

    def __init__(self) -> None:
        from nemo_rl.weight_sync.transports import KeptGroup

        self._builder, self._groups = CacheBuilder(_BUCKET, torch.device("cpu")), KeptGroup()
        self._sender: WeightSender | None = None

    def device(self) -> str:
        from nemo_rl.distributed.devices import device_uuid

        return device_uuid(torch.device("cpu"))

    def rendezvous(self) -> tuple[str, int]:
        from nemo_rl.distributed.ports import free_ports

        return ray.util.get_node_ip_address(), free_ports(1)[0]

    def kept_group(self) -> str | None:
        return self._groups.group_id

    def build(self, version: int, served: str | None) -> CacheManifest:
        metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in weights(version).items()]
        return self._builder.build(version, metas, weights(version).items(), served=served)

    def begin_cached_export(self, spec: SendSpec, manifest: CacheManifest) -> None:
        from nemo_rl.weight_sync.cache import CACHE_OWNER

        cpu = torch.device("cpu")
        self._sender = WeightSender(spec, iter(manifest.weights()), cpu, source=CACHE_OWNER, groups=self._groups)

    def export_window(self, index: int) -> Any:
        assert self._sender is not None
        return self._sender.export_window(index)

    def send_window(self, index: int) -> None:
        assert self._sender is not None
        self._sender.send_window(index)

    def close_export(self, failed: bool) -> None:
        if self._sender is not None:
            self._sender.close(failed=failed)


class Rank:
    """An engine rank with a model."""

    def __init__(self) -> None:
        self._model = DictModel()
        self._receiver = WeightReceiver(self._model, torch.device("cpu"))

    def device(self) -> str:
        from nemo_rl.distributed.devices import device_uuid

        return device_uuid(torch.device("cpu"))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._receiver, method)(*arguments)

    def kept_group(self) -> str | None:
        return self._receiver.kept_group()

    def has(self, version: int) -> bool:
        held = self._model.weights
        return self._receiver.version == version and all(
            torch.equal(held[name], tensor) for name, tensor in weights(version).items()
        )


class Through:
    """`CacheOwner` in another process."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def devices(self) -> list[str]:
        return [self.on_first("device")]

    def rendezvous(self) -> tuple[str, int]:
        address, port = self.on_first("rendezvous")
        return address, port

    def on_first(self, method: str, timeout_s: float | None = None, **kwargs: object) -> Any:
        return ray.get(getattr(self._owner, method).remote(**kwargs), timeout=_TIMEOUT_S)


class Ranks:
    """`WeightTargets` of ranks in other processes."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks

    def _all(self, method: str, arguments: Sequence[Sequence[object]]) -> list[Any]:
        asked = [rank.call.remote(method, *given) for rank, given in zip(self._ranks, arguments, strict=True)]
        return ray.get(asked, timeout=_TIMEOUT_S)

    def devices(self) -> list[str]:
        return ray.get([rank.device.remote() for rank in self._ranks], timeout=_TIMEOUT_S)

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        return ray.get([rank.kept_group.remote() for rank in self._ranks], timeout=_TIMEOUT_S)

    def begin(self, session: dict[str, object], routes: Sequence[dict[str, Any]], timeout_s: float) -> None:
        self._all("begin", [[session | route] for route in routes])

    def receive_window(self, window: dict[str, object], timeout_s: float) -> None:
        self._all("receive", [[window]] * len(self._ranks))

    def finish(self, version: int, timeout_s: float) -> list[float]:
        self._all("finish", [[version]] * len(self._ranks))
        return []

    def abort(self, session_id: str) -> None:
        self._all("abort", [[session_id]] * len(self._ranks))


def test_ranks_of_both_hosts_get_the_weights_of_a_cache_by_ways_of_their_own(ray_session: None, tmp_path: Path) -> None:
    here = ray.get_runtime_context().get_node_id()
    with second_node(tmp_path) as there:
        owner: Any = ray.remote(Owner).options(**on_node(here)).remote()
        ranks: list[Any] = [ray.remote(Rank).options(**on_node(node)).remote() for node in (here, there, there)]
        targets = Ranks(ranks)
        first, *others = targets.devices()
        assert first == ray.get(owner.device.remote(), timeout=_TIMEOUT_S) and first not in others
        cache = BucketCache(
            lambda version, served: ray.get(owner.build.remote(version, served), timeout=_TIMEOUT_S),
            owner=Through(owner),
            may_stage=False,
        )
        groups: list[list[str | None]] = []
        for version in (1, 2):
            cache.build(version)
            options = SyncOptions(bucket_bytes=_BUCKET, verify=True, timeout_s=_TIMEOUT_S)
            source = cache.source(version)
            report = SyncSession(source, targets, version=version, options=options, staged=version == 2).run()
            assert report.transport == "host+tcp" and report.windows >= 1 and report.checksum
            assert ray.get([rank.has.remote(version) for rank in ranks], timeout=_TIMEOUT_S) == [True] * 3
            groups.append(targets.kept_groups(_TIMEOUT_S))
        assert groups[0] == groups[1] and groups[0][0] is None and groups[0][1] == groups[0][2] is not None
        # What maps memory reaches no other host, and says so before anything is sent.
        options = SyncOptions("host", bucket_bytes=_BUCKET, timeout_s=_TIMEOUT_S)
        with pytest.raises(TransportError, match="host reaches only targets on the source's own nodes"):
            SyncSession(cache.source(2), targets, version=2, options=options).run()
        for actor in (owner, *ranks):
            ray.kill(actor)
