"""Rows in this process's memory, for tests of whatever talks to a data plane; no configuration leads here.

Keeps the same blocks of bytes that the other adapters carry. Knows no codec. Invariant: holds at most `capacity` rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.data_plane.client import StorageFull
from nemo_rl.data_plane.interfaces import Located, MissingRowsError


class MemoryStorage:
    """Blocks by partition, row and name.

    Args:
        capacity: Most rows of all partitions together.
    """

    def __init__(self, capacity: int = 1_000_000) -> None:
        self._capacity = capacity
        self._blocks: dict[str, dict[str, dict[str, bytes]]] = {}
        self._tags: dict[str, dict[str, dict[str, object]]] = {}
        self._lock = threading.Lock()

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, create: bool) -> Located:
        """See `Storage`."""
        with self._lock:
            rows = self._blocks.get(partition_id, {})
            missing = [identity for identity in sample_ids if identity not in rows]
            if missing and not create:
                raise MissingRowsError(
                    f"partition {partition_id!r}: {len(missing)} of {len(sample_ids)} rows do not exist "
                    f"(never written, or cleared): {missing[:3]}"
                )
            shared = (
                set.intersection(*(set(rows.get(identity, {})) for identity in sample_ids)) if sample_ids else set()
            )
            tags = self._tags.get(partition_id, {})
            return Located(
                partition_id,
                tuple(sample_ids),
                tuple(sorted(shared)),
                tuple(dict(tags.get(identity, {})) for identity in sample_ids),
            )

    def put(self, rows: Located, blocks: Mapping[str, Sequence[Any]], tags: Sequence[Mapping[str, Any]] | None) -> None:
        """See `Storage`."""
        with self._lock:
            held = self._blocks.setdefault(rows.partition_id, {})
            new = [identity for identity in rows.sample_ids if identity not in held]
            total = sum(map(len, self._blocks.values()))
            if total + len(new) > self._capacity:
                raise StorageFull(f"{total} rows of {self._capacity} are stored, {len(new)} more do not fit")
            for index, identity in enumerate(rows.sample_ids):
                row = held.setdefault(identity, {})
                row.update({name: bytes(buffers[index]) for name, buffers in blocks.items()})
                if tags is not None:
                    self._tags.setdefault(rows.partition_id, {})[identity] = dict(tags[index])

    def get(self, rows: Located, blocks: Sequence[str]) -> dict[str, list[Any]]:
        """See `Storage`."""
        with self._lock:
            held = self._blocks[rows.partition_id]
            return {name: [held[identity][name] for identity in rows.sample_ids] for name in blocks}

    def clear(self, partition_id: str, sample_ids: Sequence[str]) -> None:
        """See `Storage`."""
        with self._lock:
            for identity in sample_ids:
                self._blocks.get(partition_id, {}).pop(identity, None)
                self._tags.get(partition_id, {}).pop(identity, None)

    def tags(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """See `Storage`."""
        with self._lock:
            tags = self._tags.get(partition_id, {})
            return {identity: dict(tags.get(identity, {})) for identity in self._blocks.get(partition_id, {})}

    def close(self) -> None:
        """No resource is held."""
