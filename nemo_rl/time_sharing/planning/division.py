"""Divides GPUs among those who claim them: in proportion, within bounds, in whole ranks, and down the tree of quotas.

Shares grow with a claim, never fall below a minimum nor rise above a cap, and add up to the budget where the caps allow
it (water-filling); rounding gives everybody whole ranks first and the rest by largest remainder (Hamilton). With
quotas, what a node of the tree gets is divided among the nodes and jobs below it in the same way: by their shares where
they have any, which count less for who had more than its share of late, else by the work of their jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl.time_sharing.protocol.quotas import Quotas


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


class Leaf(NamedTuple):
    """A job in the tree: its claim, the GPUs that it trains on, and the nodes above it, from its user's up."""

    claimant: Claimant
    fixed: int
    above: tuple[str, ...]


class Division(NamedTuple):
    """By job: the GPUs that it is entitled to, and how strongly it pulls, in GPUs: its part of the pool by shares, work
    and weight alone, whatever bounds say.
    """

    entitled: dict[str, float]
    pulls: dict[str, float]


MOST_CATCHING_UP = 2.0
"""How much more, or less, than its share a node counts at most for what it had of late."""
_NEXT_TO_NOTHING = 1e-6


@dataclass(slots=True)
class _Part:
    """A node of the tree, or a job. `work`: sum of the claims below; `wants`: whether one below can use GPUs."""

    name: str
    leaf: Leaf | None = None
    parts: dict[str, _Part] = field(default_factory=dict)
    work: float = 0.0
    least: float = 0.0
    most: float = 0.0
    fixed: int = 0
    wants: bool = False

    def sum_up(self, quotas: Quotas) -> None:
        for part in self.parts.values():
            part.sum_up(quotas)
            self.work += part.work
            self.most += part.most
            self.fixed += part.fixed
            self.wants |= part.wants
        if self.leaf is not None:
            claimant = self.leaf.claimant
            self.work, self.fixed, self.wants = claimant.claim, self.leaf.fixed, claimant.claim > 0
            self.least, self.most = max(claimant.minimum, self.fixed), max(claimant.maximum, self.fixed)
        else:
            self.most = max(min(self.most, quotas.most.get(self.name, self.most)), self.fixed)
            self.least = self.fixed


def divide_by_quotas(budget: float, leaves: Iterable[Leaf], quotas: Quotas, use: Mapping[str, float]) -> Division:
    """Divides the pool among jobs by the quotas of those whose they are.

    Args:
        leaves: Jobs that can use GPUs (their claim is above 0) or train on some.
        use: Slot-seconds of late by node.
    """
    root = _Part("")
    for leaf in leaves:
        at = root
        for name in reversed(leaf.above):
            at = at.parts.setdefault(name, _Part(name))
        at.parts[f"job {leaf.claimant.name}"] = _Part(leaf.claimant.name, leaf)
    root.sum_up(quotas)
    division = Division({}, {})
    _divide_below(root, budget, budget, quotas, use, division)
    return division


def _divide_below(
    at: _Part, budget: float, pull: float, quotas: Quotas, use: Mapping[str, float], division: Division
) -> None:
    parts = list(at.parts.values())
    claims = list(_claims(at, parts, quotas, use))
    claimants = [Claimant(str(i), claims[i], part.least, part.most, 1) for i, part in enumerate(parts)]
    gets = fill(budget, claimants)
    # What jobs train on is had by their node, whether they generate or not.
    left = max(pull - sum(part.fixed for part in parts if not part.wants), pull * _NEXT_TO_NOTHING)
    wanting = [Claimant(str(i), claims[i], part.fixed, math.inf, 1) for i, part in enumerate(parts) if part.wants]
    for i, filled in fill(left, wanting).items():
        part, pulls = parts[int(i)], max(filled, left * _NEXT_TO_NOTHING)
        if part.leaf is None:
            _divide_below(part, gets[i], pulls, quotas, use, division)
        else:
            division.entitled[part.name], division.pulls[part.name] = gets[i], pulls


def _claims(at: _Part, parts: Sequence[_Part], quotas: Quotas, use: Mapping[str, float]) -> Iterator[float]:
    """The claims of the parts below a node: their shares, or what those leave, in proportion to work."""
    shares = [None if part.leaf is not None else quotas.share_of(part.name) for part in parts]
    said = sum(share for share in shares if share is not None)
    had = sum(use.get(part.name, 0.0) for part, share in zip(parts, shares, strict=True) if share != 0.0)
    work = sum(part.work for part, share in zip(parts, shares, strict=True) if share is None)
    left = max(1.0 - quotas.promised.get(at.name, 0.0), _NEXT_TO_NOTHING) if said else work
    together = said + left if None in shares else said
    for part, share in zip(parts, shares, strict=True):
        if share is None:
            yield max(left * part.work / work if work else 0.0, _NEXT_TO_NOTHING)
            continue
        due, own = had * share / together if said else 0.0, use.get(part.name, 0.0)
        catching_up = min(max(due / own, 1 / MOST_CATCHING_UP), MOST_CATCHING_UP) if own else MOST_CATCHING_UP
        yield max(share * (catching_up if had else 1.0), _NEXT_TO_NOTHING)
