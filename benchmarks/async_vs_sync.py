"""Asynchronous and streaming against synchronous GRPO on equal samples: final accuracy on the arithmetic task, and
samples per second.

    python benchmarks/async_vs_sync.py accuracy --model results/arithmetic/sft/latest [--seeds 3] [--first-seed 42]
    [--steps 30] [--ways sync async streaming]
    python benchmarks/async_vs_sync.py throughput --shape 0.5b [--steps 6] [--gpus 2] [--ages 1 2] [--windows 0 1]
    [--work DIR]
    python benchmarks/async_vs_sync.py scaling --shape 1.5b [--gpus 1 2 4] [--steps 5]

`accuracy` runs the shipped arithmetic configurations on this machine with the same prompts, samples and steps.
`throughput` trains random weights on responses whose lengths have a long tail (a response ends at one of many stop
tokens, so lengths are geometric): synchronously with both phases on all GPUs in turn; asynchronously with half of them
for each, for every staleness bound of `--ages`; streaming likewise, for every lookahead of `--windows` (0 is strictly
on-policy), with the share of scoring and training that ran under generation, from the run record.
`scaling` gives a step `--prompts` prompts for each GPU: one GPU generates and trains in turns, more of them are halved
and asynchronous, one step ahead; engines are two on each GPU. It prints samples per second and GPU against one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import host_speed_s, make_model, make_prompts, prompts_section  # noqa: E402

CONFIGS = ROOT / "examples" / "configs"
ARITHMETIC = {
    "sync": "grpo_arithmetic_cpu.yaml",
    "async": "grpo_arithmetic_async_cpu.yaml",
    "streaming": "grpo_arithmetic_streaming_cpu.yaml",
}
_VOCABULARY = {"tiny": 512}


def run(config: Path, log_dir: Path, overrides: list[str]) -> tuple[Any, float]:
    """One run of `examples/run_grpo.py`: its metrics and its wall time in seconds."""
    from nemo_rl.utils.metrics_file import read_metrics

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    line = [
        sys.executable,
        str(ROOT / "examples" / "run_grpo.py"),
        "--config",
        str(config),
        *overrides,
        f"logger.log_dir={log_dir}",
        "checkpointing.enabled=false",
    ]
    with (log_dir / "output.txt").open("w") as output:
        done = subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(
            f"{config.name} ended with {done.returncode}:\n" + (log_dir / "output.txt").read_text()[-4000:]
        )
    return read_metrics(log_dir), time.perf_counter() - started


def accuracy(args: argparse.Namespace) -> None:
    """Validation accuracy of the ways over seeds."""
    results: dict[str, list[float]] = {name: [] for name in args.ways}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.ways:
            overrides = [
                f"policy.model_name={args.model}",
                f"grpo.max_num_steps={args.steps}",
                f"grpo.seed={seed}",
                "logger.monitor_gpus=false",
            ]
            metrics, seconds = run(CONFIGS / ARITHMETIC[name], Path(args.work) / f"{name}_{seed}", overrides)
            steps, values = metrics.scalars("validation/accuracy")
            results[name].append(values[-1])
            print(
                f"seed {seed} {name:9s} accuracy "
                + ", ".join(f"{value:.3f} (step {step})" for step, value in zip(steps, values, strict=True))
                + f", {seconds:.0f} s",
                flush=True,
            )
    print(f"\n{'':9s} {'mean':>7s} {'lowest':>7s} {'highest':>7s}")
    for name, values in results.items():
        print(f"{name:9s} {statistics.mean(values):7.3f} {min(values):7.3f} {max(values):7.3f}")
    print("RESULT " + json.dumps(results))


class Contender(NamedTuple):
    """A way to run: how many versions early rollouts may begin, and whether groups are trained on as they finish."""

    name: str
    age: int
    streams: bool = False

    @property
    def separate(self) -> bool:
        """Whether generation has accelerators of its own."""
        return self.streams or self.age > 0


def throughput_config(args: argparse.Namespace, model: Path, prompts: Path, contender: Contender) -> dict[str, Any]:
    """One contender's configuration."""
    age, separate = contender.age, contender.separate
    length = args.prompt_tokens + args.new_tokens
    vocabulary = _VOCABULARY.get(args.shape, 151936)
    ends = max(1, round(vocabulary / args.mean_tokens))
    colocated = {"enabled": False, "resources": {"gpus_per_node": args.gpus // 2}} if separate else {"enabled": True}
    groups = args.prompts * (age + 1)
    streaming = {
        "sampler": {"name": "in_order", "max_lookahead_versions": age},
        "min_groups_for_streaming_train": max(1, args.prompts // 4),
        "max_inflight_prompts": groups,
        "max_buffered_rollouts": groups,
    }
    return {
        **({"async_rl": streaming} if contender.streams else {}),
        "grpo": {
            "num_prompts_per_step": args.prompts,
            "num_generations_per_prompt": args.generations,
            "max_num_steps": args.steps,
            "max_num_epochs": 100,
            "val_period": 0,
            "async_grpo": {
                "enabled": separate and not contender.streams,
                "max_trajectory_age_steps": max(1, age),
                "in_flight_weight_updates": True,
                "recompute_kv_cache_after_weight_updates": False,
            },
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
        "policy": {
            "model_name": str(model),
            "precision": "bfloat16" if args.device == "cuda" else "float32",
            "max_total_sequence_length": length,
            "train_global_batch_size": args.prompts * args.generations,
            "train_micro_batch_size": 4,
            "tokenizer": {"chat_template": None},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "weight_decay": 0.0}},
            "scheduler": None,
            "sequence_packing": {"enabled": True, "train_mb_tokens": 16384, "logprob_mb_tokens": 32768},
            "generation": {
                "max_new_tokens": args.new_tokens,
                "stop_token_ids": list(range(100, 100 + ends))
                if args.shape == "tiny"
                else list(range(1000, 1000 + ends)),
                "colocated": colocated,
                "vllm_cfg": {
                    "gpu_memory_utilization": 0.8 if separate else 0.5,
                    "enable_vllm_metrics_logger": False,
                },
                # A sample that waits for a place in the engine would lengthen the tail: there is one for each that may
                # be under way.
                "vllm_kwargs": {"max_num_seqs": args.prompts * args.generations * (age + 1)},
            },
        },
        "data": prompts_section(prompts, args.prompt_tokens),
        "env": {"parity": {"class": "benchmarks.grpo_step.ParityEnvironment"}},
        "cluster": {"gpus_per_node": args.gpus, "device": args.device, "cpu_slots": max(2, args.gpus)},
        "logger": {"monitor_gpus": False},
    }


def throughput(args: argparse.Namespace) -> None:
    """Samples per second of every contender."""
    work = Path(args.work)
    model = make_model(args.shape, work)
    batches = args.steps + max([*args.ages, *args.windows, 0]) + 1
    prompts = make_prompts(args.prompts * batches, args.prompt_tokens, work / "long_tail.jsonl")
    (args.gpus,) = args.gpus
    rates: dict[str, dict[str, float]] = {}
    contenders = [
        Contender("sync", 0),
        *(Contender(f"streaming, lookahead {window}", window, streams=True) for window in args.windows),
        *(Contender(f"async, age {age}", age) for age in args.ages),
    ]
    print(f"this host adds 20 million numbers in Python in {host_speed_s():.2f} s", flush=True)
    for contender in contenders:
        rates[contender.name] = measure(contender.name, throughput_config(args, model, prompts, contender), args)
    for name in list(rates)[1:]:
        print(f"samples per second, {name} / sync: {rates[name]['samples_per_s'] / rates['sync']['samples_per_s']:.2f}")
    print("RESULT " + json.dumps(rates))


def scaling(args: argparse.Namespace) -> None:
    """Samples per second and GPU with a growing number of GPUs, and of prompts in a step with them."""
    work, each = Path(args.work), args.prompts
    model = make_model(args.shape, work)
    prompts = make_prompts(each * max(args.gpus) * (args.steps + 2), args.prompt_tokens, work / "long_tail.jsonl")
    print(f"this host adds 20 million numbers in Python in {host_speed_s():.2f} s", flush=True)
    rates: dict[int, float] = {}
    for gpus in args.gpus:
        shaped = argparse.Namespace(**(vars(args) | {"gpus": gpus, "prompts": each * gpus}))
        ahead = gpus > 1
        config = throughput_config(shaped, model, prompts, Contender("", int(ahead)))
        generation = config["policy"]["generation"]
        if args.device == "cuda":
            generation["vllm_cfg"]["engines_per_gpu"] = 2
        # Engines share the samples that may be under way; vLLM takes no more places than tokens of a batch.
        generation["vllm_kwargs"]["max_num_seqs"] = min(generation["vllm_kwargs"]["max_num_seqs"], 1024)
        name = f"{gpus} GPUs, {'one step ahead' if ahead else 'in turns'}"
        rates[gpus] = measure(name, config, shaped)["samples_per_s"] / gpus
        print(
            f"{name}: {rates[gpus]:.2f} samples a second and GPU, {rates[gpus] / rates[args.gpus[0]]:.2f} of "
            f"{args.gpus[0]}",
            flush=True,
        )
    print("RESULT " + json.dumps(rates))


def measure(name: str, config: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Runs one contender; its figures over the steps after the second and before the last, while whose training nothing
    is left to generate.
    """
    import yaml

    from nemo_rl.utils.record import read_record
    from nemo_rl.utils.step_timeline import read_timeline

    work, file = Path(args.work), name.replace(", ", "_").replace(" ", "_")
    path = work / f"{file}.yaml"
    path.write_text(yaml.safe_dump(config))
    metrics, wall = run(path, work / f"logs_{file}", [])
    (record,) = (work / f"logs_{file}").glob("exp_*/record.jsonl")

    def later(key: str) -> float:
        values = metrics.scalars(key)[1][2:-1]
        return statistics.mean(values) if values else 0.0

    separate = not config["policy"]["generation"]["colocated"]["enabled"]
    step_s = later("timing/train/total_step_time")
    found = {
        "samples_per_s": args.prompts * args.generations / step_s,
        "step_s": step_s,
        "train_s": later("timing/train/policy_training"),
        "logprob_s": later("timing/train/policy_and_reference_logprobs"),
        "generation_s": later(f"timing/train/{'exposed_generation' if separate else 'generation'}"),
        "refit_s": later("refit/total_s"),
        "mean_tokens": later("train/mean_gen_tokens_per_sample"),
        "longest": later("train/max_gen_tokens_per_sample"),
        "lag": later("train/lag/mean"),
        "mixed_share": later("train/mixed_share"),
        "hidden_share": read_timeline(read_record(record, recover=True)).hidden_share(2, args.steps - 1),
        "wall_s": wall,
    }
    print(f"{name:23s} " + "  ".join(f"{key}={value:,.3f}" for key, value in found.items()), flush=True)
    return found


def main() -> None:
    """Chooses what to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "throughput", "scaling"))
    parser.add_argument("--model", default="results/arithmetic/sft/latest")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ways", nargs="+", default=list(ARITHMETIC), choices=list(ARITHMETIC))
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="several for scaling")
    parser.add_argument(
        "--windows",
        type=int,
        nargs="*",
        default=[0, 1],
        help="async_rl.sampler.max_lookahead_versions of the streaming runs",
    )
    parser.add_argument(
        "--ages",
        type=int,
        nargs="*",
        default=[1, 2],
        help="grpo.async_grpo.max_trajectory_age_steps of the asynchronous runs",
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=3968)
    parser.add_argument("--mean-tokens", type=int, default=600)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", default="/tmp/nemo_rl_bench")
    args = parser.parse_args()
    if args.what == "throughput" and len(args.gpus) > 1:
        parser.error(f"--gpus {args.gpus}: throughput takes one number; scaling takes several")
    {"accuracy": accuracy, "throughput": throughput, "scaling": scaling}[args.what](args)


if __name__ == "__main__":
    main()
