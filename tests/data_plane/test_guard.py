"""TransferQueue's processes unpickle what they receive: strangers are not heard."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import ray
import torch
import zmq
from pydantic import ValidationError
from transfer_queue.utils.serial_utils import _PICKLE_FALLBACK_SENTINEL

from nemo_rl.config import MasterConfig
from nemo_rl.data_plane.adapters.guard import Guard
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.observability import MetricsDataPlaneClient
from tests.data_plane.conftest import start
from tests.data_plane.memory_storage import MemoryStorage


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _send(host: str, port: int, frames: list[bytes], keys: tuple[bytes, bytes] | None) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 500
        if keys is not None:
            stranger.curve_publickey, stranger.curve_secretkey = keys
            stranger.curve_serverkey = keys[0]
        stranger.connect(f"tcp://{host}:{port}")
        stranger.send_multipart(frames)
        time.sleep(1.0)


@pytest.mark.ray
@pytest.mark.parametrize("hosts", ["one", "several"])
def test_strangers_reach_neither_controller_nor_storage(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    guards: list[Guard] = []
    nodes = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: nodes * (1 if hosts == "one" else 2))
    of_cluster = Guard.of_cluster
    monkeypatch.setattr(Guard, "of_cluster", lambda: guards.append(of_cluster()) or guards[-1])
    client: Any = start("simple")
    try:
        client.register_partition("p", ["a"], 2, ["train"])
        client.put_padded(["x", "y"], "p", {"a": torch.tensor([[1, 2], [3, 4]])}, [2, 2])
        assert client.get_padded(["y"], "p", ["a"])["a"].tolist() == [[3, 4]]
        endpoints = client._storage.endpoints
        assert len(endpoints) == 3
        harm = [_PICKLE_FALLBACK_SENTINEL, pickle.dumps(_Harm(tmp_path / "touched"))]
        for endpoint in endpoints:
            if hosts == "one":
                assert endpoint.host == "127.0.0.1"
            else:
                _send(endpoint.host, endpoint.port, harm, None)
                _send(endpoint.host, endpoint.port, harm, zmq.curve_keypair())
        assert not (tmp_path / "touched").exists()
        # The message is one that would have been unpickled.
        if hosts == "several":
            _send(endpoints[0].host, endpoints[0].port, harm, guards[0].keys)
            assert (tmp_path / "touched").exists()
        assert str(guards[0]) == ("loopback" if hosts == "one" else "curve")
    finally:
        client.close()
        Guard().stand()


def test_counters_stay_on_the_host_or_need_a_token() -> None:
    with pytest.raises(ValidationError, match=r"data_plane\.observability\.token"):
        MasterConfig.read({"data_plane": {"observability": {"host": "0.0.0.0"}}})
    client = MetricsDataPlaneClient(StoredClient(MemoryStorage, poll_s=0.02))
    address = client.serve_metrics(token="a long secret")
    assert address.startswith("127.0.0.1:")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a long secret"}):
        with pytest.raises(HTTPError, match="401"):
            urlopen(Request(f"http://{address}/metrics", headers=headers), timeout=30)
    with urlopen(
        Request(f"http://{address}/metrics", headers={"Authorization": "Bearer a long secret"}), timeout=30
    ) as page:
        assert b"nemo_rl_data_plane_total_bytes" in page.read()
    client.close()
