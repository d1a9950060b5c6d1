"""Runs several GRPO pipelines side by side on one pool of GPUs.

    python examples/run_time_sharing.py --gpus 2 --pipelines a.yaml b.yaml [key=value ...]

Each file is an ordinary GRPO configuration, or names one and its device mappings. Every pipeline may generate on all
GPUs of the pool; they train on different ones as far as there are enough. Overrides are for all of them.
"""

import sys

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("together", sys.argv[1:]))
