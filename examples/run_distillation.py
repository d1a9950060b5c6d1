"""Distils a teacher into a smaller policy, on the policy's own samples.

    python examples/run_distillation.py [--config FILE] [key=value ...]

Overrides follow the configuration's grammar: `a.b=v` sets a key, `+a.b=v` adds one, `++a.b=v` does either, `~a.b`
removes one. Without --config the defaults of configs/distillation_math.yaml are used, which need GPUs; a run that needs
none is configs/distillation_arithmetic_cpu.yaml.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("distillation", sys.argv[1:], config=Path(__file__).parent / "configs" / "distillation_math.yaml"))
