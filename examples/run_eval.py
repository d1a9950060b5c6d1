"""Evaluates a model on problems with known answers: pass@k or cons@k.

    python examples/run_eval.py [--config FILE] [key=value ...]

`generation.model_name` takes a Hugging Face id or directory, a checkpoint (step_N) or a checkpoint directory, whose
latest checkpoint is evaluated. Without --config the defaults of configs/evals/eval.yaml are used, which need a GPU; one
that needs none is configs/eval_arithmetic_cpu.yaml.
"""

import sys
from pathlib import Path

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("eval", sys.argv[1:], config=Path(__file__).parent / "configs" / "evals" / "eval.yaml"))
