"""The command line of a GRPO run: arguments in, exit code out.

Loads and checks the configuration, drives the run, writes the report and ends everything. User mistakes become one
message without a traceback. Invariant: whatever happens, no process of the run is left; Ctrl-C ends with exit code 130
and the last checkpoint usable.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.config import ConfigError, MasterConfig, OverridesError, load_master_config

logger = logging.getLogger("nemo_rl")

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs GRPO.

    Args:
        arguments: Command-line arguments without the program's name.
        default_config: Used when `--config` is not given.

    Returns:
        The process's exit code: 0 done, 1 the run failed, 2 the configuration is wrong, 130 interrupted.
    """
    parser = argparse.ArgumentParser(description="Trains a policy with GRPO; further arguments are overrides such as grpo.max_num_steps=5.")
    parser.add_argument("--config", type=Path, default=default_config, help=f"YAML file; default {default_config.name}")
    options, overrides = parser.parse_known_args(list(arguments))
    level = os.environ.get("NRL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load_master_config(str(options.config), overrides)
    except (ConfigError, OverridesError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return run_to_end(config)


def run_to_end(config: MasterConfig) -> int:
    """Sets a checked configuration up, drives it, and ends it; the exit code."""
    from nemo_rl.algorithms.grpo.setup import close, setup
    from nemo_rl.algorithms.grpo.sync_driver import grpo_train

    # A scheduler that ends the job sends SIGTERM: it deserves the same clean end as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = None
    try:
        run = setup(config)
        with run.progress:
            grpo_train(run)
        code = EXIT_OK
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: ending workers; the last finished checkpoint is complete\n")
        code = EXIT_INTERRUPTED
    except _user_errors() as error:
        logger.debug("run failed", exc_info=True)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        code = EXIT_FAILED
    finally:
        if run is not None:
            close(run)
    if run is not None and code == EXIT_OK:
        _report(Path(config.logger.log_dir))
    return code


def _user_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message says all a user needs; anything else keeps its traceback."""
    from nemo_rl.algorithms.grpo.dynamic_sampling import DynamicSamplingError
    from nemo_rl.data.errors import DataError
    from nemo_rl.distributed.devices import DeviceUnavailableError
    from nemo_rl.distributed.ray_runtime import RayStartError
    from nemo_rl.distributed.virtual_cluster import ResourceInsufficientError
    from nemo_rl.distributed.worker_calls import WorkerError
    from nemo_rl.environments.errors import EnvironmentFailure, UnknownEnvironment
    from nemo_rl.experience.rollout_source import RecordingError
    from nemo_rl.models.dtensor.load import CheckpointMismatchError, ModelNotFoundError
    from nemo_rl.models.generation.interfaces import GenerationError
    from nemo_rl.utils.checkpoint import CheckpointError
    from nemo_rl.weight_sync.transports.base import TransportError

    return (
        ConfigError,
        DataError,
        DeviceUnavailableError,
        RayStartError,
        ResourceInsufficientError,
        WorkerError,
        EnvironmentFailure,
        UnknownEnvironment,
        RecordingError,
        CheckpointMismatchError,
        ModelNotFoundError,
        GenerationError,
        CheckpointError,
        TransportError,
        DynamicSamplingError,
    )


def _report(log_dir: Path) -> None:
    from nemo_rl.utils.report import write_report

    paths = write_report(log_dir)
    sys.stderr.write("report: " + ", ".join(str(path) for path in paths) + "\n")
