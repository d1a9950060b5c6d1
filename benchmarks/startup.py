"""How long a run takes from its command to its first step and from its last step to its end, of two commits.

    python benchmarks/startup.py [--against COMMIT|FOLDER] [--runs 3] [--script grpo|sft] [--shape tiny|0.5b]

Checks COMMIT out into a temporary worktree (FOLDER is one already) and runs the shipped arithmetic configuration for
one step, there and here in turn, with a tiny model and nothing saved; a larger shape runs in bfloat16 on one GPU.
Prints medians in seconds: until the first step begins, until the process has ended after that step, and the processor
seconds that all processes of the run had taken by the first step, which other work on the machine changes least.
`COMMIT` is the parent of the checked-out commit by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
_MARK = "NRL_STARTUP_RUN"
_DEADLINE_S = 900.0
_POLL_S = 0.1
SCRIPTS = {
    "grpo": (
        "run_grpo.py",
        "grpo_arithmetic_cpu.yaml",
        ("grpo.max_num_steps=1", "grpo.val_at_start=false", "grpo.val_period=0", "grpo.val_at_end=false"),
    ),
    "sft": (
        "run_sft.py",
        "sft_arithmetic_cpu.yaml",
        ("sft.max_num_steps=1", "sft.val_at_start=false", "sft.val_period=0", "sft.val_at_end=false"),
    ),
}


ON_A_GPU = (
    "cluster.device=cuda",
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=1024",
    "policy.sequence_packing.train_mb_tokens=8192",
    "policy.sequence_packing.logprob_mb_tokens=16384",
    "policy.generation.max_new_tokens=512",
    "policy.generation.vllm_cfg.max_model_len=1024",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.5",
    "policy.generation.vllm_kwargs.kv_cache_memory_bytes=null",
    "data.max_input_seq_length=512",
)


@dataclass(frozen=True)
class Times:
    """Of one run, in seconds.

    Attributes:
        until_first_step: From the command to the moment at which the first step began.
        processor: Taken by all of its processes until that step was done.
        ending: From the end of that step to the end of the process.
    """

    until_first_step: float
    processor: float
    ending: float


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree of a commit, for the block, or the folder of that name."""
    if (Path(commit) / "nemo_rl").is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measured(tree: Path, model: Path, script: str, settings: tuple[str, ...] = ()) -> Times:
    """Runs one step of a checkout's example, with further overrides.

    Raises:
        RuntimeError: The run failed, or took longer than a quarter of an hour; with what it printed.
    """
    program, config, overrides = SCRIPTS[script]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="startup-run-") as folder, open(Path(folder) / "said.txt", "w+") as said:
        places = (f"policy.model_name={model}", f"logger.log_dir={folder}/logs", "checkpointing.enabled=false")
        command = [sys.executable, f"examples/{program}", "--config", f"examples/configs/{config}"]
        began = time.time()
        process = subprocess.Popen(
            [*command, *overrides, *places, *settings],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": on_path(tree), "RAY_ADDRESS": "local", _MARK: mark},
            stdout=said,
            stderr=said,
        )
        try:
            step, processor = _wait_for_step(Path(folder) / "logs", process, mark)
            code = process.wait(timeout=_DEADLINE_S)
            ended = time.time()
        except (TimeoutError, subprocess.TimeoutExpired):
            code = -1
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != 0:
            said.seek(0)
            raise RuntimeError(f"{tree}: exit code {code}\n{said.read()[-4000:]}")
    return Times(step["time"] - step["total_step_time"] - began, processor, ended - step["time"])


def on_path(tree: Path) -> str:
    """`PYTHONPATH` with a checkout before what is there."""
    return os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))


def _wait_for_step(logs: Path, process: subprocess.Popen[bytes], mark: str) -> tuple[dict[str, float], float]:
    """The metrics line that ends the first step, and the processor seconds taken by then.

    Raises:
        TimeoutError: There was none in time, or the process ended without one.
    """
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        over = process.poll() is not None
        for path in logs.glob("exp_*/metrics.jsonl"):
            for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
                line = json.loads(text) if text.endswith("\n") else {}
                if line.get("prefix") == "timing/train" and "total_step_time" in line:
                    return line, processor_seconds(mark)
        if over:
            break
        time.sleep(_POLL_S)
    raise TimeoutError


def processor_seconds(mark: str) -> float:
    """Of every living process that carries a mark in its environment."""
    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", default="HEAD~1", help="commit to compare with")
    parser.add_argument("--runs", type=int, default=3, help="runs of each")
    parser.add_argument("--script", choices=list(SCRIPTS), default="grpo")
    parser.add_argument("--shape", default="tiny", help="of the model; tiny on CPU, others on a GPU")
    options = parser.parse_args()
    on_a_gpu = options.shape != "tiny"
    with tempfile.TemporaryDirectory(prefix="startup-model-") as folder, checked_out(options.against) as tree:
        model = Path(folder) / "tiny"
        make = [sys.executable, "examples/make_tiny_model.py", str(model), "--layers", "2", "--hidden", "128"]
        if on_a_gpu:
            making = f"make_model({options.shape!r}, Path({folder!r}))"
            make[1:] = ["-c", f"from pathlib import Path; from shapes import make_model; {making}"]
            model = Path(folder) / options.shape
        env = os.environ | {"PYTHONPATH": os.pathsep.join((on_path(ROOT), str(ROOT / "benchmarks")))}
        subprocess.run(make, cwd=ROOT, env=env, check=True, capture_output=True)
        found: dict[str, list[Times]] = {options.against: [], "here": []}
        for _ in range(options.runs):
            for name, place in ((options.against, tree), ("here", ROOT)):
                times = measured(place, model, options.script, ON_A_GPU if on_a_gpu else ())
                found[name].append(times)
                load = os.getloadavg()[0]
                print(f"{name}: {times} load={load:.1f}", file=sys.stderr, flush=True)
    print(f"{'':12} {'first step':>12} {'processor':>12} {'ending':>12}")
    rows = {
        name: [
            statistics.median(getattr(one, field) for one in many)
            for field in ("until_first_step", "processor", "ending")
        ]
        for name, many in found.items()
    }
    for name, medians in rows.items():
        print(f"{name[:12]:12} " + " ".join(f"{value:12.1f}" for value in medians))
    print(f"{'here / there':12} " + " ".join(f"{b / a:12.2f}" for a, b in zip(*rows.values(), strict=True)))


if __name__ == "__main__":
    main()
