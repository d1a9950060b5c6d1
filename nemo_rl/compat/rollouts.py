"""NeMo-RL's calls for rolling out and judging a batch.

The work is `RolloutRunner`'s and `step_environment`'s. Invariant: row i of what comes back is row i of what went in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config import EnvironmentConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_metrics import rollout_metrics
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, RolloutRunner, number_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_multi_turn_rollout(
    policy_generation: Any,
    input_batch: BatchedDataDict,
    tokenizer: PreTrainedTokenizerBase,
    task_to_env: Mapping[str, object],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
) -> tuple[BatchedDataDict, dict[str, object]]:
    """NeMo-RL's call: rolls out a batch and returns it with `message_log`, `total_reward` and `truncated`, and the
    rollout metrics.

    Args:
        policy_generation: A generation backend.
        input_batch: Rows as collated.
        tokenizer: A Hugging Face tokenizer.
        task_to_env: Environment actor (or object) of each task.
        max_seq_len: Longest sample in tokens.
        max_rollout_turns: Rounds per sample.
        greedy: Take the most likely token.
    """
    environments = {task: EnvironmentHandle(task, handle) for task, handle in task_to_env.items()}
    limits = RolloutLimits(max_seq_len, policy_generation.cfg.max_new_tokens, max_rollout_turns)
    plan = RolloutPlan(
        0, 0, policy_generation.default_sampling(greedy=greedy), limits, tuple(policy_generation.cfg.stop_strings or ())
    )
    batch = input_batch if "prompt_number" in input_batch else number_samples(input_batch, 1)
    trajectories = RolloutRunner(policy_generation, tokenizer, environments).run(batch, plan)
    done = BatchedDataDict(batch.get_dict())
    done["message_log"] = [trajectory.message_log for trajectory in trajectories]
    done["total_reward"] = torch.tensor([trajectory.reward for trajectory in trajectories])
    done["truncated"] = torch.tensor([trajectory.truncated for trajectory in trajectories])
    return done, rollout_metrics(trajectories, limits.max_turns)


# Every engine streams, so that both of NeMo-RL's functions are one.
run_async_multi_turn_rollout = run_multi_turn_rollout


def calculate_rewards(batch: BatchedDataDict, task_to_env: Mapping[str, object]) -> EnvironmentReturn[object]:
    """Judges the conversations of a batch, each by the environment of its task.

    Args:
        batch: `message_log`, `task_name` and `extra_env_info`, lists of B; logs end with an assistant message.
        task_to_env: Environment actor (or object) of each task.

    Returns:
        One answer for the whole batch, rows in its order; several reward components are named as they are.

    Raises:
        KeyError: A task has no environment.
        EnvironmentFailure: An environment failed.
    """
    names = [str(name) for name in batch["task_name"]]
    timeout_s = EnvironmentConfig().step_timeout_s
    answers: dict[int, tuple[Any, int]] = {}
    for task in dict.fromkeys(names):
        rows = [row for row, name in enumerate(names) if name == task]
        logs, metadata = ([batch[column][row] for row in rows] for column in ("message_log", "extra_env_info"))
        result = step_environment(task_to_env[task], logs, metadata, timeout_s=timeout_s, name=task)
        answers |= {row: (result, place) for place, row in enumerate(rows)}
    picked = [answers[row] for row in range(len(names))]
    return EnvironmentReturn(
        observations=[result.observations[place] for result, place in picked],
        metadata=[result.metadata[place] for result, place in picked],
        next_stop_strings=[result.next_stop_strings[place] for result, place in picked],
        rewards=_joined(picked),
        terminateds=torch.tensor([bool(result.terminateds[place]) for result, place in picked]),
        answers=[result.answers[place] for result, place in picked],
    )


def _joined(picked: list[tuple[Any, int]]) -> torch.Tensor | dict[str, torch.Tensor]:
    if all(isinstance(result.rewards, torch.Tensor) for result, _ in picked):
        return torch.tensor([float(result.rewards[place]) for result, place in picked])
    rows = [
        {name: float(values[place]) for name, values in result.rewards.items()}
        if isinstance(result.rewards, Mapping)
        else {"reward": float(result.rewards[place])}
        for result, place in picked
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: torch.tensor([row.get(name, 0.0) for row in rows]) for name in names}
