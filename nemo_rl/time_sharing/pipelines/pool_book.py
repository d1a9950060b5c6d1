"""What the actor of a pool keeps on disk, so that the next one goes on where a killed one was.

Who was submitted, under which incarnation, how each ended, and what stays in GPU memory. Knows no Ray. Invariant: the
file holds one whole state; who reads it sees the last that was written, or none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.pipelines.residents import Resident


class PoolBookDamaged(UserError, ValueError):
    """What a pool kept cannot be read."""


@dataclass(frozen=True)
class Outcome:
    """How a pipeline ended: `done`, `drained`, `cancelled`, `failed`, `dismissed` or `died`; why, where it is not
    `done`; its completed steps, and the seconds for which it waited for training GPUs.
    """

    kind: str
    reason: str = ""
    steps: int = 0
    waited_s: float = 0.0


@dataclass
class Life:
    """One pipeline of the pool in its newest life.

    Attributes:
        name: Its id.
        incarnation: Which life it is.
        train: Its training GPUs.
        infer: Its generation GPUs.
        submitted_at: Seconds since the epoch.
        ended_at: The same; None while it runs.
        outcome: How it ended; None while it runs.
        refused: Why the pool ends it, where it does.
        asked: `drain` or `cancel`, where a user has asked for its end.
        log_dir: Where its own logs are, once it has said.
        column: Which slot of each GPU it is on; None for all of them.
    """

    name: str
    incarnation: int
    train: tuple[int, ...]
    infer: tuple[int, ...]
    submitted_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None
    refused: str = ""
    asked: str = ""
    log_dir: str = ""
    column: int | None = 0


@dataclass(frozen=True)
class PoolBook:
    """Everything that is kept: the pool's name, what its slots are, and its pipelines."""

    lives: list[Life] = field(default_factory=list)
    residents: list[Resident] = field(default_factory=list)
    name: str = ""
    unit: str = "GPU"

    def write(self, path: Path) -> None:
        """Puts the whole state in the place of what was there."""
        beside = path.with_suffix(".new")
        with beside.open("wb") as file:
            file.write(_BOOK.dump_json(self))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)

    @classmethod
    def read(cls, path: Path) -> PoolBook:
        """What was written last; empty where nothing was.

        Raises:
            PoolBookDamaged: The file is not what was written.
        """
        try:
            return _BOOK.validate_json(path.read_bytes()) if path.exists() else cls()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            raise PoolBookDamaged(
                f"{path}: is damaged ({first}); move it away to start the pool without what it knew: end the processes "
                "of its pipelines first, and submit them again"
            ) from error


_BOOK = TypeAdapter(PoolBook)
