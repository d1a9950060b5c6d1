"""vLLM's runner as the recorder sees it, driven through random schedules: prompts in parts, cached prefixes, requests
that are preempted, computed again, cut short or lost with their engine.

Routes and filters of every computation are drawn anew, so that routes of the wrong computation are seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.recorder import REQUEST, StepRecorder, unpacked

LAYERS, EXPERTS, PER_TOKEN, VOCABULARY, BLOCK, BLOCKS = 3, 8, 2, 12, 4, 400
Routes = tuple[tuple[int, ...], ...]


class Router:
    """A router as vLLM has it."""

    top_k, global_num_experts = PER_TOKEN, EXPERTS

    def __init__(self) -> None:
        self.capture: Callable[[torch.Tensor], None] = lambda experts: None

    def set_capture_fn(self, capture: Callable[[torch.Tensor], None]) -> None:
        self.capture = capture


class Model(torch.nn.Module):
    """Layers with routers."""

    def __init__(self, routers: list[Router]) -> None:
        super().__init__()
        for number, router in enumerate(routers):
            layer = torch.nn.Module()
            layer.router = router
            self.add_module(str(number), layer)


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
    """One engine with its recorder. `draws`: the last draw of each (key, position) that the engine kept. `computed`:
    all routes that a position after those very tokens was ever computed with.
    """

    random: random.Random
    caches: bool
    draws: dict[tuple[str, int], Drawn] = field(default_factory=dict)
    computed: dict[tuple[int, ...], list[Routes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.routers = [Router() for _ in range(LAYERS)]
        self.running: dict[str, Running] = {}
        self.free = list(range(1, BLOCKS))
        self.cached: dict[tuple[int, ...], int] = {}
        self.sampler = SimpleNamespace(forward=self._draw)
        self.runner = SimpleNamespace(
            get_model=lambda: Model(self.routers),
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
        while self.caches and not running.blocks and running.computed == 0:
            hit = [
                self.cached[tuple(running.tokens[:end])]
                for end in range(BLOCK, len(running.tokens), BLOCK)
                if tuple(running.tokens[:end]) in self.cached
            ]
            running.blocks, running.computed = hit, BLOCK * len(hit)
            break
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
        for router, experts in zip(self.routers, self._experts, strict=True):
            router.capture(experts)

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
