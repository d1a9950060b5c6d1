"""A scheduler that starts from a log knows whether the log may have lost its end: with the machine or the disk, not
with the process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_rl.time_sharing.agents import scheduler_actor
from nemo_rl.time_sharing.agents.scheduler_actor import SchedulerActor
from nemo_rl.time_sharing.log import log_end
from nemo_rl.time_sharing.log.events import PoolOpened, Registered, SchedulerStarted
from nemo_rl.time_sharing.log.segments import SegmentedLog
from nemo_rl.time_sharing.protocol.topology import Pool, StillRegistered
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    Held,
    Limits,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import MemoryRecord, RecordWriter, read_record

LIMITS = Limits(lease_s=600.0, plan_interval_s=0.0)


def write(path: Path, boot: str, *, closed: bool = False, events: int = 3) -> None:
    """One scheduler's stretch of a log."""
    record = RecordWriter(path, source="scheduler", resume=True)
    log_end.sign(record, boot)
    for _ in range(events):
        record.emit(PoolOpened(1, 2))
    log_end.close(record) if closed else record.close()


@pytest.mark.parametrize(
    ("written", "read", "closed", "complete"),
    [
        ("here/1", "here/1", False, True),
        ("here/1", "here/2", False, False),
        ("there/1", "here/1", False, False),
        ("here/1", "here/2", True, True),
        ("", "", False, False),
        ("", "here/1", False, False),
        ("here/1", "", False, False),
    ],
)
def test_a_log_is_whole_under_the_boot_that_wrote_it_or_when_it_was_closed(
    tmp_path: Path, written: str, read: str, closed: bool, complete: bool
) -> None:
    write(tmp_path / "log", written, closed=closed)
    assert log_end.read_log(tmp_path / "log", read).complete is complete


def test_the_last_writer_counts_and_a_closing_mark_counts_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "here/1", closed=True)
    write(path, "here/2")
    assert not log_end.read_log(path, "here/1").complete and log_end.read_log(path, "here/2").complete


def test_the_end_of_a_log_that_was_cut_anywhere_is_not_believed_under_another_boot(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "here/1", closed=True)
    write(path, "here/2")
    signed = next(entry.seq for entry in read_record(path) if getattr(entry.event, "boot", "") == "here/2")
    lines = path.read_bytes().splitlines(keepends=True)
    # What is cut comes behind the signature, which was on the disk before anything was acted upon.
    for kept in range(signed + 1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:kept]))
        assert not log_end.read_log(path, "here/3").complete
        assert log_end.read_log(path, "here/2").complete


def test_a_signature_is_on_the_disk_before_anything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    on_disk: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(path.read_bytes()))
    with RecordWriter(path, source="scheduler") as record:
        log_end.sign(record, "here/1")
        assert len(on_disk) == 1 and b'"boot":"here/1"' in on_disk[0]


def test_commands_of_a_scheduler_without_the_end_of_its_log_leave_when_its_term_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scheduler.jsonl"
    write(path, "here/1")
    on_disk: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(path.read_bytes()))
    log = SegmentedLog(path, "", clock=lambda: 9.0)
    log.emit(SchedulerStarted(1001, complete=False))
    on_disk.clear()
    log.flush()
    assert on_disk and b'"term":1001' in on_disk[-1]
    log.sign("here/2")
    on_disk.clear()
    log.emit(PoolOpened(1, 2))
    log.flush()
    assert not on_disk, "a signed log need not wait for the disk"


@pytest.mark.parametrize("event", [SchedulerStarted(1002), Registered("p", 0, "p", ())])
def test_a_term_and_a_registration_are_on_the_disk_before_an_agent_knows_of_them(
    event: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scheduler.jsonl"
    write(path, "here/1")
    on_disk: list[bytes] = []
    log = SegmentedLog(path, "here/1", clock=lambda: 9.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(path.read_bytes()))
    log.emit(event)
    log.flush()
    log.flush()
    assert on_disk == [path.read_bytes()]


def test_a_scheduler_has_written_its_term_before_it_answers_anybody() -> None:
    written: list[int] = []

    class Log(MemoryRecord):
        def flush(self) -> None:
            written.append(len(self.entries))

    log = Log()
    Scheduler(log, lambda command: None, SteadyClock()).open(Pool(1, 2), Limits(), 0.0)
    assert isinstance(log.entries[-1].event, SchedulerStarted) and written == [len(log.entries)]


def test_a_log_from_before_logs_were_signed_may_have_lost_its_end(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "log", source="scheduler") as record:
        record.emit(PoolOpened(1, 2))
    assert not log_end.read_log(tmp_path / "log", log_end.this_boot()).complete


def test_a_torn_last_line_was_never_acted_upon_but_a_damaged_line_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, "here/1")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert log_end.read_log(path, "here/1").complete
    path.write_bytes(whole.replace(b'"nodes":1', b'"nodes":7', 1))
    damaged = log_end.read_log(path, "here/1")
    assert not damaged.complete and len(damaged.entries) == 2


def test_no_log_is_a_whole_log(tmp_path: Path) -> None:
    assert log_end.read_log(tmp_path / "none", "here/1") == ([], True)


def test_this_boot_is_named_alike_by_every_process_of_the_machine_and_unknown_where_the_system_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert log_end.this_boot() == log_end.this_boot()
    monkeypatch.setattr(log_end, "_BOOT_ID", tmp_path / "none")
    assert log_end.this_boot() == ""


# The actor.


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], SchedulerActor]]:
    """Starts a scheduler under a boot; the one before it dies as it is."""
    monkeypatch.setattr(scheduler_actor, "_tell_agent", lambda *message: None)
    running: list[SchedulerActor] = []

    def start(boot: str) -> SchedulerActor:
        if running:
            kill(running[-1])
        monkeypatch.setattr(log_end, "this_boot", lambda: boot)
        running.append(SchedulerActor(str(tmp_path), 1, 2, LIMITS))
        return running[-1]

    yield start
    kill(running[-1])


def kill(actor: SchedulerActor) -> None:
    """What is left of a killed scheduler: what it has handed to the operating system."""
    actor._stopped.set()
    actor._timer.join(timeout=30)
    actor._record.close()


def test_a_scheduler_that_was_killed_goes_on_at_once_on_the_same_boot(start: Callable[[str], SchedulerActor]) -> None:
    start("here/1")
    actor = start("here/1")
    assert actor.describe()["term"] == 2 and not actor.describe()["recovering"]


@pytest.mark.parametrize("boots", [("here/1", "here/2"), ("", "")])
def test_a_scheduler_whose_machine_was_lost_waits_a_lease_for_those_its_log_may_miss(
    start: Callable[[str], SchedulerActor], boots: tuple[str, str]
) -> None:
    start(boots[0])
    actor = start(boots[1])
    assert actor.describe()["recovering"], "somebody may hold GPUs that the log does not say"


def test_a_scheduler_that_is_killed_while_it_waits_does_not_spare_the_next_one_the_wait(
    start: Callable[[str], SchedulerActor],
) -> None:
    start("here/1")
    assert start("here/2").describe()["recovering"]
    actor = start("here/2")
    assert actor.describe()["recovering"], "it knows no more than the one before"


def test_a_scheduler_that_was_stopped_goes_on_at_once_on_any_boot(start: Callable[[str], SchedulerActor]) -> None:
    first = start("here/1")
    first.register("a", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, {})
    first._core.drain("a", time.time())
    for _ in range(2):
        first.stop()
    assert not start("here/2").describe()["recovering"]


def test_a_log_of_which_nothing_can_be_read_is_a_lost_one(
    start: Callable[[str], SchedulerActor], tmp_path: Path
) -> None:
    (tmp_path / "scheduler.jsonl").write_bytes(b"\0" * 4096 + b"\n")
    assert start("here/1").describe()["recovering"]


@pytest.mark.parametrize("lost", ["end", "whole"])
def test_whoever_holds_gpus_beyond_what_is_left_of_a_log_is_ended_before_they_are_given_on(lost: str) -> None:
    sent: list[Command] = []
    record = MemoryRecord()
    scheduler = Scheduler(record, sent.append, SteadyClock())
    if lost == "end":
        scheduler.open(Pool(1, 2), LIMITS, 0.0)
        scheduler = Scheduler(MemoryRecord(), sent.append, SteadyClock())
        scheduler.recover(record.entries, 0.0, complete=False)
    else:
        scheduler.open(Pool(1, 2), LIMITS, 0.0, complete=False)
    scheduler.register("new", "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}, 0.0)
    scheduler.status(Status("new", 0, 1, wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1),), term=2), 1.0)
    scheduler.status(Status("lost", 3, 9, holds=(Held(ACTOR_TRAIN, 77, Priority.ACTOR_TRAINING),), term=1), 2.0)
    reaps = [command for command in sent if command.verb is Verb.REAP]
    assert [(command.pipeline, command.incarnation) for command in reaps] == [("lost", 3)] and len(sent) == 1
    scheduler.answer(Answer(reaps[0].command, "lost", 3, CommandOutcome.DONE), 3.0)
    for now in range(4, int(LIMITS.lease_s) + 2):
        scheduler.status(
            Status("new", 0, now, wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1),), term=2), float(now)
        )
        scheduler.tick(float(now))
        assert (len(sent) == 1) == (now < LIMITS.lease_s)
    assert [command.verb for command in sent] == [Verb.REAP, Verb.GRANT]


def test_what_a_silent_pipeline_was_given_in_the_lost_part_of_a_log_is_given_on_when_it_is_ended() -> None:
    """The ledger has GPU 0 free, which the log may have given away before it lost its end."""
    record, sent = MemoryRecord(), list[Command]()
    scheduler = Scheduler(record, sent.append, SteadyClock())
    scheduler.open(Pool(1, 2), LIMITS, 0.0)
    for name in ("silent", "lives"):
        scheduler.register(name, "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}, 0.0)
    scheduler = Scheduler(MemoryRecord(), sent.append, SteadyClock())
    scheduler.recover(record.entries, 0.0, complete=False)
    wants = (Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1),)

    def until(first: int, end: int) -> list[Verb]:
        for now in range(first, end):
            scheduler.status(Status("lives", 0, now, wants=wants, term=scheduler.state.term), float(now))
            scheduler.tick(float(now))
        # A command is sent again until it is answered.
        return list({command.command: command.verb for command in sent}.values())

    late = int(LIMITS.lease_s) + 20
    assert until(1, late) == [Verb.REAP]
    scheduler.answer(Answer(sent[0].command, "silent", 0, CommandOutcome.DONE), float(late))
    assert until(late, late + 3) == [Verb.REAP, Verb.GRANT]


def test_gpus_are_kept_for_each_pipeline_that_could_not_be_ended_and_may_be_on_them() -> None:
    """Both may have been given GPU 0 in the lost part, one after the other: it is free when both have been ended."""
    record, sent = MemoryRecord(), list[Command]()
    tps, gpus = {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}
    scheduler = Scheduler(record, sent.append, SteadyClock())
    scheduler.open(Pool(1, 2), LIMITS, 0.0)
    for name in ("first", "second"):
        scheduler.register(name, "ns", tps, gpus, 0.0)
    scheduler = Scheduler(MemoryRecord(), sent.append, SteadyClock())
    scheduler.recover(record.entries, 0.0, complete=False)
    for name in ("first", "second"):
        with contextlib.suppress(StillRegistered):
            scheduler.register(name, "ns", tps, gpus, 1.0, incarnation=1)
        scheduler.answer(Answer(sent[-1].command, name, 0, CommandOutcome.FAILED), 2.0)
    kept = [(q.pipeline, q.gpus) for q in scheduler.state.quarantines]
    assert kept == [("first", (0, 1)), ("second", (0, 1))]
