"""Held-out accuracy over steps of a real model: our GRPO run, and TRL's GRPOTrainer on the same model, problems,
prompt, batch, lengths, learning rate and judge; with seconds and the trainer's memory.

    python benchmarks/learning_curve.py --model DIR --train train.jsonl --validation val.jsonl \
        [--ways ours trl] [--steps 100] [--trl-steps 60] [--seeds 42] [--set KEY=VALUE ...] [--work DIR]
    python benchmarks/learning_curve.py --read RESULT.json ... --picture FILE     # table and picture of earlier results

Data are JSON lines of `question` and `answer`. Ours is `grpo_math_1B.yaml` (NeMo-RL's default recipe) with the sizes of
the arguments; `--set` adds overrides to it. TRL has vLLM beside training, Liger kernels where they are installed, the
same KL penalty, float32 weights under bfloat16 like ours, and its own defaults otherwise. Every contender runs in a
process of its own, in turns on one GPU: run the script once for each GPU to use several.

Accuracy is the mean over the validation problems of one sampled answer each, at temperature 1, judged by math-verify on
the last `\\boxed{}`. Its standard error for 256 problems is 0.03. Prints `RESULT` lines (JSON) while it runs, and last
the accuracy at each validated step, seconds until then, and their ratio.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

PROMPTS = ROOT / "examples" / "prompts"
CONFIG = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"
KL_PENALTY = 0.01
WEIGHT_DECAY = 0.01


def our_overrides(args: argparse.Namespace, seed: int, logs: Path) -> list[str]:
    """What our run sets over `grpo_math_1B.yaml`."""

    def rows(path: str) -> str:
        return "{" + f"dataset_name: ResponseDataset, data_path: {path}, input_key: question, output_key: answer" + "}"

    length = args.prompt_tokens + args.new_tokens
    return [
        f"policy.model_name={args.model}",
        f"policy.tokenizer.name={args.model}",
        f"grpo.num_prompts_per_step={args.prompts}",
        f"grpo.num_generations_per_prompt={args.generations}",
        f"grpo.max_num_steps={args.steps}",
        "grpo.max_num_epochs=100",
        "grpo.val_at_start=true",
        f"grpo.val_period={args.val_period}",
        f"grpo.max_val_samples={args.val_samples}",
        f"grpo.val_batch_size={args.val_samples}",
        f"grpo.seed={seed}",
        f"loss_fn.reference_policy_kl_penalty={KL_PENALTY}",
        f"policy.max_total_sequence_length={length}",
        f"policy.train_global_batch_size={args.prompts * args.generations}",
        f"policy.train_micro_batch_size={args.micro_batch}",
        f"policy.precision={args.precision}",
        f"policy.optimizer.kwargs.lr={args.lr}",
        f"policy.optimizer.kwargs.weight_decay={WEIGHT_DECAY}",
        "policy.scheduler=null",
        f"policy.generation.max_new_tokens={args.new_tokens}",
        f"policy.generation.vllm_cfg.max_model_len={length}",
        f"policy.generation.vllm_cfg.engines_per_gpu={args.engines_per_gpu}",
        f"data.max_input_seq_length={args.prompt_tokens}",
        f"data.train={rows(args.train)}",
        f"data.validation={rows(args.validation)}",
        f"data.default.prompt_file={args.prompt_file}",
        # The validation problems are given.
        "data.default.split_validation_size=0",
        f"cluster.device={args.device}",
        f"logger.log_dir={logs}",
        "checkpointing.enabled=false",
        *args.set,
    ]


def run_ours(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Our run as users start it; accuracy, seconds and memory from what it logged."""
    from nemo_rl.utils.metrics_file import read_metrics

    logs = Path(args.work) / f"ours_{seed}"
    began = time.time()
    command = [sys.executable, str(ROOT / "examples" / "run_grpo.py"), "--config", str(CONFIG)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *our_overrides(args, seed, logs)], check=False, env=environment)
    newest = max(logs.glob("exp_*"), key=lambda path: path.name, default=logs)
    metrics = read_metrics(newest)
    finished: dict[int, float] = {}
    accuracy: dict[int, float] = {}
    at: dict[int, float] = {}
    for line in (newest / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["prefix"] == "timing/train":
            finished[row["step"]] = row["time"] - began
        if row["prefix"] == "validation" and "accuracy" in row:
            accuracy[row["step"]], at[row["step"]] = row["accuracy"], row["time"] - began
    steps, reward = metrics.scalars("train/reward")
    return {
        "way": "ours",
        "seed": seed,
        "set": args.set,
        "code": done.returncode,
        "ready_s": _first(metrics, "timing/setup/total_setup_time_s"),
        "first_step_s": finished.get(1, 0.0),
        "step_s": metrics.scalars("timing/train/total_step_time")[1],
        "accuracy": accuracy,
        "accuracy_at_s": at,
        "reward": dict(zip(steps, reward, strict=True)),
        "setup": {
            name: _first(metrics, f"timing/setup/{name}")
            for name in ("vllm_init_time_s", "policy_init_time_s", "policy_warm_up_time_s")
        },
        **{
            name: metrics.scalars(name)[1]
            for name in (
                "gpu/trainer_allocated_gib",
                "gpu/trainer_peak_gib",
                "gpu/engine_allocated_gib",
                "host/trainer_gib",
                "host/engine_gib",
                "host/driver_gib",
                "host/environment_gib",
                "train/token_mult_prob_error",
                "train/gen_kl_error",
                "train/mean_gen_tokens_per_sample",
                "timing/train/generation",
                "timing/train/policy_training",
            )
        },
    }


def _first(metrics: Any, name: str) -> float:
    values = metrics.scalars(name)[1]
    return values[0] if values else 0.0


def run_trl(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """TRL's GRPOTrainer in this process."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from nemo_rl.environments.verifiers import hf_math_verify

    began = time.time()
    cuda = args.device == "cuda"
    seconds: list[float] = []
    memory: list[float] = []
    accuracy: dict[int, float] = {}
    at: dict[int, float] = {}
    mark = first_step = 0.0

    class Clock(TrainerCallback):
        def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
            nonlocal mark
            mark = time.time()

        def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
            nonlocal mark, first_step
            seconds.append(time.time() - mark)
            mark = time.time()
            first_step = first_step or mark - began
            memory.append(torch.cuda.memory_allocated() / (1 << 30) if cuda else 0.0)

        def on_evaluate(self, arguments: Any, state: Any, *unused: Any, metrics: Any = None, **also: Any) -> None:
            nonlocal mark
            mark = time.time()
            accuracy[state.global_step] = (metrics or {}).get("eval_reward", float("nan"))
            at[state.global_step] = mark - began
            print("EVAL " + json.dumps({"step": state.global_step, **(metrics or {})}), flush=True)

    def judge(completions: list[Any], answer: list[str], **unused: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [hf_math_verify(text, gold).reward for text, gold in zip(texts, answer, strict=True)]

    def rows(path: str, most: int | None = None) -> Any:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()][:most]
        prompt = Path(args.prompt_file).read_text() if args.prompt_file != "null" else "{}"
        return Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": prompt.format(row["question"])}], "answer": row["answer"]}
                for row in lines
            ]
        )

    config = GRPOConfig(
        output_dir=str(Path(args.work) / f"trl_{seed}"),
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.generations // args.micro_batch,
        num_generations=args.generations,
        max_completion_length=args.new_tokens,
        max_steps=args.trl_steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=1.0,
        beta=KL_PENALTY,
        temperature=1.0,
        bf16=cuda,
        model_init_kwargs={"dtype": "float32"},
        use_liger_kernel=args.liger,
        use_vllm=cuda,
        **(
            {
                "vllm_mode": "colocate",
                "vllm_gpu_memory_utilization": args.trl_memory,
                "vllm_max_model_length": args.prompt_tokens + args.new_tokens,
            }
            if cuda
            else {"use_cpu": True}
        ),
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=args.trl_val_period,
        eval_on_start=True,
        # Evaluation computes logits too.
        per_device_eval_batch_size=min(args.val_samples, 2 * args.micro_batch),
        num_generations_eval=1,
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=judge,
        args=config,
        train_dataset=rows(args.train),
        eval_dataset=rows(args.validation, args.val_samples),
        callbacks=[Clock()],
    )
    trainer.train()
    history = trainer.state.log_history
    return {
        "way": "trl",
        "seed": seed,
        "liger": args.liger,
        "code": 0,
        "ready_s": 0.0,
        "first_step_s": first_step,
        "step_s": seconds,
        "accuracy": accuracy,
        "accuracy_at_s": at,
        "reward": {row["step"]: row["reward"] for row in history if "reward" in row},
        "gpu/trainer_allocated_gib": memory,
        "lengths": [row["completions/mean_length"] for row in history if "completions/mean_length" in row],
    }


RUNNERS = {"ours": run_ours, "trl": run_trl}


def main() -> None:
    """Runs the contenders, or reads earlier results, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--train")
    parser.add_argument("--validation")
    parser.add_argument("--ways", nargs="+", choices=list(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trl-steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--prompt-file", default=str(PROMPTS / "step_by_step.txt"), help="`null`: the question alone")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--val-period", type=int, default=10)
    parser.add_argument("--trl-val-period", type=int, default=20)
    parser.add_argument("--val-samples", type=int, default=256)
    parser.add_argument("--engines-per-gpu", type=int, default=2)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--trl-memory", type=float, default=0.3)
    parser.add_argument("--no-liger", dest="liger", action="store_false")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of our run")
    parser.add_argument("--work", default="/tmp/nemo_rl_curve")
    parser.add_argument("--read", nargs="+", help="files with RESULT lines")
    parser.add_argument("--picture", help="where to write a picture")
    parser.add_argument("--only", choices=list(RUNNERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        for seed in args.seeds:
            print("RESULT " + json.dumps(RUNNERS[args.only](args, seed)), flush=True)
        return
    if args.read:
        lines = [line for path in args.read for line in Path(path).read_text().splitlines()]
        results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    else:
        if not (args.model and args.train and args.validation):
            parser.error("--model, --train and --validation are needed, or --read")
        from shapes import host_speed_s

        print(f"this host adds 20 million numbers in Python in {host_speed_s():.2f} s", flush=True)
        results = [found for way in args.ways for seed in args.seeds if (found := _in_own_process(args, way, seed))]
    for result in results:
        _print(result)
    _compare(results)
    if args.picture and results:
        draw(results, Path(args.picture))


def _in_own_process(args: argparse.Namespace, way: str, seed: int) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    tries = [[], ["--no-liger"]] if way == "trl" and args.liger else [[]]
    for chosen in tries:
        log = Path(args.work) / f"{way}_{seed}{''.join(chosen)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", way, "--seeds", str(seed), *chosen]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("RESULT ")]
        if lines:
            print(lines[-1], flush=True)
            return json.loads(lines[-1].removeprefix("RESULT "))
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        print(f"{way} with seed {seed} failed (exit code {done.returncode}):\n{tail}", flush=True)
    return {}


def _print(result: dict[str, Any]) -> None:
    steps = result["step_s"][1:]
    print(
        f"\n{result['way']}, seed {result['seed']}: first step after {result['first_step_s']:.0f} s, then "
        f"{statistics.median(steps) if steps else 0.0:.2f} s a step (median of {len(steps)})"
    )
    for step, accuracy in result["accuracy"].items():
        print(f"  step {step}: accuracy {accuracy:.3f} after {result['accuracy_at_s'][step]:.0f} s")
    for name in ("gpu/trainer_allocated_gib", "gpu/trainer_peak_gib", "gpu/engine_allocated_gib"):
        if values := result.get(name):
            shown = ", ".join(f"{value:.2f}" for value in values[:: max(1, len(values) // 8)])
            print(f"  {name}: {shown}; last {values[-1]:.2f}")


def _compare(results: Sequence[dict[str, Any]]) -> None:
    """Seconds a step of TRL over ours."""
    medians = {
        way: statistics.median(step for result in results if result["way"] == way for step in result["step_s"][1:])
        for way in {result["way"] for result in results if len(result["step_s"]) > 1}
    }
    if {"ours", "trl"} <= set(medians):
        print(f"\nseconds a step, TRL / ours: {medians['trl'] / medians['ours']:.2f}")


def _changed(settings: Sequence[str]) -> str:
    """What a contender sets besides, short enough for a legend."""
    named = {"policy.megatron_cfg.enabled=true": "Megatron-Core", "policy.dtensor_cfg.lora_cfg.enabled=true": "LoRA"}
    known = [name for key, name in named.items() if key in settings]
    return f", {', '.join(known) or ' '.join(settings)[:40]}" if settings else ""


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over steps and over seconds, and memory over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_seconds, memory) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    colours = itertools.cycle(["#0f766e", "#4f46e5", "#b45309", "#be123c", "#475569"])
    for result, colour in zip(results, colours, strict=False):
        name = "nemo_rl" if result["way"] == "ours" else "TRL 1.16"
        label = f"{name}, seed {result['seed']}" + _changed(result.get("set") or [])
        steps = [int(step) for step in result["accuracy"]]
        values = list(result["accuracy"].values())
        over_steps.plot(steps, values, "o-", color=colour, label=label, markersize=3)
        over_seconds.plot(list(result["accuracy_at_s"].values()), values, "o-", color=colour, markersize=3)
        for key, style in (("gpu/trainer_allocated_gib", "-"), ("gpu/trainer_peak_gib", ":")):
            figures = result.get(key) or []
            memory.plot(range(1, len(figures) + 1), figures, style, color=colour)
    for axis, title, below in (
        (over_steps, "held-out accuracy", "step"),
        (over_seconds, "held-out accuracy", "seconds from the command"),
        (memory, "trainer's GPU memory, GiB (dotted: peak)", "step"),
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(below, fontsize=9)
        axis.grid(alpha=0.3)
    over_steps.legend(fontsize=7)
    memory.set_ylim(bottom=0)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
