"""Compares the routes that rollouts made with those that arrived at training, by the trace of a run.

    NRL_R3_TRACE=1 NRL_R3_TRACE_DIR=logs/r3_trace python examples/run_grpo.py --config ...
    python tools/check_r3_trace.py logs/r3_trace

Exit code 0: every traced sample arrived with the very routes; 1: some did not, each on a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nemo_rl.utils.route_trace import FETCHED, PRODUCED


def check_trace(folder: Path) -> tuple[int, list[str]]:
    """Whether every traced sample of a rollout arrived at training with the very routes, and for the previous
    log-probabilities too, where they were computed. Returns how many samples were compared, and what is wrong.
    """
    events = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    produced = [event for event in events if event["event"] == PRODUCED]
    fetched: dict[tuple[str, str], set[str]] = {}
    for event in events:
        if event["event"] == FETCHED:
            fetched.setdefault((event["stage"], event["ids"]), set()).add(event["routes"])
    # Samples of a prompt may be the same tokens with other routes.
    made: dict[str, set[str]] = {}
    for event in produced:
        made.setdefault(event["ids"], set()).add(event["routes"])
    if not produced:
        return 0, [f"{folder}: no {PRODUCED} was written; run with NRL_R3_TRACE=1 and policy.router_replay.enabled"]
    stages = sorted({"train", *(stage for stage, _ in fetched)})
    problems = [
        f"step {event['step']}, row {event['row']}, {stage}: "
        + (
            "its routes did not arrive as they were made"
            if fetched.get((stage, event["ids"]))
            else "it did not arrive with routes"
        )
        for event in produced
        for stage in stages
        if event["routes"] not in fetched.get((stage, event["ids"]), set())
    ]
    return len(produced), problems


def main() -> None:
    """Prints what is wrong, or how many samples are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    compared, problems = check_trace(parser.parse_args().folder)
    print("\n".join(problems) if problems else f"{compared} samples arrived with the routes that rollouts recorded")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
