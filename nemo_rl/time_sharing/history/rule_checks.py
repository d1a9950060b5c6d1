"""Invariant 11: each entry of the scheduler follows from those before it.

Ranks go from phase to phase along the allowed ways and under one epoch, with one command at a time that fits the phase.
Requests are taken once and passed at most `max_backfills` times; what is claimed was asked for, can be used, and does
not cool off; no more initialise than may; guaranteed slices are kept. From a lost end of the log to the next
`InventoryDone`, and while a scheduler takes stock, only terms and epochs are judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, Phase, Priority
from nemo_rl.utils.record import Entry

_FOLLOWING = {
    Phase.ASLEEP: {Phase.RISING, Phase.BUILDING},
    Phase.BUILDING: {Phase.ASLEEP, Phase.FALLING},
    Phase.RISING: {Phase.SERVING, Phase.FALLING},
    Phase.SERVING: {Phase.FALLING},
    Phase.FALLING: {Phase.ASLEEP, Phase.FAILED},
    Phase.FAILED: {Phase.ASLEEP},
}
_MEANT_FOR = {
    "build": {Phase.BUILDING},
    "serve": {Phase.RISING},
    "vacate": {Phase.FALLING},
    "reap": {Phase.FAILED, Phase.ASLEEP},
}
_UP = (Phase.RISING, Phase.SERVING)


@dataclass(slots=True)
class _Rank:
    phase: Phase = Phase.ASLEEP
    epoch: int = -1
    guaranteed: bool = False
    served_since: float | None = None
    cools_until: float = 0.0


@dataclass(slots=True)
class _Pipeline:
    rank_batch: int
    most: int
    slice_s: float = 0.0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    requests: dict[str, ev.Requested] = field(default_factory=dict)
    claims: dict[tuple[str, int], ev.Claimed] = field(default_factory=dict)
    holds: dict[str, Priority] = field(default_factory=dict)
    newest_request: int = -1
    newest_demand: int = -1
    demand: int = 0
    measured_batch: int = 0
    leaving: bool = False
    paused: bool = False
    fenced: bool = False

    def rank(self, number: int) -> _Rank:
        return self.ranks.setdefault(number, _Rank())

    @property
    def withdraws(self) -> bool:
        """Whether nothing more is given to it."""
        return self.leaving or self.paused

    @property
    def useful(self) -> int:
        """How many ranks it has a use for, within its maximum share."""
        return min(math.ceil(self.demand / (self.measured_batch or self.rank_batch)), self.most)

    @property
    def up(self) -> int:
        """Ranks that are up or will be, those that are built ahead left out."""
        claimed = sum(rank >= 0 and not claim.ahead for (_, rank), claim in self.claims.items())
        return claimed + sum(rank.phase in _UP for rank in self.ranks.values())

    @property
    def initialises(self) -> bool:
        wanted = [self.requests[cluster] for cluster, rank in self.claims if rank < 0 and cluster in self.requests]
        return Priority.INITIALIZATION in [*self.holds.values(), *(request.priority for request in wanted)]


class RuleChecks(Checks):
    """Watches ranks, requests and claims."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._pipelines: dict[str, _Pipeline] = {}
        self._incarnations: dict[str, int] = {}
        self._passed: dict[str, int] = {}
        self._left_claimed: tuple[float, str, str] | None = None
        self._evicted: tuple[float, dict[int, tuple[str, tuple[int, ...]]]] = (0.0, {})
        """When guaranteed ranks were last drained in their slices; by GPU, whose rank it was and all GPUs of it."""
        self._taken: list[tuple[str, str, tuple[int, ...]]] = []
        """Requests that took GPUs of such ranks: what is wrong with that, whose rank it was and all GPUs of it."""
        self._claims_at: tuple[float, list[ev.Claimed]] = (0.0, [])
        self._term = self._newest_epoch = 0

    def tail_lost(self, entry: Entry) -> None:
        """Restarts from the new scheduler's entries; pipelines that it does not name again are forgotten."""
        self._pipelines.clear()
        self._passed.clear()
        self._left_claimed = None

    def finish(self, clocks: Clocks, ended: bool) -> None:
        self._judge_taken(math.inf)

    # Schedulers and pipelines.

    def _forbidden(self, rank: int) -> frozenset[int]:
        """GPUs that a rank, or a fixed cluster (-1), may not get: what trains on a node that is to leave ends first."""
        return self._ledger.absences.gone if rank >= 0 else self._ledger.absences.away

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        if event.term <= self._term:
            self._bad(11, f"a scheduler of term {event.term} starts after one of term {self._term}")
        self._term = max(event.term, self._term)

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        name, before = event.pipeline, self._incarnations.get(event.pipeline, -1)
        if event.incarnation <= before:
            self._bad(11, f"{name} is registered as incarnation {event.incarnation} after {before}")
        self._incarnations[name] = max(before, event.incarnation)
        # Each incarnation numbers its requests from the start.
        self._passed = {label: times for label, times in self._passed.items() if label.rpartition("#")[0] != name}
        if not 0 <= event.min_share <= event.max_share <= 1 or event.max_share == 0 or event.weight <= 0:
            shares = f"shares from {event.min_share:g} to {event.max_share:g}"
            self._bad(11, f"{name} is registered with weight {event.weight:g} and {shares}")
        infer = next(cluster for cluster in event.clusters if cluster.name == ACTOR_INFER)
        ranks = len(infer.gpus) // infer.tp_size
        most = min(max(int(event.max_share * ranks + 1e-9), 1), ranks)
        self._pipelines[name] = _Pipeline(event.rank_batch, most, event.slice_s)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._pipelines.pop(event.pipeline, None)

    def _leaving(self, entry: Entry, event: ev.Leaving) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.leaving = True

    def _paused(self, entry: Entry, event: ev.Paused | ev.Resumed) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.paused = isinstance(event, ev.Paused)

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.fenced = True
            pipeline.requests.clear()

    def _demand(self, entry: Entry, event: ev.DemandReported) -> None:
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        if event.seq <= pipeline.newest_demand:
            self._bad(11, f"{event.pipeline} reports demand {event.seq} after {pipeline.newest_demand}")
        pipeline.newest_demand = max(event.seq, pipeline.newest_demand)
        pipeline.demand = max(event.target - event.done, 0) * event.unit
        pipeline.measured_batch = event.rank_batch

    # Requests and claims.

    def _requested(self, entry: Entry, event: ev.Requested) -> None:
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        if event.request <= pipeline.newest_request:
            what = f"request {event.request} of {event.pipeline}"
            self._bad(11, f"{what} is taken after request {pipeline.newest_request}")
        pipeline.newest_request = max(event.request, pipeline.newest_request)
        pipeline.requests[event.cluster] = event

    def _request_dropped(self, entry: Entry, event: ev.RequestDropped) -> None:
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        request = pipeline.requests.pop(event.cluster, None)
        if request is not None and request.request != event.request:
            self._bad(11, f"request {event.request} of {event.pipeline} is dropped, open is {request.request}")
        if (event.cluster, -1) in pipeline.claims:
            self._left_claimed = (entry.time, event.pipeline, event.cluster)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        self._check_left_claim(entry)
        self._judge_taken(entry.time)
        self._claims_at[1].append(event)
        pipeline, who = self._pipelines.get(event.pipeline), f"{event.pipeline}/{event.cluster}"
        if self._ledger.recovering:
            self._bad(11, f"GPUs {event.gpus} are promised to {who} before the scheduler has taken stock")
        for passed in event.passed:
            self._passed[passed] = self._passed.get(passed, 0) + 1
            if self._passed[passed] > self._ledger.limits.get("max_backfills", math.inf):
                self._bad(11, f"request {passed} is passed for the {self._passed[passed]}th time, by {who}")
        if gone := sorted(self._forbidden(event.rank).intersection(event.gpus)):
            self._bad(11, f"GPUs {event.gpus} are promised to {who}, and the node of GPU {gone[0]} is leaving or away")
        if pipeline is None:
            return
        if pipeline.fenced or pipeline.withdraws:
            self._bad(11, f"GPUs {event.gpus} are promised to {who}, which is leaving, paused or fenced")
        if event.rank >= 0:
            self._claimed_rank(entry, event, pipeline)
        else:
            self._claimed_cluster(entry, event, pipeline)
        pipeline.claims[event.cluster, event.rank] = event

    def _claimed_rank(self, entry: Entry, event: ev.Claimed, pipeline: _Pipeline) -> None:
        rank, who = pipeline.rank(event.rank), f"rank {event.rank} of {event.pipeline}"
        if rank.phase is not Phase.ASLEEP:
            self._bad(11, f"{who} is to wake while it is {rank.phase.value}")
        if rank.cools_until > entry.time:
            self._bad(11, f"{who} is to wake at {entry.time:.1f} s, it cools off until {rank.cools_until:.1f} s")
        if not event.ahead and pipeline.up >= pipeline.useful:
            self._bad(11, f"{who} is to wake, {pipeline.up} of {pipeline.useful} ranks that are of use are up")

    def _claimed_cluster(self, entry: Entry, event: ev.Claimed, pipeline: _Pipeline) -> None:
        request = pipeline.requests.get(event.cluster)
        if request is None or request.request != event.request:
            self._bad(11, f"{event.pipeline}/{event.cluster} is claimed for request {event.request}, which is not open")
        elif request.priority is Priority.INITIALIZATION and not pipeline.holds:
            others = [n for n, p in self._pipelines.items() if n != event.pipeline and p.initialises]
            if 0 < self._ledger.limits.get("max_initialising", 0) <= len(others):
                self._bad(11, f"{event.pipeline} may initialise beside {', '.join(others)}")
        evicted_at, evicted = self._evicted
        robbed = {evicted[gpu] for gpu in event.gpus if gpu in evicted} if evicted_at == entry.time else set()
        for holder, gpus in sorted(robbed):
            if holder != event.pipeline:
                what = f"{event.pipeline}/{event.cluster} evicts a rank of {holder} from its guaranteed slice"
                self._taken.append((what, holder, gpus))

    def _judge_taken(self, time: float) -> None:
        """Judges completed plans: a request may take the remaining GPUs of a wide rank that makes way for generation,
        or for a request of its own pipeline.
        """
        if time == self._claims_at[0]:
            return
        for what, holder, gpus in self._taken:
            others = [claim for claim in self._claims_at[1] if claim.rank >= 0 or claim.pipeline == holder]
            if all(set(gpus).isdisjoint(claim.gpus) for claim in others):
                self._bad(11, what)
        self._taken.clear()
        self._claims_at = (time, list[ev.Claimed]())

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.claims.pop((event.cluster, event.rank), None)
        if self._left_claimed is not None and self._left_claimed[1:] == (event.pipeline, event.cluster):
            self._left_claimed = None

    def _check_left_claim(self, entry: Entry) -> None:
        """A claim goes with its request, at the same moment."""
        if self._left_claimed is not None and entry.time > self._left_claimed[0]:
            _, name, cluster = self._left_claimed
            self._left_claimed = None
            self._bad(11, f"the claim of {name}/{cluster} outlives its request")

    def _lease_begins(self, entry: Entry, pipeline: _Pipeline | None, key: tuple[str, int], epoch: int) -> None:
        """A lease from a claim must have a new epoch; leases without a claim come from an inventory."""
        claim = pipeline.claims.pop(key, None) if pipeline is not None else None
        if claim is not None and self._ledger.recovering and not self._ledger.gap:
            self._bad(11, f"GPUs {claim.gpus} go to {claim.pipeline}/{key[0]} before the scheduler has taken stock")
        if claim is not None and epoch <= self._newest_epoch:
            self._bad(11, f"{claim.pipeline}/{key[0]} gets epoch {epoch}, there was {self._newest_epoch} before")
        if claim is not None and not self._forbidden(claim.rank).isdisjoint(claim.gpus):
            self._bad(11, f"GPUs {claim.gpus} go to {claim.pipeline}/{key[0]}, and a node of theirs is leaving or away")
        self._newest_epoch = max(epoch, self._newest_epoch)

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._check_left_claim(entry)
        pipeline = self._pipelines.get(event.pipeline)
        self._lease_begins(entry, pipeline, (event.cluster, -1), event.epoch)
        if pipeline is not None:
            pipeline.requests.pop(event.cluster, None)
            pipeline.holds[event.cluster] = event.priority

    def _priority_changed(self, entry: Entry, event: ev.PriorityChanged) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests.pop(event.cluster, None)
            pipeline.holds[event.cluster] = event.priority

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._check_left_claim(entry)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.holds.pop(event.cluster, None)

    # Ranks and commands.

    def _rank_moved(self, entry: Entry, event: ev.RankMoved) -> None:
        self._check_left_claim(entry)
        pipeline, who = self._pipelines.get(event.pipeline), f"rank {event.rank} of {event.pipeline}"
        begins = event.phase in (Phase.RISING, Phase.BUILDING)
        if begins:
            self._lease_begins(entry, pipeline, (ACTOR_INFER, event.rank), event.epoch)
        if pipeline is None:
            return
        rank = pipeline.rank(event.rank)
        if self._ledger.settled and event.phase not in _FOLLOWING[rank.phase]:
            self._bad(11, f"{who} goes from {rank.phase.value} to {event.phase.value}")
        if self._ledger.settled and not begins and event.epoch != rank.epoch:
            self._bad(11, f"{who} is {event.phase.value} under epoch {event.epoch}, its lease has {rank.epoch}")
        gpus = self._ledger.rank_gpus(event.pipeline, event.rank)
        # One that broke, whose pipeline or node leaves or that is of no use, goes to sleep for its own sake.
        own = (
            rank.cools_until > entry.time
            or pipeline.withdraws
            or not self._ledger.settled
            or pipeline.up > pipeline.useful
        )
        own = own or not self._ledger.absences.gone.isdisjoint(gpus)
        if event.phase is Phase.FALLING and rank.guaranteed and not own and self._in_slice(entry, rank, pipeline):
            if self._evicted[0] != entry.time:
                self._evicted = (entry.time, {})
            self._evicted[1].update(dict.fromkeys(gpus, (event.pipeline, gpus)))
        if begins:
            rank.guaranteed, rank.served_since = event.guaranteed, None
        elif event.phase is Phase.SERVING:
            rank.served_since = entry.time
        elif event.phase is Phase.ASLEEP and rank.phase is Phase.FAILED:
            rank.cools_until = max(rank.cools_until, entry.time + self._ledger.limits.get("quarantine_s", 0.0))
        rank.phase, rank.epoch = event.phase, event.epoch

    def _in_slice(self, entry: Entry, rank: _Rank, pipeline: _Pipeline) -> bool:
        seconds = max(self._ledger.limits.get("min_hold_s", 0.0), pipeline.slice_s)
        return rank.served_since is None or entry.time < rank.served_since + seconds

    def _cooling(self, entry: Entry, event: ev.RankCooling) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.rank(event.rank).cools_until = event.until

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        what = f"{event.verb} of rank {event.rank} of {event.pipeline}"
        pipeline = self._pipelines.get(event.pipeline)
        key = (event.pipeline, event.incarnation, event.rank)
        if pipeline is not None and event.rank >= 0:
            phase = pipeline.rank(event.rank).phase
            mine = event.incarnation == self._incarnations.get(event.pipeline)
            if self._ledger.settled and mine and phase not in _MEANT_FOR.get(event.verb, ()):
                self._bad(11, f"{what} is sent while it is {phase.value}")
            others = ((c.pipeline, c.incarnation, c.rank) for c in self._ledger.commands.values())
            if self._ledger.settled and key in others:
                self._bad(11, f"{what} is sent while another command of the rank is open")
            if pipeline.fenced and event.verb != "reap" and mine:
                self._bad(11, f"{what} is sent though its pipeline is fenced")
