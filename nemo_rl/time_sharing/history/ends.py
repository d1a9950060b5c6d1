"""Invariant 11, for ends: children end before their parents, and postponed work is resumed.

A pipeline that is cut off keeps no claim, and one that is gone has no open command. A rank's or pipeline's end, and the
release of quarantined GPUs, follow from the end of exactly those processes. A quarantine is retried when its time has
come. A scheduler without the end of its log leaves room for the terms it cannot know, and waits for one lease; it does
not resume work whose end it saw itself. Entries in a lost end of the log are not judged, except terms.
"""

from __future__ import annotations

from typing import NamedTuple

from nemo_rl.time_sharing.history.clocks import SLACK_S
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import Phase
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry

_RETRY_SLACK_S = 2 * SLACK_S


class _Whose(NamedTuple):
    """Owner of ended processes: an incarnation of a pipeline, or one rank of it."""

    pipeline: str
    incarnation: int
    rank: int


class EndChecks(Checks):
    """Checks that nothing is left open when its parent ends."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._term = 0
        self._grace: float | None = None
        self._failed: set[tuple[str, int]] = set()
        self._reaped: tuple[float, _Whose, str] | None = None
        """The processes whose ending was given up or done last, when, and how it went."""
        self._quarantines: dict[tuple[tuple[int, ...], _Whose], float] = {}
        """When each quarantine has to be looked after again."""
        self._lingering: set[tuple[tuple[int, ...], _Whose]] = set()
        """Quarantines that are not over, those included that may have been forgotten."""
        self._blind_until: float = 0.0
        self._isolated = False
        self._idle: dict[tuple[str, str], float | None] = {}
        """Ranks (`pipeline`, `rank N`) that occupy memory, and since when they take no requests; None while they do."""
        self._over: dict[tuple[str, int], int] = {}
        """The newest epoch in which this scheduler has seen a rank go to sleep."""

    def tail_lost(self, entry: Entry) -> None:
        self._failed.clear()
        self._quarantines.clear()

    # Schedulers.

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        if not event.complete and self._term > 0 and event.term <= self._term + 1:
            what = f"a scheduler without the end of its log takes term {event.term}"
            self._bad(11, f"{what}, which may be in what is lost")
        self._term = max(self._term, event.term)
        self._blind_until, self._isolated = entry.time, False
        self._grace = None if event.complete else entry.time + self._ledger.limits.get("lease_s", 0.0)
        self._over.clear()

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        if self._grace is not None and entry.time < self._grace - 1e-3:
            self._bad(
                11,
                "the scheduler has lost the end of its log, and does not wait for pipelines that it may not know: "
                f"it has taken stock {self._grace - entry.time:.1f} s too early",
            )
        busy = {(command.pipeline, f"rank {command.rank}") for command in self._ledger.commands.values()}
        busy |= {(whose.pipeline, f"rank {whose.rank}") for _, whose in self._lingering}
        for (name, rank), since in self._idle.items():
            left = since is not None and since < self._blind_until
            if left and name in self._ledger.live and (name, rank) not in busy:
                self._bad(11, f"{rank} of {name} has taken no requests since {since} s, and nothing is done with it")
        self._blind_until = entry.time

    def _isolates(self, entry: Entry, event: ev.Isolated | ev.Reconnected) -> None:
        self._isolated, self._blind_until = isinstance(event, ev.Isolated), entry.time

    # Pipelines, claims and ranks.

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        # What earlier incarnations have left behind is not its own.
        self._idle = {rank: since for rank, since in self._idle.items() if rank[0] != event.pipeline}

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        for _, cluster, rank in sorted(claim for claim in self._ledger.claims if claim[0] == event.pipeline):
            where = cluster if rank < 0 else f"rank {rank}"
            self._bad(11, f"{event.pipeline} is fenced, and {where} is still to get GPUs")

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        name, whole = event.pipeline, _Whose(event.pipeline, event.incarnation, -1)
        self._failed = {failed for failed in self._failed if failed[0] != name}
        for key, command in self._ledger.commands.items():
            mine = (command.pipeline, command.incarnation) == whole[:2]
            if mine and (command.verb != "reap" or command.rank < 0):
                self._bad(11, f"{name} is unregistered ({event.reason}) while {command.verb} ({key}) to it is open")
        if event.reason != "left" and not self._was_ended(entry, whole):
            self._bad(11, f"{name} ({event.incarnation}) is unregistered ({event.reason}) without having been ended")

    def _was_ended(self, entry: Entry, *ways: _Whose) -> bool:
        """Whether the end of one of these processes has just been given up or done."""
        if not self._ledger.settled:
            return True
        return self._reaped is not None and self._reaped[0] == entry.time and self._reaped[1] in ways

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        key = (event.pipeline, event.rank)
        if event.phase in (Phase.RISING, Phase.BUILDING) and event.epoch <= self._over.get(key, -1):
            what = f"rank {event.rank} of {event.pipeline} is up under epoch {event.epoch}"
            self._bad(11, f"{what}, which the scheduler has seen end")
        if event.phase is Phase.FAILED:
            self._failed.add(key)
        elif event.phase is Phase.ASLEEP:
            self._over[key] = max(event.epoch, self._over.get(key, -1))
            known = self._ledger.registered.get(event.pipeline)
            mine = _Whose(event.pipeline, -1 if known is None else known.incarnation, event.rank)
            if key in self._failed and not self._was_ended(entry, mine):
                self._bad(11, f"rank {event.rank} of {event.pipeline} is called asleep, its processes were not ended")
            self._failed.discard(key)

    def _occupied(self, entry: Entry, event: ev.MemoryTaken) -> None:
        if event.what.startswith("rank "):
            self._idle[entry.source.partition("/")[0], event.what] = entry.time

    def _freed(self, entry: Entry, event: ev.MemoryFreed) -> None:
        self._idle.pop((entry.source.partition("/")[0], event.what), None)

    def _routed(self, entry: Entry, event: rec.ShardRouted | rec.ShardUnrouted) -> None:
        key = (entry.source.partition("/")[0], f"rank {event.shard}")
        if key in self._idle:
            self._idle[key] = None if isinstance(event, rec.ShardRouted) else entry.time

    # Commands and quarantines.

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        self._check_forgotten(entry)

    def _ended(self, entry: Entry, event: ev.CommandEnded) -> None:
        command = self._ledger.commands.get(event.command)
        if command is not None and command.verb == "reap":
            whose = _Whose(command.pipeline, command.incarnation, command.rank)
            self._reaped = (entry.time, whose, event.outcome)
            for quarantine in self._quarantines:
                if quarantine[1] == whose:
                    self._quarantines[quarantine] = max(self._quarantines[quarantine], entry.time)
        self._check_forgotten(entry)

    def _quarantined(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        if not event.gpus:
            self._bad(11, f"a quarantine of no GPUs is begun for {event.pipeline} ({event.reason})")
        whose = _Whose(event.pipeline, event.incarnation, event.rank)
        self._quarantines[tuple(event.gpus), whose] = event.until
        self._lingering.add((tuple(event.gpus), whose))

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        whose = _Whose(event.pipeline, event.incarnation, event.rank)
        self._quarantines.pop((tuple(event.gpus), whose), None)
        self._lingering.discard((tuple(event.gpus), whose))
        if self._ledger.gap:
            return
        ended = self._was_ended(entry, whose, whose._replace(rank=-1))
        if not ended or (self._reaped is not None and self._reaped[0] == entry.time and self._reaped[2] != "done"):
            self._bad(11, f"GPUs {event.gpus} leave quarantine, and the processes of {whose.pipeline} were not ended")

    def _check_forgotten(self, entry: Entry) -> None:
        if not self._quarantines or self._isolated or self._ledger.recovering:
            return
        for (gpus, whose), until in list(self._quarantines.items()):
            if entry.time <= max(until, self._blind_until) + _RETRY_SLACK_S:
                continue
            if not any(
                (c.verb, c.pipeline, c.incarnation, c.rank) == ("reap", *whose) for c in self._ledger.commands.values()
            ):
                del self._quarantines[gpus, whose]
                self._bad(11, f"the quarantine of GPUs {gpus} for {whose.pipeline} expired at {until:.1f} s, not ended")
