"""The example of a job that is no RL pipeline runs as it is shown, and leaves no process (the session's end looks for
those).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_of_an_external_job_acquires_yields_and_releases(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [str(ROOT / "examples/time_sharing/external_job.py"), "--log-dir", str(tmp_path)]
    ran = forks.run(command, {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": path}, timeout_s=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert "batch asked for two GPUs and has [0, 1]" in lines
    assert "urgent released, and batch has [0, 1] again" in lines
    assert lines[-1] == f"records in {tmp_path}: every invariant held"
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "batch.0.jsonl",
        "scheduler.jsonl",
        "urgent.0.jsonl",
    ]
