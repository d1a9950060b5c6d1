"""The command with which the demo begins makes a model that transformers loads, the same bytes each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_tiny_model.py"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kind"), [([], "qwen3"), (["--experts", "4"], "qwen3_moe")])
def test_the_command_makes_the_same_model_again_and_says_where_it_is(
    tmp_path: Path, options: list[str], kind: str
) -> None:
    weights = []
    for name in ("one", "two"):
        command = [sys.executable, str(SCRIPT), str(tmp_path / name), "--hidden", "32", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path / name}: ") and "M parameters" in done.stdout
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.model_type == kind
