"""The scheduler's log in several files: only the newest is needed to go on, all of them are the history, whatever was
cut or could not be written.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.agents import scheduler_actor
from nemo_rl.time_sharing.agents.scheduler_actor import SchedulerActor
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log import log_end
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.log.segments import SegmentedLog, missing_segment, newest_segment, saved, segments_of
from nemo_rl.time_sharing.log.state import SchedulerState, StateSaved, replay
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord, RecordTooNew, RecordWriter, read_record
from nemo_rl.utils.record_events import RecordOpened
from tests.time_sharing.test_saved_state import everything, history

BOOT = "here/1"


def write(folder: Path, entries: list[Entry], segment_lines: int) -> SchedulerState:
    """The log of a scheduler that wrote these; the state that they lead to."""
    now = 0.0
    log = SegmentedLog(folder / "scheduler.jsonl", BOOT, clock=lambda: now, segment_lines=segment_lines)
    state = SchedulerState()
    for entry in entries:
        now = entry.time
        log.emit(entry.event)
        state.apply(entry.event, now)
        if log.due:
            log.begin_segment(saved(state))
    log.flush()
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, history(3)[:1100], 250)
    return tmp_path


@pytest.mark.slow
def test_the_newest_segment_leads_to_the_state_of_the_whole_log(tmp_path: Path) -> None:
    state = write(tmp_path, history(3)[:1100], 250)
    first = tmp_path / "scheduler.jsonl"
    names = ["scheduler.jsonl", *(f"scheduler.{number:06d}.jsonl" for number in range(1, 5))]
    assert [path.name for path in segments_of(first)] == names and not list(tmp_path.glob("*.new"))
    assert newest_segment(first) == (tmp_path / names[-1], True)
    past, complete = log_end.read_log(tmp_path / names[-1], BOOT)
    assert complete and len(past) < 250
    assert everything(replay(past)) == everything(state)
    assert everything(replay(chain.from_iterable(map(read_record, segments_of(first))))) == everything(state)


def test_older_segments_may_be_removed(folder: Path) -> None:
    first, newest = folder / "scheduler.jsonl", folder / "scheduler.000004.jsonl"
    for path in segments_of(first)[:-1]:
        path.unlink()
    assert segments_of(first) == [newest] and newest_segment(first) == (newest, True)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_the_newest_segment_cut_anywhere_is_what_is_left_of_it_or_the_one_before(folder: Path, part: float) -> None:
    first, newest, before = (
        folder / "scheduler.jsonl",
        folder / "scheduler.000004.jsonl",
        folder / "scheduler.000003.jsonl",
    )
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(part * len(whole))])
    path, is_newest = newest_segment(first)
    kept = (
        any(isinstance(entry.event, StateSaved) for entry in list(read_record(newest, recover=True))[:3])
        if newest.exists()
        else False
    )
    assert (path, is_newest) == ((newest, True) if kept else (before, False))
    # Set aside, so that nobody takes it for the newest again and its number is free.
    assert newest.exists() is kept and (folder / "scheduler.000004.jsonl.damaged").exists() is not kept
    assert replay(read_record(path, recover=True)).pool.size > 0


def test_a_segment_of_a_newer_version_is_not_taken_for_damage(folder: Path) -> None:
    newest = folder / "scheduler.000004.jsonl"
    line = b'"v":999,"n":0,"t":0.0,"src":"scheduler","kind":"new"}'
    newest.write_bytes(b'{"crc":"%08x",%b\n' % (zlib.crc32(line), line))
    with pytest.raises(RecordTooNew):
        newest_segment(folder / "scheduler.jsonl")
    assert newest.exists()


@pytest.mark.parametrize("fails", ["draft", "sync"])
def test_a_log_goes_on_where_no_segment_can_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    if fails == "draft":
        (tmp_path / "scheduler.000001.jsonl.new").mkdir()
    else:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    log = SegmentedLog(tmp_path / "scheduler.jsonl", BOOT, clock=lambda: 1.0, segment_lines=16)
    if fails == "sync":
        monkeypatch.setattr(os, "fsync", full)
    while not log.due:
        log.emit(ev.PoolOpened(1, 2))
    log.begin_segment(saved(SchedulerState()))
    assert "event=segment_not_begun" in caplog.text and not log.due
    log.emit(ev.PoolOpened(1, 2))
    log.flush()
    assert segments_of(tmp_path / "scheduler.jsonl") == [tmp_path / "scheduler.jsonl"]
    assert isinstance(list(read_record(tmp_path / "scheduler.jsonl"))[-1].event, ev.PoolOpened)


def test_other_records_of_the_folder_are_no_segments(tmp_path: Path) -> None:
    for name in (
        "scheduler.jsonl",
        "scheduler.000002.jsonl",
        "scheduler.2.jsonl",
        "other.000001.jsonl",
        "scheduler.000003.jsonl.new",
        "a.0.jsonl",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in segments_of(tmp_path / "scheduler.jsonl")] == [
        "scheduler.jsonl",
        "scheduler.000002.jsonl",
    ]
    assert (
        segments_of(tmp_path / "a.0.jsonl") == [tmp_path / "a.0.jsonl"] and segments_of(tmp_path / "none.jsonl") == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5, 8])
def test_the_checker_says_the_same_of_a_history_in_segments(seed: int) -> None:
    records: list[MemoryRecord] = []
    World(random_scenario(seed), seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0]).run()
    state, in_segments = SchedulerState(), []
    for index, entry in enumerate(records[0].entries):
        in_segments.append(entry)
        if entry.source == "scheduler":
            state.apply(entry.event, entry.time)
            if index % 150 == 0:
                begun = (RecordOpened("scheduler"), ev.LogSigned(BOOT), saved(state))
                in_segments += [Entry(number, entry.time, "scheduler", event) for number, event in enumerate(begun)]
    assert len(in_segments) > len(records[0].entries) + 9
    assert check(in_segments) == []


@pytest.mark.slow
def test_the_command_line_reads_the_segments_that_belong_to_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "scheduler.jsonl"
    write(tmp_path, history(3), 200)
    assert len(segments_of(first)) > 3
    assert main(["check", str(first)]) == 0
    assert main(["check", *map(str, segments_of(first))]) == 0, "each is read once"
    (counted,) = {line.split(": ")[1].split()[0] for line in capsys.readouterr().out.splitlines()}
    assert int(counted) > len(history(3))
    for segment in segments_of(first)[2:]:
        segment.unlink()
    assert main(["check", str(first)]) == 1, "what is open in the middle of the run stays open"


@pytest.mark.parametrize("command", ["check", "trace", "report"])
def test_a_log_without_its_first_segment_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (folder / "scheduler.jsonl").unlink()
    assert main([command, str(folder / "scheduler.jsonl")]) == 2
    assert main([command, str(folder / "scheduler.000002.jsonl")]) == 2
    assert capsys.readouterr().err.count("give the scheduler's whole log") == 2


def test_a_log_with_a_hole_is_refused_unless_that_segment_was_set_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hole = folder / "scheduler.000002.jsonl"
    aside = hole.rename(folder / "scheduler.000002.jsonl.damaged")
    assert missing_segment(segments_of(folder / "scheduler.jsonl")) is None
    aside.unlink()
    assert main(["check", str(folder / "scheduler.jsonl")]) == 2
    assert "scheduler.000002.jsonl: is missing" in capsys.readouterr().err


def test_with_recover_nothing_is_read_behind_a_damaged_segment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = folder / "scheduler.000002.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-900])
    assert main(["check", str(folder / "scheduler.jsonl")]) == 2
    assert main(["check", "--recover", str(folder / "scheduler.jsonl")]) == 0
    assert "read up to there, without the segments after it" in capsys.readouterr().err


# The actor.


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts schedulers over one folder; the ones before are killed, not stopped."""
    monkeypatch.setattr(scheduler_actor, "_tell_agent", lambda *_: None)
    monkeypatch.setattr(scheduler_actor.Reaper, "ends_single_ranks", lambda *_: False)
    monkeypatch.setattr(scheduler_actor.Reaper, "end", lambda *_, **__: True)
    made: list[SchedulerActor] = []

    def start() -> SchedulerActor:
        for other in made:
            other._stopped.set()
            other._timer.join(timeout=60.0)
        made.append(SchedulerActor(str(tmp_path), 1, 4, Limits(lease_s=600.0), 40))
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.stop()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_scheduler_begins_segments_while_it_runs_and_goes_on_from_the_newest(started: Any, tmp_path: Path) -> None:
    first, scheduler = tmp_path / "scheduler.jsonl", started()
    for number in range(60):
        scheduler.register(
            f"p{number}", "ns", {"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0, 1]}, {}
        )
        scheduler.unregister(f"p{number}") if number % 3 else None
    wait_for(lambda: len(segments_of(first)) > 1)
    known = set(scheduler.describe()["pipelines"])
    assert {"p0", "p57"} <= known
    again = started()
    assert again.describe()["term"] == 2
    # The end of one that was being ended may be known in memory a moment before it is in the log; it is ended again.
    living = {name for name, pipeline in again.describe()["pipelines"].items() if not pipeline["fenced"]}
    assert {"p0", "p57"} <= living <= known
    newest = segments_of(first)[-1]
    assert not any(isinstance(entry.event, ev.PoolOpened) for entry in read_record(newest, recover=True))


def test_a_scheduler_whose_newest_segment_is_damaged_goes_on_from_the_one_before_and_waits(
    started: Any, tmp_path: Path
) -> None:
    first, scheduler = tmp_path / "scheduler.jsonl", started()
    for number in range(60):
        scheduler.register(
            f"p{number}", "ns", {"actor_train": 1, "actor_infer": 1}, {"actor_train": [0], "actor_infer": [0, 1]}, {}
        )
    wait_for(lambda: len(segments_of(first)) > 1)
    scheduler._stopped.set()
    scheduler._timer.join(timeout=60.0)
    segments_of(first)[-1].write_bytes(b"\0" * 4096 + b"\n")
    again = started()
    assert again.describe()["recovering"] and "p0" in again.describe()["pipelines"]
    again.stop()
    begun = [
        entry.event
        for entry in chain.from_iterable(map(read_record, segments_of(first)))
        if isinstance(entry.event, ev.SchedulerStarted)
    ]
    assert [(event.term, event.complete) for event in begun] == [(1, True), (1001, False)], (
        "agents may know commands of term 2"
    )
    assert not main(["check", "--running", str(first)])


def test_that_a_segment_was_set_aside_is_known_until_there_is_a_newer_one(tmp_path: Path) -> None:
    """Its scheduler may be killed before it has written anything."""
    first, _ = tmp_path / "scheduler.jsonl", write(tmp_path, history(3)[:1100], 250)
    (tmp_path / "scheduler.000004.jsonl").write_bytes(b"damaged")
    before = tmp_path / "scheduler.000003.jsonl"
    assert [newest_segment(first) for _ in range(2)] == [(before, False)] * 2
    log = SegmentedLog(before, BOOT, clock=lambda: 1e6)
    assert log.due
    log.begin_segment(saved(replay(read_record(before))))
    assert not log.due
    newest = tmp_path / "scheduler.000005.jsonl"
    assert newest_segment(first) == (newest, True)


def test_the_signature_of_a_scheduler_that_has_not_said_yet_that_its_log_lost_its_end_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, history(3)[:100], 1000)
    monkeypatch.setattr(log_end, "this_boot", lambda: "here/2")
    monkeypatch.setattr(Scheduler, "recover", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SchedulerActor(str(tmp_path), 1, 4)
    assert not log_end.read_log(tmp_path / "scheduler.jsonl", "here/2").complete


def test_a_length_of_segments_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segment_lines=3: a segment has at least 16 lines"):
        SegmentedLog(tmp_path / "scheduler.jsonl", BOOT, clock=lambda: 0.0, segment_lines=3)


def test_records_of_a_pool_are_merged_by_the_machines_clock(tmp_path: Path) -> None:
    """A scheduler that was suspended leaves the time out, and its pipelines do not."""
    now = [0.0]
    clock = SteadyClock(max_step_s=5.0, reading=0.0)
    with (
        RecordWriter(tmp_path / "scheduler.jsonl", source="scheduler", clock=lambda: clock.now) as scheduler,
        RecordWriter(tmp_path / "a.jsonl", source="a/agent", clock=lambda: now[0]) as agent,
    ):
        for number, seconds in enumerate([0.0, 1.0, 30.0, 1.0, 1.0]):
            now[0] += seconds
            jumped = clock.advance(now[0])
            if jumped:
                scheduler.emit(ev.ClockJumped(jumped))
            scheduler.emit(ev.InventoryDone(number))
            now[0] += 0.1
            agent.emit(ev.InventoryDone(number))
    merged = merge_by_machine_time([tmp_path / "a.jsonl", tmp_path / "scheduler.jsonl"])
    told = [(entry.event.term, entry.source) for entry in merged if isinstance(entry.event, ev.InventoryDone)]
    assert told == [(number, source) for number in range(5) for source in ("scheduler", "a/agent")]


def test_what_a_new_scheduler_writes_of_its_log_is_by_the_machines_clock_already(tmp_path: Path) -> None:
    """Its predecessor's clock had left something out."""
    path, now = tmp_path / "scheduler.jsonl", 0.0
    log = SegmentedLog(path, BOOT, clock=lambda: now)
    log.emit(ev.ClockJumped(30.0))
    log.close()
    with RecordWriter(tmp_path / "a.jsonl", source="a/agent", clock=lambda: now) as agent:
        now = 31.0
        log = SegmentedLog(path, BOOT, clock=lambda: now)
        log.emit(ev.SchedulerStarted(2, True))
        agent.emit(ev.InventoryDone(2))
        now = 32.0
        log.emit(ev.InventoryDone(3))
        log.close()
        now = 33.0
        agent.emit(ev.InventoryDone(4))
    merged = merge_by_machine_time([tmp_path / "a.jsonl", path])
    assert [entry.event.term for entry in merged if isinstance(entry.event, ev.InventoryDone)] == [2, 3, 4]


def test_a_scheduler_that_could_not_write_what_it_did_ends_and_answers_nothing_more(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(scheduler_actor.os, "_exit", lambda code: ended.set())
    scheduler = started()
    arguments = ("ns", {"actor_infer": 1}, {"actor_infer": [0, 1]}, {})

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as full:
        full.setattr(scheduler._record, "flush", no_space)
        with pytest.raises(OSError, match="no space left"):
            scheduler.register("lost", *arguments)
    # There is room again, but the log lacks an event that the state knows.
    with pytest.raises(OSError, match="no space left"):
        scheduler.describe()
    assert ended.wait(10.0)
    assert "lost" not in started().describe()["pipelines"]
