"""A short round of `make chaos` with a small model: what the run survives, and what it goes on from its checkpoint
after; nothing is lost or left.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import pytest

from tests import forks
from tests.end_to_end.test_runs import ROOT

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


def as_fork(line: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[bytes], **_: object) -> Any:
    """Starts a life of the run as a fork, which has imported what it needs."""
    return forks.start(line[1:], env, stdout.fileno(), folder=cwd)


def test_a_run_survives_the_death_of_its_parts_and_trains_every_prompt_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("NRL_OBJECT_STORE_BYTES", str(256 << 20))
    line = ["--minutes", "0", "--every", "0", "--band", "1", "--last-steps", "2", "--kinds", ",".join(KINDS)]
    line += ["--model", str(tiny_model), "--folder", str(tmp_path / "chaos"), *SMALL]
    monkeypatch.setattr(sys, "argv", ["chaos.py", *line])
    chaos = importlib.import_module("chaos")
    with patch("chaos_run.subprocess", SimpleNamespace(Popen=as_fork, TimeoutExpired=subprocess.TimeoutExpired)):
        code = chaos.main()
    said = capsys.readouterr().out
    assert code == 0, said
    killed = re.findall(r"kill=([a-z ]+) \[", said)
    assert sorted(killed) == sorted(KINDS)
    passed = re.search(r"chaos=passed steps=(\d+) prompts=(\d+) kills=3 lives=2", said)
    assert passed is not None, said
    assert int(passed[2]) == 4 * int(passed[1])
