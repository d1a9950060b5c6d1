"""A job of the pool that is a command: what to run, and on how many GPUs.

Reads the section `external` of a file.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from nemo_rl.config import ConfigError, Section
from nemo_rl.time_sharing.protocol.types import LONGEST_STOP_S

EXTERNAL = "external"
_SCAVENGER_STOP_S = 5.0


class CommandConfig(Section):
    """A command that gives its GPUs back on request, and is started again when it gets some."""

    command: list[str] = Field(min_length=1, description="Program and arguments.")
    gpus: int = Field(1, ge=1, description="GPUs that it needs at once; of one node, with neighbouring numbers.")
    env: dict[str, str] = Field(
        default_factory=dict[str, str], description="Environment variables beside those of the pool."
    )
    stop_s: float = Field(
        30.0,
        gt=0,
        le=LONGEST_STOP_S,
        description="Seconds from SIGTERM, when its GPUs are wanted back, until it is killed; others wait for as long.",
    )


def stop_at_once(config: CommandConfig) -> None:
    """Lets a command that runs in gaps have its GPUs only for as long as others need not wait. Raises ConfigError: it
    asks for longer.
    """
    if "stop_s" in config.model_fields_set and config.stop_s > _SCAVENGER_STOP_S:
        raise ConfigError(
            [
                f"{EXTERNAL}.stop_s: {config.stop_s:g}, but a scavenger is never waited for; at most "
                f"{_SCAVENGER_STOP_S:g}, or leave out its priority"
            ]
        )
    config.stop_s = min(config.stop_s, _SCAVENGER_STOP_S)


def read_command(values: dict[str, object], source: Path) -> CommandConfig:
    """The command of a file's merged contents. Raises ConfigError: a key is unknown or a value wrong."""
    others = sorted(set(values) - {EXTERNAL})
    if others:
        raise ConfigError([f"a file with a section {EXTERNAL!r} has no other; found {', '.join(others)}"], str(source))
    try:
        return CommandConfig.model_validate(values[EXTERNAL])
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, (EXTERNAL, *e['loc'])))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(problems, str(source)) from error
