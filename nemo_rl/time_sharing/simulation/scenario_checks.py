"""What is wrong with a scenario that no single key shows, in the words of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from re import fullmatch
from typing import TYPE_CHECKING

from nemo_rl.time_sharing.protocol.topology import RegistrationError, register
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN
from nemo_rl.time_sharing.simulation.scenario_limits import problems_of_limits

if TYPE_CHECKING:
    from nemo_rl.time_sharing.simulation.scenario import Job, Scenario

FLEET_GIVES = ("name", "train", "infer")
MOST_SAMPLES = 1_000_000
_ADAPTER = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
TEACHER_FOUND_S = 600.0
"""How long a job waits for a teacher that is not there, as in a pool."""
_REGISTERED = ("weight", "min_share", "max_share", "staleness", "full_overlap")


def problems_of(scenario: Scenario, places: list[str]) -> Iterator[str]:
    """What no single key shows."""
    yield from problems_of_limits(scenario.limits)
    if not scenario.jobs:
        yield "jobs: a scenario needs at least one job, or a fleet"
    first: dict[str, str] = {}
    wrong_fleets: set[str] = set()
    yield from _problems_of_teachers(scenario, places)
    yield from _problems_of_adapters(scenario)
    served = [(teacher.as_job(), f"teachers.{number}") for number, teacher in enumerate(scenario.teachers)]
    served += [(job.as_job(), f"adapter_jobs.{number}") for number, job in enumerate(scenario.adapter_jobs)]
    for job, place in (*zip(scenario.jobs, places, strict=True), *served):
        if job.name in first:
            yield (
                f"{place}.name: two jobs are called {job.name!r}, the other is {first[job.name]}; each "
                "needs a name of its own"
            )
        first.setdefault(job.name, place)
        found = list(_problems_of_job(scenario, job))
        if place.startswith("fleets."):
            # The jobs of a fleet differ in their GPUs only: the first of them that is wrong speaks for all.
            if place in wrong_fleets:
                continue
            if found:
                wrong_fleets.add(place)
        for key, message in found:
            of_fleet = place.startswith("fleets.") and key in FLEET_GIVES
            yield (
                f"{place.removesuffix('.job') if of_fleet else f'{place}.{key}'}: job {job.name!r}: "
                f"{f'{key}: ' if of_fleet else ''}{message}"
            )


def _problems_of_teachers(scenario: Scenario, places: list[str]) -> Iterator[str]:
    begin = {teacher.name: teacher.arrive_s for teacher in scenario.teachers}
    for job, place in zip(scenario.jobs, places, strict=True):
        if not job.train:
            yield f"{place}.train: job {job.name!r}: a job trains on one GPU at least (what only scores is a teacher)"
        if not job.teacher:
            continue
        if job.teacher not in begin:
            known = f"the teachers are {', '.join(begin)}" if begin else "there are no teachers"
            yield f"{place}.teacher: job {job.name!r}: {job.teacher!r} is no teacher; {known}"
        elif begin[job.teacher] > job.arrive_s + TEACHER_FOUND_S:
            yield (
                f"{place}.teacher: job {job.name!r}: {job.teacher!r} comes at {begin[job.teacher]:g} s, and a job ends "
                f"that has waited {TEACHER_FOUND_S:g} s for its teacher"
            )
    named = {job.teacher for job in scenario.jobs}
    for number, teacher in enumerate(scenario.teachers):
        if teacher.name not in named:
            yield f"teachers.{number}.name: no job names {teacher.name!r} as its teacher: it would do nothing"


def _problems_of_adapters(scenario: Scenario) -> Iterator[str]:
    for number, job in enumerate(scenario.adapter_jobs):
        place, names = f"adapter_jobs.{number}.adapters", [adapter.name for adapter in job.adapters]
        if not names:
            yield f"{place}: job {job.name!r}: give at least one adapter"
        for at, adapter in enumerate(job.adapters):
            if not fullmatch(_ADAPTER, adapter.name):
                yield f"{place}.{at}.name: {adapter.name!r}; a name has letters, digits, `_`, `.` and `-`"
            elif adapter.name in names[:at]:
                yield f"{place}.{at}.name: job {job.name!r} has two adapters called {adapter.name!r}; rename one"
            if adapter.leaves_s is not None and adapter.leaves_s < adapter.joins_s:
                yield (
                    f"{place}.{at}.leaves_s: {adapter.leaves_s:g} s is before it joins (joins_s: {adapter.joins_s:g}); "
                    "give a later time, or null for never"
                )
            if adapter.groups * adapter.samples_per_group > MOST_SAMPLES:
                yield (
                    f"{place}.{at}.groups: {adapter.groups} groups of {adapter.samples_per_group} samples are more "
                    f"than the {MOST_SAMPLES:,} samples that are simulated at once; give fewer groups"
                )


def _problems_of_job(scenario: Scenario, job: Job) -> Iterator[tuple[str, str]]:
    if job.leaves_s is not None and job.leaves_s < job.arrive_s:
        yield (
            "leaves_s",
            f"{job.leaves_s:g} s is before it arrives (arrive_s: {job.arrive_s:g}); give a later time, or "
            "null for never",
        )
    if job.arrive_s >= scenario.horizon_s:
        yield (
            "arrive_s",
            f"{job.arrive_s:g} s is not before the end of the simulation (horizon_s: {scenario.horizon_s:g})",
        )
    ahead = min(job.staleness + 1, job.steps)
    if job.groups * job.samples_per_group * ahead > MOST_SAMPLES:
        counts = f"{job.groups} groups of {job.samples_per_group} samples, {ahead} steps at a time"
        yield (
            "groups",
            f"{counts}, are more than the {MOST_SAMPLES:,} samples that are simulated at once; give fewer "
            "groups, or less staleness",
        )
    if job.tokens.max < job.tokens.median:
        yield "tokens.max", f"{job.tokens.max} is less than the median of {job.tokens.median:g} tokens"
    try:
        register(
            scenario.gpu_pool,
            job.name,
            job.name,
            job.rank_sizes,
            job.mappings,
            weight=job.weight,
            min_share=job.min_share,
            max_share=job.max_share,
            staleness=job.staleness,
            full_overlap=job.full_overlap,
        )
    except RegistrationError as error:
        yield _of_registration(error)


def _of_registration(error: RegistrationError) -> tuple[str, str]:
    """The key of the scenario that a refused registration is about, and why, in the scenario's words."""
    where = f"pipeline {error.pipeline!r}" + (f", cluster {error.cluster!r}" if error.cluster else "")
    message = str(error).removeprefix(f"{where}: ").replace(ACTOR_INFER, "infer").replace(ACTOR_TRAIN, "train")
    named = message.partition("=")[0]
    by_cluster = {ACTOR_TRAIN: "train", ACTOR_INFER: "infer"}.get(error.cluster or "", "name")
    return named if named in _REGISTERED else by_cluster, message
