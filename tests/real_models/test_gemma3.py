"""Gemma 3 270M: tied and scaled embeddings, sliding windows, 262,144 tokens and no chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.utils.metrics_file import read_metrics
from tests.real_models.conftest import settings

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_two_steps_agree_with_its_engine(
    gemma3: Path, run_script: Callable[[str, dict[str, Any]], str], tmp_path: Path
) -> None:
    policy = {"tokenizer": {"chat_template": None}, "generation": {"max_new_tokens": 8}}
    config = settings(gemma3, tmp_path, 4, grpo={"max_num_steps": 2}, policy=policy)
    run_script("run_grpo.py", config)
    metrics = read_metrics(tmp_path / "logs")
    errors = metrics.scalars("train/token_mult_prob_error")[1]
    assert len(errors) == 2 and max(errors) < 1.001
