"""`python -m nemo_rl.compat`: writes the page about recipes and scripts that were written for NeMo-RL."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl.compat.page import page


def main() -> int:
    """Writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nemo_rl.compat", description="Write docs/from_nemo_rl.md.")
    parser.add_argument("--output", type=Path, default=Path("docs/from_nemo_rl.md"))
    chosen = parser.parse_args()
    chosen.output.write_text(page(), encoding="utf-8")
    print(f"wrote {chosen.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
