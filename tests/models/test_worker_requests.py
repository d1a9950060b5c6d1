"""What a shard gives of requests that are released and aborted, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationSamplingParams, NewTokens
from nemo_rl.models.generation.vllm import worker as worker_module
from nemo_rl.models.generation.vllm.engine_processes import EngineSpec
from nemo_rl.models.generation.vllm.request_state import ResultBuffer, VersionTracker
from nemo_rl.models.generation.vllm.worker import VllmGenerationWorker


def _output(token_ids: list[int], reason: str | None = None) -> Any:
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(token_ids), start_indices=list(range(len(token_ids))))
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=reason, weight_versions=None)]
    )


@pytest.mark.parametrize(("streams", "kept"), [(True, [5, 6, 7]), (False, [])])
def test_a_request_that_is_released_while_it_ends_keeps_the_tokens_that_were_passed_on(
    streams: bool, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "sampling_params", lambda *_, **__: None)
    shard = VllmGenerationWorker(EngineSpec({}, seeds_requests=True, max_model_len=64))

    async def generate(*_: object) -> AsyncIterator[Any]:
        yield _output([5, 6])
        # The engine has dropped the aborted request already, so that it looks like one without a token.
        await shard.release(["r"])
        yield _output([5, 6, 7], "abort")

    async def abort(ids: list[str]) -> None:
        assert ids == ["r"]

    shard._engine = SimpleNamespace(
        generate=generate, abort=abort, output_processor=SimpleNamespace(request_states={}, tokenizer=None)
    )
    shard._versions = VersionTracker(shard._engine, own=True)
    request = GenerationRequest("r", [1, 2], 8, GenerationSamplingParams(), 3, streams=streams)

    async def run() -> Any:
        buffer = ResultBuffer()
        shard._tasks["r"] = asyncio.current_task()  # type: ignore[assignment]
        return await shard._generate(request, buffer), buffer.take()

    result, passed_on = asyncio.run(run())
    assert result.token_ids == kept and result.finish_reason == "abort"
    assert [new.token_ids for new in passed_on if isinstance(new, NewTokens)] == ([[5, 6]] if streams else [])
