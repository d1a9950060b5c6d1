"""Rollouts in a process of their own, which writes the rows and hands back a reference and one value per row.

The actor wraps the same rollout sources as a run without data plane; token columns go from it to the store and never to
the driver. Invariant: a generation batch is one write, under ids minted here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import call
from nemo_rl.experience.rollout_source import Rollout, RolloutSource
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.store import RolloutColumns, in_process, mint_ids
from nemo_rl.utils.record import MemoryRecord, Record

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from nemo_rl.models.generation.vllm.dispatch import DetachedGenerator, ServingShard
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration


Purpose = Literal["train", "val"]
# Every request and every environment step has a deadline of its own; this one only ends a run whose actor hangs.
_ROLLOUT_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class ActorSources:
    """Sources of an actor's rollouts."""

    by_purpose: Mapping[Purpose, RolloutSource]  # the purpose is the partition
    events: MemoryRecord  # the record that the sources write to; pickled with them, so that it stays theirs
    generation: DetachedGenerator | None = None  # client of the sources' generation; None where rollouts are replayed


class RolloutActor:
    """Rolls out and writes. `multiple`: readers round widths up to a multiple of this."""

    def __init__(self, sources: ActorSources, client: DataPlaneClient, multiple: int) -> None:
        self._sources = dict(sources.by_purpose)
        self._events = sources.events
        self._generation = sources.generation
        self._client = client
        self._multiple = multiple

    def rollout_to_tq(
        self,
        purpose: Purpose,
        batch: BatchedDataDict,
        plan: RolloutPlan,
        attempt: int,
        serving: Mapping[int, ServingShard] | None = None,
    ) -> Rollout:
        """Rolls a numbered batch out on the shards that serve; `tokens` of the result is a meta."""
        if self._generation is not None and serving is not None:
            self._generation.follow(serving)
        rollout = self._sources[purpose].roll_out(batch, plan, attempt)
        meta = write_rollout(self._client, rollout.columns, purpose, self._multiple)
        events = tuple(self._events.entries)
        self._events.entries.clear()
        lost = self._generation.lost() if self._generation is not None else {}
        return Rollout(RolloutColumns(meta, rollout.columns.rows), rollout.samples, rollout.metrics, events, lost)

    def close(self) -> None:
        """Lets go of the data plane."""
        self._client.close()


def write_rollout(client: DataPlaneClient, columns: RolloutColumns, partition: str, multiple: int) -> KVBatchMeta:
    """Writes the token columns of a rollout in one go, under ids minted here. `columns`: the rollout, its tokens in
    this process. `multiple`: readers round widths up to a multiple of this.
    """
    versions = columns.rows["weight_version"].tolist() if "weight_version" in columns.rows else None
    return kv_first_write(
        in_process(columns.tokens),
        sample_ids=mint_ids(columns.rows["prompt_number"].tolist()),
        dp_client=client,
        partition_id=partition,
        task_name=None,
        pad_to_multiple=multiple,
        tags=None if versions is None else [{"weight_version": version} for version in versions],
    )


class RemoteRollouts:
    """A rollout source that runs in the actor. `record`: gets the rollouts' events. `owner`: the owner of the shards,
    which quarantines those that the actor found dead.
    """

    def __init__(
        self, actor: ActorHandle[object], purpose: Purpose, record: Record, owner: VllmGeneration | None = None
    ) -> None:
        self._actor = actor
        self._purpose = purpose
        self._record = record
        self._owner = owner

    def roll_out(self, batch: BatchedDataDict, plan: RolloutPlan, attempt: int) -> Rollout:
        serving = self._owner.serving() if self._owner is not None else None
        ref = self._actor.rollout_to_tq.remote(self._purpose, batch, plan, attempt, serving)
        rollout: Rollout = call(
            ref, what=f"rollout actor ({self._purpose}, step {plan.step})", timeout_s=_ROLLOUT_TIMEOUT_S
        )
        for entry in rollout.events:
            self._record.bind(entry.source, clock=lambda entry=entry: entry.time).emit(entry.event)
        if self._owner is not None:
            lost = rollout.lost_shards.items()
            self._owner.fleet.fail({shard: reason for shard, reason in lost if shard in (serving or {})})
        return rollout
