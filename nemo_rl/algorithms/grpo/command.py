"""The command line of a GRPO run. Knows which set-up, driver and end belong to GRPO; the rest is
`nemo_rl.algorithms.launch`.

Invariant: a mistake in the configuration is reported before Ray or torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_rl.algorithms import launch
from nemo_rl.config import MasterConfig


def main(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs GRPO; see `nemo_rl.algorithms.launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=MasterConfig,
        what="Trains a policy with GRPO",
        example="grpo.max_num_steps=5",
        run_to_end=run_to_end,
    )


def run_to_end(config: MasterConfig) -> int:
    """Runs a checked configuration; the exit code."""
    from nemo_rl.algorithms.grpo.assembly import close, setup
    from nemo_rl.algorithms.grpo.loop import drive

    return launch.run_to_end(config, setup, drive, close)
