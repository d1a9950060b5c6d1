"""What the history checker says of small records written by hand: time that passes, entries that mean nothing,
overtaking and its exception, the bound.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.history.checker import NothingToCheck, Violation, check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, ClusterSpec, Phase, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry, RecordWriter

LIMITS = {
    "aging_s": 10.0,
    "max_backfills": 4,
    "max_hold_s": 3600.0,
    "lease_s": 30.0,
    "quarantine_s": 300.0,
    "reap_s": 60.0,
    "min_hold_s": 10.0,
}
LATE = 1e6


def record(*lines: tuple[float, object] | tuple[float, object, str], limits: dict[str, float] = LIMITS) -> list[Entry]:
    """Entries from (time, event[, source]), behind a pool of four GPUs and the start of a scheduler."""
    opened: list[tuple[float, object]] = [(0.0, ev.PoolOpened(1, 4, limits)), (0.0, ev.SchedulerStarted(1))]
    return [
        Entry(i, line[0], line[2] if len(line) > 2 else "scheduler", line[1])
        for i, line in enumerate([*opened, *lines])
    ]


def registered(
    name: str, weight: float = 1.0, infer: tuple[int, ...] = (0, 1, 2, 3), **fixed: tuple[int, ...]
) -> ev.Registered:
    clusters = [ClusterSpec(cluster, 1, gpus) for cluster, gpus in fixed.items()]
    return ev.Registered(name, 0, "ns", (*clusters, ClusterSpec(ACTOR_INFER, 1, infer)), weight=weight)


A = registered("a", actor_train=(0, 1))


def broken(violations: list[Violation]) -> set[int]:
    return {violation.invariant for violation in violations}


def wants(
    name: str, number: int, at: float, cluster: str = ACTOR_TRAIN, priority: Priority = Priority.ACTOR_TRAINING
) -> tuple[float, object]:
    return at, ev.Requested(name, cluster, priority, number, number)


def gets(
    name: str,
    number: int,
    at: float,
    gpus: tuple[int, ...],
    epoch: int,
    cluster: str = ACTOR_TRAIN,
    priority: Priority = Priority.ACTOR_TRAINING,
) -> list[tuple[float, object]]:
    return [
        (at, ev.Claimed(epoch, name, cluster, -1, number, gpus)),
        (at, ev.Granted(name, cluster, epoch, gpus, priority, number, number, at + 3600.0)),
    ]


def releases(name: str, at: float, epoch: int, cluster: str = ACTOR_TRAIN) -> tuple[float, object]:
    return at, ev.Released(name, cluster, epoch, 0)


# Time passes in every entry.

OPEN = {
    "wait": ([(1.0, rec.WaitBegun("w", "something", 10.0), "a/driver")], 8),
    "command": ([(1.0, ev.CommandSent("1.1", "a", "serve", 0, "", 1, 10.0))], 8),
    "hold": ([wants("a", 1, 1.0), *gets("a", 1, 1.0, (0, 1), 1)], 8),
    "request": ([wants("a", 1, 1.0)], 9),
    "unscheduled": ([(1.0, ev.DemandReported("a", 8, 0, 1, 1))], 9),
}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("source", ["scheduler", "a/driver"])
@pytest.mark.parametrize("what", OPEN)
def test_what_is_open_long_after_its_time_is_found_whoever_says_that_time_has_passed(
    what: str, source: str, ended: bool
) -> None:
    lines, invariant = OPEN[what]
    passing = ev.DemandReported("a", 9, 0, 1, 2) if source == "scheduler" else rec.StepBegun(0)
    assert invariant in broken(check(record((0.5, A), *lines, (LATE, passing, source)), ended=ended))
    assert invariant not in broken(check(record((0.5, A), *lines, (9.0, passing, source)), ended=ended))


def test_a_jump_that_the_schedulers_clock_leaves_out_makes_nothing_late() -> None:
    lines = [
        (1.0, A),
        (2.0, rec.WaitBegun("w", "something", 600.0), "a/driver"),
        (3.0, ev.ClockJumped(-3600.0)),
        (4000.0, ev.DemandReported("a", 0, 0, 1, 1)),
    ]
    assert check(record(*lines), ended=False) == []


# Entries that mean nothing.

NONSENSE = {
    "grant to nobody": ev.Granted("x", ACTOR_TRAIN, 1, (0,), Priority.ACTOR_TRAINING, 0, 0, 9.0),
    "release by nobody": ev.Released("x", ACTOR_TRAIN, 1, 0),
    "demand of nobody": ev.DemandReported("x", 1, 0, 1, 1),
    "claim for nobody": ev.Claimed(1, "x", ACTOR_TRAIN, -1, 1, (0,)),
    "unknown cluster": ev.Requested("a", "critic", Priority.CRITIC_TRAINING, 1, 1),
    "unknown rank": ev.RankMoved("a", 17, Phase.RISING, 1),
    "claim outside the pool": ev.Claimed(1, "a", ACTOR_TRAIN, -1, 1, (99,)),
    "claim of more than the mapping": ev.Claimed(1, "a", ACTOR_INFER, 0, -1, (0, 1)),
    "quarantine outside the pool": ev.GpusQuarantined((99,), "a", 0, 0, 9.0, "x"),
    "mapping outside the pool": registered("b", infer=(7,)),
    "registered twice": A,
    "granted unasked": ev.Granted("a", ACTOR_TRAIN, 1, (0, 1), Priority.ACTOR_TRAINING, 0, 0, 9.0),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_entry_that_means_nothing_is_a_violation_with_its_line(what: str) -> None:
    found = check(record((1.0, A), (2.0, NONSENSE[what])), ended=False)
    assert (found[0].invariant, found[0].seq) == (10, 3), found


def test_a_rank_that_wakes_after_its_pipeline_is_gone_is_a_violation() -> None:
    found = check(
        record((1.0, A), (2.0, ev.Unregistered("a", 0, "left")), (3.0, ev.RankMoved("a", 0, Phase.RISING, 1)))
    )
    assert (found[0].invariant, found[0].seq) == (10, 4)


@pytest.mark.parametrize("source", ["scheduler", "a/driver"])
def test_time_that_goes_back_within_one_source_is_a_violation(source: str) -> None:
    event = ev.RankCooling("a", 0, 200.0) if source == "scheduler" else rec.StepBegun(0)
    assert check(record((1.0, A), (128.35, event, source), (129.0, event, source)), ended=False) == []
    found = check(record((1.0, A), (128.35, event, source), (1.0, event, source)), ended=False)
    assert [(violation.invariant, violation.seq) for violation in found] == [(10, 4)]


def test_a_grant_for_another_step_than_was_asked_for_is_a_violation() -> None:
    granted = ev.Granted("a", ACTOR_TRAIN, 1, (0, 1), Priority.ACTOR_TRAINING, 77, 3, 9.0)
    found = check(record((1.0, A), wants("a", 3, 2.0), (3.0, granted)), ended=False)
    assert "step 77" in found[0].message and "step 3" in found[0].message


# Overtaking.


def test_a_request_may_not_be_passed_too_often_nor_without_being_named() -> None:
    lines: list[tuple[float, object]] = [
        (1.0, registered("p", actor_train=(0,))),
        (1.0, registered("q", actor_train=(0, 1))),
        wants("q", 1, 3.0),
    ]
    for turn in range(1, 7):
        at = 4.0 + 2 * turn
        lines += [wants("p", turn, at), *gets("p", turn, at, (0,), 1 + turn), releases("p", at + 1, 1 + turn)]
    found = check(record(*lines), ended=False)
    counted = [violation for violation in found if "th time" in violation.message]
    assert [violation.invariant for violation in counted] == [9, 9] and "for the 5th time" in counted[0].message
    assert "behind it in the queue" in found[0].message and {violation.invariant for violation in found} == {9}


# The bound.


def long_wait(*faults: tuple[float, object], weight: float = 1.0, seconds: float = 3000.0) -> set[int]:
    """The invariants broken when q waits for so long, while others' ranks cool off."""
    others = registered("z", infer=(2, 3), actor_train=(2,))
    lines = [
        (1.0, registered("q", weight, infer=(0, 1), actor_train=(0,))),
        (1.0, others),
        wants("q", 1, 2.0),
        *faults,
        *gets("q", 1, 2.0 + seconds, (0,), 9),
    ]
    return broken(check(record(*lines), ended=False))


def cooling(pipeline: str, at: float) -> tuple[float, object]:
    return at, ev.RankCooling(pipeline, 0, at + 300.0)


def test_faults_lengthen_only_the_waits_that_they_touch_and_a_second_counts_once() -> None:
    assert long_wait() == {9}
    assert long_wait(*(cooling("z", 10.0 + 60 * i) for i in range(48))) == {9}, (
        "of GPUs that nobody in the queue shares"
    )
    assert long_wait(*(cooling("q", 10.0) for _ in range(48))) == {9}, "all at the same time"
    assert long_wait(*(cooling("q", 10.0 + 300 * i) for i in range(9))) == set(), (
        "nearly all of the wait was spent on faults"
    )


def test_turns_count_with_the_weight_of_the_pipelines_up_to_four() -> None:
    # Nine time slices are ahead at most, 60 s for aging: 9 x (30 + 60 + 10 x weight).
    assert long_wait(seconds=1100.0) == {9}
    assert long_wait(seconds=1100.0, weight=4.0) == set()
    assert long_wait(seconds=1300.0, weight=100.0) == {9}


# A log that is lost as a whole.


def test_pipelines_may_hold_what_a_log_that_is_lost_as_a_whole_had_given_them() -> None:
    held = ev.MemoryTaken("rank 0", (0,))
    signed = [(5.0, rec.RecordOpened("scheduler")), (5.0, ev.LogSigned("here/2"))]
    begun_anew = [
        *signed,
        (5.0, ev.PoolOpened(1, 4, LIMITS)),
        (5.0, ev.SchedulerStarted(2, complete=False)),
        (6.0, A),
        (36.0, ev.InventoryDone(2)),
    ]
    lines: list[tuple[float, object, str]] = [
        (1.0, held, "a/driver"),
        *((time, event, "scheduler") for time, event in begun_anew),
    ]
    entries = [Entry(i, time, source, event) for i, (time, event, source) in enumerate(lines)]
    assert [violation.message for violation in check(entries, ended=False)] == [
        "after taking stock GPU 0 is called free while a/rank 0 occupies its memory"
    ]
    entries[6:6] = [Entry(6, 6.5, "a/driver", ev.MemoryFreed("rank 0", (0,)))]
    assert check(entries, ended=False) == []
    entries[5] = Entry(5, 5.0, "b/driver", held)
    assert broken(check(entries, ended=False)) >= {1}


# Records from which nothing follows.


def test_a_record_without_entries_or_without_the_beginning_of_the_schedulers_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NothingToCheck, match="0 entries"):
        check([])
    with pytest.raises(NothingToCheck, match="ts_pool_opened"):
        check([Entry(0, 0.0, "a/driver", ev.MemoryTaken("rank 0", (0,)))])
    RecordWriter(tmp_path / "empty.jsonl", source="run").close()
    assert main(["check", str(tmp_path / "empty.jsonl")]) == 2
    assert "nothing can be proven" in capsys.readouterr().err


def test_the_record_of_one_training_run_is_checked_for_its_prompts() -> None:
    run = [Entry(0, 0.0, "run/driver", rec.GroupAdmitted("g", "p", 1, 0))]
    assert broken(check(run)) == {2}
    assert check([*run, Entry(1, 1.0, "run/driver", rec.GroupDropped("g", "end_of_run"))]) == []


@pytest.mark.parametrize(("recomputed", "marked"), [(True, False), (False, True), (False, False)])
def test_a_sample_that_went_on_over_old_keys_and_values_must_be_marked(recomputed: bool, marked: bool) -> None:
    events = [
        rec.SyncStarted("s0", 0, (0,)),
        rec.SyncFinished("s0", 0, "done"),
        rec.GroupAdmitted("g", "p", 1, 0),
        rec.RequestSubmitted("r", 0, "g-0"),
        rec.SyncStarted("s1", 1, (0,), "refresh", recomputed),
        rec.SyncFinished("s1", 1, "done"),
        rec.RequestFinished("r", 0, "done", 4),
        rec.TokensGenerated("g-0", "g", (rec.RecordedSpan(0, 0, 2), rec.RecordedSpan(1, 2, 4)), marked),
        rec.GroupDropped("g", "end_of_run"),
    ]
    entries = [Entry(i, float(i), "run/driver", event) for i, event in enumerate(events)]
    assert broken(check(entries)) == (set() if recomputed or marked else {3})


@pytest.mark.parametrize(
    ("stamped", "outcome", "tokens_first", "is_fine"),
    [
        (1, "done", True, True),
        (1, "done", False, True),
        (0, "failed", True, True),
        (0, "failed", False, True),
        (1, "failed", True, False),
        (1, "failed", False, False),
        (2, "done", True, False),
    ],
)
def test_a_shard_serves_on_with_the_new_weights_before_the_sync_of_all_shards_is_over(
    stamped: int, outcome: str, tokens_first: bool, is_fine: bool
) -> None:
    ends = [
        rec.TokensGenerated("g-0", "g", (rec.RecordedSpan(0, 0, 3), rec.RecordedSpan(stamped, 3, 4))),
        rec.SyncFinished("s1", 1, outcome),
    ]
    events = [
        rec.SyncStarted("s0", 0, (0, 1)),
        rec.SyncFinished("s0", 0),
        rec.GroupAdmitted("g", "p", 1, 0),
        rec.RequestSubmitted("r", 0, "g-0"),
        rec.SyncStarted("s1", 1, (0, 1), recompute_kv=True),
        rec.RequestFinished("r", 0, "done", 4),
        *(ends if tokens_first else ends[::-1]),
        rec.GroupDropped("g", "end_of_run"),
    ]
    entries = [Entry(i, float(i), "run/driver", event) for i, event in enumerate(events)]
    assert broken(check(entries)) == (set() if is_fine else {3})
