"""Invariant 9: no pipeline starves. Measured on the record, independent of the planner's rule.

Waits: each request, and each pipeline with work and no rank, within the bound of docs/time_sharing_scheduler.md. It
takes the longest hold of the record and adds the time that faults took from the wait: a rank that cools off, GPUs in
quarantine, a pipeline being ended, a scheduler that is down, a node that is away for one that needs it; faults that
overlap count once. Overtakes: a request is
overtaken on its GPUs at most `max_backfills` times, and only by requests that name it. Shares (invariant 11): a rank in
use goes to another pipeline after its time slice, and the taker has at most its share then of what both have; a first
rank is guaranteed exactly when it has been waited for long enough. A grant equals its request (invariant 10). Items
open when the log loses its end are not judged, nor is the inventory of a restarted scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_rl.time_sharing.history.absences import NODE_EVENTS, Absences, NodeEvent
from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.quota_checks import Puller, entitlements, pulls
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.events import Registered
from nemo_rl.time_sharing.protocol.quotas import NO_QUOTAS, Quotas
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, SLEEP_PHASES, Phase, Priority
from nemo_rl.utils.record import Entry, Handler

_EPS = 1e-3
_SLICE_HANDOVERS = 4.0
"""A time slice lasts at least as long as so many of the fastest hand-overs (rule 7)."""


@dataclass(slots=True)
class _Request:
    """An open request, and its place in the queue."""

    since: float
    key: float
    asked: tuple[int, int, Priority]
    claimed: bool = False
    overtaken: int = 0


class _Eviction(NamedTuple):
    """A serving rank is drained: its GPUs, seconds served, ranks its pipeline had up before; `own`: for a reason of its
    own.
    """

    pipeline: str
    gpus: frozenset[int]
    served_s: float
    up: int
    own: bool


class _Pipeline:
    """A registered pipeline: its mapping, and its current requests and ranks."""

    def __init__(self, event: ev.Registered, slots: int) -> None:
        infer = next(cluster for cluster in event.clusters if cluster.name == ACTOR_INFER)
        ranks = len(infer.gpus) // infer.tp_size
        self.spec, self.tp, self.mapping = event, infer.tp_size, infer.gpus
        self.clusters = {cluster.name: frozenset(cluster.gpus) for cluster in event.clusters}
        self.mapped = frozenset[int]().union(*self.clusters.values())
        self.slots = {name: sum(gpu < slots for gpu in gpus) for name, gpus in self.clusters.items()}  # without turns
        self.ranks, self.most = ranks, min(max(int(event.max_share * ranks + 1e-9), 1), ranks)
        self.demand, self.rank_batch, self.idle_since = 0, event.rank_batch, -math.inf
        self.leaving = self.paused = False
        self.up: dict[int, float] = {}
        self.active: dict[int, float] = {}
        self.claims: set[int] = set()
        self.holds: dict[str, float] = {}
        self.fixed_claims: set[str] = set()
        self.unscheduled_since: float | None = None
        self.cools_until = 0.0
        self.fastest = math.inf

    def rank_gpus(self, rank: int) -> frozenset[int]:
        return frozenset(self.mapping[rank * self.tp : (rank + 1) * self.tp])

    @property
    def ranks_up(self) -> int:
        return len(self.claims) + len(self.up)

    @property
    def useful(self) -> int:
        return 0 if self.withdraws else min(math.ceil(self.demand / self.rank_batch), self.most)

    @property
    def withdraws(self) -> bool:
        """Whether nothing more is given to it."""
        return self.leaving or self.paused

    @property
    def fixed(self) -> int:
        return sum(self.slots[cluster] for cluster in self.holds.keys() | self.fixed_claims)

    @property
    def gpus(self) -> int:
        return self.fixed + self.ranks_up * self.tp

    @property
    def pull(self) -> float:
        """Weight x demand x tp, to which its share is proportional."""
        return max(self.spec.weight * self.demand * self.tp, 1e-9)

    def least_slice(self, min_hold_s: float, max_slice_s: float) -> float:
        hold = min_hold_s if self.fastest == math.inf else min(min_hold_s, max_slice_s, _SLICE_HANDOVERS * self.fastest)
        return max(hold * min(max(self.spec.weight, 0.1), MOST_WEIGHT), self.spec.slice_s)


class FairnessChecks:
    """Measures waits, overtakes and shares."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._bound = WaitBound()
        self._pipelines: dict[str, _Pipeline] = {}
        self._requests: dict[tuple[str, str], _Request] = {}
        self._waits: list[GpuWait] = []
        self._recovering = False
        self._knows_all = True
        self._time = 0.0
        self._quotas = NO_QUOTAS
        self._use: Mapping[str, float] = {}
        self._quarantines: set[int] = set()
        self._claims: list[ev.Claimed] = []
        self._evictions: list[_Eviction] = []
        self._first_ranks: set[str] = set()
        self._turns = False
        """A rank on its way up turns round in this plan: its GPUs go to anybody."""
        self._table: dict[type, Handler] = {
            ev.PoolOpened: self._opened,
            ev.SchedulerStarted: self._started,
            ev.InventoryDone: self._inventory_done,
            ev.Reconnected: self._reconnected,
            ev.QuotasSet: self._quotas_set,
            ev.UseWeighed: self._weighed,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            ev.CommandEnded: lambda entry, event: None,
            ev.GpusQuarantined: self._quarantined,
            ev.GpusCleared: lambda entry, event: self._quarantines.difference_update(event.gpus),
        }
        self._table.update(dict.fromkeys(NODE_EVENTS, self._node))
        of_pipeline: dict[type, Callable[[Entry, Any, _Pipeline], None]] = {
            ev.Requested: self._requested,
            ev.RequestDropped: self._dropped,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._claim_dropped,
            ev.Granted: self._granted,
            ev.PriorityChanged: self._granted,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.DemandReported: self._demand,
            ev.Leaving: self._leaving,
            ev.Paused: self._paused,
            ev.Resumed: self._resumed,
            ev.Fenced: self._fenced,
            ev.RankCooling: self._cooling,
        }
        self._table.update({kind: self._if_known(handler) for kind, handler in of_pipeline.items()})

    def handlers(self) -> dict[type, Handler]:
        return dict.fromkeys(self._table, self._see)

    def tail_lost(self, entry: Entry) -> None:
        """Forgets all pipelines; each is judged again from its next registration."""
        self._knows_all = False
        for pipeline in self._pipelines.values():
            pipeline.demand = 0
            self._update(pipeline, entry.time)
        self._pipelines.clear()
        self._requests.clear()
        self._end_plan()

    def finish(self, clocks: Clocks, ended: bool) -> None:
        self._end_plan()
        now = clocks.scheduler
        for (name, cluster), request in self._requests.items():
            self._add_wait(name, cluster, request.since, now, f"waits for {cluster} since")
        for name, pipeline in self._pipelines.items():
            for since in pipeline.holds.values():
                self._bound.held(now - since)
            if pipeline.unscheduled_since is not None:
                self._add_wait(name, ACTOR_INFER, pipeline.unscheduled_since, now, "has had work and no rank since")
        self.found += [(9, problem) for wait in self._waits if (problem := self._bound.problem(wait))]

    def _add_wait(self, name: str, cluster: str, since: float, until: float, what: str) -> None:
        pipeline = self._pipelines[name]
        needs = pipeline.tp if cluster == ACTOR_INFER else pipeline.slots[cluster]
        if any(needs > self._quotas.most.get(node, needs) for node in self._quotas.above(pipeline.spec)):
            return  # a limit was lowered below what it needs
        if not pipeline.withdraws or cluster == ACTOR_INFER:
            words = f"{name} {what} {since:.1f} s"
            wait = GpuWait(name, pipeline.clusters[cluster], since, until, words, cluster != ACTOR_INFER)
            self._waits.append(wait)

    def _see(self, entry: Entry, event: object) -> None:
        if entry.time != self._time or not isinstance(event, ev.Claimed | ev.Granted | ev.RankMoved):
            self._end_plan()
        if isinstance(event, ev.Claimed) and event.pipeline not in self._pipelines:
            # Registered before the log lost its end, so that it is not judged; ranks make way for it all the same.
            self._claims.append(event)
        self._table[type(event)](entry, event)
        self._time = entry.time

    def _if_known(self, handler: Callable[[Entry, object, _Pipeline], None]) -> Handler:
        def handle(entry: Entry, event: Any) -> None:
            if (pipeline := self._pipelines.get(event.pipeline)) is not None:
                handler(entry, event, pipeline)

        return handle

    # Schedulers and pipelines.

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._bound.limits = dict(event.limits)
        self._node(entry, event)

    def _node(self, entry: Entry, event: NodeEvent) -> None:
        self._bound.absences.take(event, entry.time)

    def _quotas_set(self, entry: Entry, event: ev.QuotasSet) -> None:
        self._quotas = Quotas(event.nodes, event.half_life_s, self._bound.absences.pool.slots_per_gpu)

    def _weighed(self, entry: Entry, event: ev.UseWeighed) -> None:
        self._use = event.use

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        lease = self._bound.limit("lease_s") * (1 if event.complete else 2)
        self._bound.add_fault("", None, self._time, entry.time + lease)
        self._recovering = event.term > 1

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        self._recovering = False

    def _reconnected(self, entry: Entry, event: ev.Reconnected) -> None:
        lease = self._bound.limit("lease_s")
        self._bound.add_fault("", None, entry.time - event.seconds - lease, entry.time + lease)

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        pipeline = self._pipelines[event.pipeline] = _Pipeline(event, self._bound.absences.pool.slots)
        self._bound.registered(event, pipeline.mapped, len(self._pipelines))

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._pipelines.pop(event.pipeline, None)
        self._drop_requests(event.pipeline)

    def _drop_requests(self, name: str) -> None:
        self._requests = {key: request for key, request in self._requests.items() if key[0] != name}

    def _demand(self, entry: Entry, event: ev.DemandReported, pipeline: _Pipeline) -> None:
        had, pipeline.demand = pipeline.demand, max(event.target - event.done, 0) * event.unit
        if had and not pipeline.demand:
            pipeline.idle_since = entry.time
        pipeline.rank_batch = event.rank_batch or pipeline.spec.rank_batch
        self._update(pipeline, entry.time)

    def _leaving(self, entry: Entry, event: ev.Leaving, pipeline: _Pipeline) -> None:
        pipeline.leaving = True
        self._update(pipeline, entry.time)

    def _paused(self, entry: Entry, event: ev.Paused, pipeline: _Pipeline) -> None:
        for (name, cluster), request in self._requests.items():
            if name == event.pipeline:
                self._add_wait(name, cluster, request.since, entry.time, f"waited for {cluster} from")
        pipeline.paused = True
        if self._knows_all and all(other.withdraws for other in self._pipelines.values()):
            self.found.append((9, f"{event.pipeline} is paused and no pipeline is left that runs"))
        self._update(pipeline, entry.time)

    def _resumed(self, entry: Entry, event: ev.Resumed, pipeline: _Pipeline) -> None:
        """Its waits are counted from now on; it keeps its places in the queue."""
        pipeline.paused = False
        for (name, _), request in self._requests.items():
            if name == event.pipeline:
                request.since = entry.time
        self._update(pipeline, entry.time)

    def _update(self, pipeline: _Pipeline, time: float) -> None:
        """Begins or ends the wait for a first rank."""
        name, since = pipeline.spec.pipeline, pipeline.unscheduled_since
        if pipeline.demand <= 0 or pipeline.withdraws or pipeline.ranks_up or pipeline.spec.scavenges:
            if since is not None:
                self._add_wait(name, ACTOR_INFER, since, time, "had work and no rank from")
            pipeline.unscheduled_since = None
        elif since is None:
            pipeline.unscheduled_since = time

    # Requests, claims and holds.

    def _requested(self, entry: Entry, event: ev.Requested, pipeline: _Pipeline) -> None:
        key = entry.time + event.priority * self._bound.limit("aging_s")
        key -= self._bound.limit("high_lead_s") if pipeline.spec.is_high else 0.0
        asked = (event.request, event.step, event.priority)
        self._requests[event.pipeline, event.cluster] = _Request(entry.time, key, asked)

    def _dropped(self, entry: Entry, event: ev.RequestDropped, pipeline: _Pipeline) -> None:
        self._requests.pop((event.pipeline, event.cluster), None)

    def _claimed(self, entry: Entry, event: ev.Claimed, pipeline: _Pipeline) -> None:
        if event.rank >= 0:
            self._check_guarantee(entry.time, event, pipeline)
            self._check_gap(event, pipeline)
            if pipeline.unscheduled_since is not None:
                self._first_ranks.add(event.pipeline)
            pipeline.claims.add(event.rank)
            self._update(pipeline, entry.time)
        else:
            pipeline.fixed_claims.add(event.cluster)
            self._count_overtakes(event)
        self._claims.append(event)

    def _count_overtakes(self, event: ev.Claimed) -> None:
        mine = self._requests.get((event.pipeline, event.cluster))
        if mine is None:
            return
        mine.claimed = True
        for (name, cluster), other in self._requests.items():
            passed = self._pipelines[name]
            ahead = other.key < mine.key and name != event.pipeline and not other.claimed and not passed.withdraws
            gone = self._bound.absences.gone & passed.clusters[cluster]
            if not ahead or gone or passed.clusters[cluster].isdisjoint(event.gpus):
                continue
            named = f"{name}#{other.asked[0]}" in event.passed
            who, by = f"{name} waits for {cluster}", event.pipeline
            if not named and cluster not in passed.holds and not self._recovering:
                self.found.append((9, f"{who} and is overtaken by {by}, which is behind it in the queue"))
            other.overtaken += 1
            if named and passed.spec.is_high:
                self.found.append((9, f"{who} with high priority and is overtaken by {by}"))
            if other.overtaken > self._bound.limit("max_backfills"):
                self.found.append((9, f"{who} and is overtaken for the {other.overtaken}th time, by {by}"))

    def _check_guarantee(self, time: float, event: ev.Claimed, pipeline: _Pipeline) -> None:
        since, who = pipeline.unscheduled_since, f"rank {event.rank} of {event.pipeline}"
        longest, slice_s = self._bound.limit("aging_s") * Priority.GENERATION, pipeline.spec.slice_s
        due = math.inf if since is None else since + (min(slice_s, longest) if slice_s else longest)
        # GPUs of an evicted rank that the request does not need may go to any pipeline.
        spare = self._turns or any(claim.rank < 0 for claim in self._claims)
        if self._recovering or event.ahead:
            return
        if event.guaranteed and time < due - _EPS:
            self.found.append((11, f"{who} is guaranteed, its pipeline has waited for a rank since {since}"))
        if not event.guaranteed and time > due + _EPS and not pipeline.holds and not spare:
            what = f"{who} is not guaranteed, though its pipeline has waited for a first rank since {since}"
            self.found.append((11, what))

    def _check_gap(self, event: ev.Claimed, pipeline: _Pipeline) -> None:
        """A scavenger gets nothing that a request waits for."""
        if not pipeline.spec.scavenges:
            return
        for (name, cluster), request in self._requests.items():
            other, wants = self._pipelines[name], self._pipelines[name].clusters[cluster]
            waits = not request.claimed and not other.withdraws and wants.isdisjoint(self._bound.absences.gone)
            if waits and not wants.isdisjoint(event.gpus):
                what = f"rank {event.rank} of {event.pipeline}, a scavenger, is to wake on GPUs that {name} waits for"
                self.found.append((11, what))

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped, pipeline: _Pipeline) -> None:
        pipeline.claims.discard(event.rank)
        if event.rank < 0:
            pipeline.fixed_claims.discard(event.cluster)
            if (request := self._requests.get((event.pipeline, event.cluster))) is not None:
                request.claimed = False
        self._update(pipeline, entry.time)

    def _granted(self, entry: Entry, event: ev.Granted | ev.PriorityChanged, pipeline: _Pipeline) -> None:
        who, request = f"{event.pipeline}/{event.cluster}", self._requests.get((event.pipeline, event.cluster))
        given = f"request {event.request}, step {event.step}, {event.priority.name}"
        if request is None and not self._recovering:
            self.found.append((10, f"{who} is granted ({given}) without having been asked for"))
        elif request is not None and (event.request, event.step, event.priority) != request.asked:
            number, step, priority = request.asked
            asked = f"request {number}, step {step}, {priority.name}"
            self.found.append((10, f"{who} is granted as {given}; asked for was {asked}"))
        if request is not None:
            self._add_wait(event.pipeline, event.cluster, request.since, entry.time, f"waited for {event.cluster} from")
            del self._requests[event.pipeline, event.cluster]
        pipeline.fixed_claims.discard(event.cluster)
        pipeline.holds.setdefault(event.cluster, entry.time)

    def _released(self, entry: Entry, event: ev.Released, pipeline: _Pipeline) -> None:
        self._bound.held(entry.time - pipeline.holds.pop(event.cluster, entry.time))

    # Faults.

    def _fenced(self, entry: Entry, event: ev.Fenced, pipeline: _Pipeline) -> None:
        for since in pipeline.holds.values():
            self._bound.held(entry.time - since)
        pipeline.holds.clear()
        self._drop_requests(event.pipeline)
        self._leaving(entry, ev.Leaving(event.pipeline), pipeline)
        until = entry.time + self._bound.limit("reap_s")
        self._bound.add_fault(event.pipeline, pipeline.mapped, entry.time - self._bound.limit("lease_s"), until)

    def _quarantined(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._quarantines.update(event.gpus)
        self._bound.add_fault(event.pipeline, event.gpus, entry.time, event.until + self._bound.limit("reap_s"))

    def _cooling(self, entry: Entry, event: ev.RankCooling, pipeline: _Pipeline) -> None:
        pipeline.cools_until = max(pipeline.cools_until, event.until)
        until = event.until + self._bound.limit("reap_s")
        self._bound.add_fault(event.pipeline, pipeline.rank_gpus(event.rank), entry.time, until)

    # Ranks and shares.

    def _rank(self, entry: Entry, event: ev.RankMoved, pipeline: _Pipeline) -> None:
        rank, time = event.rank, entry.time
        if event.phase in (Phase.RISING, Phase.BUILDING):
            pipeline.claims.discard(rank)
        if event.phase is Phase.FALLING and rank in pipeline.active:
            own = pipeline.withdraws or pipeline.cools_until > time or self._recovering
            own = own or not self._bound.absences.gone.isdisjoint(pipeline.rank_gpus(rank))
            served, before = time - pipeline.active[rank], pipeline.ranks_up
            self._evictions.append(_Eviction(event.pipeline, pipeline.rank_gpus(rank), served, before, own))
        self._turns |= event.phase is Phase.FALLING and rank not in pipeline.active
        if event.phase is Phase.ASLEEP or event.phase in SLEEP_PHASES:
            pipeline.up.pop(rank, None)
            pipeline.active.pop(rank, None)
        else:
            woken = pipeline.up.setdefault(rank, time)
            if event.phase is Phase.SERVING:
                pipeline.active[rank] = time
                pipeline.fastest = min(pipeline.fastest, time - woken) if time > woken else pipeline.fastest
        if event.phase is Phase.FAILED:
            seconds = self._bound.limit("quarantine_s")
            pipeline.cools_until = time + 2 * seconds
            until = time + seconds + self._bound.limit("reap_s")
            self._bound.add_fault(event.pipeline, pipeline.rank_gpus(rank), time, until)
        self._update(pipeline, time)

    def _end_plan(self) -> None:
        """Judges the moves of a plan that has been carried out."""
        claims, evictions, first = self._claims, self._evictions, self._first_ranks
        self._claims, self._evictions = list[ev.Claimed](), list[_Eviction]()
        self._first_ranks, self._turns = set[str](), False
        fixed = {gpu for claim in claims if claim.rank < 0 for gpu in claim.gpus}
        moves: list[tuple[int, _Eviction]] = []
        for eviction in evictions:
            takers = [i for i, c in enumerate(claims) if c.rank >= 0 and not eviction.gpus.isdisjoint(c.gpus)]
            if takers and not eviction.own and eviction.gpus.isdisjoint(fixed):
                moves.append((takers[0], eviction))
        for name in {eviction.pipeline for _, eviction in moves}:
            given = sorted([move for move in moves if move[1].pipeline == name], key=lambda move: move[0])
            lost = [eviction for eviction in evictions if eviction.pipeline == name]
            self._check_slices(name, given, lost[0].up, claims)
            for by in [claims[index].pipeline for index, _ in given]:
                if (gets := self._pipelines.get(by)) is not None and gets.spec.scavenges:
                    self._check_idle(name, by)
            # Judged is a giver that the plan gives nothing, by the last of its ranks that goes, to a taker whose last
            # claim that is: both have then what they have now.
            last, taker = given[-1][0], claims[given[-1][0]].pipeline
            others = claims[:last] + claims[last + 1 :]
            settled = len(lost) == len(given) and all(claim.pipeline != name for claim in claims)
            settled = settled and all(c.pipeline != taker or (c.rank >= 0 and c in claims[:last]) for c in others)
            if settled and taker not in first and all(eviction.pipeline != taker for eviction in evictions):
                self._check_shares(name, taker)

    def _check_idle(self, name: str, by: str) -> None:
        giver, least = self._pipelines.get(name), self._bound.limit("min_hold_s") - _EPS
        if giver is not None and (giver.demand or self._time - giver.idle_since < least):
            self.found.append((11, f"a rank of {name}, which has or just had work, makes way for {by}, a scavenger"))

    def _check_slices(
        self, name: str, given: list[tuple[int, _Eviction]], before: int, claims: list[ev.Claimed]
    ) -> None:
        giver = self._pipelines.get(name)
        if giver is None or giver.spec.scavenges:
            return
        least = giver.least_slice(self._bound.limit("min_hold_s"), self._bound.limit("max_slice_s"))
        early = [(claims[index].pipeline, e.served_s) for index, e in given if e.served_s < least - _EPS]
        if len(early) > max(before - giver.useful, 0):
            taker, served = early[-1]
            what = f"a rank of {name} goes to {taker} after {served:.2f} s; a time slice lasts {least:.2f} s at least"
            self.found.append((11, what))

    def _check_shares(self, name: str, by: str) -> None:
        giver, taker = self._pipelines.get(name), self._pipelines.get(by)
        if giver is None or taker is None or giver.ranks_up >= giver.useful:
            return
        if giver.spec.scavenges or taker.spec.scavenges:
            return
        if (giver.spec.min_share or taker.spec.min_share) and not self._quotas.nodes:
            return
        if self._quotas.nodes and not self._knows_all:
            return  # those that were registered before the log lost its end pull, too
        if self._quotas.promised:
            # What both are due is rounded to whole ranks, and a first one is due to one of high priority, out of what
            # its user's others are due.
            due, user = self._parts(entitlements), giver.spec.user
            high = (one for one in self._pipelines.values() if one.spec.is_high and one.spec.user == user)
            first = sum(one.tp for one in high if one.useful)
            rounds = giver.gpus + giver.tp > (due[name] - first) * (1 - 1e-6)
            share = max(taker.fixed + taker.tp, due[by] + taker.tp) if rounds else -1.0
        else:
            pull = {name: giver.pull, by: taker.pull} if not self._quotas.nodes else self._parts(pulls)
            share = (giver.gpus + taker.gpus) * pull[by] / (pull[name] + pull[by])
            if taker.spec.min_share:
                least = min(math.ceil(taker.spec.min_share * taker.ranks - 1e-9), taker.useful)
                share = max(share, taker.tp * min(least, int(pull[by] / taker.tp + 1e-9)))
        # A rank that is wider than the taker's gives up more GPUs than are taken.
        slack = max(0, giver.tp - taker.tp)
        if taker.gpus > share * (1 + 1e-9) + slack:
            self.found.append(
                (
                    11,
                    f"a rank of {name} goes to {by} at {self._time:.1f} s, which has {taker.gpus} GPUs then; its share "
                    f"of what both have is {share:.1f} ({taker.demand} samples, {giver.demand} of {name}, which has "
                    f"{giver.gpus} GPUs then)",
                )
            )

    def _parts(self, division: Callable[..., dict[str, float]]) -> dict[str, float]:
        """The parts of the pool of each pipeline with demand by the quotas, divided in one way or the other."""
        pullers = (self._puller(name, one) for name, one in self._pipelines.items())
        used = (one for one in pullers if one.work or one.fixed)
        slots = frozenset(range(self._bound.absences.pool.slots))
        return division(self._quotas, self._use, len(slots - self._bound.absences.gone - self._quarantines), used)

    def _puller(self, name: str, pipeline: _Pipeline) -> Puller:
        useful = min(pipeline.useful, self._could_wake(pipeline)) * (not pipeline.spec.scavenges)
        waits = [r for (whose, _), r in self._requests.items() if whose == name and not r.claimed]
        trains = any(request.asked[2] is Priority.ACTOR_TRAINING for request in waits)
        least = min(math.ceil(pipeline.spec.min_share * pipeline.ranks - 1e-9), useful) * pipeline.tp
        most = pipeline.gpus if trains else useful * pipeline.tp + pipeline.fixed
        work = pipeline.pull if useful else 0.0
        above = self._quotas.above(pipeline.spec)
        return Puller(name, above, work, pipeline.fixed, min(least, most), most if useful else pipeline.fixed)

    def _could_wake(self, pipeline: _Pipeline) -> int:
        """How many ranks of a pipeline are on nodes that stay; all of one that trains on a node that is to leave, which
        it may have until then.
        """
        gone, leaving = self._bound.absences.gone, self._bound.absences.gone - self._bound.absences.away
        trained_on = frozenset[int]().union(*(gpus for name, gpus in pipeline.clusters.items() if name != ACTOR_INFER))
        if not gone or not leaving.isdisjoint(trained_on):
            return pipeline.ranks
        return sum(gone.isdisjoint(pipeline.rank_gpus(rank)) for rank in range(pipeline.ranks))


MOST_WEIGHT = 4.0
"""A time slice lasts `max_slice_s` at most (`min_hold_s` before a hand-over was seen) times the pipeline's weight,
which counts up to this (rule 7)."""
_STEPS = ("sleep_s", "reap_s", "wake_s", "sync_s", "sync_s", "route_s")


class GpuWait(NamedTuple):
    """A pipeline waited from `since` to `until` for these GPUs, `what` in words; for `all` of them, or any rank."""

    pipeline: str
    gpus: frozenset[int]
    since: float
    until: float
    what: str
    all: bool = True


class WaitBound:
    """Longest admissible wait, from limits, holds, pipelines and faults seen so far."""

    def __init__(self) -> None:
        self.limits: Mapping[str, float] = {}
        self._longest_hold = 0.0
        self._most_pipelines = 0
        self._weight = 1.0
        self._slice_s = self._drain_s = self._lead_s = 0.0
        self._mapped: dict[str, frozenset[int]] = {}
        # Pipeline, GPUs (None: everybody's), begin and end of each fault.
        self._faults: list[tuple[str, frozenset[int] | None, float, float]] = []
        self.absences = Absences()

    def limit(self, name: str) -> float:
        return self.limits.get(name, 0.0)

    def registered(self, event: Registered, gpus: frozenset[int], registered: int) -> None:
        self._mapped[event.pipeline] = gpus
        self._lead_s = max(self._lead_s, self.limit("high_lead_s") if event.is_high else 0.0)
        self._weight = max(self._weight, min(event.weight, MOST_WEIGHT))
        self._slice_s = max(self._slice_s, event.slice_s)
        self._drain_s = max(self._drain_s, event.drain_s)
        self._most_pipelines = max(self._most_pipelines, registered)

    def held(self, seconds: float) -> None:
        """A cluster was held for so long; beyond `max_hold_s` the assumption is broken, not the bound."""
        self._longest_hold = max(self._longest_hold, min(seconds, self.limits.get("max_hold_s", float("inf"))))

    def add_fault(self, pipeline: str, gpus: Iterable[int] | None, begin: float, end: float) -> None:
        """A fault took this time, and the hand-over that it interrupted."""
        self._faults.append((pipeline, None if gpus is None else frozenset(gpus), begin - self._handover, end))

    @property
    def _handover(self) -> float:
        return max(self.limit("drain_s"), self._drain_s) + sum(self.limit(step) for step in _STEPS)

    def problem(self, wait: GpuWait) -> str | None:
        """Violation text of a wait that exceeds its bound; None if it is within."""
        seconds, allowed = wait.until - wait.since, self._without_faults()
        if seconds <= allowed or seconds <= (allowed := allowed + self._fault_s(wait)):
            return None
        longest = self._longest_hold
        return f"{wait.what}: {seconds:.1f} s, the bound is {allowed:.1f} s (longest hold {longest:.1f} s)"

    def _without_faults(self) -> float:
        """All ahead hold once, each with one hand-over, plus the aging window and time slices."""
        ahead = 2 * self._most_pipelines + self.limit("max_backfills") + 1
        time_slice = max(self.limit("min_hold_s"), self.limit("max_slice_s")) * self._weight
        time_slice = max(time_slice, self._slice_s)
        each = self._longest_hold + self._handover + time_slice + self.limit("lease_s")
        return Priority.GENERATION * self.limit("aging_s") + self._lead_s + ahead * each

    def _fault_s(self, wait: GpuWait) -> float:
        """Seconds of a wait that faults took: on its own GPUs, on those of pipelines that share them, or everywhere."""
        reach = wait.gpus.union(*(gpus for gpus in self._mapped.values() if gpus & wait.gpus))
        faults = [f for f in self._faults if f[1] is None or f[0] == wait.pipeline or f[1] & reach]
        absences = self.absences.of(wait.gpus)
        if wait.all or wait.gpus <= frozenset[int]().union(*(gpus for gpus, _, _ in absences)):
            faults += [("", gpus, begin - self._handover, end) for gpus, begin, end in absences]
        seconds, covered = 0.0, wait.since
        for _, _, began, ended in sorted(faults, key=lambda fault: fault[2]):
            begin, end = max(began, covered), min(ended, wait.until)
            if end > begin:
                seconds += end - begin
                covered = end
        return seconds
