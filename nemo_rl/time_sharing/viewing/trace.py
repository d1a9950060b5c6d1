"""A timeline as a trace for ui.perfetto.dev: GPUs, queue, counters and markers.

Written in the Chrome JSON trace format, which Perfetto opens as it is and which needs no library. Times are
microseconds. One process holds a track per GPU (a slice per hold, its phases nested inside), one the queue with a row
per waiting cluster under its priority.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from nemo_rl.time_sharing.protocol.types import Priority
from nemo_rl.time_sharing.viewing.timeline import Interval, Timeline, build_timeline, in_unit
from nemo_rl.utils.record import Entry

_SCHEDULER, _GPUS, _QUEUE = 1, 2, 3


def write_trace(entries: Iterable[Entry], path: str | Path, *, pool: str = "", unit: str = "GPU") -> int:
    """Writes the trace of a record; returns the number of trace events."""
    events = list(trace_events(build_timeline(entries), pool, unit))
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))
    return len(events)


def trace_events(timeline: Timeline, pool: str = "", unit: str = "GPU") -> Iterator[dict[str, object]]:
    """The trace events, metadata first."""
    yield from _names(timeline, f"{pool}: " if pool else "", unit)
    for time, active in timeline.active_gpus:
        yield {"ph": "C", "pid": _SCHEDULER, "name": f"active {unit}s", "ts": _us(time), "args": {f"{unit}s": active}}
    tracks = {"enqueue": 1, "plan": 2, "release": 3}
    marks = [(time, tracks[text.split(" ", 1)[0]], text) for time, text in timeline.marks]
    for time, track, text in [*marks, *((time, 4, text) for time, text in timeline.faults)]:
        yield {"ph": "i", "s": "t", "pid": _SCHEDULER, "tid": track, "name": in_unit(text, unit), "ts": _us(time)}
    yield from _gpu_slices(timeline)
    yield from _queue_slices(timeline)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _name(pid: int, name: str, order: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}}


def _track(pid: int, tid: int, name: str) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _names(timeline: Timeline, of: str, unit: str) -> Iterator[dict[str, object]]:
    yield from _name(_SCHEDULER, f"{of}scheduler", 0)
    for tid, name in enumerate(("enqueue", "execution", "release", "faults"), start=1):
        yield from _track(_SCHEDULER, tid, name)
    yield from _name(_GPUS, f"{of}{unit}s", 1)
    pool = timeline.pool
    for slot in range(pool.size):
        place = f"node {pool.node_of(slot)}, local {pool.local_gpus([slot])[0]}"
        yield from _track(_GPUS, slot + 1, f"{unit} {pool.name_of(slot)} ({place})")
    yield from _name(_QUEUE, f"{of}queue", 2)


def _gpu_slices(timeline: Timeline) -> Iterator[dict[str, object]]:
    holds: dict[int, list[Interval]] = {}
    for part in timeline.of("gpus"):
        holds.setdefault(part.number, []).append(part)
    for parts in holds.values():
        first, last = parts[0], parts[-1]
        whole = f"{first.tag} {first.label.split(' ', 1)[1].rsplit(' ' + first.phase, 1)[0]}"
        for gpu in first.gpus:
            yield _slice(_GPUS, gpu + 1, whole, first._replace(end=last.end))
            if len(parts) > 1 or first.phase != "held":
                for part in parts:
                    yield _slice(_GPUS, gpu + 1, part.phase if part.phase != "held" else part.label, part)


def _slice(pid: int, tid: int, name: str, part: Interval) -> dict[str, object]:
    """Arguments that do not apply are left out."""
    start, end = _us(part.start), _us(part.end)
    kind: dict[str, object] = {}
    about: dict[str, object] = {"pipeline": part.pipeline, "cluster": part.cluster}
    if part.lane == "gpus":
        kind = {"cat": part.tag}
        numbers = {"rank": part.rank, "step": part.step, "plan": part.plan}
        about |= {"kind": part.kind, **{what: value for what, value in numbers.items() if value >= 0}}
        about |= {"hold": part.number, "label": part.label}
    times = {"ts": start, "dur": max(end - start, 1)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **kind, **times, "args": about}


def _queue_slices(timeline: Timeline) -> Iterator[dict[str, object]]:
    tags = [priority.tag for priority in Priority]
    rows: dict[tuple[str, str, str], int] = {}
    waits = timeline.of("queue")
    for wait in sorted(waits, key=lambda w: (tags.index(w.tag), w.pipeline, w.cluster)):
        key = (wait.tag, wait.pipeline, wait.cluster)
        if key not in rows:
            rows[key] = 1000 * (tags.index(wait.tag) + 1) + len(rows)
            yield from _track(_QUEUE, rows[key], f"{wait.tag} {wait.pipeline}/{wait.cluster}")
        yield _slice(_QUEUE, rows[key], f"{wait.tag} waits", wait)
    for tag in tags:
        # At one moment those who come count before those who go: a request that is served at once was in the queue, and
        # no pipeline leaves before it comes.
        own = [wait for wait in waits if wait.tag == tag]
        depth = 0
        for time, gone in sorted([*((wait.start, -1) for wait in own), *((wait.end, 1) for wait in own)]):
            depth -= gone
            yield {"ph": "C", "pid": _QUEUE, "name": f"{tag} depth", "ts": _us(time), "args": {"waiting": depth}}
