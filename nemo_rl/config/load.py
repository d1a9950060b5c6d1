"""Loads a configuration: files with inheritance, then overrides, then schema, status and rules.

`load_config` gives the merged mapping as NeMo-RL's scripts expect it; `load_master_config` gives the checked
configuration. Knows the order of the stages, and nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf

from nemo_rl.config.defaults import register_omegaconf_resolvers
from nemo_rl.config.errors import OverridesError
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.layers import Layer, merge, read_layers
from nemo_rl.config.master import CompleteConfig, MasterConfig, SFTMasterConfig
from nemo_rl.config.overrides import Action, Override, apply, names_beside, parse_hydra_overrides, parse_override
from nemo_rl.config.schema import is_known, is_null_when_deleted, names_in
from nemo_rl.config.validate import validate

Config = TypeVar("Config", bound=CompleteConfig)


@dataclass(frozen=True)
class Loaded:
    """The merged mapping before defaults, and the layers it came from, weakest first."""

    values: dict[str, Any]
    layers: list[Layer]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The file at `path` with its parents and overrides merged; interpolations unresolved, no defaults filled in.

    Raises:
        ConfigError: a file cannot be read.
        OverridesError: an override cannot be applied.
    """
    register_omegaconf_resolvers()
    return parse_hydra_overrides(OmegaConf.create(merge(read_layers(path))), overrides)


@overload
def load_master_config(path: str | Path | None, overrides: Sequence[str] = ()) -> MasterConfig: ...
@overload
def load_master_config(path: str | Path | None, overrides: Sequence[str], kind: type[Config]) -> Config: ...
@overload
def load_master_config(path: str | Path | None, overrides: Sequence[str] = (), *, kind: type[Config]) -> Config: ...


def load_master_config(
    path: str | Path | None, overrides: Sequence[str] = (), kind: type[CompleteConfig] = MasterConfig
) -> CompleteConfig:
    """The checked configuration of a run.

    Args:
        path: a YAML file; None stands for the defaults alone.
        overrides: in the grammar of `nemo_rl.config.overrides`; keys that the schema knows may be set though no file
            writes them.
        kind: MasterConfig for GRPO, SFTMasterConfig for SFT, EvalMasterConfig for evaluation.

    Raises:
        ConfigError: with one line per mistake.
        OverridesError: an override cannot be parsed or applied.
    """
    return validate(load_layers(path, overrides, kind).values, kind, source=None if path is None else str(path))


def load_layers(path: str | Path | None, overrides: Sequence[str], kind: type[CompleteConfig]) -> Loaded:
    """Files and overrides merged, with every override as a layer of its own."""
    layers = [] if path is None else read_layers(path)
    values = merge(layers)
    problems: list[str] = []
    for text in overrides:
        try:
            override = parse_override(text)
            values = _override(values, override, kind)
        except OverridesError as error:
            problems += error.problems
            continue
        layers.append(Layer(f"override {text!r}", _nested(override.key, override.value)))
    if problems:
        raise OverridesError(problems)
    return Loaded(values, layers)


def kind_of_file(path: str | Path | None) -> type[MasterConfig | SFTMasterConfig | EvalMasterConfig]:
    """SFT when the merged file has a section `sft`, evaluation when it has `eval`, GRPO otherwise."""
    sections: dict[str, Any] = {} if path is None else merge(read_layers(path))
    return SFTMasterConfig if "sft" in sections else EvalMasterConfig if "eval" in sections else MasterConfig


def _override(values: dict[str, Any], override: Override, kind: type[CompleteConfig]) -> dict[str, object]:
    changed = apply(
        values, override, lambda key: is_known(kind, key), lambda key: names_in(kind, key) or names_beside(values, key)
    )
    if override.action is Action.DELETE and is_null_when_deleted(kind, override.key):
        # NeMo-RL reads a deleted key as null; without this the schema's default would come back.
        return apply(
            changed, Override(override.text, Action.FORCE, override.key, None), lambda key: True, lambda key: []
        )
    return changed


def _nested(key: Sequence[str], value: object) -> dict[str, Any]:
    nested: Any = value
    for part in reversed(key):
        nested = {part: nested}
    return nested
