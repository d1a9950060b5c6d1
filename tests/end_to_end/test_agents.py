"""The agent of the documentation trains: its files and its command, with real engines behind the endpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from nemo_rl.reference.metrics import undocumented
from nemo_rl.utils.metrics_file import read_metrics
from tests.test_documentation import blocks

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]


def test_the_agent_of_the_page_trains(tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    for language in ("python", "yaml"):
        ((title, text),) = [block for block in blocks("docs/agents.md", language) if block[0]]
        (tmp_path / title).write_text(text.replace("defaults: examples/", f"defaults: {ROOT}/examples/"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    command = [sys.executable, str(ROOT / "examples" / "run_grpo.py"), "--config", "checker.yaml"]
    own = [f"policy.model_name={tiny_model}", "logger.tensorboard_enabled=false", "grpo.max_num_steps=1"]
    done = subprocess.run(
        [*command, *own], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=450, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "endpoint: http://127.0.0.1:" in done.stderr
    metrics = read_metrics(tmp_path / "logs" / "checker")
    assert undocumented(metrics.series) == []
    series = metrics.series
    # A model that knows no sums is asked twice, and the second question continues the first conversation.
    assert (series["train/agent_branches_per_sample"][1], series["train/avg_turns_per_sample"][1]) == (1.0, 2.0)
