"""Evaluates a model: engines answer every problem several times, environments judge, estimators reduce to one number.

A scheduler that lends accelerators supplies its own placement. Invariants: a mistake in the configuration raises before
Ray starts; problem i is answered with the same seeds whatever else is evaluated; all processes are ended, also after
errors.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.accelerators import ReportProgress
from nemo_rl.algorithms.estimators import consensus_at_k, majority_at_k, pass_at_k, solved_at_k
from nemo_rl.algorithms.placement import Clusters, OwnPlacement, Placement
from nemo_rl.algorithms.startup import Say, check_prompt_lengths, check_tokens, hold_to_vocabulary, set_seed
from nemo_rl.config import ConfigError, EvalMasterConfig, PolicyConfig
from nemo_rl.config.errors import UserError, why_not_written
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.loader import rl_collate_fn
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.setup import processed
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.environment_registry import (
    await_environments,
    check_rows,
    end_environments,
    start_environments,
    start_lines,
)
from nemo_rl.environments.interfaces import expected_of
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollouts import (
    RolloutLimits,
    RolloutPlan,
    RolloutRunner,
    RolloutWatch,
    Trajectory,
    number_samples,
    rollout_metrics,
)
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.model_config import (
    ModelNotFoundError,
    check_length,
    check_vision,
    check_weights,
    model_config,
)
from nemo_rl.utils.adapter_files import is_adapter
from nemo_rl.utils.checkpoint import model_directory
from nemo_rl.utils.progress import StartPhases
from nemo_rl.utils.record import NullRecord

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Result of an evaluation."""

    metric: str  # name with its k, such as `pass@1`
    value: float
    total: float  # sum over the problems, of which `value` is the mean
    problems: int
    answers_per_problem: int
    mean_reward: float
    truncated: float
    seconds: float


class ResultNotWritten(UserError, OSError):
    """The result files cannot be written; the message contains the result."""

    def __init__(self, path: Path, score: Score, error: OSError) -> None:
        reason = why_not_written(error)
        super().__init__(
            f"eval.save_path: {path} cannot be written: {reason}. The result: {score.metric} {score.value:.4f} of "
            f"{score.problems} problems with {score.answers_per_problem} answers each, mean reward "
            f"{score.mean_reward:.4f}, {score.truncated:.1%} of the answers cut"
        )


def evaluate(config: EvalMasterConfig, placement: Placement | None = None) -> Score:
    """Runs an evaluation and writes the files of `eval.save_path`. `placement`: provides accelerators; by default slots
    of its own.

    Raises ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: the configuration names
    something that does not exist; GenerationError, EnvironmentFailure, WorkerError: the evaluation cannot go on.
    """
    placement, say = placement or OwnPlacement(), StartPhases().say
    find_model(config)
    _writable(config.eval.save_path)
    set_seed(config.eval.seed)
    policy = evaluated_policy(config)
    model = check_evaluated(policy)
    tokenizer = get_tokenizer(config.tokenizer, trust_remote_code=config.generation.trust_remote_code)
    ends = check_tokens(policy, model, tokenizer, say, key="generation.stop_token_ids")
    problems = load_problems(config, tokenizer, say)
    hold_to_vocabulary([problems.dataset], tokenizer, model)
    name = config.data.env_name
    check_rows(dict.fromkeys(problems.tasks, problems.dataset), dict.fromkeys(problems.tasks, name), config.env)
    for line in start_lines([name], config.env):
        say(line)
    with ExitStack() as stack:
        clusters = reserved(config, placement, stack)
        actors = start_environments([name], config.env)
        stack.callback(end_environments, actors)
        await_environments(actors, config.env)
        generation = start_engines(config, policy, clusters, tokenizer, ends.ids, placement)
        stack.callback(generation.shutdown)
        handle = EnvironmentHandle.of(name, actors[name], config.env)
        generation.wait_until_started()
        return measured(config, generation, tokenizer, problems, handle, placement, say)


def reserved(config: EvalMasterConfig, placement: Placement, stack: ExitStack) -> Clusters:
    """Joins Ray and reserves the slots of an evaluation, until the stack is closed."""
    stack.callback(placement.disconnect)
    accelerator = placement.connect(config)
    clusters = placement.reserve(config, accelerator)
    for cluster in clusters.distinct():
        stack.callback(cluster.shutdown)
    return clusters


def measured(
    config: EvalMasterConfig,
    generation: VllmGeneration,
    tokenizer: PreTrainedTokenizerBase,
    problems: Problems,
    environment: EnvironmentHandle,
    placement: Placement,
    say: Say,
) -> Score:
    """Answers problems with engines that are started, has them judged, and writes the files of `eval.save_path`. Raises
    as `evaluate`.
    """
    save_path, began = _writable(config.eval.save_path), time.monotonic()
    runner = RolloutRunner(generation, tokenizer, dict.fromkeys(problems.tasks, environment))
    with placement.engines_alone(generation).demand(0, problems.count, 0, "validation") as report:
        trajectories = _answer(config, runner, generation, problems, report)
    seconds = time.monotonic() - began
    most = config.data.max_rollout_turns
    metrics = rollout_metrics([one.outcome(most) for answers in trajectories for one in answers])
    for line in RolloutWatch().observe(
        "evaluation",
        metrics,
        max_new_tokens=config.generation.max_new_tokens,
        max_turns=config.data.max_rollout_turns,
        keys=("generation", "data"),
    ):
        say(line)
    score = _score(config, trajectories, seconds)
    rewards = [[trajectory.reward for trajectory in answers] for answers in trajectories]
    if line := about_parts(score.metric, rewards, config.eval.k_value):
        say(line)
    if save_path is not None:
        kept = save(save_path, config, score, trajectories)
        if kept is not None:
            say(f"eval.save_path: the result that was there is now in {kept}")
    return score


@dataclass(frozen=True)
class Problems:
    """The first `count` prompts of the dataset, and their tasks."""

    dataset: AllTaskProcessedDataset
    count: int
    tasks: list[str]


def find_model(config: EvalMasterConfig) -> None:
    """Replaces a directory of checkpoints by the one that is meant. Raises ConfigError: it holds an adapter alone."""
    named = config.generation.model_name
    found = model_directory(named)
    if is_adapter(found):
        raise ConfigError(
            [
                f"generation.model_name: {named} holds an adapter alone; make a whole model of it with "
                f"`python -m nemo_rl.utils.convert to-hf {named} DIR`"
            ]
        )
    if found != named:
        logger.info("model=%s from=%s", found, named)
        if config.tokenizer.name == named:
            config.tokenizer.name = found
        config.generation.model_name = found


def _writable(save_path: str | None) -> Path | None:
    if save_path is None:
        return None
    try:
        Path(save_path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"eval.save_path: {save_path} cannot be written ({error.strerror or error})"]) from error
    return Path(save_path)


def evaluated_policy(config: EvalMasterConfig) -> PolicyConfig:
    """The model as a policy section, as generation expects it."""
    generation = config.generation
    return PolicyConfig(
        model_name=generation.model_name,
        trust_remote_code=generation.trust_remote_code,
        tokenizer=config.tokenizer,
        max_total_sequence_length=generation.vllm_cfg.max_model_len,
        generation=generation,
    )


def check_evaluated(policy: PolicyConfig) -> PretrainedConfig:
    """The model's configuration. Raises ModelNotFoundError: it lacks its configuration or weights;
    UnsupportedModelError: it takes no sequences as long as configured.
    """
    try:
        model = model_config(policy)
        check_weights(policy.model_name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(str(error).replace("policy.model_name", "generation.model_name")) from error
    lengths = {"generation.vllm_cfg.max_model_len": policy.max_total_sequence_length}
    check_length(model, policy.model_name, lengths, generates=True)
    check_vision(model, policy.model_name)
    return model


def load_problems(config: EvalMasterConfig, tokenizer: PreTrainedTokenizerBase, say: Say) -> Problems:
    """Reads the problems of an evaluation. Raises DataError: they cannot be read, or all are too long."""
    if config.data.split_validation_size > 0:
        raise DataError(
            f"data.split_validation_size={config.data.split_validation_size} takes rows out of training, and an "
            "evaluation trains nothing; leave it, and choose problems with data.max_samples or data.split"
        )
    raw = load_response_dataset(config.data, "data")
    limit = config.data.max_input_seq_length
    dataset = processed([(raw, raw.dataset)], tokenizer, limit)
    check_prompt_lengths("data", {raw.task_name: dataset}, limit, say)
    return Problems(dataset, len(dataset), [raw.task_name])


def start_engines(
    config: EvalMasterConfig,
    policy: PolicyConfig,
    clusters: Clusters,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    placement: Placement,
) -> VllmGeneration:
    """Starts engines on the slots; returns before they are ready."""
    actors = start_engine_actors(
        clusters.training,
        policy,
        config.cluster,
        seed=config.eval.seed,
        colocated=False,
        refits=False,
        lent=placement.lends_shards,
    )
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=list(stop_token_ids),
        request_timeout_s=request_timeout_s(),
        record=placement.shard_record(NullRecord()),
    )


def _answer(
    config: EvalMasterConfig,
    runner: RolloutRunner,
    generation: VllmGeneration,
    problems: Problems,
    report: ReportProgress,
) -> list[list[Trajectory]]:
    """Answers problems, at most `num_prompts_per_step` at a time, and reports how many are done."""
    draws, at_once = config.eval.num_tests_per_prompt, config.generation.num_prompts_per_step
    limits = RolloutLimits(
        config.generation.vllm_cfg.max_model_len, config.generation.max_new_tokens, config.data.max_rollout_turns
    )
    sampling = generation.default_sampling(greedy=config.generation.temperature == 0)
    plan = RolloutPlan(config.eval.seed, 0, sampling, limits, tuple(config.generation.stop_strings or ()))
    size = problems.count if at_once in (-1, 0) else at_once
    answered: list[list[Trajectory]] = []
    for first in range(0, problems.count, size):
        rows = [problems.dataset[index] for index in range(first, min(first + size, problems.count))]
        flat = runner.run(number_samples(rl_collate_fn(rows), draws, first), plan)
        answered += [flat[start : start + draws] for start in range(0, len(flat), draws)]
        report(len(answered), problems.count)
    return answered


def _score(config: EvalMasterConfig, trajectories: list[list[Trajectory]], seconds: float) -> Score:
    name, k = config.eval.metric.removesuffix("@k"), config.eval.k_value
    values = [_value(name, answers, k) for answers in trajectories]
    flat = [trajectory for answers in trajectories for trajectory in answers]
    return Score(
        metric=f"{name}@{k}",
        value=sum(values) / len(values),
        total=float(sum(values)),
        problems=len(values),
        answers_per_problem=config.eval.num_tests_per_prompt,
        mean_reward=sum(trajectory.reward for trajectory in flat) / len(flat),
        truncated=Counter(trajectory.truncated for trajectory in flat)[True] / len(flat),
        seconds=seconds,
    )


def about_parts(metric: str, rewards: Sequence[Sequence[float]], k: int) -> str | None:
    """What to read where judges gave parts of a reward, which `pass@k` adds up as NeMo-RL does. `rewards`: of the
    answers to each problem.
    """
    parts = sum(reward not in (0.0, 1.0) for drawn in rewards for reward in drawn)
    if not parts or not metric.startswith("pass@"):
        return None
    solved = [solved_at_k(sum(reward >= 1.0 for reward in drawn), len(drawn), k) for drawn in rewards]
    return (
        f"{metric} adds up rewards as NeMo-RL does, and {parts} answers earned another than 0 or 1: it is no chance of "
        f"a right answer. solved@{k} (eval.metric=solved@k), where an answer with a reward of at least 1 is right, "
        f"is {sum(solved) / len(solved):.4f}"
    )


def _value(name: str, drawn: Sequence[Trajectory], k: int) -> float:
    """The metric of one problem."""
    rewards, answers = [trajectory.reward for trajectory in drawn], [trajectory.answer for trajectory in drawn]
    right = [reward >= 1.0 for reward in rewards]
    if name == "pass":
        return pass_at_k(rewards, k)
    if name == "solved":
        return solved_at_k(sum(right), len(right), k)
    return consensus_at_k(answers, rewards, k) if name == "cons" else majority_at_k(answers, right, k)


def _messages_of(trajectory: Trajectory) -> list[dict[str, object]]:
    return [{"role": message["role"], "content": message["content"]} for message in trajectory.message_log]


def _in_their_form(index: int, trajectory: Trajectory) -> dict[str, object]:
    messages = _messages_of(trajectory)
    drawn = [number for number, message in enumerate(trajectory.message_log) if "generation_logprobs" in message]
    prompt = messages[: drawn[0]] if drawn else messages
    return {
        "prompt": "\n".join(str(message["content"]) for message in prompt),
        "response": "\n".join(str(messages[number]["content"]) for number in drawn),
        "reward": trajectory.reward,
        "message_log": str(messages),
        "extra_env_info": str(trajectory.metadata),
        "sample_index": index,
    }


def lines_of(config: EvalMasterConfig, score: Score) -> Iterator[str]:
    """The lines by which scripts find the result of NeMo-RL's evaluator."""
    yield f"model_name={_base_name(config.generation.model_name)!r} dataset_name={_dataset_name(config)!r}"
    sampling = _sampling(config)
    # NeMo-RL shows the longest sequence under this name, and scripts read it.
    told = {"max_new_tokens": config.generation.vllm_cfg.max_model_len, **sampling, "seed": config.eval.seed}
    yield " ".join(f"{name}={value}" for name, value in told.items())
    yield f"metric={score.metric} num_tests_per_prompt={score.answers_per_problem}"
    yield f"score={score.value:.4f} ({score.total}/{score.problems})"


def _sampling(config: EvalMasterConfig) -> dict[str, object]:
    generation = config.generation
    top_k = -1 if generation.top_k is None else generation.top_k
    return {"temperature": generation.temperature, "top_p": generation.top_p, "top_k": top_k}


def _base_name(path: str) -> str:
    return path.rstrip("/").removesuffix("/policy/weights").rpartition("/")[2]


def _dataset_name(config: EvalMasterConfig) -> str:
    return _base_name(config.data.data_path or config.data.dataset_name)


_FILES = ("summary.json", "samples.jsonl", "config.json", "evaluation_data.json")


def _keep_earlier(directory: Path) -> Path | None:
    """Moves the result of an earlier evaluation into a folder of its own in the same directory; that folder, or None
    without one.
    """
    earlier = [directory / name for name in _FILES if (directory / name).is_file()]
    if not earlier:
        return None
    number = next(number for number in count(1) if not (directory / f"earlier_{number}").exists())
    kept = directory / f"earlier_{number}"
    kept.mkdir()
    for file in earlier:
        file.rename(kept / file.name)
    return kept


def save(directory: Path, config: EvalMasterConfig, score: Score, trajectories: list[list[Trajectory]]) -> Path | None:
    """Writes `summary.json` and `samples.jsonl`, and beside them NeMo-RL's `config.json` and `evaluation_data.json`;
    ResultNotWritten where they cannot be written. Returns where an earlier result was moved, if there was one.
    """
    try:
        kept = _keep_earlier(directory)
        told = {
            "model_name": _base_name(config.generation.model_name),
            "dataset_name": _dataset_name(config),
            "metric": config.eval.metric,
            "k_value": config.eval.k_value,
            "num_tests_per_prompt": config.eval.num_tests_per_prompt,
            **_sampling(config),
        }
        (directory / "config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
        flat = [trajectory for answers in trajectories for trajectory in answers]
        data = {"evaluation_data": [_in_their_form(index, trajectory) for index, trajectory in enumerate(flat)]}
        (directory / "evaluation_data.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
        (directory / "summary.json").write_text(
            json.dumps(asdict(score) | {"config": config.to_dict()}, indent=2, default=str), encoding="utf-8"
        )
        with (directory / "samples.jsonl").open("w", encoding="utf-8") as file:
            for problem, answers in enumerate(trajectories):
                for number, trajectory in enumerate(answers):
                    messages = _messages_of(trajectory)
                    row = {
                        "problem": problem,
                        "sample": number,
                        "reward": trajectory.reward,
                        "answer": trajectory.answer,
                        "expected": expected_of(trajectory.metadata),
                        "truncated": trajectory.truncated,
                    }
                    file.write(json.dumps(row | {"messages": messages}, default=str) + "\n")
    except OSError as error:
        raise ResultNotWritten(directory, score, error) from error
    return kept
