"""Losses, rewards, generation and rollouts in the shapes in which NeMo-RL's documentation calls them; ours do the work.

Invariants: what is called in our own shape goes through unchanged; row i of what comes back is row i of what went in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeVar

import torch

from nemo_rl import loss
from nemo_rl.algorithms.grpo import advantages
from nemo_rl.config import EnvironmentConfig, GenerationConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.data.model_tokens import listed_stop_ids
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.interfaces import Conversation, EnvironmentReturn
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, RolloutRunner, number_samples, rollout_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration


class _LogprobsFirst:
    """Calls of a loss with the log-probabilities as the first of four arguments by position."""

    def __call__(self, *given: object, **named: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics, of `(data, seqs, toks, next_token_logprobs=...)` or `(next_token_logprobs, data,
        seqs, toks)`.
        """
        if given and isinstance(given[0], torch.Tensor):
            named, given = {"next_token_logprobs": given[0], **named}, given[1:]
        whole: Any = super()
        return whole.__call__(*given, **named)


class PositionalClippedPGLossFn(_LogprobsFirst, loss.ClippedPGLossFn):
    """See `nemo_rl.loss.ClippedPGLossFn`."""


class PositionalNLLLossFn(_LogprobsFirst, loss.NLLLossFn):
    """See `nemo_rl.loss.NLLLossFn`."""


def scale_rewards(batch: Any, cfg: RewardScalingConfig | Mapping[str, object]) -> object:
    """Scales `total_reward` and every `reward/<name>` of a batch, where `enabled`, and returns the batch; rewards [B]
    alone are scaled as they are.
    """
    cfg = RewardScalingConfig.read(cfg)
    if isinstance(batch, torch.Tensor):
        return advantages.scale_rewards(batch, cfg)
    if cfg.enabled:
        names = [name for name in batch if name == "total_reward" or name.startswith(advantages.COMPONENT_PREFIX)]
        for name in names:
            batch[name] = advantages.scale_rewards(batch[name], cfg)
    return batch


def apply_reward_shaping(batch: Any, cfg: Any, *ours: Any) -> object:
    """Shapes `total_reward` of a batch with `message_log` and perhaps `truncated`, where `enabled`, keeps it as it was
    under `unshaped_total_reward`, and returns the batch. Called as `shape_rewards(rewards, lengths, truncated, cfg)` it
    is that function.
    """
    if isinstance(batch, torch.Tensor):
        return advantages.shape_rewards(batch, cfg, *ours)
    cfg = RewardShapingConfig.read(cfg)
    if cfg.enabled:
        total_B = batch["total_reward"]
        lengths_B = torch.tensor([_first_response(log) for log in batch["message_log"]])
        truncated_B = torch.as_tensor(batch["truncated"] if "truncated" in batch else torch.zeros(len(total_B)))
        batch["unshaped_total_reward"] = total_B
        batch["total_reward"] = advantages.shape_rewards(total_B, lengths_B, truncated_B, cfg)
    return batch


def _first_response(log: Any) -> int:
    return next((len(message["token_ids"]) for message in log if message["role"] == "assistant"), 0)


Config = TypeVar("Config", GenerationConfig, dict[str, object])
Item = TypeVar("Item")


class GenerationDatumSpec(TypedDict):
    """Input of `generate`: `input_ids` int64 [B, S] padded on the right, `input_lengths` int64 [B]."""

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]


class GenerationOutputSpec(TypedDict):
    """Output of `generate`: `output_ids` int64 [B, S] prompt and response padded on the right, `logprobs` float32 [B,
    S] (0 on prompt and padding), `generation_lengths`, `unpadded_sequence_lengths` int64 [B], `truncated` bool [B].
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]


def configure_generation_config(config: Config, tokenizer: PreTrainedTokenizerBase, is_eval: bool = False) -> Config:
    """Fills in what follows from the tokenizer, in place, and returns the configuration. `config`: `policy.generation`,
    as a section or a plain mapping. `is_eval`: load real weights; otherwise training sends them.
    """
    if config.get("stop_token_ids") is None if isinstance(config, dict) else config.stop_token_ids is None:
        config["stop_token_ids"] = listed_stop_ids(tokenizer, _model_name(config))
    vllm = config.setdefault("vllm_cfg", {}) if isinstance(config, dict) else config.vllm_cfg
    vllm["load_format"] = "auto" if is_eval else "dummy"
    if isinstance(config, dict):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config


def _model_name(config: GenerationConfig | dict[str, object]) -> str | None:
    name = config.get("model_name") if isinstance(config, dict) else getattr(config, "model_name", None)
    return name if isinstance(name, str) else None


def should_use_async_rollouts(generation_config: GenerationConfig | Mapping[str, object] | None) -> bool:
    """Whether each sample goes through its turns by itself: always, because every engine streams."""
    return generation_config is not None


def run_multi_turn_rollout(
    policy_generation: VllmGeneration,
    input_batch: BatchedDataDict,
    tokenizer: PreTrainedTokenizerBase,
    task_to_env: Mapping[str, object],
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
) -> tuple[BatchedDataDict, dict[str, object]]:
    """NeMo-RL's call: rolls out a batch and returns it with `message_log`, `total_reward`, `truncated`, what the
    environments hold as `extra_env_info` and each `reward/<name>` that they gave, and the rollout metrics.

    Args:
        task_to_env: Environment actor (or object) of each task.
        greedy: Take the most likely token.
    """
    environments = {task: EnvironmentHandle(task, (handle,)) for task, handle in task_to_env.items()}
    limits = RolloutLimits(max_seq_len, policy_generation.cfg.max_new_tokens, max_rollout_turns)
    plan = RolloutPlan(
        0, 0, policy_generation.default_sampling(greedy=greedy), limits, tuple(policy_generation.cfg.stop_strings or ())
    )
    batch = input_batch if "prompt_number" in input_batch else number_samples(input_batch, 1)
    trajectories = RolloutRunner(policy_generation, tokenizer, environments).run(batch, plan)
    done = BatchedDataDict(batch.get_dict())
    done["message_log"] = [trajectory.message_log for trajectory in trajectories]
    done["extra_env_info"] = [trajectory.metadata for trajectory in trajectories]
    done["total_reward"] = torch.tensor([trajectory.reward for trajectory in trajectories])
    done["truncated"] = torch.tensor([trajectory.truncated for trajectory in trajectories])
    for name in sorted({name for trajectory in trajectories for name in trajectory.components}):
        done[name] = torch.tensor([trajectory.components.get(name, 0.0) for trajectory in trajectories])
    return done, rollout_metrics([trajectory.outcome(limits.max_turns) for trajectory in trajectories])


# Every engine streams, so that both of NeMo-RL's functions are one.
run_async_multi_turn_rollout = run_multi_turn_rollout


def calculate_rewards(batch: BatchedDataDict, task_to_env: Mapping[str, object]) -> EnvironmentReturn[object]:
    """Judges the conversations of a batch, each by the environment of its task.

    Args:
        batch: `message_log`, `task_name` and `extra_env_info`, lists of B; logs end with an assistant message.
        task_to_env: Environment actor (or object) of each task.

    Returns one answer for the whole batch, rows in its order; several reward components are named as they are. Raises
    KeyError: a task has no environment; EnvironmentFailure: an environment failed.
    """
    names = [str(name) for name in batch["task_name"]]
    timeout_s = EnvironmentConfig().step_timeout_s
    answers: dict[int, tuple[Any, int]] = {}
    for task in dict.fromkeys(names):
        rows = [row for row, name in enumerate(names) if name == task]
        logs = [Conversation.of(batch["message_log"][row]) for row in rows]
        metadata = [batch["extra_env_info"][row] for row in rows]
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


def chunk_list_to_workers(to_chunk: Sequence[Item], num_workers: int) -> list[list[Item]]:
    """Cuts a list into at most `num_workers` runs of nearly equal length, without empty ones."""
    whole, rest = divmod(len(to_chunk), num_workers)
    chunks: list[list[Item]] = []
    start = 0
    for worker in range(num_workers):
        end = start + whole + (1 if worker < rest else 0)
        if end > start:
            chunks.append(list(to_chunk[start:end]))
        start = end
    return chunks
