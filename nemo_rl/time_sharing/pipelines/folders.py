"""Log and checkpoint directories of jobs that are submitted together: no two write into one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_rl.config import EvalMasterConfig, MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.time_sharing.pipelines.adapters import AdaptersConfig
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig

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
    """Where a job logs and saves; nowhere if it trains nothing."""
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
