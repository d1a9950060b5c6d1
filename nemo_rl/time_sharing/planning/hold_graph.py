"""Keeps pipelines that hold one fixed cluster while they wait for another from waiting for each other for ever.

Which fixed GPUs a pipeline may ever want is known from its registration, so a grant after which some pipelines could
not all be satisfied one after another is put off, and a reservation never stands in the way of a pipeline that the
reserver itself waits for. Invariant: the graph "may still want what the other holds" has no cycle, hence neither has
the graph of who waits for whom. Knows nothing of generation, which always gives way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nemo_rl.time_sharing.log.ledger import Claim, PipelineState


class HoldGraph:
    """Holds and claims of fixed clusters, and who waits for whom, while one plan is made.

    A waiter is named by its pipeline; a pipeline that waits for its first generation rank by `unscheduled(name)`, since
    its holds do not wait for that.
    """

    def __init__(self, pipelines: Mapping[str, PipelineState], fixed_claims: Iterable[Claim]) -> None:
        self._pipelines = pipelines
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._waits: dict[str, set[str]] = {}
        for name, pipeline in pipelines.items():
            for held in pipeline.held.values():
                self.hold(name, held.gpus)
        for claim in fixed_claims:
            self.hold(claim.pipeline, claim.gpus)
        # Without anybody who holds and waits, reservations cannot be part of a cycle.
        self.contended = any(p.held and any(cluster not in p.held for cluster in p.wants) for p in pipelines.values())

    def hold(self, name: str, gpus: Iterable[int]) -> None:
        """Notes that a pipeline holds, or will hold, GPUs for a fixed cluster."""
        self._held.setdefault(name, set()).update(gpus)
        self._holder.update(dict.fromkeys(gpus, name))

    def closes_cycle(self, name: str, gpus: Iterable[int]) -> str | None:
        """Whom a grant of `gpus` to `name` would have to wait for: somebody who may want them while holding, directly
        or through others, what `name` may want next; None when the grant is safe.
        """
        mine = self._held.get(name, set()) | set(gpus)
        for first in sorted(self._holders(self._pipelines[name].topology.training_gpus - mine, name)):
            seen, open_names = {first}, [first]
            while open_names:
                other = open_names.pop()
                wanted = self._may_want(other)
                if wanted & mine:
                    return first
                following = self._holders(wanted, other) - seen
                seen |= following
                open_names += following
        return None

    def wait(self, waiter: str, gpus: Iterable[int], pipeline: str) -> None:
        """Notes that `waiter`, of `pipeline`, waits for GPUs that others hold."""
        if self.contended:
            self._waits.setdefault(waiter, set()).update(self._holders(gpus, pipeline))

    def wait_for(self, waiter: str, other: str) -> None:
        """Notes that `waiter` waits for another waiter or holder."""
        if self.contended:
            self._waits.setdefault(waiter, set()).add(other)

    def waits_for(self, waiter: str, other: str) -> bool:
        """Whether `waiter` waits for `other`, directly or through others."""
        if not self.contended:
            return False
        seen, open_names = {waiter}, [waiter]
        while open_names:
            following = self._waits.get(open_names.pop(), set()) - seen
            if other in following:
                return True
            seen |= following
            open_names += following
        return False

    def _may_want(self, name: str) -> frozenset[int]:
        pipeline = self._pipelines[name]
        return frozenset() if pipeline.fenced else pipeline.topology.training_gpus - self._held.get(name, set())

    def _holders(self, gpus: Iterable[int], but: str) -> set[str]:
        return {holder for gpu in gpus if (holder := self._holder.get(gpu, but)) != but}


def unscheduled(name: str) -> str:
    """The waiter that a pipeline without a generation rank is; no pipeline id contains a colon."""
    return f"{name}:generation"
