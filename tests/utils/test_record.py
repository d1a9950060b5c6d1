"""The run record: what is written comes back, and damage is found where it is and believed nowhere else."""

from __future__ import annotations

import errno
import pickle
import resource
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.utils.record import (
    Entry,
    MemoryRecord,
    NullRecord,
    RecordDamaged,
    RecordError,
    RecordTooNew,
    RecordUnwritable,
    RecordWriter,
    decode_line,
    encode_entry,
    read_record,
)
from nemo_rl.utils.record_archive import archive_of, move_to_archive
from nemo_rl.utils.record_events import (
    EventDefinitionError,
    GroupAdmitted,
    GroupDropped,
    GroupTrained,
    RecordedSpan,
    RecordOpened,
    StepFinished,
    SyncFinished,
    TokensGenerated,
    UnknownEvent,
    WaitBegun,
    event_kind,
)

EVENTS = [
    GroupAdmitted("g1", "p1", 8),
    GroupAdmitted("g2", "p2", 8, target_step=3),
    TokensGenerated("g1/0", "g1", (RecordedSpan(0, 12, 40), RecordedSpan(1, 40, 64)), mixed_kv=True),
    SyncFinished("s1", 1, checksums={"0": "ab", "1": "cd"}),
    WaitBegun("w", "rollouts of step 3", 12.5),
    GroupTrained("g1", 0),
    GroupDropped("g2", "zero_variance"),
    StepFinished(0, 1, 1),
]


def write(path: Path, events: list[object] = EVENTS) -> list[Entry]:
    ticks = iter(range(1000))
    with RecordWriter(path, source="p/driver", clock=lambda: float(next(ticks))) as writer:
        for event in events:
            writer.emit(event)
    return list(read_record(path))


class Colour(IntEnum):
    RED = 1
    BLUE = 2


@dataclass
class Part:
    number: int
    names: set[str]


@event_kind("test_nested")
class Nested:
    parts: tuple[Part, ...]
    by_number: Mapping[int, Part]
    by_colour: Mapping[Colour, float]


def test_an_event_of_nested_values_comes_back_with_its_types(tmp_path: Path) -> None:
    part = Part(3, {"b", "a"})
    event = Nested((part,), {7: part}, {Colour.BLUE: 0.5})
    (_, entry) = write(tmp_path / "record.jsonl", [event])
    assert entry.event == event
    assert [type(key) for key in (*entry.event.by_number, *entry.event.by_colour)] == [int, Colour]


def test_values_that_a_line_cannot_carry_are_refused() -> None:
    @event_kind("test_keys")
    class Keys:
        by_pair: Mapping[tuple[int, int], str]

    with pytest.raises(EventDefinitionError, match="keys of type"):
        encode_entry(Entry(0, 0.0, "p", Keys({})))
    with pytest.raises(TypeError, match="object cannot be written"):
        encode_entry(Entry(0, 0.0, "p", RecordOpened(object())))  # type: ignore[arg-type]


def test_what_is_written_comes_back_with_its_types(tmp_path: Path) -> None:
    entries = write(tmp_path / "r.jsonl")
    assert [e.event for e in entries] == [RecordOpened("p/driver"), *EVENTS]
    assert [e.seq for e in entries] == list(range(9)) and entries[4].time == 4.0
    spans = entries[3].event
    assert isinstance(spans, TokensGenerated) and spans.spans[1].version == 1


def test_a_file_that_holds_a_record_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "r.jsonl")
    with pytest.raises(RecordError, match="resume=True"):
        RecordWriter(tmp_path / "r.jsonl", source="p/driver")


@pytest.mark.slow
@given(cut=st.integers(0, 2000))
@settings(max_examples=60, deadline=None)
def test_after_a_cut_at_any_byte_the_whole_lines_survive_and_writing_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "r.jsonl"
    entries = write(path)
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data))])
    whole = data[: min(cut, len(data))].count(b"\n")
    assert list(read_record(path, recover=True)) == entries[:whole]
    with RecordWriter(path, source="p/driver", resume=True) as writer:
        writer.emit(GroupTrained("g9", 1))
    again = list(read_record(path))
    assert [e.event for e in again[:whole]] == [e.event for e in entries[:whole]]
    assert again[-1].event == GroupTrained("g9", 1) and len(again) == whole + 2


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_found_in_its_line_and_nothing_behind_it_is_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "r.jsonl"
    entries = write(path)
    data = bytearray(path.read_bytes())
    at %= len(data)
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))
    line = bytes(path.read_bytes()[:at]).count(b"\n")
    with pytest.raises(RecordDamaged, match=f"line {line + 1} .*{line} lines before it are intact"):
        list(read_record(path))
    assert list(read_record(path, recover=True)) == entries[:line]


def test_a_missing_line_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(RecordDamaged, match="line 4 .* is number 4 where 3 was expected"):
        list(read_record(path))


def test_a_newer_schema_is_refused_in_both_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    monkeypatch.setattr("nemo_rl.utils.record.SCHEMA_VERSION", 7)
    write_only = RecordWriter(path, source="p/driver")
    write_only.close()
    monkeypatch.undo()
    for recover in (False, True):
        with pytest.raises(RecordTooNew, match="line 1 has schema 7, this nemo_rl reads up to 1"):
            list(read_record(path, recover=recover))


def test_an_unregistered_event_is_refused_at_the_writer() -> None:
    with pytest.raises(EventDefinitionError, match="is not an event"):
        encode_entry(Entry(0, 0.0, "p", object()))


def test_a_room_adds_its_own_kinds_and_a_reader_without_them_still_sees_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @event_kind("test_lease")
    class Lease:
        gpus: tuple[int, ...]
        holder: str | None = None

    globals()["Lease"] = Lease
    write(tmp_path / "r.jsonl", [Lease((1, 2))])
    assert list(read_record(tmp_path / "r.jsonl"))[1].event == Lease((1, 2))
    monkeypatch.setattr("nemo_rl.utils.record_events._KINDS", {})
    assert list(read_record(tmp_path / "r.jsonl"))[1].event == UnknownEvent(
        "test_lease", {"gpus": [1, 2], "holder": None}
    )


def test_a_kind_cannot_be_taken_twice() -> None:
    with pytest.raises(EventDefinitionError, match="already"):

        @event_kind("group_admitted")
        class Other:
            x: int


def test_a_field_of_the_wrong_type_is_damage() -> None:
    line = encode_entry(Entry(0, 0.0, "p", GroupTrained("g", "seven")))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected int"):
        decode_line(line, 0)


def test_memory_and_null_records_speak_the_same_protocol() -> None:
    memory = MemoryRecord(source="a", clock=lambda: 1.0)
    for record in (memory, NullRecord()):
        record.emit(EVENTS[0])
        record.bind("b").emit(EVENTS[1])
        record.flush()
    assert [(e.seq, e.source) for e in memory.entries] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(
    "error",
    [
        RecordDamaged(Path("a"), 3, 40, "is torn"),
        RecordTooNew(Path("a"), 3, 99),
        RecordUnwritable(Path("a"), OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_a_record_reach_another_process(error: RecordError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error) and str(there) == str(error)


def test_a_reader_sees_every_line_once_while_lines_move_to_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, source="p/driver", archive_bytes=1 << 30) as writer:
        seen = []
        for event in EVENTS:
            writer.emit(event)
        writer.flush()
        move_to_archive(path)
        reader = read_record(path)
        seen.append(next(reader))
        # Behind the part of the archive that is read already.
        for event in EVENTS:
            writer.emit(event)
        writer.flush()
        move_to_archive(path)
        writer.emit(EVENTS[0])
        writer.flush()
        seen += reader
    assert [entry.event for entry in seen][1:] == [*EVENTS, *EVENTS, EVENTS[0]]


def archived(path: Path, events: list[object], resume: bool = False) -> None:
    """Writes events, each of which is moved to the archive."""
    with RecordWriter(path, source="p/driver", archive_bytes=1, resume=resume) as writer:
        for event in events:
            writer.emit(event)
            writer.flush()


def test_older_lines_are_compressed_and_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    archived(path, EVENTS)
    assert path.stat().st_size == 0
    archived(path, EVENTS, resume=True)
    link = tmp_path / "job.run.jsonl"
    link.symlink_to(path)
    for name in (path, link):
        entries = list(read_record(name))
        assert [entry.seq for entry in entries] == list(range(2 * len(EVENTS) + 2))
        assert [entry.event for entry in entries if not isinstance(entry.event, RecordOpened)] == EVENTS * 2


@pytest.mark.slow
def test_a_record_takes_a_tenth_of_the_room(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, source="driver", archive_bytes=1 << 20) as writer:
        for number in range(6000):
            spans = (RecordedSpan(0, 12, 40),)
            writer.emit(TokensGenerated(f"1099511627776-{number}-0", f"g{number // 8}", spans))
        writer.flush()
        plain = sum(len(encode_entry(entry)) for entry in read_record(path))
    assert archive_of(path).stat().st_size * 8 < plain


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 400))
def test_a_move_that_was_cut_off_loses_and_repeats_nothing(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "record.jsonl"
    archived(path, EVENTS[:3])
    write_more = RecordWriter(path, source="p/driver", resume=True)
    for event in EVENTS[3:]:
        write_more.emit(event)
    write_more.close()
    growing, before = path.read_bytes(), archive_of(path).read_bytes()
    expected = [entry.event for entry in read_record(path)]
    move_to_archive(path)
    # Killed while the archive grew, or before the growing file was emptied.
    archive_of(path).write_bytes(archive_of(path).read_bytes()[: len(before) + kept])
    path.write_bytes(growing)
    assert [entry.event for entry in read_record(path)] == expected
    archived(path, EVENTS[:1], resume=True)
    entries = list(read_record(path))
    assert [entry.event for entry in entries][:-2] == expected
    assert [entry.seq for entry in entries] == list(range(len(expected) + 2))


@pytest.mark.parametrize("spoil", ["first byte", "middle", "size field", "zeros at the end", "cut", "first piece gone"])
@pytest.mark.parametrize("growing", [False, True])
def test_a_damaged_archive_is_named_and_nothing_of_it_is_removed(spoil: str, growing: bool, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    archived(path, EVENTS[:4])
    before = archive_of(path).stat().st_size
    archived(path, EVENTS, resume=True)
    if growing:
        with RecordWriter(path, source="p/driver", resume=True) as writer:
            writer.emit(EVENTS[0])
    whole = list(read_record(path))
    data = bytearray(archive_of(path).read_bytes())
    at = {"first byte": before, "middle": before + 40, "size field": len(data) - 30}.get(spoil)
    if at is not None:
        data[at] ^= 0x55
    elif spoil == "zeros at the end":
        data[-60:] = bytes(60)
    else:
        data = data[:-20] if spoil == "cut" else data[50:]
    archive_of(path).write_bytes(data)
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RecordDamaged, match=r"line \d+ \(byte \d+\) .*lines before it are intact") as found:
        list(read_record(path))
    assert not found.value.torn
    assert list(read_record(path, recover=True)) == whole[: found.value.intact]
    assert (found.value.intact > 4) == (spoil != "first piece gone")
    assert found.value.intact < len(whole) or spoil == "cut"
    with pytest.raises(RecordDamaged, match="lines before it are intact"):
        RecordWriter(path, source="p/driver", resume=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("line", [0, 2, 5])
def test_lines_behind_damage_are_kept_beside_a_record_that_goes_on(line: int, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"src"', b'"SRC"')
    for number in (0, 1):
        path.write_bytes(b"".join(lines))
        with RecordWriter(path, source="p/driver", resume=True) as writer:
            writer.emit(EVENTS[0])
        assert len(list(read_record(path))) == line + 2
        assert path.with_name(f"record.jsonl.cut{number}").read_bytes() == b"".join(lines[line:])


def test_lines_that_a_full_disk_takes_in_part_are_written_whole_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    writer = RecordWriter(path, source="driver", flush_interval_s=0.0)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 150, hard))
        for event in EVENTS:
            writer.emit(event)  # fails for no disk
        for _ in range(2):
            with pytest.raises(RecordUnwritable, match=r"record\.jsonl cannot be written"):
                writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    writer.emit(EVENTS[0])
    writer.close()
    assert [entry.event for entry in read_record(path)][1:] == [*EVENTS, EVENTS[0]]


@pytest.mark.parametrize("flushed", [False, True])
def test_lines_that_are_lost_at_the_end_are_said_once(flushed: bool, tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "record.jsonl", source="driver", flush_interval_s=0.0)
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)  # type: ignore[assignment]  # noqa: SIM115 - the writer closes it
    writer.emit(EVENTS[0])
    if flushed:
        with pytest.raises(RecordUnwritable):
            writer.flush()
    with nullcontext() if flushed else pytest.raises(RecordUnwritable):
        writer.close()


def test_a_record_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RecordError, match=rf"{path} cannot be written: no space left on the disk"):
        RecordWriter(path, source="driver")
