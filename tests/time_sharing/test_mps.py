"""The Multi-Process Service against a command that stands for NVIDIA's."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from nemo_rl.time_sharing.mps import MpsError, multi_process_service

# It leaves a daemon that holds what it was given for its output, as the real one may.
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then [ {start} = 0 ] || exit {start}; sleep 60 & echo $! > {folder}/daemon
  echo "gpus=$CUDA_VISIBLE_DEVICES" > {folder}/seen; exit 0; fi
read command; echo "$command" >> {folder}/commands
case "$command" in
  get_server_list) [ ! -f {folder}/clients ] || echo 17;;
  get_client_list*) cat {folder}/clients;;
  *) kill $(cat {folder}/daemon); exit {quit};;
esac
"""


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, start: int = 0, quit: int = 0) -> None:
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(CONTROL.format(folder=folder, start=start, quit=quit))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", "local")


def test_it_runs_inside_the_block_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch)
    with multi_process_service("on", several=True):
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert (tmp_path / "commands").read_text() == "get_server_list\nquit -t 5\n"


def test_clients_that_are_left_end_before_it_and_this_process_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(tmp_path, monkeypatch)
    monkeypatch.setattr("nemo_rl.time_sharing.mps._CLIENTS_S", 0)
    with subprocess.Popen(["sleep", "600"]) as client:
        with multi_process_service("on", several=True):
            (tmp_path / "clients").write_text(f"{os.getpid()}\n{client.pid}\n999999999\n")
        assert not psutil.pid_exists(client.pid)
    assert (tmp_path / "commands").read_text() == "get_server_list\nget_client_list 17\nquit -t 0\n"
    assert f"clients_killed pids=[{client.pid}]" in caplog.text


def test_the_service_sees_all_gpus_so_that_its_clients_numbers_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with multi_process_service("on", several=True):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (tmp_path / "seen").read_text() == "gpus=\n"


def test_what_ends_the_block_is_said_and_not_that_the_service_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(tmp_path, monkeypatch, quit=1)
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), multi_process_service("on", several=True):
        raise ZeroDivisionError
    assert "mps=killed" in caplog.text


@pytest.mark.slow
def test_a_service_that_does_not_answer_is_killed_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(tmp_path, monkeypatch)
    server = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("sleep") or "", server)
    (tmp_path / "nvidia-cuda-mps-control").write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then {server} 600 & echo $! > {tmp_path}/server; else exec sleep 600; fi\n'
    )
    monkeypatch.setattr("nemo_rl.time_sharing.mps._QUIT_S", 0.5)
    with multi_process_service("on", several=True):
        pid = int((tmp_path / "server").read_text())
        assert psutil.pid_exists(pid)
    assert "did not answer" in caplog.text
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("choice", "several", "start"), [("off", True, 0), ("auto", False, 0), ("auto", True, 3)])
def test_nothing_runs_where_it_is_not_wanted_or_auto_cannot_start_it(
    choice: str, several: bool, start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, start=start)
    with multi_process_service(choice, several=several) as runs:
        assert not runs and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not (tmp_path / "commands").exists()


def test_auto_runs_it_for_several_jobs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch)
    with multi_process_service("auto", several=True) as runs:
        assert runs and Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()


def test_it_is_refused_where_it_is_missing_or_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match="not on PATH"), multi_process_service("on", several=True):
        pass
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _install(tmp_path, monkeypatch, start=3)
    with pytest.raises(MpsError, match="ended with 3"), multi_process_service("on", several=True):
        pass
