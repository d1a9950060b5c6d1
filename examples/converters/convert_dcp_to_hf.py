"""Writes a checkpoint's model as a Hugging Face directory, under the flags that NeMo-RL's converter has.

    python examples/converters/convert_dcp_to_hf.py --config CONFIG --dcp-ckpt-path STEP_DIR/policy/weights
    --hf-ckpt-path OUT_DIR

The weights of a checkpoint are Hugging Face's format already, so --config is accepted and not needed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl.cli import EXIT_OK, one_message
from nemo_rl.utils.convert import to_hugging_face


@one_message
def main() -> int:
    """Converts and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="not needed: the weights carry their model's configuration")
    parser.add_argument("--dcp-ckpt-path", type=Path, required=True)
    parser.add_argument("--hf-ckpt-path", type=Path, required=True)
    chosen = parser.parse_args()
    print(to_hugging_face(chosen.dcp_ckpt_path, chosen.hf_ckpt_path))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
