"""Trains a policy with GRPO.

    python examples/run_grpo.py [--config FILE] [key=value ...]

Overrides follow the configuration's grammar: `a.b=v` sets a key, `+a.b=v` adds one, `++a.b=v` does either, `~a.b`
removes one. Without --config the defaults of configs/grpo_math_1B.yaml are used, which need a GPU; a run that needs
none is configs/grpo_arithmetic_cpu.yaml.
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
    sys.exit(main(sys.argv[1:], default_config=Path(__file__).parent / "configs" / "grpo_math_1B.yaml"))
