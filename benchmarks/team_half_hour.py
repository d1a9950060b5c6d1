"""Forty jobs of five users on a pool of four CPU slots on four Ray nodes, with real processes, within half an hour.

    python benchmarks/team_half_hour.py [--folder half_hour] [--jobs 40] [--over-s 1000] [--within-s 1800]
        [--kinds grpo command sft scavenger grpo command scavenger]

A third of the jobs are GRPO runs of a tiny model, some of them with high priority, a sixth supervised fine-tuning; half
are commands, of which half scavenge. Two nodes leave for a while, one after the other. The pool's shares and limits are
those of two groups; users submit as they would, each with an own token. Afterwards the record is checked, and a table
says what each group and user had of the pool's time and was due, how long jobs of high priority waited, and which jobs
were lost. Exit status 1: a job was lost, or an invariant is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private.state import actors

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from team_week import Observer  # noqa: E402

from nemo_rl.distributed.accelerator_slots import CPU  # noqa: E402
from nemo_rl.distributed.ray_joining import credentials  # noqa: E402
from nemo_rl.distributed.ray_runtime import NODE_ENV  # noqa: E402
from nemo_rl.time_sharing.history.checker import check  # noqa: E402
from nemo_rl.time_sharing.job_queue import JobLimits  # noqa: E402
from nemo_rl.time_sharing.log.reading import merge_by_machine_time  # noqa: E402
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool  # noqa: E402
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs  # noqa: E402
from nemo_rl.time_sharing.pool import PoolOptions  # noqa: E402
from nemo_rl.time_sharing.protocol.topology import Pool  # noqa: E402
from nemo_rl.time_sharing.team import hash_of, read_team  # noqa: E402
from nemo_rl.time_sharing.viewing.timeline import percentile  # noqa: E402
from nemo_rl.utils.record import NullRecord  # noqa: E402

POOL = Pool(4, 1)
_AT_ONCE = 4
GROUPS: dict[str, dict[str, Any]] = {"vision": {"share": 0.6}, "nlp": {"share": 0.4, "limit": 3}}
USERS: dict[str, dict[str, Any]] = {
    "ann": {"group": "vision"},
    "bob": {"group": "vision"},
    "cyd": {"group": "nlp"},
    "dan": {"group": "nlp", "limit": 2},
    "eve": {"group": "vision", "role": "admin"},
}
_KINDS = ("grpo", "command", "sft", "scavenger", "grpo", "command", "scavenger")
_COMMAND = "import time, sys; end = time.time() + 5\nwhile time.time() < end: time.sleep(0.1)\nprint('done')"


def token_of(user: str) -> str:
    """The token of a user."""
    return f"token of {user}"


def write_team(folder: Path) -> Path:
    """The team's file."""
    users = {name: {**keys, "token_sha256": hash_of(token_of(name))} for name, keys in USERS.items()}
    path = folder / "team.yaml"
    path.write_text(yaml.safe_dump({"groups": GROUPS, "users": users, "half_life_hours": 0.1}))
    path.chmod(0o600)
    return path


def make_jobs(folder: Path, model: Path, count: int, kinds: Sequence[str]) -> list[tuple[str, Job]]:
    """Jobs with their users; their kinds take turns."""
    rng = random.Random("half hour")
    base = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml"),
        "policy": {
            "model_name": str(model),
            "train_global_batch_size": 128,
            "train_micro_batch_size": 32,
            "logprob_batch_size": 32,
        },
        "grpo": {
            "num_prompts_per_step": 16,
            "num_generations_per_prompt": 8,
            "val_at_start": False,
            "val_at_end": False,
            "val_period": 0,
        },
        "data": {"validation": None},
    }
    made = []
    for number in range(count):
        user, name = list(USERS)[number % len(USERS)], f"job{number:02d}"
        wrapper: dict[str, Any] = {"nemo_config_path": f"{name}_recipe.yaml"}
        kind, steps = kinds[number % len(kinds)], rng.randint(4, 8)
        places = {
            "logger": {"log_dir": str(folder / "logs" / name), "tensorboard_enabled": False},
            "checkpointing": {
                "enabled": True,
                "checkpoint_dir": str(folder / "saved" / name),
                "save_period": 1000,
                "metric_name": None,
            },
        }
        if kind in ("command", "scavenger"):
            content: dict[str, Any] = {"external": {"command": [sys.executable, "-c", _COMMAND]}}
            wrapper |= {"slice_s": 8} | ({"priority": "scavenger"} if kind == "scavenger" else {})
        elif kind == "sft":
            defaults = {"defaults": str(ROOT / "examples" / "configs" / "sft_arithmetic_cpu.yaml")}
            content = {**defaults, **places, "policy": {"model_name": str(model)}, "sft": {"max_num_steps": steps}}
        else:
            content = base | places
            content["grpo"] = {**base["grpo"], "max_num_steps": steps}
            # An engine takes some fifteen seconds of a core to start: two for a job are enough.
            wrapper |= {"max_share": 0.5} | ({"priority": "high"} if USERS[user].get("role") == "admin" else {})
        (folder / f"{name}_recipe.yaml").write_text(yaml.safe_dump(content))
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(wrapper))
        (job,) = read_jobs([folder / f"{name}.yaml"], POOL)
        made.append((user, job))
    return made


@contextmanager
def other_nodes(folder: Path) -> Iterator[None]:
    """Further Ray nodes on this machine, with a slot each."""
    mode, token = credentials()
    environment = os.environ | NODE_ENV | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
    started = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
    command = [sys.executable, "-c", started, "start", f"--address={ray.get_runtime_context().gcs_address}", "--block"]
    command += ["--num-cpus=64", f"--resources={json.dumps({'cpu_slot': POOL.gpus_per_node})}"]
    command.append(f"--object-store-memory={128 << 20}")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(1, POOL.nodes):
            with (folder / f"node_{number}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            deadline = time.monotonic() + 60
            while sum(node["Alive"] for node in ray.nodes()) <= number:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a node did not join within 60 s; see {folder / f'node_{number}.log'}")
                time.sleep(0.2)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


class HalfHour:
    """The pool and what is done to it, by the clock."""

    def __init__(self, actor: Any, jobs: list[tuple[str, Job]], over_s: float, within_s: float) -> None:
        self._actor, self._within_s = actor, within_s
        acts: list[tuple[float, str, tuple[Any, ...]]] = [
            (over_s * number / len(jobs), "submit", (job, token_of(user))) for number, (user, job) in enumerate(jobs)
        ]
        admin, own = token_of("eve"), actors(actor._actor_id.hex())["Address"]["NodeID"]
        nodes = [node.number for node in ray.get(actor.nodes.remote(), timeout=60) if node.ray_id != own]
        for node, start in ((nodes[0], 0.25), (nodes[1], 0.60)):
            acts.append((over_s * start, "drain_node", (str(node), 120.0, admin)))
            acts.append((over_s * (start + 0.2), "add_node", (str(node), admin)))
        self._acts = sorted(acts, key=lambda act: act[0])

    def run(self) -> float:
        """Does everything in its time, and waits until all jobs have ended; the seconds that it took."""
        began = time.monotonic()
        while time.monotonic() < began + self._within_s:
            now = time.monotonic() - began
            while self._acts and self._acts[0][0] <= now:
                _, method, arguments = self._acts.pop(0)
                self._act(now, method, arguments)
            standings = ray.get(self._actor.standings.remote(), timeout=120)
            if not self._acts and all(one.outcome is not None for one in standings):
                break
            time.sleep(1.0)
        return time.monotonic() - began

    def _act(self, now: float, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            said = ray.get(getattr(self._actor, method).remote(*arguments), timeout=120)
        except ray.exceptions.RayTaskError as error:
            said = f"REFUSED: {error.cause}"
            if method == "add_node":
                self._acts.insert(0, (now + 5.0, method, arguments))
        print(f"{now:7.0f} s {method}: {said}", flush=True)


def judge(log_dir: Path, took_s: float) -> int:
    """Prints what the record says; how many violations there are."""
    entries = list(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    violations = check(entries)
    for violation in violations[:5]:
        print(f"  {violation}")
    origin = entries[0].time
    at = [0.0]
    observer = Observer(NullRecord(), lambda: at[0], sample_s=0.5)
    for entry in entries:
        if entry.source == "scheduler":
            at[0] = entry.time - origin
            observer.take(entry.event, entry.time)
    pool = POOL.gpus * took_s
    for (_, node), due in sorted(observer.due.items()):
        had = observer.had[0, node]
        print(
            f"  {node:14} had {had / pool:6.1%} of the pool, due {due / pool:6.1%}, "
            f"at most {observer.most[node]:g} slots"
        )
    print(
        f"  high priority: {len(observer.waits)} waits, p50 {percentile(observer.waits, 50):.1f} s, "
        f"p99 {percentile(observer.waits, 99):.1f} s; promised {LIVE_LIMITS.high_wait_s:g} s"
    )
    print(f"  {len(entries):,} events, {len(violations)} violations")
    return len(violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results/half_hour"))
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--over-s", type=float, default=1000.0, help="seconds over which jobs are submitted")
    parser.add_argument("--within-s", type=float, default=1800.0, help="seconds until all have to have ended")
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(_KINDS)), default=_KINDS, help="of jobs, in turn")
    chosen = parser.parse_args()
    folder: Path = chosen.folder.resolve()
    (folder / "pool").mkdir(parents=True)
    model = folder / "tiny"
    subprocess.run([sys.executable, ROOT / "examples" / "make_tiny_model.py", model], check=True)
    jobs = make_jobs(folder, model, chosen.jobs, chosen.kinds)
    ray.init(address="local", num_cpus=64, resources={"cpu_slot": POOL.gpus_per_node}, object_store_memory=512 << 20)
    with other_nodes(folder):
        options = PoolOptions(queue=JobLimits(jobs=_AT_ONCE))
        team = read_team(write_team(folder))
        actor = open_pool(POOL, CPU, folder / "pool", LIVE_LIMITS, team=team, options=options)
        try:
            took_s = HalfHour(actor, jobs, chosen.over_s, chosen.within_s).run()
            standings = ray.get(actor.standings.remote(), timeout=120)
        finally:
            close_pool(actor)
    lost = [one for one in standings if one.outcome is None or one.outcome.kind != "done"]
    for one in lost:
        print(f"  {one.name}: {one.state} {one.why}")
    print(f"{len(standings)} jobs in {took_s:.0f} s, {len(lost)} lost")
    return 1 if judge(folder / "pool", took_s) or lost else 0


if __name__ == "__main__":
    sys.exit(main())
