"""Folders for an engine's sockets go with the processes that made them, however those end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from nemo_rl.models.generation.vllm import socket_folder

_MAKE = (
    "import sys, time; from nemo_rl.models.generation.vllm.socket_folder import make_socket_folder; "
    "print(make_socket_folder(), flush=True); time.sleep(60)"
)


def test_a_killed_process_leaves_its_folder_to_the_next_one_and_a_living_one_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(socket_folder.tempfile, "tempdir", None)
    monkeypatch.setattr(socket_folder, "_STALE_AFTER_S", 0.0)
    with (
        subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None and living.stdout is not None
        left, kept = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        (left / "socket").touch()
        killed.kill()
        killed.wait()
        time.sleep(0.05)
        own = socket_folder.make_socket_folder()
        assert own == socket_folder.make_socket_folder() and sorted(tmp_path.iterdir()) == sorted([kept, own])
        socket_folder.remove_socket_folder()
        socket_folder.remove_socket_folder()
        assert list(tmp_path.iterdir()) == [kept]
        living.kill()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_start_inside_put_their_temporary_files_there_and_the_rest_is_as_before(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before, environment = tempfile.gettempdir(), dict(os.environ)
    with socket_folder.temporary_files_in(tmp_path), multiprocessing.get_context(method).Pool(1) as pool:
        seen = pool.apply(tempfile.gettempdir)
        compiled = pool.apply(os.getenv, ("TORCHINDUCTOR_CACHE_DIR",))
    assert seen == str(tmp_path) and compiled is not None and compiled.startswith(f"{before}/torchinductor_")
    assert tempfile.gettempdir() == before and dict(os.environ) == environment
