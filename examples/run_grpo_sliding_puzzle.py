"""Trains a policy to solve sliding puzzles, one move per turn, with GRPO.

    python examples/run_grpo_sliding_puzzle.py [--config FILE] [key=value ...]

As `run_grpo.py`, with configs/grpo_sliding_puzzle.yaml as the default; one that needs no GPU is
configs/grpo_sliding_puzzle_cpu.yaml.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Under the gate the run is submitted to the pool that is open, whose scheduler lends it GPUs.
if os.environ.get("RLIX_CONTROL_PLANE") == "rlix":
    from nemo_rl.time_sharing.pool_commands import run_under_control_plane as main
else:
    from nemo_rl.algorithms.launch import grpo as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], default_config=Path(__file__).parent / "configs" / "grpo_sliding_puzzle.yaml"))
