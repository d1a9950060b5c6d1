"""The state that all checkpoints of a run hold, and whether and how a run resumes from the newest one.

Compares the configuration with the checkpoint's: harmless changes are applied and printed, changes that make it a
different run are refused unless `checkpointing.resume` allows them. Counters are named as in NeMo-RL. Invariants: no
difference is ignored silently; a finished run starts nothing; no prompt is repeated or skipped unless the data changed;
`step` is the number of completed steps and thereby the version of the policy's weights; a visible checkpoint is
complete; the loader state saved with step N yields the batches of step N+1 first.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import yaml
from pydantic import ValidationError

from nemo_rl.config import ConfigError
from nemo_rl.config.errors import UserError
from nemo_rl.config.infrastructure import ResumeChange
from nemo_rl.config.master import MasterConfig, RootConfig
from nemo_rl.config.metric_names import MetricName
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointManager
from nemo_rl.utils.checkpoint_manifest import MANIFEST
from nemo_rl.utils.files import load_yaml
from nemo_rl.utils.logger import flatten_dict, get_next_experiment_dir
from nemo_rl.utils.metrics_file import MetricsLost
from nemo_rl.utils.record import RecordUnwritable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_rl.data.loader import HasState, Loader
    from nemo_rl.utils.checkpoint import TrainingInfo


CONFIG_FILE = "config.yaml"
_LINES = 12

# Keys that make another run, by the name under which `checkpointing.resume` allows them.
_ANOTHER_RUN: dict[ResumeChange, tuple[str, ...]] = {
    "data": (
        "data.train.",
        "data.shuffle",
        "data.use_multiple_dataloader",
        "data.num_prompts_per_dataloader",
        "data.custom_dataloader",
    ),
    "environment": ("env.",),
    "loss": ("loss_fn.", "teacher.model_name", "on_policy_distillation.teacher_model_by_agent_name"),
    "model": ("policy.model_name", "policy.tokenizer.", "policy.hf_config_overrides."),
    "optimizer": ("policy.optimizer.name",),
    "seed": ("grpo.seed", "distillation.seed", "sft.seed"),
}
# How an environment is run changes no reward.
_HARMLESS_ENDINGS = (".num_workers", ".step_timeout_s")
_NOT_COMPARED = ("logger.log_dir", "checkpointing.resume")
_EFFECT: dict[ResumeChange, str] = {
    "data": "the new data begin with their first prompt",
    "environment": "rewards come from the new one",
    "loss": "the new one is minimised",
    "model": "the policy goes on from the checkpoint's weights, the new model is only the KL's reference",
    "optimizer": "its state starts from zero; the learning rate goes on from the step",
    "seed": "the current epoch keeps its order, later ones and sampling follow the new seed",
    "batch": "the epoch goes on at the prompt where it was",
}
_SIZES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


class ResumeError(UserError, ValueError):
    """The newest checkpoint belongs to a different run."""


class NothingToDo(UserError):
    """The newest checkpoint is already at the last step; not a failure."""


@dataclass(frozen=True)
class Difference:
    """A key whose value differs from the checkpoint's."""

    key: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from."""

    checkpoint: Path
    info: TrainingInfo
    obeyed: list[Difference]  # differences that apply from now on
    allowed: dict[ResumeChange, list[Difference]]  # differences that make it a different run and were allowed, by name
    rows_before: int = 1  # prompts, or conversations, per step in the checkpoint
    compared: bool = True  # whether the checkpoint's configuration could be read
    same_data: bool = True  # whether the data position refers to the run's data

    def lines(self) -> Iterator[str]:
        """The resume as lines for the terminal."""
        yield f"resuming from step {self.info['total_steps']} of {self.checkpoint}"
        if not (self.checkpoint / MANIFEST).is_file():
            yield f"  its files were not verified: it has no {MANIFEST}, which earlier versions did not write"
        if not self.compared:
            yield f"  what changed since is not known: {self.checkpoint / CONFIG_FILE} is none of this version"
        for name, differences in self.allowed.items():
            yield from (f"  allowed as {name}: {difference}" for difference in differences[:_LINES])
            yield f"  so {_EFFECT[name]}"
        yield from (f"  from here on {difference}" for difference in self.obeyed[:_LINES])
        if len(self.obeyed) > _LINES:
            yield f"  and {len(self.obeyed) - _LINES} more keys, see {self.checkpoint / CONFIG_FILE}"

    @property
    def fresh_optimizer(self) -> bool:
        """Whether the optimizer's state is not restored."""
        return "optimizer" in self.allowed

    def check_unfinished(self, total: int, steps_key: str) -> None:
        """Checks that the run has a step left. `steps_key`: dotted key of the number of steps, for the message. Raises
        NothingToDo: it has none.
        """
        step = self.info["total_steps"]
        if step >= total:
            raise NothingToDo(
                f"already at step {step} of {total}; nothing to do: {self.checkpoint} is this run's newest "
                f"checkpoint. To train on, raise {steps_key} (or the number of epochs); to begin a run of its own, "
                "give it another checkpointing.checkpoint_dir and logger.log_dir"
            )

    def restore_position(self, loader: Loader, state: RunState, rows_per_step: int) -> bool:
        """Restores a loader's position. Returns False, and leaves the loader unchanged, for different data.

        Args:
            loader: Has `load_state_dict`.
            state: Counters; those of the epoch are adjusted.
            rows_per_step: Prompts, or conversations, of a step now.
        """
        file = self.checkpoint / LOADER_FILE
        if not self.same_data or not file.is_file():
            state.epoch = state.step_in_epoch = 0
            return False
        try:
            loader.load_state_dict(torch.load(file, weights_only=True))
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{file} cannot be read ({said}); without it the data begin again, which checkpointing.resume=[data] "
                "allows once the file is removed"
            ) from error
        if "batch" in self.allowed:
            state.step_in_epoch = state.step_in_epoch * self.rows_before // rows_per_step
        return True

    def total_steps(self, state: RunState, limit: int, epochs: int, steps_per_epoch: int) -> int:
        """The last step once the position is restored; completed steps count with their own batch size."""
        if self.same_data and "batch" not in self.allowed:
            return min(limit, epochs * steps_per_epoch)
        return min(limit, state.step + max(0, (epochs - state.epoch) * steps_per_epoch - state.step_in_epoch))


def find_resume(config: RootConfig, checkpointer: CheckpointManager) -> Resume | None:
    """The checkpoint to resume from, or None. Raises ResumeError: the checkpoint belongs to a different run;
    CheckpointError: the checkpoint is damaged, or cannot be read; NothingToDo: validation has already ended the run.
    """
    aside = "intact" in config.checkpointing.resume
    checkpoint = checkpointer.newest_intact(set_aside=aside) if config.checkpointing.enabled else None
    if checkpoint is None:
        return None
    info = checkpointer.load_training_info(checkpoint) or {}
    before = _saved_config(config, checkpoint)
    if before is None:
        same_data = info.get("dataset_names") == dataset_names(config)
        _check_position(checkpoint, info, same_data=same_data, allowed=config.checkpointing.resume)
        return Resume(checkpoint, info, [], {}, compared=False, same_data=same_data)
    rows_keys = _rows_per_step(config)
    obeyed: list[Difference] = []
    changed: dict[ResumeChange, list[Difference]] = {}
    for difference in _differences(before, _flat(config)):
        name = "batch" if difference.key in rows_keys else _makes_another_run(difference.key)
        (obeyed if name is None else changed.setdefault(name, [])).append(difference)
    refused = {name: found for name, found in changed.items() if name not in config.checkpointing.resume}
    if refused:
        raise ResumeError(_refusal(checkpoint, refused, [*config.checkpointing.resume, *refused]))
    _check_position(checkpoint, info, same_data="data" not in changed, allowed=config.checkpointing.resume)
    if isinstance(config, MasterConfig):
        _check_not_stopped(config, checkpoint, info)
    rows = math.prod(before[key] for key in rows_keys)
    return Resume(checkpoint, info, obeyed, changed, int(rows), same_data="data" not in changed)


def _check_position(checkpoint: Path, info: TrainingInfo, *, same_data: bool, allowed: Sequence[ResumeChange]) -> None:
    """Checks that the checkpoint holds a data position; step 0 needs none."""
    file = checkpoint / LOADER_FILE
    if same_data and info["total_steps"] > 0 and not file.is_file() and "data" not in allowed:
        raise CheckpointError(
            f"{file} is missing: the data would begin again, and prompts be trained twice. "
            f"checkpointing.resume=[{','.join([*allowed, 'data'])}] allows that"
        )


def _check_not_stopped(config: MasterConfig, checkpoint: Path, info: TrainingInfo) -> None:
    name, threshold = config.grpo.stop_at_validation_metric, config.grpo.stop_at_validation_threshold
    value = None if name is None else info.get("val_metrics", {}).get(MetricName.read(name).name)
    if threshold is not None and value is not None and value >= threshold:
        key = f"{config.section()}.stop_at_validation"
        raise NothingToDo(
            f"already ended at step {info['total_steps']} by its validation: {key}_metric={name} was {value:g}, and "
            f"{key}_threshold is {threshold:g}; nothing to do: {checkpoint} is this run's newest checkpoint. To train "
            "on, raise the threshold"
        )


def same_contents(resume: Resume | None, contents: Mapping[str, str], allowed: Sequence[ResumeChange]) -> Resume | None:
    """Compares the contents of the datasets with those of the checkpoint.

    Args:
        resume: The checkpoint to resume from.
        contents: Content hash of each dataset by its dotted key.
        allowed: `checkpointing.resume`.

    Raises ResumeError: training rows changed.
    """
    if resume is None:
        return None
    before = resume.info.get("data_contents", {})
    changed = [Difference(key, before[key], now) for key, now in contents.items() if before.get(key, now) != now]
    trained = [difference for difference in changed if difference.key.startswith("data.train")]
    if trained and "data" not in allowed:
        raise ResumeError(_refusal(resume.checkpoint, {"data": trained}, [*allowed, "data"]))
    return replace(
        resume,
        obeyed=[*resume.obeyed, *(difference for difference in changed if difference not in trained)],
        allowed={**resume.allowed, "data": [*resume.allowed.get("data", []), *trained]} if trained else resume.allowed,
        same_data=resume.same_data and not trained,
    )


def check_same_shape(model: PretrainedConfig, checkpoint: Path) -> None:
    """Checks that a checkpoint's weights fit the configured model, by the sizes in both configurations. `model`: the
    Hugging Face configuration of `policy.model_name`. Raises ResumeError: they do not fit.
    """
    file = checkpoint / WEIGHTS / "config.json"
    if not file.is_file():
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    other = [
        f"{name}={saved[name]}, policy.model_name has {getattr(model, name)}"
        for name in _SIZES
        if name in saved and hasattr(model, name) and getattr(model, name) != saved[name]
    ]
    if other:
        raise ResumeError(
            f"{checkpoint} holds a model of another shape ({'; '.join(other)}); name the model that the run began "
            "with, or give the new run another checkpointing.checkpoint_dir"
        )


def _saved_config(config: RootConfig, checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's configuration, flattened, with defaults for newer keys."""
    try:
        raw = load_yaml((checkpoint / CONFIG_FILE).read_text(encoding="utf-8"))
        return _flat(type(config)(**raw))
    except (OSError, yaml.YAMLError, ValidationError, TypeError):
        return None


def _flat(config: RootConfig) -> dict[str, Any]:
    return flatten_dict(config.model_dump(mode="json", by_alias=True))


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[Difference]:
    for key in sorted({*before, *now}):
        if key not in _NOT_COMPARED and before.get(key) != now.get(key):
            yield Difference(key, before.get(key), now.get(key))


def _rows_per_step(config: RootConfig) -> tuple[str, ...]:
    """Keys whose product is the number of prompts, or conversations, of a step."""
    if not isinstance(config, MasterConfig):
        return ("policy.train_global_batch_size",)
    return (f"{config.section()}.num_prompts_per_step", f"{config.section()}.batch_multiplier")


def _makes_another_run(key: str) -> ResumeChange | None:
    for name, beginnings in _ANOTHER_RUN.items():
        if key.startswith(beginnings) and not (name == "environment" and key.endswith(_HARMLESS_ENDINGS)):
            return name
    return None


def _refusal(checkpoint: Path, refused: Mapping[ResumeChange, list[Difference]], names: list[ResumeChange]) -> str:
    lines = [f"  - {name}: {difference}" for name, found in refused.items() for difference in found[:_LINES]]
    effects = [f"  {name}: {_EFFECT[name]}" for name in refused]
    return "\n".join(
        [
            f"the run in {checkpoint.parent} is another one; its {checkpoint.name} was written with",
            *lines,
            "A run of its own needs another checkpointing.checkpoint_dir (and logger.log_dir). To go on from this "
            f"checkpoint all the same: checkpointing.resume=[{','.join(names)}]; then",
            *effects,
        ]
    )


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
