"""What the stress run is made of: shards that move at random, a loader of sums, an environment that counts its steps.

Seeded by NRL_STRESS_SEED (which shards move, and when); bounded by the numbers below, which grow with NRL_STRESS_STEPS.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.experience.collector import Collector, CollectorParts
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.experience.rollout_source import LiveRollouts
from nemo_rl.experience.rollout_tasks import FailurePolicy, RefitPolicy, StallPolicy
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, RolloutRunner
from nemo_rl.experience.samplers import InOrder
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.time_sharing.history.prompt_checks import PromptChecks
from nemo_rl.utils.record_events import WaitBegun, WaitEnded
from tests.models.elastic_engines import Elastic

SEED = int(os.environ.get("NRL_STRESS_SEED", "1"))
STEPS = int(os.environ.get("NRL_STRESS_STEPS", "3"))
SHARDS, PROMPTS, SAMPLES = 2, 24, 2
TRANSITIONS, TOKENS, TURNS = 5 * STEPS, 24, 2


class Seen:
    """An environment of two turns that counts how often it is stepped for each prompt and turn."""

    def __init__(self) -> None:
        self.steps: Counter[tuple[str, int]] = Counter()

    def step(self, logs: Any, metadata: Any) -> Any:
        turns = [sum(message["role"] == "assistant" for message in log) for log in logs]
        for turn, meta in zip(turns, metadata, strict=True):
            self.steps[meta["prompt"], turn] += 1
        done = torch.tensor([turn >= TURNS for turn in turns])
        return EnvironmentReturn(
            [{"role": "environment", "content": "+"} for _ in logs],
            list(metadata),
            [None] * len(logs),
            torch.ones(len(logs)),
            done,
            None,
        )


class Kept:
    """Generation as rollouts see it, keeping every request with its result."""

    def __init__(self, engines: Elastic) -> None:
        self._generation = engines.generation
        self.answered: list[tuple[GenerationRequest, GenerationResult]] = []

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        result = await self._generation.generate_one(request)
        self.answered.append((request, result))
        return result

    def run_on_dispatch_loop(self, work: Any) -> Any:
        return self._generation.run_on_dispatch_loop(work)


class Loader:
    """Batches of sums, each prompt once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._at = 0

    def __iter__(self) -> Iterator[BatchedDataDict[Any]]:
        while True:
            texts = [f"{n}+{n % 7}=" for n in range(PROMPTS * self._at, PROMPTS * (self._at + 1))]
            self._at += 1
            logs = [
                [{"role": "user", "content": text, "token_ids": torch.tensor(self._tokenizer(text)["input_ids"])}]
                for text in texts
            ]
            yield BatchedDataDict(
                message_log=logs,
                task_name=["seen"] * PROMPTS,
                extra_env_info=[{"prompt": text} for text in texts],
                stop_strings=[None] * PROMPTS,
                loss_multiplier=torch.ones(PROMPTS),
                length=torch.tensor([len(log[0]["token_ids"]) for log in logs]),
                idx=list(range(PROMPTS * (self._at - 1), PROMPTS * self._at)),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}


class Chaos:
    """Moves random shards to sleep and back until told to stop, whatever else happens to them."""

    def __init__(self, engines: Elastic, seed: int) -> None:
        self._engines = engines
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self.transitions = 0
        self.to_zero = 0
        self.refits = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60.0)
        self._engines.elastic.expand(range(SHARDS))

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._random.uniform(0.0, 0.1)):
                self.move()
        except BaseException as error:  # noqa: BLE001 - the test's own thread asks for it
            self.error = error

    def refit(self) -> None:
        """Brings the shards that serve to the cache's version; where all of them sleep, the first that wakes."""
        deadline = time.monotonic() + 60.0
        while self._engines.elastic.refresh().sync is None:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, "no shard came back"
            time.sleep(0.01)
        self.refits += 1

    def move(self) -> None:
        """One shard or some change sides."""
        elastic, fleet = self._engines.elastic, self._engines.generation.fleet
        asleep = fleet.having(ShardState.ASLEEP)
        awake = fleet.having(ShardState.ACTIVE)
        if asleep and (not awake or self._random.random() < 0.55):
            moved = elastic.expand(self._random.sample(asleep, self._random.randint(1, len(asleep)))).shards
        else:
            moved = elastic.shrink(self._random.sample(awake, self._random.randint(1, len(awake)))).shards
            self.to_zero += not fleet.having(ShardState.ACTIVE)
        self.transitions += len(moved)


def collector_of(engines: Elastic, kept: Kept, seen: Seen) -> Collector:
    runner = RolloutRunner(kept, engines.tokenizer, {"seen": EnvironmentHandle("seen", (seen,), 60.0)}, engines.record)
    sampling = engines.generation.default_sampling()
    parts = CollectorParts(
        prompts=EpochPrompts(Loader(engines.tokenizer), batch_size=PROMPTS, epoch=0, max_epochs=1),
        rollouts=LiveRollouts(runner, pad_token_id=engines.tokenizer.pad_token_id, multiple=1),
        store=InProcessStore(engines.tokenizer.pad_token_id),
        plan=lambda step: RolloutPlan(SEED, step, sampling, RolloutLimits(64, TOKENS, TURNS)),
        start=engines.generation.start_on_dispatch_loop,
        generations=SAMPLES,
        record=engines.record,
    )
    return Collector(
        parts,
        PromptQueue(InOrder(1), QueueLimits(PROMPTS, STEPS)),
        FailurePolicy(in_a_row=0),
        StallPolicy(120.0),
        RefitPolicy(),
    )


def moved_boundary(result: GenerationResult) -> GenerationResult:
    """The same with the first change of version one token too late."""
    first, second, *rest = result.spans
    if second.end - second.start < 2:
        return result
    return replace(result, spans=(replace(first, end=first.end + 1), replace(second, start=second.start + 1), *rest))


def check_record(entries: list[Any]) -> None:
    waits: dict[str, int] = {}
    checks = PromptChecks()
    handlers = checks.handlers()
    for entry in entries:
        if isinstance(entry.event, WaitBegun):
            waits[entry.event.wait_id] = waits.get(entry.event.wait_id, 0) + 1
            assert entry.event.deadline > entry.time
        elif isinstance(entry.event, WaitEnded):
            waits[entry.event.wait_id] -= 1
        handler = handlers.get(type(entry.event))
        if handler is not None:
            handler(entry, entry.event)
    assert not any(waits.values())
    # Groups (2) and requests (7); versions are proved above, by the weights themselves.
    assert not [message for invariant, message in checks.found if invariant in (2, 7)][:5]
