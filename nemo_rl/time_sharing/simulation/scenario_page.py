"""Writes docs/time_sharing_scenarios.md, the reference of all keys of a scenario file, from the schemas.

Decides the page's shape only; every word about a key is the schema's. Invariant: the same schemas give the same text,
whatever was loaded before.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl.time_sharing.protocol.types import COUNTS, Limits
from nemo_rl.time_sharing.simulation.scenario import (
    Adapter,
    AdapterJob,
    Costs,
    Engine,
    Faults,
    Fleet,
    Job,
    Network,
    PoolSection,
    Scenario,
    Teacher,
    Tokens,
    Validation,
)
from nemo_rl.time_sharing.simulation.scenario_reading import MEANING
from nemo_rl.time_sharing.simulation.scenario_text import PAGE
from nemo_rl.utils.text import table

_HEADER = ("key", "type", "default", "meaning")

DEFAULT_PAGE = Path(PAGE)

_INTRODUCTION = """# Scenarios for the simulator

Generated from the schemas by `python -m nemo_rl.time_sharing keys`; edit the descriptions there.

A scenario is a YAML file that says which jobs are to share which GPUs. A small one:

```yaml
name: two jobs
pool: {nodes: 1, gpus_per_node: 2}
jobs:
  - {name: math, train: [0], infer: [0, 1], steps: 10, groups: 16, samples_per_group: 8, staleness: 0, train_s: 12.0}
  - {name: games, train: [1], infer: [0, 1], steps: 14, groups: 16, samples_per_group: 8, staleness: 0, train_s: 12.0}
```

`python -m nemo_rl.time_sharing simulate FILE --report two.html` runs it in seconds. Everything else has a default.
`examples/time_sharing/with_faults.yaml` uses most keys: different jobs with weights, shares and arrivals, a network
that loses messages, crashes. Times are seconds of virtual time. Unknown keys, keys given twice and values of another
kind are refused with the path of the key. `--seed` decides lengths, jitter and faults: equal seeds give equal runs,
byte by byte.

How to find figures of your own: `train_s`, `log_probs_s` and `init_s` from a run's log; `tokens_per_s` is the rate of
one request alone in an engine, `half_batch` the number of requests at which each gets half of that; `median` and
`sigma` of the lengths from its samples; `costs` from its record, or the defaults.
"""
_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Scenario),
    ("`pool`", PoolSection),
    ("`jobs`: a list of jobs", Job),
    ("`jobs[].tokens`", Tokens),
    ("`jobs[].engine`", Engine),
    ("`jobs[].validation`", Validation),
    ("`fleets`: a mapping of names to fleets", Fleet),
    ("`teachers`: a list of teachers", Teacher),
    ("`adapter_jobs`: a list of jobs of many adapters", AdapterJob),
    ("`adapter_jobs[].adapters`: a list of adapters", Adapter),
    ("`costs`", Costs),
    ("`network`", Network),
    ("`faults`", Faults),
)


def scenario_page() -> str:
    """The whole page as Markdown."""
    lines = [_INTRODUCTION]
    for title, model in _SECTIONS:
        lines += [f"## {title}\n", f"{' '.join((model.__doc__ or '').split())}\n", *table(_HEADER, _rows(model))]
    lines += [
        "## `limits`\n",
        "The scheduler's bounds and delays; whatever is not named keeps its default, which suits steps of minutes.\n",
        *table(_HEADER, _limits()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in model.model_fields.items():
        yield f"`{name}`", _kind(field), _default(field), field.description or ""


def _limits() -> Iterator[tuple[str, str, str, str]]:
    for field in dataclasses.fields(Limits):
        kind = "whole number" if field.name in COUNTS else "seconds" if field.name.endswith("_s") else "number"
        yield f"`{field.name}`", kind, f"`{json.dumps(field.default)}`", MEANING[field.name]


def _kind(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        return "list of mappings" if get_args(annotation)[0] in (Job, Teacher) else "list of GPUs"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    named = {int: "whole number", float: "number", bool: "true or false", str: "text"}.get(annotation)
    return f"{named or 'number or null'}{_range(field)}"


def _range(field: FieldInfo) -> str:
    # A field's own bound stands beside that of its type.
    bounds = {
        name: tightest(found)
        for name, tightest in (("ge", max), ("gt", max), ("le", min))
        if (found := [bound for rule in field.metadata if (bound := getattr(rule, name, None)) is not None])
    }
    low = f"more than {bounds['gt']:g}" if "gt" in bounds else f"at least {bounds['ge']:g}" if "ge" in bounds else ""
    high = f"at most {bounds['le']:g}" if "le" in bounds else ""
    return f", {' and '.join(part for part in (low, high) if part)}" if low or high else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "below"
    return (
        "none"
        if value in ((), {})
        else f"`{value:g}`"
        if isinstance(value, float) and value >= 1e6
        else f"`{json.dumps(value)}`"
    )
