"""Seconds per phase of a distillation step, with the teacher's scoring computed by the training backend and by vLLM.

    python benchmarks/distillation.py --student 0.5b --teacher 1.5b [--steps 4] [--k 64] [--backends policy vllm]
    python benchmarks/distillation.py --student tiny --teacher tiny --device cpu --prompts 16 --prompt-tokens 32
    --new-tokens 32 --mb-tokens 2048                       # without a GPU

Random weights of Qwen2.5 shapes, bfloat16 (float32 on CPU), student, generation and teacher in turn on one accelerator,
every response of full length unless it draws the stop token. Every backend runs in a process of its own, one after the
other. Prints medians over the steps after the first, the share of a step that scoring takes, and the most memory of the
device that was in use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import SHAPES, host_speed_s, make_model, make_prompts, prompts_section  # noqa: E402

_PHASES = {
    "generation": "timing/train/generation",
    "teacher": "timing/train/teacher_scoring",
    "training": "timing/train/policy_training",
    "refit": "timing/train/prepare_for_generation/total",
}


def run_config(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """The configuration of one run."""
    work, length = Path(args.work), args.prompt_tokens + args.new_tokens
    precision = "bfloat16" if args.device == "cuda" else "float32"
    packing = {"enabled": True, "train_mb_tokens": args.mb_tokens, "logprob_mb_tokens": 2 * args.mb_tokens}
    engine = {"gpu_memory_utilization": args.gpu_memory, "enable_vllm_metrics_logger": False}
    fused = {"fused": True} if args.device == "cuda" else {}
    return {
        "distillation": {
            "num_prompts_per_step": args.prompts,
            "max_num_steps": args.steps,
            "max_num_epochs": 100,
            "val_period": 0,
            "topk_logits_k": args.k,
        },
        "policy": {
            "model_name": str(make_model(args.student, work)),
            "precision": precision,
            "max_total_sequence_length": length,
            "train_global_batch_size": args.prompts,
            "train_micro_batch_size": 8,
            "tokenizer": {"chat_template": None},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "weight_decay": 0.0, **fused}},
            "scheduler": None,
            "sequence_packing": packing,
            "generation": {
                "max_new_tokens": args.new_tokens,
                "vllm_cfg": engine,
                "vllm_kwargs": {"max_num_seqs": 512},
            },
        },
        "teacher": {
            "model_name": str(make_model(args.teacher, work / "teacher", seed=1)),
            "backend": backend,
            "sequence_packing": packing,
            "generation": {"vllm_cfg": engine},
        },
        "data": prompts_section(
            make_prompts(4 * args.prompts, args.prompt_tokens, work / "prompts.jsonl"), args.prompt_tokens
        ),
        "env": {"parity": {"class": "benchmarks.grpo_step.ParityEnvironment"}},
        "cluster": {"gpus_per_node": 1, "device": args.device},
        "logger": {"log_dir": str(work / "logs" / backend), "monitor_gpus": args.device == "cuda"},
        "checkpointing": {"enabled": False},
    }


def run(args: argparse.Namespace, backend: str) -> dict[str, float]:
    """One run in this process; medians of its own timers."""
    from nemo_rl.algorithms.launch import grpo_to_end
    from nemo_rl.config import DistillationMasterConfig, check_config
    from nemo_rl.utils.metrics_file import read_metrics

    config = DistillationMasterConfig(**run_config(args, backend))
    check_config(config)
    if grpo_to_end(config) != 0:
        raise SystemExit("the run failed")
    metrics = read_metrics(config.logger.log_dir)

    def median(name: str) -> float:
        values = metrics.scalars(name)[1][1:] if name in metrics.series else []
        return statistics.median(values) if values else 0.0

    found = {phase: median(name) for phase, name in _PHASES.items()}
    found["step"] = median("timing/train/total_step_time")
    used = [metrics.scalars(name)[1] for name in metrics.series if ".gpu." in name and name.endswith("mem_gb")]
    found["peak_gib"] = max((value for values in used for value in values), default=0.0)
    return found


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", choices=SHAPES, default="0.5b")
    parser.add_argument("--teacher", choices=SHAPES, default="1.5b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--mb-tokens", type=int, default=16384)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backends", nargs="+", choices=("policy", "vllm"), default=["policy", "vllm"])
    parser.add_argument("--work", default="/tmp/nemo_rl_distillation")
    parser.add_argument("--only", choices=("policy", "vllm"), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Runs every backend in a process of its own and prints a table."""
    args = arguments().parse_args()
    if args.only:
        result = run(args, args.only)
        (Path(args.work) / f"{args.only}.json").write_text(json.dumps(result))
        return
    Path(args.work).mkdir(parents=True, exist_ok=True)
    names = [*_PHASES, "step"]
    table = [
        f"host: 20 million additions in {host_speed_s():.2f} s",
        "| teacher by | " + " | ".join(f"{name} s" for name in names) + " | scoring / step | most memory GiB |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for backend in args.backends:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", backend], check=True, cwd=ROOT)
        found = json.loads((Path(args.work) / f"{backend}.json").read_text())
        share = found["teacher"] / found["step"] if found["step"] else 0.0
        memory = f"{found['peak_gib']:.1f}" if found["peak_gib"] else "not measured"
        seconds = " | ".join(f"{found[name]:.2f}" for name in names)
        table.append(f"| {backend} | {seconds} | {share:.0%} | {memory} |")
    # Last, below what the runs themselves wrote.
    print("\n".join(["", *table]))


if __name__ == "__main__":
    main()
