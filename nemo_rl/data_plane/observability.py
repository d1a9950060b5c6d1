"""Operations of a client, as one event each, as counters, and as Prometheus metrics.

Wraps any client; results and errors pass through unchanged. Invariant: outstanding counts change only after an
operation succeeded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.http_server import BackgroundServer, metrics_handler

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = Mapping[str, object]


def log_event(event: Event) -> None:
    """Logs one event on one line."""
    logger.info("data_plane %s", " ".join(f"{name}={value}" for name, value in event.items()))


class MetricsDataPlaneClient(DataPlaneClient):
    """Counts the operations of a client. `inner`: the wrapped client. `on_event`: called with `op, partition_id,
    n_keys, n_bytes, wall_ms, status` after every operation.
    """

    def __init__(self, inner: DataPlaneClient, on_event: Callable[[Event], None] | None = None) -> None:
        self.inner = inner
        self._on_event = on_event
        self._counts = _Counts()
        self._endpoint: BackgroundServer | None = None

    def serve_metrics(self, host: str = "127.0.0.1", token: str | None = None) -> str:
        """Serves the counters to Prometheus on a free port until the client is closed; returns the `host:port` of
        `/metrics`. `token`: bearer token that requests must carry; None: none.
        """
        if self._endpoint is None:
            handler = metrics_handler(self.prometheus_text, token)
            self._endpoint = BackgroundServer(handler, host=host, port=0, name="data-plane-metrics")
        return f"{host}:{self._endpoint.port}"

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process counts what goes through it there.
        return {"inner": self.inner, "_on_event": self._on_event}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._counts = _Counts()
        self._endpoint = None

    def snapshot(self) -> dict[str, float]:
        """The counters since this client was made, bytes as they were before encoding."""
        return self._counts.snapshot()

    def bytes_outstanding_by_partition(self) -> dict[str, float]:
        """Bytes put and not yet cleared through this client, by partition."""
        return self._counts.by_partition()

    def prometheus_text(self) -> str:
        """The counters in Prometheus's text format."""
        lines: list[str] = []
        for name, value in self.snapshot().items():
            kind = "counter" if name.startswith("total_") else "gauge"
            lines += [f"# TYPE nemo_rl_data_plane_{name} {kind}", f"nemo_rl_data_plane_{name} {value:g}"]
        lines.append("# TYPE nemo_rl_data_plane_partition_bytes gauge")
        lines += [
            f'nemo_rl_data_plane_partition_bytes{{partition="{name}"}} {value:g}'
            for name, value in self.bytes_outstanding_by_partition().items()
        ]
        return "\n".join(lines) + "\n"

    def _observed(
        self,
        op: str,
        partition_id: str,
        keys: int,
        work: Callable[[], T],
        measure: Callable[[T], tuple[int, int]] | None = None,
    ) -> T:
        """Runs an operation; `measure` gives keys and bytes of its result."""
        started = time.perf_counter()
        size, status = 0, "error"
        try:
            result = work()
            if measure is not None:
                keys, size = measure(result)
            status = "ok"
            return result
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            wall_ms = (time.perf_counter() - started) * 1e3
            if status == "ok":
                self._counts.operation(keys, size)
            if self._on_event is not None:
                event = {"op": op, "partition_id": partition_id, "n_keys": keys, "n_bytes": size}
                self._on_event(event | {"wall_ms": round(wall_ms, 3), "status": status})

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: object | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        work = partial(self.inner.put_samples, sample_ids, partition_id, fields, tags)
        return self._put(sample_ids, partition_id, nbytes(fields) if fields is not None else 0, work)

    def put_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        columns: Mapping[str, object],
        lengths: Sequence[int],
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        work = partial(self.inner.put_padded, sample_ids, partition_id, columns, lengths, tags)
        return self._put(sample_ids, partition_id, nbytes(columns), work)

    def _put(
        self, sample_ids: Sequence[str], partition_id: str, size: int, work: Callable[[], KVBatchMeta]
    ) -> KVBatchMeta:
        meta = self._observed("put", partition_id, len(sample_ids), work, lambda _: (len(sample_ids), size))
        self._counts.put(partition_id, sample_ids, size)
        return meta

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        work = partial(self.inner.get_samples, sample_ids, partition_id, select_fields)
        return self._observed("get", partition_id, len(sample_ids), work, lambda td: (len(sample_ids), nbytes(td)))

    def get_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        width: int = 0,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        work = partial(
            self.inner.get_padded, sample_ids, partition_id, select_fields, width=width, pad_value_dict=pad_value_dict
        )
        return self._observed(
            "get", partition_id, len(sample_ids), work, lambda batch: (len(sample_ids), nbytes(batch))
        )

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        self._observed(
            "clear", partition_id, len(sample_ids or ()), lambda: self.inner.clear_samples(sample_ids, partition_id)
        )
        self._counts.clear(partition_id, sample_ids)

    def list_samples(self, partition_id: str) -> dict[str, dict[str, object]]:
        return self.inner.list_samples(partition_id)

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        self._observed("close", "", 0, self.inner.close)


class _Counts:
    """The counters of one client in one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(("total_bytes", "total_keys", "total_ops"), 0)
        self._held: dict[str, dict[str, float]] = {}
        self._peak = self._largest = self._last = 0.0

    def operation(self, keys: int, size: int) -> None:
        with self._lock:
            self._totals["total_ops"] += 1
            self._totals["total_keys"] += keys
            self._totals["total_bytes"] += size

    def put(self, partition_id: str, ids: Sequence[str], size: int) -> None:
        with self._lock:
            each = size / len(ids) if len(ids) else 0.0
            held = self._held.setdefault(partition_id, {})
            for identity in ids:
                held[identity] = held.get(identity, 0.0) + each
            self._last = each
            self._largest = max(self._largest, each)
            self._peak = max(self._peak, self._outstanding())

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> None:
        with self._lock:
            held = self._held.get(partition_id, {})
            for identity in list(held) if ids is None else ids:
                held.pop(identity, None)

    def _outstanding(self) -> float:
        return sum(sum(rows.values()) for rows in self._held.values())

    def by_partition(self) -> dict[str, float]:
        with self._lock:
            return {name: sum(rows.values()) for name, rows in self._held.items()}

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return self._totals | {
                "bytes_outstanding": self._outstanding(),
                "peak_bytes_outstanding": self._peak,
                "max_bytes_per_key_seen": self._largest,
                "last_put_bytes_per_key": self._last,
                "n_keys_outstanding": sum(map(len, self._held.values())),
            }


def nbytes(columns: Any) -> int:
    """Bytes of the tensors among columns; objects count nothing."""
    total = 0
    for name in columns.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value = columns[name]
        if isinstance(value, torch.Tensor):
            values = value.values() if value.is_nested and value.layout == torch.jagged else value
            total += values.numel() * values.element_size()
    return total
