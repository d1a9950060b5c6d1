"""Writes docs/time_sharing_scenarios.md, the reference of all keys of a scenario file, from the schemas.

The meanings of keys are the schema's, those of limits are here. Invariant: the same schemas give the same text,
whatever was loaded before.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl.time_sharing.protocol.types import COUNTS, Limits
from nemo_rl.time_sharing.simulation.scenario import (
    AdapterJob,
    Costs,
    EngineSpeed,
    Faults,
    Fleet,
    Network,
    PoolSection,
    Scenario,
    ScenarioAdapter,
    ScenarioJob,
    ScenarioTeacher,
    Tokens,
    Validation,
)
from nemo_rl.utils.text import table

_HEADER = ("key", "type", "default", "meaning")

_INTRODUCTION = """# Scenarios for the simulator

Generated from the schemas by `python -m tools.pages`; edit the descriptions there.

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
    ("`jobs`: a list of jobs", ScenarioJob),
    ("`jobs[].tokens`", Tokens),
    ("`jobs[].engine`", EngineSpeed),
    ("`jobs[].validation`", Validation),
    ("`fleets`: a mapping of names to fleets", Fleet),
    ("`teachers`: a list of teachers", ScenarioTeacher),
    ("`adapter_jobs`: a list of jobs of many adapters", AdapterJob),
    ("`adapter_jobs[].adapters`: a list of adapters", ScenarioAdapter),
    ("`costs`", Costs),
    ("`network`", Network),
    ("`faults`", Faults),
)

# What each limit means: dataclass fields have no description.
MEANING = {
    "aging_s": "A waiting request rises by one priority in this time.",
    "min_hold_s": "Length of a guaranteed time slice of a generation rank, and of every slice (times the job's weight) "
    "until a hand-over of the job has been seen.",
    "max_slice_s": "Longest time slice that a generation rank keeps its GPUs against other jobs (times the job's "
    "weight); a slice lasts as long as four hand-overs.",
    "hysteresis": "How much better served than the taker a job must be before a busy GPU moves (0.10: ten per cent).",
    "max_backfills": "How often a waiting request is passed by later ones that end before it can start.",
    "max_initialising": "How many jobs may initialise at a time; 0 for any number.",
    "max_hold_s": "A training hold that lasts longer has its job cut off and started again.",
    "heartbeat_s": "How often a job says how it is.",
    "lease_s": "A job not heard of for so long is cut off; a generation rank that makes no progress for so "
    "long is restarted.",
    "isolation_s": "When most jobs fall silent at once, the scheduler takes itself for cut off and ends no job for so "
    "long.",
    "retry_s": "A command without an answer is sent again after this time.",
    "drain_s": "Deadline of taking requests off a rank; a rank that misses it is ended.",
    "sleep_s": "Deadline of sending a rank to sleep.",
    "wake_s": "Deadline of waking a rank, the first start of its engine included.",
    "sync_s": "Deadline of loading weights into a rank.",
    "route_s": "Deadline of sending requests to a rank.",
    "grant_s": "Deadline of taking what was granted.",
    "reap_s": "Deadline of ending processes and showing that their memory is free.",
    "request_s": "A request that waited so long is dropped.",
    "quarantine_s": "A rank or GPU that failed is left alone for so long.",
    "plan_interval_s": "Shortest time between two plans.",
    "replan_s": "Longest time between two plans.",
    "measure_s": "How often is measured what jobs gain by running at the same time on GPUs of several slots; 0 for "
    "never: all run at the same time.",
    "trial_steps": "Steps that each makes together with the others before it is tried alone, which costs those six "
    "steps.",
    "high_lead_s": "How much older requests are that come before those of a job of high priority.",
    "high_wait_s": "For how long such a job is to wait for its training GPUs at most, which `explain` reports on.",
    "turn_s": "How long jobs run that gain nothing by it, before others have their turn.",
    "max_tick_s": "A clock that moves by more at once has jumped; the scheduler's time leaves the jump out.",
}


def page() -> str:
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
        return "list of mappings" if get_args(annotation)[0] in (ScenarioJob, ScenarioTeacher) else "list of GPUs"
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
