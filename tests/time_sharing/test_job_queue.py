"""The queue before a pool: quotas are never exceeded, nobody waits without a reason, and a restart loses no job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.job_queue import JobLimits, JobQueueLimits, Owner
from nemo_rl.time_sharing.log.pool_state import Outcome
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.pool_jobs import PoolError, PoolOptions
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.team import Team, User

_OWNERS = [Owner("ann", "vision"), Owner("bob", "nlp"), Owner("eve", "lab")]
_GROUPS = {"lab": "", "vision": "lab", "nlp": "lab"}


def team_of(**most: int | None) -> Team:
    queue = {name.replace("_", " "): JobLimits(jobs) for name, jobs in most.items() if jobs is not None}
    users = {owner.user: User(owner.user, owner.group, "member", ()) for owner in _OWNERS}
    return Team("team.yaml", _GROUPS, users, queue)


def beginners(limits: JobQueueLimits, waiting: list[Owner], running: list[Owner]) -> list[int]:
    """The places of those that begin, one after the other, as in a pool."""
    begin = list[int]()
    for place, owner in enumerate(waiting):
        if not limits.why_it_waits(owner, running):
            begin.append(place)
            running = [*running, owner]
    return begin


_MOST = st.none() | st.integers(1, 3)


@given(
    pool=_MOST,
    most=st.fixed_dictionaries(dict.fromkeys(["group_lab", "group_vision", "user_bob"], _MOST)),
    submitted=st.lists(st.sampled_from(_OWNERS), max_size=12),
    ends=st.lists(st.integers(0, 11), max_size=12),
)
def test_quotas_hold_and_only_a_full_one_keeps_a_job_waiting(
    pool: int | None, most: dict[str, int | None], submitted: list[Owner], ends: list[int]
) -> None:
    team = team_of(**most)
    limits = JobQueueLimits(JobLimits(pool), team.queue, team.above)
    waiting, running, begun = list(enumerate(submitted)), list[tuple[int, Owner]](), list[int]()
    for end in [None, *ends]:
        if end is not None and running:
            running.pop(end % len(running))
        now = beginners(limits, [owner for _, owner in waiting], [owner for _, owner in running])
        running += [waiting[place] for place in now]
        begun += [waiting[place][0] for place in now]
        waiting = [one for place, one in enumerate(waiting) if place not in now]
        owners = [owner for _, owner in running]
        for whose, limit in {"the pool": JobLimits(pool), **team.queue}.items():
            of_it = sum(whose == "the pool" or whose in team.above(owner) for owner in owners)
            assert limit.jobs is None or of_it <= limit.jobs
        assert limits.exceeded(owners) == []
        assert all(limits.why_it_waits(owner, owners) for _, owner in waiting)
    for owner in _OWNERS:
        own = [number for number in begun if submitted[number] == owner]
        assert own == sorted(own), "jobs of one owner begin in their order"


def test_a_full_quota_lets_others_pass_and_says_whose_it_is() -> None:
    team = team_of(group_vision=1, group_lab=3)
    ann, bob, eve = _OWNERS
    limits = JobQueueLimits(JobLimits(), team.queue, team.above)
    assert beginners(limits, [ann, bob, ann, eve], [ann]) == [1, 3]
    assert limits.why_it_waits(ann, [ann]) == "1 job of group vision runs, as many as may at once"
    assert limits.why_it_waits(bob, [ann, bob, eve]) == "3 jobs of group lab run, as many as may at once"
    assert JobQueueLimits(JobLimits(None, 0)).why_it_may_not_wait(ann, []) == "no job of the pool may wait"
    waits = JobQueueLimits(JobLimits(None, 2)).why_it_may_not_wait(ann, [ann, bob])
    assert waits == "2 jobs of the pool wait, as many as may"
    assert limits.exceeded([ann, ann]) == [
        "2 jobs of group vision run, and 1 may; none is ended, and none begins until fewer run"
    ]


class Queued(PoolActor):
    """A pool's actor without Ray: jobs begin, and end when the test says so."""

    def __init__(self, folder: Path, queue: JobLimits, begun: list[str]) -> None:
        self.begun = begun
        super().__init__(PoolHandles(None, Pool(1, 2), "cpu", Limits(), str(folder)), options=PoolOptions(queue=queue))

    def create_pipeline_actor(self, job: Job, incarnation: int) -> object:
        self.begun.append(job.name)
        if job.name == "broken":
            raise OSError("no process")
        return job

    def _begin_watch(self, submission: Any) -> None: ...

    def _go_on_with(self, submission: Any) -> None: ...

    def finish(self, name: str) -> None:
        self._note_end(self._submissions[name], Outcome("done"))


def job(name: str) -> Job:
    return Job(name, CommandConfig(command=["true"]), (), (0,), env={"SECRET": "of the user"})


def test_jobs_wait_for_their_turn_also_over_a_restart(tmp_path: Path) -> None:
    begun: list[str] = []
    pool = Queued(tmp_path, JobLimits(1, 3), begun)
    for name in ("a", "b", "broken", "c"):
        pool.submit(job(name))
    assert begun == ["a"]
    full = "d: 1 job of the pool runs, as many as may at once, and 3 jobs of the pool wait, as many as may; submit it"
    with pytest.raises(PoolError, match=full):
        pool.submit(job("d"))
    with pytest.raises(PoolError, match="a pipeline 'b' runs already"):
        pool.submit(job("b"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "waiting", *(tmp_path / "waiting").iterdir()])
    pool.finish("a")
    assert begun == ["a", "b"]
    # Another actor goes on, with the jobs that the first one was given.
    pool = Queued(tmp_path, JobLimits(1, 3), begun)
    assert begun == ["a", "b"]
    with pytest.raises(PoolError, match="c: has not begun: 1 job of the pool runs, as many as may at once"):
        pool.adapters("c", "list", [])
    assert pool.expected_start("c").why == "1 job of the pool runs, as many as may at once"
    pool.submit(job("e"))
    assert pool.cancel("e") == "cancelled before it began" and pool.cancel("e") == "has ended already: cancelled"
    pool.submit(job("f"))
    assert pool.drain("f") == "drained before it began"
    pool.finish("b")
    assert begun == ["a", "b", "broken", "c"], "one that cannot be started makes room for the next"
    ended = pool._submissions["broken"].outcome
    assert ended is not None and (ended.kind, ended.reason) == ("failed", "OSError: no process")
    assert pool._actors["c"] == job("c"), "with all that it was submitted with"
    pool.finish("c")
    assert not list((tmp_path / "waiting").iterdir())


def test_a_pool_without_limits_starts_every_job(tmp_path: Path) -> None:
    begun: list[str] = []
    pool = Queued(tmp_path, JobLimits(), begun)
    for name in "abc":
        pool.submit(job(name))
    assert begun == ["a", "b", "c"]
