"""Trains many LoRA adapters on one base model with GRPO.

    python examples/run_multi_lora.py --config BASE --adapters FILE [FILE ...] [key=value ...]
    python examples/run_multi_lora.py add --log-dir DIR FILE [FILE ...]
    python examples/run_multi_lora.py remove --log-dir DIR NAME [NAME ...]
    python examples/run_multi_lora.py list --log-dir DIR

The base's file is a GRPO configuration with a section `multi_lora`; each adapter's file sets what is its own: data,
environment, loss, grpo.*, optimizer, rank, checkpoints. Overrides change the base. See docs/multi_lora.md.
"""

import sys

from nemo_rl.cli import run

if __name__ == "__main__":
    sys.exit(run("multi-lora", sys.argv[1:]))
