"""Checkpoint directories: rename at the end, kept by rule, resumable after every kind of death."""

import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.checkpoint import main as verify
from nemo_rl.config import CheckpointingConfig
from nemo_rl.utils.checkpoint import CheckpointError, CheckpointManager, model_directory
from nemo_rl.utils.checkpoint_retention import SavedStep, best_step, ranking_metric, should_save, steps_to_keep


def manager(root: Path, **keys: Any) -> CheckpointManager:
    return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), **{"save_period": 1, **keys}), deadline_s=10)


def save(checkpoints: CheckpointManager, step: int, accuracy: float | None = None, optimizer: bool = True) -> Path:
    info = {"total_steps": step} | ({} if accuracy is None else {"val:accuracy": accuracy})
    path = checkpoints.init_tmp_checkpoint(
        step, info, {"grpo": {"seed": 42}, "checkpointing": checkpoints.cfg.model_dump()}
    )
    for part in ("weights", "optimizer") if optimizer else ("weights",):
        (path / "policy" / part).mkdir(parents=True)
        (path / "policy" / part / "data").write_text(str(step))
    return checkpoints.finalize_checkpoint(path)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60.0)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


HISTORY = st.dictionaries(
    st.integers(1, 60), st.none() | st.sampled_from([0.1, 0.5, 0.9, float("nan")]), min_size=1, max_size=15
)


@given(
    history=HISTORY,
    keep=st.none() | st.integers(1, 4),
    period=st.integers(1, 10),
    latest=st.none() | st.integers(1, 4),
    higher=st.booleans(),
    metric=st.sampled_from([None, "val:accuracy"]),
)
def test_retention_is_the_union_of_its_rules(
    history: dict[int, float | None],
    keep: int | None,
    period: int,
    latest: int | None,
    higher: bool,
    metric: str | None,
) -> None:
    cfg = CheckpointingConfig(
        keep_top_k=keep,
        save_period=period,
        ft_save_period=5,
        ft_keep_latest_k=latest,
        higher_is_better=higher,
        metric_name=metric,
    )
    kept = steps_to_keep([SavedStep(step, value) for step, value in history.items()], cfg)
    ranked = [step for step in history if step % period == 0]

    def better(a: int, b: int) -> bool:
        """Whether a ranks before b."""
        x, y = (history[step] if metric else None for step in (a, b))
        x, y = (None if value is None or math.isnan(value) else value for value in (x, y))
        if x is None or y is None or x == y:
            return a > b if (x is None) == (y is None) else y is None
        return x > y if higher else x < y

    for step in history:
        rank = sum(better(other, step) for other in ranked)
        by_rank = step in ranked and (keep is None or rank < keep)
        by_age = sum(other > step for other in history) < max(latest or 0, 1)
        assert (step in kept) == (by_rank or by_age), step
    assert max(history) in kept
    best = best_step([SavedStep(step, value) for step, value in history.items()], cfg)
    assert not any(better(other, best) for other in history)


def test_a_run_that_was_made_longer_keeps_its_former_last_step_by_its_rank() -> None:
    cfg = CheckpointingConfig(keep_top_k=2, save_period=10, metric_name="val:accuracy")
    history = {10: 0.1, 20: 0.2, 28: 0.9, 30: 0.3}
    assert steps_to_keep([SavedStep(step, value) for step, value in history.items()], cfg) == {28, 30}


def test_beside_restarts_only_multiples_of_the_period_are_ranked() -> None:
    cfg = CheckpointingConfig(keep_top_k=1, save_period=10, ft_keep_latest_k=2, metric_name="val:accuracy")
    history = {10: 0.5, 20: 0.2, 23: 0.9, 28: 0.1, 31: 0.3}
    assert steps_to_keep([SavedStep(step, value) for step, value in history.items()], cfg) == {10, 28, 31}


def test_extra_checkpoints_are_deleted_also_where_the_best_are_all_kept() -> None:
    cfg = CheckpointingConfig.read({"keep_top_k": None, "save_period": 10, "ft_save_period": 2, "ft_keep_latest_k": 2})
    saved = [SavedStep(step, None) for step in range(2, 17, 2)]
    assert steps_to_keep(saved, cfg) == {10, 14, 16}


def test_without_limits_everything_stays() -> None:
    cfg = CheckpointingConfig(keep_top_k=None, save_period=10)
    assert steps_to_keep([SavedStep(step, None) for step in (3, 10, 17)], cfg) == {3, 10, 17}


def test_saves_are_due_by_period_end_early_stop_and_timeout() -> None:
    cfg = CheckpointingConfig(save_period=10, ft_save_period=4)
    assert [step for step in range(1, 21) if should_save(step, cfg)] == [4, 8, 10, 12, 16, 20]
    for reason in ("is_last", "early_stop", "timeout"):
        assert should_save(7, cfg, **{reason: True})
    assert not should_save(10, CheckpointingConfig(enabled=False), is_last=True)


def test_the_ranking_metric_warns_when_not_measured_or_unknown(caplog: pytest.LogCaptureFixture) -> None:
    cfg = CheckpointingConfig(metric_name="val:accuracy")
    assert ranking_metric(cfg, 10, train={"loss": 1.0}, val={"accuracy": 0.5}) == {"val:accuracy": 0.5}
    assert ranking_metric(cfg, 10, train={"loss": 1.0}, val=None) == {}
    assert "checkpoint_not_ranked step=10 metric=val:accuracy" in caplog.text
    caplog.clear()
    assert ranking_metric(cfg, 10, train={}, val={"avg_length": 3.0}) == {}
    assert "val:accuracy: there is no such metric; val metrics are ['avg_length']" in caplog.text
    assert ranking_metric(CheckpointingConfig(metric_name=None), 10, train={}, val={}) == {}


def test_a_checkpoint_is_visible_only_when_complete(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    written = checkpoints.init_tmp_checkpoint(1, {"total_steps": 1}, {"grpo": {"seed": 42}})
    assert written.name == "tmp_step_1"
    assert checkpoints.get_latest_checkpoint_path() is None
    assert checkpoints.get_resume_paths() is None
    final = checkpoints.finalize_checkpoint(written)
    assert final == checkpoints.get_latest_checkpoint_path() == tmp_path / "step_1"
    assert checkpoints.load_training_info() == {"total_steps": 1}
    assert (final / "config.yaml").read_text() == "grpo:\n  seed: 42\n"
    assert json.loads((tmp_path / "latest_checkpoint_status.json").read_text())["step"] == 1


def test_a_manager_takes_a_plain_mapping(tmp_path: Path) -> None:
    checkpoints = CheckpointManager({"checkpoint_dir": str(tmp_path), "keep_top_k": 1, "metric_name": None})
    for step in (1, 2):
        save(checkpoints, step, None)
    assert steps(tmp_path) == [2]


def test_the_best_and_the_latest_stay(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=1)
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.5), (4, None)):
        save(checkpoints, step, accuracy)
    assert steps(tmp_path) == [2, 4]
    assert checkpoints.get_best_checkpoint_path() == tmp_path / "step_2"
    assert checkpoints.get_latest_checkpoint_path() == tmp_path / "step_4"


def test_finalisation_waits_for_the_writers_without_blocking_the_caller(tmp_path: Path) -> None:
    written = threading.Event()
    with manager(tmp_path) as checkpoints:
        path = checkpoints.init_tmp_checkpoint(1, {})
        checkpoints.begin_finalization(path, wait_fn=lambda: assert_set(written))
        assert checkpoints.get_latest_checkpoint_path() is None
        written.set()
    assert steps(tmp_path) == [1]


def test_a_failed_writer_is_raised_later_and_leaves_the_last_good_one(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)

    def full_disk() -> None:
        raise OSError(28, "No space left on device")

    checkpoints.begin_finalization(checkpoints.init_tmp_checkpoint(2, {}), wait_fn=full_disk)
    with pytest.raises(CheckpointError, match=r"checkpointing.checkpoint_dir=.*no space left.*step_1 is intact"):
        checkpoints.init_tmp_checkpoint(3, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpoint_status.json", "step_1"]
    save(checkpoints, 3)
    assert steps(tmp_path) == [1, 3]

    def lost_worker() -> None:
        raise ConnectionError("rank 3 is gone")

    checkpoints.begin_finalization(checkpoints.init_tmp_checkpoint(4, {}), wait_fn=lost_worker)
    with pytest.raises(CheckpointError, match="rank 3 is gone"):
        checkpoints.shutdown()


def test_a_checkpoint_that_a_dying_run_takes_along_does_not_hide_why_it_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lost_worker() -> None:
        raise ConnectionError("worker 1 died")

    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(ZeroDivisionError, match="why it died"), ExitStack() as run:
        run.callback(checkpoints.shutdown)
        checkpoints.begin_finalization(checkpoints.init_tmp_checkpoint(4, {}), wait_fn=lost_worker)
        raise ZeroDivisionError("why it died")
    assert "checkpoint=failed" in caplog.text and "worker 1 died" in caplog.text


def test_a_failed_checkpoint_is_noticed_at_the_next_step_and_written_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writers are workers: what they raise arrives with a remote traceback."""
    full = [True]

    def write() -> None:
        if full[0]:
            raise RuntimeError("rank 0 raised OSError: [Errno 28] No space left on device\nTraceback\n  many\n  lines")

    def step(number: int, due: bool) -> None:
        checkpoints.poll()
        if due or checkpoints.retry_due:
            with checkpoints.tolerate_failure():
                checkpoints.begin_finalization(checkpoints.init_tmp_checkpoint(number, {}), wait_fn=write)
                wait([checkpoints._pending[1]])

    checkpoints = manager(tmp_path)
    step(1, due=True)
    step(2, due=False)
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "checkpoint=failed attempt=1 of=3; the next step tries again" in line and "\n" not in line
    assert f"{tmp_path}: cannot write tmp_step_1 (no space left on its disk)" in line
    full[0] = False
    step(3, due=False)
    step(4, due=False)
    assert steps(tmp_path) == [3] and not checkpoints.retry_due
    checkpoints.finish()
    # One that is owed at the end fails the run, and so do three in a row before.
    full[0] = True
    step(5, due=True)
    step(6, due=False)
    with pytest.raises(CheckpointError, match="no space left on its disk.*step_3 is intact"):
        checkpoints.finish()
    with pytest.raises(CheckpointError, match="no space left"):
        for number in (7, 8, 9):
            step(number, due=False)


def test_what_is_visible_has_reached_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, reached = manager(tmp_path), set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: reached.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    path = checkpoints.init_tmp_checkpoint(1, {})
    (path / "policy" / "weights").mkdir(parents=True)
    (path / "policy" / "weights" / "model.safetensors").write_bytes(b"x")
    files = {str(file) for file in [path, *path.rglob("*")]}
    checkpoints.finalize_checkpoint(path)
    assert len(files) >= 4 and files | {str(tmp_path)} <= reached


def test_a_writer_that_hangs_passes_its_deadline(tmp_path: Path) -> None:
    release = threading.Event()
    checkpoints = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(tmp_path)), deadline_s=0.05)
    checkpoints.begin_finalization(checkpoints.init_tmp_checkpoint(1, {}), wait_fn=lambda: assert_set(release))
    with pytest.raises(CheckpointError, match="not written within"):
        checkpoints.finalize_pending()
    release.set()


def test_a_full_disk_while_the_caller_writes_is_one_clear_error(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    path = checkpoints.init_tmp_checkpoint(2, {})
    with (
        pytest.raises(CheckpointError, match="step_1 is intact"),
        checkpoints.writing(path),
        open("/dev/full", "w") as full,
    ):
        full.write("x")
        full.flush()
    assert not path.exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="checkpointing.checkpoint_dir=.*file/checkpoints"):
        manager(tmp_path / "file" / "checkpoints").init_tmp_checkpoint(1, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        manager(tmp_path).init_tmp_checkpoint(1, {})


def test_a_run_that_died_while_writing_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    save(manager(tmp_path), 1)
    manager(tmp_path).init_tmp_checkpoint(2, {})
    again = manager(tmp_path)
    assert again.get_latest_checkpoint_path() == tmp_path / "step_1"
    assert (tmp_path / "tmp_step_2").exists()  # reading removes nothing: another run may be writing it
    again.init_tmp_checkpoint(3, {})
    assert not (tmp_path / "tmp_step_2").exists()


def test_a_run_that_died_between_the_renames_keeps_the_replaced_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(manager(tmp_path), 5)
    (tmp_path / "step_5").rename(tmp_path / "old_step_5")
    assert manager(tmp_path).get_latest_checkpoint_path() == tmp_path / "step_5"
    assert "checkpoint_recovered" in caplog.text


@pytest.mark.slow
def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1, accuracy=0.1)
    save(checkpoints, 1, accuracy=0.7)
    assert checkpoints.load_training_info() == {"total_steps": 1, "val:accuracy": 0.7}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_checkpoint_status.json", "step_1"]


def test_resume_needs_weights_and_warns_without_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1, optimizer=False)
    assert checkpoints.get_resume_paths() == (tmp_path / "step_1" / "policy" / "weights", None)
    assert "optimizer_state_missing" in caplog.text
    save(checkpoints, 2)
    assert checkpoints.get_resume_paths().optimizer == tmp_path / "step_2" / "policy" / "optimizer"
    checkpoints.finalize_checkpoint(checkpoints.init_tmp_checkpoint(3, {}))
    with pytest.raises(CheckpointError, match="no policy/weights"):
        checkpoints.get_resume_paths()


def test_damaged_info_and_wrong_paths_are_named(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "step_1" / "training_info.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_1/training_info.json cannot be read"):
        checkpoints.load_training_info()
    with pytest.raises(CheckpointError, match="no checkpoint in progress"):
        checkpoints.finalize_checkpoint(tmp_path / "step_1")
    save(checkpoints, 2, accuracy=0.5)  # a damaged one does not keep later ones from being written and ranked
    assert checkpoints.get_best_checkpoint_path() == tmp_path / "step_2"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


SPOILS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped byte of weights": ("policy/weights/data", lambda path: flip(path, 0)),
    "a flipped byte of the optimizer": ("policy/optimizer/data", lambda path: flip(path, -1)),
    "a file cut off": ("policy/weights/data", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "no info": ("training_info.json", Path.unlink),
    "an empty info": ("training_info.json", lambda path: path.write_bytes(b"")),
    "no directory": ("policy/optimizer/data", lambda path: shutil.rmtree(path.parent)),
    "a manifest of nonsense": ("manifest.json", lambda path: path.write_text("[1]")),
    "a torn manifest": ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:40])),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one_offered(spoil: str, tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep_top_k=None)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.newest_intact() == tmp_path / "step_3"
    name, damaged = SPOILS[spoil]
    for step in (2, 3):
        damaged(tmp_path / f"step_{step}" / name)
    with pytest.raises(CheckpointError, match=rf"step_3 is damaged: {name}.*resume=\[intact\] goes on from step_1"):
        checkpoints.newest_intact()
    assert verify(["verify", str(tmp_path)]) == 1 and verify(["verify", str(tmp_path / "step_1")]) == 0
    assert checkpoints.newest_intact(set_aside=True) == tmp_path / "step_1" == checkpoints.newest_intact()
    assert {path.name for path in tmp_path.glob("damaged_*")} == {"damaged_step_2", "damaged_step_3"}


def test_without_an_intact_checkpoint_nothing_is_moved(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    flip(tmp_path / "step_1" / "training_info.json", 4)
    for aside in (False, True):
        with pytest.raises(CheckpointError, match="no other is intact"):
            checkpoints.newest_intact(set_aside=aside)
    assert (tmp_path / "step_1").is_dir()


def test_a_checkpoint_of_an_earlier_version_is_used_and_called_unverified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "step_1" / "manifest.json").unlink()
    assert checkpoints.newest_intact() == tmp_path / "step_1"
    assert verify(["verify", str(tmp_path)]) == 1 and "step_1: not verified" in capsys.readouterr().out
    assert verify(["verify", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_files_of_a_checkpoint_have_the_mode_of_the_umask(
    mask: int, file_mode: int, folder_mode: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        checkpoints = manager(tmp_path / "results")
        path = checkpoints.init_tmp_checkpoint(1, {})
        (path / "private").write_text("x")
        (path / "private").chmod(0o600)
        final = checkpoints.finalize_checkpoint(path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [*final.rglob("*"), final]}
    assert modes == dict.fromkeys(("private", "manifest.json", "training_info.json"), file_mode) | {
        "step_1": folder_mode
    }


def test_the_best_checkpoint_is_a_model_by_its_metric(tmp_path: Path) -> None:
    for higher, best in ((True, 2), (False, 1)):
        root = tmp_path / str(higher)
        checkpoints = manager(root, keep_top_k=None, metric_name="val:accuracy", higher_is_better=higher)
        for step, accuracy in ((1, 0.1), (2, 0.7), (3, 0.4)):
            save(checkpoints, step, accuracy=accuracy)
        assert model_directory(str(root / "best")) == str(root / f"step_{best}" / "policy" / "weights")
        assert model_directory(str(root)) == str(root / "step_3" / "policy" / "weights")
    flip(root / "step_1" / "policy" / "weights" / "data", 0)
    for name in ("best", "step_1", "step_1/policy/weights"):
        with pytest.raises(CheckpointError, match=r"step_1 is damaged: policy/weights/data"):
            model_directory(str(root / name))
    save(manager(tmp_path / "unranked"), 1)
    with pytest.raises(CheckpointError, match="no checkpoint is ranked"):
        model_directory(str(tmp_path / "unranked" / "best"))


class _Killed(BaseException):
    """The process ends here."""


def test_a_kill_at_any_point_of_a_removal_leaves_whole_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: int | None = None

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise _Killed
            return real(*args, **kwargs)

        return call

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    killed, allowed = True, 0
    while killed:
        left, root = None, tmp_path / str(allowed)
        with manager(root, keep_top_k=None) as checkpoints:
            for step in (1, 2, 3):
                save(checkpoints, step)
        left, killed = allowed, False
        try:
            manager(root, keep_top_k=1, metric_name=None).remove_old_checkpoints()
        except _Killed:
            killed = True
        left, allowed = None, allowed + 1
        for path in root.glob("step_*"):
            assert (path / "policy" / "weights" / "data").exists() and verify(["verify", str(path)]) == 0
        again = manager(root, keep_top_k=1, metric_name=None)
        assert again.newest_intact() == root / "step_3"
        with again:
            save(again, 4)
        assert steps(root) == [4] and not list(root.glob("removing_*"))
    assert allowed > 10
