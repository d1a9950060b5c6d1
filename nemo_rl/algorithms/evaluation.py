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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.accelerators import Accelerators, KeptAccelerators, ReportProgress
from nemo_rl.algorithms.placement import Clusters, OwnSlots, Placement, reserve_all
from nemo_rl.algorithms.startup import Say, check_prompt_lengths, check_tokens, hold_to_vocabulary, set_seed
from nemo_rl.config import ConfigError, EvalMasterConfig, PolicyConfig
from nemo_rl.config.errors import UserError, why_not_written
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.setup import processed
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.environments.registry import (
    await_environments,
    check_rows,
    end_environments,
    start_environments,
    start_lines,
)
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollouts import RolloutRunner, RolloutWatch, number_samples, rollout_metrics
from nemo_rl.experience.trajectories import RolloutLimits, RolloutPlan, Trajectory
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.model_config import model_config
from nemo_rl.utils.adapters import is_adapter
from nemo_rl.utils.checkpoint import model_directory
from nemo_rl.utils.progress import StartPhases
from nemo_rl.utils.record import NullRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Result of an evaluation."""

    metric: str  # name with its k, such as `pass@1`
    value: float
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


EvaluationPlacement = Placement[EvalMasterConfig, VllmGeneration, Accelerators]


class OwnPlacement(OwnSlots):
    """For an evaluation with slots of its own."""

    def reserve(self, config: EvalMasterConfig, accelerator: Accelerator) -> Clusters:
        """All slots of the configuration."""
        return reserve_all(config.cluster, accelerator, "evaluation")

    def accelerators(self, parts: VllmGeneration) -> KeptAccelerators:
        """They stay with the evaluation."""
        return KeptAccelerators()


def evaluate(config: EvalMasterConfig, placement: EvaluationPlacement | None = None) -> Score:
    """Runs an evaluation and writes the files of `eval.save_path`.

    Args:
        placement: Provides accelerators; by default slots of its own.

    Raises ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: the configuration names
    something that does not exist; GenerationError, EnvironmentFailure, WorkerError: the evaluation cannot go on.
    """
    placement, say = placement or OwnPlacement(), StartPhases().say
    _find_model(config)
    save_path = _writable(config.eval.save_path)
    set_seed(config.eval.seed)
    tokenizer = get_tokenizer(config.tokenizer, config.generation.trust_remote_code)
    policy = evaluated_policy(config)
    model = model_config(policy)
    ends = check_tokens(policy, model, tokenizer, say, key="generation.stop_token_ids")
    problems = load_problems(config, tokenizer, say)
    hold_to_vocabulary([problems.dataset], tokenizer, model)
    name = config.data.env_name
    check_rows(dict.fromkeys(problems.tasks, problems.dataset), dict.fromkeys(problems.tasks, name), config.env)
    for line in start_lines([name], config.env):
        say(line)
    with ExitStack() as stack:
        accelerator = placement.connect(config)
        stack.callback(placement.disconnect)
        clusters = placement.reserve(config, accelerator)
        for cluster in clusters.distinct():
            stack.callback(cluster.shutdown)
        actors = start_environments([name], config.env)
        stack.callback(end_environments, actors)
        await_environments(actors, config.env)
        generation = _start_engines(config, policy, clusters, tokenizer, ends.ids, placement)
        stack.callback(generation.shutdown)
        handle = EnvironmentHandle.of(name, actors[name], config.env)
        generation.wait_until_started()
        began = time.monotonic()
        runner = RolloutRunner(generation, tokenizer, dict.fromkeys(problems.tasks, handle))
        with placement.accelerators(generation).demand(0, problems.count, 0, "validation") as report:
            trajectories = _answer(config, runner, generation, problems, report)
        seconds = time.monotonic() - began
    metrics = rollout_metrics([one for answers in trajectories for one in answers], config.data.max_rollout_turns)
    for line in RolloutWatch().observe(
        "evaluation",
        metrics,
        max_new_tokens=config.generation.max_new_tokens,
        max_turns=config.data.max_rollout_turns,
        keys=("generation", "data"),
    ):
        say(line)
    score = _score(config, trajectories, seconds)
    if save_path is not None:
        save(save_path, config, score, trajectories)
    return score


@dataclass(frozen=True)
class Problems:
    """The first `count` prompts of the dataset, and their tasks."""

    dataset: AllTaskProcessedDataset
    count: int
    tasks: list[str]


def _find_model(config: EvalMasterConfig) -> None:
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


def _start_engines(
    config: EvalMasterConfig,
    policy: PolicyConfig,
    clusters: Clusters,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    placement: EvaluationPlacement,
) -> VllmGeneration:
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
    k, consensus = config.eval.k_value, config.eval.metric == "cons@k"
    values = []
    for answers in trajectories:
        right = [trajectory.reward >= 1.0 for trajectory in answers]
        values.append(
            consensus_at_k([trajectory.answer for trajectory in answers], right, k)
            if consensus
            else pass_at_k(sum(right), len(right), k)
        )
    flat = [trajectory for answers in trajectories for trajectory in answers]
    return Score(
        metric=f"{'cons' if consensus else 'pass'}@{k}",
        value=sum(values) / len(values),
        problems=len(values),
        answers_per_problem=config.eval.num_tests_per_prompt,
        mean_reward=sum(trajectory.reward for trajectory in flat) / len(flat),
        truncated=Counter(trajectory.truncated for trajectory in flat)[True] / len(flat),
        seconds=seconds,
    )


def save(directory: Path, config: EvalMasterConfig, score: Score, trajectories: list[list[Trajectory]]) -> None:
    """Writes `summary.json` and `samples.jsonl`; ResultNotWritten where they cannot be written."""
    try:
        (directory / "summary.json").write_text(
            json.dumps(asdict(score) | {"config": config.to_dict()}, indent=2, default=str), encoding="utf-8"
        )
        with (directory / "samples.jsonl").open("w", encoding="utf-8") as file:
            for problem, answers in enumerate(trajectories):
                for number, trajectory in enumerate(answers):
                    messages = [
                        {"role": message["role"], "content": message["content"]} for message in trajectory.message_log
                    ]
                    row = {
                        "problem": problem,
                        "sample": number,
                        "reward": trajectory.reward,
                        "answer": trajectory.answer,
                        "truncated": trajectory.truncated,
                    }
                    file.write(json.dumps(row | {"messages": messages}) + "\n")
    except OSError as error:
        raise ResultNotWritten(directory, score, error) from error


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """Chance that at least one of k answers is right (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1).

    Args:
        right: right answers among those drawn.
        drawn: answers drawn, n.
        k: answers looked at.

    Raises:
        ValueError: k exceeds n, or more answers are right than were drawn.

    >>> pass_at_k(1, 4, 2)
    0.5
    """
    if not 0 < k <= drawn or not 0 <= right <= drawn:
        raise ValueError(
            f"pass@{k} needs at least {k} answers of which at most all are right; there are {drawn} with {right} right"
        )
    return 1.0 - comb(drawn - right, k) / comb(drawn, k)


def consensus_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Chance that the commonest of k answers is right (self-consistency, https://arxiv.org/abs/2203.11171).

    Answers that could not be read (None) count as one wrong answer. A tie counts by the share of right answers among
    the commonest. Two texts are the same vote when they are equal; an answer is right when every answer with its text
    was judged right.

    Args:
        answers: what was read from each of n responses.
        right: whether each response was judged right.
        k: answers that vote.

    Raises:
        ValueError: k exceeds n, or the lengths differ.

    >>> consensus_at_k(["4", "4", "5"], [True, True, False], 3)
    1.0
    """
    if len(answers) != len(right) or not 0 < k <= len(answers):
        raise ValueError(
            f"cons@{k} needs at least {k} answers, each judged; there are {len(answers)} with {len(right)} verdicts"
        )
    counts = Counter(answers)
    judged_wrong = {answer for answer, is_right in zip(answers, right, strict=True) if not is_right}
    winners = [answer for answer in counts if answer is not None and answer not in judged_wrong]
    favourable = sum(_wins(counts, winner, k) for winner in winners)
    return favourable / comb(len(answers), k)


def _wins(counts: Counter[str | None], winner: str, k: int) -> float:
    """Choices of k answers in which `winner` is the commonest; one in which it shares that place with t others counts 1
    / (t + 1).
    """
    others = [count for answer, count in counts.items() if answer != winner]
    total = 0.0
    for votes in range(1, min(counts[winner], k) + 1):
        ways = _ways_to_stay_behind(others, k - votes, votes)
        total += comb(counts[winner], votes) * sum(number / (ties + 1) for ties, number in enumerate(ways))
    return total


def _ways_to_stay_behind(others: Sequence[int], left: int, most: int) -> list[int]:
    """Ways to take `left` answers of the others with at most `most` of each, by how many of them reach `most`."""
    # ways[taken][ties]
    ways = [[0] * (len(others) + 1) for _ in range(left + 1)]
    ways[0][0] = 1
    for count in others:
        following = [[0] * (len(others) + 1) for _ in range(left + 1)]
        for taken, by_ties in enumerate(ways):
            for ties, number in enumerate(by_ties):
                if not number:
                    continue
                for more in range(min(count, most, left - taken) + 1):
                    following[taken + more][ties + (more == most)] += number * comb(count, more)
        ways = following
    return ways[left]
