"""An open pool as a test of real jobs watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import RequestFinished


class Watched:
    """A pool's actor, asked until something is so."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def ask(self, method: str, *arguments: object) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments), timeout=60)

    def standing(self, name: str) -> Standing:
        (found,) = (one for one in self.ask("standings") if one.name == name)
        return found

    def until(self, what: Callable[[], object], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.ask("standings")
            time.sleep(0.3)

    def steps(self, name: str) -> int:
        progress = self.standing(name).progress
        return progress.step if progress is not None else 0


def served(folder: Path) -> Iterator[tuple[int, float]]:
    """The shard of each request that a job whose logs are there has had answered so far, and when that was."""
    for path in folder.rglob("record.jsonl"):
        for entry in read_record(path, recover=True):
            if isinstance(entry.event, RequestFinished) and entry.event.outcome == "done":
                yield entry.event.shard, entry.time
