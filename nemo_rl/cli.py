"""The `nemo-rl` command, and what every command line of the package has in common: exit codes, logging, and a user's
mistakes in one message.

Invariant: a command is imported when it is used, so that none waits for the libraries of another.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import ParamSpec

from nemo_rl.config.errors import UserError, in_one_line

P = ParamSpec("P")
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"
COMMANDS = {
    "grpo": ("nemo_rl.algorithms.launch:grpo", "train a policy with GRPO"),
    "distillation": ("nemo_rl.algorithms.launch:distillation", "distil a teacher into a policy"),
    "sft": ("nemo_rl.algorithms.launch:sft", "fine-tune a policy on conversations"),
    "eval": ("nemo_rl.algorithms.launch:evaluate", "evaluate a model on problems with known answers"),
    "multi-lora": ("nemo_rl.algorithms.multi_lora.__main__:main", "train many LoRA adapters on one base model"),
    "together": ("nemo_rl.time_sharing.launcher:run_together", "run jobs side by side on a pool made for them"),
    "pool": ("nemo_rl.time_sharing.__main__:main", "open a pool, submit jobs to it; simulate, check, look"),
    "config": ("nemo_rl.config.__main__:main", "check, show or compare configurations; explain a key"),
    "checkpoint": ("nemo_rl.checkpoint:main", "verify the files of checkpoints"),
    "convert": ("nemo_rl.utils.convert:main", "convert checkpoints to and from Hugging Face directories"),
    "report": ("nemo_rl.utils.report:main", "write report.html and report.png of a run"),
}
"""Of each command its function, which takes the arguments and `prog`, and a line for `--help`."""
_DEFAULTS = {
    "grpo": "grpo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
    "sft": "sft.yaml",
    "eval": "evals/eval.yaml",
}
"""Configurations that run without `--config`, in a checkout."""


def main(arguments: Sequence[str] | None = None) -> int:
    """`nemo-rl COMMAND ...`; returns the command's exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="nemo-rl",
        description="RL post-training for language models on Ray.",
        epilog="commands:\n" + "".join(f"  {name:<14}{summary}\n" for name, (_, summary) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="COMMAND --help says what it takes")
    name = parser.parse_args(given[:1]).command
    return run(name, given[1:], prog=f"nemo-rl {name}")


def run(name: str, arguments: Sequence[str], *, config: Path | None = None, prog: str | None = None) -> int:
    """Runs a command; returns its exit code.

    Args:
        config: In place of the command's own default configuration.
        prog: The program's name in messages about its usage; by default the script's.
    """
    path = COMMANDS[name][0]
    defaults: dict[str, Path] = {}
    if name in _DEFAULTS:
        defaults = {"default_config": config or _CONFIGS / _DEFAULTS[name]}
        # Under the gate the run is submitted to the pool that is open, whose scheduler lends it GPUs.
        if os.environ.get("RLIX_CONTROL_PLANE") == "rlix":
            path = "nemo_rl.time_sharing.pool_commands:run_under_control_plane"
    module, _, function = path.partition(":")
    return int(getattr(import_module(module), function)(arguments, prog=prog, **defaults))


def add_config(parser: argparse.ArgumentParser, default: Path) -> None:
    """Adds `--config`, which has a default in a checkout alone."""
    needed = not default.is_file()
    parser.add_argument("--config", type=Path, required=needed, help=f"YAML file; default {default.name}")


def log_to_stderr() -> None:
    """Sets logging up, at the level of NRL_LOG_LEVEL."""
    level = os.environ.get("NRL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def usage_error(error: UserError | OSError) -> int:
    """Prints a user's mistake; returns its exit code."""
    sys.stderr.write(f"{error if isinstance(error, UserError) else in_one_line(error) or error}\n")
    return EXIT_USAGE


def one_message(main: Callable[P, int]) -> Callable[P, int]:
    """Decorator of a command that prints: a UserError becomes one message and exit code 2."""

    @wraps(main)
    def wrapped(*args: P.args, **named: P.kwargs) -> int:
        try:
            return main(*args, **named)
        except UserError as error:
            return usage_error(error)
        except BrokenPipeError:
            return EXIT_OK  # the reader of the output closed the pipe

    return wrapped


if __name__ == "__main__":
    sys.exit(main())
