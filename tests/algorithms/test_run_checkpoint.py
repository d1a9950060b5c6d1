"""What a run's checkpoint asks of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.run_checkpoint import begin_checkpoint
from nemo_rl.config import CheckpointingConfig, MasterConfig
from nemo_rl.utils.checkpoint import CheckpointManager


class Policy:
    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, tokenizer_path: str | None, save_format: str
    ) -> None:
        self.save_format = save_format
        Path(weights_path).mkdir(parents=True)

    def finalize_async_save(self) -> None:
        pass


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"batches": 3}


@pytest.mark.parametrize(
    ("configured", "asked"), [("torch_save", "torch_save"), ("safetensors", "safetensors"), (None, "safetensors")]
)
def test_weights_are_saved_in_the_configured_format(configured: Any, asked: str, tmp_path: Path) -> None:
    checkpointing = CheckpointingConfig(checkpoint_dir=str(tmp_path), model_save_format=configured)
    policy: Any = Policy()
    with CheckpointManager(checkpointing) as manager:
        begin_checkpoint(
            manager, policy, Loader(), 1, {}, MasterConfig.model_validate({"checkpointing": checkpointing.to_dict()})
        )
    assert policy.save_format == asked
    assert (tmp_path / "step_1" / "policy" / "weights").is_dir()
