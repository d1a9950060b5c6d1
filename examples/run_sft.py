"""Fine-tunes a policy on conversations (SFT).

    python examples/run_sft.py [--config FILE] [key=value ...]

Overrides follow the configuration's grammar: `a.b=v` sets a key, `+a.b=v` adds one, `++a.b=v` does either, `~a.b`
removes one. The default, configs/sft_arithmetic_cpu.yaml, warm-starts the small model of make_tiny_model.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.algorithms.sft.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], default_config=Path(__file__).parent / "configs" / "sft_arithmetic_cpu.yaml"))
