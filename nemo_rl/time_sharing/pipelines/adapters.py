"""A job of many adapters on a pool: a command that trains them on whole GPUs.

When its GPUs are wanted back it finishes the running step of each adapter, saves it and leaves; with its next GPUs it
goes on from there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.config import ConfigError
from nemo_rl.config.multi_lora import AdapterConfig, check_adapter, load_adapter, load_base
from nemo_rl.config.placement import cluster_world_size
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig

ADAPTERS = "adapters"
# A step of the slowest adapter, and saving.
_STOP_S = 600.0


def adapters_command(wrapper: Mapping[str, object], base_file: Path, overrides: Sequence[str]) -> CommandConfig:
    """The command behind a wrapper of a base and its adapters.

    Args:
        wrapper: Its key `adapters` lists files, relative to the base's.
        base_file: The base's configuration.
        overrides: `key=value` for the base.

    Raises ConfigError: a file is wrong, an adapter cannot be resumed, or does not fit beside the others.
    """
    names = wrapper.get(ADAPTERS)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{ADAPTERS}: list the adapters' files, relative to {base_file}"], str(base_file))
    base, raw = load_base(base_file, overrides)
    files = [(base_file.parent / name).resolve() for name in names]
    adapters: list[AdapterConfig] = []
    for file in files:
        adapter = load_adapter(raw, file)
        check_adapter(base, adapter, adapters)
        if not adapter.config.checkpointing.enabled:
            raise ConfigError(
                ["checkpointing.enabled is false: an adapter of a pool goes on from its checkpoint"], str(file)
            )
        adapters.append(adapter)
    if len(adapters) > base.multi_lora.slots:
        raise ConfigError(
            [f"{ADAPTERS} lists {len(adapters)} files, and multi_lora.slots is {base.multi_lora.slots}; raise it"]
        )
    command = [sys.executable, "-m", "nemo_rl.algorithms.multi_lora", "--config", str(base_file.resolve())]
    # A Ray cluster of its own: the pool's has lent these GPUs away.
    return CommandConfig(
        command=[*command, "--adapters", *map(str, files), *overrides],
        gpus=cluster_world_size(base),
        env={"RAY_ADDRESS": "local"},
        stop_s=_STOP_S,
    )
