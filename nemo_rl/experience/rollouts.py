"""Rollouts: each sample alternates between generation and its environment until it ends, or its agent plays an episode
over HTTP; the trajectories that come of them; and their metrics.

One coroutine per sample, over token ids; nothing is tokenised twice. For an agent a session is opened for each sample,
and the tokens that it recorded are made a trajectory. Invariants: a sample's environment is stepped once per turn,
after the turn's response; row i of the result is row i of the input; the branches of a session hold the tokens that
were sampled, and each of these is trained once: in the first branch that has it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.agent_environment import FAILED, OVERFLOW, UNNAMED
from nemo_rl.environments.interfaces import GIVEN_UP, AgentSession, EnvironmentFailure
from nemo_rl.experience.environment_batcher import EnvironmentBatcher, EnvironmentHandle
from nemo_rl.lazy import names_of
from nemo_rl.models.generation.decisions import NO_MASKS, RouteRecord, SamplingMasks
from nemo_rl.models.generation.endpoint.session import Branch, Session, SessionPlan, text_of
from nemo_rl.models.generation.interfaces import (
    VALIDATION_STEP_OFFSET,
    GenerationError,
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    VersionSpan,
    request_seed,
)
from nemo_rl.utils.record import NullRecord, Record
from nemo_rl.utils.record_events import RecordedSpan, TokensGenerated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.generation.endpoint.server import Endpoint


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of every sample. `environment_s`: deadline of one step of the environment, its batched call and the wait
    for it; likewise.
    """

    max_total_tokens: int  # prompt, responses and observations together
    max_new_tokens: int
    max_turns: int  # rounds of generation and environment
    generation_s: float | None = None  # deadline of one response, in seconds; None for none but the engine's own
    environment_s: float | None = None


@dataclass(frozen=True)
class RolloutPlan:
    """How a batch is rolled out."""

    run_seed: int
    step: int  # RL step (validation adds its own offset), part of every request's seed and id
    sampling: GenerationSamplingParams
    limits: RolloutLimits
    stop_strings: tuple[str, ...] = ()  # end every response, besides what prompts and environments ask for
    records: bool = False  # whether generation records which experts and filters it drew tokens with


@dataclass
class Trajectory:
    """One finished sample, or a further branch of an agent's session, which is a row of its own in training."""

    message_log: LLMMessageLogType  # all messages with token ids; responses carry `generation_logprobs`
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)  # sums of `reward/<name>` over turns
    truncated: bool = False  # a response or observation was cut
    terminated: bool = False  # the environment ended the episode
    out_of_room: bool = False  # the limit on tokens ended the episode
    turns: int = 0
    generated: list[int] = field(default_factory=list)
    observed: int = 0  # tokens that came from the environment
    spans: list[VersionSpan] = field(default_factory=list)  # weight versions, over the tokens of all responses
    metadata: Any = None
    answer: str | None = None  # the last answer that the environment read; None without one
    routes: RouteRecord = field(default_factory=RouteRecord)  # experts of all messages' tokens, where recorded
    masks: SamplingMasks = NO_MASKS  # what tokens of all responses were drawn from, where recorded
    prompt_length: int | None = None  # tokens before the first response, where they are not the row's own prompt
    # Of an agent's session, whose first branch this is. Reward and metadata are those of the whole session; lengths,
    # turns and spans count what is trained in the branch itself.
    further_branches: list[Trajectory] = field(default_factory=list)
    by_agent: bool = False

    @property
    def branches(self) -> list[Trajectory]:
        """The rows of the sample in training."""
        return [self, *self.further_branches]

    @property
    def all_spans(self) -> list[VersionSpan]:
        """Weight versions, over the tokens of all responses of all branches."""
        spans, start = list(self.spans), sum(self.generated)
        for branch in self.further_branches:
            spans += moved_spans(branch.spans, start)
            start += sum(branch.generated)
        return spans

    def outcome(self, max_turns: int) -> SampleOutcome:
        """What metrics read of the sample. `max_turns`: rounds of generation and environment, at most."""
        # NeMo-RL's natural end is any but that by the number of turns.
        ended, turns = self.terminated or self.out_of_room, sum(branch.turns for branch in self.branches)
        return SampleOutcome(
            turns=turns,
            generated=[tokens for branch in self.branches for tokens in branch.generated],
            observed=sum(branch.observed for branch in self.branches),
            tokens=sum(len(message["token_ids"]) for branch in self.branches for message in branch.message_log),
            reward=self.reward,
            components=dict(self.components),
            truncated=self.truncated,
            ended=ended,
            out_of_turns=not (self.truncated or ended) and self.turns >= max_turns,
            unverified=isinstance(self.metadata, Mapping) and bool(self.metadata.get(GIVEN_UP)),
            branches=len(self.branches) if self.by_agent else None,
        )


class SampleOutcome(NamedTuple):
    """What metrics read of a finished sample, counted over all its branches."""

    turns: int
    generated: list[int]  # tokens of each response
    observed: int  # tokens that came from the environment
    tokens: int  # of all messages
    reward: float
    components: dict[str, float]  # `reward/<name>` of its environment
    truncated: bool
    ended: bool  # by its environment, or because no token fits any more
    out_of_turns: bool  # it had as many turns as it may and had not ended
    unverified: bool
    branches: int | None  # of an agent's session; None for others


def moved_spans(spans: Sequence[VersionSpan], by: int) -> Sequence[VersionSpan]:
    """The same spans, `by` tokens later."""
    return [replace(span, start=by + span.start, end=by + span.end) for span in spans] if by else spans


class AgentRollouts:
    """Plays the episodes of agents. `endpoint`: where they reach the model. `tokenizer`: decodes what has no text."""

    def __init__(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> None:
        self._endpoint = endpoint
        self._tokenizer = tokenizer

    async def run(
        self,
        message_log: LLMMessageLogType,
        metadata: object,
        plan: RolloutPlan,
        prompt: int,
        sample: int,
        batcher: EnvironmentBatcher,
    ) -> Trajectory:
        """One episode.

        Args:
            message_log: The prompt.
            metadata: Its metadata for the environment.
            prompt, sample: Numbers of the prompt in its step and of the sample in its group.

        Raises EnvironmentFailure: the agent raised another error than that its prompt left no room, or never asked the
        model.
        """
        sample_id = f"{plan.step}-{prompt}-{sample}"
        session_id = f"{sample_id}-{uuid.uuid4().hex[:12]}"

        def seed_of(number: int) -> int:
            return request_seed(plan.run_seed, plan.step, prompt, sample, number)

        base_url = self._endpoint.open(
            session_id,
            SessionPlan(
                sample_id,
                plan.sampling,
                plan.limits.max_new_tokens,
                plan.limits.max_total_tokens,
                seed_of,
                seed_of(-1),
                plan.stop_strings,
                plan.records,
                plan.step >= VALIDATION_STEP_OFFSET,
            ),
        )
        agents = AgentSession(session_id, base_url, self._endpoint.model, self._endpoint.token or "none", seed_of(-1))
        try:
            outcome = await batcher.step(message_log, {"session": agents, "row": metadata})
        finally:
            session = self._endpoint.finish(session_id)
        told = outcome.metadata if isinstance(outcome.metadata, Mapping) else {}
        failed, overflow = told.get(FAILED), told.get(OVERFLOW)
        branches = session.branches()
        # An error without the endpoint's words is that of its last answer.
        full = session.overflowed and (overflow == "said" or (overflow == "status" and session.last_overflowed))
        if failed is not None and not full:
            before = " (a prompt of its session had left no room before, which is another error)" * session.overflowed
            raise EnvironmentFailure(f"sample {sample_id}: the agent {failed}{before}")
        if branches:
            trajectory = trajectory_of(session, self._tokenizer)
        elif failed is not None:
            # Its first prompt left no room: a row without a token to train.
            trajectory = Trajectory([dict(message) for message in message_log], by_agent=True)
        else:
            raise EnvironmentFailure(
                f"sample {sample_id}: the agent never got a token of the model, so there is nothing to train"
            )
        components = {name: value for name, value in outcome.components.items() if name != UNNAMED}
        truncated = failed is not None or any(branch.truncated for branch in trajectory.branches)
        for branch in trajectory.branches:
            branch.reward, branch.components, branch.truncated = outcome.reward, dict(components), truncated
            branch.metadata, branch.answer, branch.terminated = metadata, outcome.answer, failed is None
            branch.out_of_room = failed is not None
        return trajectory


def trajectory_of(session: Session, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """The first branch of a session, with the others as its further branches; without a reward."""
    first, *others = (_of_branch(branch, tokenizer) for branch in session.branches())
    first.further_branches = others
    return first


def _of_branch(branch: Branch, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    """One branch, of which responses are trained that no earlier branch has."""
    trajectory = Trajectory([], by_agent=True, prompt_length=len(branch.parts[0].context))
    for index, part in enumerate(branch.parts):
        trajectory.message_log += _context(part.messages, part.context, tokenizer)
        _append_response(trajectory, part.turn.result, tokenizer, trained=part.trained)
        if part.trained:
            trajectory.turns += 1
            trajectory.observed += len(part.context) if index else 0
    return trajectory


def _append_response(
    trajectory: Trajectory, result: GenerationResult, tokenizer: PreTrainedTokenizerBase, *, trained: bool = True
) -> None:
    response: dict[str, object] = {
        "role": "assistant",
        "content": tokenizer.decode(result.token_ids, skip_special_tokens=True),
        "token_ids": torch.tensor(result.token_ids, dtype=torch.int64),
    }
    trajectory.message_log.append(response)
    if result.routes is not None:
        trajectory.routes.add(result.routes)
    if not trained:
        return
    response["generation_logprobs"] = torch.tensor(result.logprobs, dtype=torch.float32)
    trajectory.spans += moved_spans(result.spans, sum(trajectory.generated))
    trajectory.generated.append(len(result.token_ids))
    if result.masks is not None:
        trajectory.masks = trajectory.masks.then(result.masks)
    trajectory.truncated = trajectory.truncated or result.truncated


def _context(
    messages: tuple[Mapping[str, object], ...], ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, object]]:
    """New messages with their roles; the last one has the tokens of all."""
    shown: list[dict[str, object]] = [
        {"role": str(message["role"]), "content": text_of(message)} for message in messages
    ]
    shown = shown or [{"role": "user", "content": tokenizer.decode(ids)}]
    for message in shown:
        message["token_ids"] = torch.zeros(0, dtype=torch.int64)
    shown[-1]["token_ids"] = torch.tensor(ids, dtype=torch.int64)
    return shown


# A warning is logged once this share of samples is cut short.
_MANY_CUT = 0.4


class RolloutGenerator(Protocol):
    """The part of generation that rollouts use."""

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt."""
        ...

    def run_on_dispatch_loop(self, work: Coroutine[object, object, object]) -> Any:
        """Runs a coroutine where requests are dispatched, and waits for it."""
        ...


class RolloutRunner:
    """Rolls out batches. `tokenizer`: decodes responses and encodes observations. `record`: takes which weights made
    every sample's tokens. `agents`: plays the episodes of environments that are agents; None refuses them.
    """

    def __init__(
        self,
        generation: RolloutGenerator,
        tokenizer: PreTrainedTokenizerBase,
        environments: Mapping[str, EnvironmentHandle],
        record: Record | None = None,
        agents: AgentRollouts | None = None,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._environments = environments
        self._agents = agents
        self._record: Record = record or NullRecord()
        self._shared: dict[str, EnvironmentBatcher] = {}

    def __getstate__(self) -> dict[str, object]:
        # Batchers belong to the loop of one process.
        return self.__dict__ | {"_shared": {}}

    def run(self, batch: BatchedDataDict, plan: RolloutPlan) -> list[Trajectory]:
        """Rolls out every row. `batch`: `message_log`, `task_name`, `extra_env_info`, `stop_strings` (lists of B),
        `prompt_number` and `sample_number` [B]. Raises GenerationError: an engine failed; EnvironmentFailure: an
        environment failed; KeyError: a task has no environment.
        """
        return self._generation.run_on_dispatch_loop(self._run_all(batch, plan, self._batchers()))

    async def run_group(self, batch: BatchedDataDict, plan: RolloutPlan) -> list[Trajectory]:
        """As `run`, awaited where requests are dispatched; groups that run at the same time share their environments'
        batched calls.
        """
        self._shared = self._shared or self._batchers()
        return await self._run_all(batch, plan, self._shared)

    def _batchers(self) -> dict[str, EnvironmentBatcher]:
        return {name: EnvironmentBatcher(environment) for name, environment in self._environments.items()}

    async def _run_all(
        self, batch: BatchedDataDict, plan: RolloutPlan, batchers: Mapping[str, EnvironmentBatcher]
    ) -> list[Trajectory]:
        tasks = [asyncio.create_task(self._run_one(row, batch, plan, batchers)) for row in range(batch.size)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            # One failure ends the batch: the others would only keep engines busy for nothing.
            for task in tasks:
                task.cancel()
            raise

    async def _run_one(
        self, row: int, batch: BatchedDataDict, plan: RolloutPlan, batchers: Mapping[str, EnvironmentBatcher]
    ) -> Trajectory:
        task = batch["task_name"][row]
        if task not in batchers:
            raise KeyError(f"task {task!r} has no environment; tasks with one: {sorted(batchers)}")
        prompt, sample = int(batch["prompt_number"][row]), int(batch["sample_number"][row])
        if self._environments[task].is_agent:
            if self._agents is None:
                raise EnvironmentFailure(f"the environment of task {task!r} is an agent, and no endpoint serves one")
            log, known = batch["message_log"][row], batch["extra_env_info"][row]
            async with _within(plan.limits.environment_s, f"the agent of task {task!r}", EnvironmentFailure):
                trajectory = await self._agents.run(log, known, plan, prompt, sample, batchers[task])
        else:
            trajectory = await self._alternate(row, batch, plan, batchers[task])
        spans = trajectory.all_spans
        recorded = tuple(RecordedSpan(span.version, span.start, span.end) for span in spans)
        mixed_kv = any(span.mixed_kv for span in spans)
        adapter = ",".join(sorted({span.adapter for span in spans}))
        group = f"{plan.step}-{prompt}"
        self._record.emit(TokensGenerated(f"{group}-{sample}", group, recorded, mixed_kv, adapter))
        return trajectory

    async def _alternate(
        self, row: int, batch: BatchedDataDict, plan: RolloutPlan, batcher: EnvironmentBatcher
    ) -> Trajectory:
        """Turns of generation and environment, until the episode ends."""
        task = batch["task_name"][row]
        trajectory = Trajectory(
            [dict(message) for message in batch["message_log"][row]], metadata=batch["extra_env_info"][row]
        )
        ids = torch.cat([message["token_ids"] for message in trajectory.message_log]).tolist()
        stops = _stop_strings(plan, batch["stop_strings"][row])
        prompt, sample = int(batch["prompt_number"][row]), int(batch["sample_number"][row])
        for turn in range(plan.limits.max_turns):
            request = GenerationRequest(
                f"{plan.step}-{prompt}-{sample}-{turn}",
                ids,
                min(plan.limits.max_new_tokens, plan.limits.max_total_tokens - len(ids)),
                plan.sampling,
                request_seed(plan.run_seed, plan.step, prompt, sample, turn),
                stops,
                f"{plan.step}-{prompt}-{sample}",
                # A later prefill computes the unknown routes: of the last token of a response, and of observations.
                trajectory.routes.known_until() if plan.records else None,
            )
            async with _within(plan.limits.generation_s, f"generation of {request.request_id}", GenerationError):
                result = await self._generation.generate_one(request)
            _append_response(trajectory, result, self._tokenizer)
            ids = ids + trajectory.message_log[-1]["token_ids"].tolist()
            judging = f"the environment of task {task!r} with {request.request_id}"
            async with _within(plan.limits.environment_s, judging, EnvironmentFailure):
                outcome = await batcher.step(trajectory.message_log, trajectory.metadata)
            trajectory.turns += 1
            trajectory.reward += outcome.reward
            for name, value in outcome.components.items():
                trajectory.components[name] = trajectory.components.get(name, 0.0) + value
            if outcome.metadata is not None:
                trajectory.metadata = outcome.metadata
            trajectory.answer = outcome.answer if outcome.answer is not None else trajectory.answer
            trajectory.terminated = outcome.terminated
            stops = _stop_strings(plan, outcome.stop_strings)
            # One token of room must remain, or the next turn could not answer.
            goes_on = not outcome.terminated and turn + 1 < plan.limits.max_turns
            room = plan.limits.max_total_tokens - len(ids) - (1 if goes_on else 0)
            observed, fits = self._append_observation(trajectory, outcome.observation, room)
            ids = ids + observed
            if not fits and not outcome.terminated:
                trajectory.truncated = trajectory.out_of_room = True
            if not (goes_on and fits):
                break
        return trajectory

    def _append_observation(
        self, trajectory: Trajectory, observation: dict[str, object], room: int
    ) -> tuple[list[int], bool]:
        """Appends as much of an observation as fits; returns its tokens and whether all fitted."""
        tokens = _tokens_of(self._tokenizer, str(observation["content"]))
        kept = list(tokens[: max(0, room)])
        trajectory.observed += len(kept)
        trajectory.message_log.append({**observation, "token_ids": torch.tensor(kept, dtype=torch.int64)})
        return kept, len(tokens) <= room


# Environments answer many samples of a batch with the same text.
@lru_cache(maxsize=256)
def _tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@asynccontextmanager
async def _within(
    seconds: float | None, what: str, failure: type[GenerationError | EnvironmentFailure]
) -> AsyncGenerator[None]:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        key = "generation_timeout_s" if failure is GenerationError else "env_timeout_s"
        raise failure(f"{what} took more than async_rl.rollout_failure.native.{key}={seconds:g}") from error


def _stop_strings(plan: RolloutPlan, more: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*plan.stop_strings, *(more or ())]))


def number_samples(batch: BatchedDataDict, generations: int, first_prompt: int = 0) -> BatchedDataDict:
    """Repeats every prompt `generations` times in place and numbers prompts and samples, which seeds and groups follow.
    `first_prompt`: number of the batch's first prompt within its step.
    """
    prompts = batch.size
    repeated = BatchedDataDict({k: v for k, v in batch.items() if k != "message_log"}).repeat_interleave(generations)
    if "message_log" in batch:
        # A rollout adds messages and changes none: their token ids may be the same tensors.
        logs = [log for log in batch["message_log"] for _ in range(generations)]
        repeated["message_log"] = [[dict(message) for message in log] for log in logs]
    repeated["prompt_number"] = torch.arange(first_prompt, first_prompt + prompts).repeat_interleave(generations)
    repeated["sample_number"] = torch.arange(generations).repeat(prompts)
    return repeated


def rollout_metrics(samples: Sequence[SampleOutcome]) -> dict[str, object]:
    """Turns, terminations, token counts and rewards of finished samples; `histogram/*` are lists with one entry per
    sample. Empty for none.
    """
    if not samples:
        return {}

    def column(value: Callable[[SampleOutcome], float]) -> np.ndarray:
        return np.array([value(sample) for sample in samples], dtype=np.float64)

    turns, observed = column(lambda s: s.turns), column(lambda s: s.observed)
    generated, rewards = column(lambda s: sum(s.generated)), column(lambda s: s.reward)
    inputs = column(lambda s: s.tokens) - generated - observed
    per_turn = np.array([tokens for s in samples for tokens in s.generated] or [0], dtype=np.float64)
    branches = [s.branches for s in samples if s.branches is not None]
    of_agents = {"agent_branches_per_sample": float(np.mean(branches))} if branches else {}
    parts = sorted({name for s in samples for name in s.components})
    return {
        **of_agents,
        **{name: float(np.mean([s.components.get(name, 0.0) for s in samples])) for name in parts},
        "total_turns": float(turns.sum()),
        "avg_turns_per_sample": float(turns.mean()),
        "max_turns_per_sample": float(turns.max()),
        "turns_per_sample/p95": float(np.percentile(turns, 95)),
        "turns_per_sample/p99": float(np.percentile(turns, 99)),
        "natural_termination_rate": float(column(lambda s: s.ended).mean()),
        "truncation_rate": float(column(lambda s: s.truncated).mean()),
        "max_turns_reached_rate": float(column(lambda s: s.out_of_turns).mean()),
        "unverified_rate": float(column(lambda s: s.unverified).mean()),
        "mean_total_tokens_per_sample": float((generated + observed).mean()),
        "mean_gen_tokens_per_sample": float(generated.mean()),
        "mean_env_tokens_per_sample": float(observed.mean()),
        "max_gen_tokens_per_sample": float(generated.max()),
        "max_gen_tokens_per_turn/max": float(per_turn.max()),
        "max_gen_tokens_per_turn/mean": float(per_turn.mean()),
        "max_gen_tokens_per_turn/p95": float(np.percentile(per_turn, 95)),
        "mean_total_reward": float(rewards.mean()),
        "max_total_reward": float(rewards.max()),
        "min_total_reward": float(rewards.min()),
        "histogram/gen_tokens_length": generated.tolist(),
        "histogram/input_tokens_length": inputs.tolist(),
        "histogram/total_tokens_length": (inputs + generated + observed).tolist(),
    }


class RolloutWatch:
    """Warns when many samples are cut short, or any is not verified, which looks like a bad model and is mostly a wrong
    setting.

    Warns once per reason, and again only after the share was low in between.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()

    def observe(
        self,
        what: str,
        metrics: Mapping[str, Any],
        *,
        max_new_tokens: int,
        max_turns: int,
        keys: tuple[str, str] = ("policy.generation", "grpo"),
    ) -> list[str]:
        """Messages to the user about some finished samples.

        Args:
            what: The samples, such as `step 3`.
            metrics: Their `rollout_metrics`.
            max_new_tokens: Tokens of a response, at most.
            max_turns: Rounds of a sample, at most.
            keys: Sections of the two limits.
        """
        cut, unfinished, unverified = (
            float(metrics.get(name, 0.0)) for name in ("truncation_rate", "max_turns_reached_rate", "unverified_rate")
        )
        others = "the total length" + ", or the agent's own max_tokens" * ("agent_branches_per_sample" in metrics)
        return [
            *self._once(
                "tokens",
                cut,
                _MANY_CUT,
                f"{what}: {cut:.0%} of the samples were cut off, and a cut answer mostly earns nothing; either "
                f"{keys[0]}.max_new_tokens={max_new_tokens} (or {others}) is too small for this model, or it "
                "ends its turn with a token that is not among the stop tokens named at the start "
                f"({keys[0]}.stop_token_ids)",
            ),
            *self._once(
                "turns",
                unfinished,
                _MANY_CUT if max_turns > 1 else 1e-9,
                f"{what}: {unfinished:.0%} of the episodes were cut after {keys[1]}.max_rollout_turns={max_turns} "
                "although their environment would have gone on; raise it for an environment of several turns",
            ),
            *self._once(
                "verifier",
                unverified,
                1e-9,
                f"{what}: {unverified:.1%} of the answers were not verified within env.*.verify_timeout_s, or "
                "run_timeout_s of code (or their verifier died twice), and earned 0; raise it, or env.*.num_workers "
                "where the machine has idle cores",
            ),
        ]

    def _once(self, reason: str, share: float, many: float, line: str) -> Iterator[str]:
        if share >= many and reason not in self._said:
            self._said.add(reason)
            yield line
        elif share < many / 2:
            self._said.discard(reason)


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
