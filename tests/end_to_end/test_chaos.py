"""A short round of `make chaos` with a small model: what the run survives, and what it goes on from its checkpoint
after; nothing is lost or left.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_runs import ROOT
from tests.forks import forking_environment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

KINDS = ("engine", "scheduler", "storage unit")
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "grpo.val_at_end=false",
    "data.validation=null",
    "logger.tensorboard_enabled=false",
)


def test_a_run_survives_the_death_of_its_parts_and_trains_every_prompt_once(tiny_model: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "tools/chaos.py",
        "--minutes",
        "0",
        "--every",
        "0",
        "--band",
        "1",
        "--last-steps",
        "2",
        "--kinds",
        ",".join(KINDS),
    ]
    line += ["--model", str(tiny_model), "--folder", str(tmp_path / "chaos"), *SMALL]
    environment = os.environ | forking_environment() | {"NRL_OBJECT_STORE_BYTES": str(256 << 20)}
    ended = subprocess.run(line, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    killed = re.findall(r"kill=([a-z ]+) \[", ended.stdout)
    assert sorted(killed) == sorted(KINDS)
    passed = re.search(r"chaos=passed steps=(\d+) prompts=(\d+) kills=3 lives=2", ended.stdout)
    assert passed is not None, ended.stdout
    assert int(passed[2]) == 4 * int(passed[1])
