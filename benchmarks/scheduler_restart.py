"""How long a scheduler that is started anew takes until it knows its state: from a log in segments, against the same
log in one file.

    python benchmarks/scheduler_restart.py [--segments 10]

The log is what the schedulers of a simulated scenario with faults write, seed after seed, up to just before its newest
segment is full, which is when a restart takes longest. Both times are of the same code in the same process; the last
line is the ratio, one file over segments. It grows with the log, since only the newest segment is read.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from nemo_rl.time_sharing.log import log_end
from nemo_rl.time_sharing.log.segments import SEGMENT_LINES, SegmentedLog, newest_segment, saved, segments_of
from nemo_rl.time_sharing.log.state import SchedulerState, replay
from nemo_rl.time_sharing.protocol.types import SCHEDULER
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord, Record

BOOT = "benchmark/1"
SCENARIO = Path(__file__).resolve().parent.parent / "examples" / "time_sharing" / "with_faults.yaml"


def _on_clock(record: MemoryRecord, clock: Callable[[], float]) -> Record:
    return record.bind("", clock=clock)


def history() -> Iterator[Entry]:
    """What scheduler after scheduler writes, without end."""
    seed = 0
    while True:
        record = MemoryRecord()
        World(load_scenario(SCENARIO), seed, partial(_on_clock, record)).run()
        yield from (entry for entry in record.entries if entry.source == SCHEDULER)
        seed += 1


def write(folder: Path, entries: Iterable[Entry], segment_lines: int) -> float:
    """Writes the log; the longest time that beginning a segment took, seconds."""
    now, state, longest = 0.0, SchedulerState(), 0.0
    log = SegmentedLog(folder / "scheduler.jsonl", BOOT, clock=lambda: now, segment_lines=segment_lines)
    for entry in entries:
        now = entry.time
        log.emit(entry.event)
        state.apply(entry.event, now)
        if log.due:
            began = time.perf_counter()
            log.begin_segment(saved(state))
            longest = max(longest, time.perf_counter() - began)
    log.finish()
    return longest


def restart(folder: Path) -> tuple[float, int]:
    """Seconds until the state is known and the log can be written on, and the lines that were read."""
    began = time.perf_counter()
    path, _ = newest_segment(folder / "scheduler.jsonl")
    past = log_end.read_log(path, BOOT)
    replay(past.entries)
    SegmentedLog(path, BOOT, clock=lambda: 0.0).close()
    return time.perf_counter() - began, len(past.entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--segments", type=int, default=10, help="segments of the log (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=SEGMENT_LINES, help="of a segment (default: %(default)s)")
    args = parser.parse_args()
    lines = args.segments * (args.lines - 10)
    logging.disable()
    entries = list(itertools.islice(history(), lines))
    seconds: dict[str, float] = {}
    for name, segment_lines in (("one file", lines * 2), ("segments", args.lines)):
        with tempfile.TemporaryDirectory() as folder:
            longest = write(Path(folder), entries, segment_lines)
            files = segments_of(Path(folder) / "scheduler.jsonl")
            size = sum(path.stat().st_size for path in files) / 1e6
            seconds[name], read = restart(Path(folder))
        print(
            f"{name:<9} {lines} events, {size:.0f} MB in {len(files)} files; {read} lines read in {seconds[name]:.2f} s"
        )
        if longest:
            print(f"{'':<9} a segment is begun in {longest * 1e3:.0f} ms")
    print(f"restart from one file over restart from segments: {seconds['one file'] / seconds['segments']:.1f}")


if __name__ == "__main__":
    main()
