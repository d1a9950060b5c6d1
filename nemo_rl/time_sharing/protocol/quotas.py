"""The tree of a team's quotas: which part of the pool its groups and users may count on, and how much they may have.

A job counts for its user, the user's group at its submission, and the groups above that. Invariant: a node that the
table does not know has neither a share nor a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nemo_rl.time_sharing.protocol.types import PipelineOptions


class QuotaNode(NamedTuple):
    """A group or a user: `group NAME` or `user NAME`, and the group above it ("" at the top).

    share: part of what its parent has that it may count on, 0 to 1; None where none is said. limit: GPUs that its jobs
    hold at once at most; None for any number.
    """

    name: str
    parent: str = ""
    share: float | None = None
    limit: float | None = None


def share_problems(nodes: Iterable[QuotaNode]) -> Iterator[str]:
    """Shares that cannot be kept, as lines about the keys of a file, such as `groups.NAME.share: ...`."""
    below: dict[str, list[QuotaNode]] = {}
    for node in nodes:
        below.setdefault(node.parent, []).append(node)
    for parent, siblings in below.items():
        keys = {node.name: f"{node.name.replace(' ', 's.', 1)}.share" for node in siblings}
        whose = f"of {parent}" if parent else "at the top"
        if (total := sum(node.share or 0.0 for node in siblings)) > 1 + 1e-9:
            named = ", ".join(f"{node.name} {node.share:g}" for node in siblings if node.share)
            first = keys[siblings[0].name]
            yield f"{first}: the shares {whose} add up to {total:g} ({named}); together they are 1 at most"
        sharing = next((node.name for node in siblings if node.share is not None), None)
        for node in siblings:
            if sharing is not None and node.share is None and node.name.startswith("group "):
                yield (
                    f"{keys[node.name]}: has no share, and {sharing} beside it has one; give it a share (0 lets it run "
                    "on what others leave)"
                )


class Quotas:
    """The nodes by name. `most`: limits in slots. `half_life_s`: after so long, use of the pool counts half."""

    def __init__(self, nodes: Iterable[QuotaNode], half_life_s: float, slots_per_gpu: int = 1) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.half_life_s, self.slots_per_gpu = half_life_s, slots_per_gpu
        self.most = {
            node.name: int(node.limit * slots_per_gpu + 1e-9) for node in self.nodes.values() if node.limit is not None
        }
        self.promised: dict[str, float] = {}
        """The sum of the shares below each parent that has any there."""
        for node in self.nodes.values():
            if node.share is not None:
                self.promised[node.parent] = self.promised.get(node.parent, 0.0) + node.share

    def above(self, owner: PipelineOptions) -> tuple[str, ...]:
        """The nodes that a job counts for: its user's, its group's, and those above."""
        names = [f"user {owner.user}"] if owner.user else []
        at = f"group {owner.group}" if owner.group else ""
        while at in self.nodes:
            names.append(at)
            at = self.nodes[at].parent
        return tuple(names)

    def share_of(self, name: str) -> float | None:
        """The share of a node; None where none is said."""
        node = self.nodes.get(name)
        return None if node is None else node.share


NO_QUOTAS = Quotas((), 1.0)
"""Those of a pool that is no team's."""
