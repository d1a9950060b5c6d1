"""Equal GRPO jobs on the GPUs of one machine: the pool against everything that can be done without it.

    python benchmarks/time_sharing.py [--shape 0.5b] [--jobs 2 4] [--gpus 2] [--steps 6] [--ways serial split slots ...]
    python benchmarks/time_sharing.py --pretrained DIR --train a.jsonl b.jsonl --validation val.jsonl --steps 60
        --prompts 32 --prompt-tokens 256 --new-tokens 512 --ways serial serial-ahead unmanaged slots-mps-ahead
    python benchmarks/time_sharing.py --shape tiny --steps 500 --prompts 4 --generations 4 --prompt-tokens 16
        --new-tokens 16 --mean-tokens 8 --eager --ways slots --way-s 5000   # a thousand hand-overs, memory meanwhile

Every job trains the same model on the same number of samples, whose lengths are geometric, with CUDA graphs; or, with
`--pretrained`, a real model on files of `question` and `answer` (one for each job, or one for all), as
`learning_curve.py` does, with the held-out accuracy beside the seconds. The ways:

- `serial`: one job on all GPUs, generating and training in turns; the jobs run one after the other. It is measured
  once, whatever the numbers of jobs.
- `serial-2`: the same with two engines on each GPU. The faster one counts as one after the other.
- `split`: all jobs at the same time, each on its part of the GPUs. With more jobs than GPUs several start on each.
- `split-2`: the same with two engines on each GPU. The faster one counts as the split.
- `unmanaged`: all jobs started at once on all GPUs, with `--kv-gib` of KV cache each, and nobody who manages them.
- `exclusive`: the pool, whole GPUs to one job at a time.
- `slots`: the pool with as many slots on each GPU as there are jobs, each job on all GPUs.
- `slots-mps`: the same through NVIDIA's Multi-Process Service.
- `slots-mps-even`: the same with trainers of the same priority as engines.
- `slots-mps-ahead`: the same with jobs that generate one step ahead of training (`async_grpo`); each trains on one GPU
  and generates on all.
- `serial-ahead`: one such job at a time, with half of the GPUs for each of training and generation.

The steady seconds are those in which each job makes one step, between the moment at which all have made two steps and
the first one's end. What a way does not survive is printed, with the steps that it made. GPU busy is the share of time
in which a kernel ran, as the driver counts it. Where more than two jobs share a GPU, each trains in smaller
microbatches, so that they fit beside each other. For the pools the memory of every job's processes is shown as it was
after the first, tenth, hundredth, ... hand-over of training GPUs, and at the end.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from async_vs_sync import Contender, throughput_config  # noqa: E402
from shapes import host_speed_s, make_model, make_prompts, visible_gpus  # noqa: E402

WAYS = (
    "serial",
    "serial-2",
    "serial-ahead",
    "split",
    "split-2",
    "unmanaged",
    "exclusive",
    "slots",
    "slots-ahead",
    "slots-mps",
    "slots-mps-even",
    "slots-mps-ahead",
)
POOLS = ("exclusive", *(way for way in WAYS if way.startswith("slots")))
_WARM_STEPS = 2
_SAMPLE_S = 0.25
CLOSE_S = 90.0


class Span(NamedTuple):
    """When a job's steps happened, in seconds of the machine's clock."""

    first: float
    finished: tuple[float, ...]


class Result(NamedTuple):
    """What a way did: the steps of each job, GPU busy share (None on CPU slots), and why it failed, if it did."""

    spans: dict[str, Span]
    busy: float | None
    failed: str

    def window(self) -> tuple[float, float]:
        """From the moment at which all jobs are warm to the first one's end."""
        spans = list(self.spans.values())
        return max(span.finished[_WARM_STEPS - 1] for span in spans), min(span.finished[-1] for span in spans)

    def round_s(self) -> float:
        """Seconds in which every job makes a step, while all run."""
        begin, end = self.window()
        rates = []
        for span in self.spans.values():
            inside = [at for at in span.finished if begin <= at <= end]
            # A job's rate is that between two ends of steps; what lies before and after them is no whole step. Where
            # too few steps are for that, all warm steps of the job count.
            ends = inside if len(inside) > 1 else span.finished[_WARM_STEPS - 1 :]
            rates.append((len(ends) - 1) / (ends[-1] - ends[0]))
        return len(rates) / sum(rates)

    def job_s(self, job: str) -> float:
        """Median seconds of a job's warm steps."""
        ends = self.spans[job].finished[_WARM_STEPS - 1 :]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def span_of(log_dir: Path) -> Span | None:
    """The steps of the newest run below a log directory; None where there is none."""
    from nemo_rl.utils.record import read_record
    from nemo_rl.utils.record_events import StepBegun, StepFinished

    runs = sorted(log_dir.glob("exp_*"))
    if not runs or not (runs[-1] / "record.jsonl").exists():
        return None
    entries = list(read_record(runs[-1] / "record.jsonl"))
    begun = [entry.time for entry in entries if isinstance(entry.event, StepBegun)]
    finished = tuple(entry.time for entry in entries if isinstance(entry.event, StepFinished))
    return Span(begun[0], finished) if begun else None


def jobs_of(args: argparse.Namespace) -> list[str]:
    """Their names."""
    return [chr(ord("a") + number) for number in range(args.jobs)]


def sharers(args: argparse.Namespace, way: str) -> int:
    """How many jobs may be on a GPU at the same time."""
    if way.startswith("serial") or way == "exclusive":
        return 1
    return -(-args.jobs // args.gpus) if way.startswith("split") else args.jobs


def microbatch_tokens(args: argparse.Namespace) -> int:
    """What fits beside 0.5B's training state into the memory of a pool's trainer: 16,384 tokens took 27 GiB."""
    from nemo_rl.distributed.accelerator_slots import least_device_bytes
    from nemo_rl.time_sharing.pipelines.residents import slot_bytes

    sizes = slot_bytes(least_device_bytes(), args.slots or args.jobs) if args.device == "cuda" else None
    return 16384 if sizes is not None and sizes.trainer >= 35 * (1 << 30) else 8192


def config_of(args: argparse.Namespace, way: str, job: str, gpus: int) -> Path:
    """A job's configuration for one way; its log directory is beside it."""
    shaped = argparse.Namespace(**(vars(args) | {"gpus": gpus}))
    ahead = way.endswith("-ahead")
    config = copy.deepcopy(throughput_config(shaped, args.model, args.prompts_file, Contender(way, int(ahead))))
    if sharers(args, way) > 2:
        tokens = microbatch_tokens(args) if way in POOLS else 4096
        config["policy"]["sequence_packing"] |= {"train_mb_tokens": tokens, "logprob_mb_tokens": 2 * tokens}
    if args.pretrained:
        _train_for_real(args, config, ord(job) - ord("a"))
    config["grpo"]["seed"] = ord(job)
    vllm: dict[str, Any] = {"enforce_eager": args.eager}
    if not ahead:
        vllm["gpu_memory_utilization"] = args.memory
    if way.endswith("-2"):
        vllm["engines_per_gpu"] = 2
    generation = config["policy"]["generation"]
    generation["vllm_cfg"] |= vllm
    if way not in POOLS and sharers(args, way) > 1 and args.device == "cuda":
        generation["vllm_cfg"]["gpu_memory_utilization"] = 0.05
        generation["vllm_kwargs"] |= {"kv_cache_memory_bytes": int(args.kv_gib * (1 << 30))}
    config["logger"]["log_dir"] = str(args.work / way / job)
    config["checkpointing"] = {"enabled": False}
    config["cluster"]["gpus_per_node"] = gpus
    path = args.work / f"{way}_{job}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _train_for_real(args: argparse.Namespace, config: dict[str, Any], number: int) -> None:
    """Puts a pretrained model, its problems and their judge into a configuration."""
    rows = {"dataset_name": "ResponseDataset", "input_key": "question", "output_key": "answer"}
    train, validation = args.train[number % len(args.train)], args.validation[number % len(args.validation)]
    policy = config["policy"]
    policy["tokenizer"] = {"name": str(args.model)}
    policy["optimizer"]["kwargs"] |= {"lr": args.lr, "weight_decay": 0.01}
    # Samples end where the model ends them.
    del policy["generation"]["stop_token_ids"]
    config["loss_fn"]["reference_policy_kl_penalty"] = 0.01
    config["data"] = {
        "max_input_seq_length": args.prompt_tokens,
        "default": {"prompt_file": args.prompt_file, "env_name": "math"},
        "train": rows | {"data_path": str(Path(train).resolve())},
        "validation": rows | {"data_path": str(Path(validation).resolve())},
    }
    config["env"] = {"math": {"num_workers": 4, "math_verify_impl": "hf_math_verify"}}
    config["grpo"] |= {"val_period": args.val_period, "val_at_start": True, "val_at_end": True}
    config["grpo"] |= {"max_val_samples": args.val_samples, "val_batch_size": args.val_samples}


def start(args: argparse.Namespace, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Starts one of the examples; its output goes to a file in the work directory."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (args.work / f"{name}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "RAY_ADDRESS": "local"} | environment,
        )


def finish(args: argparse.Namespace, processes: dict[str, subprocess.Popen[bytes]]) -> str:
    """Waits for all, the first failure or the limit of `--way-s`; why it failed, empty where it did not."""
    deadline = time.monotonic() + args.way_s
    failed = ""
    while not failed and any(process.poll() is None for process in processes.values()):
        codes = {name: process.poll() for name, process in processes.items()}
        bad = [name for name, code in codes.items() if code]
        if bad:
            failed = f"{bad[0]} ended with {codes[bad[0]]}"
        elif time.monotonic() > deadline:
            failed = f"not done after {args.way_s:.0f} s"
        time.sleep(0.2)
    failed = failed or next((f"{n} ended with {p.returncode}" for n, p in processes.items() if p.returncode), "")
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes.values():
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
    if failed:
        for name in processes:
            print(f"-- {name}\n" + (args.work / f"{name}.txt").read_text()[-args.log_chars :], flush=True)
    return failed


class BusyGpus:
    """Samples how busy some GPUs are, named as the driver names them."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._samples: list[tuple[float, float]] = []

    @contextmanager
    def sampled(self, cuda: bool) -> Iterator[None]:
        """Samples inside the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._sample, args=(over,), daemon=True)
        if cuda:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if cuda:
                thread.join()

    def _sample(self, over: threading.Event) -> None:
        import pynvml

        pynvml.nvmlInit()
        gpus = [
            pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
            for gpu in self._gpus
        ]
        while not over.wait(_SAMPLE_S):
            busy = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in gpus]
            self._samples.append((time.time(), statistics.mean(busy)))

    def between(self, begin: float, end: float) -> float | None:
        """Mean share in a stretch of time; None where nothing was sampled."""
        inside = [share for at, share in self._samples if begin <= at <= end]
        return statistics.mean(inside) if inside else None


def run_way(args: argparse.Namespace, way: str) -> Result:
    """Runs one way to its end."""
    jobs = jobs_of(args)
    busy = BusyGpus(visible_gpus(args.gpus))
    with busy.sampled(args.device == "cuda"):
        failed = finish(args, _started(args, way, jobs))
    found = {job: span_of(args.work / way / job) for job in (jobs[:1] if way.startswith("serial") else jobs)}
    spans = {job: span for job, span in found.items() if span is not None}
    if len(spans) < len(found) or any(len(span.finished) <= _WARM_STEPS for span in spans.values()):
        failed = failed or "too few steps"
        return Result(spans, None, failed)
    result = Result(spans, None, failed)
    return result._replace(busy=busy.between(*result.window()))


def pool_arguments(args: argparse.Namespace, way: str) -> list[str]:
    """The command line of a way's pool."""
    return [
        *("--gpus", str(args.gpus), "--device", args.device, "--log-dir", str(args.work / f"pool_{way}")),
        *("--port", "0", "--slots-per-gpu", "1" if way == "exclusive" else str(args.slots or args.jobs)),
        *("--mps", "on" if way.startswith("slots-mps") else "off"),
    ]


def serve(args: argparse.Namespace, way: str, name: str, **environment: str) -> subprocess.Popen[bytes]:
    """Starts a pool of this name; jobs can be submitted to it once it `is_open`."""
    arguments = [*pool_arguments(args, way), "--name", name]
    return start(args, "pool", "-m", "nemo_rl.time_sharing", "serve", *arguments, **environment)


def is_open(args: argparse.Namespace) -> bool:
    """Whether the pool that `serve` started takes jobs."""
    return "submit with" in (args.work / "pool.txt").read_text()


def close(pool: subprocess.Popen[bytes]) -> bool:
    """Ends a pool with its jobs; whether it has ended within CLOSE_S."""
    if pool.poll() is None:
        pool.terminate()
    try:
        pool.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _started(args: argparse.Namespace, way: str, jobs: Sequence[str]) -> dict[str, subprocess.Popen[bytes]]:
    run = str(ROOT / "examples" / "run_grpo.py")
    if way in POOLS:
        configs = [str(config_of(args, way, job, args.gpus)) for job in jobs]
        line = [str(ROOT / "examples" / "run_time_sharing.py"), *pool_arguments(args, way), "--pipelines", *configs]
        even = {"CUDA_MPS_CLIENT_PRIORITY": "0"} if way.endswith("-even") else {}
        return {way: start(args, way, *line, **even)}
    if way.startswith("serial"):
        config = config_of(args, way, jobs[0], args.gpus)
        return {way: start(args, way, run, "--config", str(config))}
    started = {}
    for number, job in enumerate(jobs):
        config = config_of(args, way, job, width_of(args, way))
        visible = visible_to(args, way, number)
        started[f"{way}_{job}"] = start(args, f"{way}_{job}", run, "--config", str(config), **visible)
    return started


def width_of(args: argparse.Namespace, way: str) -> int:
    """How many GPUs each job has."""
    return max(args.gpus // args.jobs, 1) if way.startswith("split") else args.gpus


def visible_to(args: argparse.Namespace, way: str, number: int) -> dict[str, str]:
    """The variable that shows the job of this number its part of the GPUs in a split; nothing elsewhere."""
    if not way.startswith("split"):
        return {}
    width = width_of(args, way)
    gpus = [(number * width + offset) % args.gpus for offset in range(width)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus(args.gpus)[gpu] for gpu in gpus)}


def show(args: argparse.Namespace, way: str, result: Result, wall_s: float) -> None:
    """Lines of one way."""
    for job, span in result.spans.items():
        ends = (span.first, *span.finished)
        steps = ", ".join(f"{later - earlier:.1f}" for earlier, later in itertools.pairwise(ends))
        print(f"{way:10s} job {job}: {len(span.finished)} steps ({steps})", flush=True)
    said = f"FAILED: {result.failed}" if result.failed else "done"
    print(f"{way:10s} {said}, {wall_s:.0f} s with start and end", flush=True)
    for job in result.spans:
        if accuracy := metrics_of(args.work / way / job, ("validation",)):
            shown = ", ".join(f"{values['accuracy']:.3f} (step {step})" for _, step, values in accuracy)
            print(f"{way:10s} job {job}: accuracy {shown}", flush=True)
    if way in POOLS and not result.failed:
        print(hand_overs(args.work / f"pool_{way}"), flush=True)
        print(memory_over_hand_overs(args, way, list(result.spans)), flush=True)


def table(args: argparse.Namespace, results: dict[str, Result]) -> dict[str, float]:
    """Prints what every way gains over one after the other; its steady seconds by name."""
    rounds = {
        way: result.round_s() * (args.jobs if way.startswith("serial") else 1)
        for way, result in results.items()
        if result.spans and all(len(span.finished) > _WARM_STEPS for span in result.spans.values())
    }
    serial = min((seconds for way, seconds in rounds.items() if way.startswith("serial")), default=None)
    print(f"\n{args.jobs} jobs on {args.gpus} GPUs, {args.pretrained or args.shape}: one step of every job")
    print(f"{'way':10s} {'seconds':>8s} {'of serial':>9s} {'slowdowns':>16s} {'GPU busy':>8s}")
    for way, seconds in rounds.items():
        result = results[way]
        alone = None if serial is None else serial / args.jobs
        slowdowns = [] if alone is None else [f"{result.job_s(job) / alone:.2f}" for job in result.spans]
        gain = "-" if serial is None else f"{serial / seconds:.2f}x"
        busy = "-" if result.busy is None else f"{result.busy:.0%}"
        failed = f"  {result.failed}" if result.failed else ""
        print(f"{way:10s} {seconds:8.1f} {gain:>9s} {' '.join(slowdowns):>16s} {busy:>8s}{failed}")
    return rounds


def hand_overs(log_dir: Path) -> str:
    """A line of figures: seconds from the request for training GPUs to the grant, builds of engines left out."""
    from nemo_rl.time_sharing.log import events as ev
    from nemo_rl.time_sharing.log.reading import merge_by_machine_time
    from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN
    from nemo_rl.time_sharing.viewing.timeline import HandoverWatch, percentile

    watch = HandoverWatch()
    asked: dict[str, float] = {}
    waits: list[float] = []
    for entry in merge_by_machine_time(sorted((log_dir / "latest").glob("*.jsonl"))):
        watch.take(entry.time, entry.event)
        match entry.event:
            case ev.Requested(cluster=cluster) as request if cluster == ACTOR_TRAIN:
                asked[request.pipeline] = entry.time
            case ev.Granted(cluster=cluster) as grant if cluster == ACTOR_TRAIN and grant.pipeline in asked:
                waits.append(entry.time - asked.pop(grant.pipeline))
            case _:
                pass
    used = watch.found
    return (
        f"training, request to grant: {len(waits)}, p50 {percentile(waits, 50):.2f} s, p99 {percentile(waits, 99):.2f} "
        f"s; decision to use: {len(used)}, p50 {percentile(used, 50):.2f} s, p99 {percentile(used, 99):.2f} s"
    )


def metrics_of(log_dir: Path, prefixes: Sequence[str]) -> list[tuple[float, int, dict[str, float]]]:
    """Time, step and values of each line of these prefixes in the metrics of a job's newest run."""
    lines = [
        json.loads(line)
        for path in sorted(log_dir.glob("exp_*/metrics.jsonl"))[-1:]
        for line in path.read_text().splitlines()
    ]
    return [
        (line["time"], line["step"], {key: line[key] for key in line.keys() - {"time", "step", "prefix"}})
        for line in lines
        if line["prefix"] in prefixes and ("accuracy" in line or line["prefix"] != "validation")
    ]


def memory_over_hand_overs(args: argparse.Namespace, way: str, jobs: Sequence[str]) -> str:
    """Memory of every job's processes, in GiB, after the first, tenth, hundredth, ... grant of training GPUs."""
    from nemo_rl.time_sharing.log import events as ev
    from nemo_rl.time_sharing.log.reading import merge_by_machine_time
    from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN

    log = sorted((args.work / f"pool_{way}" / "latest").glob("*.jsonl"))
    grants = [
        entry.time
        for entry in merge_by_machine_time(log)
        if isinstance(entry.event, ev.Granted) and entry.event.cluster == ACTOR_TRAIN
    ]
    counts = [count for count in (10**power for power in range(8)) if count < len(grants)] + [len(grants)]
    lines = [f"memory in GiB after {', '.join(f'{count:,}' for count in counts)} hand-overs of training GPUs"]
    for job in jobs:
        for prefix in ("gpu", "host"):
            read = metrics_of(args.work / way / job, (prefix,))
            for key in sorted({key for _, _, values in read for key in values if not key.endswith("_peak_gib")}):
                series = [(at, values[key]) for at, _, values in read if key in values]
                shown = [next((value for at, value in series if at >= grants[n - 1]), series[-1][1]) for n in counts]
                lines.append(f"  job {job} {prefix}/{key}: " + ", ".join(f"{value:.3f}" for value in shown))
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="0.5b")
    made.add_argument("--jobs", type=int, nargs="+", default=[2], help="how many; several give a table each")
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--slots", type=int, default=0, help="slots of each GPU; 0 for one of each job")
    made.add_argument("--steps", type=int, default=6)
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--generations", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--new-tokens", type=int, default=1920)
    made.add_argument("--mean-tokens", type=int, default=600)
    made.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization of engines that have it")
    made.add_argument("--kv-gib", type=float, default=14.0, help="KV cache of each engine of `unmanaged`")
    made.add_argument("--pretrained", type=Path, help="directory of a pretrained model, instead of --shape")
    made.add_argument("--train", nargs="+", default=[], help="its problems: a file for each job, or one for all")
    made.add_argument("--validation", nargs="+", default=[], help="held-out problems, likewise")
    made.add_argument("--prompt-file", default=str(ROOT / "examples" / "prompts" / "step_by_step.txt"))
    made.add_argument("--lr", type=float, default=2e-6, help="of a pretrained model")
    made.add_argument("--val-period", type=int, default=20, help="steps between validations of a pretrained model")
    made.add_argument("--val-samples", type=int, default=256)
    made.add_argument("--eager", action="store_true", help="without CUDA graphs")
    made.add_argument("--device", default="cuda")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    made.add_argument("--way-s", type=float, default=900.0, help="longest time of one way")
    made.add_argument("--log-chars", type=int, default=6000, help="what is shown of the output of a way that failed")
    made.add_argument("--work", type=Path, default=Path("/tmp/nemo_rl_time_sharing"))
    return made


def main(arguments: Sequence[str] | None = None) -> dict[int, dict[str, Result]]:
    """Runs the ways one after the other for each number of jobs, and prints a table of each."""
    made = parser()
    args = made.parse_args(arguments)
    counts, base = args.jobs, args.work
    base.mkdir(parents=True, exist_ok=True)
    if args.pretrained and not (args.train and args.validation):
        made.error("--pretrained needs --train and --validation")
    args.model = args.pretrained or make_model(args.shape, base)
    args.prompts_file = make_prompts(args.prompts * (args.steps + 2), args.prompt_tokens, base / "prompts.jsonl")
    print(f"20 million additions in Python: {host_speed_s():.2f} s", flush=True)
    found: dict[int, dict[str, Result]] = {}
    alone: dict[str, Result] = {}
    for args.jobs in counts:
        args.work = base / f"{args.jobs}_jobs"
        args.work.mkdir(exist_ok=True)
        results = found[args.jobs] = dict(alone)
        for way in args.ways:
            if way in results:
                continue
            began = time.perf_counter()
            results[way] = run_way(args, way)
            show(args, way, results[way], time.perf_counter() - began)
        alone = {way: result for way, result in results.items() if way.startswith("serial")}
        rounds = table(args, results)
        print(f"RESULT {args.jobs} jobs " + json.dumps({way: round(seconds, 2) for way, seconds in rounds.items()}))
    return found


if __name__ == "__main__":
    main()
