"""The `limits` of a scenario: what each bound of the scheduler means, and which values cannot work.

The bounds themselves and their defaults are `types.Limits`; this file adds words and ranges for people who write
scenarios.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from nemo_rl.config.errors import did_you_mean
from nemo_rl.time_sharing.protocol.types import COUNTS, Limits, limits_from

MEANING = {
    "aging_s": "A waiting request rises by one priority in this time.",
    "min_hold_s": "Length of a guaranteed time slice of a generation rank, and of every slice (times the job's weight) "
    "until a hand-over of the job has been seen.",
    "max_slice_s": "Longest time slice that a generation rank keeps its GPUs against other jobs (times the job's "
    "weight); a slice lasts as long as four hand-overs.",
    "hysteresis": "How much better served than the taker a job must be before a busy GPU moves (0.10: ten per cent).",
    "max_backfills": "How often a waiting request is passed by later ones that end before it can start.",
    "max_initialising": "How many jobs may initialise at a time; 0 for any number.",
    "max_hold_s": "A training hold that lasts longer has its job cut off and started again.",
    "heartbeat_s": "How often a job says how it is.",
    "lease_s": "A job not heard of for so long is cut off; a generation rank that makes no progress for so "
    "long is restarted.",
    "isolation_s": "When most jobs fall silent at once, the scheduler takes itself for cut off and ends no job for so "
    "long.",
    "retry_s": "A command without an answer is sent again after this time.",
    "drain_s": "Deadline of taking requests off a rank; a rank that misses it is ended.",
    "sleep_s": "Deadline of sending a rank to sleep.",
    "wake_s": "Deadline of waking a rank, the first start of its engine included.",
    "sync_s": "Deadline of loading weights into a rank.",
    "route_s": "Deadline of sending requests to a rank.",
    "grant_s": "Deadline of taking what was granted.",
    "reap_s": "Deadline of ending processes and showing that their memory is free.",
    "request_s": "A request that waited so long is dropped.",
    "quarantine_s": "A rank or GPU that failed is left alone for so long.",
    "plan_interval_s": "Shortest time between two plans.",
    "replan_s": "Longest time between two plans.",
    "measure_s": "How often is measured what jobs gain by running at the same time on GPUs of several slots; 0 for "
    "never: all run at the same time.",
    "trial_steps": "Steps that each makes together with the others before it is tried alone, which costs those six "
    "steps.",
    "turn_s": "How long jobs run that gain nothing by it, before others have their turn.",
    "max_tick_s": "A clock that moves by more at once has jumped; the scheduler's time leaves the jump out.",
}
_PERIODS = frozenset({"heartbeat_s", "lease_s", "retry_s", "replan_s", "max_tick_s"})
_SHORTEST_PERIOD_S = 0.01


def problems_of_limits(limits: Mapping[str, float]) -> Iterator[str]:
    """Each mistake as `limits.key: value and what is allowed`."""
    known = [f.name for f in dataclasses.fields(Limits)]
    wrong = False
    for key, value in limits.items():
        problem = _problem(key, value, known)
        if problem:
            wrong = True
            yield f"limits.{key}: {problem}"
    if wrong:
        return
    typed = limits_from(limits)
    if typed.heartbeat_s >= typed.lease_s:
        yield (
            f"limits.heartbeat_s: {typed.heartbeat_s:g} s must be less than lease_s ({typed.lease_s:g} s), "
            "or every pipeline is taken for dead"
        )


def _problem(key: str, value: float, known: list[str]) -> str:
    if key not in known:
        return f"unknown key.{did_you_mean(key, known)} The limits are {', '.join(known)}"
    if not math.isfinite(value):
        return f"{value} is not a finite number"
    if value < 0:
        return f"{value:g} is negative; it must be at least 0"
    if key in COUNTS and value != int(value):
        return f"{value:g} is not a whole number"
    if key in _PERIODS and value < _SHORTEST_PERIOD_S:
        return f"{value:g} s must be at least {_SHORTEST_PERIOD_S:g} s, as something is done that often"
    return ""
