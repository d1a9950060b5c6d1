"""How many GPUs of a common budget each pipeline is entitled to: weighted shares between bounds, then whole ranks.

Shares grow with weight times remaining work, never fall below a minimum nor rise above a cap, and add up to the budget
where the caps allow it (water-filling). Rounding gives every pipeline its whole ranks first and the rest by largest
remainder (Hamilton's method). Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
