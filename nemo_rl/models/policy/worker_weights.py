"""The workers of a policy as those see them who lend accelerators or sync weights: what is resident, and its export.

Knows neither batches nor losses. Invariant: every verb reaches every rank, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_calls import wait_for_workers
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sender import SendSpec

if TYPE_CHECKING:
    from ray import ObjectRef


class PolicyWeights:
    """What the workers of a policy hold.

    Args:
        worker_group: The workers.
        cluster: Their slots.
    """

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
        self.worker_group.run("offload_optimizer")
        self.worker_group.run("offload_model")

    def offload_to_cpu(self) -> None:
        """Same as `offload_after_refit`."""
        self.offload_after_refit()

    def offload_training_gpu(self) -> None:
        """Everything of training off the devices but communicators: model, optimizer, caches."""
        self.offload_after_refit()

    def destroy_nccl_groups(self) -> None:
        """Gives the device memory of communicators back. They are made again before their next use.

        Raises:
            WorkerError: A train step is open.
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
        """What a refit sends, in order."""
        if self._metas is None:
            ref = self.worker_group.run_single_worker_single_data("tensor_metas", 0)
            self._metas = wait_for_workers([ref], self.worker_group.identities[:1], what="tensor_metas")[0]
        return self._metas

    def staging_budget(self) -> int:
        """Bytes of one staging window on the fullest slot."""
        return min(self.worker_group.run("staging_budget"))

    def rendezvous(self) -> tuple[str, int]:
        """Address of rank 0 and a free port there."""
        return self._cluster.get_master_address_and_port()

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        """Starts the export on every rank."""
        self.worker_group.run("begin_export", spec=spec, timeout_s=timeout_s)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        """Packs a window on every rank."""
        return self.worker_group.run("export_window", index=index, timeout_s=timeout_s)

    def send_window(self, index: int, timeout_s: float) -> None:
        """Pushes a window from rank 0."""
        ref = self.worker_group.run_single_worker_single_data("send_window", 0, index=index)
        wait_for_workers([ref], self.worker_group.identities[:1], what="send_window", timeout_s=timeout_s)

    def close(self) -> None:
        """Ends the export on every rank that still answers."""
        refs: list[ObjectRef[object]] = [worker.close_export.remote() for worker in self.worker_group.workers]
        ray.wait(refs, num_returns=len(refs), timeout=60.0)
