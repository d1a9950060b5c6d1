"""Clients of every backend for the conformance suite, each started once; Mooncake's engine must start once per
process.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane import DataPlaneClient, build_data_plane_client
from nemo_rl.data_plane.adapters.mooncake import load_mooncake
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.interfaces import MooncakeUnavailableError
from tests.data_plane.memory_storage import MemoryStorage

SMALL_MOONCAKE = {"global_segment_size": 256 << 20, "local_buffer_size": 64 << 20}


def plane_config(backend: str, **options: Any) -> DataPlaneConfig:
    """An enabled section."""
    sizes = SMALL_MOONCAKE if backend == "mooncake_cpu" else {}
    return DataPlaneConfig(
        **({"enabled": True, "backend": backend, "claim_meta_poll_interval_s": 0.02} | sizes | options)
    )


def require_mooncake() -> None:
    """Skips the test where Mooncake cannot be loaded, and says why; fails it where the machine is meant to have it."""
    try:
        load_mooncake()
    except MooncakeUnavailableError as error:
        if os.environ.get("NRL_REQUIRE_MOONCAKE"):
            raise
        pytest.skip(f"mooncake_cpu did not run: {error}")


def has_mooncake() -> bool:
    """Whether Mooncake can be loaded."""
    try:
        load_mooncake()
    except MooncakeUnavailableError:
        return False
    return True


def start(backend: str, **options: Any) -> DataPlaneClient:
    """A client with a system of its own."""
    if backend == "mooncake_cpu":
        require_mooncake()
    return build_data_plane_client(plane_config(backend, **options))


@pytest.fixture(scope="session")
def shared_clients(request: pytest.FixtureRequest) -> Iterator[Callable[[str], DataPlaneClient]]:
    """One client per backend for the whole session."""
    clients: dict[str, DataPlaneClient] = {}

    def client(backend: str) -> DataPlaneClient:
        if backend not in clients:
            if backend == "memory":
                storage = MemoryStorage()
                clients[backend] = StoredClient(lambda: storage, poll_s=0.02)
            else:
                request.getfixturevalue("ray_session")
                clients[backend] = start(backend)
        return clients[backend]

    yield client
    for each in clients.values():
        each.close()


BACKENDS = [
    "memory",
    pytest.param("simple", marks=pytest.mark.ray),
    pytest.param("mooncake_cpu", marks=pytest.mark.ray),
]


@pytest.fixture(params=BACKENDS)
def client(request: pytest.FixtureRequest, shared_clients: Callable[[str], DataPlaneClient]) -> DataPlaneClient:
    """A client of each backend in turn."""
    return shared_clients(request.param)


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    """A partition of the test's own, which is empty afterwards."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    yield name
    rows = client.list_samples(name)
    if rows:
        client.clear_samples(list(rows), name)
    assert client.list_samples(name) == {}
