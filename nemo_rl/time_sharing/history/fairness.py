"""Invariant 11, of generation: who gets ranks, from whom, and when.

A first rank that somebody has waited for long enough is guaranteed, and no other is; the GPUs of one rank are kept for
him until then. A rank of use serves for a time slice before another pipeline may have it, and goes only from one that
stays better served. Engines are built ahead only where nobody is about to train. All of it is worked out from events;
what a lost end of the log leaves in doubt, and moves that later ones of the same plan go on from, are not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.generation import Eviction, PlanSeen, Served
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import Phase, Priority
from nemo_rl.utils.record import Entry

_EPS = 1e-3


class FairnessChecks:
    """Watches plans as they are carried out."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._limits: dict[str, float] = {}
        self._pipelines: dict[str, Served] = {}
        self._quarantined: set[int] = set()
        self._gap = self._recovering = self._partial = False
        self._plan = PlanSeen(-1, 0.0)

    def handlers(self) -> dict[type, Callable[[Entry, Any], None]]:
        return {
            ev.PoolOpened: self._opened,
            ev.SchedulerStarted: self._started,
            ev.InventoryDone: self._inventory_done,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            ev.Leaving: self._leaving,
            ev.Fenced: self._fenced,
            ev.DemandReported: self._demand,
            ev.Requested: self._requested,
            ev.RequestDropped: self._request_over,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._claim_dropped,
            ev.Granted: self._granted,
            ev.PriorityChanged: self._request_over,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.RankCooling: self._cooling,
            ev.GpusQuarantined: self._withheld,
            ev.GpusCleared: self._cleared,
        }

    def tail_lost(self, entry: Entry) -> None:
        # Of who was registered before nothing is known for certain from here on.
        self._gap = self._partial = True
        self._pipelines.clear()
        self._plan = PlanSeen(-1, entry.time)

    def finish(self, clocks: Clocks, ended: bool) -> None:
        self._end_plan()

    def _bad(self, message: str) -> None:
        self.found.append((11, message))

    def _limit(self, name: str) -> float:
        return self._limits.get(name, 0.0)

    def _at(self, time: float, *, of_plan: bool = False) -> None:
        """Before what happens now, and may be part of a plan: judges the plan that was carried out before."""
        if time != self._plan.time or (self._plan.claims and not of_plan):
            self._end_plan()
            self._plan = PlanSeen(-1, time)

    def _nothing_is_kept(self) -> None:
        """Which rank is kept for whom may be another from now on."""
        for pipeline in self._pipelines.values():
            pipeline.kept = None

    # Schedulers and pipelines.

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._limits = dict(event.limits)

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        self._recovering = event.term > 1
        self._nothing_is_kept()

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        self._gap = self._recovering = False
        self._nothing_is_kept()

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._at(entry.time)
        self._nothing_is_kept()
        self._pipelines[event.pipeline] = Served(event)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._at(entry.time)
        self._nothing_is_kept()
        self._pipelines.pop(event.pipeline, None)

    def _leaving(self, entry: Entry, event: ev.Leaving) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.leaving = True
            pipeline.feed(entry.time)

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.fenced = True
            pipeline.requests.clear()
            pipeline.feed(entry.time)

    def _demand(self, entry: Entry, event: ev.DemandReported) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.demand = max(event.target - event.done, 0) * event.unit
            pipeline.feed(entry.time)

    # Requests and claims.

    def _requested(self, entry: Entry, event: ev.Requested) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests[event.cluster] = (entry.time + event.priority * self._limit("aging_s"), event.priority)
            pipeline.kept = None
            if event.cluster not in pipeline.held and event.priority is not Priority.INITIALIZATION:
                pipeline.has_asked = True

    def _request_over(self, entry: Entry, event: ev.RequestDropped | ev.PriorityChanged) -> None:
        self._at(entry.time)
        if isinstance(event, ev.PriorityChanged) and event.priority is Priority.ACTOR_TRAINING:
            self._plan.train.add(event.pipeline)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests.pop(event.cluster, None)
            pipeline.kept = None

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        self._at(entry.time, of_plan=True)
        if event.plan != self._plan.number:
            if self._plan.number >= 0:
                self._end_plan()
                self._plan = PlanSeen(event.plan, entry.time)
            self._plan.number = event.plan
        if not self._plan.claims:
            waits = ((p.held, p.requests.keys() - p.held.keys()) for p in self._pipelines.values())
            self._plan.contended = self._partial or any(held and wanted for held, wanted in waits)
        self._plan.claims.append(event)
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        if not self._gap and not self._recovering:
            if event.ahead:
                self._check_build(event)
            elif event.rank >= 0:
                self._check_guarantee(entry, event, pipeline)
        self._plan.places.append((event, self._place_of(event, pipeline)))
        if event.rank >= 0:
            self._plan.was_hungry.update([event.pipeline] if pipeline.hungry_since is not None else [])
            pipeline.claims.add(event.rank)
            pipeline.feed(entry.time)
        else:
            pipeline.fixed_claims[event.cluster] = event.gpus

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.claims.discard(event.rank)
            if event.rank < 0:
                pipeline.fixed_claims.pop(event.cluster, None)
            pipeline.feed(entry.time)

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._at(entry.time, of_plan=True)
        if event.priority is Priority.ACTOR_TRAINING:
            self._plan.train.add(event.pipeline)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.fixed_claims.pop(event.cluster, None)
            pipeline.requests.pop(event.cluster, None)
            pipeline.held[event.cluster] = event.gpus

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.held.pop(event.cluster, None)

    # Ranks and GPUs.

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        self._at(entry.time, of_plan=True)
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        before = pipeline.phases.get(event.rank, Phase.ASLEEP)
        if event.phase is Phase.DRAINING and before is Phase.ACTIVE:
            own = pipeline.leaving or pipeline.cools_until > entry.time
            self._plan.evictions.append(
                Eviction(
                    event.pipeline,
                    pipeline.gpus_of(event.rank),
                    entry.time - pipeline.serves_since.get(event.rank, entry.time),
                    pipeline.up,
                    own or self._gap or self._recovering,
                )
            )
        self._plan.turns |= event.phase is Phase.DRAINING and before is not Phase.ACTIVE
        pipeline.moved(event, entry.time)
        if event.phase is Phase.FAILED:
            pipeline.cools_until = entry.time + 2 * self._limit("quarantine_s")
        pipeline.feed(entry.time)

    def _cooling(self, entry: Entry, event: ev.RankCooling) -> None:
        self._at(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.cools_until = max(pipeline.cools_until, event.until)

    def _withheld(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._quarantined.update(event.gpus)
        self._nothing_is_kept()

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        self._quarantined.difference_update(event.gpus)
        self._nothing_is_kept()

    # The rules.

    def _check_guarantee(self, entry: Entry, event: ev.Claimed, pipeline: Served) -> None:
        since, who = pipeline.hungry_since, f"rank {event.rank} of {event.pipeline}"
        due = float("inf") if since is None else since + self._limit("aging_s") * Priority.GENERATION
        if event.guaranteed and entry.time < due - _EPS:
            self._bad(f"{who} is guaranteed, its pipeline has waited for a rank since {since}")
        # What a request leaves of a rank that makes way for it may be had by anybody.
        spare = self._plan.turns or any(claim.rank < 0 for claim in self._plan.claims)
        if not event.guaranteed and entry.time > due + _EPS and not pipeline.held and not spare:
            self._bad(f"{who} is not guaranteed, though its pipeline has waited for a first rank since {since}")

    def _check_build(self, event: ev.Claimed) -> None:
        for name, other in self._pipelines.items():
            if other.fenced or other.trains_on.isdisjoint(event.gpus):
                continue
            if other.demand <= 0 or not other.has_asked:
                what = "waits for no samples" if other.demand <= 0 else "has never trained"
                self._bad(
                    f"an engine of {event.pipeline} is built ahead on GPUs {event.gpus}, where {name} may train any "
                    f"time: it {what}"
                )

    def _place_of(self, event: ev.Claimed, by: Served) -> float:
        """Where in the queue it stands who gets this; last are ranks beyond the first."""
        aging = self._limit("aging_s") * Priority.GENERATION
        if event.rank >= 0:
            return math.inf if event.ahead or by.hungry_since is None else by.hungry_since + aging
        key, _ = by.requests.get(event.cluster, (0.0, None))
        return key

    def _check_kept(self, plan: PlanSeen) -> None:
        """One rank of whoever has waited too long for his first is left alone by those who are behind him."""
        aging = self._limit("aging_s") * Priority.GENERATION
        for name, waiting in self._pipelines.items():
            since = waiting.hungry_since
            if since is None or plan.time < since + aging + _EPS:
                continue
            judged = not plan.contended and waiting.cools_until <= since and waiting.all_asleep and waiting.useful > 0
            trains = any(priority is Priority.ACTOR_TRAINING for _, priority in waiting.requests.values())
            if not judged or trains or name in plan.train or not self._quarantined.isdisjoint(waiting.mapping):
                waiting.kept = None
                continue
            for claim, place in plan.places:
                if claim.pipeline != name and place > since + aging + _EPS:
                    left = set(range(waiting.ranks)) if waiting.kept is None else waiting.kept
                    waiting.kept = {rank for rank in left if not waiting.lies_on(rank, claim.gpus)}
            if waiting.kept is not None and not waiting.kept:
                waiting.kept = None
                self._bad(
                    f"{name} has waited for a first rank since {since:.1f} s, and each of its ranks went to others "
                    f"behind it, the last to {plan.claims[-1].pipeline}"
                )

    def _end_plan(self) -> None:
        plan = self._plan
        if self._gap or self._recovering or not plan.claims:
            return
        moves = list(plan.moves())
        self._check_kept(plan)
        self._check_slices(plan, moves)
        self._check_better_served(plan, moves)

    def _check_slices(self, plan: PlanSeen, moves: list[tuple[ev.Claimed, Eviction]]) -> None:
        for name in {eviction.pipeline for _, eviction in moves}:
            giver = self._pipelines.get(name)
            if giver is None:
                continue
            least = giver.least_slice(self._limit("min_hold_s"), self._limit("max_slice_s"))
            early = [e for _, e in moves if e.pipeline == name and e.served_s < least - _EPS]
            before = next(e.up for e in plan.evictions if e.pipeline == name)
            if len(early) > max(before - giver.useful, 0):
                self._bad(
                    f"a rank of {name} goes to {'another' if len(moves) > 1 else moves[0][0].pipeline} after "
                    f"{early[-1].served_s:.2f} s; a time slice lasts {least:.2f} s at least"
                )

    def _check_better_served(self, plan: PlanSeen, moves: list[tuple[ev.Claimed, Eviction]]) -> None:
        """Looks at moves after which neither side gives or takes in this plan, so that both have then what they have at
        its end.
        """
        claims = {claim.pipeline: claim for claim in plan.claims}
        in_order = sorted(moves, key=lambda move: plan.claims.index(move[0]))
        last_given = {eviction.pipeline: claim for claim, eviction in in_order}
        moved = Counter(eviction.pipeline for _, eviction in moves)
        lost = Counter(eviction.pipeline for eviction in plan.evictions)
        for name, claim in last_given.items():
            settled = name not in claims and moved[name] == lost[name]
            if settled and claims[claim.pipeline] is claim and not lost[claim.pipeline]:
                self._check_move(plan, claim, name)

    def _check_move(self, plan: PlanSeen, claim: ev.Claimed, name: str) -> None:
        taker, giver = self._pipelines.get(claim.pipeline), self._pipelines.get(name)
        if taker is None or giver is None or claim.pipeline in plan.was_hungry:
            return
        if any(other.rank < 0 for other in plan.claims if other.pipeline == claim.pipeline):
            return
        if giver.min_share or taker.min_share or giver.up >= giver.useful:
            return
        if giver.part < taker.part - 1e-9:
            self._bad(
                f"a rank of {name} goes to {claim.pipeline}, which is served better then: "
                f"{taker.gpus} GPUs for {taker.demand} samples, against {giver.gpus} for {giver.demand}"
            )
