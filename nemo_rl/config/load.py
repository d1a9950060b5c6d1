"""Loads a configuration: files with inheritance, then overrides, then schema, status and rules.

`load_config` gives the merged mapping as NeMo-RL's scripts expect it; `load_master_config` gives the checked
configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

from omegaconf import DictConfig

from nemo_rl.config.data import prompt_places
from nemo_rl.config.defaults import register_omegaconf_resolvers, resolve, with_defaults
from nemo_rl.config.dotted import ABSENT, at, put
from nemo_rl.config.errors import ConfigError, OverridesError
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.foreign import adapt
from nemo_rl.config.layers import Layer, merge, read_layers, with_sources
from nemo_rl.config.master import (
    CompleteConfig,
    DistillationMasterConfig,
    MasterConfig,
    MultiLoraMasterConfig,
    SFTMasterConfig,
)
from nemo_rl.config.overrides import Action, Override, apply, parse_hydra_overrides, parse_override
from nemo_rl.config.validate import validate

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=CompleteConfig)


class Loaded(NamedTuple):
    """The merged mapping before defaults, the layers it came from, weakest first, and notes on overrides."""

    values: dict[str, object]
    layers: list[Layer]
    notes: list[str]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The file at `path` with its parents and overrides merged; interpolations unresolved, no defaults filled in.
    Raises ConfigError: a file cannot be read; OverridesError: an override cannot be applied.
    """
    register_omegaconf_resolvers()
    return parse_hydra_overrides(merge(read_layers(path)), overrides)


@overload
def load_master_config(path: str | Path | None, overrides: Sequence[str] = ()) -> MasterConfig: ...
@overload
def load_master_config(path: str | Path | None, overrides: Sequence[str] = ..., kind: type[Config] = ...) -> Config: ...


def load_master_config(
    path: str | Path | None, overrides: Sequence[str] = (), kind: type[CompleteConfig] = MasterConfig
) -> CompleteConfig:
    """The checked configuration of a run. Raises ConfigError: with one line per mistake; OverridesError: an override
    cannot be parsed or applied.

    Args:
        path: a YAML file; None stands for the defaults alone.
        overrides: in the grammar of `nemo_rl.config.overrides`; keys that the schema knows may be set though no file
            writes them.
        kind: MasterConfig for GRPO, DistillationMasterConfig for distillation, SFTMasterConfig for SFT,
            EvalMasterConfig for evaluation.
    """
    source = None if path is None else str(path)
    loaded = load_layers(path, overrides, kind)
    for note in loaded.notes:
        logger.warning("the command line: %s", note)
    try:
        return validate(loaded.values, kind, source)
    except ConfigError as error:
        raise ConfigError(with_sources(error.given, loaded.layers, source), source) from error


def load_layers(
    path: str | Path | None,
    overrides: Sequence[str],
    kind: type[CompleteConfig],
    mistakes: list[ConfigError] | None = None,
) -> Loaded:
    """Merges files and overrides, every override as a layer of its own; `mistakes` is as in `read_layers`. Raises
    ConfigError, OverridesError: as `load_master_config`.
    """
    layers = [] if path is None else read_layers(path, mistakes)
    loaded = Loaded(merge(layers), layers, [])
    problems: list[str] = []
    given: list[Override] = []
    values = loaded.values
    for text in overrides:
        try:
            override = parse_override(text)
            values = apply(values, override, kind)
        except OverridesError as error:
            problems += error.problems
            continue
        loaded.notes.extend(note for earlier in given if (note := _hidden(earlier, override)))
        given.append(override)
        nested: dict[str, object] = {}
        put(nested, override.key, override.value)
        layers.append(Layer(f"override {text!r}", nested))
    if problems:
        error = OverridesError(problems)
        if mistakes is None:
            raise error
        mistakes.append(error)
    return loaded._replace(values=_with_prompts_found(values, layers))


def _with_prompts_found(values: dict[str, object], layers: Sequence[Layer]) -> dict[str, object]:
    """The values with prompt files that are neither in the working directory nor in the checkout looked for beside the
    files of the configuration, and in the folders around them: recipes name them from where their repository begins.
    """
    files = [Path(layer.source).expanduser().absolute() for layer in reversed(layers) if Path(layer.source).is_file()]
    around = list(dict.fromkeys(folder for file in files for folder in file.parents))

    def found(node: object) -> object:
        if isinstance(node, list):
            return [found(item) for item in node]
        if not isinstance(node, Mapping):
            return node
        return {key: place(item) if key in _PROMPTS else found(item) for key, item in node.items()}

    def place(name: object) -> object:
        if not isinstance(name, str) or not name or "${" in name or any(map(Path.is_file, prompt_places(name))):
            return name
        return next((str(folder / name) for folder in around if (folder / name).is_file()), name)

    return values | {"data": found(values["data"])} if "data" in values and around else values


_PROMPTS = ("prompt_file", "system_prompt_file")


def load_partly(path: str | Path | None, overrides: Sequence[str], kind: type[CompleteConfig]) -> dict[str, object]:
    """The readable part of a configuration with mistakes, with the defaults filled in; unchecked."""
    given = load_layers(path, overrides, kind, []).values
    filled = with_defaults(adapt(given, kind).values, kind)
    try:
        return resolve(filled)
    except ConfigError:
        return filled


def _hidden(earlier: Override, later: Override) -> str | None:
    """The note on two overrides, the later of which leaves nothing of the earlier."""
    if earlier.key[: len(later.key)] != later.key or earlier.action is Action.DELETE:
        return None
    value = at(later.value, earlier.key[len(later.key) :])
    kept = value is ABSENT or value == earlier.value
    if isinstance(value, Mapping) or (kept and later.action is not Action.DELETE):
        return None
    return f"{'.'.join(earlier.key)} is set twice: {earlier.text!r} has no effect, {later.text!r} wins"


def kind_of_file(
    path: str | Path | None, mistakes: list[ConfigError] | None = None
) -> type[MasterConfig | SFTMasterConfig | EvalMasterConfig]:
    """SFT when the merged file has a section `sft`, distillation when it has `distillation`, evaluation when it has
    `eval`, many adapters when it has `multi_lora`, GRPO otherwise.

    For the arguments see `read_layers`.
    """
    sections: dict[str, object] = {} if path is None else merge(read_layers(path, mistakes))
    kinds = {
        "sft": SFTMasterConfig,
        "distillation": DistillationMasterConfig,
        "eval": EvalMasterConfig,
        "multi_lora": MultiLoraMasterConfig,
    }
    return next((kind for section, kind in kinds.items() if section in sections), MasterConfig)
