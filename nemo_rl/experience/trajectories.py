"""What a rollout is given and what comes of it: the plan of a batch, and the trajectory of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.models.generation.decisions import NO_MASKS, RouteRecord, SamplingMasks
from nemo_rl.models.generation.interfaces import GenerationSamplingParams, VersionSpan


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


def moved_spans(spans: Sequence[VersionSpan], by: int) -> Sequence[VersionSpan]:
    """The same spans, `by` tokens later."""
    return [replace(span, start=by + span.start, end=by + span.end) for span in spans] if by else spans
