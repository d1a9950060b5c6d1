"""What a simulation is told: the pool, the jobs, what hand-overs cost, how the network behaves and what breaks.

These are the schemas of the scenario YAML files. A field that is wrong is reported with the path of its key, the value and what is allowed;
mappings are checked by the same rules as a real registration. Times are in seconds, rates per hour of virtual time.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_rl.time_sharing.topology import Pool, RegistrationError, register
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN, COUNTS, Limits, limits_from

Seconds = Annotated[float, Field(ge=0.0, le=1e7, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, le=1e4)]


_PERIODS = frozenset({"heartbeat_s", "lease_s", "retry_s", "replan_s", "max_tick_s"})


class ScenarioError(ValueError):
    """A scenario file cannot be used; each line of the message is one mistake with the path of its key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolSection(_Section):
    """The GPUs: equal nodes."""

    nodes: int = Field(1, ge=1, le=100_000)
    gpus_per_node: int = Field(8, ge=1, le=1024)


class Tokens(_Section):
    """Completion lengths: log-normal, cut at `max`."""

    median: float = Field(256, gt=0)
    sigma: float = Field(0.8, ge=0, le=3)
    max: int = Field(8192, ge=1)


class Engine(_Section):
    """A shard with n running requests gives each `tokens_per_s` / (1 + n / half_batch): the rate of the shard saturates as n grows."""

    tokens_per_s: float = Field(100.0, gt=0)
    half_batch: float = Field(64.0, gt=0)
    max_running: int = Field(256, ge=1)


class Costs(_Section):
    """What a hand-over costs. Defaults: an H200 with a small model (sleep 0.03, wake 0.2, a sync of 1 GB through the host); `start_s` is a first wake."""

    start_s: Seconds = 5.0
    drain_s: Seconds = 0.05
    sleep_s: Seconds = 0.03
    wake_s: Seconds = 0.2
    sync_s: Seconds = 0.3
    refresh_s: Seconds = 0.3
    load_s: Seconds = 0.3
    cache_s: Seconds = 0.3
    offload_s: Seconds = 0.2
    jitter: float = Field(0.1, ge=0, le=2)


class Network(_Section):
    """Messages between scheduler and agents: exponential delay, loss, duplication; reordering follows from the spread of delays."""

    delay_s: Seconds = 0.002
    loss: Probability = 0.0
    duplicate: Probability = 0.0
    slow: Probability = 0.0
    slow_s: Seconds = 1.0


class Faults(_Section):
    """What breaks, all at random: crashes and stalls per hour and per actor, failures per operation."""

    agent_crashes: Rate = 0.0
    scheduler_crashes: Rate = 0.0
    partitions: Rate = 0.0
    partition_s: Seconds = 20.0
    stuck_shards: Rate = 0.0
    slow_shards: Rate = 0.0
    clock_jumps: Rate = 0.0
    operation_fails: Probability = 0.0
    operation_hangs: Probability = 0.0
    reap_fails: Probability = 0.0
    restart_s: Seconds = 5.0
    restarts: int = Field(20, ge=0)
    until_s: Seconds = 1e7


class Job(_Section):
    """One pipeline: where it runs, what a step is, when it comes and, if `leaves_s` is set, when its user stops it."""

    name: str
    train: tuple[int, ...]
    infer: tuple[int, ...]
    tp: int = Field(1, ge=1)
    weight: float = Field(1.0, gt=0)
    min_share: float = Field(0.0, ge=0, le=1)
    max_share: float = Field(1.0, gt=0, le=1)
    steps: int = Field(10, ge=1)
    groups: int = Field(8, ge=1)
    samples_per_group: int = Field(8, ge=1)
    staleness: int = Field(1, ge=0)
    train_s: Seconds = 10.0
    log_probs_s: Seconds = 0.0
    init_s: Seconds = 2.0
    tokens: Tokens = Tokens()
    engine: Engine = Engine()
    arrive_s: Seconds = 0.0
    leaves_s: Seconds | None = None
    full_overlap: bool = False


class Fleet(_Section):
    """Many jobs of one kind: `count` jobs whose mappings of `width` GPUs start at `first` and then every
    `stride` GPUs round the pool; training takes the first `train_gpus` of each."""

    count: int = Field(ge=1, le=10_000)
    width: int = Field(ge=1)
    train_gpus: int = Field(ge=1)
    stride: int = Field(ge=1)
    first: int = Field(0, ge=0)
    arrive_every_s: Seconds = 0.0
    job: dict[str, Any] = Field(default_factory=dict)


class Scenario(_Section):
    """Everything one simulation needs besides its seed."""

    name: str = "scenario"
    about: str = ""
    pool: PoolSection = PoolSection()
    costs: Costs = Costs()
    network: Network = Network()
    faults: Faults = Faults()
    limits: dict[str, float] = Field(default_factory=dict)
    jobs: tuple[Job, ...] = ()
    fleets: dict[str, Fleet] = Field(default_factory=dict)
    horizon_s: Seconds = 1e6

    @model_validator(mode="before")
    @classmethod
    def _unroll_fleets(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("fleets"), dict):
            return given
        try:
            pool = PoolSection.model_validate(given.get("pool", {}))
            fleets = {name: Fleet.model_validate(raw) for name, raw in given["fleets"].items()}
        except ValidationError:
            # Left as it is, so that the mistake is reported where the field itself is checked, with its path.
            return given
        size = pool.nodes * pool.gpus_per_node
        jobs: list[object] = list(given.get("jobs", ()))
        for name, fleet in fleets.items():
            jobs += [_fleet_job(name, fleet, number, size) for number in range(fleet.count)]
        expanded: dict[str, Any] = {**given, "jobs": jobs, "fleets": {}}
        return expanded

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        _check_limits(self.limits)
        names = [job.name for job in self.jobs]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"jobs: two jobs are called {twice[0]!r}")
        if not self.jobs:
            raise ValueError("jobs: a scenario needs at least one job, or a fleet")
        for number, job in enumerate(self.jobs):
            try:
                register(
                    self.gpu_pool,
                    job.name,
                    job.name,
                    {ACTOR_TRAIN: 1, ACTOR_INFER: job.tp},
                    {ACTOR_TRAIN: job.train, ACTOR_INFER: job.infer},
                    min_share=job.min_share,
                    max_share=job.max_share,
                    full_overlap=job.full_overlap,
                )
            except RegistrationError as error:
                raise ValueError(f"jobs.{number}: {error}") from error
        return self

    @property
    def gpu_pool(self) -> Pool:
        return Pool(self.pool.nodes, self.pool.gpus_per_node)

    @property
    def scheduler_limits(self) -> Limits:
        return limits_from(self.limits)


def _check_limits(limits: Mapping[str, float]) -> None:
    known = [f.name for f in dataclasses.fields(Limits)]
    for key, value in limits.items():
        if key not in known:
            raise ValueError(f"limits.{key}: unknown; the limits are {', '.join(known)}")
        if value < 0:
            raise ValueError(f"limits.{key}: {value} is negative")
        if not math.isfinite(value):
            raise ValueError(f"limits.{key}: {value} is not a finite number")
        if key in COUNTS and value != int(value):
            raise ValueError(f"limits.{key}: {value} is not a whole number")
        if key in _PERIODS and value == 0:
            raise ValueError(f"limits.{key}: must be more than 0 seconds, as something is done that often")
    typed = limits_from(limits)
    if typed.heartbeat_s >= typed.lease_s:
        raise ValueError(f"limits.heartbeat_s: {typed.heartbeat_s:g} s must be less than lease_s ({typed.lease_s:g} s), or every pipeline is taken for dead")


def _fleet_job(name: str, fleet: Fleet, number: int, pool_size: int) -> dict[str, Any]:
    if fleet.width > pool_size or fleet.train_gpus > fleet.width:
        raise ValueError(f"fleets.{name}: width={fleet.width} must fit the pool of {pool_size} GPUs, and train_gpus={fleet.train_gpus} the width")
    start = (fleet.first + number * fleet.stride) % pool_size
    gpus = [(start + i) % pool_size for i in range(fleet.width)]
    return {
        "name": f"{name}{number}",
        "train": tuple(sorted(gpus[: fleet.train_gpus])),
        "infer": tuple(sorted(gpus)),
        "arrive_s": number * fleet.arrive_every_s,
        **fleet.job,
    }


def parse_scenario(given: object, *, where: str = "scenario") -> Scenario:
    """A scenario from plain data. Raises ScenarioError with one line per mistake: path of the key, what is wrong, the value."""
    try:
        return Scenario.model_validate(given)
    except ValidationError as error:
        lines = []
        for mistake in error.errors():
            path = ".".join(str(part) for part in _place(mistake["loc"], given))
            shown = "" if isinstance(mistake["input"], dict) else f" (given: {mistake['input']!r})"
            lines.append(f"{where}: {path + ': ' if path else ''}{mistake['msg'].removeprefix('Value error, ')}{shown}")
        raise ScenarioError("\n".join(lines)) from error


def _place(loc: tuple[int | str, ...], given: object) -> tuple[int | str, ...]:
    """Where a mistake is in the file: a job that was made from a fleet is found there."""
    if len(loc) < 2 or loc[0] != "jobs" or not isinstance(loc[1], int) or not isinstance(given, dict) or not isinstance(given.get("fleets"), dict):
        return loc
    number = loc[1] - len(given.get("jobs", ()))
    for name, fleet in given["fleets"].items():
        if 0 <= number < fleet["count"]:
            return ("fleets", name, "job", *loc[2:])
        number -= fleet["count"]
    return loc


def load_scenario(path: str | Path) -> Scenario:
    """Reads a scenario YAML file. Raises ScenarioError for a file that is missing, not YAML or not a scenario."""
    path = Path(path)
    try:
        given = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise ScenarioError(f"{path}: a scenario is a mapping of keys, this is {type(given).__name__}")
    return parse_scenario(given, where=str(path))
