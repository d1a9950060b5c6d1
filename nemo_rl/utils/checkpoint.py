"""Checkpoint directories: written under another name, renamed when complete, kept by rule, found again on resume.

`<checkpoint_dir>/step_N/` holds `training_info.json`, `config.yaml`, the caller's files (`policy/...`,
`train_dataloader.pt`), and the manifest. Invariant: a directory named `step_N` is complete; an interrupted write or
removal leaves the last complete one usable.
"""

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from nemo_rl.config import CheckpointingConfig
from nemo_rl.config.errors import UserError, disk_is_full, first_line
from nemo_rl.lazy import names_of
from nemo_rl.utils.checkpoint_manifest import MANIFEST, apply_umask, damage, sync, write_manifest
from nemo_rl.utils.checkpoint_retention import SavedStep, best_step, steps_to_keep
from nemo_rl.utils.files import dump_yaml, load_yaml, replace_file

logger = logging.getLogger(__name__)

INFO_FILE = "training_info.json"
TrainingInfo = dict[str, Any]  # its content
BEST = "best"
STATUS_FILE = "latest_checkpoint_status.json"
FINALIZE_DEADLINE_S = 1800.0
_REMOVING = "removing_step_"
_TRIES = 3
_SCARCE_BYTES = 16 << 20


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written or read."""


class ResumePaths(NamedTuple):
    """Paths to load. `optimizer` is None where the checkpoint has no optimizer state."""

    weights: Path
    optimizer: Path | None


class CheckpointManager:
    """Owns a run's checkpoint directory; a context manager that finishes pending work on exit.

    Args:
        cfg: the checkpointing section; a path is a `checkpoint_dir` alone.
        deadline_s: how long the background write of one checkpoint may take.

    >>> manager = CheckpointManager(CheckpointingConfig(checkpoint_dir="results/demo"))
    >>> manager.get_latest_checkpoint_path() is None
    True
    """

    def __init__(
        self, cfg: CheckpointingConfig | Mapping[str, object] | str | Path, deadline_s: float = FINALIZE_DEADLINE_S
    ) -> None:
        self.cfg = CheckpointingConfig.read({"checkpoint_dir": cfg} if isinstance(cfg, (str, Path)) else cfg)
        self.root = Path(self.cfg.checkpoint_dir)
        self._deadline_s = deadline_s
        self._executor: ThreadPoolExecutor | None = None
        self._pending: tuple[Path, Future[None]] | None = None
        self._failures: list[CheckpointError] = []

    @property
    def retry_due(self) -> bool:
        """Whether the last checkpoint failed, so that the next step writes one."""
        return bool(self._failures)

    def poll(self) -> None:
        """Handles a finished background checkpoint, without waiting. A failure is logged, and the next step tries
        again. Raises CheckpointError: it was the third in a row.
        """
        if self._pending is not None and self._pending[1].done():
            with self.tolerate_failure():
                self.finalize_pending()

    @contextmanager
    def tolerate_failure(self) -> Generator[None]:
        """Logs a checkpoint that fails inside; the next step tries again. Raises CheckpointError: it was the third in a
        row.
        """
        try:
            yield
        except CheckpointError as error:
            self._failures.append(error)
            if len(self._failures) >= _TRIES:
                raise
            logger.error(
                "checkpoint=failed attempt=%d of=%d; the next step tries again: %s", len(self._failures), _TRIES, error
            )

    def finish(self) -> None:
        """Waits for the background checkpoint at the end of a run. Raises CheckpointError: it failed, or an earlier one
        did and none came after it.
        """
        self.finalize_pending()
        if self._failures:
            raise self._failures[-1]

    def init_tmp_checkpoint(self, step: int, training_info: Mapping[str, object], run_config: object = None) -> Path:
        """Creates `tmp_step_N` with its info and configuration, and returns it. Finishes a pending checkpoint first and
        removes leftovers of dead runs.

        Args:
            training_info: counters of the run, and `"<val|train>:<metric>"` for ranking.
            run_config: a pydantic model or mapping, saved as `config.yaml`.

        Raises CheckpointError: it cannot be written, or the pending checkpoint failed.
        """
        self.finalize_pending()
        path = self.root / f"tmp_step_{step}"
        with self.writing(path):
            self.root.mkdir(parents=True, exist_ok=True)
            self._recover()
            for stale in self.root.glob("tmp_step_*"):
                shutil.rmtree(stale)
            path.mkdir()
            if run_config is not None:
                plain = (
                    run_config.model_dump(mode="json", by_alias=True)
                    if hasattr(run_config, "model_dump")
                    else run_config
                )
                (path / "config.yaml").write_text(dump_yaml(plain), encoding="utf-8")
            _write_json(path / INFO_FILE, dict(training_info))
        return path

    @contextmanager
    def writing(self, path: Path) -> Generator[None]:
        """Removes the unfinished `path` after a failed write. Raises CheckpointError: an `OSError` inside, or a worker
        reported a full disk.
        """
        try:
            yield
        except (OSError, RuntimeError) as error:
            if not isinstance(error, OSError) and not self._says_full(error):
                raise
            shutil.rmtree(path, ignore_errors=True)
            raise self._unwritable(path, error) from error

    def begin_finalization(self, tmp_path: Path, wait_fn: Callable[[], None] | None = None) -> None:
        """Completes a checkpoint in the background: waits for its writers with `wait_fn`, whose error the next
        `finalize_pending` raises, then renames `tmp_path`. Raises CheckpointError: the one pending before failed.
        """
        self.finalize_pending()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = (tmp_path, self._executor.submit(self._finalize_in_background, tmp_path, wait_fn))

    def finalize_pending(self) -> None:
        """Waits for the background checkpoint, if any. Raises CheckpointError: it failed or passed the deadline;
        earlier ones are intact.
        """
        if self._pending is None:
            return
        path, future = self._pending
        if wait([future], timeout=self._deadline_s).not_done:
            raise CheckpointError(
                f"{path} was not written within {self._deadline_s:g} s; its writers hang or {self.root} is "
                f"too slow{self._last_good()}"
            )
        self._pending = None
        failure = future.exception()
        if failure is None:
            self._failures = []
            return
        if isinstance(failure, CheckpointError):
            raise failure
        said = first_line(failure)
        raise CheckpointError(f"writing {path} failed: {said}{self._last_good()}") from failure

    def finalize_checkpoint(self, tmp_path: Path) -> Path:
        """Renames a written checkpoint to `step_N`, marks it as the latest and removes those that are not kept; returns
        its directory. Raises CheckpointError: it is incomplete, or the directory cannot be written.
        """
        match = re.fullmatch(r"tmp_step_(\d+)", tmp_path.name)
        if match is None or not (tmp_path / INFO_FILE).is_file():
            raise CheckpointError(
                f"{tmp_path} is no checkpoint in progress: expected tmp_step_N with {INFO_FILE}, from "
                "init_tmp_checkpoint"
            )
        step = int(match[1])
        with self.writing(tmp_path):
            apply_umask(tmp_path)
            write_manifest(tmp_path)
        final, old = self.root / f"step_{step}", self.root / f"old_step_{step}"
        try:
            if final.exists():
                final.rename(old)
            tmp_path.rename(final)
            sync(self.root)
            shutil.rmtree(old, ignore_errors=True)
            _write_json(
                self.root / STATUS_FILE,
                {"step": step, "path": str(final), "training_info": json.loads((final / INFO_FILE).read_text("utf-8"))},
            )
        except OSError as error:
            raise self._unwritable(tmp_path, error) from error
        self.remove_old_checkpoints()
        return final

    def shutdown(self) -> None:
        """Finishes pending work. Raises CheckpointError: the checkpoint in the background failed. While another error
        ends the run this is logged instead: that error is the reason, and a killed worker takes its checkpoint along.
        """
        ends_the_run = sys.exception()
        try:
            self.finalize_pending()
        except CheckpointError as error:
            if ends_the_run is None:
                raise
            logger.error("checkpoint=failed: %s", error)
        finally:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_latest_checkpoint_path(self) -> Path | None:
        """The checkpoint with the highest step, None without one."""
        saved = self._saved()
        return self.root / f"step_{max(saved)}" if saved else None

    def has(self, step: int) -> bool:
        """Whether step `step` has a checkpoint; waits for a pending one. Raises CheckpointError: that failed."""
        self.finalize_pending()
        return step in self._saved()

    def newest_intact(self, *, set_aside: bool = False) -> Path | None:
        """The checkpoint with the highest step, verified by its manifest if any; None without one. `set_aside`: rename
        damaged ones to `damaged_step_N` and go on. Raises CheckpointError: it is damaged, or with `set_aside` all are.
        """
        damaged: dict[Path, list[str]] = {}
        for step in sorted(self._saved(), reverse=True):
            path = self.root / f"step_{step}"
            if found := damage(path):
                damaged[path] = found
                continue
            if damaged and not set_aside:
                break
            for other, problems in damaged.items():
                aside = next(
                    name
                    for number in count()
                    if not (name := self.root / f"damaged_{other.name}{f'_{number}' if number else ''}").exists()
                )
                other.rename(aside)
                logger.warning("checkpoint=damaged set_aside=%s: %s", aside, "; ".join(problems[:3]))
            return path
        else:
            path = None
        if not damaged:
            return None
        newest, problems = next(iter(damaged.items()))
        remedy = (
            f"checkpointing.resume=[intact] goes on from {path.name}, the newest that is not damaged, and keeps the "
            "others as damaged_step_N"
            if path is not None
            else "no other is intact: copy it here again, or begin in another checkpointing.checkpoint_dir"
        )
        raise CheckpointError(f"{newest} is damaged: {'; '.join(problems[:3])}. {remedy}")

    def get_best_checkpoint_path(self) -> Path | None:
        """The checkpoint with the best `metric_name`, None without one."""
        step = best_step(self._history(), self.cfg)
        return None if step is None else self.root / f"step_{step}"

    def get_resume_paths(self, checkpoint_path: Path | str | None = None) -> ResumePaths | None:
        """Weights and optimizer of a checkpoint (by default the latest); None without one. Raises CheckpointError: no
        weights.
        """
        path = self.get_latest_checkpoint_path() if checkpoint_path is None else Path(checkpoint_path)
        if path is None:
            return None
        weights, optimizer = path / "policy" / "weights", path / "policy" / "optimizer"
        if not weights.exists():
            raise CheckpointError(
                f"{path} has no policy/weights; remove that directory to resume from an earlier checkpoint"
            )
        if not optimizer.exists():
            logger.warning("optimizer_state_missing checkpoint=%s: the optimizer starts afresh", path)
            return ResumePaths(weights, None)
        return ResumePaths(weights, optimizer)

    def load_training_info(self, checkpoint_path: Path | str | None = None) -> TrainingInfo | None:
        """The counters of a checkpoint (by default the latest); None without one. Raises CheckpointError."""
        path = self.get_latest_checkpoint_path() if checkpoint_path is None else Path(checkpoint_path)
        if path is None:
            return None
        try:
            return json.loads((path / INFO_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path / INFO_FILE} cannot be read: {error}; remove that checkpoint to resume from an earlier one"
            ) from error

    def remove_old_checkpoints(self) -> list[int]:
        """Removes the checkpoints that no rule keeps and returns their steps. Failures are logged and retried next
        time.
        """
        history = self._history()
        kept = steps_to_keep(history, self.cfg)
        removed = []
        for step in sorted(checkpoint.step for checkpoint in history if checkpoint.step not in kept):
            path, removing = self.root / f"step_{step}", self.root / f"{_REMOVING}{step}"
            try:
                # Under another name first: one that is half removed when the run is killed must not pass for a whole.
                shutil.rmtree(removing, ignore_errors=True)
                path.rename(removing)
                shutil.rmtree(removing)
            except OSError as error:
                logger.warning("checkpoint_not_removed path=%s: %s", path, error)
                continue
            removed.append(step)
        return removed

    def _finalize_in_background(self, tmp_path: Path, wait_fn: Callable[[], None] | None) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(shutil.rmtree, tmp_path, ignore_errors=True)
            if wait_fn is not None:
                with self.writing(tmp_path):
                    wait_fn()
            self.finalize_checkpoint(tmp_path)
            unless_done.pop_all()

    def _saved(self) -> set[int]:
        self._recover()
        return saved_steps(self.root)

    def _history(self) -> list[SavedStep]:
        history = []
        for step in self._saved():
            try:
                value = (self.load_training_info(self.root / f"step_{step}") or {}).get(self.cfg.metric_name or "")
            except CheckpointError as error:
                logger.warning("checkpoint_not_ranked step=%d: %s", step, error)
                value = None
            history.append(SavedStep(step, None if value is None else float(value)))
        return history

    def _recover(self) -> None:
        """A run that died between the two renames of `finalize_checkpoint` left its checkpoint under the old name, and
        one that died while it removed a checkpoint left a part.
        """
        for removing in self.root.glob(f"{_REMOVING}*"):
            shutil.rmtree(removing, ignore_errors=True)
        for old in self.root.glob("old_step_*"):
            final = self.root / old.name.removeprefix("old_")
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)
                logger.warning("checkpoint_recovered path=%s: a write that replaced it did not finish", final)

    def _unwritable(self, path: Path, error: BaseException) -> CheckpointError:
        if self._says_full(error):
            reason = "no space left on its disk"
        else:
            reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        return CheckpointError(
            f"checkpointing.checkpoint_dir={self.root}: cannot write {path.name} ({reason}); free space or choose a "
            f"directory that can be written{self._last_good()}"
        )

    def _says_full(self, error: BaseException) -> bool:
        """Whether the disk is full; torch reports that without the reason, so that the disk itself is asked."""
        if disk_is_full(error):
            return True
        try:
            return shutil.disk_usage(self.root).free < _SCARCE_BYTES
        except OSError:
            return False

    def _last_good(self) -> str:
        good = saved_steps(self.root)
        return f"; {self.root}/step_{max(good)} is intact and resumable" if good else ""


def saved_steps(root: Path) -> set[int]:
    """Steps of the complete checkpoints in a directory; none where there is no directory."""
    # A checkpoint that lost its info is damaged, not absent.
    matches = (
        re.fullmatch(r"step_(\d+)", path.name)
        for path in root.glob("step_*")
        if (path / INFO_FILE).is_file() or (path / MANIFEST).is_file()
    )
    return {int(match[1]) for match in matches if match is not None}


def model_directory(source: str) -> str:
    """Resolves the name of a model to a Hugging Face directory. `source`: a checkpoint (`step_N`), a directory of
    checkpoints (its latest), `best` in one (the best by the run's `checkpointing.metric_name`), or anything else, which
    is returned unchanged. Raises CheckpointError: files of the checkpoint are damaged, or none is the best.
    """
    root = Path(source)
    if root.name == BEST and not root.exists() and saved_steps(root.parent):
        step = _best_of(root.parent)
    else:
        steps = saved_steps(root)
        step = root / f"step_{max(steps)}" if steps else root
    weights = step / "policy" / "weights"
    verify_weights(weights if weights.is_dir() else root)
    return str(weights) if weights.is_dir() else source


def verify_weights(weights: Path) -> None:
    """Checks a weights directory against its checkpoint's manifest, if any. Raises CheckpointError: they differ."""
    real = weights.resolve()
    if real.parts[-2:] == ("policy", "weights") and (found := damage(real.parents[1], "policy/weights/")):
        raise CheckpointError(f"{real.parents[1]} is damaged: {'; '.join(found[:3])}; name another checkpoint")


def _best_of(root: Path) -> Path:
    newest = root / f"step_{max(saved_steps(root))}"
    try:
        written = load_yaml((newest / "config.yaml").read_text(encoding="utf-8"))["checkpointing"]
        names = ("metric_name", "higher_is_better")
        cfg = CheckpointingConfig(checkpoint_dir=str(root), **{name: written[name] for name in names})
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{root}/{BEST}: {newest}/config.yaml does not say what is best ({error})") from error
    history = [saved for saved in CheckpointManager(cfg)._history() if saved.metric is not None]
    step = best_step(history, cfg)
    if cfg.metric_name is None or step is None:
        raise CheckpointError(
            f"{root}/{BEST}: no checkpoint is ranked: checkpointing.metric_name was {cfg.metric_name}; name a step_N"
        )
    return root / f"step_{step}"


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    replace_file(path, json.dumps(content, indent=2, default=float))


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
