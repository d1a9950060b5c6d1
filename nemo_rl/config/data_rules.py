"""Rules of data and environments: validation has data, loaders have their shares, environments exist.

Whether a dataset or a column exists is found out when it is read; this file knows keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.env import EnvConfig, UserEnvironmentConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig


def validation_has_data(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    switches = {
        f"grpo.val_period {grpo.val_period}": grpo.val_period > 0,
        "grpo.val_at_start": grpo.val_at_start,
        "grpo.val_at_end": grpo.val_at_end,
        "grpo.stop_at_validation_metric": grpo.stop_at_validation_metric is not None,
    }
    yield from _validation_data(config, [name for name, on in switches.items() if on])


def sft_validation_has_data(config: SFTMasterConfig) -> Iterator[str]:
    sft = config.sft
    switches = {f"sft.val_period {sft.val_period}": sft.val_period > 0, "sft.val_at_start": sft.val_at_start, "sft.val_at_end": sft.val_at_end}
    yield from _validation_data(config, [name for name, on in switches.items() if on])


def loaders_have_their_shares(config: RootConfig) -> Iterator[str]:
    data = config.data
    if not data.use_multiple_dataloader:
        for key in ("num_prompts_per_dataloader", "custom_dataloader"):
            if data[key] is not None:
                yield f"data.{key} needs data.use_multiple_dataloader: true"
        return
    if data.num_prompts_per_dataloader is None:
        yield "data.use_multiple_dataloader needs data.num_prompts_per_dataloader"
    elif isinstance(config, MasterConfig) and config.grpo.num_prompts_per_step % data.num_prompts_per_dataloader:
        yield (
            f"data.num_prompts_per_dataloader {data.num_prompts_per_dataloader} does not divide grpo.num_prompts_per_step {config.grpo.num_prompts_per_step}"
        )


def training_has_a_dataset(config: RootConfig) -> Iterator[str]:
    if not config.data.train:
        yield "data.train: an empty list; name at least one dataset"


def environments_exist(config: MasterConfig) -> Iterator[str]:
    names = environment_names(config.env)
    used = set()
    for key, entry in _entries(config):
        used.add(entry.env_name)
        if entry.env_name not in names:
            yield f"{key}.env_name: there is no environment {entry.env_name!r}.{did_you_mean(entry.env_name, names)} A new one needs env.{entry.env_name}.class"
    for name, section in (config.env.model_extra or {}).items():
        if isinstance(section, UserEnvironmentConfig) and section.env_class is None and name not in used:
            built_in = [known for known in names if known not in (config.env.model_extra or {})]
            yield f"env.{name}: unknown environment, and nothing uses it.{did_you_mean(name, built_in)} A new one needs env.{name}.class"


def environment_names(env: EnvConfig) -> list[str]:
    """Names that `data.*.env_name` may hold: the built-in environments and those the configuration adds."""
    built_in = [name for name in EnvConfig.model_fields if not name.startswith("should_")]
    return [*built_in, *(env.model_extra or {})]


def _entries(config: RootConfig) -> Iterator[tuple[str, DatasetConfig]]:
    for split, entries in (("train", config.data.train), ("validation", config.data.validation or [])):
        for index, entry in enumerate(entries):
            yield (f"data.{split}" if len(entries) == 1 else f"data.{split}.{index}"), entry


def _validation_data(config: RootConfig, switches: list[str]) -> Iterator[str]:
    held_out = any(entry.split_validation_size > 0 for entry in config.data.train)
    if switches and not config.data.validation and not held_out:
        yield (
            f"data.validation is null and no data.train has split_validation_size, but {', '.join(switches)} "
            f"{'asks' if len(switches) == 1 else 'ask'} for validation; name a dataset, or switch validation off"
        )


DATA_RULES: tuple[Callable[[MasterConfig], Iterator[str]], ...] = (
    validation_has_data,
    loaders_have_their_shares,
    training_has_a_dataset,
    environments_exist,
)
SFT_DATA_RULES: tuple[Callable[[SFTMasterConfig], Iterator[str]], ...] = (sft_validation_has_data, loaders_have_their_shares, training_has_a_dataset)
