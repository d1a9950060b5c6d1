"""Runs every benchmark on a shape so small that its figures mean nothing: it shows that they still run.

    python tools/tiny_benchmarks.py [--tries N] [NAME ...]

`make benchmarks` and `.ci/run` run all. Prints the seconds of each; the end of its output, and exit code 1, where one
fails or passes its deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 800
_TAIL = 4000
_SAMPLES = "--prompts 4 --generations 4 --prompt-tokens 16 --new-tokens 16"
_ON_CPU = f"--shape tiny --device cpu {_SAMPLES}"

LINES: dict[str, str] = {
    "async_vs_sync": f"scaling {_ON_CPU} --mean-tokens 8 --gpus 1 2 --steps 4 --work WORK",
    "data_plane": "--rows 32 --tokens 50 --repeats 1",
    "distillation": "--student tiny --teacher tiny --device cpu --prompts 4 --prompt-tokens 16 --new-tokens 16 "
    "--mb-tokens 512 --backends policy --steps 2 --work WORK",
    "endpoint": "--model tiny --device cpu --requests 32 --at-once 8 --tokens 8 --prompt 16 --repeats 1",
    "generation": "--shape tiny --ways uni --requests 8 --work WORK",
    "grpo_step": f"{_ON_CPU} --precision float32 --steps 2 --mb-tokens 512 --skip vllm trl --once --work WORK",
    "learning_curve": "--model MODEL --train PROBLEMS --validation PROBLEMS --ways ours --steps 2 --val-period 2 "
    "--val-samples 4 --prompts 2 --generations 4 --prompt-tokens 256 --new-tokens 16 --micro-batch 4 "
    "--engines-per-gpu 1 --precision float32 --device cpu --work WORK",
    "logging_cost": "",
    "multi_lora": f"{_ON_CPU} --adapters 2 --rank 8 --mb-tokens 512 --steps 2 --alone 1 --work WORK",
    "named_gpus": "--mix long_tail --seeds 1",
    "planner": "",
    "scheduler_restart": "--segments 2 --lines 1000",
    "startup": "--against . --runs 1",
    "streaming_schedule": "--steps 6",
    "team_day": "--model MODEL --train PROBLEMS PROBLEMS --validation PROBLEMS --device cpu --steps 3 --prompts 2 "
    "--generations 4 --prompt-tokens 256 --new-tokens 16 --mb-tokens 1024 --val-period 3 --val-samples 4 "
    "--within-s 600 --work WORK/day",
    "team_half_hour": "--folder WORK/half_hour --jobs 4 --over-s 20 --within-s 700 --kinds command scavenger",
    "team_week": "--days 0.1",
    "time_sharing": f"{_ON_CPU} --mean-tokens 8 --jobs 2 --gpus 2 --steps 3 --ways slots --eager --work WORK",
    "time_sharing_kills": f"{_ON_CPU} --mean-tokens 8 --jobs 2 --gpus 2 --ways slots --way-s 700 --work WORK",
    "time_sharing_mixes": "--mix two_jobs --seeds 1 --ratio 1 --sigma 0.8",
    "time_sharing_workloads": f"{_ON_CPU} --mean-tokens 8 --workload with-sft --steps 3 --ways slots --eager "
    "--work WORK",
    "train_step": "--shape tiny-moe --device cpu --backends dtensor --replay --steps 1 --work WORK",
    "weight_sync": "--shape tiny --device cpu --cycles 1 --refreshes 1 --work WORK",
}
"""What is given to each benchmark; WORK stands for a folder of its own, MODEL and PROBLEMS for a small model and some
sums in it.
"""
PARTS = ("composed_runs", "drawn_mixes", "shapes")
"""What others import."""


def _with_model(line: list[str], work: Path) -> list[str]:
    model, problems = work / "model", work / "problems.jsonl"
    subprocess.run(
        [sys.executable, "examples/make_tiny_model.py", str(model)], cwd=ROOT, check=True, timeout=DEADLINE_S
    )
    rows = [{"question": f"{number} + 1 = ?", "answer": str(number + 1)} for number in range(8)]
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [{"MODEL": str(model), "PROBLEMS": str(problems)}.get(word, word) for word in line]


def run(name: str) -> bool:
    """Runs one of them; whether it ended well."""
    with tempfile.TemporaryDirectory() as work:
        line = LINES[name].replace("WORK", work).split()
        if "MODEL" in line:
            line = _with_model(line, Path(work))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        began, output = time.monotonic(), Path(work) / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, f"benchmarks/{name}.py", *line],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = f"none within {DEADLINE_S} s"
        print(f"{name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
        if code != 0:
            print(output.read_text(errors="replace")[-_TAIL:], flush=True)
        return code == 0


def main() -> int:
    """Runs those that are named, or all; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LINES)}; all by default")
    parser.add_argument("--tries", type=int, default=1, help="of each until it ends well; its failures are shown")
    args = parser.parse_args()
    names = args.names or list(LINES)
    if unknown := sorted(set(names) - set(LINES)):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(LINES)}")
    if new := sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {*LINES, *PARTS}):
        parser.error(f"benchmarks/{new[0]}.py has no line in LINES")
    failed = [name for name in names if not any(run(name) for _ in range(args.tries))]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
