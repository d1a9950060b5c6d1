"""Runs of many jobs that are put together from runs of each job alone, where no two use a GPU at the same time."""

from __future__ import annotations

import heapq

from nemo_rl.time_sharing.simulation.baselines import QUEUE, QUEUES, SERIAL, STATIC, BatchQueue, way
from nemo_rl.time_sharing.simulation.results import AloneTimes, SimulatedOutcome, as_run, batch_queue, spread
from nemo_rl.time_sharing.simulation.scenario import Scenario


def compose(scenario: Scenario, name: str, seed: int, alone_times: AloneTimes) -> SimulatedOutcome:
    """Outcome of SERIAL, STATIC or a QUEUE, composed from runs of each job alone: in these no two jobs use a GPU at the
    same time.

    Leaves out network delays between jobs (milliseconds), so it is much faster where jobs are many. Raises ValueError
    for other ways, and for scenarios with faults, teachers, adapters or jobs that leave.
    """
    if (
        name not in (SERIAL, STATIC, *QUEUES)
        or scenario.teachers
        or scenario.adapter_jobs
        or scenario.faults != type(scenario.faults)()
        or any(job.leaves_s is not None for job in scenario.jobs)
    ):
        raise ValueError(
            f"{name}: only {SERIAL}, {STATIC} and {QUEUE}, without faults, teachers, adapters and jobs that leave, "
            "can be put together from jobs alone"
        )
    scenario, alone_times = as_run(scenario, name, alone_times)
    changed, _ = way(scenario, name)
    times = AloneTimes(changed) if name == STATIC else alone_times
    ends = (
        _ends_in_order(changed, seed, times)
        if (queue := batch_queue(scenario, name, seed, alone_times)) is None
        else _queued_ends(scenario, queue, seed, times)
    )
    runs = {job.name: times.run(job, seed) for job in changed.jobs}
    seconds = {job.name: ends[job.name] - job.arrive_s for job in scenario.jobs}
    fates = {name: fate for run in runs.values() for name, fate in run.fates.items()}
    comparable = [job for job in scenario.jobs if job.name not in fates and not alone_times.run(job, seed).unfinished]
    slowdown = {job.name: seconds[job.name] / alone_times.of(job, seed) for job in comparable}
    pool, total = scenario.gpu_pool.slots, max(ends.values())
    busy = {name: run.gpu_busy * run.total_s * pool for name, run in runs.items()}
    service = [busy[job.name] / job.weight / max(seconds[job.name], 1e-9) for job in scenario.jobs]
    return SimulatedOutcome(
        total,
        seconds,
        slowdown,
        sum(busy.values()) / (total * pool),
        spread(service),
        [span for run in runs.values() for span in run.handovers_s],
        sum(run.preemptions for run in runs.values()),
        tuple(name for run in runs.values() for name in run.unfinished),
        sum(run.events for run in runs.values()),
        fates=fates,
    )


def _ends_in_order(scenario: Scenario, seed: int, times: AloneTimes) -> dict[str, float]:
    """End of each job if it starts when every earlier one that shares a GPU with it has ended."""
    ends: dict[str, float] = {}
    gpus = {job.name: frozenset(job.train) | frozenset(job.infer) for job in scenario.jobs}
    for job in sorted(scenario.jobs, key=lambda j: j.arrive_s):
        before = [end for other, end in ends.items() if not gpus[other].isdisjoint(gpus[job.name])]
        ends[job.name] = max([job.arrive_s, *before]) + times.of(job, seed)
    return ends


def _queued_ends(scenario: Scenario, queue: BatchQueue, seed: int, times: AloneTimes) -> dict[str, float]:
    """End of each job under the queue; moving a job to other GPUs does not change how long it takes."""
    jobs = {job.name: job for job in scenario.jobs}
    ends: dict[str, float] = {}
    coming = [(job.arrive_s, 1, number, job.name) for number, job in enumerate(scenario.jobs)]
    heapq.heapify(coming)
    while coming:
        now, arrives, _, name = heapq.heappop(coming)
        if arrives:
            queue.submit(jobs[name])
        else:
            queue.ended(name)
        for placed in queue.start(now):
            ends[placed.name] = now + times.of(jobs[placed.name], seed)
            heapq.heappush(coming, (ends[placed.name], 0, 0, placed.name))
    return ends
