"""Calls of scripts written for another control plane's services, on the parts that a run has here.

`nemo_rl.algorithms.grpo.DO_TIME_SHARING` and `Coordinator` are the names; every method hands on to one of ours. The
orchestrator's calls (`allocate_pipeline_id`, `register_pipeline`, `admit_pipeline`, `unregister_pipeline`) need no
other shape: the pool's actor has them. `names.yaml` lists every name, and why one is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.experience.hooks import time_sharing_enabled
from nemo_rl.models.generation.elastic import with_own_cache
from nemo_rl.models.generation.interfaces import ShardStateError
from nemo_rl.models.generation.vllm.fleet import Moved

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun


def __getattr__(name: str) -> Any:
    if name == "DO_TIME_SHARING":
        return time_sharing_enabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Coordinator:
    """One pipeline's coordinator, weight cache and model-update service. `run`: a run with engines, as `setup` returns
    it.

    Weight versions are the numbers of completed steps, 0 for the base, as everywhere in this package.
    """

    def __init__(self, run: GRPORun) -> None:
        # As on a pool: shards wake while another pipeline may have the training GPUs.
        self._elastic = with_own_cache(run.policy, run.generation, run.config.weight_sync)

    @property
    def cache_ready_step(self) -> int | None:
        """The version that the cache serves; None before the first build."""
        return self._elastic.cache.version

    def build_latest(self, step: int) -> None:
        """Packs the policy's weights, which must be on its devices, as a version, and serves it from then on. See
        `PolicyWeightCache.build`.
        """
        self._elastic.cache.build(step)

    def sync_base_weights_to_active(self) -> list[int]:
        """Brings the cache's version to every shard that serves; the shards, none where none serves. Raises
        ShardStateError: a shard did not get it; it is quarantined. For other errors see `ElasticGeneration.refresh`.
        """
        return _whole(self._elastic.refresh(), "did not get the weights")

    def sync_selected_workers(self, tgt_dp_ranks: Sequence[int], verify: bool = False) -> None:
        """Brings the cache's version to shards that are awake and take no requests. See
        `ElasticGeneration.sync_selected_workers`.
        """
        self._elastic.sync_selected_workers(tgt_dp_ranks, verify)

    def resize_infer(self, dp_ranks_to_remove: Iterable[int], dp_ranks_to_add: Iterable[int]) -> None:
        """Puts shards to sleep, then wakes others with the cache's version and routes them. Raises ValueError: a shard
        is to be removed and added; nothing has moved. ShardStateError: a shard did not move; those that did stay moved.
        For other errors see `ElasticGeneration.shrink` and `expand`; removed shards sleep.
        """
        removed, added = set(dp_ranks_to_remove), set(dp_ranks_to_add)
        if removed & added:
            raise ValueError(f"shards {sorted(removed & added)} are to be removed and added: name each on one side")
        asleep = self._elastic.shrink(removed)
        # Before the first version shards can only leave.
        awake = self._elastic.expand(added) if added else Moved([])
        _whole(asleep, "do not sleep")
        _whole(awake, "did not wake")


def _whole(moved: Moved, what: str) -> list[int]:
    if moved.failed:
        raise ShardStateError("; ".join(f"shard {shard}: {what}: {why}" for shard, why in moved.failed.items()))
    return moved.shards
