"""`python -m nemo_rl.checkpoint verify DIR`: whether the files of checkpoints are those that were written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.utils.checkpoint import saved_steps
from nemo_rl.utils.checkpoint_manifest import MANIFEST, damage


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Prints a line per checkpoint; 0 if all are intact, 1 if some are not or cannot be verified, 2 without any."""
    parser = argparse.ArgumentParser(prog=prog or "python -m nemo_rl.checkpoint", description="Look after checkpoints.")
    commands = parser.add_subparsers(required=True, dest="command")
    verify = commands.add_parser("verify", help="compare the files of checkpoints with their manifests")
    verify.add_argument("directory", type=Path, help="step_N, or a checkpoint directory, all of whose steps are meant")
    root = parser.parse_args(arguments).directory
    steps = [root / f"step_{step}" for step in sorted(saved_steps(root))] or [root]
    if not any((steps[0] / name).exists() for name in (MANIFEST, "training_info.json", "policy")):
        sys.stderr.write(f"{root}: is neither a checkpoint (step_N) nor a directory of checkpoints\n")
        return 2
    intact = True
    for step in steps:
        found = damage(step)
        if found is None:
            verdict = f"not verified: it has no {MANIFEST}, which earlier versions did not write"
        else:
            verdict = "\n  ".join(["damaged", *found]) if found else "intact"
        sys.stdout.write(f"{step}: {verdict}\n")
        intact = intact and found == []
    return 0 if intact else 1


if __name__ == "__main__":
    sys.exit(main())
