"""Trains a policy to solve sliding puzzles, one move per turn, with GRPO.

    python examples/run_grpo_sliding_puzzle.py [--config FILE] [key=value ...]

As `run_grpo.py`, with configs/grpo_sliding_puzzle.yaml as the default; one that needs no GPU is
configs/grpo_sliding_puzzle_cpu.yaml.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("grpo", sys.argv[1:], config=Path(__file__).parent / "configs" / "grpo_sliding_puzzle.yaml"))
