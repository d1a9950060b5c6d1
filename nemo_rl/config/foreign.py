"""Keys that NeMo-RL's recipes set and no schema here has, by the verdicts of `foreign.yaml`.

A key is moved to its present name; or left out with a note, because its value changes nothing here (null, an empty
container, one of its `inert` values, or anything inside a section whose `enabled` is false); or it stays where it is,
for `validate` to refuse by name. Invariant: a key that a schema has is never touched, and a name that is nowhere in
the file stays an unknown key.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_rl.config.dotted import ABSENT, at, put, take
from nemo_rl.config.layers import read_yaml
from nemo_rl.config.section import Section, field_of, section_at, section_within

Key = tuple[str, ...]


@dataclass(frozen=True)
class Foreign:
    """A key pattern with its verdict; `foreign.yaml` explains the fields."""

    pattern: str
    not_built: str = ""
    ignored: str = ""
    refused: str = ""
    elsewhere: str = ""
    instead: str = "leave the key out"
    inert: Sequence[object] = ()

    def matches(self, key: Sequence[str]) -> bool:
        """Whether a key is meant."""
        names = self.pattern.split(".")
        if names[-1] == "**":
            names = names[:-1]
            key = key[: len(names)]
        return len(names) == len(key) and all(map(fnmatchcase, key, names))

    def changes_nothing(self, value: object) -> bool:
        """Whether a value of this key in a recipe asks for nothing that is not here."""
        if isinstance(value, Mapping) and not self.ignored:
            return all(map(self.changes_nothing, value.values()))
        return bool(self.ignored) or value is None or value == [] or value in self.inert


def _entries(rows: Sequence[dict[str, Any]], **defaults: Any) -> list[Foreign]:
    return [Foreign(pattern, **defaults | row) for row in rows for pattern in row.pop("keys")]


_FILE: Any = read_yaml(Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8"))
RECIPES = _entries(_FILE["recipes"])
MOVED: dict[str, str] = _FILE["moved"]
PASSED_ON = {where: _entries(rows, instead="leave it out") for where, rows in _FILE["passed_on"].items()}
ENGINE_ALIASES: dict[str, str] = _FILE["engine_aliases"]
# The missing part of each name, by kind of name.
UNBUILT: dict[str, dict[str, str]] = {
    kind: {name: part for part, names in parts.items() for name in names} for kind, parts in _FILE["names"].items()
}
# Parts that the Megatron backend lacks for a family: model types, a pattern of names, the part.
MEGATRON_LACKS: list[tuple[list[str], str, str]] = [
    (row["types"], row["names"], row["part"]) for row in _FILE["megatron_lacks"]
]

OTHER_TRAINERS: dict[str, str] = {name: key for key, names in _FILE["other_trainers"].items() for name in names}

# Before release 0.5 the keys of the one dataset stood in `data` itself.
_OLD_ENTRY = ("prompt_file", "system_prompt_file", "env_name", "processor")
_OLD_TRAIN = (
    "dataset_name",
    "data_path",
    "split",
    "subset",
    "input_key",
    "output_key",
    "split_validation_size",
    "seed",
)
_OLD_PATHS = {"train_data_path": ("train", "data_path"), "val_data_path": ("validation", "data_path")}
# A dotted name is a class of the user's, but not with these endings.
_PROBLEM_FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow")
# What those releases validated on, where a training set had no part of its own for that.
_OLD_VALIDATION: dict[str, dict[str, object]] = {
    "DAPOMath17K": {"dataset_name": "DAPOMathAIME2024"},
    "DeepScaler": {"dataset_name": "AIME2024", "repeat": 16},
}


@dataclass
class Adapted:
    """A configuration under present names.

    Attributes:
        values: a copy of the mapping, changed.
        notes: the changes, one line each.
    """

    values: dict[str, object]
    notes: list[str] = field(default_factory=list)


def adapt(raw: Mapping[str, object], root: type[Section]) -> Adapted:
    """Moves keys with earlier names, and leaves out those that change nothing here."""
    adapted = Adapted(copy.deepcopy(dict(raw)))
    data = section_at(root, ("data",))
    if data is not None and field_of(data, "train") is not None:
        _move_old_data(adapted)
    elif data is not None:
        _move_local_problems(adapted)
    _move_puzzle_game(adapted)
    for old, new in MOVED.items():
        _move(adapted, tuple(old.split(".")), tuple(new.split(".")))
        if old.startswith("policy."):
            _move(adapted, ("teacher", *old.split(".")[1:]), ("teacher", *new.split(".")[1:]))
    left_out: list[str] = []
    for key, value in list(unknown_leaves(adapted.values, root)):
        entry = find(key)
        off = switched_off(adapted.values, root, key)
        if entry is not None and (off is not None or entry.changes_nothing(value)):
            take(adapted.values, key)
            family = entry.pattern.removesuffix(".**") if entry.pattern.endswith(".**") else ".".join(key)
            left_out.append(f"{off} (not enabled)" if off else family)
    if left_out:
        adapted.notes.append(f"keys that change nothing here: {', '.join(dict.fromkeys(left_out))}")
    return adapted


def find(key: Sequence[str]) -> Foreign | None:
    """The entry of a recipe's key; None for a name that NeMo-RL does not have either."""
    names = [part for part in key if not part.isdigit()]
    spellings = [names]
    if names[:1] in (["generation"], ["tokenizer"]):
        # An evaluation has a policy's generation and tokenizer at its top.
        spellings.append(["policy", *names])
    elif names[:1] == ["teacher"]:
        spellings.append(["policy", *names[1:]])
    return next((entry for entry in RECIPES if any(map(entry.matches, spellings))), None)


def here(name: str, root: type[Section]) -> str:
    """` It is <key> here ...`, for a key's last name in TRL, verl or PEFT; else the empty string."""
    known = OTHER_TRAINERS.get(name, "")
    # Fine-tuning has a loop of its own, and evaluations have generation at their top.
    keys = (known, known.replace("grpo.", "sft.", 1), known.removeprefix("policy."))
    found = next((key for key in keys if known and section_at(root, key.split(".")[:1]) is not None), None)
    return f" TRL's or verl's {name} is {found} here (docs/coming_from.md)." if found else ""


def passed_on(mapping: str, name: str) -> Foreign | None:
    """The entry of an option in the free mapping of a dotted key; None where the file has none."""
    rows = (entry for where, entries in PASSED_ON.items() if fnmatchcase(mapping, where) for entry in entries)
    return next((entry for entry in rows if entry.matches([name])), None)


def other_algorithms(values: Mapping[str, object]) -> Iterator[tuple[str, Foreign]]:
    """The sections of a recipe that make it one of an algorithm that is not built, with their entries."""
    for name in values:
        entry = find([str(name)])
        if entry is not None and values[name] not in (None, {}):
            yield str(name), entry
    for key, value in _keys(values):
        # Sections and switches of it are in several places, whose other keys are its own as well.
        off = value in (None, False, {}) or (isinstance(value, Mapping) and value.get("enabled") is False)
        if _CROSS_TOKENIZER.search(key.rpartition(".")[2]) and not off:
            yield (
                key,
                Foreign(key, not_built="distillation across tokenizers", instead="take a teacher of one tokenizer"),
            )
            return


_CROSS_TOKENIZER = re.compile(r"(^|_)x_?token|cross_token|token_(projection|align)|projection_matrix|gold_loss")


def _keys(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every key below a mapping, dotted, with its value."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{key}", value
        yield from _keys(value, f"{prefix}{key}.")


def unknown_leaves(values: object, schema: type[Section] | None, prefix: Key = ()) -> Iterator[tuple[Key, object]]:
    """Every key below `values` that its section does not have, with its value."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from unknown_leaves(item, schema, (*prefix, str(index)))
        return
    if not isinstance(values, Mapping) or schema is None:
        return
    for name, value in values.items():
        known = field_of(schema, str(name))
        key = (*prefix, str(name))
        if known is None:
            yield key, value
        else:
            yield from unknown_leaves(value, section_within(known), key)


def switched_off(values: Mapping[str, object], root: type[Section], key: Sequence[str]) -> str | None:
    """The innermost section around `key` that is not enabled, if there is one."""
    for depth in range(len(key) - 1, 0, -1):
        section = section_at(root, key[:depth]) if not key[depth - 1].isdigit() else None
        switch = field_of(section, "enabled") if section is not None else None
        if switch is not None:
            given = at(values, (*key[:depth], "enabled"), default=switch.get_default(call_default_factory=True))
            if given in (False, None):
                return ".".join(key[:depth])
    return None


def _move(adapted: Adapted, old: Key, new: Key) -> None:
    value = at(adapted.values, old)
    if value is ABSENT:
        return
    take(adapted.values, old)
    if at(adapted.values, new) is ABSENT and value is not None:
        # A plain value in the place of a section is refused by the schema.
        with contextlib.suppress(LookupError):
            put(adapted.values, new, value)
    adapted.notes.append(f"{'.'.join(old)} is read as {'.'.join(new)}")


def _move_local_problems(adapted: Adapted) -> None:
    """NeMo-RL's evaluator takes a name that it does not know for the path or address of a file of problems."""
    data, env = adapted.values.get("data"), adapted.values.get("env")
    if isinstance(data, dict) and isinstance(env, Mapping) and env and not {"env_name"} & data.keys():
        # Its environment is the first one that is configured.
        data["env_name"] = str(next(iter(env)))
    name = data.get("dataset_name") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(name, str) or data.get("data_path") is not None:
        return
    if "://" in name or name.startswith(("/", "./", "../", "~")) or name.lower().endswith(_PROBLEM_FILES):
        data |= {"dataset_name": "ResponseDataset", "data_path": name}
        adapted.notes.append("data.dataset_name is a file, and is read as data.data_path")


def _move_puzzle_game(adapted: Adapted) -> None:
    """NeMo-RL's puzzle run makes its puzzles from the environment's options, whatever `data` names."""
    game = at(adapted.values, ("env", "sliding_puzzle_game"), default=None)
    if not isinstance(game, Mapping):
        return
    options = game.get("cfg") or {}
    take(adapted.values, ("env", "sliding_puzzle_game"))
    if options.get("max_moves") is not None:
        put(adapted.values, ("env", "sliding_puzzle", "max_moves"), options["max_moves"])
    puzzles = {
        "dataset_name": "sliding_puzzle",
        "env_name": "sliding_puzzle",
        "prompt_file": None,
        "num_problems": 2048,
        "held_out": 256,
        "task_config": dict(options.get("game_config") or {}),
    }
    for split in ("train", "validation"):
        put(adapted.values, ("data", split), {**puzzles, "split": split})
    adapted.notes.append(
        "env.sliding_puzzle_game is read as env.sliding_puzzle, and its game_config as the task_config of "
        "data.train and data.validation"
    )


def _move_old_data(adapted: Adapted) -> None:
    data = adapted.values.get("data")
    if not isinstance(data, dict):
        return
    entry = {name: data.pop(name) for name in (*_OLD_TRAIN, *_OLD_ENTRY) if name in data}
    paths = {name: data.pop(name) for name in _OLD_PATHS if name in data}
    if not entry and not paths:
        return
    default = {name: entry.pop(name) for name in _OLD_ENTRY if name in entry}
    if default:
        data["default"] = {**(data.get("default") or {}), **default}
    if "dataset_name" in entry:
        data["train"] = entry
        held_out = _OLD_VALIDATION.get(str(entry["dataset_name"]))
        if held_out is not None and not data.get("validation"):
            data["validation"] = dict(held_out)
        elif entry["dataset_name"] == "OpenMathInstruct-2":
            entry.setdefault("split_validation_size", 0.05)
    elif entry and isinstance(data.get("train"), dict):
        data["train"] = {**data["train"], **entry}
    for name, (split, key) in _OLD_PATHS.items():
        if name in paths:
            named = {
                "dataset_name": "ResponseDataset",
                **{k: v for k, v in entry.items() if k in ("input_key", "output_key")},
            }
            data[split] = {**named, **(data.get(split) or {}), key: paths[name]}
    adapted.notes.append("data has the layout of releases before 0.5; its keys are read as data.train and data.default")
