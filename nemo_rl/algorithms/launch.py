"""What every run's command line shares: arguments in, configuration, set-up, drive, clean end, exit code out.

Knows a run only as something that is set up, driven and closed. User mistakes become one message without a traceback.
Invariant: whatever happens, no process of the run is left; Ctrl-C ends with exit code 130 and the last checkpoint usable.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from nemo_rl.config import ConfigError, OverridesError, load_master_config
from nemo_rl.config.master import CompleteConfig, RootConfig
from nemo_rl.utils.progress import RunProgress

if TYPE_CHECKING:
    from nemo_rl.utils.logger import Logger

logger = logging.getLogger("nemo_rl")

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

Config = TypeVar("Config", bound=CompleteConfig)
TrainingConfig = TypeVar("TrainingConfig", bound=RootConfig)


class Watchable(Protocol):
    """What a run shows of itself."""

    progress: RunProgress
    logger: Logger


Run = TypeVar("Run", bound=Watchable)


def main(arguments: Sequence[str], *, default_config: Path, kind: type[Config], what: str, example: str, run_to_end: Callable[[Config], int]) -> int:
    """Reads the command line and the configuration, and runs.

    Args:
        arguments: Command-line arguments without the program's name.
        default_config: Used when `--config` is not given.
        kind: Class of the configuration.
        what: The run in words, for `--help`.
        example: An override, for `--help`.
        run_to_end: Runs a checked configuration.

    Returns:
        The process's exit code: 0 done, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(description=f"{what}; further arguments are overrides such as {example}.")
    parser.add_argument("--config", type=Path, default=default_config, help=f"YAML file; default {default_config.name}")
    options, overrides = parser.parse_known_args(list(arguments))
    level = os.environ.get("NRL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load_master_config(str(options.config), overrides, kind)
    except (ConfigError, OverridesError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return run_to_end(config)


def run_to_end(config: TrainingConfig, setup: Callable[[TrainingConfig], Run], drive: Callable[[Run], None], close: Callable[[Run], None]) -> int:
    """Sets a checked configuration up, drives the run, ends it and writes its report; the exit code."""
    run: Run | None = None
    code = EXIT_FAILED
    try:
        _end_cleanly_on_sigterm()
        run = setup(config)
        # Starting Ray installs a handler of its own.
        _end_cleanly_on_sigterm()
        with _monitor(config, run), run.progress:
            drive(run)
        _show_trackers(run)
        code = EXIT_OK
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: ending workers; the last finished checkpoint is complete\n")
        code = EXIT_INTERRUPTED
    except user_errors() as error:
        logger.debug("run failed", exc_info=True)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        code = EXIT_FAILED
    finally:
        if run is not None:
            code = _closed(run, close, code)
    if run is not None and code == EXIT_OK:
        _report(Path(config.logger.log_dir))
    return code


def _show_trackers(run: Watchable) -> None:
    from nemo_rl.utils.report import log_report

    log_report(run.logger)


def _monitor(config: RootConfig, run: Watchable) -> AbstractContextManager[object]:
    if not config.logger.monitor_gpus:
        return nullcontext()
    from nemo_rl.distributed.node_monitor import NodeMonitor

    sampling = config.logger.gpu_monitoring
    return NodeMonitor(run.logger, sampling.collection_interval, sampling.flush_interval)


def _end_cleanly_on_sigterm() -> None:
    """A scheduler that ends the job sends SIGTERM: it deserves the same clean end as Ctrl-C."""
    # Handlers can be set by the main thread only; a run inside another thread is ended by whoever owns the process.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _closed(run: Run, close: Callable[[Run], None], code: int) -> int:
    """Ends the run; the exit code, which a checkpoint that could not be finished turns into a failure."""
    from nemo_rl.utils.checkpoint import CheckpointError

    try:
        close(run)
    except CheckpointError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return code or EXIT_FAILED
    return code


def user_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message says all a user needs; anything else keeps its traceback."""
    from nemo_rl.algorithms.grpo.dynamic_sampling import DynamicSamplingError
    from nemo_rl.data.errors import DataError
    from nemo_rl.data_plane.errors import DataPlaneError
    from nemo_rl.distributed.devices import DeviceUnavailableError
    from nemo_rl.distributed.ray_runtime import RayStartError
    from nemo_rl.distributed.virtual_cluster import ResourceInsufficientError
    from nemo_rl.distributed.worker_calls import WorkerError
    from nemo_rl.environments.errors import EnvironmentFailure, UnknownEnvironment
    from nemo_rl.experience.rollout_source import RecordingError
    from nemo_rl.experience.trajectory_collector import CollectorError
    from nemo_rl.models.dtensor.model_config import CheckpointMismatchError, ModelNotFoundError, UnsupportedModelError
    from nemo_rl.models.generation.interfaces import GenerationError
    from nemo_rl.models.policy.optimizer import OptimizerConfigError
    from nemo_rl.utils.checkpoint import CheckpointError
    from nemo_rl.utils.checkpoint_retention import UnknownMetric
    from nemo_rl.weight_sync.cache import CacheError
    from nemo_rl.weight_sync.transports.base import TransportError

    return (
        ConfigError,
        DataError,
        DataPlaneError,
        DeviceUnavailableError,
        RayStartError,
        ResourceInsufficientError,
        WorkerError,
        EnvironmentFailure,
        UnknownEnvironment,
        RecordingError,
        CheckpointMismatchError,
        ModelNotFoundError,
        OptimizerConfigError,
        UnsupportedModelError,
        GenerationError,
        CheckpointError,
        TransportError,
        DynamicSamplingError,
        CollectorError,
        CacheError,
        UnknownMetric,
    )


def _report(log_dir: Path) -> None:
    from nemo_rl.utils.report import write_report

    paths = write_report(log_dir)
    sys.stderr.write("report: " + ", ".join(str(path) for path in paths) + "\n")
