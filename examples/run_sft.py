"""Fine-tunes a policy on conversations (SFT).

    python examples/run_sft.py [--config FILE] [key=value ...]

Overrides follow the configuration's grammar: `a.b=v` sets a key, `+a.b=v` adds one, `++a.b=v` does either, `~a.b`
removes one. Without --config the defaults of configs/sft.yaml are used, which need a GPU; a run that needs none is
configs/sft_arithmetic_cpu.yaml, which warm-starts the small model of make_tiny_model.py.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("sft", sys.argv[1:], config=Path(__file__).parent / "configs" / "sft.yaml"))
