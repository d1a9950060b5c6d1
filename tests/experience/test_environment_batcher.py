"""How conversations are gathered into calls of an environment: each once, as many at a time as it allows."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import EnvConfig
from nemo_rl.environments.environment_registry import calls_at_once, environment_settings, section_of
from nemo_rl.environments.interfaces import EnvironmentFailure, EnvironmentInterface, EnvironmentReturn
from nemo_rl.experience import environment_batcher
from nemo_rl.experience.environment_batcher import (
    EnvironmentBatcher,
    EnvironmentHandle,
    environment_lines,
    environment_metrics_of_step,
)


class Echo:
    """Rewards a conversation with its number and keeps what it was called with."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls: list[list[int]] = []
        self.most_at_once = self._running = 0
        self._lock = threading.Lock()

    def step(self, logs: list[Any], metadata: list[int]) -> EnvironmentReturn[int]:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.calls.append(list(metadata))
        time.sleep(self.seconds)
        with self._lock:
            self._running -= 1
        if any(number < 0 for number in metadata):
            raise ValueError("negative")
        size = len(metadata)
        rewards = torch.tensor(metadata, dtype=torch.float32)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * size, metadata, None, rewards, torch.ones(size)
        )


class SlowEcho(Echo):
    """The same as a coroutine."""

    async def step(self, logs: list[Any], metadata: list[int]) -> EnvironmentReturn[int]:  # type: ignore[override]
        await asyncio.sleep(0.01)
        return super().step(logs, metadata)


async def _judged(handle: EnvironmentHandle, numbers: list[int], apart: float = 0.0) -> list[Any]:
    batcher = EnvironmentBatcher(handle)

    async def one(position: int, number: int) -> float:
        await asyncio.sleep(apart * position)
        return (await batcher.step([{"role": "assistant", "content": ""}], number)).reward

    return await asyncio.gather(*(one(*pair) for pair in enumerate(numbers)), return_exceptions=True)


@settings(max_examples=15)
@given(
    count=st.integers(1, 60),
    replicas=st.integers(1, 3),
    calls=st.integers(1, 4),
    max_batch=st.none() | st.integers(1, 7),
    apart=st.sampled_from([0.0, 0.0005]),
)
def test_every_conversation_is_judged_once_within_the_limits(
    count: int, replicas: int, calls: int, max_batch: int | None, apart: float
) -> None:
    environments = tuple(Echo(0.005) for _ in range(replicas))
    handle = EnvironmentHandle("echo", environments, 60.0, calls, max_batch)
    assert asyncio.run(_judged(handle, list(range(count)), apart)) == list(range(count))
    batches = [batch for environment in environments for batch in environment.calls]
    assert sorted(number for batch in batches for number in batch) == list(range(count))
    assert all(environment.most_at_once <= calls for environment in environments)
    assert max_batch is None or max(map(len, batches)) <= max_batch


def test_what_waits_is_one_call_or_as_many_as_its_size_asks_for() -> None:
    together, alone = Echo(0.05), Echo(0.05)
    asyncio.run(_judged(EnvironmentHandle("echo", (together,), 60.0, 4), list(range(64))))
    asyncio.run(_judged(EnvironmentHandle("echo", (alone,), 60.0, 64, max_batch=1), list(range(64))))
    assert [len(batch) for batch in together.calls] == [64]
    assert [len(batch) for batch in alone.calls] == [1] * 64 and alone.most_at_once > 4


def test_what_comes_while_a_call_runs_goes_together() -> None:
    environment = Echo(0.3)
    asyncio.run(_judged(EnvironmentHandle("echo", (environment,), 60.0), list(range(20)), apart=0.01))
    first, *others = environment.calls
    assert len(others) == 1 and first + others[0] == list(range(20))


def test_one_by_one_leaves_room_for_those_that_come_later() -> None:
    environment = Echo(5.0)

    async def come() -> int:
        batcher = EnvironmentBatcher(EnvironmentHandle("echo", (environment,), 60.0, 64))
        steps = []
        for number in range(200):
            steps.append(asyncio.ensure_future(batcher.step([], number)))
            await asyncio.sleep(0.002)
        running = len(environment.calls)
        for step in steps:
            step.cancel()
        return running

    environment.seconds = 1.0
    assert 1 < asyncio.run(come()) < 32


def test_a_failed_call_fails_those_that_were_in_it_and_no_others() -> None:
    handle = EnvironmentHandle("echo", (Echo(),), 60.0, calls=4, max_batch=1)
    found = asyncio.run(_judged(handle, [1, -2, 3]))
    assert found[0] == 1.0 and found[2] == 3.0
    assert isinstance(found[1], EnvironmentFailure) and "echo raised on 1 conversations" in str(found[1])


def test_a_coroutine_of_a_plain_object_is_awaited() -> None:
    assert asyncio.run(_judged(EnvironmentHandle("echo", (SlowEcho(),), 60.0, 8), [1, 2, 3])) == [1.0, 2.0, 3.0]


def test_a_cancelled_conversation_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Echo()

    async def cancel_one() -> None:
        batcher = EnvironmentBatcher(EnvironmentHandle("echo", (environment,), 60.0))
        gone, kept = (asyncio.ensure_future(batcher.step([], number)) for number in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await kept

    asyncio.run(cancel_one())
    assert environment.calls == [[2]]


def test_the_queue_is_shown_while_it_is_full_and_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_batcher, "_queues", {})
    lines = []

    async def watched() -> None:
        judging = asyncio.ensure_future(_judged(EnvironmentHandle("slow", (Echo(0.2),), 60.0, max_batch=3), [1] * 8))
        await asyncio.sleep(0.1)
        lines.append(environment_lines())
        await judging

    asyncio.run(watched())
    assert lines == ["environment slow: 5 conversations wait, 1 calls run, the oldest for 0 s"]
    assert environment_lines() == ""
    measured = environment_metrics_of_step()
    assert measured["slow/calls"] == 3 and measured["slow/conversations_per_call"] == pytest.approx(8 / 3)
    assert measured["slow/call_s"] >= 0.2 and measured["slow/wait_s"] > 0
    assert environment_metrics_of_step() == {}


class Patient(EnvironmentInterface):
    """A user's environment whose step waits."""

    async def step(self, message_log_batch: Any, metadata: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


class Quick(Patient):
    """One whose step does not."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "keys", "calls"),
    [
        ("Patient", {}, 64),
        ("Quick", {}, 1),
        ("Quick", {"max_concurrency": 7}, 7),
        ("Patient", {"max_concurrency": 2}, 2),
    ],
)
def test_coroutines_run_side_by_side_unless_told_otherwise(name: str, keys: dict[str, int], calls: int) -> None:
    own = {"class": f"{__name__}.{name}", "mine": 3, "replicas": 2, "max_batch": 5}
    env = EnvConfig.read({"theirs": {**own, **keys}})
    section = section_of("theirs", env)
    assert calls_at_once("theirs", section) == calls
    assert environment_settings(section, "theirs") == {"mine": 3}
    handle = EnvironmentHandle.of("theirs", (object(), object()), env)  # type: ignore[arg-type]
    assert (handle.calls, handle.max_batch, len(handle.replicas)) == (calls, 5, 2)


def test_built_in_environments_are_replicated_and_never_shared_by_threads() -> None:
    assert EnvConfig.read({"math": {"replicas": 3}}).math.replicas == 3
    with pytest.raises(ValueError, match="max_concurrency"):
        EnvConfig.read({"math": {"max_concurrency": 3}})
