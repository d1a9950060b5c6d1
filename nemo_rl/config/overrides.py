"""Command-line overrides: `a.b=v` sets, `+a.b=v` adds, `++a.b=v` adds or sets, `~a.b` deletes.

Values are YAML; a mapping merges into the one it meets, a list replaces. This is Hydra's grammar, of which OmegaConf
knows `a.b=v` alone. Invariant: a mapping given to `apply` is never changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from nemo_rl.config.dotted import ABSENT, at, put, take
from nemo_rl.config.errors import OverridesError, did_you_mean
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.foreign import here
from nemo_rl.config.layers import merge_mappings, read_yaml
from nemo_rl.config.schema import free_mapping, is_known, is_null_when_deleted, names_in
from nemo_rl.config.section import Section

Key = tuple[str, ...]
_FEW = 20
_PATTERN = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s~+]+)(?P<assigned>=(?P<text>.*))?", re.DOTALL)


class Action(Enum):
    """Effect of an override on its key."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    DELETE = "~"


@dataclass(frozen=True)
class Override:
    """One override; `value` is the assigned value, or for a deletion the value that must be there (None: any)."""

    text: str
    action: Action
    key: Key
    value: object = None


def parse_override(text: str) -> Override:
    """Reads one override. Raises OverridesError: the text follows none of the four forms, or its value is not YAML."""
    match = _PATTERN.fullmatch(text.strip())
    action = Action(match["sign"] or "") if match else Action.SET
    if match is None or (match["assigned"] is None and action is not Action.DELETE):
        raise OverridesError([f"{text!r} is not an override; write key=value, +key=value, ++key=value or ~key"])
    key = tuple(match["key"].split("."))
    if "" in key:
        raise OverridesError([f"{text!r}: the key {match['key']!r} has an empty part"])
    return Override(text, action, key, None if match["assigned"] is None else _parse_value(match["text"], text))


def _parse_value(text: str, where: str) -> object:
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


def _split_tight_pairs(value: object) -> object:
    """YAML reads `{a:1}` as a key `a:1` without a value; on the command line it means `{a: 1}`."""
    if isinstance(value, list):
        return [_split_tight_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs: dict[str, object] = {}
    for key, item in value.items():
        name, colon, rest = str(key).partition(":")
        tight = item is None and colon and rest
        pairs[name if tight else str(key)] = _parse_value(rest, str(key)) if tight else _split_tight_pairs(item)
    return pairs


def apply(values: Mapping[str, object], override: Override, schema: type[Section] | None = None) -> dict[str, object]:
    """Returns a copy of `values` with one override applied; keys that `schema` has may be set though `values` omits
    them, and a deleted key becomes null where that is NeMo-RL's reading. Raises OverridesError: the key is not there
    (set, delete), is there already (add), or lies below a plain value.
    """
    changed = copy.deepcopy(dict(values))
    action, key, value, dotted = override.action, override.key, override.value, ".".join(override.key)
    found = at(changed, key)
    # NeMo-RL's evaluator adds any key; a name that its tree does not have is refused by the schema.
    adds = action is Action.SET and schema is not None and issubclass(schema, EvalMasterConfig)
    settable = adds or (schema is not None and is_known(schema, key))
    problem = ""
    if action is Action.ADD and found not in (ABSENT, None) and not isinstance(value, (dict, list)):
        problem = f"{dotted} is there already; write {dotted}=... to change it"
    elif action in (Action.SET, Action.DELETE) and found is ABSENT and not settable:
        problem = f"there is no key {dotted}.{_hint(changed, override, schema)}"
    elif action is Action.DELETE and value is not None and found not in (ABSENT, value):
        problem = f"{dotted} is {found!r}"
    else:
        # The schema's default would come back in the place of a deleted key.
        null = action is Action.DELETE and schema is not None and is_null_when_deleted(schema, key)
        if isinstance(value, dict) and isinstance(found, dict):
            value = merge_mappings(found, value)
        try:
            if action is Action.DELETE and not null:
                take(changed, key)
            else:
                put(changed, key, None if null else value)
        except LookupError as error:
            problem = str(error)
    if problem:
        raise OverridesError([f"{override.text!r}: {problem}"])
    return changed


def parse_hydra_overrides(config: DictConfig | Mapping[str, object], overrides: Sequence[str]) -> DictConfig:
    """Applies overrides to a loaded configuration, as NeMo-RL's run scripts do; interpolations stay unresolved. Raises
    OverridesError: see `parse_override` and `apply`.
    """
    values = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    named = {str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {}
    for text in overrides:
        named = apply(named, parse_override(text))
    return OmegaConf.create(named)


def _hint(values: Mapping[str, object], override: Override, schema: type[Section] | None) -> str:
    """Advice about a missing key."""
    key = override.key
    if schema is not None and (known := here(key[-1], schema)):
        return known
    elsewhere = [".".join(other) for other in keys_named(values, key[-1])]
    if elsewhere:
        return f" There is {' and '.join(elsewhere[:3])}."
    holder = at(values, key[:-1])
    beside = (names_in(schema, key) if schema else []) or list(map(str, holder) if isinstance(holder, Mapping) else [])
    # Where a schema says which names there are, one that is added would be refused, too.
    added = override.action is Action.SET and (schema is None or free_mapping(schema, key) is not None)
    advice = f" Write +{'.'.join(key)}=... to add it." if added else ""
    near = did_you_mean(key[-1], beside)
    if not (near or advice) and 0 < len(beside) <= _FEW:
        return f" Valid here: {', '.join(beside)}."
    return near + advice


def keys_named(node: object, name: str, prefix: Key = ()) -> Iterator[Key]:
    """Every key below `node` whose last part is `name`."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        if key == name:
            yield (*prefix, name)
        yield from keys_named(value, name, (*prefix, str(key)))
