"""Routes and sampling masks of a response are those of the engine's steps that drew it, whatever happened to it."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.generation.decisions import NO_MASKS, RouteRecord, SamplingMasks, TokenRoutes, route_dtype
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.request_state import ResumableRequest
from tests.models.engine_simulation import EXPERTS, PER_TOKEN, VOCABULARY, Drawn, Engine, Routes

SCHEDULES = int(os.environ.get("NRL_SCHEDULES", "100"))


def rows(routes: TokenRoutes) -> list[Routes]:
    return [tuple(tuple(layer) for layer in position) for position in routes.experts.tolist()]


def mask_rows(masks: SamplingMasks) -> list[list[int]]:
    ends = np.cumsum(masks.counts)
    return [masks.ids[end - count : end].tolist() for end, count in zip(ends, masks.counts, strict=True)]


@pytest.mark.slow
def test_every_token_has_the_routes_and_mask_of_the_step_that_drew_it_in_random_schedules() -> None:
    cut, unknown = 0, 0
    for seed in range(SCHEDULES):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        engines = [Engine(draw, caches=draw.random() < 0.5) for _ in range(2)]
        stem = [draw.randrange(VOCABULARY) for _ in range(9)]
        ways = {
            name: ResumableRequest(
                GenerationRequest(name, stem + [draw.randrange(VOCABULARY)] * draw.randint(0, 3), 8, record_from=0),
                draw.choice(["continue", "continue", "redo_turn"]),
            )
            for name in "abc"
        }
        pieces: dict[str, tuple[int, GenerationRequest]] = {}
        drawn: dict[str, list[Drawn]] = {name: [] for name in ways}
        open_ways, steps = dict(ways), 0
        while open_ways:
            for name, way in open_ways.items():
                if name not in pieces:
                    pieces[name] = draw.randrange(2), way.next_request()
                    engines[pieces[name][0]].admit(pieces[name][1])
            # Calm at last, so that every schedule ends.
            calm, steps = steps > 30, steps + 1
            for number, engine in enumerate(engines):
                engine.step()
                for name, (place, asked) in list(pieces.items()):
                    running = engine.running.get(asked.request_id) if place == number else None
                    if running is None:
                        continue
                    fate = draw.random()
                    if running.ended:
                        result = engine.take(asked.request_id, asked, "length")
                        del pieces[name]
                        drawn[name] += own_draws(engine, asked, result)
                        unknown += check(open_ways.pop(name).finish(result), asked, drawn[name], engines, stem)
                    elif fate < 0.1 and not calm:
                        engine.preempt(asked.request_id)
                    elif fate < 0.16 and not calm:
                        cut, lost = cut + 1, draw.random() < 0.4
                        result = engine.take(asked.request_id, asked, "abort")
                        way = open_ways[name]
                        kept = way.kept
                        way.cut(None if lost else result)
                        del pieces[name]
                        # Its tokens count if they were kept: neither if the engine died, nor if the turn is redone.
                        if way.kept > kept:
                            drawn[name] += own_draws(engine, asked, result)
                        if way.complete:
                            check(open_ways.pop(name).as_it_is(0), asked, drawn[name], engines, stem)
    assert cut > SCHEDULES and unknown == 0


def own_draws(engine: Engine, asked: GenerationRequest, result: GenerationResult) -> list[Drawn]:
    return [engine.draws[asked.request_id, len(asked.prompt_ids) + n] for n in range(len(result.token_ids))]


def check(
    whole: GenerationResult, asked: GenerationRequest, drawn: list[Drawn], engines: list[Engine], stem: list[int]
) -> int:
    """Compares a response with the engines' logs; how many of its positions have no routes but its last."""
    assert whole.routes is not None and whole.masks is not None and len(drawn) == len(whole.token_ids)
    prompt = whole.routes.end - len(whole.token_ids)
    assert prompt >= len(stem)
    found = rows(whole.routes)
    assert [entry.routes for entry in drawn] == found[prompt - 1 : -1]
    assert [entry.kept for entry in drawn] == mask_rows(whole.masks)
    assert whole.routes.valid[prompt - 1 : -1].all() and not whole.routes.valid[-1]
    assert not whole.routes.experts[-1].any()
    # Of a prompt's tokens nothing was drawn: any computation of them will do, by whichever request.
    ids = [*asked.prompt_ids, *whole.token_ids][:prompt]
    for position in np.flatnonzero(whole.routes.valid[: prompt - 1]):
        before = tuple(ids[: position + 1])
        assert any(found[position] in engine.computed.get(before, ()) for engine in engines)
    return int((~whole.routes.valid[:-1]).sum())


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.booleans(), max_size=6)), max_size=6), st.integers(0, 14))
def test_a_record_keeps_what_it_knew_first_and_marks_what_it_does_not_know(
    added: list[tuple[int, list[bool]]], start: int
) -> None:
    record, expected = RouteRecord(), {}
    end = 0
    for number, (first, known) in enumerate(added):
        record.add(TokenRoutes(first, np.full((len(known), 2, 1), number + 1, np.uint8), np.array(known, bool)))
        expected = {first + n: number + 1 for n, is_known in enumerate(known) if is_known} | expected
        end = max(end, first + len(known)) if known else end
    routes = record.since(start, 20)
    if not any(known for _, known in added):
        assert routes is None
        return
    assert routes is not None and routes.end == max(start, 20)
    assert {start + n for n in np.flatnonzero(routes.valid)} == {p for p in expected if p >= start}
    assert all(routes.experts[p - start].tolist() == [[v], [v]] for p, v in expected.items() if p >= start)
    assert not routes.experts[~routes.valid].any()
    assert record.known_until(start) == next((p for p in range(start, end) if p not in expected), max(start, end))


def test_routes_of_another_shape_are_refused() -> None:
    record = RouteRecord()
    record.add(TokenRoutes(0, np.zeros((2, 3, 2), np.uint8), np.ones(2, bool)))
    with pytest.raises(ValueError, match="4 layers x 2 experts, the positions before 3 x 2"):
        record.add(TokenRoutes(2, np.zeros((2, 4, 2), np.uint8), np.ones(2, bool)))


def test_a_result_that_is_cut_keeps_the_routes_and_masks_of_the_tokens_that_stay() -> None:
    routes = TokenRoutes(1, np.arange(6, dtype=np.uint8).reshape(6, 1, 1), np.array([True] * 5 + [False]))
    masks = SamplingMasks.of([np.array([1, 5]), None, np.array([7])])
    cut = GenerationResult("a", [5, 6, 7], [0.0] * 3, "abort", routes=routes, masks=masks).first(1)
    assert cut.routes is not None and cut.routes.end == 5 and cut.routes.valid.all()
    assert cut.masks is not None and mask_rows(cut.masks) == [[1, 5]]
    assert mask_rows(NO_MASKS.then(cut.masks).then(masks)) == [[1, 5], [1, 5], [], [7]]


def test_routes_take_one_byte_up_to_256_experts() -> None:
    assert [route_dtype(count).name for count in (EXPERTS, 256, 257, PER_TOKEN)] == ["uint8", "uint8", "int16", "uint8"]
