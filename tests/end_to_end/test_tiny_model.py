"""The command with which the demo begins makes a model that transformers loads, the same bytes each time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests import forks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_tiny_model.py"


def run_alone(command: list[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *command]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kind"), [([], "qwen3"), (["--experts", "4"], "qwen3_moe")])
def test_the_command_makes_the_same_model_again_and_says_where_it_is(
    tmp_path: Path, options: list[str], kind: str
) -> None:
    weights = []
    # A process of its own, in which sets are ordered otherwise, and a fork, which has imported everything. A model with
    # experts has all that one without has.
    for name, run in (("one", run_alone if options else forks.run), ("two", forks.run)):
        done = run([str(SCRIPT), str(tmp_path / name), "--hidden", "32", *options], os.environ, 120.0)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path / name}: ") and "M parameters" in done.stdout
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.model_type == kind
