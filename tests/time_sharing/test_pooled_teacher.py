"""A teacher that two students of a pool share, with real engines and trainers, and that is killed and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.distributed.accelerators import CPU
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace
from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.log.merged import merge_by_machine_time
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool, wait_for_pipelines
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import ShardSlept, StepFinished
from tests.conftest import ROOT
from tests.time_sharing.test_live_pipelines import kill_actor, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS = 3, 16


@pytest.fixture
def pool(ray_session: None, tmp_path: Path) -> Iterator[Any]:
    """An open pool of two slots."""
    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    actor = open_pool(Pool(1, 2), CPU, log_dir, replace(LIVE_LIMITS, quarantine_s=1.0))
    yield actor
    close_pool(actor)


def _write(folder: Path, name: str, **content: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_two_students_share_a_teacher_and_wait_for_the_next_one_when_it_is_killed(
    pool: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One student runs synchronously on the data plane, the other ahead of training."""
    monkeypatch.chdir(ROOT)
    loop = {"num_prompts_per_step": PROMPTS, "max_num_steps": STEPS, "val_at_start": False, "val_period": 0}
    synchronous = _write(
        tmp_path,
        "synchronous",
        defaults=str(ROOT / "examples" / "configs" / "distillation_arithmetic_cpu.yaml"),
        policy={"model_name": str(tiny_model), "train_global_batch_size": PROMPTS, "train_micro_batch_size": 8},
        teacher={"model_name": str(tiny_model), "backend": "vllm", "job": "teacher"},
        distillation=loop | {"val_at_end": False},
        data_plane={"enabled": True},
        logger={"log_dir": str(tmp_path / "synchronous" / "logs")},
        checkpointing={"enabled": False},
    )
    ahead = _write(
        tmp_path,
        "ahead",
        defaults=str(synchronous),
        data_plane={"enabled": False},
        policy={"generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}}},
        cluster={"gpus_per_node": 2},
        distillation={"async_grpo": {"enabled": True, "max_trajectory_age_steps": 1}},
        logger={"log_dir": str(tmp_path / "ahead" / "logs")},
    )
    served = _write(
        tmp_path, "served", nemo_config_path=str(synchronous), pipeline_cls="TeacherPipeline", exp_name="teacher"
    )
    jobs = read_jobs([served, synchronous, ahead], Pool(1, 2))
    for job in jobs:
        ray.get(pool.submit.remote(job), timeout=60)

    def standing() -> Any:
        return next(one for one in ray.get(pool.standings.remote(), timeout=60) if one.name == "teacher")

    until(lambda: standing().progress is not None and standing().progress.step >= 1, 300, "the first scores")
    (agent,) = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True)
                if e["namespace"] == agent_namespace("teacher") and e["name"].startswith("agent.")]  # fmt: skip
    kill_actor(agent, agent_namespace("teacher"))
    until(lambda: standing().outcome is not None, 120, "the teacher's end")
    assert standing().outcome.kind == "died"
    ray.get(pool.submit.remote(jobs[0]), timeout=60)

    outcomes = wait_for_pipelines(pool, timeout_s=400)
    assert {name: outcome.kind for name, outcome in outcomes.items()} == dict.fromkeys(
        ("teacher", "synchronous", "ahead"), "done"
    ), outcomes
    entries = list(merge_by_machine_time(sorted((tmp_path / "pool").glob("*.jsonl"))))
    assert not check(entries)
    for name in ("synchronous", "ahead"):
        trained = [e.event for e in entries if e.source == f"{name}/driver" and isinstance(e.event, StepFinished)]
        assert [(event.version, event.groups) for event in trained] == [(n + 1, PROMPTS) for n in range(STEPS)]
    # Its GPUs were lent between two batches.
    assert any(entry.source.startswith("teacher/") and isinstance(entry.event, ShardSlept) for entry in entries)
