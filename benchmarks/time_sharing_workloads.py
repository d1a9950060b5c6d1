"""Unequal jobs on the GPUs of one machine, to the last one's end: the pool against what can be done without it.

    python benchmarks/time_sharing_workloads.py [--workload two-at-once come-and-go with-sft ...]
        [--gpus 2] [--steps 6] [--ways serial split unmanaged slots-mps]
    python benchmarks/time_sharing_workloads.py --shape tiny --large tiny --device cpu --ways serial slots --prompts 4
        --generations 4 --prompt-tokens 16 --new-tokens 16 --mean-tokens 8 --gap-s 5 --turn-s 0.2 --steps 3 --eager

The workloads:

- `two-at-once`: two GRPO jobs come together (the published workload of llm-d, which shared a GPU for training and one
  for sampling, took 1/1.45 of the serial time, starts included).
- `come-and-go`: three GRPO jobs; the second comes `--gap-s` after the first, and the third, of half as many steps, as
  long after the second.
- `with-sft`: two GRPO jobs and one of supervised fine-tuning, of three times as many steps.
- `slow-environment`: two GRPO jobs of two turns, whose environment takes `--turn-s` for each turn of a sample.
- `small-and-large`: one GRPO job of `--shape` and one of `--large`.

The ways are those of `time_sharing.py`: `serial` takes the jobs in the order in which they come, each alone on all
GPUs; `split` gives each its part of the GPUs, where there are enough; `unmanaged` starts each on all GPUs when it
comes; the pools get each when it comes. Jobs do the same work in every way. Two times are printed: from the first job's
coming to the last one's end, starts and builds of engines included; and the time in which at least one job was past its
first step, which leaves them out.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import host_speed_s, make_model, make_prompts, prompts_section, visible_gpus  # noqa: E402
from time_sharing import (  # noqa: E402
    POOLS,
    BusyGpus,
    close,
    config_of,
    finish,
    is_open,
    parser,
    serve,
    start,
    visible_to,
    width_of,
)

WORKLOADS = ("two-at-once", "come-and-go", "with-sft", "slow-environment", "small-and-large")
_TURNS = 2


class Job(NamedTuple):
    """One job of a workload: when it comes, which model it trains for how many steps, and what is special about it."""

    name: str
    shape: str
    steps: int
    after_s: float = 0.0
    fine_tunes: bool = False
    slow: bool = False


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The jobs of the workload, in the order in which they come."""
    first, second = Job("a", args.shape, args.steps), Job("b", args.shape, args.steps)
    half = max(args.steps // 2, 2)
    return {
        "two-at-once": [first, second],
        "come-and-go": [
            first,
            second._replace(after_s=args.gap_s),
            Job("c", args.shape, half, after_s=2 * args.gap_s),
        ],
        "with-sft": [first, second, Job("c", args.shape, 3 * args.steps, fine_tunes=True)],
        "slow-environment": [first._replace(slow=True), second._replace(slow=True)],
        "small-and-large": [first, second._replace(shape=args.large)],
    }[args.workload]


class SlowEnvironment:
    """Takes some seconds for every turn of a sample, and rewards the last by the parity of its length in characters."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._turn_s = float(settings["turn_s"])

    def step(self, message_logs: list[Any], metadata: list[Any]) -> tuple[Any, ...]:
        import torch

        time.sleep(self._turn_s)
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_logs]
        rewards = torch.tensor([float(len(log[-1]["content"]) % 2) for log in message_logs])
        ended = torch.tensor([float(turn >= _TURNS) for turn in turns])
        observation = {"role": "environment", "content": "go on"}
        return ([observation] * len(turns), metadata, None, rewards * ended, ended, None)


def write_config(args: argparse.Namespace, way: str, job: Job, gpus: int) -> Path:
    """A job's configuration for one way."""
    model = make_model(job.shape, args.base)
    shaped = argparse.Namespace(**(vars(args) | {"model": model, "shape": job.shape, "steps": job.steps}))
    path = config_of(shaped, way, job.name, gpus)
    config = yaml.safe_load(path.read_text())
    if job.slow:
        samples = args.prompts * args.generations
        config["env"] = {
            "parity": {
                "class": "benchmarks.time_sharing_workloads.SlowEnvironment",
                "turn_s": args.turn_s,
                "max_concurrency": samples,
            }
        }
        config["grpo"]["max_rollout_turns"] = _TURNS
        config["policy"]["generation"]["max_new_tokens"] = args.new_tokens // _TURNS
        config["policy"]["max_total_sequence_length"] += 16
    if job.fine_tunes:
        config = fine_tuning(args, config)
    path.write_text(yaml.safe_dump(config))
    return path


def fine_tuning(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of supervised fine-tuning on as many tokens a step as a GRPO job of the same sizes has."""
    policy = {key: copy.deepcopy(value) for key, value in config["policy"].items() if key != "generation"}
    data = prompts_section(args.demonstrations, policy["max_total_sequence_length"])
    data["default"] = {"prompt_file": None, "processor": "sft_processor"}
    return {
        "sft": {
            "max_num_steps": config["grpo"]["max_num_steps"],
            "max_num_epochs": 1000,
            "val_period": 0,
            "val_at_start": False,
        },
        "policy": policy,
        "data": data,
        **{key: config[key] for key in ("cluster", "logger", "checkpointing")},
    }


Launch = Callable[[Job], subprocess.Popen[bytes]]


def run_way(args: argparse.Namespace, way: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """Runs the workload in one way; its times in seconds, the share in which GPUs were busy, and why it failed."""
    configs = {job.name: write_config(args, way, job, width_of(args, way)) for job in jobs}
    busy = BusyGpus(visible_gpus(args.gpus))
    with busy.sampled(args.device == "cuda"):
        if way in POOLS:
            began, failed = in_pool(args, way, jobs, configs)
        else:
            began = time.time()
            failed = follow(args, jobs, lambda job: alone(args, way, job, configs[job.name]), way == "serial")
    ends = {job.name: step_ends(args.work / way / job.name) for job in jobs}
    if short := [job.name for job in jobs if len(ends[job.name]) < job.steps]:
        return {
            "failed": failed or f"{', '.join(short)} made too few steps",
            "steps": {n: len(e) for n, e in ends.items()},
        }
    ended = max(each[-1] for each in ends.values())
    return {
        "seconds": ended - began,
        "past first steps": overlapped([(each[0], each[-1]) for each in ends.values()]),
        "busy": busy.between(began, ended),
        "failed": failed,
    }


def step_ends(log_dir: Path) -> list[float]:
    """When the steps of a job ended, of whatever kind it is."""
    ends: dict[int, float] = {}
    for path in sorted(log_dir.glob("exp_*/metrics.jsonl")):
        lines = (json.loads(line) for line in path.read_text().splitlines())
        ends |= {line["step"]: line["time"] for line in lines if line["prefix"] == "train"}
    return sorted(ends.values())


def overlapped(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the jobs was past its first step and not done."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def alone(args: argparse.Namespace, way: str, job: Job, config: Path) -> subprocess.Popen[bytes]:
    """Starts a job without a pool."""
    script = "run_sft.py" if job.fine_tunes else "run_grpo.py"
    visible = visible_to(args, way, ord(job.name) - ord("a"))
    return start(args, f"{way}_{job.name}", str(ROOT / "examples" / script), "--config", str(config), **visible)


def in_pool(args: argparse.Namespace, way: str, jobs: Sequence[Job], configs: dict[str, Path]) -> tuple[float, str]:
    """Opens a pool, submits each job when it comes, and closes the pool; when the first came, and why it failed."""
    name = uuid.uuid4().hex
    pool = serve(args, way, name)
    try:
        deadline = time.monotonic() + args.way_s
        while not is_open(args):
            if pool.poll() is not None or time.monotonic() > deadline:
                return time.time(), "the pool did not open: " + (args.work / "pool.txt").read_text()[-2000:]
            time.sleep(0.2)

        def submit(job: Job) -> subprocess.Popen[bytes]:
            line = ["-m", "nemo_rl.time_sharing", "submit", "--pool", name, "--wait", str(configs[job.name])]
            return start(args, f"{way}_{job.name}", *line)

        return time.time(), follow(args, jobs, submit, one_at_a_time=False)
    finally:
        if not close(pool):
            pool.kill()


def follow(args: argparse.Namespace, jobs: Sequence[Job], launch: Launch, one_at_a_time: bool) -> str:
    """Starts each job when it has come, and waits for all; why they failed, empty where they did not."""
    began, started = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    for job in jobs:
        while time.monotonic() < began + job.after_s:
            time.sleep(0.1)
        started[job.name] = launch(job)
        if one_at_a_time and (failed := finish(args, {job.name: started[job.name]})):
            return failed
    return finish(args, started)


def show(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """The table of a workload."""
    serial = results.get("serial", {})
    print(f"\n{args.workload} on {args.gpus} GPUs, {args.shape}, {args.steps} steps")
    print(f"{'way':12s} {'seconds':>8s} {'of serial':>9s} {'past first steps':>16s} {'of serial':>9s} {'GPU busy':>8s}")
    for way, result in results.items():
        if "seconds" not in result:
            print(f"{way:12s} {result['failed']}")
            continue
        cells = []
        for key in ("seconds", "past first steps"):
            gain = f"{serial[key] / result[key]:.2f}x" if serial.get("seconds") and result[key] else "-"
            cells += [f"{result[key]:.1f}", gain]
        busy = "-" if result["busy"] is None else f"{result['busy']:.0%}"
        print(f"{way:12s} {cells[0]:>8s} {cells[1]:>9s} {cells[2]:>16s} {cells[3]:>9s} {busy:>8s}  {result['failed']}")
    print(f"RESULT {args.workload} " + json.dumps(results), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the workloads in all ways, and prints a table of each; 1 where a way failed."""
    made = parser()
    made.description = __doc__
    made.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    made.add_argument("--large", default="7b", help="shape of the larger job of `small-and-large`")
    made.add_argument("--gap-s", type=float, default=120.0, help="between two jobs' coming")
    made.add_argument("--turn-s", type=float, default=5.0, help="what a slow environment takes for a turn")
    made.set_defaults(ways=["serial", "split", "unmanaged", "slots-mps"], work=Path("/tmp/nemo_rl_workloads"))
    args = made.parse_args(arguments)
    if ahead := [way for way in args.ways if way.endswith(("-ahead", "-2"))]:
        made.error(f"--ways {' '.join(ahead)}: jobs take turns here, with one engine on each GPU")
    args.base = args.work
    args.base.mkdir(parents=True, exist_ok=True)
    args.prompts_file = make_prompts(args.prompts * (args.steps + 2), args.prompt_tokens, args.base / "prompts.jsonl")
    rows, demonstrations = 2 * args.prompts * args.generations, args.base / "demonstrations.jsonl"
    args.demonstrations = make_prompts(rows, args.prompt_tokens, demonstrations, answer=args.mean_tokens)
    print(f"20 million additions in Python: {host_speed_s():.2f} s", flush=True)
    bad = False
    for workload in list(args.workload):
        args.workload = workload
        jobs = jobs_of(args)
        args.jobs = len(jobs)
        args.work = args.base / args.workload
        args.work.mkdir(exist_ok=True)
        results: dict[str, dict[str, Any]] = {}
        for way in args.ways:
            if way == "split" and len(jobs) > args.gpus:
                continue
            results[way] = run_way(args, way, jobs)
            print(f"{args.workload}, {way}: {json.dumps(results[way])}", flush=True)
        show(args, results)
        bad = bad or any(result["failed"] for result in results.values())
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
