"""From a raw mapping to a checked configuration, or to one error that lists every mistake in it.

Knows how pydantic reports and how users read; decides no rule itself. Invariant: what it returns has passed the schema, the list of what is
not built yet, and the rules between sections.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.data import UnknownKeys
from nemo_rl.config.defaults import complete
from nemo_rl.config.errors import ConfigError, did_you_mean
from nemo_rl.config.layers import MANDATORY
from nemo_rl.config.master import CompleteConfig
from nemo_rl.config.rules import broken_rules
from nemo_rl.config.schema import field_of, keys_of, names_in
from nemo_rl.config.section import Section
from nemo_rl.config.status import refusals

Config = TypeVar("Config", bound=CompleteConfig)
Key = tuple[str | int, ...]


def validate(raw: Mapping[str, Any], kind: type[Config], source: str | None = None) -> Config:
    """Checks a merged mapping and returns the configuration.

    Args:
        raw: plain containers; interpolations may be unresolved, keys may be missing.
        kind: MasterConfig, SFTMasterConfig or EvalMasterConfig.
        source: where the mapping came from, for the message.

    Raises:
        ConfigError: with one line per mistake.
    """
    missing = [f"{key}: mandatory (`{MANDATORY}`) and not given" for key in _mandatory(raw)]
    if missing:
        raise ConfigError(missing, source)
    filled = complete(raw, kind)
    try:
        config = kind.model_validate(filled)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise ConfigError([*_describe(_without_echoes(found, raw, filled), filled, kind), *_refusals_besides(found, filled, kind)], source) from error
    problems = [*_required_sections(raw, kind), *refusals(config), *broken_rules(config)]
    if problems:
        raise ConfigError(problems, source)
    return config


def check_config(config: CompleteConfig) -> None:
    """Checks a configuration that was built in Python: what is not built yet, and the rules between sections.

    Raises:
        ConfigError: with one line per mistake.
    """
    problems = [*refusals(config), *broken_rules(config)]
    if problems:
        raise ConfigError(problems)


def _mandatory(node: object, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _mandatory(value, f"{prefix}{key}.")
    elif node == MANDATORY:
        yield prefix.removesuffix(".")


def _required_sections(raw: Mapping[str, Any], kind: type[CompleteConfig]) -> Iterator[str]:
    policy = raw.get("policy")
    generates = field_of(kind, "grpo") is not None
    if generates and isinstance(policy, Mapping) and "generation" in policy and policy["generation"] is None:
        yield "policy.generation: null, but GRPO generates its samples; leave the key out for the defaults"


def _without_echoes(errors: list[ErrorDetails], given: Mapping[str, Any], filled: Mapping[str, Any]) -> list[ErrorDetails]:
    """The errors about keys that were given; a default that follows a wrong value is wrong too, and not worth a second line."""
    original = [error for error in errors if error["type"] == "missing" or _is_given(given, key_of(error, filled))]
    return original or errors


def _is_given(given: Any, key: Key) -> bool:
    for part in key[:-1]:
        given = _child(given, part)
    return not key or _child(given, key[-1]) is not None or (isinstance(given, Mapping) and key[-1] in given)


def _describe(errors: list[ErrorDetails], raw: Mapping[str, Any], kind: type[Section]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for error in errors:
        key = key_of(error, raw)
        dotted = ".".join(str(part) for part in key)
        for line in _lines(error, key, kind):
            messages = lines.setdefault(dotted, [])
            if line not in messages:
                messages.append(line)
    return [f"{key}: {', or '.join(messages)}" if key else ", or ".join(messages) for key, messages in lines.items()]


def key_of(error: ErrorDetails, raw: Mapping[str, Any]) -> Key:
    """The key a pydantic error is about, without the names of union branches that pydantic puts between."""
    node: Any = raw
    key: list[str | int] = []
    for part in error["loc"]:
        if (isinstance(node, Mapping) and part in node) or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            key.append(part)
            node = node[part]
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
        yield f"{value!r} is not one of {allowed}.{did_you_mean(str(value), [name.strip(chr(39)) for name in allowed.replace(' or ', ', ').split(', ')])}"
    elif error["type"] == "missing":
        yield "required, and not given"
    else:
        message = str(cause) if cause is not None else error["msg"]
        yield f"{value!r}: {message[:1].lower()}{message[1:]}"


def _suggestion(name: str, valid: list[str], kind: type[Section]) -> str:
    near = did_you_mean(name, valid)
    if near:
        return near
    elsewhere = [entry.name for entry in keys_of(kind) if entry.name.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return f" There is {' and '.join(elsewhere[:3])}."
    return f" Valid here: {', '.join(valid)}." if 0 < len(valid) <= 20 else ""


def _refusals_besides(errors: list[ErrorDetails], raw: Mapping[str, Any], kind: type[Config]) -> list[str]:
    """What is not built yet, in the part of the configuration that has no other mistake."""
    pruned = copy.deepcopy(dict(raw))
    for error in errors:
        _remove(pruned, key_of(error, raw))
    try:
        return list(refusals(kind.model_validate(pruned)))
    except ValidationError:
        return []


def _remove(node: Any, key: Key) -> None:
    for part in key[:-1]:
        node = _child(node, part)
    if isinstance(node, dict) and key:
        node.pop(key[-1], None)


def _child(node: Any, part: str | int) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None
