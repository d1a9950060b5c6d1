"""Seconds per phase of a GRPO step on one GPU, against plain vLLM and TRL's GRPOTrainer in the same run.

    python benchmarks/grpo_step.py --shape 0.5b [--steps 4] [--trl 8,defaults 8 8,liger 16,liger 32,liger] [--skip trl]
    [--engines-per-gpu N] [--work DIR]

Random weights of a Qwen2.5 shape, bfloat16, colocated, 64 prompts x 8 samples, 512 + 512 tokens, no KL penalty,
strictly on-policy, and a tokenizer that knows every id. First TRL runs three steps with every setting of `--trl`: a
micro-batch, with `liger` its Liger kernels, and with `defaults` its correction of the importance weights, which costs
a pass over all samples and which strictly on-policy training does without (padding-free batches, TRL's GRPO has none).
The fastest setting counts. Then every contender runs alone on the GPU in a process of its own, in one order and in the
other; figures are medians over the steps after the first of both runs. Prints a table with the spread of steps and,
last, the ratios.
"""

from __future__ import annotations

import argparse
import itertools
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


from shapes import SHAPES, host_speed_s, make_model, make_prompts, prompts_section  # noqa: E402

PROMPTS, GENERATIONS, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 512, 512


class ParityEnvironment:
    """Rewards responses by the parity of their length in characters: cheap, and different within a group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        del settings

    def step(self, message_logs: list[Any], metadata: list[Any]) -> tuple[Any, ...]:
        import torch

        rewards = torch.tensor([float(len(log[-1]["content"]) % 2) for log in message_logs])
        observation = {"role": "environment", "content": ""}
        return ([observation] * len(rewards), metadata, None, rewards, torch.ones(len(rewards)), None)


def our_config(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Any]:
    """The configuration of our run."""
    length = args.prompt_tokens + args.new_tokens
    return {
        "grpo": {
            "num_prompts_per_step": args.prompts,
            "num_generations_per_prompt": args.generations,
            "max_num_steps": args.steps,
            "max_num_epochs": 100,
            "val_period": 0,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": not args.previous_pass},
        "policy": {
            "model_name": str(model),
            "precision": args.precision,
            "max_total_sequence_length": length,
            "train_global_batch_size": args.prompts * args.generations,
            "train_micro_batch_size": 8,
            "tokenizer": {"chat_template": None},
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": 1e-6, "weight_decay": 0.0, **({"fused": True} if args.device == "cuda" else {})},
            },
            "scheduler": None,
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": args.mb_tokens,
                "logprob_mb_tokens": 2 * args.mb_tokens,
            },
            "generation": {
                "max_new_tokens": args.new_tokens,
                "vllm_cfg": {
                    "gpu_memory_utilization": args.gpu_memory,
                    "enable_vllm_metrics_logger": False,
                    "enable_prefix_caching": True,
                    "engines_per_gpu": args.engines_per_gpu,
                },
                "vllm_kwargs": {"max_num_seqs": 512} | _cache_of_each_engine(args),
            },
        },
        "data": prompts_section(prompts, args.prompt_tokens),
        "env": {"parity": {"class": "benchmarks.grpo_step.ParityEnvironment"}},
        "cluster": {"gpus_per_node": 1, "device": args.device},
        "logger": {"log_dir": str(Path(args.work) / "logs"), "monitor_gpus": False},
        "checkpointing": {"enabled": False},
    }


def _cache_of_each_engine(args: argparse.Namespace) -> dict[str, int]:
    """Bytes of KV cache for an engine's part of a step and a quarter more: engines that know them start together."""
    if args.engines_per_gpu == 1:
        return {}
    shape, item = SHAPES[args.shape], 2 if args.precision == "bfloat16" else 4
    width = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"]) * shape["num_key_value_heads"]
    token = 2 * shape["num_hidden_layers"] * width * item
    tokens = args.prompts * args.generations * (args.prompt_tokens + args.new_tokens)
    return {"kv_cache_memory_bytes": max(tokens * token * 5 // 4 // args.engines_per_gpu, 64 << 20)}


def run_ours(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Any]:
    """Our loop; medians of its own timers."""
    from nemo_rl.algorithms.launch import grpo_to_end
    from nemo_rl.config import MasterConfig, check_config
    from nemo_rl.utils.metrics_file import read_metrics

    config = MasterConfig(**our_config(args, model, prompts))
    check_config(config)
    if grpo_to_end(config) != 0:
        raise SystemExit("our run failed")
    metrics = read_metrics(config.logger.log_dir)

    def median(name: str) -> float:
        values = metrics.scalars(name)[1][1:]
        return statistics.median(values) if values else 0.0

    steps = metrics.scalars("timing/train/total_step_time")[1][1:]
    step = statistics.median(steps)
    generated = args.prompts * args.generations * args.new_tokens
    refit = metrics.scalars("refit/total_s")[1]
    gib = metrics.scalars("refit/gib")[1]
    return {
        "steps": steps,
        "step_s": step,
        "generation_s": median("timing/train/generation"),
        "train_s": median("timing/train/policy_training"),
        "logprob_s": median("timing/train/policy_and_reference_logprobs"),
        "prepare_generation_s": median("timing/train/prepare_for_generation/total"),
        "refit_gb_per_s": max(g * (1 << 30) / 1e9 / s for g, s in zip(gib, refit, strict=True)),
        "refit_s": statistics.median(refit[1:]),
        **{f"refit_{phase}_s": median(f"refit/{phase}_s") for phase in ("begin", "transfer", "finish")},
        "release_s": median("timing/train/logprob_inference_prep"),
        "samples_per_s": args.prompts * args.generations / step,
        "generation_tokens_per_s": generated / median("timing/train/generation"),
        "mfu": median("performance/train_fp_utilization"),
    }


def run_plain_vllm(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Any]:
    """vLLM alone on the same prompts and sampling."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(model),
        dtype=args.precision,
        max_model_len=args.prompt_tokens + args.new_tokens,
        gpu_memory_utilization=args.gpu_memory,
        max_num_seqs=512,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    texts = [json.loads(line)["input"] for line in prompts.read_text().splitlines()]
    seconds = []
    # Two more with a seed for every request, as `policy.generation.vllm_cfg.request_seeds=true` gives them.
    for step in range(args.steps + 2):
        first = step % args.steps * args.prompts
        chosen = texts[first : first + args.prompts]
        # Byte-level tokens of lower-case letters: the id of a character is its code minus that of "!".
        ids = [[ord(c) - 33 for c in text] for text in chosen for _ in range(args.generations)]
        sampling = [
            SamplingParams(
                max_tokens=args.new_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=None if step < args.steps else row,
                temperature=1.0,
            )
            for row in range(len(ids))
        ]
        started = time.perf_counter()
        engine.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        engine.reset_prefix_cache()
    generation = statistics.median(seconds[1 : args.steps])
    return {
        "steps": seconds[1 : args.steps],
        "generation_s": generation,
        "with_seeds_s": statistics.mean(seconds[args.steps :]),
        "generation_tokens_per_s": args.prompts * args.generations * args.new_tokens / generation,
    }


class TrlSetting(NamedTuple):
    """How TRL is set up: written `8`, `8,liger`, `8,defaults` or with both words."""

    micro_batch: int
    liger: bool
    defaults: bool

    @classmethod
    def parse(cls, text: str) -> TrlSetting:
        """Reads it."""
        size, *words = text.split(",")
        if not size.isdigit() or set(words) - {"liger", "defaults"}:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a micro-batch, then `liger`, `defaults` or nothing")
        return cls(int(size), "liger" in words, "defaults" in words)

    def __str__(self) -> str:
        """As it is written."""
        words = [word for word, chosen in (("liger", self.liger), ("defaults", self.defaults)) if chosen]
        return ",".join([str(self.micro_batch), *words])


def run_trl(args: argparse.Namespace, model: Path, prompts: Path) -> dict[str, Any]:
    """TRL's GRPOTrainer with vLLM colocated on the same model, prompts, lengths and reward, with the first of
    `args.trl`.
    """
    setting: TrlSetting = args.trl[0]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            marks.append(time.perf_counter())

    def parity(completions: list[str], **unused: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    config = GRPOConfig(
        output_dir=str(Path(args.work) / "trl"),
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=args.prompts * args.generations // setting.micro_batch,
        use_liger_kernel=setting.liger,
        vllm_importance_sampling_correction=setting.defaults,
        num_generations=args.generations,
        max_completion_length=args.new_tokens,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        bf16=True,
        model_init_kwargs={"dtype": args.precision},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=args.prompt_tokens + args.new_tokens,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=parity,
        args=config,
        train_dataset=load_dataset("json", data_files=str(prompts), split="train"),
        callbacks=[Clock()],
    )
    marks.append(time.perf_counter())
    trainer.train()
    steps = [b - a for a, b in itertools.pairwise(marks)][1:]
    step = statistics.median(steps)
    return {"steps": steps, "step_s": step, "samples_per_s": args.prompts * args.generations / step}


RUNNERS = {"ours": run_ours, "vllm": run_plain_vllm, "trl": run_trl}


def main() -> None:
    """Runs the contenders and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--generations", type=int, default=GENERATIONS)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--mb-tokens", type=int, default=32768, help="of a microbatch of ours in training")
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    parser.add_argument("--engines-per-gpu", type=int, default=1, help="of our run")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--previous-pass",
        action="store_true",
        help="also compute log-probabilities before the step, as off-policy runs do",
    )
    parser.add_argument("--once", action="store_true", help="every contender once, in one order")
    parser.add_argument("--skip", nargs="*", default=[], choices=list(RUNNERS))
    parser.add_argument(
        "--trl",
        nargs="+",
        type=TrlSetting.parse,
        default=[TrlSetting.parse(text) for text in ("8,defaults", "4", "8", "8,liger", "16,liger", "32,liger")],
        help="TRL's settings; the fastest counts",
    )
    parser.add_argument("--work", default="/tmp/nemo_rl_bench")
    parser.add_argument("--only", choices=list(RUNNERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = make_model(args.shape, Path(args.work))
    prompts = make_prompts(
        args.prompts * args.steps, args.prompt_tokens, Path(args.work) / f"prompts_{args.prompt_tokens}.jsonl"
    )
    if args.only:
        print("RESULT " + json.dumps(RUNNERS[args.only](args, model, prompts)), flush=True)
        return
    print(f"this host adds 20 million numbers in Python in {host_speed_s():.2f} s", flush=True)
    contenders = [name for name in RUNNERS if name not in args.skip]
    if "trl" in contenders and len(args.trl) > 1:
        args.trl = [_fastest(args.trl)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for name in [*contenders, *(() if args.once else reversed(contenders))]:
        found = _in_own_process(name, ["--trl", str(args.trl[0]), "--steps", str(args.steps)])
        if not found:
            raise SystemExit(f"{name} failed, so there is nothing to compare")
        print(f"{name}: steps of {_seconds(found['steps'])} s", flush=True)
        results[name].append(found)
    _print_table(args, {name: _joined(runs) for name, runs in results.items() if runs})


def _fastest(settings: list[TrlSetting]) -> TrlSetting:
    """The setting with which TRL's second and third step take least time."""
    times: dict[TrlSetting, float] = {}
    for setting in settings:
        found = _in_own_process("trl", ["--trl", str(setting), "--steps", "3"])
        if found:
            times[setting] = found["step_s"]
            print(f"TRL with {setting}: steps of {_seconds(found['steps'])} s", flush=True)
    if not times:
        raise SystemExit("TRL ran with none of its settings")
    return min(times, key=lambda setting: times[setting])


def _seconds(steps: list[float]) -> str:
    return ", ".join(f"{step:.2f}" for step in steps)


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of both runs' steps; of other figures, the mean."""
    steps = [step for run in runs for step in run["steps"]]
    joined = {key: statistics.mean(run[key] for run in runs) for key in runs[0] if key != "steps"}
    return joined | {"median_s": statistics.median(steps), "shortest_s": min(steps), "longest_s": max(steps)}


def _in_own_process(name: str, chosen: list[str]) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = Path("/tmp") / f"bench_{name}.log"
    with log.open("w") as file:
        finished = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], *chosen, "--only", name],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    lines = [line for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    if finished.returncode or not lines:
        print(
            f"{name} {' '.join(chosen)} failed (exit code {finished.returncode}):\n"
            + "\n".join(log.read_text().splitlines()[-40:]),
            flush=True,
        )
        return {}
    return json.loads(lines[-1].removeprefix("RESULT "))


def _print_table(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    print(
        f"\nshape {args.shape}, {args.prompts} x {args.generations} samples, {args.prompt_tokens} + "
        f"{args.new_tokens} tokens, {args.precision}"
    )
    for name, values in results.items():
        print(f"{name:5s} " + "  ".join(f"{key}={value:,.3f}" for key, value in values.items()))
    ours, vllm, trl = (results.get(name) or {} for name in ("ours", "vllm", "trl"))
    if ours and vllm:
        print(f"generation / plain vLLM: {ours['generation_tokens_per_s'] / vllm['generation_tokens_per_s']:.3f}")
    if ours and trl:
        print(
            f"seconds a step, TRL with {args.trl[0]} / ours: {trl['median_s'] / ours['median_s']:.2f} "
            f"({trl['shortest_s'] / ours['longest_s']:.2f} to {trl['longest_s'] / ours['shortest_s']:.2f})"
        )


if __name__ == "__main__":
    main()
