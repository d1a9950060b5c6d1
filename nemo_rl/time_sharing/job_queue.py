"""The queue before a pool: how many jobs may run at once, and how many may wait, in all, of a group, and of a user.

Decides without Ray, a clock or files. A job begins as soon as every limit that it counts towards has room; jobs that
wait begin in the order of their submission, but one whose limit is reached lets others pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple


class Owner(NamedTuple):
    """Whose a job is; the group is the user's at its submission."""

    user: str
    group: str


class JobLimits(NamedTuple):
    """How many jobs may run at once, and wait, at most; None for any number."""

    jobs: int | None = None
    waiting: int | None = None


class JobQueueLimits:
    """Limits of a pool, and of others by whose they are in words. `above`: which of the others a job of an owner counts
    towards.
    """

    def __init__(
        self,
        pool: JobLimits,
        others: Mapping[str, JobLimits] | None = None,
        above: Callable[[Owner], Iterable[str]] = lambda _: (),
    ) -> None:
        self._most = {"the pool": pool, **(others or {})}
        self._above = above

    def exceeded(self, running: Iterable[Owner]) -> list[str]:
        """A line for each limit above which jobs run."""
        return [
            f"{_jobs_of(whose, count, 'run')}, and {self._most[whose].jobs} may; none is ended, and none begins until "
            "fewer run"
            for whose, count in sorted(self._counts(running).items())
            if (most := self._most[whose].jobs) is not None and count > most
        ]

    def why_it_waits(self, owner: Owner, running: Iterable[Owner]) -> str:
        """Why a job of this owner does not begin beside those that run; empty where it does."""
        full = self._reached(owner, running, "jobs")
        return next((f"{_jobs_of(whose, count, 'run')}, as many as may at once" for whose, count in full), "")

    def why_it_may_not_wait(self, owner: Owner, waiting: Iterable[Owner]) -> str:
        """Why a job of this owner may not join those that wait; empty where it may."""
        for whose, count in self._reached(owner, waiting, "waiting"):
            return f"{_jobs_of(whose, count, 'wait')}, as many as may" if count else f"no job of {whose} may wait"
        return ""

    def _reached(self, owner: Owner, others: Iterable[Owner], key: str) -> Iterator[tuple[str, int]]:
        counts = self._counts(others)
        for whose in self._of(owner):
            most: int | None = getattr(self._most[whose], key)
            if most is not None and counts[whose] >= most:
                yield whose, counts[whose]

    def _of(self, owner: Owner) -> Iterator[str]:
        return (whose for whose in ("the pool", *self._above(owner)) if whose in self._most)

    def _counts(self, owners: Iterable[Owner]) -> Counter[str]:
        return Counter(whose for owner in owners for whose in self._of(owner))


def _jobs_of(whose: str, count: int, verb: str) -> str:
    return f"1 job of {whose} {verb}s" if count == 1 else f"{count} jobs of {whose} {verb}"
