"""Two equal GRPO jobs on two GPUs: sharing the pool, against one after the other and against one GPU each.

    python benchmarks/time_sharing.py [--shape 0.5b] [--steps 6] [--only alone split shared] [--work DIR]

Every contender trains the same model on the same number of samples, whose lengths are geometric. `alone` is one job
that has both GPUs, one for training and one for generation that runs a step ahead; one after the other takes twice as
long. `split` is both jobs at the same time, each on a GPU of its own, training and generating in turns. `shared` is
both jobs under the scheduler: each trains on its own GPU and generates on both. Seconds are counted from the first step
to the last; engines that are built on the way count.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from async_vs_sync import throughput_config  # noqa: E402
from shapes import make_model, make_prompts  # noqa: E402

JOBS = ("a", "b")


class Span(NamedTuple):
    """When a job's steps happened, in seconds of the machine's clock, and how many there were."""

    first: float
    finished: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From the first step's begin to the last one's end."""
        return self.finished[-1] - self.first

    def steady_s(self) -> float:
        """Seconds of a step, over those after the second."""
        return (self.finished[-1] - self.finished[1]) / max(1, len(self.finished) - 2)


def span_of(log_dir: Path) -> Span:
    """The steps of the newest run below a log directory."""
    from nemo_rl.utils.record import read_record
    from nemo_rl.utils.record_events import StepBegun, StepFinished

    entries = list(read_record(max(log_dir.glob("exp_*")) / "record.jsonl"))
    begun = [entry.time for entry in entries if isinstance(entry.event, StepBegun)]
    return Span(begun[0], tuple(entry.time for entry in entries if isinstance(entry.event, StepFinished)))


def config_of(args: argparse.Namespace, model: Path, prompts: Path, name: str, job: str, *, ahead: bool) -> Path:
    """A job's configuration for one contender; its log directory is beside it."""
    config = copy.deepcopy(throughput_config(args, model, prompts, 1 if ahead else 0))
    config["grpo"]["seed"] = JOBS.index(job) + 1
    config["policy"]["generation"]["vllm_cfg"] |= {"enforce_eager": True, "gpu_memory_utilization": args.memory}
    config["logger"]["log_dir"] = str(args.work / name / job)
    config["checkpointing"] = {"enabled": False}
    config["cluster"]["gpus_per_node"] = 2 if ahead else 1
    path = args.work / f"{name}_{job}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(args: argparse.Namespace, script: str, *arguments: str, **environment: str) -> Any:
    """Starts one of the examples; its output goes to a file in the work directory."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    output = (args.work / f"{script}_{environment.get('CUDA_VISIBLE_DEVICES', 'all')}.txt").open("w")
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "RAY_ADDRESS": "local"} | environment,
    )


def finish(args: argparse.Namespace, processes: Sequence[Any]) -> None:
    """Waits for all; the end of their output if one failed."""
    codes = [process.wait() for process in processes]
    if any(codes):
        logs = [path.read_text()[-6000:] for path in sorted(args.work.glob("*.txt"))]
        raise SystemExit(f"exit codes {codes}\n" + "\n".join(logs))


def alone(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Span]:
    """One job on both GPUs."""
    config = config_of(args, model, prompts, "alone", "a", ahead=True)
    finish(args, [start(args, "run_grpo.py", "--config", str(config))])
    return {"a": span_of(args.work / "alone" / "a")}


def split(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Span]:
    """Both jobs, each on one GPU."""
    processes = []
    for gpu, job in enumerate(JOBS):
        config = config_of(args, model, prompts, "split", job, ahead=False)
        processes.append(start(args, "run_grpo.py", "--config", str(config), CUDA_VISIBLE_DEVICES=str(gpu)))
    finish(args, processes)
    return {job: span_of(args.work / "split" / job) for job in JOBS}


def shared(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Span]:
    """Both jobs on the pool of both GPUs."""
    configs = [str(config_of(args, model, prompts, "shared", job, ahead=True)) for job in JOBS]
    pool = ["--gpus", "2", "--device", args.device, "--log-dir", str(args.work / "pool")]
    finish(args, [start(args, "run_time_sharing.py", *pool, "--pipelines", *configs)])
    return {job: span_of(args.work / "shared" / job) for job in JOBS}


def hand_overs(log_dir: Path) -> str:
    """Lines of figures: from the decision to give GPUs to somebody until they are used, and from the request for
    training GPUs to the grant, beside what it is held to: twice a sleep and a sync of this run, and 0.5 s.
    """
    from nemo_rl.time_sharing.log import events as ev
    from nemo_rl.time_sharing.log.merged import merge_by_machine_time
    from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Phase
    from nemo_rl.time_sharing.viewing.handovers import HandoverWatch, percentile

    watch = HandoverWatch()
    asked: dict[str, float] = {}
    waits: list[float] = []
    since: dict[tuple[str, int], tuple[Phase, float]] = {}
    lasted: dict[Phase, list[float]] = {Phase.SLEEPING: [], Phase.SYNCING: []}
    for entry in merge_by_machine_time(sorted((log_dir / "latest").glob("*.jsonl"))):
        watch.take(entry.time, entry.event)
        match entry.event:
            case ev.Requested(cluster=cluster) as request if cluster == ACTOR_TRAIN:
                asked[request.pipeline] = entry.time
            case ev.Granted(cluster=cluster) as grant if cluster == ACTOR_TRAIN and grant.pipeline in asked:
                waits.append(entry.time - asked.pop(grant.pipeline))
            case ev.RankMoved() as moved:
                before, began = since.get((moved.pipeline, moved.rank), (Phase.ASLEEP, entry.time))
                if before in lasted:
                    lasted[before].append(entry.time - began)
                since[moved.pipeline, moved.rank] = moved.phase, entry.time
    lines = []
    for what, chosen in (("training", False), ("a rank", True)):
        seconds = [found.seconds for found in watch.found if found.what.startswith("rank") == chosen]
        lines.append(f"{what}, decision to use: {_spread(seconds)}")
    floor = sum(percentile(seconds, 50) for seconds in lasted.values())
    lines.append(f"training, request to grant: {_spread(waits)}; 2 x (sleep + sync) + 0.5 s is {2 * floor + 0.5:.2f} s")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    from nemo_rl.time_sharing.viewing.handovers import percentile

    return f"{len(seconds)} hand-overs, p50 {percentile(seconds, 50):.2f} s, p99 {percentile(seconds, 99):.2f} s"


def makespan(spans: dict[str, Span]) -> float:
    """From the first step of anybody to the last step of anybody."""
    return max(span.finished[-1] for span in spans.values()) - min(span.first for span in spans.values())


def main() -> None:
    """Runs the contenders one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=1920)
    parser.add_argument("--mean-tokens", type=int, default=600)
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization of every engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=("alone", "split", "shared"), default=["alone", "split", "shared"])
    parser.add_argument("--work", type=Path, default=Path("/tmp/nemo_rl_time_sharing"))
    args = parser.parse_args()
    args.gpus = 2
    args.work.mkdir(parents=True, exist_ok=True)
    model = make_model(args.shape, args.work)
    prompts = make_prompts(args.prompts * (args.steps + 2), args.prompt_tokens, args.work / "prompts.jsonl")
    results: dict[str, dict[str, Span]] = {}
    for name in args.only:
        began = time.perf_counter()
        results[name] = {"alone": alone, "split": split, "shared": shared}[name](args, model, prompts)
        wall = time.perf_counter() - began
        for job, span in results[name].items():
            steps = ", ".join(f"{b - a:.1f}" for a, b in zip((span.first, *span.finished), span.finished, strict=False))
            print(
                f"{name:7s} job {job}: {span.seconds:7.1f} s for {len(span.finished)} steps, "
                f"{span.steady_s():6.1f} s a step later on ({steps}); {wall:.0f} s with start and end",
                flush=True,
            )
    table(results)
    if "shared" in results:
        print(hand_overs(args.work / "pool"))
    print("RESULT " + json.dumps({name: {job: span.seconds for job, span in s.items()} for name, s in results.items()}))


def table(results: dict[str, dict[str, Span]]) -> None:
    """What sharing gains over each other way, whole and later on."""
    if "shared" not in results:
        return
    ours, later = makespan(results["shared"]), max(span.steady_s() for span in results["shared"].values())
    if "alone" in results:
        job = results["alone"]["a"]
        print(f"one after the other / shared: {2 * job.seconds / ours:.2f}; later on {2 * job.steady_s() / later:.2f}")
        for name, span in results["shared"].items():
            whole, steady = span.seconds / job.seconds, span.steady_s() / job.steady_s()
            print(f"job {name}: slowdown by sharing {whole:.2f}, later on {steady:.2f}")
    if "split" in results:
        other = max(span.steady_s() for span in results["split"].values())
        print(f"one GPU each / shared: {makespan(results['split']) / ours:.2f}; later on {other / later:.2f}")


if __name__ == "__main__":
    main()
