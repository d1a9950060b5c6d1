"""Engines whose ranks lie on several nodes.

vLLM schedules on an engine's first node, in the shard's own actor. On each further node an actor starts vLLM's executor
without an engine; its ranks join those of the first node. Invariants: all nodes of an engine hold equally many ranks,
numbered node by node; if a rank, an actor or a node is lost, all ranks of the engine end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import ray
from ray.exceptions import RayError

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.virtual_cluster import MEETING_S
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.generation.vllm.engine_processes import (
    EngineSpec,
    engine_config,
    forked_engine,
    import_engine,
    last_errors,
    set_environment,
    temporary_files_in,
)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


logger = logging.getLogger(__name__)

_POLL_S = 1.0


@dataclass(frozen=True)
class Rendezvous:
    """Meeting address of an engine's ranks, and the actors on its further nodes, in their order."""

    address: str
    port: int
    further: tuple[ActorHandle[object], ...]

    def arguments(self, node: int) -> dict[str, object]:
        """Keyword arguments of `AsyncEngineArgs` on a node of the engine; 0 is the first."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": 1 + len(self.further),
            "node_rank": node,
            "master_addr": self.address,
            "master_port": self.port,
        }


class EngineNodeWorker:
    """The ranks of an engine on one of its further nodes. `spec`: how the engine is started."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    def prepare(self) -> None:
        """Imports what an engine needs and touches no accelerator."""
        set_environment(self._spec.env)
        import_engine(self._spec.kwargs_of(0))

    def run(self, shard: int, arguments: dict[str, object]) -> None:
        """Starts the ranks and raises GenerationError when one of them has ended. `arguments`: of `Rendezvous`."""
        self.prepare()
        announce_address()
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = self._spec.kwargs_on_device(shard) | arguments
        with temporary_files_in(os.environ["VLLM_RPC_BASE_PATH"]), forked_engine():
            config = engine_config(arguments, headless=True)
            executor = MultiprocExecutor(config, monitor_workers=False)
        executor.start_worker_monitor(inline=True)
        said = last_errors()
        raise GenerationError(f"a rank of shard {shard} ended{f': {said}' if said else ' without a message'}")


class FurtherRanks:
    """An engine's ranks on its further nodes, as its first node sees them: started here, and watched. Once some of them
    are lost, the processes of this node are ended as well.
    """

    def __init__(self, rendezvous: Rendezvous, shard: int) -> None:
        self.lost: str | None = None  # why ranks of a further node are gone
        self._further = rendezvous.further
        self._shard = shard
        self._closed = threading.Event()
        announce_address()
        running: list[ObjectRef[object]] = [
            actor.run.remote(shard, rendezvous.arguments(node)) for node, actor in enumerate(rendezvous.further, 1)
        ]
        threading.Thread(target=self._watch, args=(running,), name="ranks on further nodes", daemon=True).start()

    def _watch(self, running: list[ObjectRef[object]]) -> None:
        ended: list[ObjectRef[object]] = []
        while not ended and not self._closed.is_set():
            ended, _ = ray.wait(running, num_returns=1, timeout=_POLL_S)
        if self._closed.is_set():
            return
        try:
            ray.get(ended[0])
        except RayError as error:
            self.lost = first_line(error.cause if hasattr(error, "cause") else error)
        logger.error("shard=%d further_node=lost reason=%s", self._shard, self.lost)
        # What is left waits in a collective for the lost ranks; vLLM sees a dead rank of its own node at once. Ranks
        # that are only now started would wait as well.
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._closed.wait(_POLL_S):
                return

    def close(self) -> None:
        """Ends the ranks."""
        self._closed.set()
        for actor in self._further:
            ray.kill(actor)


class EngineNodes:
    """The actors on the further nodes of all engines.

    Args:
        group: One per further node, those of a shard side by side.
        first_nodes: Node of the cluster on which each shard's own actor is.
    """

    def __init__(self, group: RayWorkerGroup, first_nodes: Sequence[int]) -> None:
        self._group, self._first_nodes = group, first_nodes
        self._per_engine = group.world_size // len(first_nodes)

    def _of(self, shard: int) -> range:
        return range(shard * self._per_engine, (shard + 1) * self._per_engine)

    def rendezvous(self, shard: int) -> Rendezvous:
        """A place where the ranks of a shard have not met lately."""
        cluster, node = self._group.cluster, self._first_nodes[shard]
        (port,) = cluster.free_ports(1, node_rank=node, hold_s=MEETING_S)
        address = next(slot.node_ip for slot in cluster.slots() if slot.node_rank == node)
        return Rendezvous(address, port, tuple(self._group.workers[rank] for rank in self._of(shard)))

    def restart(self, shard: int) -> None:
        """Starts the actors of a shard in the place of those that were there before."""
        for rank in self._of(shard):
            self._group.start_worker(rank)

    def end(self, shard: int) -> None:
        """Ends the actors of a shard and with them their ranks."""
        for rank in self._of(shard):
            ray.kill(self._group.workers[rank])

    def shutdown(self) -> None:
        """Ends all of them."""
        self._group.shutdown()


def announce_address() -> None:
    """Makes the processes of this node known to the others by the address that Ray uses for it."""
    os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
