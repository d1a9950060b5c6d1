"""The grammar of command-line overrides: `a.b=v` sets, `+a.b=v` adds, `++a.b=v` adds or sets, `~a.b` deletes.

Values are YAML; a mapping merges into the one it meets, a list replaces. Knows no schema: which keys may be set though
no file writes them is asked of the caller. Invariant: a mapping given to `apply` is never changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from nemo_rl.config.dotted import at
from nemo_rl.config.errors import OverridesError, did_you_mean
from nemo_rl.config.layers import merge_mappings, read_yaml

Key = tuple[str, ...]
_PATTERN = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s~+]+)(?P<assigned>=(?P<text>.*))?", re.DOTALL)


class Action(Enum):
    """What an override does to its key."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    DELETE = "~"


@dataclass(frozen=True)
class Override:
    """One override; `value` is what is assigned, or for a deletion the value that must be there (None: any)."""

    text: str
    action: Action
    key: Key
    value: Any = None

    @property
    def dotted(self) -> str:
        """The key as it was written."""
        return ".".join(self.key)


def parse_override(text: str) -> Override:
    """Reads one override.

    Raises:
        OverridesError: the text follows none of the four forms, or its value is not YAML.
    """
    match = _PATTERN.fullmatch(text.strip())
    action = Action(match["sign"] or "") if match else Action.SET
    if match is None or (match["assigned"] is None and action is not Action.DELETE):
        raise OverridesError([f"{text!r} is not an override; write key=value, +key=value, ++key=value or ~key"])
    key = tuple(match["key"].split("."))
    if "" in key:
        raise OverridesError([f"{text!r}: the key {match['key']!r} has an empty part"])
    return Override(text, action, key, None if match["assigned"] is None else parse_value(match["text"], text))


def parse_value(text: str, where: str) -> Any:
    """A value as YAML reads it, with `1e-6` as a number and `{a:1}` as a mapping; the empty text is the empty string.

    Raises:
        OverridesError: brackets or quotes do not match.
    """
    text = text.strip()
    if text == "":
        return ""
    try:
        parsed = read_yaml(f"value: {text}")
    except YAMLError as error:
        if text[0] in "[{'\"" or "${" in text:
            raise OverridesError(
                [f"{where!r}: the value {text!r} is not valid YAML ({str(error).splitlines()[0]})"]
            ) from error
        return text
    value = parsed.get("value") if isinstance(parsed, dict) else parsed
    return _split_tight_pairs(value) if text[0] in "[{" else value


def _split_tight_pairs(value: object) -> Any:
    """YAML reads `{a:1}` as a key `a:1` without a value; on the command line it means `{a: 1}`."""
    if isinstance(value, list):
        return [_split_tight_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs: dict[str, Any] = {}
    for key, item in value.items():
        name, colon, rest = str(key).partition(":")
        if item is None and colon and rest:
            pairs[name] = parse_value(rest, str(key))
        else:
            pairs[str(key)] = _split_tight_pairs(item)
    return pairs


def apply(
    values: Mapping[str, object],
    override: Override,
    is_known: Callable[[Key], bool],
    siblings: Callable[[Key], Iterable[str]],
) -> dict[str, object]:
    """A copy of `values` with one override applied.

    Args:
        is_known: whether a key that `values` omits may be set or deleted all the same.
        siblings: the valid names beside a key, for the message about a misspelt one.

    Raises:
        OverridesError: the key is not there (set, delete), is there already (add), or lies below something that is no
            mapping.
    """
    changed = copy.deepcopy(dict(values))
    there = _exists(changed, override.key)
    taken = there and _at(changed, override.key) is not None and not isinstance(override.value, (dict, list))
    if override.action is Action.ADD and taken:
        raise OverridesError(
            [f"{override.text!r}: {override.dotted} is there already; write {override.dotted}=... to change it"]
        )
    if override.action in (Action.SET, Action.DELETE) and not there and not is_known(override.key):
        elsewhere = [".".join(key) for key in _keys_named(changed, override.key[-1])]
        hint = f" There is {' and '.join(elsewhere[:3])}." if elsewhere else ""
        hint = hint or did_you_mean(override.key[-1], siblings(override.key))
        adds = override.action is Action.SET and not elsewhere
        advice = f" Write +{override.dotted}=... to add it." if adds else ""
        raise OverridesError([f"{override.text!r}: there is no key {override.dotted}.{hint}{advice}"])
    if override.action is Action.DELETE:
        _delete(changed, override, there)
    else:
        _assign(changed, override)
    return changed


def parse_hydra_overrides(config: DictConfig | Mapping[str, object], overrides: Sequence[str]) -> DictConfig:
    """Applies overrides to a loaded configuration, as NeMo-RL's run scripts do; interpolations stay unresolved.

    Raises:
        OverridesError: see `parse_override` and `apply`.
    """
    values = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else dict(config)
    named: dict[str, Any] = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    for text in overrides:
        named = apply(named, parse_override(text), lambda key: False, lambda key, now=named: names_beside(now, key))
    return OmegaConf.create(named)


def names_beside(values: Mapping[str, object], key: Key) -> list[str]:
    """The keys of the mapping in which `key` was looked for."""
    node: Any = values
    for part in key[:-1]:
        node = node.get(part) if isinstance(node, Mapping) else None
    return [str(name) for name in node] if isinstance(node, Mapping) else []


def _keys_named(node: object, name: str, prefix: Key = ()) -> Iterator[Key]:
    """Every key below `node` whose last part is `name`."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key == name:
            yield (*prefix, name)
        yield from _keys_named(value, name, (*prefix, str(key)))


def _step(node: object, part: str) -> object:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    return node[part] if isinstance(node, dict) and part in node else _ABSENT


_ABSENT = object()


def _exists(values: dict[str, object], key: Key) -> bool:
    node: Any = values
    for part in key:
        node = _step(node, part)
    return node is not _ABSENT


def _at(values: dict[str, object], key: Key) -> object:
    return at(values, key, default=None)


def _holder(values: dict[str, Any], override: Override) -> Any:
    node: Any = values
    for depth, part in enumerate(override.key[:-1]):
        child = _step(node, part)
        if (child is _ABSENT or child is None) and isinstance(node, dict):
            child = dict[str, object]()
            node[part] = child
        if not isinstance(child, (dict, list)):
            above = ".".join(override.key[: depth + 1])
            raise OverridesError(
                [
                    f"{override.text!r}: {above} is {child!r}, not a mapping"
                    if child is not _ABSENT
                    else f"{override.text!r}: no {above}"
                ]
            )
        node = child
    return node


def _assign(values: dict[str, Any], override: Override) -> None:
    node, last = _holder(values, override), override.key[-1]
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            raise OverridesError([f"{override.text!r}: {last!r} is not an index of a list of {len(node)}"])
        node[int(last)] = override.value
    elif isinstance(override.value, dict) and isinstance(node.get(last), dict):
        node[last] = merge_mappings(node[last], override.value)
    else:
        node[last] = override.value


def _delete(values: dict[str, Any], override: Override, there: bool) -> None:
    if not there:
        return
    node, last = _holder(values, override), override.key[-1]
    found = _step(node, last)
    if override.value is not None and found != override.value:
        raise OverridesError([f"{override.text!r}: {override.dotted} is {found!r}"])
    del node[int(last) if isinstance(node, list) else last]
