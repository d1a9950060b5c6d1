"""Trains a policy with GRPO on prompt groups as they finish (`async_rl.*`).

    python examples/run_grpo_single_controller.py [--config FILE] [key=value ...]

The same as `run_grpo.py` with a configuration that has an `async_rl` section. Without --config the defaults of
configs/grpo_math_1B_single_controller.yaml are used, which need two GPUs; a run that needs none, but the demo's
warm-started model (`make demo`), is configs/grpo_arithmetic_streaming_cpu.yaml.
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
    config = Path(__file__).parent / "configs" / "grpo_math_1B_single_controller.yaml"
    sys.exit(main(sys.argv[1:], default_config=config))
