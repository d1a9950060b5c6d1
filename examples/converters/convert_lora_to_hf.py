"""Writes the model that an adapter makes of its base as a Hugging Face directory, under NeMo-RL's flags.

    python examples/converters/convert_lora_to_hf.py --base-ckpt BASE --adapter-ckpt STEP_DIR/policy/weights
    --hf-model-name NAME --hf-ckpt-path OUT_DIR [--adapter-only]

`--base-ckpt` is a Hugging Face directory or a checkpoint of all weights; left out, the base is `--hf-model-name`, or
what the adapter names. With --adapter-only the adapter itself is copied, as PEFT and vLLM read it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nemo_rl.cli import EXIT_OK, one_message
from nemo_rl.config.errors import UserError
from nemo_rl.utils.adapter_files import base_directory, read_adapter
from nemo_rl.utils.checkpoint import model_directory
from nemo_rl.utils.convert import merge_adapter


@one_message
def main() -> int:
    """Converts and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-ckpt", type=Path, help="the base model; by default what --hf-model-name names")
    parser.add_argument("--adapter-ckpt", type=Path, required=True)
    parser.add_argument("--hf-model-name", help="the base model's name; by default what the adapter names")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True)
    parser.add_argument("--adapter-only", action="store_true", help="copy the adapter without its base")
    chosen = parser.parse_args()
    if chosen.hf_ckpt_path.exists():
        raise UserError(f"{chosen.hf_ckpt_path}: exists already; choose another directory or remove it")
    adapter = Path(model_directory(str(chosen.adapter_ckpt)))
    read_adapter(adapter)
    if chosen.adapter_only:
        shutil.copytree(adapter, chosen.hf_ckpt_path)
    else:
        base = Path(model_directory(str(chosen.base_ckpt))) if chosen.base_ckpt else None
        named = base_directory(chosen.hf_model_name) if base is None and chosen.hf_model_name else base
        chosen.hf_ckpt_path.mkdir(parents=True)
        merge_adapter(adapter, chosen.hf_ckpt_path, base=named)
    print(chosen.hf_ckpt_path)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
