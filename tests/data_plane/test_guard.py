"""TransferQueue's processes unpickle what they receive: strangers are not heard."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def _sent(address: str, frames: list[bytes], keys: tuple[bytes, bytes] | None) -> Iterator[None]:
    """A message of a stranger, which is on its way until the end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if keys is not None:
            stranger.curve_publickey, stranger.curve_secretkey = keys
            stranger.curve_serverkey = keys[0]
        stranger.connect(f"tcp://{address}")
        stranger.send_multipart(frames)
        yield


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
        client.put_padded(["x", "y"], "p", {"a": torch.tensor([[1, 2], [3, 4]])}, [2, 2])
        assert client.get_padded(["y"], "p", ["a"])["a"].tolist() == [[3, 4]]
        endpoints = client._storage.endpoints
        assert len(endpoints) == 3
        touched = tmp_path / "touched"
        harm = [_PICKLE_FALLBACK_SENTINEL, pickle.dumps(_Harm(touched))]
        places = [f"{endpoint.host}:{endpoint.port}" for endpoint in endpoints]
        assert ({endpoint.host for endpoint in endpoints} == {"127.0.0.1"}) == (hosts == "one")
        with ExitStack() as strangers:
            for place in places:
                strangers.enter_context(_sent(place, harm, None))
                strangers.enter_context(_sent(place, harm, zmq.curve_keypair()))
            time.sleep(1.5)
        assert not touched.exists()
        # The message is one that would have been unpickled.
        with _sent(places[0], harm, guards[0].keys):
            deadline = time.monotonic() + 60.0
            while not touched.exists():
                assert time.monotonic() < deadline, "the message did not arrive"
                time.sleep(0.05)
        assert str(guards[0]) == ("curve+loopback" if hosts == "one" else "curve")
    finally:
        client.close()


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
