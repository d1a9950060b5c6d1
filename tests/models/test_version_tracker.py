"""Versions of tokens while an engine takes its time, or fails, to be told of new weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.vllm.request_state import VersionTracker


class Engine:
    """Labels tokens itself; is told of a version once it may go on."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.fails = False

    async def update_weight_version(self, version: str) -> None:
        await self.may_go_on.wait()
        if self.fails:
            raise ConnectionError("planted")


def test_the_version_is_that_of_the_loaded_weights_while_the_engine_is_told() -> None:
    async def story() -> None:
        engine = Engine()
        tracker = VersionTracker(engine)
        tracker.begin("before")
        told = asyncio.ensure_future(tracker.publish(3, kv_recomputed=False))
        await asyncio.sleep(0)
        assert tracker.version == 3
        tracker.begin("meanwhile")
        engine.may_go_on.set()
        await told
        completion: Any = SimpleNamespace(token_ids=[1, 2], weight_versions=[SimpleNamespace(version="3", start=0)])
        assert [(s.version, s.mixed_kv) for s in tracker.end("before", completion)] == [(3, True)]
        assert [(s.version, s.mixed_kv) for s in tracker.end("meanwhile", completion)] == [(3, False)]
        engine.fails = True
        with pytest.raises(ConnectionError):
            await tracker.publish(4, kv_recomputed=True)
        assert tracker.version == 4

    asyncio.run(story())
