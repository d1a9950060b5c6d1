"""Coverage of a simulation: the scheduler's decisions, and the transitions of its ranks, commands and claims.

Counted from the scheduler's log alone, so that the counted code needs no hook.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import Phase
from nemo_rl.utils.record import Entry

EXPECTED = (
    "ClockJumped",
    "GpusCleared",
    "InventoryDone",
    "Isolated",
    "Leaving",
    "RankCooling",
    "Reconnected",
    "Reconnected, given up",
    "changed in place: TRN",
    "claim dropped: cluster, fenced",
    "claim dropped: cluster, withdrawn",
    "claim dropped: rank, fenced",
    "claim: cluster",
    "claim: cluster past others, OLD",
    "claim: cluster past others, TRN",
    "claim: rank",
    "claim: rank ahead",
    "claim: rank guaranteed",
    "command: build done",
    "command: build failed",
    "command: build fenced",
    "command: build restarted",
    "command: grant done",
    "command: grant expired",
    "command: grant fenced",
    "command: grant refused",
    "command: grant restarted",
    "command: grant superseded",
    "command: reap done",
    "command: reap expired",
    "command: reap failed",
    "command: reap fenced",
    "command: reap restarted",
    "command: serve done",
    "command: serve failed",
    "command: serve fenced",
    "command: serve refused",
    "command: serve restarted",
    "command: serve superseded",
    "command: vacate done",
    "command: vacate expired",
    "command: vacate failed",
    "command: vacate fenced",
    "command: vacate restarted",
    "fence: incarnation N takes its place",
    "fence: it did not take its grant of N within N s",
    "fence: it held N longer than max_hold_s=N",
    "fence: it holds N (epoch N), which the log has given to others",
    "fence: it was unregistered",
    "fence: no heartbeat for N s (lease N s)",
    "grant: INIT",
    "grant: OLD",
    "grant: TRN",
    "quarantine: their processes could not be ended, pipeline",
    "quarantine: their processes could not be ended, rank",
    "rank: asleep -> building",
    "rank: asleep -> rising",
    "rank: building -> asleep",
    "rank: building -> falling",
    "rank: failed -> asleep",
    "rank: falling -> asleep",
    "rank: falling -> failed",
    "rank: rising -> falling",
    "rank: rising -> serving",
    "rank: serving -> asleep",
    "rank: serving -> falling",
    "request dropped: expired, waiting",
    "request dropped: withdrawn, claimed",
    "request dropped: withdrawn, waiting",
    "scheduler: recovers",
    "scheduler: recovers without the end of its log",
    "scheduler: starts",
    "unregistered: could not be ended",
    "unregistered: left",
    "unregistered: reaped",
)
"""What a few hundred random scenarios reach; a soak that leaves one of them out has not tried it."""
_NUMBERS = re.compile(r"[\d.]+|\b(actor_\w+)\b")


def reached(entries: Iterable[Entry]) -> Counter[str]:
    """How often each decision was made and each transition taken."""
    counts: Counter[str] = Counter()
    phases: dict[tuple[str, int], Phase] = {}
    verbs: dict[str, str] = {}
    claimed: set[tuple[str, str, int]] = set()
    asked: dict[tuple[str, str], str] = {}
    for entry in entries:
        event = entry.event
        match event:
            case ev.RankMoved():
                key = (event.pipeline, event.rank)
                before = phases.get(key, Phase.ASLEEP)
                if before is not event.phase:
                    counts[f"rank: {before.value} -> {event.phase.value}"] += 1
                phases[key] = event.phase
            case ev.CommandSent():
                verbs[event.command] = event.verb
            case ev.CommandEnded():
                counts[f"command: {verbs.pop(event.command, '?')} {event.outcome}"] += 1
            case ev.Claimed():
                kind = asked.get((event.pipeline, event.cluster), "")
                how = _if(bool(event.passed), f" past others, {kind}") + _if(event.guaranteed, " guaranteed")
                how += _if(event.ahead, " ahead")
                counts[f"claim: {_whose(event)}{how}"] += 1
                claimed.add((event.pipeline, event.cluster, event.rank))
            case ev.Requested():
                asked[event.pipeline, event.cluster] = event.priority.tag
            case ev.ClaimDropped():
                counts[f"claim dropped: {_whose(event)}, {event.reason}"] += 1
            case ev.RequestDropped():
                was = "claimed" if (event.pipeline, event.cluster, -1) in claimed else "waiting"
                counts[f"request dropped: {event.reason}, {was}"] += 1
            case ev.Granted():
                claimed.discard((event.pipeline, event.cluster, -1))
                counts[f"grant: {event.priority.tag}"] += 1
            case ev.PriorityChanged():
                counts[f"changed in place: {event.priority.tag}"] += 1
            case ev.Fenced():
                counts[f"fence: {_NUMBERS.sub('N', event.reason)}"] += 1
            case ev.Unregistered():
                counts[f"unregistered: {event.reason}"] += 1
                phases = {key: phase for key, phase in phases.items() if key[0] != event.pipeline}
            case ev.GpusQuarantined():
                counts[
                    f"quarantine: {_NUMBERS.sub('N', event.reason)}, {'pipeline' if event.rank < 0 else 'rank'}"
                ] += 1
            case ev.SchedulerStarted():
                what = "starts" if event.term == 1 else "recovers"
                counts[f"scheduler: {what}{_if(not event.complete, ' without the end of its log')}"] += 1
            case ev.Paused() | ev.Resumed():
                counts[type(event).__name__] += 1
            case ev.SharingMeasured():
                counts[f"sharing {'pays' if event.keeps else 'does not pay'}"] += 1
            case ev.GpusCleared() | ev.RankCooling() | ev.InventoryDone() | ev.Leaving() | ev.PlanRejected():
                counts[type(event).__name__] += 1
            case ev.Isolated() | ev.ClockJumped():
                counts[type(event).__name__] += 1
            case ev.Reconnected():
                counts[f"Reconnected{_if(event.given_up, ', given up')}"] += 1
            case _:
                pass
    return counts


def _if(said: object, text: str) -> str:
    return text if said else ""


def _whose(event: ev.Claimed | ev.ClaimDropped) -> str:
    return "cluster" if event.rank < 0 else "rank"
