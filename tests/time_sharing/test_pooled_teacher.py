"""A teacher that two students of a pool share, with a real engine and trainer, and that is killed and comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml

from nemo_rl.config import MasterConfig
from nemo_rl.config.teacher_sections import pooled_teacher
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.opening import wait_for_pipelines
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.pipelines.pooled_teacher import PooledTeacher
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import ShardSlept, StepFinished
from tests.conftest import ROOT
from tests.time_sharing.test_live_pipelines import kill_actor, until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS = 3, 8


def _write(folder: Path, name: str, **content: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_students_share_a_teacher_and_wait_for_the_next_one_when_it_is_killed(
    pool: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One student generates ahead of training, on a slot of its own and on the one that it trains on, which is the
    teacher's too. The other is this process, which asks as students do.
    """
    monkeypatch.chdir(ROOT)
    student = _write(
        tmp_path,
        "student",
        defaults=str(ROOT / "examples" / "configs" / "distillation_arithmetic_cpu.yaml"),
        policy={
            "model_name": str(tiny_model),
            "train_global_batch_size": PROMPTS,
            "train_micro_batch_size": 8,
            "generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}},
        },
        teacher={"model_name": str(tiny_model), "backend": "vllm", "job": "teacher"},
        distillation={"num_prompts_per_step": PROMPTS, "max_num_steps": STEPS, "val_at_start": False, "val_period": 0}
        | {"val_at_end": False, "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1}},
        cluster={"gpus_per_node": 2},
        logger={"log_dir": str(tmp_path / "student" / "logs"), "tensorboard_enabled": False},
        checkpointing={"enabled": False},
    )
    lent = {"nemo_config_path": str(student), "infer_device_mapping": [0]}
    served = _write(tmp_path, "served", **lent, pipeline_cls="TeacherPipeline", exp_name="teacher")
    learns = lent | {"train_device_mapping": [0], "infer_device_mapping": [0, 1]}
    jobs = read_jobs([served, _write(tmp_path, "learns", **learns)], Pool(1, 2))
    for job in jobs:
        ray.get(pool.submit.remote(job), timeout=60)

    config = jobs[0].config
    assert isinstance(config, MasterConfig)
    k = config.grpo.topk_logits_k
    # Its engine is built and asked while the first student still starts.
    other = PooledTeacher("other", pooled_teacher(config, "teacher"), k, 32, wait_s=300.0)
    ids = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(1))
    batch = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([32, 2, 1, 17, 30]))
    first = other.score(batch, k)
    assert first["topk_logits"].shape == (5, 32, k) and (first["topk_logits"][0, :31] < 0).all()

    # Of a token that is among the most likely ones, what students of several teachers ask is the same number.
    short = BatchedDataDict(input_ids=ids[:, :31], input_lengths=batch["input_lengths"].clamp(max=31))
    drawn = other.score(short, 0)["logprobs"][:, 1:]
    listed = (first["topk_indices"][:, :30] == ids[:, 1:31, None]) & (first["topk_logits"][:, :30] < 0)
    listed &= torch.arange(30)[:, None] < (short["input_lengths"] - 1)[:, None, None]
    assert listed.any() and drawn.shape == (5, 30)
    torch.testing.assert_close(drawn[listed.any(dim=-1)], first["topk_logits"][:, :30][listed], atol=1e-5, rtol=0)

    def standing() -> Any:
        return next(one for one in ray.get(pool.standings.remote(), timeout=60) if one.name == "teacher")

    until(lambda: standing().progress.step >= 2, 300, "the first scores of the other student")
    (agent,) = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True)
                if e["namespace"] == agent_namespace("teacher") and e["name"].startswith("agent.")]  # fmt: skip
    kill_actor(agent, agent_namespace("teacher"))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.score, batch, k)
        until(lambda: standing().outcome is not None, 120, "the teacher's end")
        assert standing().outcome.kind == "died"
        ray.get(pool.submit.remote(jobs[0]), timeout=60)
        again = waiting.result(timeout=300)
    # Which samples share a forward pass is seen in the last bits.
    torch.testing.assert_close(again["topk_logits"], first["topk_logits"], atol=1e-5, rtol=0)

    outcomes = wait_for_pipelines(pool, timeout_s=400)
    assert {name: outcome.kind for name, outcome in outcomes.items()} == {"teacher": "done", "learns": "done"}, outcomes
    entries = list(merge_by_machine_time(sorted((tmp_path / "pool").glob("*.jsonl"))))
    assert not check(entries)
    trained = [e.event for e in entries if e.source == "learns/driver" and isinstance(e.event, StepFinished)]
    assert [(event.version, event.groups) for event in trained] == [(n + 1, PROMPTS) for n in range(STEPS)]
    # Its GPU was lent between two batches.
    assert any(entry.source.startswith("teacher/") and isinstance(entry.event, ShardSlept) for entry in entries)
