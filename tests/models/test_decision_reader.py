"""What an engine recorded reaches the results of its requests, or they fail; a model without experts is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_rl.config import load_master_config
from nemo_rl.models.generation.decisions import RecordedDecisionsError, Recording
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, GenerationSamplingParams
from nemo_rl.models.generation.vllm.request_state import DecisionReader
from nemo_rl.models.policy.model_config import UnsupportedModelError, check_replay, model_config

# Decoder layers 0 and 2 of three have experts.
ROUTES = Recording(layers=(0, 2), experts=4, per_token=2)
REQUEST = GenerationRequest("r", [1, 2, 3, 4], 3, GenerationSamplingParams(), record_from=2)
RESULT = GenerationResult("r", [5, 6, 7], [-1.0] * 3, "length")


def completed(recording: Recording, routed: Any = None, *, by_engine: bool = True, taken: Any = None) -> Any:
    async def rpc(method: str, *arguments: Any) -> list[Any]:
        return [[taken or {} for _ in arguments[0]]] if method == "nrl_take_decisions" else []

    async def complete() -> GenerationResult:
        reader = DecisionReader(rpc, recording, by_engine=by_engine)
        return await reader.complete(REQUEST, RESULT, SimpleNamespace(routed_experts=routed))

    return asyncio.run(complete())


def test_the_engines_own_routes_are_those_of_layers_with_experts_from_where_they_are_wanted() -> None:
    given = np.arange(6 * 3 * 2).reshape(6, 3, 2) % 4
    routes = completed(ROUTES, given).routes
    assert (routes.start, routes.experts.dtype) == (2, np.uint8)
    np.testing.assert_array_equal(routes.experts[:4], given[2:][:, [0, 2]])
    # Nothing computes the last token, and an engine may lose others.
    assert routes.valid.tolist() == [True] * 4 + [False] and not routes.experts[4].any()
    assert completed(ROUTES, given[:4]).routes.valid.tolist() == [True] * 2 + [False] * 3


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (None, "returned no routes for the 3 tokens of request r; policy.router_replay.enabled needs an engine"),
        (np.zeros((6, 2, 2)), r"returned routes \[6, 2, 2\] for 7 tokens"),
        (np.zeros((8, 3, 2)), r"returned routes \[8, 3, 2\] for 7 tokens"),
        (np.zeros((6, 2)), r"returned routes \[6, 2\] for 7 tokens"),
    ],
)
def test_an_engine_that_returns_no_routes_or_others_than_the_models_fails_the_request(routed: Any, said: str) -> None:
    with pytest.raises(RecordedDecisionsError, match=said):
        completed(ROUTES, routed)


def test_a_worker_that_recorded_nothing_fails_the_request() -> None:
    with pytest.raises(RecordedDecisionsError, match="returned no routes for the 3 tokens"):
        completed(ROUTES, by_engine=False)
    with pytest.raises(RecordedDecisionsError, match="recorded no sampling masks for the 3 tokens"):
        completed(Recording(masks=True, vocabulary=9), by_engine=False)


def test_a_dense_model_is_refused_before_anything_starts(tiny_model: Path, tiny_moe_model: Path) -> None:
    for model, dense in ((tiny_model, True), (tiny_moe_model, False)):
        cfg = load_master_config(None, [f"policy.model_name={model}", "policy.router_replay.enabled=true"]).policy
        if dense:
            with pytest.raises(UnsupportedModelError, match=r"\(a qwen3 model\) has no experts, so generation chooses"):
                check_replay(model_config(cfg), cfg)
        else:
            check_replay(model_config(cfg), cfg)
