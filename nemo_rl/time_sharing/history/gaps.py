"""Where the scheduler's log lost its end and a new scheduler went on without it (its `SchedulerStarted` says
`complete=False`).

Between the last entry that such a log still has and the `InventoryDone` of the new scheduler, its ledger may contradict
the rest of the record without mistake: events that were lost may be in another copy, or missing. What stays whole are
the pipelines' own records, so these are judged throughout: memory of a GPU taken twice, prompts, versions, requests to
shards. The scheduler's ledger is judged again from what it says after the gap.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import SCHEDULER
from nemo_rl.utils.record import Entry
from nemo_rl.utils.record_events import RecordOpened

_BEGINNING = frozenset({RecordOpened, ev.LogSigned, ev.PoolOpened})
"""What a new scheduler writes before it says that it has started; a log of which nothing is left begins again with the
pool."""


def lost_tails(entries: Sequence[Entry]) -> list[int]:
    """The index at which each gap begins: behind the last entry of the scheduler before one that went on without the
    end of the log.
    """
    begins: list[int] = []
    for index, entry in enumerate(entries):
        if type(entry.event) is ev.SchedulerStarted and not entry.event.complete:
            before = index
            while before > 0 and (
                entries[before - 1].source != SCHEDULER or type(entries[before - 1].event) in _BEGINNING
            ):
                before -= 1
            begins.append(before)
    return begins
