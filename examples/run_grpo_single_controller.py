"""Trains a policy with GRPO on prompt groups as they finish (`async_rl.*`).

    python examples/run_grpo_single_controller.py [--config FILE] [key=value ...]

The same as `run_grpo.py` with a configuration that has an `async_rl` section. Without --config the defaults of
configs/grpo_math_1B_single_controller.yaml are used, which need two GPUs; a run that needs none, but the demo's
warm-started model (`make demo`), is configs/grpo_arithmetic_streaming_cpu.yaml.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(
        run("grpo", sys.argv[1:], config=Path(__file__).parent / "configs" / "grpo_math_1B_single_controller.yaml")
    )
