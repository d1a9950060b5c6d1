"""What the documentation says can be done is done: code blocks build a task that trains, and commands are commands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from nemo_rl.config import load_master_config
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.environments.registry import environment_class, environment_settings
from nemo_rl.utils.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(title, text) of a page's fenced blocks in a language."""
    return [(title, text) for kind, title, text in _BLOCK.findall((ROOT / page).read_text()) if kind == language]


@pytest.fixture(scope="module")
def task(user_modules: Path) -> Path:
    """The walk-through's files, as a reader would write them; returns its YAML."""
    for title, text in blocks("docs/extending.md", "python"):
        file = user_modules / title
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    ((title, text),) = [block for block in blocks("docs/extending.md", "yaml") if block[0]]
    file = user_modules / title
    file.write_text(text.replace("defaults: examples/", f"defaults: {ROOT}/examples/"))
    return file


def test_the_walk_throughs_dataset_and_environment_do_what_they_say(task: Path) -> None:
    config = load_master_config(str(task))
    dataset = load_response_dataset(config.data.train[0])
    row = dataset.dataset[0]
    assert [message["content"] for message in row["messages"]] == ["a in banana: ", "3"]
    section = config.env.of("judge")
    judge = environment_class("judge", section)(environment_settings(section))
    logs: list[Any] = [[{"role": "assistant", "content": answer}] for answer in ("3", "4", "?")]
    assert judge.step(logs, [{"ground_truth": "3"}] * 3).rewards.tolist() == pytest.approx([1.0, 0.1, 0.0])


def test_the_walk_throughs_loss_adds_up_over_parts_of_a_batch(task: Path) -> None:
    from nemo_rl.algorithms.grpo.setup import make_loss

    loss_fn = make_loss(load_master_config(str(task)).loss_fn)
    generator = torch.Generator().manual_seed(0)
    data = {"token_mask": torch.ones(4, 6), "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]), "advantages": torch.randn(4, 6, generator=generator)}
    logprobs = -torch.rand(4, 5, generator=generator)
    whole, _ = loss_fn(data, 3.0, 15.0, next_token_logprobs=logprobs)
    parts = [loss_fn({k: v[i : i + 2] for k, v in data.items()}, 3.0, 15.0, next_token_logprobs=logprobs[i : i + 2])[0] for i in (0, 2)]
    assert float(whole) == pytest.approx(float(sum(parts)))


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_walk_throughs_run_trains(task: Path, tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    overrides = [f"policy.model_name={tiny_model}", f"logger.log_dir={tmp_path}/logs", "checkpointing.enabled=false", "logger.tensorboard_enabled=false"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(task.parent)]), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, str(ROOT / "examples" / "run_grpo.py"), "--config", str(task), *overrides]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert read_metrics(tmp_path / "logs").scalars("train/loss")[0] == [1, 2]


def test_yaml_blocks_of_the_walk_through_load() -> None:
    import yaml

    for _, text in blocks("docs/extending.md", "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
