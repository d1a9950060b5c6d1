"""The scheduler's actor around its core: what happens when its timer fails, and where it runs."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.time_sharing.agents import scheduler_actor
from nemo_rl.time_sharing.agents.actors import start_scheduler
from nemo_rl.time_sharing.agents.scheduler_actor import SchedulerActor
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Reply


def test_a_scheduler_whose_timer_fails_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def disk_full(now: float) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scheduler_actor.os, "_exit", end)
    caplog.set_level(logging.CRITICAL)
    actor = SchedulerActor(str(tmp_path), 1, 2)
    monkeypatch.setattr(actor._core, "tick", disk_full)
    assert ended.wait(60.0)
    actor.stop()
    assert codes == [1]
    assert "reason=timer_failed" in caplog.text and "No space left on device" in caplog.text


def test_an_unforeseen_error_of_one_tick_costs_that_tick_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor = SchedulerActor(str(tmp_path), 1, 2)
    tick, outcomes, gone_on = actor._core.tick, iter([KeyError("planted"), KeyError("planted")]), threading.Event()

    def sometimes(now: float) -> float:
        error = next(outcomes, None)
        if error is not None:
            raise error
        gone_on.set()
        return tick(now)

    monkeypatch.setattr(scheduler_actor.os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    monkeypatch.setattr(actor._core, "tick", sometimes)
    assert gone_on.wait(60.0)
    actor.stop()
    assert "in_a_row=2" in caplog.text


def test_a_message_that_ray_is_slow_to_deliver_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, begun = threading.Event(), threading.Event()

    def tell(*message: Any) -> None:
        begun.set()
        assert slow.wait(60.0)
        raise ConnectionError("planted")

    monkeypatch.setattr(scheduler_actor, "_tell_agent", tell)
    actor = SchedulerActor(str(tmp_path), 1, 2)
    actor._notify(Reply("p", 1, 1, True))
    assert begun.wait(60.0)
    assert actor.describe()["pipelines"] == {}
    slow.set()
    actor._messages.submit(int).result(timeout=30.0)
    actor.stop()
    assert "message_to_p=failed reason=ConnectionError: planted" in caplog.text


class Remote:
    """Stands in for `ray.remote`: keeps the options of the one actor that is started."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def __call__(self, kind: type) -> Remote:
        return self

    def options(self, **options: Any) -> Remote:
        self.kept = options
        return self

    def remote(self, *arguments: Any) -> Remote:
        return self

    @property
    def serves(self) -> Remote:
        return self


class Context:
    def get_node_id(self) -> str:
        return "ab" * 28


def test_the_scheduler_stays_on_the_node_that_has_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote()
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "get", lambda _, timeout: (str(tmp_path), Pool(1, 2)))
    start_scheduler(tmp_path, Pool(1, 2))
    strategy = remote.kept["scheduling_strategy"]
    assert strategy.node_id == "ab" * 28 and not strategy.soft
