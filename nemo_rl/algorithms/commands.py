"""The command lines of GRPO, distillation, SFT and evaluation: which set-up, driver and end belong to which; `launch`
does the rest.

Invariant: a mistake in the configuration is reported before Ray or torch is imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from nemo_rl.algorithms import launch
from nemo_rl.config import (
    ClusterConfig,
    ConfigError,
    DistillationMasterConfig,
    EvalMasterConfig,
    MasterConfig,
    SFTMasterConfig,
)
from nemo_rl.config.errors import UserError, in_one_line
from nemo_rl.distributed.processes import importing

logger = logging.getLogger("nemo_rl")


_PROMPT = "its prompt is examples/prompts/step_by_step.txt, because NeMo-RL's prompts are not shipped"
# What the configurations of NeMo-RL's names have otherwise than NeMo-RL's.
_OWN_VALUES = {
    "grpo_math_1B.yaml": _PROMPT,
    "grpo_math_1B_single_controller.yaml": "values of our own, and the prompt examples/prompts/step_by_step.txt",
    "grpo_sliding_puzzle.yaml": "puzzles, words and values of our own",
    "distillation_math.yaml": f"{_PROMPT}; models, lengths and rates may differ",
    "sft.yaml": "model, data, lengths and rates of our own",
    "eval.yaml": f"{_PROMPT}; model and problems may differ",
}


def grpo(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs GRPO; see `launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=MasterConfig,
        what="Trains a policy with GRPO",
        example="grpo.max_num_steps=5",
        run_to_end=grpo_to_end,
        run_with_page=grpo_to_end,
        own_values=_OWN_VALUES.get(default_config.name, ""),
    )


def distillation(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs distillation; see `launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=DistillationMasterConfig,
        what="Distils a teacher into a policy, on the policy's own samples",
        example="distillation.max_num_steps=5",
        run_to_end=grpo_to_end,
        run_with_page=grpo_to_end,
        own_values=_OWN_VALUES["distillation_math.yaml"],
    )


def _ray_ahead(cluster: ClusterConfig) -> AbstractContextManager[None]:
    """Starts Ray beside the imports."""
    from nemo_rl.distributed.ray_runtime import starting_ahead

    return starting_ahead(device=cluster.device, cpu_slots=cluster.cpu_slots)


def grpo_to_end(config: MasterConfig, page_port: int | None = None) -> int:
    """Runs a checked configuration; the exit code. `page_port`: see `launch.run_to_end`."""
    with _ray_ahead(config.cluster):
        with importing():
            from nemo_rl.algorithms.grpo.assembly import close, setup
            from nemo_rl.algorithms.grpo.loop import drive

        return launch.run_to_end(config, setup, drive, close, page_port)


def sft(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs SFT; see `launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=SFTMasterConfig,
        what="Fine-tunes a policy on conversations",
        example="sft.max_num_steps=5",
        run_to_end=sft_to_end,
        run_with_page=sft_to_end,
        own_values=_OWN_VALUES["sft.yaml"],
    )


def sft_to_end(config: SFTMasterConfig, page_port: int | None = None) -> int:
    """Runs a checked configuration; the exit code. `page_port`: see `launch.run_to_end`."""
    with _ray_ahead(config.cluster):
        with importing():
            from nemo_rl.algorithms.sft.assembly import close, setup
            from nemo_rl.algorithms.sft.driver import sft_train

        return launch.run_to_end(config, setup, sft_train, close, page_port)


def evaluate(arguments: Sequence[str], *, default_config: Path) -> int:
    """Evaluates a model; see `launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=EvalMasterConfig,
        what="Evaluates a model on problems with known answers",
        example="generation.model_name=results/grpo",
        run_to_end=evaluate_to_end,
        own_values=_OWN_VALUES["eval.yaml"],
    )


def evaluate_to_end(config: EvalMasterConfig) -> int:
    """Runs a checked configuration and prints its score; the exit code."""
    from nemo_rl.algorithms.evaluation import evaluate

    interrupted = "interrupted: engines are ended; nothing was written"
    try:
        with launch.Interrupts(), launch.ending_with_ray(lambda: interrupted):
            score = evaluate(config)
    except KeyboardInterrupt:
        sys.stderr.write(f"{interrupted}\n")
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

    from nemo_rl.algorithms.evaluation import Score, lines_of

    if not isinstance(score, Score):
        return
    for line in lines_of(config, score):
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
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
