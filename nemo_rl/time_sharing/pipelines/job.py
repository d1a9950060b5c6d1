"""What is submitted to a pool: a configuration, and the GPUs it may use.

Reads ordinary GRPO, SFT and evaluation files, files that name a command, and the wrapper files of the seeds, which name
such a file and the device mappings. Invariants: a job that is returned can be registered on the pool it was made for;
no two jobs that are submitted together write into one log or checkpoint directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from nemo_rl.config import (
    ConfigError,
    DistillationMasterConfig,
    EvalMasterConfig,
    MasterConfig,
    RootConfig,
    SFTMasterConfig,
    load_master_config,
)
from nemo_rl.config.generation import VllmConfig
from nemo_rl.config.layers import merge, read_layers
from nemo_rl.config.load import kind_of_file
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.overrides import parse_override
from nemo_rl.config.schema import is_known
from nemo_rl.config.teacher_sections import teachers_of
from nemo_rl.config.world_sizes import training_world_size
from nemo_rl.time_sharing.log.pool_state import HostLimits, Wishes
from nemo_rl.time_sharing.pipelines.adapters import ADAPTERS, AdaptersConfig, adapters_command
from nemo_rl.time_sharing.pipelines.command_config import EXTERNAL, CommandConfig, read_command, stop_at_once
from nemo_rl.time_sharing.pipelines.fits import as_teacher, divides, engines_are_too_wide, engines_of, teachers_fit
from nemo_rl.time_sharing.pipelines.wrapper import (
    CONFIG_PATH,
    OVERRIDES,
    Wrapper,
    check_strategy,
    limits_of,
    overrides_of,
    read_wrapper,
    wishes_of,
)
from nemo_rl.time_sharing.planning import job_placement
from nemo_rl.time_sharing.protocol.topology import GpuOutsidePool, Pool, Topology, register
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, KILLED_S, SCAVENGER, UNMEASURED_RANK_BATCH

Config = MasterConfig | SFTMasterConfig | EvalMasterConfig | CommandConfig  # of a job


def with_own_folders(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Configurations of jobs by the jobs' names; those that would write into the same directory get one each below it,
    named after the job.
    """
    # The pipelines' processes have working directories of their own.
    wanted = {job: [str(Path(folder).absolute()) for folder in _folders(config)] for job, config in configs.items()}
    logs, checkpoints = ([folders[which] for folders in wanted.values() if folders] for which in (0, 1))
    placed = dict(configs)
    for job, folders in wanted.items():
        if not folders:
            continue
        log_dir, checkpoint_dir = folders
        log_dir = f"{log_dir}/{job}" if logs.count(log_dir) > 1 else log_dir
        if checkpoints.count(checkpoint_dir) > 1:
            checkpoint_dir = f"{checkpoint_dir}/{job}"
        placed[job] = in_folders(configs[job], log_dir, checkpoint_dir)
    return placed


def _folders(config: Config) -> tuple[str, ...]:
    if isinstance(config, AdaptersConfig):
        return config.log_dir, config.checkpoint_dir
    if isinstance(config, RootConfig):
        return config.logger.log_dir, config.checkpointing.checkpoint_dir
    return ()


def in_folders(config: Config, log_dir: str, checkpoint_dir: str) -> Config:
    """The configuration of a job that logs and saves there, as far as it does."""
    if isinstance(config, AdaptersConfig):
        # Its command runs where the job was submitted.
        stays = [str(Path(folder).absolute()) for folder in _folders(config)] == [log_dir, checkpoint_dir]
        return config if stays else config.in_folders(log_dir, checkpoint_dir)
    if isinstance(config, RootConfig):
        config.logger.log_dir, config.checkpointing.checkpoint_dir = log_dir, checkpoint_dir
    return config


_COMMAND_SLICE_S = 60.0


class Kind(str, Enum):
    """What a job does, by its configuration."""

    GRPO = "grpo"
    SFT = "sft"
    EVALUATION = "evaluation"
    TEACHER = "teacher"
    EXTERNAL = EXTERNAL


_KINDS: dict[type[object], Kind] = {
    MasterConfig: Kind.GRPO,
    DistillationMasterConfig: Kind.GRPO,
    SFTMasterConfig: Kind.SFT,
    EvalMasterConfig: Kind.EVALUATION,
    CommandConfig: Kind.EXTERNAL,
    AdaptersConfig: Kind.EXTERNAL,
}
PIPELINES = {
    Kind.GRPO: "nemo_rl.time_sharing.pipelines.grpo.NemoRLFullFinetunePipeline",
    Kind.SFT: "nemo_rl.time_sharing.pipelines.sft.SFTPipeline",
    Kind.EVALUATION: "nemo_rl.time_sharing.pipelines.evaluation.EvaluationPipeline",
    Kind.EXTERNAL: "nemo_rl.time_sharing.pipelines.command.CommandPipeline",
    Kind.TEACHER: "nemo_rl.time_sharing.pipelines.teacher.TeacherPipeline",
}
"""The class of each kind, which the pool imports when a job of it starts."""
_CLASSES = {path.rpartition(".")[2]: kind for kind, path in PIPELINES.items()} | {
    "RollMultiLoraPipeline": Kind.EXTERNAL
}


@dataclass(frozen=True)
class Job:
    """One pipeline to run on a pool.

    Attributes:
        infer: Global ids of the GPUs that its generation, or its command, may use, ascending. Those of training where
            nothing generates: a registration always has some.
        options: Of the registration; see `topology.register`.
        teaches: Whether it serves the teacher of its configuration to other jobs, and trains nothing.
        column: Which slot of each of its GPUs it is on, in a pool with several; None where it needs whole GPUs.
    """

    name: str  # its id on the pool
    config: Config
    train: tuple[int, ...]  # global ids of its training GPUs, ascending; none where nothing trains
    infer: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    slice_s: float = 30.0  # how long an SFT run keeps its GPUs while somebody waits for them, seconds
    folder: str = field(default_factory=os.getcwd)  # what relative paths of the configuration are relative to
    env: Mapping[str, str] = field(default_factory=dict)  # variables of where it was submitted that its processes get
    anywhere: bool = False  # whether it may train elsewhere just as well, since no file names its training GPUs
    column: int | None = 0
    teaches: bool = False
    measures_batch: bool = False  # whether its `rank_batch` is what its engines turn out to do
    wishes: Wishes = Wishes()
    limits: HostLimits = HostLimits()  # what it may take of its hosts, below what the pool allows
    unix_user: str = ""  # as whom the pool runs it; the pool's own user where empty
    request: str = ""  # an id; the same one is no second submission, but asked again after the pool's actor died

    @property
    def kind(self) -> Kind:
        """What it does."""
        return Kind.TEACHER if self.teaches else _KINDS[type(self.config)]

    @property
    def teachers(self) -> tuple[str, ...]:
        """The jobs that score its samples; its own name where it is one that scores."""
        if self.teaches:
            return (self.name,)
        asked = teachers_of(self.config) if isinstance(self.config, MasterConfig) else []
        return tuple(dict.fromkeys(teacher.job for teacher in asked if teacher.job))

    @property
    def saves_in(self) -> str:
        """The folder of its checkpoints; empty where it saves none."""
        return self.writes_in[1] if self.writes_in else ""

    @property
    def writes_in(self) -> tuple[str, ...]:
        """The folders of its logs and of its checkpoints; none where it has none of its own."""
        return () if self.teaches else tuple(str(Path(self.folder, one)) for one in _folders(self.config))

    @property
    def resumes(self) -> bool:
        """Whether it goes on where it was, after it has been drained; a command begins again by its own rules."""
        if isinstance(self.config, MasterConfig | SFTMasterConfig):
            return self.config.checkpointing.enabled and not self.teaches
        return isinstance(self.config, CommandConfig)

    @property
    def engines(self) -> VllmConfig | None:
        """The options of its engines; None where it has none."""
        return engines_of(self.config, self.name if self.teaches else None)

    @property
    def rank_width(self) -> int:
        """GPUs of one rank of what is elastic."""
        if isinstance(self.config, CommandConfig):
            return self.config.gpus
        engines = self.engines
        return 1 if engines is None else engines.tensor_parallel_size * engines.pipeline_parallel_size

    def placed(self, pool: Pool, others: Iterable[job_placement.Mapped], gone: Set[int] = frozenset()) -> Job:
        """The same job, on the slot of its GPUs on which the fewest others are; one that may train anywhere trains on
        the GPUs on which the least goes on. Its ranks on GPUs that are `gone` are left out.

        Args:
            pool: Where it is to run.
            others: The mappings of the pool's jobs that have not ended.

        Raises ValueError: it has no place beside those that are gone.
        """
        trains_only, others = _trains_only(self.config), list(others)
        within: Sequence[int] = range(pool.gpus) if trains_only else self.infer
        moved = self
        if gone:
            width = self.rank_width
            ranks = [within[start : start + width] for start in range(0, len(within), width)]
            within = [gpu for rank in ranks if gone.isdisjoint(rank) for gpu in rank]
            if len(within) < max(len(self.train), 1) or (not self.anywhere and not gone.isdisjoint(self.train)):
                raise ValueError(f"{self.name}: GPUs that it needs are away")
            moved = moved if trains_only else replace(self, infer=tuple(within))
        if self.anywhere and len(self.train) <= len(within):
            train = job_placement.place(within, len(self.train), others)
            moved = replace(moved, train=train, infer=train if trains_only else moved.infer)
        if moved is not self:
            moved = replace(moved, options={**self.options, "full_overlap": moved.covers_every_rank()})
        if moved.column is None or not moved.infer:
            return moved
        return replace(moved, column=job_placement.column_for(moved.infer, pool.slots_per_gpu, others))

    def covers_every_rank(self) -> bool:
        """Whether training takes GPUs of every rank, so that it and generation take turns."""
        ranks = [self.infer[start : start + self.rank_width] for start in range(0, len(self.infer), self.rank_width)]
        return all(set(rank) & set(self.train) for rank in ranks)

    def topology(self, pool: Pool) -> Topology:
        """What is registered. Raises RegistrationError: the mappings do not fit the pool or the configuration."""
        _check_named_gpus(pool, self)
        namespace = f"pipeline_{self.name}_NS"
        return register(pool, self.name, namespace, self.widths(pool), self.mappings(pool), **self.options)

    def widths(self, pool: Pool) -> dict[str, int]:
        """Slots of one rank by cluster."""
        slots = self.rank_width * (pool.slots_per_gpu if self.column is None else 1)
        return ({ACTOR_TRAIN: 1} if self.train else {}) | {ACTOR_INFER: slots}

    def mappings(self, pool: Pool) -> dict[str, list[int]]:
        """Slots of the pool by cluster; where a slot is a whole GPU, global GPU ids."""
        infer = pool.slots_on(self.infer, self.column)
        return ({ACTOR_TRAIN: pool.slots_on(self.train, self.column)} if self.train else {}) | {ACTOR_INFER: infer}


def read_jobs(files: Sequence[str | Path], pool: Pool, overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs behind some files, each checked against the pool.

    Args:
        files: Configurations of any kind, or wrappers around them. The same file may come several times.
        pool: Where they are to run.
        overrides: `key=value` for all of them that have the key.

    Raises ConfigError: a file is wrong, or asks for more than the pool has; RegistrationError: its mappings cannot be
    registered.
    """
    sources = [_source(Path(file)) for file in files]
    jobs: list[Job] = []
    for source in sources:
        meant = [text for text in overrides if _concerns(text, source, sources)]
        job = _read_job(source, pool, meant, taken=[other.name for other in jobs])
        jobs.append(job.placed(pool, [job_placement.Mapped(one.train, one.infer, one.column) for one in jobs]))
    own = with_own_folders({job.name: job.config for job in jobs if not job.teaches})
    jobs = [replace(job, config=own.get(job.name, job.config)) for job in jobs]
    for job in jobs:
        job.topology(pool)
    return jobs


@dataclass(frozen=True)
class _Source:
    """A file that was given, the keys of its wrapper, and the configuration it leads to."""

    file: Path
    wrapper: Wrapper
    inner: Path
    config: type[Any]
    teaches: bool = False


def _source(file: Path) -> _Source:
    wrapper = read_wrapper(file)
    inner = (file.parent / wrapper[CONFIG_PATH]) if wrapper else file
    config = CommandConfig if {EXTERNAL, "multi_lora"} & set(merge(read_layers(inner))) else kind_of_file(inner)
    named = str(wrapper.get("pipeline_cls") or "").rpartition(".")[2]
    if _CLASSES.get(named) is Kind.TEACHER and issubclass(config, MasterConfig):
        return _Source(file, wrapper, inner, config, teaches=True)
    if named and _CLASSES.get(named) is not _KINDS[config]:
        fitting = next(name for name, kind in _CLASSES.items() if kind is _KINDS[config])
        raise ConfigError([f"pipeline_cls: {named}, but {inner} is run by {fitting}; name that, or leave the key out"])
    return _Source(file, wrapper, inner, config)


def _concerns(override: str, source: _Source, sources: Sequence[_Source]) -> bool:
    """Whether an override is for this file: its kind has the key, or no kind of those that were given has it."""
    key = parse_override(override).key

    def has(of: _Source) -> bool:
        config = MultiLoraMasterConfig if ADAPTERS in of.wrapper else of.config
        return config is not CommandConfig and is_known(config, key)

    return has(source) or not any(has(other) for other in sources)


def _read_job(source: _Source, pool: Pool, overrides: Sequence[str], *, taken: Sequence[str]) -> Job:
    wrapper = source.wrapper
    own = overrides_of(wrapper) if issubclass(source.config, MasterConfig) else []
    if wrapper and source.config is MasterConfig:
        # Files of other control planes draw one sample per prompt to try a pool.
        own.append("grpo.allow_zero_advantages=true")
    config = _config(source, [*own, *map(str, wrapper.get(OVERRIDES) or []), *overrides])
    check_strategy(wrapper, config)
    per_node = wrapper.get("num_gpus_per_node")
    if per_node is not None and per_node != pool.gpus_per_node:
        raise ConfigError([f"num_gpus_per_node: {per_node}, but the pool's nodes have {pool.gpus_per_node}"])
    name = _name(str(wrapper.get("exp_name") or source.file.stem), taken)
    train: tuple[int, ...] = ()
    if source.teaches and isinstance(config, MasterConfig):
        as_teacher(config, name)
    elif isinstance(config, RootConfig):
        train = _train_mapping(wrapper.get("train_device_mapping"), config, pool, name)
    given = wrapper.get("infer_device_mapping")
    # For a command as many GPUs of the pool as divide into its ranks.
    everywhere = range(pool.gpus - pool.gpus % config.gpus if isinstance(config, CommandConfig) else pool.gpus)
    infer = train if _trains_only(config) else tuple(given or everywhere)
    anywhere = bool(train) and wrapper.get("train_device_mapping") is None
    if anywhere and given:
        train = infer[: len(train)]
    # Only commands of ours keep to a slot's memory.
    commands = isinstance(config, CommandConfig) and not isinstance(config, AdaptersConfig)
    column = None if wrapper.get("whole_gpus") or commands else 0
    job = Job(name, config, train, infer, anywhere=anywhere, column=column, teaches=source.teaches)
    _check(job)
    if problem := engines_are_too_wide(name, job.engines, pool.gpus_per_node):
        raise ConfigError([problem])
    options, measures = _options(wrapper, job), wrapper.get("rank_batch") is None
    slice_s = options.get("slice_s", job.slice_s)
    own = {"wishes": wishes_of(wrapper), "limits": limits_of(wrapper)}
    return replace(job, options=options, slice_s=slice_s, measures_batch=measures, **own)


def _config(source: _Source, overrides: Sequence[str]) -> Config:
    if source.config is not CommandConfig:
        config: Config = load_master_config(str(source.inner), overrides, source.config)
        return config
    if EXTERNAL not in (found := merge(read_layers(source.inner))):
        return adapters_command(source.wrapper, source.inner, overrides)
    if overrides:
        raise ConfigError([f"{overrides[0]}: {source.inner} names a command, which takes no overrides"])
    return read_command(found, source.inner)


def _trains_only(config: Config) -> bool:
    return isinstance(config, RootConfig) and engines_of(config, None) is None


def _name(wanted: str, taken: Sequence[str]) -> str:
    name = base = re.sub(r"[^A-Za-z0-9-]+", "_", wanted).strip("_") or "pipeline"
    number = 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def _train_mapping(given: Sequence[int] | None, config: RootConfig, pool: Pool, name: str) -> tuple[int, ...]:
    """The training GPUs: those that are named, else the first ones, until the job is placed."""
    if given is not None:
        return tuple(given)
    size = training_world_size(config)
    if size > pool.gpus:
        raise ConfigError(
            [f"{name}: training needs {size} GPUs (cluster.*), the pool has {pool.gpus}; lower cluster.gpus_per_node"]
        )
    return tuple(range(size))


def _check_named_gpus(pool: Pool, job: Job) -> None:
    """Names of GPUs are checked before they become slots, which have other numbers."""
    for cluster, gpus in ((ACTOR_TRAIN, job.train), (ACTOR_INFER, job.infer)):
        for gpu in gpus if pool.slots_per_gpu > 1 else ():
            if not 0 <= gpu < pool.gpus:
                where = f"GPU {gpu} is outside the pool of {pool.gpus} GPUs (0..{pool.gpus - 1})"
                raise GpuOutsidePool(where, pipeline=job.name, cluster=cluster)


def _check(job: Job) -> None:
    problems = []
    outside = sorted(set(job.train) - set(job.infer))
    if outside:
        problems.append(f"{job.name}: training GPUs {outside} are not among its generation GPUs {list(job.infer)}")
    if not job.infer:
        problems.append(f"{job.name}: external.gpus asks for more GPUs than the pool has; lower it")
    if isinstance(job.config, RootConfig) and not job.teaches:
        problems += divides(job.name, job.config, len(job.train))
    if isinstance(job.config, MasterConfig) and job.config.grpo.rollout_replay is not None and not job.teaches:
        problems.append(f"{job.name}: grpo.rollout_replay generates nothing; there is nothing to share")
    if isinstance(job.config, MasterConfig) and not job.teaches:
        problems += teachers_fit(job.name, job.config, len(job.train))
    engines = job.engines
    if engines is not None and engines.engines_per_gpu > 1:
        problems.append(
            f"{job.name}: vllm_cfg.engines_per_gpu is {engines.engines_per_gpu}, but a scheduler lends GPUs to one "
            "engine each; set it to 1"
        )
    if problems:
        raise ConfigError(problems)


def _options(wrapper: Mapping[str, object], job: Job) -> dict[str, Any]:
    options: dict[str, object] = {
        "staleness": job.config.max_staleness() if isinstance(job.config, MasterConfig) and not job.teaches else 0,
        "rank_batch": 1 if job.kind is Kind.EXTERNAL else UNMEASURED_RANK_BATCH,
        "full_overlap": job.covers_every_rank(),
    }
    if isinstance(job.config, CommandConfig):
        if wrapper.get("priority") == SCAVENGER:
            stop_at_once(job.config)
        # It has to start, and maybe to load a model, before it does anything.
        options |= {"slice_s": _COMMAND_SLICE_S, "drain_s": job.config.stop_s + KILLED_S}
    chosen = ("weight", "min_share", "max_share", "rank_batch", "slice_s", "priority")
    return options | {key: wrapper[key] for key in chosen if wrapper.get(key) is not None}
