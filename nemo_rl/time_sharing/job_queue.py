"""The queue before a pool: how many jobs may run at once, and how many may wait, in all, of a group, and of a user.

Decides without Ray, a clock or files. A job begins as soon as every quota that covers it has room; jobs that wait begin
in the order of their submission, but one whose quota is full lets others pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Owner(NamedTuple):
    """Whose a job is; the group is the user's at its submission."""

    user: str
    group: str


class JobLimits(NamedTuple):
    """How many jobs may run at once, and wait, at most; None for any number."""

    jobs: int | None = None
    waiting: int | None = None


class Quota(NamedTuple):
    """Limits, whose they are in words, and which owners' jobs they cover."""

    whose: str
    limits: JobLimits
    covers: Callable[[Owner], bool]


def any_owner(owner: Owner) -> bool:
    """Covers every job."""
    return True


def beginners(
    waiting: Sequence[Owner], running: Sequence[Owner], quotas_of: Callable[[Owner], Sequence[Quota]]
) -> list[int]:
    """Which of the waiting jobs, given in the order of their submission, begin now: their places."""
    now = list(running)
    begin: list[int] = []
    for place, owner in enumerate(waiting):
        if not why_it_waits(quotas_of(owner), now):
            begin.append(place)
            now.append(owner)
    return begin


def exceeded(quotas: Iterable[Quota], running: Sequence[Owner]) -> list[str]:
    """A line for each quota of which more jobs run than may."""
    counts = [(quota, sum(map(quota.covers, running))) for quota in quotas]
    return [
        f"{_jobs_of(whose, count, 'run')}, and {limits.jobs} may; none is ended, and none begins until fewer run"
        for (whose, limits, _), count in counts
        if limits.jobs is not None and count > limits.jobs
    ]


def why_it_waits(quotas: Iterable[Quota], running: Sequence[Owner]) -> str:
    """Why a job that these quotas cover does not begin beside those that run; empty where it does."""
    for whose, limits, covers in quotas:
        count = sum(map(covers, running))
        if limits.jobs is not None and count >= limits.jobs:
            return f"{_jobs_of(whose, count, 'run')}, as many as may at once"
    return ""


def why_it_may_not_wait(quotas: Iterable[Quota], waiting: Sequence[Owner]) -> str:
    """Why a job that these quotas cover may not join those that wait; empty where it may."""
    for whose, limits, covers in quotas:
        count = sum(map(covers, waiting))
        if limits.waiting is not None and count >= limits.waiting:
            return f"{_jobs_of(whose, count, 'wait')}, as many as may" if count else f"no job of {whose} may wait"
    return ""


def _jobs_of(whose: str, count: int, verb: str) -> str:
    return f"1 job of {whose} {verb}s" if count == 1 else f"{count} jobs of {whose} {verb}"
