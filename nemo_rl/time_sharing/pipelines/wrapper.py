"""Wrapper files: the keys by which a file chooses a configuration and the GPUs that it runs on.

They are those of the control plane that this one replaces, and some of ours. Invariant: every key that a wrapper has is
honoured or refused by its dotted name, at any depth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config import ConfigError, RootConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.time_sharing.agents.host_use import bytes_of
from nemo_rl.time_sharing.log.pool_state import HostLimits, Wishes
from nemo_rl.time_sharing.pipelines.adapters import ADAPTERS, STOP_S
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, JOB_PRIORITIES, SCAVENGER

Wrapper = Mapping[str, Any]  # the keys of a wrapper file
Keys = Mapping[str, "Keys | None"]

CONFIG_PATH, OVERRIDES = "nemo_config_path", "nemo_config_overrides"
MAPPINGS = {"train_device_mapping": ACTOR_TRAIN, "infer_device_mapping": ACTOR_INFER}
_STRATEGY_CONFIG: Keys = {"sleep_level": None}
_KEYS: Keys = {
    "pipeline_cls": None,
    "exp_name": None,
    CONFIG_PATH: None,
    OVERRIDES: None,
    **dict.fromkeys(MAPPINGS),
    "num_gpus_per_node": None,
    "rlix_max_colocated_worker_groups": None,
    "verify_model_after_sync": None,
    "nemo_increment_log_dir": None,
    ACTOR_TRAIN: {
        "device_mapping": None,
        "offload_nccl": None,
        "strategy_args": {"strategy_name": None, "strategy_config": {}},
    },
    ACTOR_INFER: {
        "device_mapping": None,
        "offload_nccl": None,
        "strategy_args": {"strategy_name": None, "strategy_config": _STRATEGY_CONFIG},
        "strategy_config": _STRATEGY_CONFIG,
    },
    "weight": None,
    "min_share": None,
    "max_share": None,
    "rank_batch": None,
    "slice_s": None,
    "priority": None,
    "whole_gpus": None,
    "max_slowdown": None,
    "finish_by": None,
    **dict.fromkeys(f"job_{field.name}" for field in fields(HostLimits)),
    ADAPTERS: None,
    STOP_S: None,
}
_MEGATRON = "megatron_train"
_STRATEGIES = {ACTOR_TRAIN: (_MEGATRON, "fsdp2_train"), ACTOR_INFER: ("vllm",)}


def read_wrapper(file: Path) -> Wrapper:
    """The keys of a wrapper file; none for an ordinary configuration. Raises ConfigError: the file cannot be read, has
    a key that is not known, or keys that contradict each other.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError([f"{file}: cannot be read ({error})"]) from error
    if not isinstance(content, dict) or not _KEYS.keys() & content.keys():
        return {}
    if CONFIG_PATH not in content:
        raise ConfigError([f"{CONFIG_PATH}: required beside {', '.join(_KEYS.keys() & content.keys())}"], str(file))
    if problems := [*_unknown(content, _KEYS)] or _contradictions(content):
        raise ConfigError(problems, str(file))
    for key, section in MAPPINGS.items():
        content[key] = content.get(key) or (content.get(section) or {}).get("device_mapping")
    return content


def wishes_of(wrapper: Wrapper) -> Wishes:
    """What its user wishes of the job. Raises ConfigError: it is no number from 1, or no time."""
    slowdown, by = wrapper.get("max_slowdown"), wrapper.get("finish_by")
    problems = []
    if slowdown is not None and not (type(slowdown) in (int, float) and 1 <= slowdown < float("inf")):
        problems.append(f"max_slowdown: {slowdown!r}; expected a number from 1, so many times as long as alone")
    if isinstance(by, str):
        with suppress(ValueError):
            by = datetime.fromisoformat(by)
    if isinstance(by, datetime):
        # A time without a zone is that of the machine where the job is submitted.
        by = by.astimezone().timestamp()
        if by <= time.time():
            problems.append(f"finish_by: {wrapper['finish_by']} has passed; give a time that is to come")
    elif by is not None:
        problems.append(f"finish_by: {by!r}; expected a day and a time, such as 2031-05-17 18:00")
    if problems:
        raise ConfigError(problems)
    return Wishes(None if slowdown is None else float(slowdown), by)


def _unknown(content: Mapping[str, Any], known: Keys, at: str = "") -> Iterator[str]:
    """What of a mapping is no key of a wrapper, or no mapping where keys are expected."""
    for name, value in content.items():
        key = f"{at}{name}"
        if name not in known:
            have = f" {at[:-1] or 'A wrapper'} has {', '.join(known)}." if known else f" {at[:-1]} has no keys here."
            yield f"{key}: unknown key.{did_you_mean(str(name), known) or have}"
        elif (below := known[name]) is not None and value is not None:
            if isinstance(value, Mapping):
                yield from _unknown(value, below, f"{key}.")
            else:
                yield f"{key}: {value!r} is no mapping of keys"


def _contradictions(content: Wrapper) -> list[str]:
    """What of a wrapper's keys cannot be done, or contradicts another of its keys."""
    problems = []
    for key, name in MAPPINGS.items():
        section = content.get(name) or {}
        given = {key: content.get(key), f"{name}.device_mapping": section.get("device_mapping")}
        for where, gpus in given.items():
            if gpus is not None and not (isinstance(gpus, list) and all(type(gpu) is int for gpu in gpus)):
                problems.append(f"{where}: {gpus!r} is not a list of GPU numbers such as [0, 1]")
            elif gpus == []:
                problems.append(f"{where} is empty; name its GPUs, or leave the key out")
        here, there = given.values()
        if here is not None and there is not None and here != there:
            problems.append(f"{key}: {here}, but {name}.device_mapping: {there}; give one, or the same twice")
        if section.get("offload_nccl") is False:
            problems.append(f"{name}.offload_nccl: false, but communicators that stay would keep memory of the pool")
        strategy = (section.get("strategy_args") or {}).get("strategy_name")
        if strategy is not None and strategy not in _STRATEGIES[name]:
            known = ", ".join(_STRATEGIES[name])
            problems.append(f"{name}.strategy_args.strategy_name: {strategy!r}; there is {known} here")
    if content.get(STOP_S) is not None and not content.get(ADAPTERS):
        problems.append(f"{STOP_S}: is for a wrapper with {ADAPTERS}; a command has external.{STOP_S}")
    priority = content.get("priority")
    if priority not in (None, *JOB_PRIORITIES):
        problems.append(f"priority: {priority!r}; expected {', '.join(JOB_PRIORITIES)}")
    if priority == SCAVENGER and content.get(ADAPTERS):
        problems.append(f"priority: {SCAVENGER}, but adapters train: they could not give their GPUs back at any time")
    level = _sleep_level(content)
    if level not in (None, 1, 2):
        problems.append(f"{ACTOR_INFER}: sleep_level {level}; engines sleep at level 1 or 2")
    if content.get("nemo_increment_log_dir") is False:
        problems.append(
            "nemo_increment_log_dir: false, but every run writes into a numbered folder of its own below "
            "logger.log_dir; leave the key out"
        )
    groups = content.get("rlix_max_colocated_worker_groups")
    if groups is not None and (type(groups) is not int or groups < 2):
        problems.append(
            f"rlix_max_colocated_worker_groups: {groups!r}, but a job's training and its engines are two groups on a "
            "GPU; any number from 2 on is possible"
        )
    return problems


def limits_of(wrapper: Wrapper) -> HostLimits:
    """What a job may take of its hosts. Raises ConfigError: a value is no size, or no number of files."""
    found: dict[str, int] = {}
    problems = []
    for field in fields(HostLimits):
        if (value := wrapper.get(f"job_{field.name}")) is None:
            continue
        try:
            if isinstance(value, bool) or (field.name == "files" and not isinstance(value, int)):
                raise ValueError(f"{value!r}: expected a whole number above 0")
            found[field.name] = bytes_of(str(value))
        except ValueError as error:
            problems.append(f"job_{field.name}: {error}")
    if problems:
        raise ConfigError(problems)
    return HostLimits(**found)


def check_strategy(wrapper: Wrapper, config: object) -> None:
    """Raises ConfigError: a wrapper names another training backend than its configuration."""
    strategy = ((wrapper.get(ACTOR_TRAIN) or {}).get("strategy_args") or {}).get("strategy_name")
    if strategy is None or not isinstance(config, RootConfig):
        return
    if (strategy == _MEGATRON) is not config.policy.megatron_cfg.enabled:
        backend = "megatron_cfg" if config.policy.megatron_cfg.enabled else "dtensor_cfg"
        raise ConfigError(
            [f"{ACTOR_TRAIN}.strategy_args.strategy_name: {strategy!r}, but policy.{backend}.enabled is true"]
        )


def _sleep_level(wrapper: Wrapper) -> object:
    infer = wrapper.get(ACTOR_INFER) or {}
    strategy = (infer.get("strategy_args") or {}).get("strategy_config") or infer.get("strategy_config") or {}
    return strategy.get("sleep_level")


def overrides_of(wrapper: Mapping[str, object]) -> list[str]:
    """What a wrapper's own keys say of a GRPO configuration."""
    level, verify = _sleep_level(wrapper), wrapper.get("verify_model_after_sync")
    return [f"policy.generation.vllm_cfg.sleep_level={level}"] * (level is not None) + [
        f"weight_sync.verify={str(bool(verify)).lower()}"
    ] * (verify is not None)
