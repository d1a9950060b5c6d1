"""Compares the routes that rollouts made with those that arrived at training, by the trace of a run.

    NRL_R3_TRACE=1 NRL_R3_TRACE_DIR=logs/r3_trace python examples/run_grpo.py --config ...
    python tools/check_r3_trace.py logs/r3_trace

Exit code 0: every traced sample arrived with the very routes; 1: some did not, each on a line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl.utils.route_trace import check_trace


def main() -> None:
    """Prints what is wrong, or how many samples are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    compared, problems = check_trace(parser.parse_args().folder)
    print("\n".join(problems) if problems else f"{compared} samples arrived with the routes that rollouts recorded")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
