"""Versions of tokens while an engine takes its time, or fails, to be told of new weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import VersionSpan
from nemo_rl.models.generation.vllm.request_state import VersionTracker, new_tokens


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


def test_new_tokens_are_those_not_passed_on_with_their_logprobs_and_versions() -> None:
    # Two entries a position: the sampled token is the first of each.
    flat = SimpleNamespace(logprobs=[-0.1, -9.0, -0.2, -9.0, -0.3, -9.0], start_indices=[0, 2, 4])
    completion: Any = SimpleNamespace(token_ids=[7, 8, 9], logprobs=flat)
    spans = (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3))
    new = new_tokens("r", completion, spans, 1, 3)
    assert new is not None and (new.token_ids, new.logprobs, new.spans) == ([8, 9], [-0.2, -0.3], spans)
    held_back = new_tokens("r", completion, spans, 1, 2)
    assert held_back is not None and (held_back.token_ids, held_back.spans) == ([8], spans[:1])
    assert new_tokens("r", completion, spans, 2, 2) is None
