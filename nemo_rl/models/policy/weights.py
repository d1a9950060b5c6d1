"""Residency, export and refit cache of a policy's weights, over its workers.

The cache is built by all ranks together, owned by the first, and served to sync sessions: by the host transport these
read it without disturbing any rank; by the others the owner rank stages and pushes. Invariants: every verb reaches
every rank, or none; the cache has one owner, and only it stores bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from nemo_rl.distributed.virtual_cluster import MEETING_S, RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerGroup, wait_for_workers
from nemo_rl.weight_sync.cache import BucketCache, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sender import SendSpec
from nemo_rl.weight_sync.sync_session import WeightSource

if TYPE_CHECKING:
    from ray import ObjectRef

    from nemo_rl.weight_sync.transports import Published


class PolicyWeights(WeightSource):
    """Weights in the workers of a policy."""

    maps_host_memory = False

    def __init__(self, worker_group: RayWorkerGroup, cluster: RayVirtualCluster) -> None:
        self.worker_group = worker_group
        self._cluster = cluster
        self._metas: list[TensorMeta] | None = None

    # -- residency ----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Model and optimizer on the device."""
        self.worker_group.run("prepare_for_training")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Model on the device."""
        self.worker_group.run("prepare_for_training" if keep_train_buffers else "prepare_for_lp_inference")

    def finish_training(self) -> None:
        """Gives cached memory back."""
        self.worker_group.run("release_cached_memory")

    def offload_before_refit(self) -> None:
        """Optimizer to the host: weights are still needed on the device for the export."""
        self.worker_group.run("offload_optimizer")

    def offload_after_refit(self) -> None:
        """Model and optimizer to the host."""
        self.worker_group.run("offload_all")

    def offload_to_cpu(self) -> None:
        """Same as `offload_after_refit`."""
        self.offload_after_refit()

    def offload_training_gpu(self) -> None:
        """Moves all training state off the devices, except communicators: model, optimizer, caches."""
        self.offload_after_refit()

    def destroy_nccl_groups(self) -> None:
        """Gives the device memory of communicators back. They are made again before their next use. Raises WorkerError:
        a train step is open.
        """
        self.worker_group.run("drop_communicators")

    def get_free_memory_bytes(self) -> int:
        """Free device memory of the fullest slot, in bytes."""
        return min(self.worker_group.run("free_memory"))

    # -- source of a sync session -------------------------------------------------------------------------------------

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name to (shape, dtype name) of everything that a refit sends."""
        return {meta.name: (meta.shape, meta.dtype) for meta in self.tensor_metas()}

    def tensor_metas(self) -> list[TensorMeta]:
        if self._metas is None:
            metas: list[TensorMeta] = self.on_first("tensor_metas")
            self._metas = metas
        return self._metas

    def staging_budget(self) -> int:
        return min(self.worker_group.run("staging_budget"))

    def rendezvous(self) -> tuple[str, int]:
        return self._cluster.get_master_address_and_port(MEETING_S)

    def kept_group(self, timeout_s: float) -> str | None:
        return self.on_first("kept_group", timeout_s)

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        self.worker_group.run("begin_export", spec=spec, timeout_s=timeout_s)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Published] | None]:
        return self.worker_group.run("export_window", index=index, timeout_s=timeout_s)

    def send_window(self, index: int, timeout_s: float) -> None:
        self.on_first("send_window", timeout_s, index=index)

    def close(self, *, failed: bool = False) -> None:
        refs: list[ObjectRef[object]] = [worker.close_export.remote(failed) for worker in self.worker_group.workers]
        ray.wait(refs, num_returns=len(refs), timeout=60.0)

    def on_first(self, method: str, timeout_s: float | None = None, **kwargs: object) -> Any:
        """Calls a method of rank 0, within `timeout_s` or that of every call."""
        ref = self.worker_group.run_single_worker_single_data(method, 0, **kwargs)
        return wait_for_workers([ref], self.worker_group.identities[:1], what=method, timeout_s=timeout_s)[0]


class PolicyWeightCache(BucketCache):
    """The cache of one policy. A build packs the policy's current weights, which must be resident; it raises CacheError
    where two copies do not fit into host memory, and WorkerError where a rank fails.

    Args:
        bucket_bytes: `weight_sync.bucket_bytes`.
        timeout_s: Deadline of a build, and of waiting for a session to end.
        checksums: Whether sessions verify what arrives.
        may_stage: Whether sessions may use the owner's GPU: not on a pool, which lends it to others between steps.
    """

    def __init__(
        self,
        policy: PolicyWeights,
        *,
        bucket_bytes: int,
        timeout_s: float = 150.0,
        checksums: bool = True,
        may_stage: bool = True,
    ) -> None:
        def build(version: int, served: str | None) -> CacheManifest:
            manifests: list[CacheManifest] = policy.worker_group.run(
                "build_cpu_bucket_cache",
                step=version,
                bucket_bytes=bucket_bytes,
                served=served,
                checksums=checksums,
                timeout_s=timeout_s,
            )
            return manifests[0]

        super().__init__(build, timeout_s=timeout_s, owner=policy, may_stage=may_stage)
