"""Validates a raw mapping: returns a checked configuration, or raises one error that lists every mistake.

Knows how pydantic reports and how users read; decides no rule itself. Invariant: what it returns has passed the schema,
the list of what is not built yet, and the rules between sections.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config import (  # noqa: F401 -- rules
    algorithm_rules,
    data_rules,
    differences,
    distillation_rules,
    generation_rules,
    multi_lora_rules,
    pass_through,
    training_rules,
)
from nemo_rl.config.data import UnknownKeys
from nemo_rl.config.defaults import complete
from nemo_rl.config.dotted import ABSENT, at, take
from nemo_rl.config.errors import ConfigError, NotBuilt, Problem, did_you_mean, nearest
from nemo_rl.config.foreign import Foreign, adapt, find, here, other_algorithms, switched_off
from nemo_rl.config.layers import MANDATORY
from nemo_rl.config.master import COMPLETE, CompleteConfig, MasterConfig, RootConfig
from nemo_rl.config.rules import broken_rules, cautions
from nemo_rl.config.schema import keys_of, names_in
from nemo_rl.config.section import Section, field_of, idle_refusals, not_built, refusals, section_type

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=CompleteConfig)
Key = tuple[str | int, ...]


@dataclass
class Examined(Generic[Config]):
    """Result of examining a mapping.

    Attributes:
        config: the configuration, where it has no problem.
        problems: one per mistake, and per part that is not built.
        notes: values read differently than they are written, or perhaps not meant so, one line each.
    """

    config: Config | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def validate(raw: Mapping[str, object], kind: type[Config], source: str | None = None) -> Config:
    """Checks a merged mapping and returns the configuration; notes go to the log. Raises ConfigError: with one line per
    mistake.

    Args:
        raw: plain containers; interpolations may be unresolved, keys may be missing.
        kind: MasterConfig, SFTMasterConfig or EvalMasterConfig.
        source: where the mapping came from, for the message.
    """
    try:
        examined = examine(raw, kind)
    except ConfigError as error:
        raise ConfigError(error.problems, source) from error
    for note in examined.notes:
        logger.warning("%s: %s", source or "the configuration", note)
    if examined.problems or examined.config is None:
        raise ConfigError(examined.problems, source)
    return examined.config


def examine(raw: Mapping[str, object], kind: type[Config]) -> Examined[Config]:
    """Validates a merged mapping and collects its problems and notes. Raises ConfigError: an interpolation cannot be
    resolved.
    """
    strangers = _strangers(raw, kind)
    if len(strangers) > max(1, len(raw) - len(strangers)):
        return Examined(problems=[_of_another_framework(strangers, kind)])
    others = list(other_algorithms(raw))
    if others:
        # Their other keys are that algorithm's too, and no mistakes.
        return Examined(
            problems=[not_built(key, at(raw, key.split(".")), entry.not_built, entry.instead) for key, entry in others]
        )
    missing: list[Problem] = [f"{key}: mandatory (`{MANDATORY}`) and not given" for key in _mandatory(raw)]
    if missing:
        return Examined(problems=missing)
    flat: list[Problem] = [
        f"{name}: {value!r:.80} is no mapping of keys"
        for name, value in raw.items()
        if (known := field_of(kind, str(name))) is not None
        and section_type(known) is not None
        and not (value is None or isinstance(value, Mapping) or str(value).startswith("${"))
    ]
    if flat:
        return Examined(problems=flat)
    adapted = adapt(raw, kind)
    given, notes = adapted.values, adapted.notes
    filled = complete(given, kind)
    config, found = _parsed(filled, kind)
    unused = [key for key in (key_of(error, filled) for error in found) if _is_unused(filled, kind, key)]
    if unused:
        for key in unused:
            take(given, key)
        notes.append(f"values that change nothing here: {', '.join(map(_dotted, unused))} (sections not enabled)")
        filled = complete(given, kind)
        config, found = _parsed(filled, kind)
    problems = _describe(_without_echoes(found, given, filled), filled, kind)
    if found:
        # The rest is looked at as well: one run should show every mistake.
        config = _without(filled, found, kind)
    if config is not None:
        problems += refusals(config)
        if idle := [refusal.key for refusal in idle_refusals(config)]:
            notes.append(f"values that change nothing here: {', '.join(idle)} (not enabled)")
        notes += _lowered(filled, config)
        if all(isinstance(problem, NotBuilt) for problem in problems):
            problems += [*_required_sections(given, kind), *broken_rules(config)]
            notes += cautions(config)
    return Examined(None if problems else config, problems, notes)


_PROMPTS = ("data", "max_input_seq_length")


def _lowered(filled: Mapping[str, object], config: CompleteConfig) -> Iterator[str]:
    """A limit on prompts that is above that of whole sequences, and so without effect."""
    asked = at(filled, _PROMPTS)
    if isinstance(config, RootConfig) and isinstance(asked, int) and asked > config.policy.max_total_sequence_length:
        yield (
            f"data.max_input_seq_length is {asked}, above policy.max_total_sequence_length "
            f"{config.policy.max_total_sequence_length}: longer prompts than that are cut"
        )


def check_config(config: CompleteConfig) -> None:
    """Checks a configuration that was built in Python: what is not built yet, and the rules between sections. Raises
    ConfigError: with one line per mistake.
    """
    problems: list[Problem] = [*refusals(config), *broken_rules(config)]
    if problems:
        raise ConfigError(problems)


def _mandatory(node: object, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _mandatory(value, f"{prefix}{key}.")
    elif node == MANDATORY:
        yield prefix.removesuffix(".")


def _required_sections(raw: Mapping[str, object], kind: type[CompleteConfig]) -> Iterator[str]:
    policy = raw.get("policy")
    generates = issubclass(kind, MasterConfig)
    if generates and isinstance(policy, Mapping) and "generation" in policy and policy["generation"] is None:
        yield "policy.generation: null, but GRPO generates its samples; leave the key out for the defaults"


def _without_echoes(
    errors: list[ErrorDetails], given: Mapping[str, object], filled: Mapping[str, object]
) -> list[ErrorDetails]:
    """The errors about keys that were given; a default that follows a wrong value is wrong too, and not worth a second
    line.
    """
    original = (e for e in errors if e["type"] == "missing" or at(given, key_of(e, filled)) is not ABSENT)
    return list(original) or errors


def _parsed(filled: Mapping[str, object], kind: type[Config]) -> tuple[Config | None, list[ErrorDetails]]:
    try:
        return kind.model_validate(filled, context=COMPLETE), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _is_unused(filled: Mapping[str, object], kind: type[Section], key: Key) -> bool:
    names = [str(part) for part in key]
    known = len(names) > 1 and names[-1] in names_in(kind, names)
    return known and names[-1] != "enabled" and switched_off(filled, kind, names) is not None


def _strangers(raw: Mapping[str, object], kind: type[Section]) -> list[str]:
    """Sections that neither NeMo-RL nor a slip of the pen explains."""
    sections = _sections(kind)
    return [
        name
        for name in map(str, raw)
        if field_of(kind, name) is None and find([name]) is None and nearest(name, sections) is None
    ]


def _of_another_framework(strangers: Sequence[str], kind: type[Section]) -> str:
    return (
        f"{', '.join(strangers)}: no sections of a NeMo-RL recipe; this looks like a configuration of another "
        f"framework. Sections are {', '.join(_sections(kind))}"
    )


def _sections(kind: type[Section]) -> list[str]:
    return [known.alias or name for name, known in kind.model_fields.items()]


def _describe(errors: list[ErrorDetails], raw: Mapping[str, object], kind: type[Section]) -> list[Problem]:
    lines: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for error in errors:
        key = key_of(error, raw)
        foreign = _foreign_keys(error, key)
        problems += [not_built(_dotted(name), at(raw, name), entry.not_built, entry.instead) for name, entry in foreign]
        for line in _lines(error, key, kind) if not foreign else []:
            messages = lines.setdefault(_dotted(key), [])
            if line not in messages:
                messages.append(line)
    return [
        f"{key}: {', or '.join(messages)}" if key else ", or ".join(messages) for key, messages in lines.items()
    ] + problems


def _foreign_keys(error: ErrorDetails, key: Key) -> list[tuple[Key, Foreign]]:
    cause = error.get("ctx", {}).get("error")
    keys = [key] if error["type"] == "extra_forbidden" else []
    if isinstance(cause, UnknownKeys):
        keys = [(*key, name) for name in cause.keys]
    found = [(name, find([str(part) for part in name])) for name in keys]
    return [(name, entry) for name, entry in found if entry is not None]


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)


def key_of(error: ErrorDetails, raw: Mapping[str, object]) -> Key:
    """The key a pydantic error is about, without the names of union branches that pydantic puts between."""
    node: object = raw
    key: list[str | int] = []
    for part in error["loc"]:
        children = dict(enumerate(node)) if isinstance(node, list) else node
        if isinstance(children, Mapping) and part in children:
            key.append(part)
            node = children[part]
    if error["type"] == "missing":
        key.append(error["loc"][-1])
    return tuple(key)


def _lines(error: ErrorDetails, key: Key, kind: type[Section]) -> Iterator[str]:
    context = error.get("ctx", {})
    cause = context.get("error")
    value = error["input"]
    if error["type"] == "extra_forbidden":
        yield f"unknown key.{_suggestion(str(key[-1]), names_in(kind, [str(part) for part in key]), kind)}"
    elif isinstance(cause, UnknownKeys):
        for name in cause.keys:
            yield f"unknown key {name!r}.{did_you_mean(name, cause.valid)}"
    elif error["type"] == "literal_error":
        allowed = str(context.get("expected", ""))
        names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
        yield f"{value!r} is not one of {allowed}.{did_you_mean(str(value), names)}"
    elif error["type"] == "missing":
        yield "required, and not given"
    elif error["type"] == "list_type":
        yield f"{value!r} is no list; one entry is written [...] (python -m nemo_rl.config explain {_dotted(key)})"
    elif error["type"] == "string_type" and isinstance(value, bool):
        yield f"{value!r} is no text; yes, no, on and off are booleans in YAML, and text in quotes"
    else:
        message = str(cause) if cause is not None else error["msg"]
        yield f"{value!r}: {message[:1].lower()}{message[1:]}"


def _suggestion(name: str, valid: list[str], kind: type[Section]) -> str:
    near = here(name, kind) or did_you_mean(name, valid)
    if near:
        return near
    elsewhere = [entry.name for entry in keys_of(kind) if entry.name.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f" There is {' and '.join(elsewhere[:3])}."
    return f" Valid here: {', '.join(valid)}." if 0 < len(valid) <= 20 else ""


def _without(raw: Mapping[str, object], errors: list[ErrorDetails], kind: type[Config]) -> Config | None:
    """The configuration without the keys that have a mistake; None where it takes more than that."""
    pruned = copy.deepcopy(dict(raw))
    for error in errors:
        take(pruned, key_of(error, raw))
    return _parsed(complete(pruned, kind), kind)[0]
