"""A day of a team on real GPUs: four users train and evaluate a real model in one pool, through the commands.

    python benchmarks/team_day.py --model DIR --train a.jsonl b.jsonl --validation val.jsonl [--gpus 2] [--steps 40]
        [--work DIR]

Two groups have shares of 0.6 and 0.4. `ann` fine-tunes all weights, `bob` an adapter, both one step ahead of training;
`dan` evaluates as a scavenger. After a third of the steps `eve`, the administrator, submits six steps of high priority,
and `dan` a job that takes more host memory than its cap; after two thirds `eve` lowers the limit of `bob` to one GPU.
A member's job of high priority has to be refused. Prints what each command says, the accounts, what the checker says of
the record, and of each job its held-out accuracy, seconds of a step and memory over the steps. Data are JSON lines of
`question` and `answer`. Exit status 1: a job did not end as it should, or an invariant is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from team_half_hour import token_of  # noqa: E402

from nemo_rl.time_sharing.team import hash_of  # noqa: E402
from nemo_rl.utils.metrics_file import RunMetrics, read_metrics  # noqa: E402

CONFIGS, PROMPTS = ROOT / "examples" / "configs", ROOT / "examples" / "prompts"
GROUPS = {"vision": {"share": 0.6}, "nlp": {"share": 0.4}}
USERS = {
    "ann": {"group": "vision"},
    "bob": {"group": "nlp"},
    "dan": {"group": "nlp"},
    "eve": {"group": "vision", "role": "admin"},
}
_HIGH_STEPS = 6
_GREEDY = "kept = []\nwhile True:\n    kept.append(b'x' * (1 << 28))\n"
_GREEDY_CAP = "2G"
_SHOWN = ("train/reward", "gpu/trainer_allocated_gib", "gpu/engine_allocated_gib")


class Day:
    """The files of the team and its jobs, and what its users say to the pool."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self.work: Path = args.work.resolve()
        self.work.mkdir(parents=True)
        self.log_dir = self.work / "pool" / "latest"
        self._pool = self.work / "team.pool"
        self._env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "NRL_POOL": str(self._pool),
            "RAY_ADDRESS": "local",
        }
        self.write_team()

    def write_team(self, **more: dict[str, Any]) -> None:
        """The team's file; `more`: further keys of users."""
        users = {
            name: {**keys, "token_sha256": hash_of(token_of(name)), **more.get(name, {})}
            for name, keys in USERS.items()
        }
        path = self.work / "team.yaml"
        path.write_text(yaml.safe_dump({"groups": GROUPS, "users": users, "half_life_hours": 0.1}))
        path.chmod(0o600)

    def write_job(self, name: str, recipe: dict[str, Any], **keys: Any) -> Path:
        """A recipe and its wrapper; returns the latter."""
        (self.work / f"{name}_recipe.yaml").write_text(yaml.safe_dump(recipe))
        path = self.work / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"nemo_config_path": f"{name}_recipe.yaml", "exp_name": name, **keys}))
        return path

    def say(self, *words: object) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s", *words, flush=True)

    def command(self, *words: object, user: str = "ann") -> str:
        """What a command of the pool answers to this user."""
        line = [sys.executable, "-m", "nemo_rl.time_sharing", *map(str, words)]
        env = self._env | {"NRL_POOL_TOKEN": token_of(user)}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, check=False)
        return (done.stdout + (done.stderr[-1500:] if done.returncode else "")).strip()

    @contextmanager
    def pool(self) -> Iterator[None]:
        """The pool, served by a process of its own."""
        args = self._args
        line = [sys.executable, "-m", "nemo_rl.time_sharing", "serve", "--gpus", str(args.gpus), "--port", "0"]
        line += ["--device", args.device, "--team", str(self.work / "team.yaml"), "--log-dir", str(self.work / "pool")]
        line += ["--job-memory", args.job_memory]
        line += ["--slots-per-gpu", "2", "--mps", "auto"] if args.device == "cuda" else []
        said = self.work / "serve.txt"
        with said.open("w") as log:
            server = subprocess.Popen(line, env=self._env, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 180
            while not self._pool.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the pool did not open: {said.read_text()}")
                time.sleep(0.5)
            yield
        finally:
            server.terminate()
            server.wait(180)

    def metrics(self, name: str) -> RunMetrics | None:
        """What a job has logged so far."""
        newest = max((self.work / name).glob("exp_*/metrics.jsonl"), default=None)
        return None if newest is None else read_metrics(newest.parent)

    def step(self, name: str) -> int:
        """The last step that a job has finished."""
        metrics = self.metrics(name)
        return max(metrics.scalars("train/reward")[0], default=0) if metrics is not None else 0


def training(args: argparse.Namespace, work: Path, name: str, rows: Path, steps: int, *, lora: bool) -> dict[str, Any]:
    """A recipe over NeMo-RL's default one."""
    length = args.prompt_tokens + args.new_tokens
    apart = {"enabled": False, "resources": {"gpus_per_node": 1}}
    recipe: dict[str, Any] = {
        "defaults": str(CONFIGS / "grpo_math_1B.yaml"),
        "grpo": {
            "num_prompts_per_step": args.prompts,
            "num_generations_per_prompt": args.generations,
            "max_num_steps": steps,
            "max_num_epochs": 1000,
            "val_at_start": True,
            "val_at_end": True,
            "val_period": args.val_period,
            "max_val_samples": args.val_samples,
            "val_batch_size": args.val_samples,
            "async_grpo": {"enabled": args.gpus > 1, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.0 if lora else 0.01,
            "use_importance_sampling_correction": True,
        },
        "policy": {
            "model_name": str(args.model),
            "tokenizer": {"name": str(args.model)},
            "max_total_sequence_length": length,
            "train_global_batch_size": args.prompts * args.generations,
            "precision": "bfloat16" if args.device == "cuda" else "float32",
            "optimizer": {"kwargs": {"lr": 1e-4 if lora else 2e-6, "weight_decay": 0.01}},
            "scheduler": None,
            "sequence_packing": {"train_mb_tokens": args.mb_tokens, "logprob_mb_tokens": 2 * args.mb_tokens},
            "generation": {
                "colocated": apart if args.gpus > 1 else {"enabled": True},
                "max_new_tokens": args.new_tokens,
                "vllm_cfg": {"max_model_len": length, "enforce_eager": args.device == "cpu"},
            },
        },
        "data": {
            "max_input_seq_length": args.prompt_tokens,
            "train": {**_rows(rows), "split_validation_size": 0},
            "validation": _rows(args.validation),
            "default": {"prompt_file": str(PROMPTS / "line_by_line.txt")},
        },
        "cluster": {"device": args.device, "gpus_per_node": args.gpus, "cpu_slots": 2},
        "logger": {"log_dir": str(work / name), "tensorboard_enabled": False},
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": str(work / f"{name}_saved"),
            "save_period": 1000,
            "metric_name": None,
        },
    }
    if lora:
        recipe["policy"]["dtensor_cfg"] = {"lora_cfg": {"enabled": True, "dim": 16, "alpha": 32}}
    return recipe


def _rows(path: Path) -> dict[str, str]:
    return {
        "dataset_name": "ResponseDataset",
        "data_path": str(path.resolve()),
        "input_key": "question",
        "output_key": "answer",
    }


def evaluation(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One answer to each validation problem."""
    engine = {
        "max_model_len": args.prompt_tokens + args.new_tokens,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": args.device == "cpu",
    }
    return {
        "defaults": str(CONFIGS / "evals" / "math_eval.yaml"),
        "generation": {"model_name": str(args.model), "max_new_tokens": args.new_tokens, "vllm_cfg": engine},
        "data": {**_rows(args.validation), "prompt_file": str(PROMPTS / "line_by_line.txt")},
        "cluster": {"device": args.device},
        "eval": {"save_path": str(work / "eval_saved")},
    }


def live(day: Day, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Has the users do what they do, until all jobs have ended; how each stands then."""
    first, second = args.train
    full = day.write_job("full", training(args, day.work, "full", first, args.steps, lora=False))
    lora = day.write_job("lora", training(args, day.work, "lora", second, args.steps, lora=True))
    fast = day.write_job(
        "fast", training(args, day.work, "fast", first, min(6, args.steps), lora=False), priority="high"
    )
    judge = day.write_job("eval", evaluation(args, day.work), priority="scavenger")
    command = {"external": {"command": [sys.executable, "-c", _GREEDY]}}
    greedy = day.write_job("greedy", command, job_memory=_GREEDY_CAP)
    for user, file in (("ann", full), ("bob", lora), ("dan", judge)):
        day.say(f"{user}:", day.command("submit", file, user=user))
    day.say("refused:", day.command("submit", fast, user="bob"))
    acts = 0
    deadline = time.monotonic() + args.within_s
    while time.monotonic() < deadline:
        time.sleep(4.0)
        if acts == 0 and day.step("full") >= args.steps // 3:
            acts = 1
            day.say("eve:", day.command("submit", fast, user="eve"))
            day.say("dan:", day.command("submit", greedy, user="dan"))
        if acts == 1 and day.step("lora") >= args.steps * 2 // 3:
            acts = 2
            day.write_team(bob={"limit": 1})
            day.say("eve:", day.command("reload", user="eve"))
            print(day.command("explain"), flush=True)
        jobs: list[dict[str, Any]] = json.loads(day.command("status", "--json"))["pipelines"]
        failed = [job["name"] for job in jobs if job["outcome"] and job["outcome"]["kind"] != "done"]
        if failed not in ([], ["greedy"]) or (acts == 2 and all(job["outcome"] for job in jobs)):
            break
    day.say("over")
    print(day.command("status"), flush=True)
    return jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, nargs=2, required=True, help="problems of ann and of bob")
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("results/team_day"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--mb-tokens", type=int, default=16384, help="of a micro-batch; scoring takes twice as many")
    parser.add_argument("--val-period", type=int, default=10)
    parser.add_argument("--val-samples", type=int, default=256)
    parser.add_argument("--job-memory", default="60G", help="host memory that a job may use on a node")
    parser.add_argument("--within-s", type=float, default=1800.0, help="seconds until all have to have ended")
    args = parser.parse_args()
    day = Day(args)
    with day.pool():
        jobs = live(day, args)
    for by in ("user", "use", "job"):
        print(day.command("account", day.log_dir, "--by", by))
    checked = day.command("check", day.log_dir)
    print(checked)
    for name in ("full", "lora", "fast"):
        if (metrics := day.metrics(name)) is None:
            continue
        steps, accuracy = metrics.scalars("validation/accuracy")
        shown = ", ".join(f"{step}: {value:.3f}" for step, value in zip(steps, accuracy, strict=True))
        seconds = metrics.scalars("timing/train/total_step_time")[1]
        print(f"{name}: accuracy {shown}; median step {statistics.median(seconds[2:] or seconds):.2f} s")
        for key in _SHOWN:
            values = metrics.scalars(key)[1]
            if values:
                print(f"  {key}: first {values[0]:.3f}, last {values[-1]:.3f}, most {max(values):.3f}")
    ended = {job["name"]: job["outcome"]["kind"] for job in jobs if job["outcome"]}
    wanted = dict.fromkeys(("full", "lora", "fast", "eval"), "done") | {"greedy": "failed"}
    print("as it should be" if ended == wanted else f"NOT as it should be: {ended}")
    return 0 if ended == wanted and "invariants" in checked and "violation" not in checked else 1


if __name__ == "__main__":
    sys.exit(main())
