"""A pool over two hosts that share no memory: a job trains on one and generates on both, its rows in Mooncake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import StepFinished
from tests.data_plane.conftest import has_mooncake, plane_config
from tests.end_to_end.test_runs import BASE, ROOT
from tests.time_sharing.watched import Watched, served
from tests.two_nodes import second_node

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

_STEPS, _SLOTS = 1000, 3


def test_a_job_trains_on_one_host_and_generates_on_both(
    ray_session: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is harder to bring to another host, where it can be loaded.
    storage = "mooncake_cpu" if has_mooncake() else "simple"
    monkeypatch.chdir(ROOT)
    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    content = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml"),
        "policy": {"model_name": str(tiny_model)},
        "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"enabled": True, "checkpoint_dir": str(tmp_path / "saved"), "save_period": 1000},
        "weight_sync": {"verify": True},
        "data_plane": plane_config(storage).model_dump(exclude_unset=True),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    # The first slot of each host: the node that has three slots beside the session's four is the other one.
    wrapper = {"nemo_config_path": "recipe.yaml", "train_device_mapping": [0], "infer_device_mapping": [0, _SLOTS]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(wrapper))
    pool = Pool(2, _SLOTS)
    (job,) = read_jobs([tmp_path / "both.yaml"], pool, [*BASE, f"grpo.max_num_steps={_STEPS}"])
    # Samples of a step are few: at one of them to a rank both ranks are wanted.
    job = replace(job, options={**job.options, "rank_batch": 1}, measures_batch=False)
    with second_node(tmp_path, _SLOTS):
        actor: Any = open_pool(pool, CPU, log_dir, LIVE_LIMITS)
        watched = Watched(actor)
        try:
            watched.ask("submit", job)
            watched.until(lambda: {shard for shard, _ in served(tmp_path / "logs")} == {0, 1})
            # What it takes is measured on both hosts.
            watched.until(lambda: len(watched.standing("both").hosts) == 2)
            watched.ask("drain", "both")
            watched.until(lambda: watched.standing("both").outcome is not None)
            standing = watched.standing("both")
        finally:
            close_pool(actor)
    assert standing.outcome is not None and standing.outcome.kind == "drained", standing.outcome
    entries = list(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    assert check(entries) == []
    events = [entry.event for entry in entries]
    steps = [event.step for event in events if isinstance(event, StepFinished)]
    assert steps == list(range(len(steps)))
