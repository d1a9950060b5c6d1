"""Configuration of a run of many adapters: a base's file and one file per adapter.

An adapter's file holds only what may differ from adapter to adapter, and is laid over the base's. Invariants: a key of
the base in an adapter's file is refused by its name; no two adapters write into one directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.dotted import at
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.config.layers import merge, merge_mappings, read_layers
from nemo_rl.config.load import load_layers
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.validate import validate

_LORA = "policy.dtensor_cfg.lora_cfg"
_ITS_OWN = (
    "data",
    "env",
    "loss_fn",
    "grpo",
    "checkpointing",
    "logger",
    "multi_lora.weight",
    "policy.optimizer",
    "policy.scheduler",
    "policy.max_grad_norm",
    "policy.train_global_batch_size",
    *(f"{_LORA}.{key}" for key in ("dim", "alpha", "target_modules", "exclude_modules", "match_all_linear")),
    f"{_LORA}.lora_A_init",
    *(
        f"policy.generation.{key}"
        for key in (
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "val_temperature",
            "val_top_p",
            "val_top_k",
            "stop_strings",
        )
    ),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class AdapterConfig:
    """One adapter as it was asked for."""

    name: str
    config: MultiLoraMasterConfig  # the base's, with its own keys in their place
    source: str  # its file


def load_base(path: str | Path, overrides: Sequence[str] = ()) -> tuple[MultiLoraMasterConfig, Mapping[str, object]]:
    """The base's checked configuration, and its merged mapping before defaults. Raises ConfigError: it has mistakes."""
    loaded = load_layers(path, overrides, MultiLoraMasterConfig)
    return validate(loaded.values, MultiLoraMasterConfig, str(path)), loaded.values


def load_adapter(base: Mapping[str, object], path: str | Path) -> AdapterConfig:
    """An adapter's checked configuration: its file over the base's mapping.

    Args:
        base: From `load_base`.
        path: The adapter's file; its stem names the adapter. What it inherits through `defaults` counts as its own.

    Raises ConfigError: the file sets keys of the base, or has mistakes.
    """
    own = merge(read_layers(path))
    name = Path(path).stem
    problems: list[Problem] = []
    if not _NAME.fullmatch(name):
        problems.append(f"{name}: an adapter is named after its file, by letters, digits, dots, - and _")
    problems += [
        f"{key}: belongs to the base, and the adapters share it; set it in the base's file"
        for key in _keys_of_base(own)
    ]
    if problems:
        raise ConfigError(problems, str(path))
    directories = {
        section: {key: str(Path(str(at(base, (section, key), default))) / name)}
        for section, key, default in (
            ("checkpointing", "checkpoint_dir", "results/multi_lora"),
            ("logger", "log_dir", "logs/multi_lora"),
        )
    }
    values = merge_mappings(merge_mappings(base, directories), own)
    return AdapterConfig(name, validate(values, MultiLoraMasterConfig, str(path)), str(path))


def _keys_of_base(values: Mapping[str, object], above: str = "") -> Iterator[str]:
    """The keys that an adapter may not set, as they stand in its file."""
    for key, value in values.items():
        name = f"{above}{key}"
        if any(name == own or name.startswith(f"{own}.") for own in _ITS_OWN):
            continue
        if isinstance(value, Mapping) and any(own.startswith(f"{name}.") for own in _ITS_OWN):
            yield from _keys_of_base(value, f"{name}.")
        else:
            yield name


def check_adapter(base: MultiLoraMasterConfig, adapter: AdapterConfig, others: Sequence[AdapterConfig]) -> None:
    """Whether an adapter may join. Raises ConfigError: its rank is above the base's, or another adapter has its name or
    one of its directories.
    """
    problems: list[Problem] = []
    rank, most = adapter.config.policy.dtensor_cfg.lora_cfg.dim, base.policy.dtensor_cfg.lora_cfg.dim
    if rank > most:
        problems.append(
            f"{_LORA}.dim is {rank}, and the base's engines hold adapters up to rank {most}; lower it, or raise the "
            "base's and start the job again"
        )
    longest = adapter.config.policy.generation.max_new_tokens
    if longest > base.policy.generation.vllm_cfg.max_model_len:
        problems.append(
            f"policy.generation.max_new_tokens is {longest}, and the base's engines hold "
            f"policy.generation.vllm_cfg.max_model_len={base.policy.generation.vllm_cfg.max_model_len} tokens"
        )
    for other in others:
        if other.name == adapter.name:
            problems.append(f"{adapter.name}: {other.source} names an adapter so already; rename one of the files")
        for key, mine, theirs in (
            ("checkpointing.checkpoint_dir", _checkpoints(adapter), _checkpoints(other)),
            ("logger.log_dir", adapter.config.logger.log_dir, other.config.logger.log_dir),
        ):
            if mine is not None and theirs is not None and Path(mine).resolve() == Path(theirs).resolve():
                problems.append(f"{key}: {mine} is that of adapter {other.name} too; each needs its own")
    if problems:
        raise ConfigError(problems, adapter.source)


def _checkpoints(adapter: AdapterConfig) -> str | None:
    cfg = adapter.config.checkpointing
    return cfg.checkpoint_dir if cfg.enabled else None
