"""Where an SFT run trains, and by whose leave.

`OwnPlacement` reserves slots for one run; a scheduler that lends accelerators brings a placement of its own. Invariant:
nothing of training touches an accelerator but inside `building`, and between `lend` and `step_done`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from nemo_rl.algorithms.placement import reserve
from nemo_rl.config import SFTMasterConfig
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.ray_runtime import RayConnection
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

if TYPE_CHECKING:
    from nemo_rl.algorithms.sft.run import SFTRun


class Placement(Protocol):
    """Gives an SFT run its accelerators."""

    def connect(self, config: SFTMasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """The run's slots."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """The span in which the policy is built."""
        ...

    def lend(self, run: SFTRun) -> None:
        """Weights and optimizer are on the accelerators on return, for the next step or a validation."""
        ...

    def step_done(self, run: SFTRun) -> None:
        """A step is complete, with its validation and its checkpoint: the accelerators may go to somebody else."""
        ...


class OwnPlacement:
    """One run on slots of its own."""

    def __init__(self) -> None:
        self._ray = RayConnection()
        self._ready = False

    def connect(self, config: SFTMasterConfig) -> Accelerator:
        """See `init_ray`."""
        return self._ray.open(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)

    def disconnect(self) -> None:
        """Ends the cluster where this run started it."""
        self._ray.close()

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """All slots of the configuration."""
        slots = [config.cluster.gpus_per_node] * config.cluster.num_nodes
        return reserve(config.cluster, accelerator, "policy", slots)

    def building(self) -> AbstractContextManager[object]:
        """They are the run's from the start."""
        return nullcontext()

    def lend(self, run: SFTRun) -> None:
        """They stay the run's."""
        if not self._ready:
            run.policy.prepare_for_training()
            self._ready = True

    def step_done(self, run: SFTRun) -> None:
        """Nobody else wants them."""
