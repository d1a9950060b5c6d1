"""Rows in TransferQueue: a controller that lists the rows, and storage that holds their bytes.

Calls TransferQueue's client on one event loop per process, with a deadline on every call; after a timeout it finds out
which process died. Invariant: nothing outside `adapters` imports `transfer_queue`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from nemo_rl.data_plane.adapters.guard import Guard
from nemo_rl.data_plane.adapters.mooncake import load_native_libraries, prepare_process
from nemo_rl.data_plane.client import StorageFull
from nemo_rl.data_plane.interfaces import (
    DataPlaneClosedError,
    DataPlaneError,
    DataPlaneTimeout,
    Located,
    MissingRowsError,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transfer_queue.metadata import BatchMeta

    from nemo_rl.data_plane.interfaces import Buffer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PROBE_EVERY_S = 3.0
_PROBE_TIMEOUT_S = 2.0
_ATTACH_TIMEOUT_S = 60.0
_CANCEL_TIMEOUT_S = 5.0
# -200 is Mooncake's "no space left in any segment".
_FULL_MARKS = ("Storage capacity exceeded", "error codes [-200", "-200,", "NO_AVAILABLE_HANDLE")


@dataclass(frozen=True)
class DataPlaneProcess:
    """A process of the data plane that must be reachable."""

    what: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.what} at {self.host}:{self.port}"

    def answers(self) -> bool:
        """Whether something accepts connections there."""
        try:
            with socket.create_connection((self.host, self.port), timeout=_PROBE_TIMEOUT_S):
                return True
        except TimeoutError:
            # A busy machine answers late; only a refused connection proves that no server is there.
            return True
        except OSError:
            return False


@dataclass(frozen=True)
class TransferQueueAddress:
    """Address of the data plane for a process of the run: its controller actor's name in this job's namespace, and the
    deadline of a call in seconds.
    """

    controller: str
    timeout_s: float
    guard: Guard
    mooncake: bool

    def connect(self) -> TransferQueueStorage:
        """A storage of this process. Raises DataPlaneError: there is no such controller."""
        return TransferQueueStorage(self)


class TransferQueueStorage:
    """A `Storage`: this process's connection."""

    def __init__(self, address: TransferQueueAddress) -> None:
        self._timeout_s = address.timeout_s
        self._mooncake = address.mooncake
        load_native_libraries()
        config, self.endpoints = fetch_config(address.controller)
        if address.mooncake:
            prepare_process(config)
        from transfer_queue.client import AsyncTransferQueueClient

        address.guard.stand()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()
        backend = config.backend.storage_backend
        name = f"nemo_rl-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client = AsyncTransferQueueClient(
            client_id=name, controller_info=config.controller.zmq_info, zmq_io_threads=2
        )
        self._client.initialize_storage_manager(manager_type=backend, config=config.backend[backend])
        self._manager = self._client.storage_manager
        self._open = True

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, create: bool) -> Located:
        ids = list(sample_ids)
        meta = self._run(
            f"looking up {len(ids)} rows of partition {partition_id!r}",
            lambda: self._client.async_kv_retrieve_meta(ids, partition_id, create=create),
        )
        if meta.size != len(ids):
            missing = self._absent(partition_id, ids)
            raise MissingRowsError(
                f"partition {partition_id!r}: {len(missing)} of {len(ids)} rows do not exist (never written, "
                f"or cleared): {missing[:3]}"
            )
        return Located(
            partition_id, tuple(ids), tuple(meta.field_names), tuple(dict(tags) for tags in meta.custom_meta), meta
        )

    def _absent(self, partition_id: str, ids: Sequence[str]) -> list[str]:
        present = self.tags(partition_id)
        return [identity for identity in ids if identity not in present]

    def put(
        self, rows: Located, blocks: Mapping[str, Sequence[Buffer]], tags: Sequence[Mapping[str, object]] | None
    ) -> None:
        what = f"writing {len(rows.sample_ids)} rows of partition {rows.partition_id!r}"
        try:
            if blocks:
                # Rows as bytes lie in one message; a frame for each row, which arrays would get, costs more than the
                # copy.
                data = _Rows(
                    {
                        name: _one_tensor(values) if self._mooncake else [value.tobytes() for value in values]
                        for name, values in blocks.items()
                    }
                )
                data.batch_size = (len(rows.sample_ids),)
                self._run(what, lambda: self._manager.put_data(data, rows.native))
            if tags is not None:
                rows.native.update_custom_meta([dict(tag) for tag in tags])
                self._run(what, lambda: self._client.async_set_custom_meta(rows.native))
        except RuntimeError as error:
            if isinstance(error, DataPlaneError) or not any(mark in str(error) for mark in _FULL_MARKS):
                raise
            if not rows.blocks:
                # Rows that were new with this put hold parts of it at most; they leave no trace.
                self.clear(rows.partition_id, rows.sample_ids)
            raise StorageFull(_last_clause(str(error))) from error

    def get(self, rows: Located, blocks: Sequence[str]) -> dict[str, list[Buffer]]:
        meta = rows.native.select_fields(list(blocks))
        what = f"reading {len(rows.sample_ids)} rows of partition {rows.partition_id!r}"
        if self._mooncake:
            found = self._run(what, lambda: asyncio.to_thread(asyncio.run, self._manager.get_data(meta)))
        else:
            found = self._run(what, lambda: self._manager.get_data(meta))
        return {name: _buffers(found[name]) for name in blocks}

    def clear(self, partition_id: str, sample_ids: Sequence[str]) -> None:
        ids = list(sample_ids)
        what = f"clearing {len(ids)} rows of partition {partition_id!r}"
        meta = self._run(what, lambda: self._client.async_kv_retrieve_meta(ids, partition_id, create=False))
        if meta.size and self._mooncake:
            self._run(what, lambda: self._clear_every_block(meta, partition_id))
        elif meta.size:
            self._run(what, lambda: self._client.async_clear_samples(meta))

    async def _clear_every_block(self, meta: BatchMeta, partition_id: str) -> None:
        """Clears all fields of rows; a key-value storage drops only given fields that all the rows have."""
        whole = await self._client._get_partition_meta(partition_id)
        wanted = set(meta.global_indexes)
        rows = whole.select_samples([index for index, row in enumerate(whole.global_indexes) if row in wanted])
        if rows.field_names:
            await self._client.async_clear_samples(rows)
        else:
            await self._client._clear_meta_in_controller(rows)

    def tags(self, partition_id: str) -> dict[str, dict[str, object]]:
        found = self._run(f"listing partition {partition_id!r}", lambda: self._client.async_kv_list(partition_id))
        return {identity: dict(tags or {}) for identity, tags in found.get(partition_id, {}).items()}

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._mooncake:
            # While its master still answers.
            self._manager.storage_client.close()
        for loop in (self._loop, self._manager._notify_loop):
            _cancel_calls(loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        self._client.close()
        self._loop.close()

    def _run(self, what: str, make: Callable[[], Coroutine[object, object, T]]) -> T:
        """Runs a call to its end, or to the deadline, or until a part of the data plane is found dead."""
        if not self._open:
            raise DataPlaneClosedError(f"{what}: the client is closed")
        future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return future.result(timeout=min(_PROBE_EVERY_S, max(0.05, deadline - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._require_alive(what, future)
                if time.monotonic() >= deadline:
                    future.cancel()
                    alive = ", ".join(map(str, self.endpoints))
                    raise DataPlaneTimeout(
                        f"{what}: no answer within {self._timeout_s:.0f} s, although these accept connections: {alive}"
                    ) from None
            except concurrent.futures.CancelledError:
                raise DataPlaneClosedError(f"{what} was cut off: the client was closed meanwhile") from None
            except RuntimeError:
                self._require_alive(what, future)
                raise

    def _require_alive(self, what: str, call: concurrent.futures.Future[Any]) -> None:
        dead = [endpoint for endpoint in self.endpoints if not endpoint.answers()]
        if dead:
            call.cancel()
            raise DataPlaneError(
                f"{what} failed: {', '.join(map(str, dead))} died; the rows it held are lost and the run cannot go on"
            )


def _cancel_calls(loop: asyncio.AbstractEventLoop) -> None:
    """Lets abandoned calls finish on their loop; a coroutine that is dropped instead logs a warning."""
    if loop.is_running():
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=_CANCEL_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            logger.warning("data_plane=closing calls_left=true after_s=%.0f", _CANCEL_TIMEOUT_S)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Rows(dict[str, object]):
    """A batch as TransferQueue's managers read one: columns by name, and its size."""

    batch_size: tuple[int, ...] = (0,)


def fetch_config(controller: str) -> tuple[DictConfig, tuple[DataPlaneProcess, ...]]:
    """The system's configuration from its controller, and what must be reachable. Raises DataPlaneError: there is no
    such controller.
    """
    import ray

    try:
        actor = ray.get_actor(controller)
        config: Any = ray.get(actor.get_config.remote(), timeout=_ATTACH_TIMEOUT_S)
    except (ValueError, ray.exceptions.RayError) as error:
        raise DataPlaneError(
            f"the data plane's controller {controller!r} does not answer: {error}; the driver starts it "
            "before workers attach"
        ) from error
    return config, endpoints_of(config)


def endpoints_of(config: DictConfig) -> tuple[DataPlaneProcess, ...]:
    """The processes behind a configuration."""
    info = config.controller.zmq_info
    found = [DataPlaneProcess("the controller", info.ip, info.ports["request_handle_socket"])]
    backend = config.backend[config.backend.storage_backend]
    for name, unit in (backend.get("zmq_info") or {}).items():
        found.append(DataPlaneProcess(str(name), unit.ip, unit.ports["put_get_socket"]))
    if "master_server_address" in backend:
        host, _, port = str(backend.master_server_address).rpartition(":")
        found.append(DataPlaneProcess("mooncake_master", host, int(port)))
    return tuple(found)


def _one_tensor(buffers: Sequence[Buffer]) -> torch.Tensor:
    """The rows of a block as one jagged tensor."""
    sizes = [len(buffer) for buffer in buffers]
    whole = buffers[0].base
    # Rows of one put lie behind each other already, unless they were made one by one.
    values = whole if isinstance(whole, np.ndarray) and whole.nbytes == sum(sizes) else np.concatenate(buffers)
    return torch.nested.nested_tensor_from_jagged(
        torch.from_numpy(values), torch.tensor([0, *np.cumsum(sizes).tolist()])
    )


def _buffers(values: Any) -> list[Buffer]:
    if isinstance(values, torch.Tensor):
        return [row.numpy() for row in values.unbind()]
    return values.tolist()


def _last_clause(message: str) -> str:
    return message.rsplit("detail error message: ", 1)[-1][-300:]
