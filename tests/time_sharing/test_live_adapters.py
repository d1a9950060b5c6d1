"""Scenario D on CPU slots with real engines: a full fine-tuning and a job of adapters share a pool, and adapters come
and go through the pool meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import StepFinished, TokensGenerated
from tests.end_to_end.test_runs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

_CONFIGS = ROOT / "examples" / "configs" / "multi_lora"
_FILES = ROOT / "examples" / "time_sharing" / "pipelines"
_SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "logger.tensorboard_enabled=false",
    "checkpointing.save_period=1",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=null",
)


def until(condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.2)


def adapter(folder: Path, name: str, task: str, steps: int) -> Path:
    path = folder / f"{name}.yaml"
    content = {"defaults": str(_CONFIGS / f"{task}.yaml"), "grpo": {"max_num_steps": steps}}
    path.write_text(yaml.safe_dump(content))
    return path


def test_adapters_come_and_go_beside_a_full_fine_tuning(pool: Any, tiny_model: Path, tmp_path: Path) -> None:
    first = [adapter(tmp_path, "one", "add", 2), adapter(tmp_path, "long", "sort", 1000)]
    late = adapter(tmp_path, "late", "reverse", 2)
    wrapper = yaml.safe_load((_FILES / "cpu_adapters.yaml").read_text())
    wrapper |= {"nemo_config_path": str(_CONFIGS / "base.yaml"), "adapters": [str(path) for path in first]}
    (tmp_path / "adapters.yaml").write_text(yaml.safe_dump(wrapper))
    whole = yaml.safe_load((_FILES / "cpu_full_finetuning.yaml").read_text())
    whole["nemo_config_path"] = str(_CONFIGS.parent / "grpo_arithmetic_cpu.yaml")
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(whole))
    places = [f"policy.model_name={tiny_model}", f"logger.log_dir={tmp_path}/logs"]
    places.append(f"checkpointing.checkpoint_dir={tmp_path}/results")
    jobs = read_jobs([tmp_path / "whole.yaml", tmp_path / "adapters.yaml"], Pool(1, 2), [*_SMALL, *places])
    names = [ray.get(pool.submit.remote(job), timeout=60) for job in jobs]
    assert names == ["full_finetuning", "adapters"]

    def asked(command: str, *values: object) -> Any:
        return ray.get(pool.adapters.remote("adapters", command, [str(value) for value in values]), timeout=60)

    def phases() -> dict[str, str]:
        return {state["name"]: state["phase"] for state in asked("list")}

    def outcomes() -> dict[str, Any]:
        return {s.name: s.outcome for s in ray.get(pool.standings.remote(), timeout=60) if s.outcome is not None}

    until(lambda: phases().get("long") == "running", "the start of the adapters")
    assert asked("add", late)[0]["phase"] == "joining"
    with pytest.raises(ray.exceptions.RayTaskError, match="names an adapter so already"):
        asked("add", late)
    until(lambda: phases()["late"] == "done", "the end of the adapter that came late")
    assert asked("remove", "long")[0]["phase"] == "leaving"
    until(lambda: set(outcomes()) == {"full_finetuning", "adapters"}, "the end of both jobs")
    assert {name: outcome.kind for name, outcome in outcomes().items()} == dict.fromkeys(names, "done")
    (standing,) = [one for one in ray.get(pool.standings.remote(), timeout=60) if one.name == "adapters"]
    reached = {one.name: (one.phase, one.step) for one in standing.progress.adapters}
    assert reached["one"] == reached["late"] == ("done", 2) and reached["long"][0] == "removed"
    assert standing.outcome.steps == 4 + reached["long"][1]
    assert "one 2/2" in standing.outcome.reason and "late 2/2" in standing.outcome.reason

    entries = list(merge_by_machine_time(sorted((tmp_path / "pool").glob("*.jsonl"))))
    assert check(entries) == []
    drew = {entry.source.partition("/")[0] for entry in entries if isinstance(entry.event, TokensGenerated)}
    assert drew == {"full_finetuning", *(f"adapters:{name}" for name in ("one", "long", "late"))}
    steps = [entry.event.step for entry in entries if isinstance(entry.event, StepFinished) and "late" in entry.source]
    assert steps == [0, 1]
    assert (tmp_path / "results" / "adapters" / "late" / "step_2" / "policy" / "weights").is_dir()
