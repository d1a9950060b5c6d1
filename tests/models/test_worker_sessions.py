"""When a shard stands still around a sync session: no step runs while layers are taken apart or weights partly new."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.vllm.engine_processes import EngineSpec
from nemo_rl.models.generation.vllm.worker import VllmGenerationWorker


class Shard(VllmGenerationWorker):
    """A worker without an engine; `calls` are those that its engine and ranks got, of which `fails` raises."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(EngineSpec({}))
        self.calls: list[str] = []
        self.fails = fails
        self._memory: Any = SimpleNamespace(asleep=set(), holds_group=False)
        self._versions = SimpleNamespace(version=0, publish=self._noted("publish"))
        self._engine = SimpleNamespace(
            errored=False, pause_generation=self._noted("pause"), resume_generation=self._noted("resume")
        )

    def _noted(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            self.calls.append(name)

        return call

    async def _rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        step = str(args[0]) if method == "nrl_receiver" else method.removeprefix("nrl_").removesuffix("_sync")
        self.calls.append(step)
        if step == self.fails:
            raise RuntimeError(f"{step} failed")
        return []

    def session(self, *, staged: bool = False, windows: int = 1, ident: str = "one") -> None:
        """A session from begin to finish, or to its abort if something fails."""

        async def steps() -> None:
            try:
                await self.begin_sync({"id": ident, "version": 1, "staged": staged}, [{}], 1.0)
                for _ in range(windows):
                    await self.receive_window({}, 1.0)
                await self.finish_sync(1, 1.0)
            except RuntimeError:
                await self.abort_sync(ident)

        asyncio.run(steps())


@pytest.mark.parametrize(
    ("staged", "calls"),
    [
        (False, ["pause", "begin", "receive", "finish", "publish", "resume"]),
        (True, ["begin", "receive", "pause", "finish", "publish", "resume"]),
    ],
)
def test_requests_stand_still_before_a_load_begins(staged: bool, calls: list[str]) -> None:
    shard = Shard()
    shard.session(staged=staged)
    assert shard.calls == calls and not shard._weights_lost


@pytest.mark.parametrize(
    ("fails", "staged", "lost"),
    [
        ("begin", False, False),
        ("begin", True, False),
        ("receive", False, True),
        ("receive", True, False),
        ("finish", False, True),
        ("finish", True, True),
    ],
)
def test_a_failed_session_lets_requests_go_on_where_no_weight_was_touched(fails: str, staged: bool, lost: bool) -> None:
    shard = Shard(fails)
    shard.session(staged=staged)
    assert shard._weights_lost == lost
    stands = shard.calls.count("pause") - shard.calls.count("resume")
    assert stands == lost, shard.calls
    # What was lost stays lost through a session that touches nothing, and the next whole one brings it back.
    shard.fails = "begin"
    shard.session(ident="two")
    assert shard._weights_lost == lost
    assert (shard.calls.count("pause") - shard.calls.count("resume") > 0) == lost
    shard.fails = ""
    shard.session(ident="three")
    assert not shard._weights_lost and shard.calls.count("pause") == shard.calls.count("resume")


def test_a_session_that_is_refused_leaves_the_open_one_as_it_was() -> None:
    shard = Shard()

    async def steps() -> None:
        await shard.begin_sync({"id": "one", "version": 1}, [{}], 1.0)
        shard.fails = "begin"
        with pytest.raises(RuntimeError):
            await shard.begin_sync({"id": "two", "version": 1}, [{}], 1.0)
        await shard.abort_sync("two")
        await shard.receive_window({}, 1.0)
        await shard.finish_sync(1, 1.0)

    asyncio.run(steps())
    assert shard.calls[-2:] == ["publish", "resume"] and shard.calls.count("pause") == 1
