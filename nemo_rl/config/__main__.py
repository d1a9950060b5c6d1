"""`python -m nemo_rl.config`: check recipes, show a configuration, compare two, explain a key.

A command-line main, so it prints; it decides nothing. Exit code 2 stands for a mistake in a configuration, 1 for one
that only asks for parts which are not built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from nemo_rl.cli import EXIT_OK, one_message
from nemo_rl.config.check import RecipeVerdict, check_file, lines_about, recipe_files, summary
from nemo_rl.config.dotted import ABSENT, at
from nemo_rl.config.errors import ConfigError, did_you_mean
from nemo_rl.config.layers import source_of
from nemo_rl.config.load import kind_of_file, load_layers, load_master_config, load_partly
from nemo_rl.config.master import CompleteConfig, MasterConfig, SFTMasterConfig
from nemo_rl.config.overrides import keys_named
from nemo_rl.config.schema import KeyInfo, find_key, free_mapping, keys_of, names_in, shown


@one_message
def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs one command and returns its exit code."""
    chosen = _parser(prog).parse_args(arguments)
    return chosen.run(chosen) or EXIT_OK


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog or "python -m nemo_rl.config", description="Look at configurations.")
    commands = parser.add_subparsers(required=True, metavar="check|show|diff|explain")
    check = commands.add_parser(
        "check",
        help="say which recipes run here, and what the others wait for; of a FILE also what a start would find of "
        "optimizer, functions, model, tokenizer and data that are on this machine",
    )
    check.add_argument("items", nargs="+", metavar="FILE, FOLDER or OVERRIDE")
    check.add_argument("--quiet", action="store_true", help="print the summary only")
    check.set_defaults(run=_check)
    show = commands.add_parser("show", help="print the whole configuration, defaults included")
    show.add_argument("items", nargs="*", metavar="FILE or OVERRIDE")
    show.set_defaults(run=_show)
    diff = commands.add_parser(
        "diff", help="print the keys in which two configurations, or one and the defaults, differ"
    )
    diff.add_argument("items", nargs="*", metavar="FILE or OVERRIDE", help="overrides apply to the last file")
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", help="print what a key means and where its value comes from")
    explain.add_argument("key", help="dotted key")
    explain.add_argument("items", nargs="*", metavar="FILE or OVERRIDE")
    explain.set_defaults(run=_explain)
    return parser


def _check(chosen: argparse.Namespace) -> int:
    files, overrides = _sorted_out(chosen.items, at_most=len(chosen.items))
    paths = [Path(file) for file in files if file is not None]
    checked = [
        check_file(file, overrides, as_a_start=path.is_file()) for path in paths for file in recipe_files([path])
    ]
    if not chosen.quiet:
        for recipe in checked:
            print("\n".join(lines_about(recipe)))
    if len(checked) > 1 or chosen.quiet:
        print("\n".join(summary(checked)))
    return int(max((recipe.verdict for recipe in checked), default=RecipeVerdict.RUNS))


def _show(chosen: argparse.Namespace) -> int:
    files, overrides = _sorted_out(chosen.items, at_most=1)
    kind = kind_of_file(files[0], [])
    mistake: ConfigError | None = None
    try:
        values = load_master_config(files[0], overrides, kind).to_dict()
    except ConfigError as error:
        values, mistake = load_partly(files[0], overrides, kind), error
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=160), end="")
    if mistake is None:
        return 0
    print(f"{mistake}\nShown is what could be read; a run would refuse it.", file=sys.stderr)
    return 2


def _diff(chosen: argparse.Namespace) -> None:
    files, overrides = _sorted_out(chosen.items, at_most=2)
    left, right = (None, files[0]) if len(files) == 1 else (files[0], files[1])
    kind = kind_of_file(right)
    before = (kind() if left is None else load_master_config(left, (), kind_of_file(left))).to_dict()
    after = load_master_config(right, overrides, kind).to_dict()
    for key, old, new in differences(before, after):
        print(f"{key}: {_or_absent(old)} -> {_or_absent(new)}")


def _explain(chosen: argparse.Namespace) -> None:
    files, overrides = _sorted_out(chosen.items, at_most=1)
    kind = kind_of_file(files[0])
    parts = chosen.key.split(".")
    other = SFTMasterConfig if kind is MasterConfig else MasterConfig
    entry = find_key(kind, parts) or find_key(other, parts)
    if entry is None and (holder := free_mapping(kind, parts) or free_mapping(other, parts)) is not None:
        inside = ".".join(parts[len(holder.name.split(".")) :])
        print(f"{chosen.key}: {inside} is an entry of {holder.name}, which takes any name")
        print(f"  {holder.name}: {holder.meaning}")
    elif entry is not None:
        _print_key(entry)
        for inside in keys_of(kind):
            if inside.name.startswith(f"{entry.name}."):
                print(f"  {inside.name}: {inside.meaning}")
    else:
        name, known = parts[-1], keys_of(kind)
        # Entries of free mappings, such as an optimizer's arguments, are no keys of the schema.
        entries = [(key.name, key.default) for key in known if isinstance(key.default, Mapping)]
        others = [f"{holder}.{name}" for holder, default in entries if name in default]
        others += [".".join(found) for found in keys_named(load_partly(files[0], overrides, kind), name)]
        others += [key.name for key in known if key.name.rpartition(".")[2] == name]
        near = did_you_mean(parts[-1], names_in(kind, parts))
        hint = f" There is {', '.join(dict.fromkeys(others))}." if others else near
        raise ConfigError([f"there is no key {chosen.key}.{hint}"])
    if files[0] is not None or overrides:
        _print_value(chosen.key, files[0], overrides, kind)


def _print_key(entry: KeyInfo) -> None:
    print(f"{entry.name}: {entry.meaning}")
    print(f"  type:    {entry.kind}")
    if entry.has_value:
        print(f"  default: {'required' if entry.field.is_required() else shown(entry.default)}")
    print(f"  status:  {'honoured' if entry.not_yet is None else f'not yet ({entry.not_yet})'}")


def _print_value(key: str, file: str | None, overrides: list[str], kind: type[CompleteConfig]) -> None:
    value = at(load_master_config(file, overrides, kind).to_dict(), key.split("."))
    source = source_of(load_layers(file, overrides, kind).layers, key.split("."))
    print(f"  value:   {_or_absent(value)}")
    print(f"  from:    {source or 'the default'}")


def differences(
    before: Mapping[str, object], after: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Dotted key, old and new value of every key in which two nested mappings differ."""
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def _or_absent(value: object) -> str:
    return "(absent)" if value is ABSENT else shown(value)


def _sorted_out(items: Sequence[str], at_most: int) -> tuple[list[str | None], list[str]]:
    overrides = [item for item in items if "=" in item or item.startswith("~")]
    files: list[str | None] = [item for item in items if item not in overrides]
    if len(files) > at_most:
        raise ConfigError(
            [f"{len(files)} files given ({', '.join(str(file) for file in files)}), but at most {at_most} are read"]
        )
    return files or [None], overrides


if __name__ == "__main__":
    # `python -m` also finds a user's code in the working directory, where a run would not: it needs PYTHONPATH=. there.
    sys.path.pop(0)
    sys.exit(main())
