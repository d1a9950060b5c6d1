"""Log and checkpoint directories of jobs that are submitted together: no two write into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config import RootConfig
from nemo_rl.time_sharing.pipelines.adapters import AdaptersConfig

if TYPE_CHECKING:
    from nemo_rl.time_sharing.pipelines.job import Job


def with_own_folders(jobs: Sequence[Job]) -> list[Job]:
    """The jobs; those that would write into the same directory get one each below it, named after the job."""
    # The pipelines' processes have working directories of their own.
    wanted = {job.name: [str(Path(folder).absolute()) for folder in _folders(job)] for job in jobs}
    logs, checkpoints = ([folders[which] for folders in wanted.values() if folders] for which in (0, 1))
    placed: list[Job] = []
    for job in jobs:
        if not wanted[job.name]:
            placed.append(job)
            continue
        log_dir, checkpoint_dir = wanted[job.name]
        log_dir = f"{log_dir}/{job.name}" if logs.count(log_dir) > 1 else log_dir
        if checkpoints.count(checkpoint_dir) > 1:
            checkpoint_dir = f"{checkpoint_dir}/{job.name}"
        placed.append(_in_folders(job, log_dir, checkpoint_dir))
    return placed


def _folders(job: Job) -> tuple[str, ...]:
    """Where a job logs and saves; nowhere if it trains nothing."""
    config = job.config
    if isinstance(config, AdaptersConfig):
        return config.log_dir, config.checkpoint_dir
    if isinstance(config, RootConfig) and not job.teaches:
        return config.logger.log_dir, config.checkpointing.checkpoint_dir
    return ()


def _in_folders(job: Job, log_dir: str, checkpoint_dir: str) -> Job:
    config = job.config
    if isinstance(config, AdaptersConfig):
        # Its command runs where the job was submitted.
        stays = [str(Path(folder).absolute()) for folder in _folders(job)] == [log_dir, checkpoint_dir]
        return job if stays else replace(job, config=config.in_folders(log_dir, checkpoint_dir))
    if isinstance(config, RootConfig):
        config.logger.log_dir, config.checkpointing.checkpoint_dir = log_dir, checkpoint_dir
    return job
