"""Quotas: no claim exceeds a limit, and what each group and user has had is what they held (invariant 11).

`pulls` says how strongly jobs pull at GPUs by the quotas, for the check of their shares. A record whose end was lost is
believed about what was had before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.quotas import NO_QUOTAS, Quotas
from nemo_rl.utils.record import Entry


class QuotaChecks(Checks):
    """Follows claims, leases and slot-seconds of each node of the quotas."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._quotas = NO_QUOTAS
        self._use: dict[str, float] = {}
        self._weighed_at = self._counted_at = 0.0
        self._had: dict[str, float] = {}
        self._knows_all = True

    def tail_lost(self, entry: Entry) -> None:
        """What was held in the gap is unknown."""
        self._knows_all = False

    def _quotas_set(self, entry: Entry, event: ev.QuotasSet) -> None:
        self._weigh(entry.time)
        self._quotas = Quotas(event.nodes, event.half_life_s, self._ledger.pool.slots_per_gpu)

    # Limits.

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        if self._ledger.recovering or not self._knows_all:
            return
        claims = self._ledger.claims | {event.key: event.gpus}
        for node in self._above(event.pipeline):
            holds = (*claims.items(), *self._ledger.leases.items())
            gpus = {gpu for (name, _, _), gpus in holds if node in self._above(name) for gpu in gpus}
            has = self._slots(gpus)
            if has > (most := self._quotas.most.get(node, has)):
                what = f"{event.pipeline} is promised GPUs {event.gpus}: {node} would have {has} slots, {most} may be"
                self._bad(11, what)

    def _above(self, pipeline: str) -> tuple[str, ...]:
        return self._quotas.above(self._ledger.registered[pipeline])

    def _slots(self, gpus: Iterable[int]) -> int:
        return sum(gpu < self._ledger.pool.slots for gpu in gpus)

    # Use.

    def _lease_changes(self, entry: Entry, event: ev.Granted | ev.Released | ev.RankMoved | ev.Unregistered) -> None:
        self._count(entry.time)

    def _count(self, time: float) -> None:
        """Adds what was held until now."""
        seconds, self._counted_at = time - self._counted_at, time
        if not seconds or not self._quotas.nodes:
            return
        for (name, _, _), gpus in self._ledger.leases.items():
            for node in self._above(name):
                self._had[node] = self._had.get(node, 0.0) + self._slots(gpus) * seconds

    def _weigh(self, time: float) -> None:
        self._count(time)
        fades = 0.5 ** ((time - self._weighed_at) / self._quotas.half_life_s)
        for node in self._use.keys() | self._had:
            self._use[node] = self._use.get(node, 0.0) * fades + self._had.get(node, 0.0)
        self._had.clear()
        self._weighed_at = time

    def _weighed(self, entry: Entry, event: ev.UseWeighed) -> None:
        self._weigh(entry.time)
        for node in sorted(event.use.keys() | self._use):
            said, had = event.use.get(node, 0.0), self._use.get(node, 0.0)
            if self._knows_all and not self._ledger.recovering and abs(said - had) > 1.0 + 1e-3 * had:
                self._bad(11, f"{node} is said to have had {said:.0f} slot-seconds of late, it had {had:.0f}")
        self._use = dict(event.use)


class Puller(NamedTuple):
    """A job: the nodes above it, weight x work (0 without demand), the slots that it trains on, and the least and the
    most that it may have with those.
    """

    name: str
    above: tuple[str, ...]
    work: float
    fixed: int
    least: float = 0.0
    most: float = math.inf


def pulls(quotas: Quotas, use: Mapping[str, float], slots: int, pullers: Iterable[Puller]) -> dict[str, float]:
    """By job with demand: its part of the pool by the quotas, in slots, whatever bounds say."""
    return _parts(quotas, use, slots, pullers, bounded=False)


def entitlements(quotas: Quotas, use: Mapping[str, float], slots: int, pullers: Iterable[Puller]) -> dict[str, float]:
    """The same within bounds: what one cannot have is for those beside it, and then for others."""
    return _parts(quotas, use, slots, pullers, bounded=True)


def _parts(
    quotas: Quotas, use: Mapping[str, float], slots: int, pullers: Iterable[Puller], *, bounded: bool
) -> dict[str, float]:
    by_path = {(*reversed(one.above), f"job {one.name}"): one for one in pullers}
    found: dict[str, float] = {}

    def parts_of(path: tuple[str, ...]) -> dict[str, list[Puller]]:
        parts: dict[str, list[Puller]] = {}
        for at, one in by_path.items():
            if at[: len(path)] == path:
                parts.setdefault(at[len(path)], []).append(one)
        return parts

    def most(path: tuple[str, ...]) -> float:
        if path in by_path:
            return max(by_path[path].most, by_path[path].fixed)
        below = parts_of(path)
        fixed = sum(one.fixed for jobs in below.values() for one in jobs)
        return max(min(sum(most((*path, name)) for name in below), quotas.most.get(path[-1], math.inf)), fixed)

    def divide(path: tuple[str, ...], budget: float) -> None:
        parts = parts_of(path)
        said = {name: share for name in parts if (share := quotas.share_of(name)) is not None}
        work = {name: sum(one.work for one in jobs) for name, jobs in parts.items()}
        fixed = {name: float(sum(one.fixed for one in jobs)) for name, jobs in parts.items()}
        had = sum(use.get(name, 0.0) for name in parts if said.get(name) != 0.0)
        alone = sum(work[name] for name in parts if name not in said)
        rest = max(1.0 - quotas.promised.get(path[-1] if path else "", 0.0), 1e-6) if any(said.values()) else alone
        claims = {}
        for name in parts:
            if name in said:
                own = use.get(name, 0.0)
                of = sum(said.values()) + (rest if len(said) < len(parts) else 0.0)
                due = had * said[name] / of if had and any(said.values()) else 0.0
                factor = (min(max(due / own, 0.5), 2.0) if own else 2.0) if had else 1.0
                claims[name] = max(said[name] * factor, 1e-6)
            else:
                claims[name] = max(rest * work[name] / alone if alone else 0.0, 1e-6)
        if bounded:
            left, dividing = budget, list(parts)
        else:
            dividing = [name for name in parts if work[name] > 0]
            left = max(budget - sum(fixed[name] for name in parts if name not in dividing), 1e-6 * budget)
        bounds = {}
        for name in dividing:
            one = by_path.get((*path, name))
            least = max(fixed[name], one.least) if bounded and one is not None else fixed[name]
            bounds[name] = claims[name], least, most((*path, name)) if bounded else math.inf
        for name, part in _levelled(left, bounds).items():
            at = (*path, name)
            if at not in by_path:
                divide(at, part if bounded else max(part, 1e-6 * left))
            elif by_path[at].work > 0:
                found[by_path[at].name] = part if bounded else max(part, 1e-6 * left)

    divide((), float(slots))
    return found


def _levelled(total: float, bounds: Mapping[str, tuple[float, float, float]]) -> dict[str, float]:
    """Parts of a total in proportion to claims, none below the least or above the most that is given with each; the
    least are scaled down where they are more than the total.
    """
    least, most = sum(low for _, low, _ in bounds.values()), sum(high for *_, high in bounds.values())
    if total <= least:
        return {name: total * low / least if least else 0.0 for name, (_, low, _) in bounds.items()}
    if total >= most:
        return {name: high for name, (_, _, high) in bounds.items()}
    below, above = 0.0, total / min(claim for claim, _, _ in bounds.values())
    for _ in range(200):
        level = (below + above) / 2
        if sum(min(max(claim * level, low), high) for claim, low, high in bounds.values()) < total:
            below = level
        else:
            above = level
    return {name: min(max(claim * above, low), high) for name, (claim, low, high) in bounds.items()}
