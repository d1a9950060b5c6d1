"""Scores of prompts stay the arrays that an engine sent, and are what vLLM's own lists of them say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, LikelyNext
from nemo_rl.models.generation.vllm.request_state import keeping_arrays, sampling_params, scored

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def _likely(prepared: Callable[[Any], Any], length: int, k: int) -> LikelyNext:
    """What comes of one prompt by the output side of vLLM, without an engine."""
    import torch
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    engine = prepared(SimpleNamespace(output_processor=OutputProcessor(None, log_stats=False)))
    request = GenerationRequest("sample", [*range(length)], 1, top_tokens=k)
    asked = sampling_params(request, 1, seeded=False, stop_token_ids=[], bad_words=None)
    engine.output_processor.add_request(
        EngineCoreRequest("sample-0", request.prompt_ids, None, asked, None, 0.0, None, None, None, external_req_id=""),
        None,
    )
    draws = torch.Generator().manual_seed(length)

    def part(positions: int) -> LogprobsTensors:
        ids = torch.randint(0, 1000, (positions, k + 1), generator=draws, dtype=torch.int32)
        return LogprobsTensors(ids, torch.randn(positions, k + 1, generator=draws), torch.ones(positions))

    *_, last = part(1), part(1)
    drawn = LogprobsLists(last[0].numpy(), last[1].numpy(), last[2].numpy())
    output = EngineCoreOutput(
        "sample-0", [7], drawn, part(length - 1) if length > 1 else None, finish_reason=FinishReason.LENGTH
    )
    (final,) = engine.output_processor.process_outputs([output]).request_outputs
    found = scored(GenerationResult("sample", [7], [0.0], "length"), final, k).likely
    assert found is not None
    if prepared is keeping_arrays:
        assert isinstance(final.prompt_logprobs.logprobs, np.ndarray)
    return found


@pytest.mark.parametrize(("length", "k"), [(1, 5), (2, 5), (300, 5), (300, 0)])
def test_scores_that_stay_arrays_are_those_of_vllms_lists(length: int, k: int) -> None:
    kept, listed = _likely(keeping_arrays, length, k), _likely(lambda engine: engine, length, k)
    assert kept.ids.shape == (length, k) and kept.given.shape == (length,)
    assert np.array_equal(kept.given, listed.given)
    assert np.array_equal(kept.ids, listed.ids) and np.array_equal(kept.logprobs, listed.logprobs)
    assert (kept.ids.dtype, kept.logprobs.dtype) == (np.int32, np.float32)
