"""The command line of an SFT run. Knows which set-up, driver and end belong to SFT; the rest is
`nemo_rl.algorithms.launch`.

Invariant: a mistake in the configuration is reported before Ray or torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_rl.algorithms import launch
from nemo_rl.config import SFTMasterConfig


def main(arguments: Sequence[str], *, default_config: Path) -> int:
    """Runs SFT; see `nemo_rl.algorithms.launch.main`."""
    return launch.main(
        arguments,
        default_config=default_config,
        kind=SFTMasterConfig,
        what="Fine-tunes a policy on conversations",
        example="sft.max_num_steps=5",
        run_to_end=run_to_end,
    )


def run_to_end(config: SFTMasterConfig) -> int:
    """Runs a checked configuration; the exit code."""
    from nemo_rl.algorithms.sft.assembly import close, setup
    from nemo_rl.algorithms.sft.driver import sft_train

    return launch.run_to_end(config, setup, sft_train, close)
