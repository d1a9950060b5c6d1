"""What the client adds to a storage: waiting for space, whole puts, clean closing, lazy connections, counters and the
factory's refusals.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.request import urlopen

import pytest
import torch

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane import KVBatchMeta, MetricsDataPlaneClient, build_data_plane_client
from nemo_rl.data_plane.adapters import mooncake
from nemo_rl.data_plane.adapters.mooncake import announced_address, segment_sizes
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.interfaces import (
    DataPlaneCapacityError,
    DataPlaneClosedError,
    MissingRowsError,
    MooncakeUnavailableError,
)
from tests.data_plane.memory_storage import MemoryStorage

OPENED: list[MemoryStorage] = []


def opens() -> MemoryStorage:
    OPENED.append(MemoryStorage())
    return OPENED[-1]


def client_of(storage: MemoryStorage, **options: Any) -> StoredClient:
    return StoredClient(lambda: storage, **({"poll_s": 0.01, "full_wait_s": 0.1} | options))


def numbers(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(count)}


def test_a_full_storage_makes_the_writer_wait_until_somebody_clears() -> None:
    client = client_of(MemoryStorage(capacity=3), full_wait_s=30.0)
    client.put_samples(["a", "b", "c"], "p", numbers(3))
    threading.Timer(0.1, client.clear_samples, [["a"], "p"]).start()
    client.put_samples(["d"], "p", numbers(1))
    assert sorted(client.list_samples("p")) == ["b", "c", "d"]


def test_a_storage_that_stays_full_fails_the_write_and_loses_nothing() -> None:
    client = client_of(MemoryStorage(capacity=3))
    client.put_samples(["a", "b"], "p", numbers(2))
    with pytest.raises(
        DataPlaneCapacityError,
        match=r"partition 'p': no room for 0 s .*2 rows of 3 are stored, 2 more.*data_plane.storage_capacity",
    ):
        client.put_samples(["c", "d"], "p", numbers(2))
    assert client.get_samples(["a", "b"], "p", ["x"])["x"].tolist() == [0, 1]
    assert sorted(client.list_samples("p")) == ["a", "b"]
    client.put_samples(["a", "b"], "p", {"y": torch.ones(2)})


def test_a_closed_client_refuses_to_write_and_closes_again() -> None:
    ended: list[int] = []
    client = client_of(MemoryStorage(), on_close=lambda: ended.append(1))
    client.put_samples(["a"], "p", numbers(1))
    client.close()
    client.close()
    assert ended == [1]
    with pytest.raises(DataPlaneClosedError, match="closed"):
        client.put_samples(["b"], "p", numbers(1))


def test_a_write_that_waits_for_space_ends_when_the_client_is_closed() -> None:
    client = client_of(MemoryStorage(capacity=1), full_wait_s=60.0)
    client.put_samples(["a"], "p", numbers(1))
    threading.Timer(0.1, client.close).start()
    with pytest.raises(DataPlaneClosedError):
        client.put_samples(["b"], "p", numbers(1))


def test_a_pickled_client_connects_by_itself_when_it_is_used_and_owns_nothing() -> None:
    OPENED.clear()
    ended: list[int] = []
    client = StoredClient(opens, on_close=lambda: ended.append(1))
    assert not OPENED
    client.put_samples(["a"], "p", numbers(1))
    copy = pickle.loads(pickle.dumps(client))
    assert len(OPENED) == 1
    copy.put_samples(["b"], "p", numbers(1))
    assert len(OPENED) == 2 and copy.storage is OPENED[1]
    copy.close()
    assert ended == []
    client.close()
    assert ended == [1]


def test_the_first_write_takes_every_column_and_checks_its_counts() -> None:
    client = client_of(MemoryStorage())
    batch = {
        "input_ids": torch.arange(8).view(2, 4),
        "input_lengths": torch.tensor([2, 3]),
        "pixel_values": torch.randn(2, 3, 2, dtype=torch.bfloat16),
        "unknown": torch.tensor([1, 2], dtype=torch.int16),
        "notes": ["a", {"b": torch.ones(1)}],
        "message_log": [[], []],
    }
    meta = kv_first_write(
        batch, sample_ids=["a", "b"], dp_client=client, partition_id="p", pad_to_multiple=4, tags=[{"v": 1}, {"v": 2}]
    )
    assert (
        meta.sequence_lengths == [2, 3]
        and meta.extra_info == {"pad_to_multiple": 4}
        and "message_log" not in (meta.fields or [])
    )
    got = read_columns(
        client, meta, ["input_ids", "pixel_values", "unknown", "notes"], pad_value_dict={"input_ids": 99}
    )
    assert got["input_ids"].tolist() == [[0, 1, 99, 99], [4, 5, 6, 99]]
    assert torch.equal(got["pixel_values"], batch["pixel_values"]) and torch.equal(got["unknown"], batch["unknown"])
    assert got["notes"][0] == "a" and torch.equal(got["notes"][1]["b"], torch.ones(1))
    write_columns(client, meta, {"prev_logprobs": torch.ones(2, 9)})
    assert read_columns(client, meta.slice(0, 1), ["prev_logprobs"])["prev_logprobs"].tolist() == [[1, 1, 0, 0]]
    for wrong, says in (
        ({"sample_ids": ["a"]}, "sample_ids must match batch size"),
        ({"tags": [{}]}, "tags must match batch size"),
    ):
        with pytest.raises(ValueError, match=says):
            kv_first_write(batch, **({"sample_ids": ["a", "b"], "dp_client": client, "partition_id": "p"} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the column input_lengths"):
        kv_first_write({"x": torch.ones(1)}, sample_ids=["a"], dp_client=client, partition_id="p")
    with pytest.raises(ValueError, match="no rows to write"):
        kv_first_write({"input_lengths": torch.zeros(0)}, sample_ids=[], dp_client=client, partition_id="p")
    with pytest.raises(ValueError, match="no sequence_lengths"):
        write_columns(client, KVBatchMeta("p", None, ["a"]), {"prev_logprobs": torch.ones(1, 2)})


def test_counters_follow_what_succeeded_and_events_tell_everything() -> None:
    events: list[Mapping[str, Any]] = []
    client = MetricsDataPlaneClient(client_of(MemoryStorage(capacity=2)), on_event=events.append)
    client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 4)})
    client.get_samples(["a"], "p", ["x"])
    with pytest.raises(DataPlaneCapacityError):
        client.put_samples(["c"], "p", {"x": torch.zeros(1, 400)})
    with pytest.raises(MissingRowsError):
        client.get_samples(["z"], "p", ["x"])
    assert client.snapshot() == {
        "total_bytes": 48,
        "total_keys": 3,
        "total_ops": 2,
        "bytes_outstanding": 32,
        "peak_bytes_outstanding": 32,
        "max_bytes_per_key_seen": 16,
        "last_put_bytes_per_key": 16,
        "n_keys_outstanding": 2,
    }
    client.clear_samples(["a"], "p")
    assert client.bytes_outstanding_by_partition() == {"p": 16} and client.snapshot()["peak_bytes_outstanding"] == 32
    client.clear_samples(None, "p")
    assert client.snapshot()["n_keys_outstanding"] == 0
    assert (
        set(events[0]) == {"op", "partition_id", "n_keys", "n_bytes", "wall_ms", "status"}
        and events[0]["n_bytes"] == 32
    )
    _, _, port = client.serve_metrics().rpartition(":")
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        text = page.read().decode()
    assert "nemo_rl_data_plane_total_bytes 48" in text and 'nemo_rl_data_plane_partition_bytes{partition="p"} 0' in text
    client.close()
    with pytest.raises(OSError):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert [(e["op"], e["status"]) for e in events] == [
        ("put", "ok"),
        ("get", "ok"),
        ("put", "error"),
        ("get", "error"),
        ("clear", "ok"),
        ("clear", "ok"),
        ("close", "ok"),
    ]


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (None, {}, "data_plane is disabled: set data_plane.enabled=true, or run GRPO"),
        (DataPlaneConfig(), {}, "data_plane is disabled"),
        ({"enabled": False, "impl": "transfer_queue"}, {}, "data_plane is disabled"),
        ({"enabled": True, "impl": "transfer_queue", "backend": "simple"}, {"bootstrap": False}, "needs the address"),
        (DataPlaneConfig.model_construct(enabled=True, impl="noop"), {}, "unknown data_plane.impl='noop'"),
        (
            DataPlaneConfig.model_construct(enabled=True, impl="transfer_queue", backend="disk"),
            {},
            "unknown data_plane.backend='disk'; there are simple",
        ),
        (DataPlaneConfig(enabled=True), {"bootstrap": False}, "needs the address"),
    ],
)
def test_the_factory_never_gives_a_client_that_stores_nothing(config: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_data_plane_client(config, **options)


def test_an_operation_is_one_call_to_the_storage_however_many_rows_there_are() -> None:
    class Counting(MemoryStorage):
        calls: ClassVar[list[str]] = []

        def __getattribute__(self, name: str) -> Any:
            if name in ("locate", "put", "get", "clear", "list"):
                self.calls.append(name)
            return super().__getattribute__(name)

    client = client_of(Counting())
    ids = [str(n) for n in range(100)]
    client.put_padded(ids, "p", {"input_ids": torch.ones(100, 7, dtype=torch.int64), "x": torch.arange(100)}, [7] * 100)
    client.get_padded(ids, "p", ["input_ids", "x"])
    client.clear_samples(ids, "p")
    assert Counting.calls == ["locate", "put", "locate", "get", "clear"]


def test_rows_that_cannot_be_listed_are_not_taken_for_none() -> None:
    class Unlisted(MemoryStorage):
        def tags(self, partition_id: str) -> dict[str, dict[str, Any]]:
            raise ConnectionError("planted")

    with pytest.raises(ConnectionError, match="planted"):
        client_of(Unlisted()).clear_samples(None, "p")


def test_every_process_announces_its_own_address_to_mooncake_whatever_it_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake, "load_mooncake", lambda: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "10.0.0.1")
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    store = SimpleNamespace(protocol="tcp", master_server_address="10.0.0.1:50051")
    mooncake.prepare_process(SimpleNamespace(backend=SimpleNamespace(MooncakeStore=store)))
    assert [os.environ[name] for name in ("MC_TCP_BIND_ADDRESS", "MC_STORE_MEMCPY", "MC_LOG_LEVEL")] == [
        "10.0.0.7",
        "0",
        "INFO",
    ]


def test_a_master_that_lost_its_executable_bit_gets_it_back_and_one_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(mooncake.importlib, "import_module", lambda name: package)
    monkeypatch.setattr(mooncake.shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        MooncakeUnavailableError, match=r"mooncake_master is neither beside the package .* nor on PATH; reinstall it"
    ):
        mooncake._master_binary()
    binary = tmp_path / "mooncake_master"
    binary.touch(mode=0o644)
    assert mooncake._master_binary() == binary and os.access(binary, os.X_OK)


def test_mooncake_announces_only_addresses_that_mean_something_elsewhere() -> None:
    assert [announced_address(a) for a in ("10.0.0.7", "[2001:db8::1]")] == ["10.0.0.7", "2001:db8::1"]
    assert [announced_address(a) for a in ("169.254.3.4", "127.0.0.1", "::1", "fe80::1", "localhost")] == [""] * 5


def test_mooncakes_segments_follow_the_host_unless_they_are_set() -> None:
    free = DataPlaneConfig(enabled=True, backend="mooncake_cpu")
    assert segment_sizes(free, 64 << 30) == (2 << 30, 512 << 20) and segment_sizes(free, 1 << 30) == (
        256 << 20,
        64 << 20,
    )
    assert segment_sizes(free.model_copy(update={"global_segment_size": 5, "local_buffer_size": 6}), 64 << 30) == (5, 6)
