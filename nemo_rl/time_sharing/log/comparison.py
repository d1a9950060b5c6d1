"""A simulation's comparison of ways to run a mix of jobs: figures per job and per way, and the meaning of the columns.

It is the last event of a simulation's record, so that a report made from the record later shows the same tables as the
one made at once.
"""

from __future__ import annotations

from nemo_rl.utils.record_events import event_kind

LEGEND = (
    ("total s", "from 0 s to the end of the last job, mean over runs"),
    ("vs serial", "total of one_after_the_other over the total of this way; - where jobs are unfinished"),
    (
        "slowdown",
        "seconds of a job from its arrival to its end, over the seconds it takes alone on its GPUs without "
        "faults; mean and p99 over the finished jobs",
    ),
    (
        "GPU busy",
        "part of the pool's GPU time in which a trainer worked or an engine had requests; GPUs held without "
        "work do not count",
    ),
    ("service spread", "standard deviation over mean of what the jobs got (busy GPUs / weight); 0: all the same"),
    (
        "hand-over",
        "from the decision to give GPUs to a cluster or rank until they are used there, first start of an "
        "engine included",
    ),
    ("preemptions", "generation ranks sent to sleep: for training, for another job, or because their job ends"),
    ("unfinished", "jobs that did not train all their steps (a job stopped by its own leaves_s is not counted)"),
)
"""Column and meaning, in the order of the table."""


@event_kind("ts_simulated")
class Simulated:
    """The tables of one call of `simulate`, header lines first. `gpu_busy` (0 to 1) is that of the recorded run;
    `notes` are sentences.
    """

    scenario: str
    about: str
    seed: int
    runs: int
    gpu_busy: float
    jobs: tuple[tuple[str, ...], ...]
    ways: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
