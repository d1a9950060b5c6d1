"""Finds the dataset that an entry of `data.train` or `data.validation` names.

A name is in the table of named datasets, in that of generated ones, or the dotted path of a user's class. Knows no
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_rl.config import DatasetConfig
from nemo_rl.config.data_rules import UNBUILT_DATASETS
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.datasets.generated import ArithmeticDataset, ReasoningGymDataset
from nemo_rl.data.datasets.named import ALIASES, SOURCES, NamedDataset
from nemo_rl.data.datasets.raw import RawDataset
from nemo_rl.data.datasets.sliding_puzzle import SlidingPuzzleDataset
from nemo_rl.data.interfaces import DataError

_GENERATED: dict[str, Callable[[DatasetConfig, str, str], RawDataset]] = {
    "arithmetic": ArithmeticDataset,
    "reasoning_gym": ReasoningGymDataset,
    "sliding_puzzle": SlidingPuzzleDataset,
}


def load_response_dataset(
    config: DatasetConfig | Mapping[str, object], key: str = "data.train", task_name: str | None = None
) -> RawDataset:
    """Loads a dataset, with its prompt, processor and validation split.

    Args:
        config: the entry, as a section or a plain mapping.
        key: its dotted key, for messages.
        task_name: name of the task; None takes the dataset's.

    Raises:
        DataError: the name, its rows, a column, a prompt file or the processor does not exist, or there is no row.
    """
    config = DatasetConfig.read(config)
    dataset = _load(config, key, task_name or config.dataset_name)
    dataset.set_task_spec(config)
    dataset.set_processor(config)
    dataset.split_train_validation(config.split_validation_size, config.seed)
    if config.repeat > 1:
        dataset.dataset = dataset.dataset.select(list(range(len(dataset.dataset))) * config.repeat)
    return dataset


def _load(config: DatasetConfig, key: str, task_name: str) -> RawDataset:
    name = config.dataset_name
    if "." in name and name not in SOURCES:
        return _users_class(config, key)
    if name in _GENERATED:
        return _GENERATED[name](config, task_name, key)
    if name in UNBUILT_DATASETS:
        raise DataError(f"{key}.dataset_name: {name!r} is not built yet: {UNBUILT_DATASETS[name]}")
    if name not in SOURCES and name not in ALIASES:
        known = [*SOURCES, *ALIASES, *_GENERATED]
        raise DataError(
            f"{key}.dataset_name: there is no dataset {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}; "
            "for your own rows use ResponseDataset with data_path, or the dotted path of a class"
        )
    return NamedDataset(config, task_name, key)


def _users_class(config: DatasetConfig, key: str) -> RawDataset:
    factory = import_dotted(config.dataset_name, f"{key}.dataset_name")
    settings: dict[str, object] = config.to_dict()
    dataset = factory(**settings)
    for attribute in ("dataset", "task_name"):
        if not hasattr(dataset, attribute):
            raise DataError(
                f"{key}.dataset_name: {config.dataset_name} must set `{attribute}`; see "
                "nemo_rl.data.datasets.RawDataset"
            )
    if len(dataset.dataset) == 0:
        raise DataError(f"{key}: {config.dataset_name} is empty")
    return dataset
