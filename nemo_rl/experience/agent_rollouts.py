"""Rollouts by agents: opens a session for each sample, has its environment play the episode over HTTP, and makes the
recorded tokens a trajectory.

Invariant: the branches of a session hold the tokens that were sampled, and each of these is trained once: in the first
branch that has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.agent_environment import FAILED, OVERFLOW, UNNAMED
from nemo_rl.environments.interfaces import AgentSession, EnvironmentFailure
from nemo_rl.experience.environment_batcher import EnvironmentBatcher
from nemo_rl.experience.trajectories import RolloutPlan, Trajectory
from nemo_rl.models.generation.endpoint.session import Branch, Session, SessionPlan, text_of
from nemo_rl.models.generation.interfaces import VALIDATION_STEP_OFFSET, VersionSpan, request_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.generation.endpoint.server import Endpoint


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
            metadata: What the environment is to know of it.
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
        result, start = part.turn.result, sum(trajectory.generated)
        trajectory.message_log += _context(part.messages, part.context, tokenizer)
        response: dict[str, object] = {
            "role": "assistant",
            "content": tokenizer.decode(result.token_ids, skip_special_tokens=True),
            "token_ids": torch.tensor(result.token_ids, dtype=torch.int64),
        }
        trajectory.message_log.append(response)
        if result.routes is not None:
            trajectory.routes.add(result.routes)
        if not part.trained:
            continue
        response["generation_logprobs"] = torch.tensor(result.logprobs, dtype=torch.float32)
        trajectory.spans += [
            VersionSpan(span.version, start + span.start, start + span.end, span.mixed_kv) for span in result.spans
        ]
        trajectory.generated.append(len(result.token_ids))
        trajectory.turns += 1
        trajectory.observed += len(part.context) if index else 0
        trajectory.truncated = trajectory.truncated or result.truncated
        if result.masks is not None:
            trajectory.masks = trajectory.masks.then(result.masks)
    return trajectory


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
