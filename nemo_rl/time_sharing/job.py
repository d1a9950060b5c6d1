"""What is submitted to a pool: a configuration, and the GPUs it may use.

Reads ordinary GRPO and SFT files, and the wrapper files of the seeds, which name such a file and the device mappings.
Knows no Ray. Invariant: a job that is returned can be registered on the pool it was made for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config import ConfigError, MasterConfig, load_master_config
from nemo_rl.config.placement import training_world_size
from nemo_rl.time_sharing.topology import Pool, Topology, register
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN

_WRAPPER_KEY = "nemo_config_path"
_WRAPPER_KEYS = {
    "pipeline_cls",
    "exp_name",
    _WRAPPER_KEY,
    "nemo_config_overrides",
    "train_device_mapping",
    "infer_device_mapping",
    "num_gpus_per_node",
    "rlix_max_colocated_worker_groups",
    "verify_model_after_sync",
    "nemo_increment_log_dir",
    "actor_train",
    "actor_infer",
    "weight",
    "min_share",
    "max_share",
    "rank_batch",
}
_DEFAULT_RANK_BATCH = 64


@dataclass(frozen=True)
class Job:
    """One pipeline to run on a pool.

    Attributes:
        name: Its id on the pool.
        config: A checked configuration.
        train: Global ids of its training GPUs, ascending.
        infer: Global ids of the GPUs that its generation may use, ascending.
        options: Of the registration: weight, min_share, max_share, staleness, rank_batch, full_overlap.
        folder: What relative paths of the configuration are relative to.
    """

    name: str
    config: MasterConfig
    train: tuple[int, ...]
    infer: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)

    @property
    def rank_width(self) -> int:
        """GPUs of one generation rank."""
        vllm = self.config.policy.generation.vllm_cfg
        return vllm.tensor_parallel_size * vllm.pipeline_parallel_size

    def topology(self, pool: Pool) -> Topology:
        """What is registered.

        Raises:
            RegistrationError: The mappings do not fit the pool or the configuration.
        """
        return register(pool, self.name, f"pipeline_{self.name}_NS", self.widths(), self.mappings(), **self.options)

    def widths(self) -> dict[str, int]:
        """GPUs of one rank by cluster."""
        return {ACTOR_TRAIN: 1, ACTOR_INFER: self.rank_width}

    def mappings(self) -> dict[str, list[int]]:
        """Global GPU ids by cluster."""
        return {ACTOR_TRAIN: list(self.train), ACTOR_INFER: list(self.infer)}


def read_jobs(files: Sequence[str | Path], pool: Pool, overrides: Sequence[str] = ()) -> list[Job]:
    """The jobs behind some files, each checked against the pool.

    Args:
        files: GRPO configurations, or wrappers around them. The same file may come several times.
        pool: Where they are to run.
        overrides: `key=value` for all of them.

    Raises:
        ConfigError: A file is wrong, or asks for more than the pool has.
        RegistrationError: Its mappings cannot be registered.
    """
    jobs: list[Job] = []
    first_free = 0
    for file in files:
        job, first_free = _read_job(Path(file), pool, overrides, first_free, taken=[other.name for other in jobs])
        jobs.append(job)
    jobs = _with_own_folders(jobs)
    for job in jobs:
        job.topology(pool)
    return jobs


def _read_job(
    file: Path, pool: Pool, overrides: Sequence[str], first_free: int, *, taken: Sequence[str]
) -> tuple[Job, int]:
    wrapper = _wrapper(file)
    inner = (file.parent / wrapper[_WRAPPER_KEY]) if wrapper else file
    own = [str(item) for item in wrapper.get("nemo_config_overrides") or []]
    config = load_master_config(str(inner), [*own, *overrides], MasterConfig)
    name = _name(str(wrapper.get("exp_name") or file.stem), taken)
    train, first_free = _train_mapping(wrapper.get("train_device_mapping"), config, pool, first_free, name)
    infer = tuple(wrapper.get("infer_device_mapping") or range(pool.size))
    job = Job(name, config, train, infer)
    _check(job)
    return replace(job, options=_options(wrapper, job)), first_free


def _wrapper(file: Path) -> dict[str, Any]:
    """The keys of a wrapper file; none for an ordinary configuration.

    Raises:
        ConfigError: The file cannot be read, or has a key that no wrapper has.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError([f"{file}: cannot be read ({error})"]) from error
    if not isinstance(content, dict) or _WRAPPER_KEY not in content:
        return {}
    unknown = sorted(set(content) - _WRAPPER_KEYS)
    if unknown:
        raise ConfigError([f"{file}: unknown keys {unknown}; a wrapper has {sorted(_WRAPPER_KEYS)}"])
    for cluster, key in (("actor_train", "train_device_mapping"), ("actor_infer", "infer_device_mapping")):
        section = content.get(cluster) or {}
        content.setdefault(key, section.get("device_mapping"))
    return content


def _name(wanted: str, taken: Sequence[str]) -> str:
    name = base = re.sub(r"[^A-Za-z0-9-]+", "_", wanted).strip("_") or "pipeline"
    number = 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def _train_mapping(
    given: Sequence[int] | None, config: MasterConfig, pool: Pool, first_free: int, name: str
) -> tuple[tuple[int, ...], int]:
    """The training GPUs: those that are named, or the next ones, so that neighbours train on different GPUs."""
    if given is not None:
        if not given:
            raise ConfigError([f"{name}: train_device_mapping is empty; name its GPUs, or leave the key out"])
        return tuple(given), first_free
    size = training_world_size(config)
    if size > pool.size:
        raise ConfigError(
            [f"{name}: training needs {size} GPUs (cluster.*), the pool has {pool.size}; lower cluster.gpus_per_node"]
        )
    if first_free + size > pool.size:
        first_free = 0
    return tuple(range(first_free, first_free + size)), (first_free + size) % pool.size


def _check(job: Job) -> None:
    problems = []
    outside = sorted(set(job.train) - set(job.infer))
    if outside:
        problems.append(f"{job.name}: training GPUs {outside} are not among its generation GPUs {list(job.infer)}")
    if job.config.grpo.rollout_replay is not None:
        problems.append(f"{job.name}: grpo.rollout_replay generates nothing; there is nothing to share")
    if problems:
        raise ConfigError(problems)


def _options(wrapper: Mapping[str, Any], job: Job) -> dict[str, Any]:
    grpo = job.config.grpo
    ranks = [set(job.infer[start : start + job.rank_width]) for start in range(0, len(job.infer), job.rank_width)]
    options: dict[str, Any] = {
        "staleness": grpo.async_grpo.max_trajectory_age_steps if grpo.async_grpo.enabled else 0,
        "rank_batch": _DEFAULT_RANK_BATCH,
        # Where training covers every rank, generation and training take turns.
        "full_overlap": all(rank & set(job.train) for rank in ranks),
    }
    chosen = ("weight", "min_share", "max_share", "rank_batch")
    return options | {key: wrapper[key] for key in chosen if wrapper.get(key) is not None}


def _with_own_folders(jobs: Sequence[Job]) -> list[Job]:
    """Jobs that would write into the same folder get one each, named after the job."""
    # The pipelines' processes have working directories of their own.
    logs = [str(Path(job.config.logger.log_dir).absolute()) for job in jobs]
    checkpoints = [str(Path(job.config.checkpointing.checkpoint_dir).absolute()) for job in jobs]
    for job, log_dir, checkpoint_dir in zip(jobs, logs, checkpoints, strict=True):
        job.config.logger.log_dir = f"{log_dir}/{job.name}" if logs.count(log_dir) > 1 else log_dir
        several = checkpoints.count(checkpoint_dir) > 1
        job.config.checkpointing.checkpoint_dir = f"{checkpoint_dir}/{job.name}" if several else checkpoint_dir
    return list(jobs)
