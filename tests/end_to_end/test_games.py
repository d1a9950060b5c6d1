"""A run over two datasets with an environment each: sums in one turn, and a sliding puzzle in several."""

import json
import os
import string
from pathlib import Path

import pytest
import ray
import yaml

from nemo_rl.utils.metrics_file import read_metrics
from tests import forks
from tests.glossary import undocumented

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]


def test_two_datasets_with_an_environment_each_train_in_one_run(
    tiny_model: Path, tmp_path: Path, ray_session: None
) -> None:
    puzzle = {
        "dataset_name": "sliding_puzzle",
        "env_name": "sliding_puzzle",
        "num_problems": 8,
        "held_out": 0,
        "task_config": {"size": 2, "shuffle_moves": 6},
        "prompt_file": None,
    }
    sums = {"dataset_name": "arithmetic", "env_name": "math", "num_problems": 8, "held_out": 0, "prompt_file": None}
    config = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_sliding_puzzle_cpu.yaml"),
        "grpo": {"max_num_steps": 2, "max_rollout_turns": 2},
        # A model that knows nothing ends no response by itself, and one that is cut ends its sample.
        "policy": {"model_name": str(tiny_model), "generation": {"stop_strings": [*string.ascii_letters]}},
        "data": {"train": [puzzle, sums]},
        "env": {"sliding_puzzle": {"max_moves": 2}},
        "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"enabled": False},
    }
    file = tmp_path / "games.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = ["examples/run_grpo_sliding_puzzle.py", "--config", str(file)]
    done = forks.run(command, environment, timeout_s=450)
    assert done.returncode == 0, done.stderr[-5000:]
    metrics = read_metrics(tmp_path / "logs")
    assert metrics.scalars("train/loss")[0] == [1, 2] and undocumented(metrics.series) == []
    samples = [
        json.loads(line)
        for path in (tmp_path / "logs" / "latest" / "samples").iterdir()
        for line in path.read_text().splitlines()
    ]
    texts = [json.dumps(sample["content"]) for sample in samples]
    assert len(texts) == 2 * 8 * 4
    # A puzzle's second turn comes after what the environment said to the first; sums have no second turn.
    assert any("No action was found" in text or "is no action" in text for text in texts)
    assert any("tiles into order" not in text for text in texts)
    left = {path.name for path in (tmp_path / "logs" / "latest").iterdir()}
    assert left <= {
        "config.yaml",
        "metrics.jsonl",
        "record.jsonl",
        "record.jsonl.xz",
        "samples",
        "actors",
        "report.html",
        "report.png",
    }
