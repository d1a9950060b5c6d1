"""A trace of router replay: digests of the routes that rollouts made, and of those that arrived at training.

Written where `NRL_R3_TRACE=1` is set, as `<event>-<host>-<pid>.jsonl` in `NRL_R3_TRACE_DIR` (logs/r3_trace): of the
first `NRL_R3_TRACE_SAMPLES` (2) samples of each rollout of the first `NRL_R3_TRACE_STEPS` (1) steps, and of all rows
that arrive at a training worker until it has made as many steps. `tools/check_r3_trace.py` compares the two. Digests do
not depend on padding or on the order of rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from nemo_rl.config.errors import ConfigError

PRODUCED, FETCHED = "rollout_payload_sample", "tq_fetch_sample"
Stage = Literal["prev_lp", "train"]
_TRACE, _STEPS, _SAMPLES, _DIR = "NRL_R3_TRACE", "NRL_R3_TRACE_STEPS", "NRL_R3_TRACE_SAMPLES", "NRL_R3_TRACE_DIR"


class RouteTrace:
    """Writes one process's part of the trace. `steps`: how many are traced. `samples`: of each rollout."""

    def __init__(self, folder: Path, steps: int, samples: int) -> None:
        self._folder, self._steps, self._samples = folder, steps, samples
        self._done = 0
        folder.mkdir(parents=True, exist_ok=True)

    def produced(self, step: int, columns: Mapping[str, torch.Tensor]) -> None:
        """Writes the first samples of a rollout with routes. `step`: from 0."""
        if step < self._steps and "routed_experts" in columns:
            for row, digest in zip(range(self._samples), _digests(columns), strict=False):
                self._write(PRODUCED, {"step": step + 1, "row": row, **digest})

    def fetched(self, stage: Stage, columns: Mapping[str, torch.Tensor]) -> None:
        """Writes every row with routes that arrived for a stage."""
        if self._done < self._steps and "routed_experts" in columns:
            for row, digest in enumerate(_digests(columns)):
                self._write(FETCHED, {"stage": stage, "row": row, **digest})

    def step_done(self) -> None:
        """A training worker made a step."""
        self._done += 1

    def _write(self, event: str, fields: Mapping[str, object]) -> None:
        path = self._folder / f"{event}-{socket.gethostname()}-{os.getpid()}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


@cache
def route_trace() -> RouteTrace | None:
    """This process's trace; None unless `NRL_R3_TRACE=1`. Raises ConfigError: a number is none."""
    if os.environ.get(_TRACE, "0") in ("", "0"):
        return None
    return RouteTrace(Path(os.environ.get(_DIR, "logs/r3_trace")), _count(_STEPS, 1), _count(_SAMPLES, 2))


def _count(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not value.isdigit() or int(value) == 0:
        raise ConfigError([f"{variable} is {value!r}; it counts what is traced: 1 or more"])
    return int(value)


def _digests(columns: Mapping[str, torch.Tensor]) -> Iterator[dict[str, object]]:
    for row, length in enumerate(columns["input_lengths"].tolist()):
        ids = _digest(columns["input_ids"][row, :length].to(torch.int64))
        routes = _digest(
            columns["routed_experts"][row, :length].to(torch.int16), columns["routed_experts_valid"][row, :length]
        )
        yield {"tokens": length, "ids": ids, "routes": routes}


def _digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
