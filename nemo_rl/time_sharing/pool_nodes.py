"""The nodes of an open pool that come and go: what they are called, which may leave, and how they are given back.

Invariant: the reservation of a node is ended only once the scheduler has let the node go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from nemo_rl.config.errors import UserError, did_you_mean
from nemo_rl.distributed.accelerator_slots import CPU, CUDA
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_ANSWER_S = 30.0
_SHORTEST_ID = 4


class NodeError(UserError, RuntimeError):
    """A node cannot leave the pool, or come to it."""


class Node(NamedTuple):
    """A node of the pool. `ray_id`, `host`: where it is reserved; empty while it is away."""

    number: int
    state: str  # `here`, `draining` or `away`
    ray_id: str = ""
    host: str = ""

    def __str__(self) -> str:
        return f"node {self.number}" + (f" ({self.host}, {self.ray_id[:8]})" if self.ray_id else "")


class PoolNodes:
    """The nodes of a pool. `gone`: numbers of those that are not `here`; `changed` is called when that has changed."""

    def __init__(self, handles: PoolHandles, gone: Iterable[int], changed: Callable[[], None]) -> None:
        self._handles, self._changed = handles, changed
        self.gone = set(gone)

    def gpus_gone(self) -> set[int]:
        """The GPUs of nodes that are not here."""
        pool = self._handles.pool
        return {gpu for gpu in range(pool.gpus if self.gone else 0) if gpu // pool.gpus_per_node in self.gone}

    def all(self) -> list[Node]:
        """All nodes, in order."""
        from nemo_rl.time_sharing.pipelines.shared_cluster import reservations

        reserved, hosts = {number: node for number, (_, node) in reservations().items()}, _hosts()
        return [
            Node(
                number,
                "here" if number not in self.gone else "draining" if number in reserved else "away",
                reserved.get(number, ""),
                hosts.get(reserved.get(number, ""), ""),
            )
            for number in range(self._handles.pool.nodes)
        ]

    def leaves(self, name: str) -> Node:
        """The node of this number, host name or beginning of Ray's id, which is to leave. Raises NodeError: there is
        none, or it may not leave.
        """
        nodes = self.all()
        found = _named(name, nodes)
        if found is None:
            names = [text for node in nodes for text in (str(node.number), node.host) if text]
            raise NodeError(f"there is no node {name!r}.{did_you_mean(name, names)} {_listed(nodes)}")
        if found.state != "here":
            raise NodeError(f"{found} is {found.state} already")
        if sum(node.state == "here" for node in nodes) == 1:
            raise NodeError(f"{found} is the last node of the pool; end the pool instead, or add a node first")
        if found.ray_id == self._own():
            raise NodeError(f"{found} runs the pool itself and stays as long as that; {_listed(nodes)}")
        return found

    def least_used(self, gpus: int, trained: Mapping[int, int]) -> list[Node]:
        """Nodes with so many GPUs together, those on which the fewest are trained on. Raises NodeError: no so many may
        leave.
        """
        per_node = self._handles.pool.gpus_per_node
        may = [node for node in self.all() if node.state == "here" and node.ray_id != self._own()]
        if not 1 <= gpus <= len(may) * per_node:
            raise NodeError(
                f"{gpus} GPUs: 1 to {len(may) * per_node} may be given back, of the nodes {', '.join(map(str, may))}"
            )
        may.sort(key=lambda node: (trained.get(node.number, 0), -node.number))
        return may[: math.ceil(gpus / per_node)]

    def drain(self, node: Node, within_s: float | None) -> None:
        """Has the scheduler clear a node."""
        import ray

        ray.get(self._handles.scheduler.drain_node.remote(node.number, within_s), timeout=_ANSWER_S)
        self.gone.add(node.number)
        self._changed()

    def add(self, name: str) -> Node:
        """Takes a node into the pool: one that was drained, or a Ray node that has joined. One that is here stays.
        Raises NodeError: there is none of this name, or no more fit the pool; ResourceInsufficientError: it has not
        enough free slots.
        """
        import ray

        from nemo_rl.time_sharing.pipelines.shared_cluster import reserve_node

        nodes = self.all()
        found = _named(name, nodes)
        if found is None or found.state == "away":
            taken = {node.ray_id for node in nodes if node.ray_id}
            joined = [Node(-1, "away", ray_id, host) for ray_id, host in _hosts().items() if ray_id not in taken]
            on = _named(name, joined) if found is None else next(iter(joined), None)
            free = [node for node in nodes if node.state == "away"] if found is None else [found]
            if on is None or not free:
                why = "has joined the Ray cluster and is free" if on is None else "fits the pool: see serve --max-nodes"
                there = ", ".join(f"{node.host} ({node.ray_id[:8]})" for node in joined) or "none"
                raise NodeError(f"no node {name!r} {why}; free Ray nodes: {there}. {_listed(nodes)}")
            found = Node(free[0].number, "away", on.ray_id, on.host)
            accelerator = CUDA if self._handles.accelerator == "cuda" else CPU
            reserve_node(self._handles.pool, accelerator, found.number, on.ray_id)
        ray.get(self._handles.scheduler.node_comes.remote(found.number), timeout=_ANSWER_S)
        self.gone.discard(found.number)
        self._changed()
        return found._replace(state="here")

    def let_go(self, number: int) -> bool:
        """Ends the reservation of a drained node, once the scheduler has let it go; whether that is so."""
        import ray

        from nemo_rl.time_sharing.pipelines.shared_cluster import release_node

        if not ray.get(self._handles.scheduler.node_leaves.remote(number), timeout=_ANSWER_S):
            return False
        release_node(number)
        return True

    def is_on(self, actor: ActorHandle[object], node: Node) -> bool:
        """Whether an actor's process is on a node."""
        from ray._private.state import actors

        found = cast("dict[str, dict[str, str]]", actors(actor._actor_id.hex()))
        return bool(found) and found["Address"]["NodeID"] == node.ray_id

    def staying(self) -> dict[str, object]:
        """Ray options of an actor that stays clear of nodes that leave, while there are any."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self._own(), soft=False)} if self.gone else {}

    def _own(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


def _named(name: str, nodes: Sequence[Node]) -> Node | None:
    for node in nodes:
        begins = len(name) >= _SHORTEST_ID and node.ray_id.startswith(name)
        if begins or (name and name in (str(node.number), node.host)):
            return node
    return None


def _listed(nodes: Iterable[Node]) -> str:
    return "The pool has " + ", ".join(f"{node}: {node.state}" for node in nodes)


def _hosts() -> dict[str, str]:
    """Host names of the Ray nodes that are alive, by id."""
    import ray

    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
