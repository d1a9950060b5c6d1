"""A job of many adapters on a pool: a command that trains them on whole GPUs, or in one slot of each.

When its GPUs are wanted back it finishes the running step of each adapter, saves it and leaves; with its next GPUs it
goes on from there. Invariant: adapters that were added or removed meanwhile are those of its next start.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.config import ConfigError
from nemo_rl.config.multi_lora import AdapterConfig, check_adapter, load_adapter, load_base
from nemo_rl.config.world_sizes import cluster_world_size
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.protocol.types import ADAPTERS_STOP_S, LONGEST_STOP_S

ADAPTERS, STOP_S = "adapters", "stop_s"


class AdaptersConfig(CommandConfig):
    """The command behind a wrapper of a base and its adapters."""

    base: str  # the base's file
    overrides: list[str]
    files: list[str]  # of the adapters
    log_dir: str  # of the base
    checkpoint_dir: str  # of the base

    def arguments(self, job: str, records: str, device_bytes: tuple[int, int] | None = None) -> list[str]:
        """Program and arguments with the adapters of now.

        Args:
            records: The folder of the pool's log.
            device_bytes: Memory of each GPU for engines and for training; None for all.
        """
        words = [*self.command, "--job", job, "--records", records]
        if device_bytes is not None:
            words += ["--device-bytes", *map(str, device_bytes)]
        return [*words, "--adapters", *self.files, *self.overrides]

    def in_folders(self, log_dir: str, checkpoint_dir: str) -> AdaptersConfig:
        """The same job that logs and saves elsewhere."""
        overrides = [f"logger.log_dir={log_dir}", f"checkpointing.checkpoint_dir={checkpoint_dir}"]
        changed = {"overrides": [*self.overrides, *overrides], "log_dir": log_dir, "checkpoint_dir": checkpoint_dir}
        return self.model_copy(update=changed)

    def checked(self, files: Sequence[str | Path]) -> AdaptersConfig:
        """The same job with these adapters. Raises ConfigError: a file is wrong, an adapter cannot be resumed or does
        not fit beside the others, or there are more than slots.
        """
        base, raw = load_base(self.base, self.overrides)
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
                [
                    f"{ADAPTERS}: these are {len(adapters)} ({', '.join(one.name for one in adapters)}), and "
                    f"multi_lora.slots is {base.multi_lora.slots}; remove one, or raise it"
                ]
            )
        return self.model_copy(update={"files": [str(file) for file in files]})

    def check_layers(self, file: str) -> None:
        """Checks an adapter against the model. Raises UnsupportedModelError: it names layers that do not exist."""
        from nemo_rl.algorithms.multi_lora.assembly import check_layers

        _, raw = load_base(self.base, self.overrides)
        check_layers(load_adapter(raw, file))

    def without_adapter(self, name: str) -> AdaptersConfig:
        """The same job without an adapter. Raises ConfigError: it has none of this name, or no other."""
        left = [file for file in self.files if Path(file).stem != name]
        if len(left) == len(self.files):
            have = ", ".join(Path(file).stem for file in self.files)
            raise ConfigError([f"there is no adapter {name} here; there are {have}"])
        if not left:
            raise ConfigError([f"{name} is the job's only adapter; drain the job instead"])
        return self.model_copy(update={"files": left})

    def those_on(self, states: Sequence[Mapping[str, object]]) -> AdaptersConfig:
        """The same job without adapters that have ended, by the states that it lists."""
        over = {str(state["name"]) for state in states if state["phase"] in ("done", "failed", "removed")}
        left = [file for file in self.files if Path(file).stem not in over]
        return self.model_copy(update={"files": left or self.files[-1:]})


def adapters_command(wrapper: Mapping[str, object], base_file: Path, overrides: Sequence[str]) -> AdaptersConfig:
    """The command behind a wrapper of a base and its adapters.

    Args:
        wrapper: Its key `adapters` lists files, relative to the base's; `stop_s` may say how long they have to finish
            their steps.
        base_file: The base's configuration.
        overrides: `key=value` for the base.

    Raises ConfigError: `stop_s` is out of bounds; for others see `AdaptersConfig.checked`.
    """
    stop_s = ADAPTERS_STOP_S if wrapper.get(STOP_S) is None else wrapper[STOP_S]
    if isinstance(stop_s, bool) or not isinstance(stop_s, int | float) or not 0 < stop_s <= LONGEST_STOP_S:
        raise ConfigError([f"{STOP_S}: {stop_s!r} must be seconds above 0, at most {LONGEST_STOP_S:g}"], str(base_file))
    names = wrapper.get(ADAPTERS)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{ADAPTERS}: list the adapters' files, relative to {base_file}"], str(base_file))
    base, _ = load_base(base_file, overrides)
    job = AdaptersConfig(
        command=[sys.executable, "-m", "nemo_rl.algorithms.multi_lora", "--config", str(base_file.resolve())],
        gpus=cluster_world_size(base),
        # A Ray cluster of its own: the pool's has lent these GPUs away.
        env={"RAY_ADDRESS": "local"},
        stop_s=stop_s,
        base=str(base_file.resolve()),
        overrides=list(overrides),
        files=[],
        log_dir=base.logger.log_dir,
        checkpoint_dir=base.checkpointing.checkpoint_dir,
    )
    return job.checked([(base_file.parent / name).resolve() for name in names])
