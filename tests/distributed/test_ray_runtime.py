"""Starting Ray where its own patience is too short."""

import subprocess
from typing import Any

import psutil
import pytest
import ray

from nemo_rl.distributed import ray_runtime
from nemo_rl.distributed.ray_runtime import RayStartError, init_ray

LATE = "The current node timed out during startup. This could happen because"


def start_with(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> list[Any]:
    """Makes Ray's start fail as listed and then succeed; the calls that were made."""
    calls: list[Any] = []

    def start(**options: Any) -> None:
        calls.append(options)
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", start)
    return calls


def test_a_start_that_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [Exception(LATE)])
    init_ray(device="cpu", cpu_slots=3)
    assert [call["resources"] for call in calls] == [{"cpu_slot": 3.0}] * 2


def test_a_machine_that_never_gets_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [Exception(LATE)] * 9)
    with pytest.raises(RayStartError, match="is this machine overloaded"):
        init_ray(device="cpu")
    assert len(calls) == ray_runtime._START_ATTEMPTS


def test_what_a_late_start_left_running_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[bytes]] = []
    start_with(monkeypatch, [])
    succeed = ray.init

    def start(**options: Any) -> None:
        if not left:
            left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(LATE)
        succeed(**options)

    monkeypatch.setattr(ray, "init", start)
    other = subprocess.Popen(["sleep", "600"])
    try:
        init_ray(device="cpu")
        assert not psutil.pid_exists(left[0].pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_any_other_failure_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [ValueError("a mistake")] * 9)
    with pytest.raises(ValueError, match="a mistake"):
        init_ray(device="cpu")
    assert len(calls) == 1
