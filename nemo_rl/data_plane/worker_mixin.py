"""The data-plane side of a training worker: fetch rows, call the ordinary method, write results back.

Invariants: one of the ranks that share rows writes, the one at coordinate 0 of every axis but data parallel; a failed
shared fetch fails on all those ranks, so none hangs in a collective; results stay with the rows and never pass Ray.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.data_plane.column_io import batch_width, read_columns, write_columns
from nemo_rl.data_plane.field_schema import pad_values
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneError
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.data_plane.sharding import PLAN, WIDTH
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict

REPLICATED_AXES = ("tensor_parallel", "context_parallel", "pipeline_parallel")


def _presharded(method: str) -> Callable[..., None]:
    """A method that calls a worker's scoring `method` on this rank's rows and writes the results back with them."""

    def score(self: TQWorkerMixin, meta: KVBatchMeta, columns: Mapping[str, str], **options: object) -> None:
        """`columns`: for each result of the method the column that it goes to. `options`: of the method."""
        result: BatchedDataDict = getattr(self, method)(self._fetch_if_any(meta), **options)
        self._write_back(meta, result, columns)

    return score


class TQWorkerMixin:
    """Fetch, run, write back."""

    _dp_client: DataPlaneClient | None = None
    _dp_pad_values: Mapping[str, int] | None = None
    _dp_replica_group: dist.ProcessGroup | None = None

    # -- the backend's part -------------------------------------------------------------------------------------------

    def _local_coords(self) -> Mapping[str, int]:
        """This rank's position along every axis. There is no default: a wrong one would make every rank write."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its rank sits")

    def _make_replica_group(self) -> dist.ProcessGroup | None:
        """A host-side group of the ranks that share this rank's rows, its leader first; called on all ranks. None if
        no other rank shares them.
        """
        return None

    @abstractmethod
    def train(self, data: SlicedDataDict, loss_fn: Any, *, eval_mode: bool, gbs: int, mbs: int) -> dict[str, object]:
        """The backend's own training."""

    @abstractmethod
    def train_microbatches(self, data: SlicedDataDict) -> None:
        """The backend's own chunk of a step."""

    # -- attaching ----------------------------------------------------------------------------------------------------

    def setup_data_plane(self, client: DataPlaneClient, pad_token_id: int) -> None:
        """Attaches this rank; a second call changes nothing. Collective: every rank must be called. `client`: a copy of
        the driver's client; it connects when it is first used.
        """
        if self._dp_client is None:
            self._dp_replica_group = self._make_replica_group()
            self._dp_client, self._dp_pad_values = client, pad_values(pad_token_id)

    def close_data_plane(self) -> None:
        """Lets go of the data plane."""
        if self._dp_client is not None:
            self._dp_client.close()
            self._dp_client = None

    def _require_dp_client(self) -> DataPlaneClient:
        if self._dp_client is None:
            raise RuntimeError("this worker is not attached to a data plane: call setup_data_plane first")
        return self._dp_client

    def _is_replica_leader(self) -> bool:
        coordinates = self._local_coords()
        return all(coordinates.get(axis, 0) == 0 for axis in REPLICATED_AXES)

    # -- rows in and out ----------------------------------------------------------------------------------------------

    def _fetch(self, meta: KVBatchMeta) -> SlicedDataDict:
        """This rank's rows, padded and cut as planned. Of ranks that share them one reads, and sends them to the
        others.
        """
        names = meta.fields
        if not names:
            raise ValueError(f"partition {meta.partition_id!r}: the meta names no columns to fetch")
        client, group = self._require_dp_client(), self._dp_replica_group
        # Rows without a plan are padded to their own longest.
        width = meta.extra_info.get(WIDTH) or batch_width(meta)

        def read() -> BatchedDataDict:
            return read_columns(client, meta, names, pad_value_dict=self._dp_pad_values, width=width)

        batch = SlicedDataDict((read() if group is None else broadcast_batch(read, group)).get_dict())
        for name in PLAN:
            setattr(batch, name, meta.extra_info.get(name))
        return batch

    def _fetch_if_any(self, meta: KVBatchMeta) -> SlicedDataDict:
        """This rank's rows; a chunk that does not divide may leave it none."""
        return self._fetch(meta) if meta.size else SlicedDataDict()

    def _write_back(self, meta: KVBatchMeta, result: Mapping[str, torch.Tensor], columns: Mapping[str, str]) -> None:
        """Adds results to the rows, each to its column, from the leader of the ranks that made them."""
        if missing := {name: column for name, column in columns.items() if name not in result}:
            raise RuntimeError(
                f"the worker's result lacks {sorted(missing)}, from which the columns {sorted(missing.values())} are "
                f"written; it has {sorted(result)}"
            )
        for name in columns:
            value = result[name]
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"the worker's result {name!r} is a {type(value).__name__}; a tensor was expected")
            if value.shape[0] != meta.size:
                raise ValueError(f"the worker's result {name!r} has {value.shape[0]} rows for {meta.size} ids")
        if self._is_replica_leader():
            written = {column: result[name].cpu() for name, column in columns.items()}
            write_columns(self._require_dp_client(), meta, written)

    # -- entry points -------------------------------------------------------------------------------------------------

    def train_presharded(
        self, meta: KVBatchMeta, loss_fn: object, *, eval_mode: bool, gbs: int, mbs: int
    ) -> dict[str, object]:
        """`train` on this rank's rows."""
        return self.train(self._fetch(meta), loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)

    def train_microbatches_presharded(self, meta: KVBatchMeta) -> None:
        """`train_microbatches` on this rank's rows, of which a chunk may have none."""
        self.train_microbatches(self._fetch_if_any(meta))

    get_logprobs_presharded = _presharded("get_logprobs")
    get_reference_policy_logprobs_presharded = _presharded("get_reference_policy_logprobs")
    get_policy_and_reference_logprobs_presharded = _presharded("get_policy_and_reference_logprobs")
    get_naturally_routed_logprobs_presharded = _presharded("get_naturally_routed_logprobs")
    get_topk_logits_presharded = _presharded("get_topk_logits")


def broadcast_batch(fetch: Callable[[], BatchedDataDict], group: dist.ProcessGroup) -> BatchedDataDict:
    """Broadcasts the result of `fetch`, which is called on the group's first rank only, to all of its ranks. Raises
    DataPlaneError: the leader's fetch failed; on the leader its own error.
    """
    leader = dist.get_process_group_ranks(group)[0]
    if dist.get_rank() == leader:
        return _lead(fetch, group, leader)
    header: list[Any] = [None]
    dist.broadcast_object_list(header, src=leader, group=group)
    (said,) = header
    if isinstance(said, str):
        raise DataPlaneError(f"rank {leader} could not fetch the rows that this rank shares: {said}")
    batch: BatchedDataDict = BatchedDataDict()
    for name, value in said:
        if isinstance(value, _TensorForm):
            tensor = torch.empty(value.shape, dtype=value.dtype)
            _send(tensor, group, leader)
            batch[name] = tensor
        else:
            batch[name] = value
    return batch


class _TensorForm:
    """Shape and dtype of a tensor that follows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _lead(fetch: Callable[[], BatchedDataDict], group: dist.ProcessGroup, leader: int) -> BatchedDataDict:
    try:
        batch = fetch()
    except Exception as error:
        dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=leader, group=group)
        raise
    header = [(name, _TensorForm(value) if isinstance(value, torch.Tensor) else value) for name, value in batch.items()]
    dist.broadcast_object_list([header], src=leader, group=group)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            _send(value.contiguous(), group, leader)
    return batch


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, leader: int) -> None:
    if tensor.numel():
        # As bytes: every dtype travels, also those that the collective does not know.
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=leader, group=group)
