"""Entitlements of the pipelines with demand, and their service while a plan shares GPUs among them.

Shares grow with weight times remaining work, never fall below a minimum nor rise above a cap, and add up to the budget
where the caps allow it (water-filling). Rounding gives every pipeline its whole ranks first and the rest by largest
remainder (Hamilton's method).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.planning.plan import Plan
from nemo_rl.time_sharing.planning.plan_state import PlanState


class Claimant(NamedTuple):
    """One pipeline in the division: `claim` > 0 relative, `minimum` and `maximum` in GPUs, `rank_gpus` the size of one
    rank.
    """

    name: str
    claim: float
    minimum: float
    maximum: float
    rank_gpus: int


def fill(budget: float, claimants: Sequence[Claimant]) -> dict[str, float]:
    """Shares in GPUs, proportional to claims within [minimum, maximum], adding up to min(budget, all caps).

    Floors that exceed the budget together are scaled down alike, so that none of them is served first.
    """
    minima = sum([c.minimum for c in claimants])
    if minima >= budget > 0:
        return {c.name: c.minimum * budget / minima for c in claimants}
    shares: dict[str, float] = {}
    open_claims = list(claimants)
    left = float(budget)
    while open_claims and left > 0:
        level = left / sum([c.claim for c in open_claims])
        over = sum([more for c in open_claims if (more := c.claim * level - c.maximum) > 0])
        under = sum([less for c in open_claims if (less := c.minimum - c.claim * level) > 0])
        # Only the side that binds harder is final in this round; clamping both at once could break the sum.
        capped = over >= under
        fixed = [c for c in open_claims if (c.claim * level >= c.maximum if capped else c.claim * level <= c.minimum)]
        if not fixed or over == under == 0.0:
            shares.update({c.name: c.claim * level for c in open_claims})
            return shares
        for c in fixed:
            shares[c.name] = c.maximum if capped else c.minimum
            left -= shares[c.name]
        open_claims = [c for c in open_claims if c.name not in shares]
    for c in open_claims:
        shares[c.name] = 0.0
    return shares


def whole_ranks(budget: int, claimants: Sequence[Claimant], shares: dict[str, float]) -> dict[str, int]:
    """Shares rounded to whole ranks within the budget and the caps; ties go to the earlier claimant."""
    ranks = {c.name: int(shares[c.name] / c.rank_gpus + 1e-9) for c in claimants}
    left = budget - sum([ranks[c.name] * c.rank_gpus for c in claimants])
    by_remainder = sorted(claimants, key=lambda c: ranks[c.name] - shares[c.name] / c.rank_gpus)
    for c in by_remainder:
        more = (ranks[c.name] + 1) * c.rank_gpus
        wants_more = shares[c.name] / c.rank_gpus - ranks[c.name] > 1e-9 and more <= c.maximum
        if wants_more and c.rank_gpus <= left:
            ranks[c.name] += 1
            left -= c.rank_gpus
    return ranks


class PipelineShare:
    """A pipeline with demand, and its service while ranks are given and moved: GPUs / pull; below 0 as long as it lacks
    guaranteed GPUs.

    entitled: GPUs of the whole pool, within bounds. target: entitlement in whole ranks. pull: GPUs in proportion to
    work and weight alone; pipelines that want the same GPUs are compared by these, since the bounds of a share
    elsewhere in the pool do not concern these GPUs. minimum: guaranteed GPUs. `ranks_up` and `gpus`: its present ranks
    and GPUs; `now`: its present service, `less_one` that with one rank less; `surplus`: it has more ranks than it can
    use. `free_ranks`: ranks on GPUs that are still free when the scan comes to them.
    """

    __slots__ = (
        "entitled",
        "fixed",
        "free_ranks",
        "gpus",
        "less_one",
        "minimum",
        "name",
        "now",
        "pull",
        "ranks",
        "ranks_up",
        "surplus",
        "target",
        "tp",
        "useful",
    )

    def __init__(
        self, plan_state: PlanState, name: str, entitled: float, target: int, pull: float, minimum: float
    ) -> None:
        self.name, self.entitled, self.target = name, entitled, target
        self.pull, self.minimum = max(pull, 1e-9), minimum or -math.inf
        self.ranks, self.tp = plan_state.ranks_of(name), plan_state.tp[name]
        self.useful, self.fixed = plan_state.useful[name], plan_state.fixed_gpus[name]
        self.free_ranks: Iterator[int] = iter(())
        self.update(plan_state.counts[name])

    def served(self, gpus: int) -> float:
        """How well it would be served with so many GPUs."""
        return gpus / self.minimum - 1.0 if gpus < self.minimum else gpus / self.pull

    @property
    def turns(self) -> int:
        """Number of ranks to add until its entitlement is met or it can use no more."""
        return min(self.useful - self.ranks_up, (self.target - self.gpus) // self.tp)

    def update(self, ranks: int) -> None:
        """Takes in how many ranks it has, or will have."""
        tp, minimum = self.tp, self.minimum
        self.ranks_up = ranks
        self.gpus = gpus = self.fixed + ranks * tp
        less = gpus - tp
        self.surplus = ranks > self.useful
        self.now = gpus / minimum - 1.0 if gpus < minimum else gpus / self.pull
        self.less_one = less / minimum - 1.0 if less < minimum else less / self.pull


class WithoutDemand(PipelineShare):
    """A pipeline with ranks and no demand: the first to give."""

    __slots__ = ()

    def __init__(self) -> None:
        self.now = self.less_one = math.inf
        self.surplus = True


def divide(plan_state: PlanState, result: Plan) -> dict[str, PipelineShare]:
    """Shares of all pipelines with demand, by name; writes their entitlements into the plan."""
    claimants = [
        _claimant(plan_state, name, pipeline)
        for name, pipeline in plan_state.pipelines.items()
        if plan_state.useful[name] > 0
    ]
    if not claimants:
        return {}
    budget = plan_state.slots - sum(gpu < plan_state.slots for gpu in plan_state.quarantined)
    result.entitled = entitled = fill(budget, claimants)
    ranks = whole_ranks(budget, claimants, entitled)
    level = budget / sum([c.claim for c in claimants])
    result.in_ranks = in_ranks = {c.name: ranks[c.name] * c.rank_gpus for c in claimants}
    return {
        c.name: PipelineShare(plan_state, c.name, entitled[c.name], in_ranks[c.name], c.claim * level, c.minimum)
        for c in claimants
    }


def _claimant(plan_state: PlanState, name: str, pipeline: PipelineState) -> Claimant:
    spec, tp, ranks = pipeline.spec, pipeline.topology.tp, len(pipeline.topology.ranks)
    useful = plan_state.useful[name]
    guaranteed = min(math.ceil(spec.min_share * ranks - 1e-9), useful)
    # A sample costs a rank of tp GPUs the time that it costs a rank of one.
    work = pipeline.demand.remaining * tp
    return Claimant(name, spec.weight * work, guaranteed * tp, useful * tp + plan_state.fixed_gpus[name], tp)
