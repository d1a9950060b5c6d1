"""Accounts of a pool: who had which GPUs for what, to the second, and what came of it."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.accounts import BY, POOL, Accounts, Use, accounts_of, statement
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, ClusterSpec, Phase, Priority
from nemo_rl.time_sharing.viewing.page_server import PoolView, prometheus_text
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry, encode_entry, read_record

EXAMPLES = Path(__file__).parents[2] / "examples" / "time_sharing"
MIDNIGHT = 86400.0 * 20_000


def rank(number: int, phase: Phase, epoch: int = 1) -> ev.RankMoved:
    return ev.RankMoved("a", number, phase, epoch)


def demand(target: int, done: int) -> ev.DemandReported:
    return ev.DemandReported("a", target, done, 1, target + done)


def a_life(begin: float, slots_per_gpu: int = 1) -> Iterator[tuple[float, str, object]]:
    """One job on two GPUs: it starts for 10 s, generates for 20, idles for 5, trains for 30 and dies."""
    clusters = (ClusterSpec(ACTOR_TRAIN, 1, (0,)), ClusterSpec(ACTOR_INFER, 1, (0, 1)))
    yield begin, "scheduler", ev.PoolOpened(1, 2, {}, slots_per_gpu)
    yield begin, "scheduler", ev.SchedulerStarted(1)
    yield begin, "scheduler", ev.Registered(pipeline="a", incarnation=1, namespace="n", clusters=clusters)
    yield begin, "scheduler", ev.Claimed(1, "a", ACTOR_TRAIN, -1, 1, (0,))
    yield begin + 2, "scheduler", ev.Granted("a", ACTOR_TRAIN, 1, (0,), Priority.INITIALIZATION, -1, 1, begin + 99)
    yield begin + 10, "scheduler", ev.Released("a", ACTOR_TRAIN, 1, 0)
    yield begin + 10, "scheduler", demand(8, 0)
    yield begin + 10, "scheduler", ev.Claimed(2, "a", ACTOR_INFER, 1, -1, (1,))
    yield begin + 11, "scheduler", rank(1, Phase.RISING, 2)
    yield begin + 16, "scheduler", rank(1, Phase.SERVING, 2)
    yield begin + 20, "a/run", rec.GroupAdmitted("0-0", "p", 4, 0)
    yield (
        begin + 30,
        "a/run",
        rec.TokensGenerated("0-0-0", "0-0", (rec.RecordedSpan(0, 0, 7), rec.RecordedSpan(1, 7, 9))),
    )
    yield begin + 36, "scheduler", demand(8, 8)
    yield begin + 41, "scheduler", ev.Claimed(3, "a", ACTOR_TRAIN, -1, 2, (0,))
    yield begin + 41, "scheduler", ev.Granted("a", ACTOR_TRAIN, 3, (0,), Priority.ACTOR_TRAINING, 0, 2, begin + 999)
    yield begin + 60, "a/run", rec.GroupTrained("0-0", 0)
    yield begin + 60, "a/run", rec.StepFinished(0, 1)
    yield begin + 71, "scheduler", ev.Fenced("a", 1, "gone")
    yield begin + 75, "scheduler", ev.Unregistered("a", 1, "reaped")
    yield begin + 75, "scheduler", ev.GpusQuarantined((1,), "a", 1, -1, begin + 200, "busy")
    yield begin + 80, "scheduler", ev.GpusCleared((1,), "a", 1, -1)
    yield begin + 100, "scheduler", ev.LogClosed()


def entries_of(told: Iterable[tuple[float, str, object]]) -> list[Entry]:
    return [Entry(number, time, source, event) for number, (time, source, event) in enumerate(told)]


@pytest.mark.parametrize("slots_per_gpu", [1, 2])
def test_every_second_of_a_gpu_is_on_one_account(slots_per_gpu: int) -> None:
    accounts = accounts_of(entries_of(a_life(MIDNIGHT + 100, slots_per_gpu)))
    (day,) = {key.day for key in accounts.by_key}
    (own,) = (account for key, account in accounts.by_key.items() if key.job == "a")
    wanted = {
        Use.STARTED: 8 + 5,
        Use.GENERATED: 20,
        # It goes on serving with nothing to do while the job trains, and until the job is cut off.
        Use.HELD_IDLE: 35,
        Use.TRAINED: 30,
        Use.HANDED_OVER: 2 + 1,
        Use.LOST: 2 * 4 + 5,
        Use.FREE: 0,
    }
    assert own.seconds == pytest.approx({use: seconds / slots_per_gpu for use, seconds in wanted.items()})
    assert (own.steps, own.samples, own.tokens) == (1, 4, 9)
    assert day == "2024-10-04"
    free = sum(account.seconds[Use.FREE] for account in accounts.by_key.values())
    assert accounts.pool_s == pytest.approx(2 * 100) and free == pytest.approx(200 - own.total_s)


def test_a_node_is_on_the_accounts_and_among_the_pools_gpus_while_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes of two GPUs, the second for the seconds 10 to 30 and 50 to 100 of 100, and free but for a fault."""
    told: list[tuple[float, str, object]] = [
        (0.0, "scheduler", ev.PoolOpened(2, 2, {}, 2)),
        (0.0, "scheduler", ev.NodeAway(1)),
        (0.0, "scheduler", ev.SchedulerStarted(1)),
        (10.0, "scheduler", ev.NodeHere(1)),
        (20.0, "scheduler", ev.NodeDraining(1, 60.0)),
        (25.0, "scheduler", ev.GpusQuarantined((4, 5), "a", 1, -1, 200.0, "busy")),
        (30.0, "scheduler", ev.NodeAway(1)),
        (40.0, "scheduler", ev.GpusCleared((4, 5), "a", 1, -1)),
        (50.0, "scheduler", ev.NodeHere(1)),
        (100.0, "scheduler", ev.LogClosed()),
    ]
    entries = entries_of(told)
    accounts = accounts_of(entries)
    uses: Counter[Use] = Counter()
    for account in accounts.by_key.values():
        uses.update(account.seconds)
    assert {use: s for use, s in uses.items() if s} == {Use.FREE: 2 * 100 + 2 * 70 - 5, Use.LOST: 5}
    assert accounts.pool_s == 2 * 100 + 2 * 70
    assert [found for found in check(entries) if "account" in str(found)] == []
    for end, gpus in ((2, 2), (4, 4), (5, 4), (7, 2), (9, 4)):
        assert f"nrl_pool_gpus {gpus}.0\n".encode() in prometheus_text(build_timeline(entries[:end]), [])
    opened_again = [*told[:2], (10.0, "scheduler", told[0][2]), (20.0, "scheduler", ev.LogClosed())]
    assert accounts_of(entries_of(opened_again)).pool_s == 2 * 10 + 4 * 10, "a new pool has all of its nodes"
    use_of = Accounts._use_of

    def counts_what_is_away(self: Accounts, slot: int) -> tuple[str, Use | None]:
        job, use = use_of(self, slot)
        return job, use or Use.FREE

    monkeypatch.setattr(Accounts, "_use_of", counts_what_is_away)
    assert "the accounts add up to 200.0 GPU-seconds, the pool had 140.0" in str(check(entries))


def test_a_name_that_two_users_have_used_is_on_two_accounts() -> None:
    told = list(a_life(MIDNIGHT))
    mine = [
        (time, s, replace(e, user="ada", group="vision") if isinstance(e, ev.Registered) else e) for time, s, e in told
    ]
    later = [(time + 200, s, e) for time, s, e in told[2:-1]]
    later = [
        (time, s, replace(e, user="bob", group="speech", incarnation=2) if isinstance(e, ev.Registered) else e)
        for time, s, e in later
    ]
    accounts = accounts_of(entries_of([*mine[:-1], *later]))
    rows = {row[0]: row for row in statement(accounts, "user")}
    names = rows["user"]
    assert [*rows] == ["user", "(no job)", "ada", "bob", "all"]
    assert rows["ada"][1 : names.index("free")] == rows["bob"][1 : names.index("free")]
    assert [row[0] for row in statement(accounts, "group")] == ["group", "(no job)", "speech", "vision", "all"]
    assert sum(float(row[names.index("all")]) for row in [*rows.values()][1:-1]) == pytest.approx(accounts.pool_s)


def test_a_day_ends_at_midnight() -> None:
    accounts = accounts_of(entries_of(a_life(MIDNIGHT - 50)))
    days = sorted({key.day for key in accounts.by_key})
    assert days == ["2024-10-03", "2024-10-04"]
    by_day = [sum(account.total_s for key, account in accounts.by_key.items() if key.day == day) for day in days]
    assert by_day == pytest.approx([100, 100])
    trained = [account.seconds[Use.TRAINED] for key, account in sorted(accounts.by_key.items()) if key.job == "a"]
    assert trained == pytest.approx([9, 21])


@pytest.fixture(scope="module")
def faulty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accounts") / "faults.jsonl"
    scenario = str(EXAMPLES / "with_faults.yaml")
    assert main(["simulate", scenario, "--log", str(path), "--only-ours"]) == 0
    return path


@pytest.mark.parametrize("by", BY)
def test_sums_of_a_run_with_faults_are_the_pools_time(
    faulty_log: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["account", str(faulty_log), "--by", by, "--csv"]) == 0
    names, *rows, sums = csv.reader(io.StringIO(capsys.readouterr().out))
    column = names.index("GPU-seconds" if by == "use" else "all")
    pool_s = accounts_of(list(read_record(faulty_log))).pool_s
    assert sum(float(row[column]) for row in rows) == pytest.approx(pool_s, abs=1.0)
    assert float(sums[column]) == pytest.approx(pool_s, abs=1.0)
    assert main(["account", str(faulty_log), "--by", by]) == 0
    table = capsys.readouterr().out
    assert f"{float(sums[column]):,.0f}" in table and "lost to faults" in table


def test_the_page_shows_the_accounts_of_a_pool(faulty_log: Path, tmp_path: Path) -> None:
    (tmp_path / "scheduler.jsonl").write_bytes(
        b"".join(
            encode_entry(replace(entry, seq=number))
            for number, entry in enumerate(e for e in read_record(faulty_log) if e.source == "scheduler")
        )
    )
    shown: Any = PoolView(tmp_path).data()["accounts"]
    by_job, by_day = shown
    accounts = accounts_of(list(read_record(faulty_log)))
    assert by_job[0] == ["job", *by_day[0][1:]] and by_day[-1][1:] == by_job[-1][1:]
    whole = by_job[0].index("all")
    assert by_job[-1][whole] == f"{accounts.pool_s:,.0f}"
    assert {row[0] for row in by_job[1:-1]} == {key.job for key in accounts.by_key}


def test_check_finds_time_that_is_on_no_account_or_on_the_wrong_one(
    faulty_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(read_record(faulty_log))
    assert check(entries) == []
    settle, use_of = Accounts._settle, Accounts._use_of

    def forgets(self: Accounts, slot: int, until: float) -> None:
        if self._uses[slot][1] is Use.HANDED_OVER:
            self._since[slot] = until
        settle(self, slot, until)

    def takes_claims_for_free(self: Accounts, slot: int) -> tuple[str, Use | None]:
        job, use = use_of(self, slot)
        return (POOL, Use.FREE) if use is Use.HANDED_OVER else (job, use)

    with monkeypatch.context() as patch:
        patch.setattr(Accounts, "_settle", forgets)
        assert "the accounts add up to" in str(check(entries)[0])
    monkeypatch.setattr(Accounts, "_use_of", takes_claims_for_free)
    assert "GPU-seconds free" in str(check(entries)[0])


def test_a_log_that_contradicts_itself_has_no_accounts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [item for item in a_life(0.0) if not isinstance(item[2], ev.Registered)]
    path = tmp_path / "scheduler.jsonl"

    def write(source: str) -> None:
        entries = entries_of(item for item in told if item[1] == source)
        path.write_bytes(b"".join(map(encode_entry, entries)))

    write("scheduler")
    assert main(["account", str(path)]) == 2
    assert "(Granted) at 2.000 s contradicts those before it" in capsys.readouterr().err
    write("a/run")
    assert main(["account", str(path)]) == 2
    assert "give scheduler.jsonl of the pool's folder" in capsys.readouterr().err
