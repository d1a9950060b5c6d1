"""Trains a policy with GRPO.

    python examples/run_grpo.py [--config FILE] [key=value ...]

Overrides follow the configuration's grammar: `a.b=v` sets a key, `+a.b=v` adds one, `++a.b=v` does either, `~a.b`
removes one. Without --config the defaults of configs/grpo_math_1B.yaml are used, which need a GPU; a run that needs
none is configs/grpo_arithmetic_cpu.yaml.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("grpo", sys.argv[1:], config=Path(__file__).parent / "configs" / "grpo_math_1B.yaml"))
