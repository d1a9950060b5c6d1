"""`python -m nemo_rl.reference`: what can be named, measured and fitted, and the pages about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.reference import metrics, sizing, tasks

PAGES = {"tasks": tasks.page, "metrics": metrics.page, "sizing": sizing.page}
_WHAT = {
    "tasks": "print data sets, processors and environments with their keys",
    "metrics": "print the glossary of metrics",
    "sizing": "print how many GPUs models take, as computed",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a page, or writes all of them; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nemo_rl.reference", description="Look things up.")
    commands = parser.add_subparsers(required=True, dest="command")
    for name, what in _WHAT.items():
        commands.add_parser(name, help=what)
    docs = commands.add_parser("docs", help="write the pages of the documentation")
    docs.add_argument("--output", type=Path, default=Path("docs"), help="folder")
    chosen = parser.parse_args(arguments)
    if chosen.command in PAGES:
        sys.stdout.write(PAGES[chosen.command]())
        return 0
    for name, page in PAGES.items():
        path = chosen.output / f"{name}.md"
        path.write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
