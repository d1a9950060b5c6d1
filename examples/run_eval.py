"""Evaluates a model on problems with known answers: pass@k or cons@k.

    python examples/run_eval.py [--config FILE] [key=value ...]

`generation.model_name` takes a Hugging Face id or directory, a checkpoint (step_N) or a checkpoint directory, whose
latest checkpoint is evaluated. Without --config the defaults of configs/evals/eval.yaml are used, which need a GPU; one
that needs none is configs/eval_arithmetic_cpu.yaml.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Under the gate the run is submitted to the pool that is open, whose scheduler lends it GPUs.
if os.environ.get("RLIX_CONTROL_PLANE") == "rlix":
    from nemo_rl.time_sharing.pool_commands import run_under_control_plane as main
else:
    from nemo_rl.algorithms.launch import evaluate as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], default_config=Path(__file__).parent / "configs" / "evals" / "eval.yaml"))
