"""Writes docs/config.md, the reference of all keys of configurations, from the schemas.

Invariant: the same schemas give the same text.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.distillation import TeacherConfig
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.master import DistillationMasterConfig, MasterConfig, MultiLoraMasterConfig, SFTMasterConfig
from nemo_rl.config.schema import KeyInfo, keys_of, shown
from nemo_rl.config.section import Section

_INTRODUCTION = """# Configuration

Generated from the schemas by `python -m tools.pages`; edit the descriptions there.

A run reads one YAML file. `defaults:` names the files it inherits (a path or a list of paths, relative to the file;
later ones win, the file itself wins over all). A mapping with `_override_: true` replaces the inherited one instead of
merging with it, and `???` marks a value that must be given. `${a.b}` takes another key's value, `${add:..}`,
`${mul:..}`, `${div:..}`, `${max:..}` and `${not:..}` reckon with them. On the command line `a.b=v` sets a key, `+a.b=v`
adds one, `++a.b=v` does either, `~a.b` deletes. Values are read as NeMo-RL reads them, in files and on the command
line: `yes`, `no`, `on` and `off` are booleans everywhere (text in quotes), `1e-6`, `1_000` and `0x10` numbers; but
`012` and `1:30` are text, where YAML 1.1 has an octal number and one to base 60, and refused where a number is wanted.

A key that a file omits has the default below. A default such as `${policy.max_total_sequence_length}` follows that key.
Unknown keys are refused. **Not yet** marks keys that are known but not built: set to another value than the default
(or, for a section, enabled), they are refused by name.

```
python -m nemo_rl.config check FILE [OVERRIDES]    # every mistake that a start would find, without starting
python -m nemo_rl.config show FILE [OVERRIDES]     # the whole configuration, defaults included
python -m nemo_rl.config diff FILE [FILE]          # against the defaults, or against another file
python -m nemo_rl.config explain KEY [FILE] [OVERRIDES]   # what a key means and where its value comes from
```
"""


def page() -> str:
    """The whole page as Markdown."""
    seen = set(MasterConfig.model_fields)
    parts = [
        _INTRODUCTION,
        "## GRPO\n",
        *_tables(MasterConfig, ()),
        "## SFT\n",
        "Shares `policy`, `data`, `logger`, `cluster` and `checkpointing` with GRPO. Rows are trained as they are: "
        "`data.default.processor` is `sft_processor` and `data.default.prompt_file` null.\n",
    ]
    parts += _tables(SFTMasterConfig, tuple(seen))
    parts += [
        "## Distillation\n",
        "Has the sections of GRPO but for the two below. `teacher` is mandatory, and has besides its own keys those of "
        "`policy`.\n",
        *_tables(DistillationMasterConfig, tuple(seen - {"loss_fn"})),
    ]
    parts += [
        "## Many adapters\n",
        "Has the sections of GRPO and the one below; see [Many adapters](multi_lora.md).\n",
        *_tables(MultiLoraMasterConfig, tuple(seen)),
    ]
    parts += [
        "## Evaluation\n",
        "A tree of its own; `generation` has the keys of a run's `policy.generation` and some more.\n",
        *_tables(EvalMasterConfig, ()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _tables(schema: type[Section], without: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for holder, keys in _by_section(schema, without):
        if not keys:
            continue
        lines += [
            f"### `{holder.name}`\n",
            f"{holder.meaning}\n" if holder.not_yet is None else f"{holder.meaning} **Not yet**: {holder.not_yet}.\n",
        ]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(key, holder) for key in keys]
        lines.append("")
    return lines


def _by_section(schema: type[Section], without: tuple[str, ...]) -> Iterator[tuple[KeyInfo, list[KeyInfo]]]:
    entries = [
        entry
        for entry in keys_of(schema)
        if entry.name.split(".")[0] not in without and not is_described_elsewhere(entry.name)
    ]
    for holder in (entry for entry in entries if entry.section is not None):
        yield holder, [entry for entry in entries if entry.has_value and entry.name.rpartition(".")[0] == holder.name]


def is_described_elsewhere(key: str) -> bool:
    """Whether a teacher's key is one of `policy`."""
    parts = key.split(".")
    return parts[0] == "teacher" and len(parts) > 1 and parts[1] not in TeacherConfig.__annotations__


def _row(key: KeyInfo, holder: KeyInfo) -> str:
    meaning = (
        key.meaning
        if key.not_yet is None or holder.not_yet is not None
        else f"{key.meaning} **Not yet**: {key.not_yet}."
    )
    default = "required" if key.field.is_required() else f"`{shown(key.default)}`"
    cells = (f"`{key.name.rpartition('.')[2]}`", key.kind, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
