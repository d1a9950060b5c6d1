"""A shipped scenario as a user starts it, on CPU slots with real parts: Megatron-Core trains, vLLM generates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_rl.time_sharing import launcher
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.utils.record_events import StepFinished
from tests import forks
from tests.end_to_end.test_runs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_scenario_without_its_small_model_is_refused_before_a_pool_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_run", lambda *_: pytest.fail("a pool was opened"))
    line = ["--gpus", "2", "--device", "cpu", "--scale", "--scenario", "all", "--log-dir", str(tmp_path)]
    assert launcher.run_together(line) != 0
    said = capfd.readouterr().err
    assert "trains the small model results/scenarios/llama, which is not there; `make scenarios` makes it" in said


def test_a_scenario_runs_to_its_end_with_one_sample_per_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """Two fine-tunings that train in turn with the other's generation; `make scenarios` runs all six at length."""
    line = ["examples/run_time_sharing.py", "--gpus", "2", "--device", "cpu", "--scale", "--scenario", "B"]
    line += ["--port", "0", "--log-dir", str(tmp_path), f"policy.model_name={tiny_model}", "grpo.max_num_steps=2"]
    line += ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=2"]
    line += ["policy.train_micro_batch_size=1", "policy.generation.max_new_tokens=16"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NRL_OBJECT_STORE_BYTES": str(256 << 20)}
    ended = forks.run(line, environment, timeout_s=500)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "every advantage is 0, and the rewards teach nothing" in ended.stderr
    heading, row = ended.stdout.splitlines()
    assert heading.split() == ["scenario", "seconds", "slots", "busy", "waited", "for", "slots", "slowdown", "result"]
    assert row.split()[0] == "B" and row.split()[-1] == "PASS"
    entries = list(merge_by_machine_time(sorted((tmp_path / "scenario_b" / "latest").glob("*.jsonl"))))
    versions = [
        (entry.source.partition("/")[0], entry.event.version)
        for entry in entries
        if isinstance(entry.event, StepFinished)
    ]
    assert sorted(versions) == [(f"scenario_b_{job}", version) for job in (0, 1) for version in (1, 2)]
    for job in (0, 1):
        assert list((tmp_path / "scenario_b" / "latest" / "checkpoints" / f"scenario_b_{job}").glob("step_*"))
