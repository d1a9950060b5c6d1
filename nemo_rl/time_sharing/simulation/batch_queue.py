"""A batch queue as clusters have it (Slurm and its kind): a job waits until enough GPUs are free, and keeps them to its
end.

First come, first served, with EASY backfill: the head of the queue reserves the GPUs that come free for it first, by
the limits that the users gave; a later job may start before it if it ends by then or takes none of these. A job takes
any free GPUs that its ranks fit on, as many as its mapping has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.simulation.scenario import Job

_LIMIT_ERROR = (1.0, 3.0)
"""Users ask for up to so many times what their job takes: one that runs into its limit is ended."""


@dataclass(frozen=True, slots=True)
class _Running:
    gpus: frozenset[int]
    ends_by: float


class BatchQueue:
    """Who waits, who runs, and where. `limits`: by job, for how many seconds its user asked."""

    def __init__(self, pool: Pool, limits: dict[str, float]) -> None:
        self._pool, self._limits = pool, limits
        self._free = set(range(pool.slots))
        self._waiting: list[Job] = []
        self._running: dict[str, _Running] = {}

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def ended(self, name: str) -> None:
        """Takes a job's GPUs back; one that never started leaves the queue."""
        running = self._running.pop(name, None)
        if running is not None:
            self._free |= running.gpus
        self._waiting = [job for job in self._waiting if job.name != name]

    def start(self, now: float) -> Iterator[Job]:
        """The jobs that start at `now`, each moved to its GPUs."""
        while self._waiting and (gpus := self._fit(self._waiting[0], self._free)) is not None:
            yield self._place(self._waiting.pop(0), gpus, now)
        if not self._waiting:
            return
        at, reserved = self._reservation(self._waiting[0], now)
        for job in self._waiting[1:]:
            in_time = now + self._limits[job.name] <= at
            gpus = self._fit(job, self._free if in_time else self._free - reserved)
            if gpus is not None:
                self._waiting.remove(job)
                yield self._place(job, gpus, now)

    def _place(self, job: Job, gpus: tuple[int, ...], now: float) -> Job:
        self._free.difference_update(gpus)
        self._running[job.name] = _Running(frozenset(gpus), now + self._limits[job.name])
        place = dict(zip(job.infer, gpus, strict=True))
        return job.model_copy(update={"infer": gpus, "train": tuple(place[gpu] for gpu in job.train)})

    def _reservation(self, head: Job, now: float) -> tuple[float, frozenset[int]]:
        """When the head of the queue can start if all jobs take as long as they may, and the GPUs that it gets then."""
        free = set(self._free)
        for running in sorted(self._running.values(), key=lambda r: r.ends_by):
            free |= running.gpus
            gpus = self._fit(head, free)
            if gpus is not None:
                return max(running.ends_by, now), frozenset(gpus)
        raise ValueError(f"job {head.name!r} does not fit an empty pool of {self._pool.slots} GPUs")

    def _fit(self, job: Job, free: set[int]) -> tuple[int, ...] | None:
        """GPUs for all ranks of a job, the fullest nodes first; None if there are too few."""
        node = self._pool.gpus_per_node
        per_node: dict[int, list[range]] = {}
        for begin in range(0, self._pool.slots, max(node, job.tp)):
            starts = range(begin, begin + max(node, job.tp) - job.tp + 1, job.tp)
            blocks = [range(start, start + job.tp) for start in starts]
            fitting = [block for block in blocks if free.issuperset(block)]
            if fitting:
                per_node[begin] = fitting
        order = sorted(per_node, key=lambda begin: (len(free.intersection(range(begin, begin + node))), begin))
        found = [block for begin in order for block in per_node[begin]][: len(job.infer) // job.tp]
        if len(found) * job.tp < len(job.infer):
            return None
        return tuple(sorted(gpu for block in found for gpu in block))


def user_limit(seconds: float, job: Job, seed: int) -> float:
    """For how long a user who knows roughly that a job takes `seconds` asks; the same for a job and seed."""
    return seconds * random.Random(f"{seed}/{job.name}/limit").uniform(*_LIMIT_ERROR)
