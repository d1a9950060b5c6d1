"""Whole GRPO pipelines on one pool, with real engines and trainers: as users start them, and with processes killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.util.placement_group import placement_group_table

from nemo_rl.distributed.devices import CPU
from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing.actors import agent_actor_name
from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.job import read_jobs
from nemo_rl.time_sharing.pool import LIVE_LIMITS, close_pool, open_pool
from nemo_rl.time_sharing.ray_reaper import agent_namespace, rank_actor_name
from nemo_rl.time_sharing.topology import Pool
from nemo_rl.utils.record import merge_records
from nemo_rl.utils.record_events import GroupTrained, ShardRouted, ShardSlept, StepFinished
from tests.end_to_end.test_runs import BASE, ROOT, Command

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
SHARED = (*BASE, f"grpo.max_num_steps={STEPS}", "checkpointing.save_period=1", "policy.optimizer.kwargs.lr=0.001")
# A request that loses its shard starts its turn again with its own seed, so that who shares draws what it draws alone.
SYNCHRONOUS = ("policy.generation.on_preempt=redo_turn",)


def write(folder: Path, name: str, model: Path, config: str, **sections: Any) -> Path:
    """A configuration as a user writes it, with directories of its own."""
    content = {
        "defaults": str(ROOT / "examples" / "configs" / config),
        "policy": {"model_name": str(model)},
        "logger": {"log_dir": str(folder / name / "logs")},
        "checkpointing": {"checkpoint_dir": str(folder / name / "checkpoints")},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def weights(folder: Path, name: str, step: int = STEPS) -> bytes:
    return (folder / name / "checkpoints" / f"step_{step}" / "policy" / "weights" / "model.safetensors").read_bytes()


def test_pipelines_that_share_two_slots_train_what_they_train_alone(tiny_model: Path, tmp_path: Path) -> None:
    files = [
        write(tmp_path, "turns", tiny_model, "grpo_arithmetic_cpu.yaml"),
        write(tmp_path, "ahead", tiny_model, "grpo_arithmetic_async_cpu.yaml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NRL_OBJECT_STORE_BYTES": str(256 << 20)}
    line = [sys.executable, "examples/run_time_sharing.py", "--gpus", "2", "--device", "cpu"]
    line += ["--log-dir", str(tmp_path / "pool"), "--pipelines", *map(str, files), *SHARED, *SYNCHRONOUS]
    ended = subprocess.run(line, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stderr
    assert "record kept every invariant" in ended.stderr

    entries = list(merge_records(sorted((tmp_path / "pool" / "latest").glob("*.jsonl"))))
    for name in ("turns", "ahead"):
        of = [entry.event for entry in entries if entry.source.startswith(f"{name}/")]
        trained = [event.group_id for event in of if isinstance(event, GroupTrained)]
        assert len(trained) == len(set(trained)) == STEPS * 4
        assert [event.version for event in of if isinstance(event, StepFinished)] == [1, 2, 3]
        # Ranks on the training GPUs left and came back with the version of the moment.
        assert any(isinstance(event, ShardSlept) for event in of)
        assert max(event.version for event in of if isinstance(event, ShardRouted)) >= 1

    alone = Command(tiny_model, tmp_path / "alone")
    alone.folder.mkdir()
    alone.finish(*SHARED, *SYNCHRONOUS)
    assert (alone.checkpoint(STEPS) / "policy" / "weights" / "model.safetensors").read_bytes() == weights(
        tmp_path, "turns"
    )


def test_the_gate_without_a_pool_ends_in_one_line_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "lonely", tiny_model, "grpo_arithmetic_cpu.yaml")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RLIX_CONTROL_PLANE": "rlix", "RAY_ADDRESS": "local"}
    line = [sys.executable, "examples/run_grpo.py", "--config", str(file)]
    ended = subprocess.run(line, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "open a pool with python -m nemo_rl.time_sharing serve" in ended.stderr
    assert not (tmp_path / "lonely").exists()


@pytest.fixture
def pool(ray_session: None, tmp_path: Path) -> Iterator[Any]:
    """An open pool of two slots; nothing of it is left afterwards."""
    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    actor = open_pool(Pool(1, 2), CPU, log_dir, LIVE_LIMITS)
    yield actor
    close_pool(actor)
    reserved = [group for group in placement_group_table().values() if group["name"].startswith("time_sharing_")]
    assert all(group["state"] == "REMOVED" for group in reserved)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def kill_actor(name: str, namespace: str) -> None:
    actor = ray.get_actor(name, namespace=namespace)
    entry: Any = ray._private.state.actors(actor._actor_id.hex())
    os.kill(entry["Pid"], signal.SIGKILL)


def test_an_engine_and_a_pipeline_that_are_killed_cost_nobody_else_anything(
    pool: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    survivor = write(tmp_path, "survivor", tiny_model, "grpo_arithmetic_async_cpu.yaml")
    victim = write(tmp_path, "victim", tiny_model, "grpo_arithmetic_cpu.yaml")
    overrides = [*SHARED, "grpo.max_num_steps=5"]
    jobs = {job.name: job for job in read_jobs([survivor, victim], Pool(1, 2), overrides)}
    for job in jobs.values():
        ray.get(pool.submit.remote(job), timeout=60)

    def standing(name: str) -> Any:
        return next(s for s in ray.get(pool.standings.remote(), timeout=60) if s.name == name)

    def incarnation(name: str) -> int:
        named = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True)
                 if e["namespace"] == agent_namespace(name) and e["name"].startswith("agent.")]  # fmt: skip
        return max(int(actor.rpartition(".")[2]) for actor in named)

    def checkpoint(name: str, step: int) -> Path:
        return tmp_path / name / "checkpoints" / f"step_{step}"

    until(lambda: checkpoint("survivor", 1).exists(), 400, "the first step")
    kill_actor(rank_actor_name(1, incarnation("survivor")), agent_namespace("survivor"))
    until(lambda: checkpoint("victim", 1).exists(), 400, "the victim's first step")
    kill_actor(agent_actor_name(incarnation("victim")), agent_namespace("victim"))
    until(lambda: standing("victim").outcome is not None, 200, "the victim's end")
    assert standing("victim").outcome.kind == "died"

    until(lambda: standing("survivor").outcome is not None, 400, "the survivor's end")
    assert standing("survivor").outcome.kind == "done", standing("survivor").outcome
    # It goes on from its checkpoint, on GPUs that were verified free.
    ray.get(pool.submit.remote(jobs["victim"]), timeout=60)
    until(lambda: standing("victim").outcome is not None, 400, "the victim's second life")
    assert standing("victim").outcome.kind == "done", standing("victim").outcome
    assert checkpoint("victim", 5).exists() and checkpoint("survivor", 5).exists()

    entries = list(merge_records(sorted((tmp_path / "pool").glob("*.jsonl")), recover=True))
    assert [str(violation) for violation in check(entries, ended=False)] == []
    assert any(isinstance(entry.event, ev.Fenced) for entry in entries)
