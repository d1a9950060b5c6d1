"""Routes and sampling masks of a response are those of the engine's steps that drew it, whatever happened to it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.generation.decisions import NO_MASKS, RouteRecord, SamplingMasks, TokenRoutes, route_dtype
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.recorder import REQUEST, StepRecorder, unpacked
from nemo_rl.models.generation.vllm.request_state import ResumableRequest

SCHEDULES = int(os.environ.get("NRL_SCHEDULES", "100"))
LAYERS, EXPERTS, PER_TOKEN, VOCABULARY, BLOCK, BLOCKS = 3, 8, 2, 12, 4, 400
Routes = tuple[tuple[int, ...], ...]


@dataclass
class Running:
    """A request in an engine."""

    key: str
    tokens: list[int]
    prompt: int
    limit: int
    blocks: list[int]
    computed: int = 0

    @property
    def ended(self) -> bool:
        return len(self.tokens) - self.prompt >= self.limit


@dataclass
class Drawn:
    """What the engine's own log says of a drawn token."""

    routes: Routes
    kept: list[int]


@dataclass
class Engine:
    """vLLM's runner as its recorder sees it: prompts in parts, cached prefixes, requests that are preempted, computed
    again, cut short or lost. Routes and filters of every computation are drawn again, so that those of the wrong one
    are seen. `draws`: the last draw of each (key, position) that the engine kept. `computed`: all routes that a
    position after those very tokens was ever computed with.
    """

    random: random.Random
    caches: bool
    draws: dict[tuple[str, int], Drawn] = field(default_factory=dict)
    computed: dict[tuple[int, ...], list[Routes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.captures: list[Callable[[torch.Tensor], None]] = []
        routers = [
            SimpleNamespace(global_num_experts=EXPERTS, set_capture_fn=self.captures.append) for _ in range(LAYERS)
        ]
        self.running: dict[str, Running] = {}
        self.free = list(range(1, BLOCKS))
        self.cached: dict[tuple[int, ...], int] = {}
        self.sampler = SimpleNamespace(forward=self._draw)
        self.runner = SimpleNamespace(
            get_model=lambda: SimpleNamespace(modules=lambda: [SimpleNamespace(router=router) for router in routers]),
            sampler=SimpleNamespace(topk_topp_sampler=self.sampler),
            execute_model=self._execute,
            requests={},
            input_batch=SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(0, np.int32)),
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(enable_prefix_caching=self.caches, block_size=BLOCK)
            ),
            kv_cache_config=SimpleNamespace(num_blocks=BLOCKS),
        )
        self.recorder = StepRecorder(self.runner, routes=True, masks=True)

    def admit(self, request: GenerationRequest) -> None:
        """A request comes; what of its prompt is cached is not computed."""
        self.running[request.request_id] = Running(
            request.request_id, list(request.prompt_ids), len(request.prompt_ids), request.max_new_tokens, []
        )

    def _allocate(self, running: Running) -> None:
        if self.caches and not running.blocks and running.computed == 0:
            hit = [
                self.cached[tuple(running.tokens[:end])]
                for end in range(BLOCK, len(running.tokens), BLOCK)
                if tuple(running.tokens[:end]) in self.cached
            ]
            running.blocks, running.computed = hit, BLOCK * len(hit)
        while len(running.blocks) * BLOCK < len(running.tokens):
            running.blocks.append(self.free.pop(0))

    def step(self) -> None:
        """Schedules some of the requests, each with some of its tokens, in any order."""
        names = [name for name, running in self.running.items() if not running.ended and self.random.random() < 0.8]
        self.random.shuffle(names)
        counts: dict[str, int] = {}
        for name in names:
            running = self.running[name]
            self._allocate(running)
            left = len(running.tokens) - running.computed
            counts[name] = self.random.choice([left, left, self.random.randint(1, left)])
            # Blocks are in the cache from the moment they are scheduled: others of the same step hit them.
            for end in range(BLOCK, running.computed + counts[name] + 1, BLOCK):
                self.cached.setdefault(tuple(running.tokens[:end]), running.blocks[end // BLOCK - 1])
        self.runner.requests = {
            name: SimpleNamespace(
                num_tokens=len(running.tokens),
                sampling_params=SimpleNamespace(extra_args={REQUEST: running.key}),
                block_ids=(running.blocks,),
            )
            for name, running in self.running.items()
        }
        self.runner.input_batch.req_ids = names
        self.runner.input_batch.num_computed_tokens_cpu = np.array([self.running[name].computed for name in names])
        self._counts = counts
        self.runner.execute_model(
            SimpleNamespace(total_num_scheduled_tokens=sum(counts.values()), num_scheduled_tokens=counts)
        )
        if names:
            self.sampler.forward()

    def _execute(self, _: Any) -> None:
        rows = sum(self._counts.values())
        if not rows:
            return
        # Rows after the tokens are padding.
        self._experts = torch.rand(LAYERS, rows + 3, EXPERTS).topk(PER_TOKEN).indices
        for capture, experts in zip(self.captures, self._experts, strict=True):
            capture(experts)

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.rand(len(self._counts), VOCABULARY) < self.random.choice([0.3, 0.8, 1.1])
        kept[torch.arange(len(kept)), torch.randint(VOCABULARY, (len(kept),))] = True
        row, computed = 0, self._experts.transpose(0, 1).tolist()
        for number, (name, count) in enumerate(self._counts.items()):
            running = self.running[name]
            parts = [tuple(tuple(layer) for layer in computed[row + n]) for n in range(count)]
            for offset, routes in enumerate(parts):
                self.computed.setdefault(tuple(running.tokens[: running.computed + offset + 1]), []).append(routes)
            row, running.computed = row + count, running.computed + count
            if running.computed < len(running.tokens):
                continue
            ids = kept[number].nonzero().flatten().tolist()
            self.draws[name, len(running.tokens)] = Drawn(parts[-1], [] if len(ids) == VOCABULARY else ids)
            running.tokens.append(self.random.choice(ids))
        return torch.zeros(0), torch.where(kept, 0.0, float("-inf"))

    def preempt(self, name: str) -> None:
        """Takes the KV cache of a request away; asynchronous scheduling forgets its newest token, too."""
        running = self.running[name]
        if len(running.tokens) > running.prompt and self.random.random() < 0.4:
            running.tokens.pop()
        running.computed, running.blocks = 0, []

    def take(self, name: str, request: GenerationRequest, reason: Any) -> GenerationResult:
        """A request ends; the newest token may not have got out."""
        running = self.running.pop(name)
        if reason == "abort" and len(running.tokens) > running.prompt and self.random.random() < 0.3:
            running.tokens.pop()
        tokens = running.tokens[running.prompt :]
        taken = self.recorder.take(name, request.record_from or 0, running.prompt, len(tokens))
        routes, masks = unpacked(taken)
        return GenerationResult(name, tokens, [0.0] * len(tokens), reason, routes=routes, masks=masks)


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
