"""Reads scenarios from YAML; errors are plain words with the path of each key.

Refuses mistakes that YAML accepts silently: a key that is given twice, text in another encoding. Reports the errors of
single keys that pydantic finds, and those between keys. Every message gives the value and the allowed ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.errors import UserError, did_you_mean
from nemo_rl.config.layers import read_yaml, why_unreadable
from nemo_rl.time_sharing.protocol.quotas import share_problems
from nemo_rl.time_sharing.protocol.topology import RegistrationError, register
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, COUNTS, SCAVENGER, Limits, limits_from
from nemo_rl.time_sharing.simulation.scenario import MOST_SAMPLES, Fleet, PoolSection, Scenario, ScenarioJob

PAGE = "docs/time_sharing_scenarios.md"


class ScenarioError(UserError, ValueError):
    """A scenario file cannot be used; each line of the message is one mistake with the path of its key."""


def read_mapping(path: Path) -> dict[object, object]:
    """The mapping in a YAML file. Raises ScenarioError for a file that cannot be read, is not UTF-8, not YAML, gives a
    key twice, or holds something else.
    """
    try:
        given = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {why_unreadable(error)}") from error
    if given is None:
        raise ScenarioError(f"{path}: is empty; a scenario has at least `jobs`, see {PAGE} and examples/time_sharing")
    if not isinstance(given, dict):
        raise ScenarioError(f"{path}: a scenario is a mapping of keys, this is a {type(given).__name__}; see {PAGE}")
    return given


def in_words(error: ValidationError, schema: type[BaseModel], places: Sequence[str]) -> list[str]:
    """One line per mistake. `places` says where in the file each entry of `jobs` was written; what several jobs of a
    fleet share is said once.
    """
    lines: dict[tuple[str, str], str] = {}
    for mistake in error.errors(include_url=False):
        loc = mistake["loc"]
        path = ".".join(str(part) for part in loc)
        if len(loc) > 1 and loc[0] == "jobs" and isinstance(loc[1], int) and loc[1] < len(places):
            path = ".".join([places[loc[1]], *map(str, loc[2:])])
        lines.setdefault((path, mistake["type"]), f"{path}: {_words(mistake, schema)}")
    return list(lines.values())


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys",
    "invalid_key": "must be text, as every key is",
}


def _words(mistake: ErrorDetails, schema: type[BaseModel]) -> str:
    kind, loc = mistake["type"], mistake["loc"]
    if kind == "extra_forbidden":
        valid = list(_model_at(schema, loc[:-1]).model_fields)
        return f"unknown key.{did_you_mean(str(loc[-1]), valid)} Valid here: {', '.join(valid)}"
    if kind == "missing":
        return "is required, and not given"
    if kind in ("model_type", "model_attributes_type"):
        return f"must be a mapping of keys ({', '.join(_model_at(schema, loc).model_fields)}){_given(mistake['input'])}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = mistake.get("ctx", {})[name]
        return f"must be {words} {bound:g}{_given(mistake['input'])}"
    return _KINDS.get(kind, mistake["msg"]) + _given(mistake["input"])


def _given(value: object) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return f" (given: {text if len(text) <= 80 else text[:77] + '...'})"


def _model_at(schema: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The model that the keys along `loc` lead to; numbers and free keys are steps into lists and mappings."""
    found: Any = schema
    for part in loc:
        if isinstance(found, type) and issubclass(found, BaseModel):
            found = found.model_fields[str(part)].annotation
            if get_origin(found) in (Union, types.UnionType):
                found = get_args(found)[0]
        else:
            arguments = get_args(found)
            found = arguments[-1] if arguments[-1] is not Ellipsis else arguments[0]
    return found if isinstance(found, type) and issubclass(found, BaseModel) else schema


_PERIODS = frozenset({"heartbeat_s", "lease_s", "retry_s", "replan_s", "max_tick_s"})
_SHORTEST_PERIOD_S = 0.01


def problems_of_limits(limits: Mapping[str, float]) -> Iterator[str]:
    """One line per mistake: `limits.key: value and allowed values`."""
    known = [f.name for f in dataclasses.fields(Limits)]
    wrong = [f"limits.{key}: {problem}" for key, value in limits.items() if (problem := _problem(key, value, known))]
    yield from wrong
    if not wrong and (typed := limits_from(limits)).heartbeat_s >= typed.lease_s:
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


FLEET_GIVES = ("name", "train", "infer")
_ADAPTER = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
TEACHER_FOUND_S = 600.0
"""How long a job waits for a teacher that is not there, as in a pool."""
_REGISTERED = ("weight", "min_share", "max_share", "staleness", "priority", "full_overlap")


def problems_of(scenario: Scenario, places: list[str]) -> Iterator[str]:
    """Mistakes between keys."""
    yield from problems_of_limits(scenario.limits)
    if not scenario.jobs:
        yield "jobs: a scenario needs at least one job, or a fleet"
    first: dict[str, str] = {}
    wrong_fleets: set[str] = set()
    yield from _problems_of_teachers(scenario, places)
    yield from _problems_of_adapters(scenario)
    yield from _problems_of_absences(scenario, places)
    yield from _problems_of_quotas(scenario)
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


def _problems_of_quotas(scenario: Scenario) -> Iterator[str]:
    for kind, quotas in (("groups", scenario.groups), ("users", scenario.users)):
        for name, quota in quotas.items():
            if quota.parent and quota.parent not in scenario.groups:
                known = did_you_mean(quota.parent, scenario.groups)
                yield f"{kind}.{name}.parent: there is no group {quota.parent!r}.{known}"
            elif kind == "groups" and name in _above(name, scenario):
                yield f"groups.{name}.parent: is below itself"
    yield from share_problems(scenario.quota_nodes)


def _above(name: str, scenario: Scenario) -> list[str]:
    found: list[str] = []
    while (name := scenario.groups[name].parent) in scenario.groups and name not in found:
        found.append(name)
    return found


def _problems_of_teachers(scenario: Scenario, places: list[str]) -> Iterator[str]:
    begin = {teacher.name: teacher.arrive_s for teacher in scenario.teachers}
    for job, place in zip(scenario.jobs, places, strict=True):
        if not job.train and job.priority != SCAVENGER:
            yield (
                f"{place}.train: job {job.name!r}: a job trains on one GPU at least (what only scores is a teacher, "
                "what only generates a scavenger)"
            )
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
            if not re.fullmatch(_ADAPTER, adapter.name):
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


def _problems_of_absences(scenario: Scenario, places: list[str]) -> Iterator[str]:
    pool = scenario.gpu_pool
    for number, absence in enumerate(scenario.absences):
        place, node, until = f"absences.{number}", absence.node, absence.returns_at_s
        if node >= pool.nodes:
            yield f"{place}.node: {node} is none of the pool's nodes 0 to {pool.nodes - 1}"
            continue
        if absence.leaves_at_s < absence.notice_at_s:
            yield f"{place}.leaves_at_s: {absence.leaves_at_s:g} s is before notice_at_s ({absence.notice_at_s:g} s)"
        if until is not None and until <= absence.leaves_at_s:
            yield f"{place}.returns_at_s: {until:g} s is not after leaves_at_s ({absence.leaves_at_s:g} s)"
        gone = [
            other.node
            for at, other in enumerate(scenario.absences)
            if at != number
            and other.notice_at_s <= absence.notice_at_s
            and (other.returns_at_s is None or other.returns_at_s > absence.notice_at_s)
        ]
        if node in gone:
            yield f"{place}.notice_at_s: node {node} is away then already; let it come back first"
        elif len({*gone, node}) == pool.nodes:
            yield f"{place}.notice_at_s: no other node is left then; let one come back first"
        if until is not None:
            continue
        units = pool.units_of({*gone, node})
        for job, where in zip(scenario.jobs, places, strict=True):
            stays = units.isdisjoint(job.train) or (job.placed and job.moved([], pool.slots, units) is not None)
            if not stays:
                yield (
                    f"{place}.returns_at_s: job {job.name!r} ({where}) has nowhere to train once node {node} is away "
                    "for good; say when it returns, or let the job be `placed` and train on fewer GPUs"
                )


def _problems_of_job(scenario: Scenario, job: ScenarioJob) -> Iterator[tuple[str, str]]:
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
    if job.user and job.user not in scenario.users:
        yield "user", f"{job.user!r} is none of `users`.{did_you_mean(job.user, scenario.users)}"
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
        register(scenario.gpu_pool, job.name, job.name, job.rank_sizes, job.mappings, **job.options)
    except RegistrationError as error:
        yield _of_registration(error)


def _of_registration(error: RegistrationError) -> tuple[str, str]:
    """The key of the scenario that a refused registration is about, and why, in the scenario's words."""
    where = f"pipeline {error.pipeline!r}" + (f", cluster {error.cluster!r}" if error.cluster else "")
    message = str(error).removeprefix(f"{where}: ").replace(ACTOR_INFER, "infer").replace(ACTOR_TRAIN, "train")
    named = message.partition("=")[0]
    by_cluster = {ACTOR_TRAIN: "train", ACTOR_INFER: "infer"}.get(error.cluster or "", "name")
    return named if named in _REGISTERED else by_cluster, message


def fleet_job(name: str, fleet: Fleet, number: int, pool_size: int) -> dict[str, object]:
    """The values of a fleet's job `number`, which begin with those of `FLEET_GIVES`."""
    start = (fleet.first + number * fleet.stride) % pool_size
    gpus = [(start + i) % pool_size for i in range(fleet.width)]
    return {
        "name": f"{name}{number}",
        "train": tuple(sorted(gpus[: fleet.train_gpus])),
        "infer": tuple(sorted(gpus)),
        "arrive_s": number * fleet.arrive_every_s,
        **fleet.job,
    }


def load_scenario(path: str | Path) -> Scenario:
    """Reads a scenario YAML file. Raises ScenarioError for a file that is missing, not YAML or not a scenario."""
    return parse_scenario(read_mapping(Path(path)), where=str(path))


def parse_scenario(given: object, *, where: str = "scenario") -> Scenario:
    """A scenario from plain data. Raises ScenarioError with one line per mistake: path of the key, the value, and what
    is allowed.
    """
    if not isinstance(given, dict):
        raise ScenarioError(f"{where}: a scenario is a mapping of keys, this is a {type(given).__name__}")
    expanded, places, problems = _unroll_fleets(given)
    if not problems:
        try:
            scenario = Scenario.model_validate(expanded)
        except ValidationError as error:
            problems = in_words(error, Scenario, places)
        else:
            problems = list(dict.fromkeys(problems_of(scenario, places)))
            if not problems:
                return scenario
    raise ScenarioError("\n".join(f"{where}: {problem}" for problem in problems))


def _unroll_fleets(given: dict[object, Any]) -> tuple[dict[object, object], list[str], list[str]]:
    """The scenario with its fleets as jobs, where in the file each job comes from, and mistakes of the fleets."""
    jobs = given.get("jobs", [])
    places = [f"jobs.{number}" for number in range(len(jobs))] if isinstance(jobs, (list, tuple)) else []
    try:
        pool = PoolSection.model_validate(given.get("pool", {}))
        fleets = {name: Fleet.model_validate(raw) for name, raw in given.get("fleets", {}).items()}
    except (ValidationError, AttributeError):
        # Left as it is, so that the mistake is reported where the field itself is checked, with its path.
        return given, places, []
    if not fleets or not isinstance(jobs, (list, tuple)):
        return given, places, []
    size = pool.nodes * pool.gpus_per_node * pool.slots_per_gpu
    problems: list[str] = []
    made: list[object] = list(jobs)
    for name, fleet in fleets.items():
        if fleet.width > size:
            problems.append(f"fleets.{name}.width: {fleet.width} GPUs do not fit the pool of {size} GPUs")
        if fleet.train_gpus > fleet.width:
            problems.append(
                f"fleets.{name}.train_gpus: {fleet.train_gpus} is more than the fleet's width of {fleet.width} GPUs"
            )
        problems += [
            f"fleets.{name}.job.{key}: each job of a fleet gets its own; leave it out"
            for key in FLEET_GIVES
            if key in fleet.job
        ]
        if not problems:
            made += [fleet_job(name, fleet, number, size) for number in range(fleet.count)]
            places += [f"fleets.{name}.job"] * fleet.count
    return {**given, "jobs": made, "fleets": {}}, places, problems
