"""What all runs' checkpoints hold: counters, policy and loader.

Each algorithm names the counters as NeMo-RL does. Invariants: `step` is the number of completed steps and thereby the
version of the policy's weights; a visible checkpoint is complete; the loader state saved with step N yields the batches
of step N+1 first.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from nemo_rl.config import ConfigError
from nemo_rl.config.master import RootConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointManager
from nemo_rl.utils.logger import get_next_experiment_dir
from nemo_rl.utils.metrics_file import MetricsLost
from nemo_rl.utils.record import RecordUnwritable

if TYPE_CHECKING:
    from nemo_rl.data.loader import HasState
    from nemo_rl.utils.checkpoint import TrainingInfo

logger = logging.getLogger(__name__)

LOADER_FILE = "train_dataloader.pt"
WEIGHTS = Path("policy") / "weights"
LATEST = "latest"


@dataclass
class RunState:
    """Counters of a run."""

    step: int = 0
    epoch: int = 0  # completed passes over the data
    step_in_epoch: int = 0  # steps since the epoch began
    consumed_samples: int = 0  # prompts, or conversations, trained on
    total_valid_tokens: int = 0
    val_metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last validation
    data_contents: dict[str, str] = field(default_factory=dict)  # content hash of each dataset

    def totals(self) -> dict[str, object]:
        """Counters that all algorithms save under the same names."""
        return {
            "total_steps": self.step,
            "consumed_samples": self.consumed_samples,
            "total_valid_tokens": self.total_valid_tokens,
            "data_contents": self.data_contents,
        }

    def training_info(self) -> dict[str, object]:
        """The fields of `training_info.json`, under the algorithm's names."""
        raise NotImplementedError

    @classmethod
    def resumed(cls, info: TrainingInfo, *, epoch: int, step_in_epoch: int, val_metrics: dict[str, float]) -> Self:
        """Counters from a checkpoint."""
        totals = (info["consumed_samples"], info["total_valid_tokens"])
        return cls(info["total_steps"], epoch, step_in_epoch, *totals, val_metrics)

    def copy(self) -> Self:
        """An independent copy."""
        return type(self)(**asdict(self))


def begin_checkpoint(
    checkpointer: CheckpointManager,
    policy: Policy,
    loader: HasState,
    step: int,
    info: Mapping[str, object],
    config: RootConfig,
    also: Mapping[str, object] | None = None,
) -> None:
    """Takes a checkpoint of policy and loader; its files are finished in the background.

    Args:
        policy: Saved as `policy/`.
        loader: Its `state_dict()` is saved as `train_dataloader.pt`.
        config: Saved as `config.yaml`.
        also: Further files by name, each plain values and tensors.

    Raises CheckpointError: the directory cannot be written, or the previous checkpoint failed.
    """
    named = {**info, "dataset_names": dataset_names(config)}
    # Workers write too, from working directories of their own.
    path = checkpointer.init_tmp_checkpoint(step, named, config).resolve()
    with checkpointer.writing(path):
        for name, content in {LOADER_FILE: loader.state_dict(), **(also or {})}.items():
            # Through memory: torch reports a full disk as a RuntimeError without the reason.
            state = io.BytesIO()
            torch.save(content, state)
            (path / name).write_bytes(state.getvalue())
        optimizer = str(path / "policy" / "optimizer") if config.checkpointing.save_optimizer else None
        save_format = config.checkpointing.model_save_format or "safetensors"
        policy.save_checkpoint(str(path / WEIGHTS), optimizer, str(path / "policy" / "tokenizer"), save_format)
    checkpointer.begin_finalization(path, policy.finalize_async_save)


@contextmanager
def saved_without_logs(checkpointer: CheckpointManager, state: RunState, save: Callable[[], None]) -> Generator[None]:
    """Context manager around a run's steps: if logs can no longer be written, saves the last completed step and
    re-raises.
    """
    try:
        yield
    except (MetricsLost, RecordUnwritable):
        try:
            if checkpointer.cfg.enabled and state.step > 0 and not checkpointer.has(state.step):
                save()
                checkpointer.finish()
                logger.error("step %d was saved; its logs are incomplete", state.step)
        except CheckpointError as error:
            logger.error("step %d could not be saved either: %s", state.step, error)
        raise


def check_writable(checkpointer: CheckpointManager) -> None:
    """Checks that checkpoints can be written. Raises CheckpointError: the directory cannot be made or written."""
    probe = checkpointer.root / "tmp_probe"
    with checkpointer.writing(probe):
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()


def new_log_dir(config: RootConfig) -> str:
    """Creates the next numbered directory in `logger.log_dir`. Raises ConfigError: it cannot be created."""
    try:
        return str(get_next_experiment_dir(config.logger.log_dir))
    except OSError as error:
        raise ConfigError(
            [f"logger.log_dir: {config.logger.log_dir} cannot be written ({error.strerror or error})"]
        ) from error


def name_latest(checkpointer: CheckpointManager) -> None:
    """Points `<checkpoint_dir>/latest` at the newest weights with one rename."""
    newest = checkpointer.get_latest_checkpoint_path()
    if newest is None:
        return
    link, aside = newest.parent / LATEST, newest.parent / f".{LATEST}"
    aside.unlink(missing_ok=True)
    os.symlink(Path(newest.name) / WEIGHTS, aside, target_is_directory=True)
    aside.replace(link)


def dataset_names(config: RootConfig) -> list[str]:
    """Names of the training datasets; a checkpoint is resumed only with the same ones."""
    return [entry.dataset_name for entry in config.data.train]
