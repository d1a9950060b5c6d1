"""NeMo-RL's evaluator by its functions: engines and problems apart, and the sums over problems that its metrics are.

Invariant: what these functions evaluate is what `examples/run_eval.py` evaluates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.algorithms.estimators import consensus_at_k, pass_at_k
from nemo_rl.compat.loops import ShapeChanged
from nemo_rl.config import EvalMasterConfig, check_config
from nemo_rl.config.evaluation import EvalDataConfig
from nemo_rl.config.foreign import adapt

if TYPE_CHECKING:
    from nemo_rl.algorithms.evaluation import Score
    from nemo_rl.algorithms.placement import Placement

_FORM = (
    "setup(master_config) or setup(master_config, tokenizer, dataset), and run_env_eval(master_config) or "
    "run_env_eval(vllm_generation, dataloader, env, master_config) (docs/from_nemo_rl.md)"
)
_MULTIMODAL = ("mmau", "TwinkStart/MMAU", "daily-omni")


@dataclass
class _Open:
    generation: object
    tokenizer: Any
    placement: Placement
    stack: ExitStack


_OPEN: list[_Open] = []


def eval_pass_k(rewards: torch.Tensor, num_tests_per_prompt: int, k: int) -> float:
    """Sum of `pass@k` over prompts. `rewards`: [B * n], the n answers of a prompt side by side."""
    return sum(pass_at_k(of_prompt, k) for of_prompt in rewards.view(-1, num_tests_per_prompt).tolist())


def eval_cons_k(
    rewards: torch.Tensor, num_tests_per_prompt: int, k: int, extracted_answers: Sequence[str | None]
) -> float:
    """Sum of `cons@k` over prompts. `rewards`, `extracted_answers`: of B * n responses, a prompt's side by side."""
    size = num_tests_per_prompt
    votes = [extracted_answers[start : start + size] for start in range(0, len(extracted_answers), size)]
    rows = rewards.view(-1, size).tolist()
    return sum(consensus_at_k(answers, row, k) for answers, row in zip(votes, rows, strict=True))


def is_multimodal_dataset(name: str) -> bool:
    """Whether a data set is of images or sound, which are not built."""
    return name in _MULTIMODAL


def load_eval_dataset(data_config: Mapping[str, object] | EvalDataConfig) -> Any:
    """The problems of `data`: an object with `rekeyed_ds` (the rows), `task_spec` and `processor`. Raises DataError:
    they cannot be read.
    """
    from nemo_rl.data.datasets.registry import load_response_dataset

    values = data_config.to_dict() if isinstance(data_config, EvalDataConfig) else dict(data_config)
    data = EvalDataConfig.read(adapt({"data": values}, EvalMasterConfig).values["data"])  # type: ignore[arg-type]
    dataset: Any = load_response_dataset(data, "data")
    dataset.rekeyed_ds = dataset.dataset
    return dataset


def setup(master_config: EvalMasterConfig | Mapping[str, object], tokenizer: Any = None, dataset: Any = None) -> Any:
    """Called with a configuration alone, checks and returns it, for `run_env_eval(master_config)`. With a tokenizer and
    an `AllTaskProcessedDataset`, the engines, a loader of the problems, and the configuration.

    Raises ShapeChanged: only one of both is given; otherwise as `nemo_rl.algorithms.evaluation.evaluate`.
    """
    config = EvalMasterConfig.read(master_config)
    check_config(config)
    if tokenizer is None and dataset is None:
        return config
    if not hasattr(tokenizer, "apply_chat_template") or not hasattr(dataset, "default_task_data_spec"):
        raise ShapeChanged(f"here it is {_FORM}, with an AllTaskProcessedDataset")
    from torch.utils.data import DataLoader

    from nemo_rl.algorithms import evaluation
    from nemo_rl.algorithms.startup import check_tokens, hold_to_vocabulary, set_seed
    from nemo_rl.data.loader import rl_collate_fn
    from nemo_rl.models.policy.model_config import model_config

    set_seed(config.eval.seed)
    policy, placement = evaluation.evaluated_policy(config), evaluation.OwnPlacement()
    model = model_config(policy)
    ends = check_tokens(policy, model, tokenizer, _say, key="generation.stop_token_ids")
    hold_to_vocabulary([dataset], tokenizer, model)
    with ExitStack() as stack:
        clusters = evaluation.reserved(config, placement, stack)
        generation = evaluation.start_engines(config, policy, clusters, tokenizer, ends.ids, placement)
        stack.callback(generation.shutdown)
        generation.wait_until_started()
        _OPEN.append(_Open(generation, tokenizer, placement, stack.pop_all()))
    at_once = config.generation.num_prompts_per_step
    size = len(dataset) if at_once in (-1, 0) else at_once
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=size, shuffle=False, collate_fn=rl_collate_fn)
    return generation, loader, config


def run_env_eval(*given: Any, **named: Any) -> Score:
    """Evaluates, prints the result, and ends engines and environment.

    Args:
        *given, **named: `master_config` alone, or what `setup` returned with the environment's actor before the
            configuration: `(vllm_generation, dataloader, env, master_config)`.

    Returns the score. Raises ShapeChanged: something else is given.
    """
    from nemo_rl.algorithms import evaluation

    names = ("vllm_generation", "dataloader", "env", "master_config")
    parts = dict(zip(names if len(given) == len(names) else ("master_config",), given, strict=False)) | named
    if set(parts) == {"master_config"} and len(given) + len(named) == 1:
        config = setup(parts["master_config"])
        score = evaluation.evaluate(config)
        _say_all(evaluation.lines_of(config, score))
        return score
    opened = next((one for one in _OPEN if one.generation is parts.get("vllm_generation")), None)
    if set(parts) != set(names) or opened is None:
        raise ShapeChanged(f"here it is {_FORM}")
    import ray

    from nemo_rl.experience.environment_batcher import EnvironmentHandle

    _OPEN.remove(opened)
    config, dataset, actor = EvalMasterConfig.read(parts["master_config"]), parts["dataloader"].dataset, parts["env"]
    with opened.stack:
        tasks = list(dict.fromkeys(str(row.get("task_name")) for row in dataset.dataset))
        problems = evaluation.Problems(dataset, len(dataset), tasks)
        handle = EnvironmentHandle.of(config.data.env_name, [actor], config.env)
        score = evaluation.measured(
            config, parts["vllm_generation"], opened.tokenizer, problems, handle, opened.placement, _say
        )
        _say_all(evaluation.lines_of(config, score))
        ray.kill(actor)
    return score


def _say(line: str) -> None:
    _say_all([line])


def _say_all(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
