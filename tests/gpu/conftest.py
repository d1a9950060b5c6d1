"""What GPU tests need where tests/conftest.py is not read: GPU hosts lack what it imports.

Kernels are compiled in the tests' own process, since torch's pool of compilers outlives a session.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Knows the markers without pyproject.toml."""
    config.addinivalue_line("markers", "gate: what has to hold on GPUs before scenarios are run there")
    config.addinivalue_line("markers", "slow: takes more than about a second")


def short_run(steps: int) -> dict[str, object]:
    """The `grpo` section of a run of so many steps of 8 prompts x 4 samples, without validation."""
    return {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 4,
        "max_num_steps": steps,
        "val_at_start": False,
        "val_at_end": False,
        "val_period": 0,
    }


def save_model(folder: Path, **shape: int) -> None:
    """Writes a small model with random weights, by the arguments of examples/make_tiny_model.py."""
    runpy.run_path(str(ROOT / "examples" / "make_tiny_model.py"))["save_tiny_model"](folder, **shape)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model of two layers."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder)
    return folder
