"""What a run would find at its start, without starting it: for `python -m nemo_rl.config check`.

Calls what a start calls, as far as it needs neither Ray nor accelerators, and goes on after a mistake. Invariant:
nothing is downloaded and nothing is written; what only the hub has is named as not looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from huggingface_hub import try_to_load_from_cache as _cached

from nemo_rl.algorithms.evaluation import check_evaluated, evaluated_policy, find_model, load_problems
from nemo_rl.algorithms.grpo import assembly as grpo
from nemo_rl.algorithms.placement import check_policy
from nemo_rl.algorithms.sft import assembly as sft
from nemo_rl.algorithms.startup import check_cpu_is_meant, check_data, check_tokens
from nemo_rl.config import ConfigError, EvalMasterConfig, MasterConfig, PolicyConfig, SFTMasterConfig
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.data_rules import data_entries
from nemo_rl.config.errors import UserError, in_one_line
from nemo_rl.config.master import CompleteConfig, MultiLoraMasterConfig, RootConfig
from nemo_rl.data.datasets.registry import load_response_dataset, reads_files
from nemo_rl.data.processors import get_processor
from nemo_rl.data.setup import load_datasets
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.ray_runtime import accelerator_here
from nemo_rl.environments.environment_registry import check_rows, environment_class, section_of
from nemo_rl.models.policy.model_config import looks_like_a_path
from nemo_rl.models.policy.optimizer import check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.data.setup import Mask, TaskDatasets

Result = TypeVar("Result")


@dataclass
class _Found:
    mistakes: dict[str, None] = field(default_factory=dict)  # in order, each once
    notes: list[str] = field(default_factory=list)

    def of(self, look: Callable[[], Result]) -> Result | None:
        """The result of a look; None for one that ended with a mistake, which is kept."""
        try:
            return look()
        except ConfigError as error:
            self.mistakes |= dict.fromkeys(map(str, error.problems))
        except (UserError, OSError) as error:
            self.mistakes[str(error) if isinstance(error, UserError) else in_one_line(error) or str(error)] = None
        return None


def mistakes_of(config: CompleteConfig) -> tuple[list[str], list[str]]:
    """The mistakes that a start of a checked configuration would find, and notes on what was not looked at."""
    found = _Found()
    if isinstance(config, EvalMasterConfig):
        _of_an_evaluation(config, found)
    elif isinstance(config, SFTMasterConfig):
        loaders, mask = partial(sft.make_loaders, config), sft.mask_of(config)
        _of_training(config, partial(check_policy, config), loaders, mask, found)
    elif isinstance(config, MasterConfig):
        _environments([entry.env_name for _, entry in data_entries(config)], config, found)
        _of_training(config, partial(grpo.check, config), lambda rows, _: grpo.make_loaders(config, rows), None, found)
    return list(found.mistakes), found.notes


def _of_training(
    config: RootConfig,
    check: Callable[[], PretrainedConfig],
    make_loaders: Callable[[TaskDatasets, PreTrainedTokenizerBase], object],
    mask: Mask | None,
    found: _Found,
) -> None:
    policy = config.policy
    if not policy.megatron_cfg.enabled:
        found.of(lambda: check_names(policy.optimizer, policy.scheduler))
    if isinstance(config, MultiLoraMasterConfig):
        # Data, and the algorithm's keys, are those of each adapter's file.
        found.notes.append("files of adapters are not looked at; the job's start does")
        return
    _directories({"logger.log_dir": config.logger.log_dir}, found)
    if config.checkpointing.enabled:
        _directories({"checkpointing.checkpoint_dir": config.checkpointing.checkpoint_dir}, found)
    entries = dict(data_entries(config))
    _processors(entries, found)
    model = _look_at_model(policy.model_name, "policy.model_name", check, found)
    tokenizer = None if model is None else _look_at_tokenizer(policy, found)
    if model is None or tokenizer is None:
        _rows_alone(entries, found)
        return
    try:
        if (here := accelerator_here(config.cluster.device)) is not None:
            check_cpu_is_meant(config, here, model, _nothing)
    except UserError as error:
        # The machine of the run may be another one.
        found.notes.append(f"on this machine a start is refused: {getattr(error, 'problems', [error])[0]}")
    ends = found.of(lambda: check_tokens(policy, model, tokenizer, _nothing))
    if ends is None or not _all_here(entries, found):
        return

    def rows() -> None:
        datasets = load_datasets(tokenizer, config.data, ends.texts)
        check_data(datasets, tokenizer, model, config.data.max_input_seq_length, _nothing, mask)
        make_loaders(datasets, tokenizer)

    found.of(rows)


def _of_an_evaluation(config: EvalMasterConfig, found: _Found) -> None:
    name = config.data.env_name
    if config.eval.save_path is not None:
        _directories({"eval.save_path": config.eval.save_path}, found)
    _environments([name], config, found)
    entries: dict[str, DatasetConfig] = {"data": config.data}
    _processors(entries, found)
    before = len(found.mistakes)
    found.of(lambda: find_model(config))
    if len(found.mistakes) > before:
        _rows_alone(entries, found)
        return
    policy = evaluated_policy(config)
    name_of_model = config.generation.model_name
    model = _look_at_model(name_of_model, "generation.model_name", lambda: check_evaluated(policy), found)
    tokenizer = None if model is None else _look_at_tokenizer(policy, found)
    if model is None or tokenizer is None:
        _rows_alone(entries, found)
        return
    found.of(lambda: check_tokens(policy, model, tokenizer, _nothing, key="generation.stop_token_ids"))
    if _all_here(entries, found):
        problems = found.of(lambda: load_problems(config, tokenizer, _nothing))
        if problems is not None:
            by_task = dict.fromkeys(problems.tasks, problems.dataset)
            found.of(lambda: check_rows(by_task, dict.fromkeys(problems.tasks, name), config.env))


def _directories(wanted: Mapping[str, str], found: _Found) -> None:
    """Whether directories of the run can be made and written. `wanted`: by their dotted keys."""
    for key, folder in wanted.items():
        path = Path(folder).absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            why = "cannot be written" if there.is_dir() else "is a file"
            found.mistakes[f"{key}={folder}: {there} {why}; choose a directory that can be written"] = None


def _environments(names: list[str], config: MasterConfig | EvalMasterConfig, found: _Found) -> None:
    for name in dict.fromkeys(names):
        found.of(lambda name=name: environment_class(name, section_of(name, config.env)))


def _processors(entries: Mapping[str, DatasetConfig], found: _Found) -> None:
    for entry in entries.values():
        found.of(lambda entry=entry: get_processor(entry.processor))


def _look_at_model(name: str, key: str, check: Callable[[], Result], found: _Found) -> Result | None:
    """The check's result; of a model that only the hub may have, a note."""
    if not looks_like_a_path(name) and not Path(name).exists() and not isinstance(_cached(name, "config.json"), str):
        found.notes.append(f"{key}={name} is not on this machine, so model and tokenizer were not looked at")
        return None
    return found.of(check)


def _look_at_tokenizer(policy: PolicyConfig, found: _Found) -> PreTrainedTokenizerBase | None:
    return found.of(lambda: get_tokenizer(policy.tokenizer, trust_remote_code=policy.trust_remote_code))


def _all_here(entries: Mapping[str, DatasetConfig], found: _Found) -> bool:
    absent = [key for key, entry in entries.items() if not reads_files(entry)]
    if absent:
        found.notes.append(f"rows of {', '.join(absent)} come from the hub and were not looked at")
        _rows_alone({key: entry for key, entry in entries.items() if key not in absent}, found)
    return not absent


def _rows_alone(entries: Mapping[str, DatasetConfig], found: _Found) -> None:
    """Reads the rows that are here, without a tokenizer to make prompts of them."""
    for key, entry in entries.items():
        if reads_files(entry):
            found.of(lambda key=key, entry=entry: load_response_dataset(entry, key))


def _nothing(_: str) -> None:
    """What a start would say of its data is not asked for."""
