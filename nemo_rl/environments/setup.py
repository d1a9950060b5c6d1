"""Data and environments of a run together: prompts, and for each task the actor that judges it.

Starts one actor per environment name, however many tasks use it. Knows neither policy nor loop. Invariant: every task
has an environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from nemo_rl.config import DataConfig, EnvConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.environments.registry import create_env, environment_class, section_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResponseData = tuple[
    AllTaskProcessedDataset,
    AllTaskProcessedDataset | None,
    dict[str, ActorHandle[object]],
    dict[str, ActorHandle[object]],
]


def setup_response_data(
    tokenizer: PreTrainedTokenizerBase,
    data_config: DataConfig | Mapping[str, object],
    env_configs: EnvConfig | Mapping[str, object],
    is_vlm: bool = False,
) -> ResponseData:
    """Loads datasets and starts environments.

    Args:
        tokenizer: a Hugging Face tokenizer.
        data_config: `data`, as a section or a plain mapping.
        env_configs: `env`, the same.
        is_vlm: not built yet.

    Returns:
        Training prompts, validation prompts (None without), environment actor per training task and per validation
        task.

    Raises:
        DataError: see `nemo_rl.data.setup.load_datasets`.
        UnknownEnvironment, ConfigError: see `nemo_rl.environments.registry.environment_class`.
    """
    if is_vlm:
        raise DataError("datasets of images (is_vlm) are not built yet")
    data_config, env_configs = DataConfig.read(data_config), EnvConfig.read(env_configs)
    datasets = load_datasets(tokenizer, data_config)
    actors = start_environments(
        [*datasets.env_of_task.values(), *datasets.env_of_validation_task.values()], env_configs
    )
    return datasets.train, datasets.validation, *_by_task(datasets, actors)


def start_environments(names: Iterable[str], env_configs: EnvConfig) -> dict[str, ActorHandle[object]]:
    """One actor per name; every class is looked up before the first actor starts."""
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        environment_class(name, section_of(name, env_configs))
    return {name: create_env(name, env_configs) for name in wanted}


def _by_task(
    datasets: TaskDatasets, actors: dict[str, ActorHandle[object]]
) -> tuple[dict[str, ActorHandle[object]], dict[str, ActorHandle[object]]]:
    train = {task: actors[env] for task, env in datasets.env_of_task.items()}
    return train, {task: actors[env] for task, env in datasets.env_of_validation_task.items()}
