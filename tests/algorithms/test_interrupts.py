"""Signals end a run where it stands, after its step, or wait for its end; and what is saved is said truly."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.launch import Interrupts, what_is_saved
from nemo_rl.config import CheckpointingConfig
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.directory_lock import DirectoryInUse, locked
from nemo_rl.utils.timer import TimeoutChecker


def test_a_signal_ends_at_once_after_the_step_or_waits_for_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    timeout = TimeoutChecker()
    with Interrupts() as interrupts:
        interrupts.save_first(timeout.end_after_step)
        assert not timeout.check_save()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.save_asked and timeout.check_save() and not timeout.check_save()
        with pytest.raises(KeyboardInterrupt):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                interrupts.ending()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    said = capfd.readouterr().err
    assert "finished and saved first" in said and said.count("already ending") == 1


def _until_interrupted() -> None:
    """Runs Python code until a KeyboardInterrupt comes."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        time.sleep(0.001)
    raise AssertionError("the interrupt was lost")


class _Swallows:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)


def _swallowed_by_a_finaliser() -> None:
    _Swallows()


def _swallowed_by_an_import() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        _until_interrupted()
    except:  # noqa: E722, S110 - as libraries have it
        pass


@pytest.mark.parametrize("swallowed", [_swallowed_by_a_finaliser, _swallowed_by_an_import])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_library_swallows_still_ends_the_run(swallowed: Callable[[], None]) -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        try:
            swallowed()
            _until_interrupted()
        finally:
            interrupts.ending()


@pytest.mark.parametrize("file", ["<frozen importlib._bootstrap>", logging.__file__])
def test_a_signal_waits_until_imports_or_loggers_have_freed_their_locks(file: str) -> None:
    lock = threading.Lock()
    # Its lock is taken outside of `try`, as `importlib` takes that of all imports, and `logging` that of all loggers.
    source = "lock.acquire()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.3)\nlock.release()"
    code = compile(source, file, "exec")
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        try:
            exec(code, {"lock": lock, "os": os, "signal": signal, "time": time})
            _until_interrupted()
        finally:
            interrupts.ending()
    assert not lock.locked()


def test_a_signal_waits_until_an_extension_module_is_loaded() -> None:
    """Its C++ may call Python, and aborts the process where that raises."""
    loaded: list[bool] = []

    class Loader(ExtensionFileLoader):
        def exec_module(self, _: ModuleType) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            loaded.append(True)

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        try:
            Loader("x", "x.so").exec_module(ModuleType("x"))
            _until_interrupted()
        finally:
            interrupts.ending()
    assert loaded


def test_more_signals_do_not_disturb_the_clean_up_of_a_start() -> None:
    ended: list[str] = []

    @contextmanager
    def part(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.15)
            ended.append(name)

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        try:
            with ExitStack() as undo:
                undo.enter_context(part("Ray"))
                undo.enter_context(part("engines"))
                os.kill(os.getpid(), signal.SIGTERM)
                _until_interrupted()
        finally:
            interrupts.ending()
    assert ended == ["engines", "Ray"]


def test_a_signal_at_the_exit_of_an_interrupted_process_does_not_change_its_code() -> None:
    script = """
import atexit, os, signal, sys
from nemo_rl.algorithms.launch import Interrupts
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def saved(root: Path, step: int, *checkpoints: int, **checkpointing: Any) -> str:
    cfg = CheckpointingConfig(checkpoint_dir=str(root), **checkpointing)
    manager = CheckpointManager(cfg)
    for number in checkpoints:
        manager.finalize_checkpoint(manager.init_tmp_checkpoint(number, {}))
    run: Any = SimpleNamespace(state=GRPOState(step=step), checkpointer=manager)
    return what_is_saved(run, cfg)


def test_an_interrupted_run_says_what_it_loses(tmp_path: Path) -> None:
    assert "after step 18: no checkpoint was written yet, 18 steps are lost; checkpointing.save_on_signal" in saved(
        tmp_path, 18
    )
    assert f"the newest checkpoint is {tmp_path}/step_17, 1 step is lost" in saved(tmp_path, 18, 17)
    assert f"all of it is in {tmp_path}/step_20" in saved(tmp_path, 20, 20)
    assert "nothing is saved" in saved(tmp_path, 20, enabled=False)


@pytest.mark.slow
def test_a_directory_is_one_runs_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    hold = f"""
import sys, time
from nemo_rl.utils.directory_lock import locked
with locked({str(folder)!r}, "logger.log_dir"):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with (
            pytest.raises(DirectoryInUse, match=rf"logger\.log_dir={folder}: another run .*process {process.pid} on"),
            locked(folder, "logger.log_dir"),
        ):
            raise AssertionError("it was given twice")
    finally:
        process.kill()
        process.wait()
    with locked(folder, "logger.log_dir"):
        pass


def test_a_directory_that_cannot_be_made_is_left_to_those_who_write_there() -> None:
    with locked("/dev/null/logs", "logger.log_dir"):
        pass
