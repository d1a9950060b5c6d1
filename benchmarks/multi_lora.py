"""Experiments per hour of several LoRA adapters on one base, against the same LoRA runs one after the other.

    python benchmarks/multi_lora.py --shape 1.5b --adapters 8 --rank 16 [--steps 5]
    python benchmarks/multi_lora.py --shape tiny --device cpu --adapters 2 --rank 8 --prompts 4 --generations 4
    --prompt-tokens 16 --new-tokens 16 --mb-tokens 512 --steps 2               # without a GPU

Random weights of a Qwen2.5 shape, bfloat16 (float32 on CPU), training and engine on one accelerator, every response of
full length unless it draws the stop token. First all adapters run as one job, with one more that joins while they run;
then each runs alone with `examples/run_grpo.py`, in a process of its own (`--alone N` runs only the first N, and the
figure compares with as many as were run). A run's seconds are those of its process, its start included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import SHAPES, host_speed_s, make_model, make_prompts, prompts_section  # noqa: E402

_TIMEOUT_S = 3600.0
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def base_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration that all runs share."""
    work, length = Path(args.work), args.prompt_tokens + args.new_tokens
    prompts = make_prompts(
        args.prompts * args.steps, args.prompt_tokens, work / f"multi_lora_prompts_{args.prompt_tokens}.jsonl"
    )
    cuda = args.device == "cuda"
    rows = args.prompts * args.generations
    engine: dict[str, Any] = {"max_model_len": length, "enable_vllm_metrics_logger": False}
    if cuda:
        engine |= {"gpu_memory_utilization": args.gpu_memory}
    return {
        "grpo": {
            "num_prompts_per_step": args.prompts,
            "num_generations_per_prompt": args.generations,
            "max_num_steps": args.steps,
            "max_num_epochs": 100,
            "val_period": 0,
            "val_at_start": False,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": str(make_model(args.shape, work)),
            "precision": "bfloat16" if cuda else "float32",
            "max_total_sequence_length": length,
            "train_global_batch_size": rows,
            "train_micro_batch_size": 8,
            "logprob_batch_size": 8,
            "tokenizer": {"chat_template": None},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4, "weight_decay": 0.0}},
            "scheduler": None,
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": args.mb_tokens,
                "logprob_mb_tokens": 2 * args.mb_tokens,
            },
            "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": args.rank, "alpha": 2 * args.rank}},
            "generation": {"max_new_tokens": args.new_tokens, "vllm_cfg": engine},
        },
        "data": prompts_section(prompts, args.prompt_tokens),
        "env": {"parity": {"class": "benchmarks.grpo_step.ParityEnvironment"}},
        "cluster": {"gpus_per_node": 1, "device": args.device, "cpu_slots": 1},
        "data_plane": {"enabled": False},
        "logger": {"tensorboard_enabled": False, "monitor_gpus": False},
        "checkpointing": {"enabled": False},
    }


def _run(command: list[str], log: Path) -> float:
    """Seconds of a run. Raises RuntimeError: it failed; with the end of its output."""
    began = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdout=file,
            stderr=file,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return time.monotonic() - began


def together(args: argparse.Namespace, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All adapters as one job, and one more that is added while they run."""
    shared = config | {
        "multi_lora": {"slots": args.adapters + 1, "wait_s": args.wait_s, "pass_tokens": args.pass_tokens},
        "logger": config["logger"] | {"log_dir": str(folder / "logs")},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(shared))
    files = []
    for number in range(args.adapters):
        files.append(folder / f"adapter{number}.yaml")
        files[-1].write_text(yaml.safe_dump({"grpo": {"seed": number}}))
    late = folder / "late.yaml"
    late.write_text(yaml.safe_dump({"grpo": {"seed": 99, "max_num_steps": 1}}))
    log = folder / "together.log"
    began = time.monotonic()
    with log.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, "examples/run_multi_lora.py", "--config", str(folder / "base.yaml"), "--adapters"]
            + [str(path) for path in files],
            cwd=ROOT,
            env=_ENVIRONMENT,
            stdout=file,
            stderr=file,
        )
        try:
            while job.poll() is None and "step 1/" not in log.read_text():
                time.sleep(0.2)
            # A short job may be over before it hears of another adapter; nothing is said of joining then.
            with contextlib.suppress(RuntimeError):
                _run(
                    ["examples/run_multi_lora.py", "add", "--log-dir", str(folder / "logs"), str(late)],
                    folder / "add.log",
                )
            code = job.wait(_TIMEOUT_S)
        finally:
            job.kill()
    said = log.read_text()
    if code:
        raise RuntimeError(f"the job ended with {code}:\n{said[-3000:]}")
    joined = re.search(r"late: joined after ([\d.]+) s", said)
    taken = re.search(r"adapter0: slot \d+: ([\d.]+) MiB", said)
    return {
        "seconds": time.monotonic() - began,
        "late_joined_s": float(joined[1]) if joined else None,
        "adapter_mib": float(taken[1]) if taken else None,
    }


def one_after_the_other(args: argparse.Namespace, config: dict[str, Any], folder: Path) -> list[float]:
    """Seconds of each run alone."""
    seconds = []
    for number in range(args.adapters if args.alone is None else args.alone):
        own = config | {
            "grpo": config["grpo"] | {"seed": number},
            "logger": config["logger"] | {"log_dir": str(folder / f"alone{number}")},
        }
        path = folder / f"alone{number}.yaml"
        path.write_text(yaml.safe_dump(own))
        seconds.append(_run(["examples/run_grpo.py", "--config", str(path)], folder / f"alone{number}.log"))
        print(f"alone, run {number + 1}: {seconds[-1]:.1f} s", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[shape for shape in SHAPES if "moe" not in shape], default="1.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--mb-tokens", type=int, default=16384)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    parser.add_argument("--wait-s", type=float, default=0.5)
    parser.add_argument("--pass-tokens", type=int)
    parser.add_argument("--alone", type=int, help="runs alone; all by default")
    parser.add_argument("--work", default="results/benchmarks")
    args = parser.parse_args()
    folder = Path(args.work).resolve() / f"multi_lora_{int(time.time())}"
    folder.mkdir(parents=True)
    config = base_config(args)
    joint = together(args, config, folder)
    print(f"together: {json.dumps(joint)}", flush=True)
    alone = one_after_the_other(args, config, folder)
    # The job trains one experiment more than those compared, the late one, whose time counts against it.
    faster = statistics.fmean(alone) * args.adapters / joint["seconds"]
    print(
        f"\n{args.adapters} adapters of rank {args.rank} on {args.shape}, {args.steps} steps of "
        f"{args.prompts} x {args.generations} samples, {args.prompt_tokens} + {args.new_tokens} tokens, "
        f"{args.device}; host {host_speed_s():.2f} s\n"
        f"together {joint['seconds']:.1f} s: {3600 * args.adapters / joint['seconds']:.1f} experiments per hour\n"
        f"one after the other {statistics.fmean(alone):.1f} s each ({len(alone)} run): "
        f"{3600 / statistics.fmean(alone):.1f} experiments per hour\n"
        f"ratio {faster:.2f}; an added adapter takes {joint['adapter_mib']} MiB on the training rank and joined after "
        f"{joint['late_joined_s']} s"
    )


if __name__ == "__main__":
    main()
