"""The experience store on the data plane: handles are metas, token stages run in an actor.

The driver moves ids, lengths, tags and one value per row, never token columns. Invariants: row ids are minted once; a
step's rows are cleared when it ends, also after an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from ray.actor import ActorHandle

from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.field_schema import pad_values
from nemo_rl.data_plane.interfaces import DataPlaneClient, DataPlaneError
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import call, start_actor, stop_actor
from nemo_rl.experience.rollout_actor import (
    ActorSources,
    Purpose,
    RemoteRollouts,
    RolloutActor,
    write_rollout,
)
from nemo_rl.experience.rollout_source import RolloutSource
from nemo_rl.experience.store import Applied, RolloutColumns, SpentHandles, TokenStage, mint_ids
from nemo_rl.models.policy.interfaces import BatchHandle, Scores, StoredColumns
from nemo_rl.utils.record import MemoryRecord, Record

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.dispatch import DetachedGenerator
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

logger = logging.getLogger(__name__)

_STAGE_TIMEOUT_S = 1800.0


class DataPlaneStore:
    """Columns on the data plane.

    Args:
        pad_token_id: Padding of token ids when columns are read.
        multiple: Widths are rounded up to a multiple of this.
        partition: Where rows go that are written here, rather than by a rollout actor.
    """

    def __init__(self, client: DataPlaneClient, pad_token_id: int, multiple: int = 1, partition: str = "train") -> None:
        self._client = client
        self._pad_values = pad_values(pad_token_id)
        self._multiple = multiple
        self._partition = partition
        self._owned: dict[str, dict[str, None]] = {}
        self._spent = SpentHandles()
        self._runner: ActorHandle[StageRunner] | None = None
        self._runner_lock = threading.Lock()
        self._rollouts: ActorHandle[RolloutActor] | None = None

    def rollouts(
        self,
        train: RolloutSource,
        val: RolloutSource | None,
        events: MemoryRecord,
        record: Record,
        generation: DetachedGenerator | None = None,
        owner: VllmGeneration | None = None,
    ) -> tuple[RolloutSource, RolloutSource | None]:
        """The same sources in an actor of this store, which writes their batches.

        Args:
            val: Validation rollouts, or None.
            events: The record that both write to.
            record: The run's, which takes these events over.
            generation: Client with which both generate; None where rollouts are replayed.
            owner: Owns the shards of that generation.
        """
        by_purpose: dict[Purpose, RolloutSource] = {"train": train}
        if val is not None:
            by_purpose["val"] = val
        sources = ActorSources(by_purpose, events, generation)
        self._rollouts = start_actor(RolloutActor, sources, self._client, self._multiple)
        training = RemoteRollouts(self._rollouts, "train", record, owner)
        return training, RemoteRollouts(self._rollouts, "val", record, owner) if val is not None else None

    @contextmanager
    def step(self) -> Generator[None]:
        """Owns every row that is written in it; whatever is left at its end is cleared."""
        before = {partition: set(ids) for partition, ids in self._owned.items()}
        try:
            yield
        except BaseException:
            try:
                self._clear_since(before)
            except DataPlaneError as error:
                # What ended the step is what the user must see; a dead data plane keeps no rows anyway.
                logger.warning("data_plane=rows_left reason=%s", error)
            raise
        self._clear_since(before)

    def write(self, columns: BatchHandle) -> KVBatchMeta:
        """Takes over rows that a rollout wrote, or writes a batch."""
        if isinstance(columns, KVBatchMeta):
            meta = columns
        else:
            ids = mint_ids(range(columns.size))
            meta = kv_first_write(
                columns,
                sample_ids=ids,
                dp_client=self._client,
                partition_id=self._partition,
                pad_to_multiple=self._multiple,
            )
        self._owned.setdefault(meta.partition_id, {}).update(dict.fromkeys(meta.sample_ids))
        return meta

    def write_pending(self, columns: RolloutColumns) -> KVBatchMeta:
        """Writes rows that no step owns yet."""
        return write_rollout(self._client, columns, self._partition, self._multiple)

    def update(self, handle: BatchHandle, columns: Mapping[str, object]) -> KVBatchMeta:
        """Adds columns."""
        meta = self._current(handle)
        write_columns(self._client, meta, columns)
        return self._changed("update", meta, columns)

    def commit(self, handle: BatchHandle, result: Scores, **renamed: str) -> KVBatchMeta:
        """Notes the columns that the workers wrote. Raises TypeError: the result is in this process instead;
        ValueError: a column was written under another name.
        """
        meta = self._current(handle)
        if not isinstance(result, StoredColumns):
            raise TypeError(f"expected columns that were stored with their rows, got {sorted(result)} in this process")
        for column, name in renamed.items():
            if result.columns.get(name) != column:
                raise ValueError(
                    f"the policy stored {name!r} as {result.columns.get(name)!r}, the column {column!r} was expected"
                )
        return self._changed("commit", meta, renamed)

    def read(self, handle: BatchHandle, columns: Sequence[str]) -> BatchedDataDict:
        """The named columns, brought into this process."""
        return read_columns(self._client, self._with(handle, columns), columns, pad_value_dict=self._pad_values)

    def columns(self, handle: BatchHandle) -> list[str]:
        """The columns that the meta names."""
        return list(self._current(handle).fields or ())

    def annotate(self, handle: BatchHandle, tags: Mapping[str, torch.Tensor]) -> KVBatchMeta:
        """Tags are kept in the meta."""
        annotated = self._changed("annotate", self._current(handle), ())
        annotated.set_tags({name: value.tolist() for name, value in tags.items()})
        return annotated

    def tag(self, handle: BatchHandle, name: str) -> torch.Tensor:
        return torch.tensor(self._current(handle).tag(name))

    def apply(self, handle: BatchHandle, stage: TokenStage) -> Applied:
        """Runs the stage in an actor; its columns stay on the data plane."""
        meta = self._with(handle, stage.reads)
        rows = call(
            self.start_runner().apply.remote(meta, stage), what=f"stage {stage.name}", timeout_s=_STAGE_TIMEOUT_S
        )
        return Applied(self._changed("apply", meta, stage.writes) if stage.writes else meta, rows)

    def start_runner(self) -> ActorHandle[StageRunner]:
        """The actor that stages run in; started here for the first time, without waiting for it."""
        with self._runner_lock:
            if self._runner is None:
                self._runner = start_actor(StageRunner, self._client, self._pad_values)
            return self._runner

    def select(self, handle: BatchHandle, rows: Sequence[int]) -> KVBatchMeta:
        """Some of the rows."""
        return self._current(handle).subset(list(rows))

    def select_columns(self, handle: BatchHandle, columns: Sequence[str]) -> KVBatchMeta:
        """The rows as a reader of these columns sees them."""
        return self._with(handle, columns).only_fields(columns)

    def concat(self, handles: Sequence[BatchHandle]) -> KVBatchMeta:
        """The rows of all."""
        first, *others = [self._current(handle) for handle in handles]
        return first.concat(*others)

    def keep(self, handle: BatchHandle) -> None:
        """The rows are not cleared with their step."""
        meta = self._current(handle)
        self._disown(meta.partition_id, meta.sample_ids)

    def clear(self, handle: BatchHandle) -> None:
        """Drops the rows."""
        meta = self._current(handle)
        self._clear(meta.partition_id, meta.sample_ids)
        self._spent.spend(meta, "clear")

    def _clear_since(self, before: Mapping[str, set[str]]) -> None:
        for partition, ids in self._owned.items():
            self._clear(partition, [identity for identity in ids if identity not in before.get(partition, ())])

    def _clear(self, partition: str, ids: Sequence[str]) -> None:
        if ids:
            self._client.clear_samples(ids, partition)
            self._disown(partition, ids)

    def _disown(self, partition: str, ids: Sequence[str]) -> None:
        for identity in ids:
            self._owned.get(partition, {}).pop(identity, None)

    def _current(self, handle: BatchHandle) -> KVBatchMeta:
        self._spent.check(handle)
        if not isinstance(handle, KVBatchMeta):
            raise TypeError(f"expected rows of the data plane, got a batch of {handle.size} rows in this process")
        return handle

    def _with(self, handle: BatchHandle, columns: Sequence[str]) -> KVBatchMeta:
        """The meta with further columns."""
        meta = self._current(handle)
        if missing := [name for name in columns if name not in (meta.fields or ())]:
            raise KeyError(f"columns {missing} were never written; there are {sorted(meta.fields or ())}")
        return meta

    def _changed(self, verb: str, meta: KVBatchMeta, columns: Iterable[str]) -> KVBatchMeta:
        self._spent.spend(meta, verb)
        return meta.with_fields(list(columns))

    def close(self) -> None:
        """Ends the actors; the client belongs to the policy."""
        stop_actor(self._runner)
        stop_actor(self._rollouts)
        self._runner = self._rollouts = None


class StageRunner:
    """Runs token stages where the rows can be reached. An actor, on the driver's node, so that stages may write log
    files.
    """

    def __init__(self, client: DataPlaneClient, pad_values: Mapping[str, int]) -> None:
        self._client = client
        self._pad_values = pad_values

    def apply(self, meta: KVBatchMeta, stage: TokenStage) -> dict[str, torch.Tensor]:
        """The stage's rows; its columns are written."""
        columns = read_columns(self._client, meta, stage.reads, pad_value_dict=self._pad_values)
        output = stage(columns)
        write_columns(self._client, meta, output.columns)
        return output.rows

    def close(self) -> None:
        """Lets go of the data plane."""
        self._client.close()
