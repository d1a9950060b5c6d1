"""A forked engine holds none of its actor's connections: whoever is at their other end sees when the actor ends."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace

import pytest

from nemo_rl.models.generation.vllm import forked


@pytest.mark.parametrize(("answer", "may"), [(None, True), (3, True), (0, False), (100, False)])
def test_a_process_that_has_touched_the_gpu_driver_is_not_forked(
    answer: int | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 is the driver's answer in a process that has not; a machine without GPUs may have no driver."""

    def load(name: str) -> SimpleNamespace:
        if answer is None:
            raise OSError(name)
        return SimpleNamespace(cuDeviceGetCount=lambda count: answer)

    monkeypatch.setattr(forked.ctypes, "CDLL", load)
    assert forked.may_fork() is may


@pytest.mark.parametrize("forking", [True, False])
def test_the_fork_of_an_engine_lets_go_of_connections_and_other_forks_keep_them(
    forking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_forking", forking)
    ours, peer = socket.socketpair()
    up, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"up")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(up, 2) == b"up"
        ours.close()
        peer.settimeout(0.5)
        if forking:
            assert peer.recv(1) == b""
        else:
            with pytest.raises(TimeoutError):
                peer.recv(1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        peer.close()
        for end in (up, tell):
            os.close(end)
