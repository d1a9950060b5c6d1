"""Writes the pages of the documentation that are made from the code's own tables, or prints one of them.

python -m tools.pages              # all, to docs/
python -m tools.pages sizing       # prints one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.pages import config_page, from_nemo_rl_page, metrics_page, scenarios_page, sizing_page, tasks_page

PAGES = {
    "config": config_page.page,
    "tasks": tasks_page.page,
    "metrics": metrics_page.page,
    "sizing": sizing_page.page,
    "from_nemo_rl": from_nemo_rl_page.page,
    "time_sharing_scenarios": scenarios_page.page,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a page, or writes all of them; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", choices=PAGES, help="print this page instead of writing all")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.page is not None:
        sys.stdout.write(PAGES[chosen.page]())
        return 0
    for name, page in PAGES.items():
        path = chosen.output / f"{name}.md"
        path.write_text(page(), encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
