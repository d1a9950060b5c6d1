"""Configuration files under the commands of NeMo-RL's tool of this name.

    python tools/config_cli.py expand FILE             the file with everything it inherits, as YAML
    python tools/config_cli.py minimize BASE FILE      FILE without the keys that it shares with BASE, which it inherits
    python tools/config_cli.py compare LEFT RIGHT      the keys in which two files differ
    python tools/config_cli.py minimize-check BASE FILE...   exit code 1 where a file is not minimal

`python -m nemo_rl.config` looks at configurations with their defaults; these commands know files only.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.__main__ import differences
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.layers import PARENTS, merge, read_layers


def main() -> int:
    """Runs one command and returns its exit code."""
    chosen = _parser().parse_args()
    try:
        return int(chosen.run(chosen))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def expand(chosen: argparse.Namespace) -> int:
    """Prints a file with everything it inherits."""
    _print_yaml(merge(read_layers(chosen.file)))
    return 0


def minimize(chosen: argparse.Namespace) -> int:
    """Prints, or writes, a file without what its base has already."""
    text = _yaml(minimal(chosen.base, chosen.file))
    if chosen.in_place:
        chosen.file.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def compare(chosen: argparse.Namespace) -> int:
    """Prints the keys in which two files differ."""
    left, right = (merge(read_layers(file)) for file in (chosen.left, chosen.right))
    for key, old, new in differences(left, right):
        print(f"{key}: {_shown(old)} -> {_shown(new)}")
    return 0


def minimize_check(chosen: argparse.Namespace) -> int:
    """Says which files could be shorter."""
    longer = [file for file in chosen.files if _yaml(minimal(chosen.base, file)) != _yaml(_own(file))]
    for file in longer:
        print(f"{file}: repeats keys of {chosen.base}; minimize it", file=sys.stderr)
    return 1 if longer else 0


def minimal(base: Path, file: Path) -> dict[str, Any]:
    """What a file has to say so that, inheriting `base`, it means the same."""
    inherited, meant = merge(read_layers(base)), merge(read_layers(file))
    return {PARENTS: os.path.relpath(base, file.parent), **_beyond(inherited, meant)}


def _beyond(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            inner = _beyond(below[key], value)
            if inner:
                rest[key] = inner
        elif key not in below or below[key] != value:
            rest[key] = value
    return rest


def _own(file: Path) -> dict[str, Any]:
    own = read_layers(file)[-1].values
    parents = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get(PARENTS)
    return {**({PARENTS: parents} if parents else {}), **own}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("expand")
    one.add_argument("file", type=Path)
    one.set_defaults(run=expand)
    one = commands.add_parser("minimize")
    one.add_argument("base", type=Path)
    one.add_argument("file", type=Path)
    one.add_argument("--in-place", action="store_true")
    one.set_defaults(run=minimize)
    one = commands.add_parser("compare")
    one.add_argument("left", type=Path)
    one.add_argument("right", type=Path)
    one.set_defaults(run=compare)
    one = commands.add_parser("minimize-check")
    one.add_argument("base", type=Path)
    one.add_argument("files", type=Path, nargs="+")
    one.set_defaults(run=minimize_check)
    return parser


def _shown(value: Any) -> str:
    if type(value) is object:
        return "(absent)"
    return str(yaml.safe_dump(value, default_flow_style=True)).split("\n...")[0].strip()


def _yaml(values: dict[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120))


def _print_yaml(values: dict[str, Any]) -> None:
    print(_yaml(values), end="")


if __name__ == "__main__":
    sys.exit(main())
