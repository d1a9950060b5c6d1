"""The command line of an evaluation: configuration in, one table out, exit code as every run's.

Invariant: a mistake in the configuration is reported before Ray or torch is imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.algorithms import launch
from nemo_rl.config import ConfigError, EvalMasterConfig
from nemo_rl.config.errors import UserError, in_one_line

logger = logging.getLogger("nemo_rl")


def main(arguments: Sequence[str], *, default_config: Path) -> int:
    """Evaluates a model; see `nemo_rl.algorithms.launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=EvalMasterConfig,
        what="Evaluates a model on problems with known answers",
        example="generation.model_name=results/grpo",
        run_to_end=run_to_end,
    )


def run_to_end(config: EvalMasterConfig) -> int:
    """Runs a checked configuration and prints its score; the exit code."""
    from nemo_rl.algorithms.evaluation.evaluate import evaluate

    try:
        score = evaluate(config)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: engines are ended; nothing was written\n")
        return launch.EXIT_INTERRUPTED
    except (UserError, OSError) as error:
        message = in_one_line(error)
        if message is None:
            raise
        logger.debug("evaluation failed", exc_info=True)
        sys.stderr.write(f"{message}\n")
        return launch.EXIT_USAGE if isinstance(error, ConfigError) else launch.EXIT_FAILED
    _show(config, score)
    return launch.EXIT_OK


def _show(config: EvalMasterConfig, score: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from nemo_rl.algorithms.evaluation.evaluate import Score

    if not isinstance(score, Score):
        return
    table = Table(title=f"{config.generation.model_name} on {config.data.dataset_name}", title_justify="left")
    for column in (score.metric, "problems", "answers each", "mean reward", "cut off", "seconds"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{score.value:.4f}",
        str(score.problems),
        str(score.answers_per_problem),
        f"{score.mean_reward:.4f}",
        f"{score.truncated:.1%}",
        f"{score.seconds:.1f}",
    )
    Console().print(table)
    if config.eval.save_path is not None:
        Console().print(f"summary.json and samples.jsonl are in {config.eval.save_path}", soft_wrap=True)
