"""Where an evaluation's engines run, and by whose leave.

`OwnPlacement` reserves slots for one evaluation; a scheduler that lends accelerators brings a placement of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from nemo_rl.config import EvalMasterConfig
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.ray_runtime import RayConnection
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.utils.record import Record


class Placement(Protocol):
    """Gives an evaluation its accelerators.

    Attributes:
        lends_shards: Whether engines are built and routed one by one, by order.
        record: Where requests are recorded; None for nowhere.
    """

    lends_shards: bool
    record: Record | None

    def connect(self, config: EvalMasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: EvalMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """The evaluation's slots."""
        ...

    def serving(
        self, generation: VllmGeneration, problems: int, answers: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """The span in which generation answers `problems` problems, each `answers` times; yields what is told how many
        problems are done.
        """
        ...


class OwnPlacement:
    """One evaluation on slots of its own."""

    lends_shards = False
    record: Record | None = None

    def __init__(self) -> None:
        self._ray = RayConnection()

    def connect(self, config: EvalMasterConfig) -> Accelerator:
        """See `init_ray`."""
        return self._ray.open(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)

    def disconnect(self) -> None:
        """Ends the cluster where this evaluation started it."""
        self._ray.close()

    def reserve(self, config: EvalMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """All slots of the configuration."""
        slots = [config.cluster.gpus_per_node] * config.cluster.num_nodes
        return RayVirtualCluster(slots, use_gpus=accelerator.is_cuda, name="evaluation")

    def serving(
        self, generation: VllmGeneration, problems: int, answers: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Nobody asks."""
        return nullcontext(lambda done: None)
