"""What a submission says: what a job takes, when it can begin and why not now, and what can never fit."""

from __future__ import annotations

import math
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config import ConfigError
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress, Standing, Wishes
from nemo_rl.time_sharing.log.sharing import Sharing
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.pipelines import admission
from nemo_rl.time_sharing.pipelines.admission import NeverFits, doubt, estimated_needs, what_it_takes
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pipelines.residents import SlotBytes
from nemo_rl.time_sharing.pipelines.slot_choice import Needs
from nemo_rl.time_sharing.planning.plan import Snapshot, reason_text
from nemo_rl.time_sharing.planning.planner import expected_start
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, ClusterSpec, Phase, Priority
from nemo_rl.time_sharing.viewing.standings_table import cells

GIB = 1 << 30
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


class Told(SchedulerState):
    """A pool of two GPUs with the jobs `a` and `b`, which both train on GPU 0."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(ev.PoolOpened(1, 2, {}), 0.0)
        clusters = (ClusterSpec(ACTOR_TRAIN, 1, (0,)), ClusterSpec(ACTOR_INFER, 1, (0, 1)))
        for name in ("a", "b"):
            self.apply(ev.Registered(pipeline=name, incarnation=1, namespace=name, clusters=clusters), 0.0)

    def hold(self, name: str, begin: float, priority: Priority = Priority.ACTOR_TRAINING) -> None:
        epoch = self.epoch + 1
        self.apply(ev.Granted(name, ACTOR_TRAIN, epoch, (0,), priority, 0, epoch, begin + 1000), begin)

    def held(self, name: str, begin: float, end: float) -> None:
        self.hold(name, begin)
        self.apply(ev.Released(name, ACTOR_TRAIN, self.epoch, 1), end)

    def wants(self, name: str, since: float) -> None:
        self.apply(ev.Requested(name, ACTOR_TRAIN, Priority.ACTOR_TRAINING, self.epoch + 1, 1), since)

    def asked(self, now: float, gpus: tuple[int, ...] = (0,)) -> tuple[float, str]:
        seconds, because = expected_start(Snapshot.of(self), now, "new", gpus)
        return seconds, "" if because is None else reason_text(because, now)


def test_a_job_begins_at_once_where_gpus_are_free_or_engines_make_way() -> None:
    told = Told()
    assert told.asked(1.0) == (0.0, "")
    told.apply(ev.DemandReported("a", 8, 0, 1, 1), 1.0)
    told.apply(ev.RankMoved("a", 0, Phase.RISING, 1), 1.0)
    told.apply(ev.RankMoved("a", 0, Phase.SERVING, 1), 2.0)
    assert told.asked(30.0) == (0.0, "")


def test_a_job_waits_for_a_hold_as_long_as_holds_last() -> None:
    told = Told()
    told.held("a", 10.0, 30.0)
    told.hold("a", 40.0)
    assert told.asked(45.0) == (15.0, "GPU 0 is held by actor_train of a until it releases")
    # It lasts longer than it used to, so it may end at any moment.
    assert told.asked(70.0)[0] == 0.0 and "is held by" in told.asked(70.0)[1]
    assert told.asked(45.0, (1,)) == (0.0, "")


def test_a_job_is_behind_what_was_asked_for_long_before() -> None:
    told = Told()
    told.held("b", 0.0, 20.0)
    told.held("a", 20.0, 30.0)
    told.hold("a", 100.0)
    told.wants("b", 101.0)
    # A start comes before what was asked for a moment ago, and behind what was asked for long before.
    assert told.asked(104.0) == (6.0, "GPU 0 is held by actor_train of a until it releases")
    long_after = 101.0 + 2 * told.limits.aging_s
    assert told.asked(long_after) == (20.0, "GPU 0 is held by actor_train of a until it releases")


def test_how_long_a_first_hold_lasts_is_unknown() -> None:
    told = Told()
    told.hold("a", 1.0, Priority.INITIALIZATION)
    seconds, why = told.asked(2.0)
    assert math.isinf(seconds) and why == "GPU 0 is held by actor_train of a until it releases"
    said = what_it_takes((0,), (0, 1), None, seconds, why, "GPU")
    assert said.endswith("; cannot begin yet, for an unknown time: " + why)


def test_a_sentence_names_gpus_and_memory() -> None:
    needs = Needs("x", 12 * GIB, 45 * GIB)
    assert what_it_takes((0, 1), (0, 1, 2, 3), needs, 90.0, "GPU 0 is held by a", "GPU") == (
        "trains on GPUs 0, 1 (about 45.0 GiB of each), generates on GPUs 0 to 3 (about 12.0 GiB of each); can "
        "begin in about 1m 30s: GPU 0 is held by a"
    )
    assert what_it_takes((), (1,), None, 0.0, "", "CPU slot") == "runs on CPU slot 1; can begin at once"


def test_what_can_never_fit_is_refused_and_a_doubt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = read_jobs([CONFIGS / "grpo_arithmetic_cpu.yaml"], Pool(1, 2))
    needs = Needs(job.name, 44 * GIB, 90 * GIB, weights=30 * GIB)
    monkeypatch.setattr(admission, "needs_of", lambda job: needs)
    assert estimated_needs(job, None) is None and doubt(None, SlotBytes(GIB, GIB)) == ""
    assert estimated_needs(job, SlotBytes(30 * GIB, 80 * GIB)) == needs
    assert doubt(needs, SlotBytes(50 * GIB, 90 * GIB)) == ""
    # A trainer may keep less on its GPU than is estimated, so it is not refused.
    assert re.fullmatch(
        r"; it may not fit: the trainer of \S+ needs about 90.0 GiB and would have 80.0 GiB",
        doubt(needs, SlotBytes(50 * GIB, 80 * GIB)),
    )
    with pytest.raises(NeverFits, match="30.0 GiB of weights on each GPU, and a slot of this pool has 20.0 GiB; raise"):
        estimated_needs(job, SlotBytes(20 * GIB, 80 * GIB))

    def not_here(job: object) -> Needs:
        raise OSError("no such model")

    monkeypatch.setattr(admission, "needs_of", not_here)
    assert estimated_needs(job, SlotBytes(GIB, GIB)) is None


def standing(
    wishes: Wishes, *, left_s: float | None = None, ended_at: float | None = None, slowdown: float = 1.0, kind: str = ""
) -> Standing:
    return Standing(
        "a",
        (0,),
        (0,),
        0.0,
        ended_at=ended_at,
        progress=None if left_s is None else Progress("training", 1, 9, "", left_s=left_s),
        outcome=Outcome(kind) if kind else None,
        sharing=Sharing(0.5, slowdown, 3.0),
        wishes=wishes,
    )


@pytest.mark.parametrize(
    ("wishes", "stands", "said"),
    [
        (Wishes(), {}, {}),
        (Wishes(1.5), {"slowdown": 1.5}, {"max_slowdown": "at most 1.5: kept"}),
        (Wishes(1.5), {"slowdown": 1.75}, {"max_slowdown": "at most 1.5: missed by 0.25"}),
        (Wishes(None, 200.0), {}, {"finish_by": "unknown yet"}),
        (Wishes(None, 90.0), {}, {"finish_by": "missed by 10 s so far"}),
        (Wishes(None, 200.0), {"left_s": 40.0}, {"finish_by": "kept: will end 60 s before"}),
        (Wishes(None, 200.0), {"left_s": 140.0}, {"finish_by": "missed: will end 40 s after"}),
        (Wishes(None, 200.0), {"ended_at": 90.0, "kind": "done"}, {"finish_by": "kept: ended 110 s before"}),
        (Wishes(None, 80.0), {"ended_at": 90.0, "kind": "done"}, {"finish_by": "missed: ended 10 s after"}),
        (Wishes(None, 200.0), {"ended_at": 90.0, "kind": "failed"}, {"finish_by": "missed: failed"}),
    ],
)
def test_wishes_are_kept_or_missed_by_so_much(
    wishes: Wishes, stands: dict[str, Any], said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    found = standing(wishes, **stands)
    assert found.kept(100.0) == said
    row = " ".join(cells(found))
    assert all(text in row for text in said.values())


def test_wishes_are_read_from_a_wrapper_and_refused_with_their_key(tmp_path: Path) -> None:
    def job_of(wishes: str) -> Job:
        wrapper = tmp_path / "wrapper.yaml"
        wrapper.write_text(f"nemo_config_path: {CONFIGS / 'grpo_arithmetic_cpu.yaml'}\n{wishes}\n")
        return read_jobs([wrapper], Pool(1, 2))[0]

    assert job_of("").wishes == Wishes()
    by = datetime(2931, 5, 17, 18, 0).astimezone().timestamp()
    assert job_of("max_slowdown: 2\nfinish_by: 2931-05-17 18:00:00").wishes == Wishes(2.0, by)
    assert job_of("finish_by: 2931-05-17T18:00").wishes == Wishes(None, by)
    zoned = job_of('finish_by: "2931-05-17 18:00+00:00"').wishes.finish_by
    assert zoned == datetime(2931, 5, 17, 18, 0, tzinfo=UTC).timestamp()
    for wrong, message in {
        "max_slowdown: 0.5": "max_slowdown: 0.5; expected a number from 1",
        "max_slowdown: true": "max_slowdown: True; expected a number from 1",
        "max_slowdown: .nan": "max_slowdown: nan; expected a number from 1",
        "finish_by: 2001-05-17 18:00": "finish_by: 2001-05-17 18:00 has passed",
        "finish_by: tomorrow": "finish_by: 'tomorrow'; expected a day and a time",
        "finish_by: 18": "finish_by: 18; expected a day and a time",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            job_of(wrong)
