"""State of a pool's jobs: the file that its actor restarts from, and the reports that it gives.

Invariant: the file holds one complete state; a reader sees the last one written, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log.sharing import Sharing
from nemo_rl.utils.files import replace_file


class PoolStateDamaged(UserError, ValueError):
    """The pool's state file cannot be read."""


@dataclass(frozen=True)
class Outcome:
    """How a pipeline ended: `done`, `drained`, `cancelled`, `failed`, `dismissed` or `died`; why, or where it is `done`
    its result; its completed steps, and the seconds for which it waited for training GPUs.
    """

    kind: str
    reason: str = ""
    steps: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class AdapterProgress:
    """How far one adapter of a job is."""

    name: str
    phase: str
    step: int
    of: int
    open_samples: int  # that it waits for
    waited_s: float  # for training passes, behind the other adapters


@dataclass(frozen=True)
class Progress:
    """Current progress of a pipeline. `figures`: its newest reward and validation. `left_s`: an estimate. Steps of a
    job of adapters are summed over its adapters.
    """

    phase: str
    step: int
    of: int
    log_dir: str
    waited_s: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    left_s: float | None = None
    adapters: tuple[AdapterProgress, ...] = ()


class Resident(NamedTuple):
    """Memory of one part of a pipeline on one GPU, in bytes: `left` while it sleeps, `needs` in addition while it
    works.
    """

    pipeline: str
    part: str
    gpu: int
    left: int
    needs: int


class Wishes(NamedTuple):
    """What a user wishes of a job; the scheduler does not know of it."""

    max_slowdown: float | None = None  # how many times as long as alone it may take
    finish_by: float | None = None  # seconds since the epoch


@dataclass(frozen=True)
class HostUse:
    """What a job takes of one node, when it was last measured. `node_free`: host memory that the node had left."""

    node: str
    memory: int  # bytes
    files: int  # open descriptors
    processes: int
    node_free: int  # bytes


@dataclass(frozen=True)
class HostLimits:
    """What a job may take of each node, and of the disk; None where nothing is said."""

    memory: int | None = None  # bytes
    files: int | None = None  # open descriptors
    disk: int | None = None  # bytes of its logs and checkpoints

    def within(self, pools: HostLimits) -> HostLimits:
        """These, and those of the pool where they say nothing. Raises ValueError: one is above the pool's."""
        own, most = vars(self), vars(pools)
        for name, value in own.items():
            if value is not None and most[name] is not None and value > most[name]:
                raise ValueError(f"job_{name}: {value} is above the pool's --job-{name} {most[name]}; lower it")
        return HostLimits(**{name: most[name] if own[name] is None else own[name] for name in own})


@dataclass
class KeptJob:
    """What the pool keeps and shows of a pipeline, as it was last submitted."""

    name: str
    train: tuple[int, ...]
    infer: tuple[int, ...]
    submitted_at: float  # seconds since the epoch
    ended_at: float | None = None  # the same; None while it runs
    outcome: Outcome | None = None  # how it ended; None while it runs
    asked: str = ""  # `drain` or `cancel`, where a user has asked for its end
    log_dir: str = ""  # where its own logs are, once it has said
    wishes: Wishes = Wishes()
    user: str = ""  # who submitted it, on a pool for a team
    group: str = ""  # that user's group then
    moving: bool = False  # off a node that is to leave: it ends, and begins again


KEPT_AND_SHOWN = tuple(known.name for known in fields(KeptJob))


@dataclass
class Submission(KeptJob):
    """One pipeline of the pool."""

    incarnation: int = 0  # larger than that of any submission of this name before
    refused: str = ""  # why the pool ends it, where it does
    waits: bool = False  # for its turn to begin
    column: int | None = 0  # which slot of each GPU it is on; None for all of them
    teachers: tuple[str, ...] = ()  # the jobs that score its samples, or its own name where it is one that scores
    saves_in: str = ""  # the folder of its checkpoints
    limits: HostLimits = HostLimits()
    needs: float = 0.0  # GPUs that it must be able to hold at once
    notified: bool = False  # whether the pool's webhook has its end
    request: str = ""  # of its user; see `Job.request`

    @property
    def is_ending(self) -> bool:
        """Whether the pool has ended it, or is about to."""
        return self.outcome is not None or bool(self.refused) or self.asked == "cancel"


@dataclass
class Standing(KeptJob):
    """How one pipeline of the pool stands."""

    progress: Progress | None = None  # when last asked
    sharing: Sharing | None = None  # its gain and loss by sharing; None before its registration
    waits: str = ""  # why it has not begun, while it waits for its turn
    hosts: tuple[HostUse, ...] = ()  # what it takes of each node while it runs
    disk: int | None = None  # bytes of its logs and checkpoints while it runs; None before they were measured

    def kept(self, now: float) -> dict[str, str]:
        """Whether its user's wishes are kept, and by how much they are missed, in words by the wish; `now`: seconds
        since the epoch.
        """
        said: dict[str, str] = {}
        most, by = self.wishes
        if most is not None:
            slowdown = self.sharing.slowdown if self.sharing is not None else 1.0
            over = slowdown - most
            said["max_slowdown"] = f"at most {most:g}: " + (f"missed by {over:.2f}" if over > 0 else "kept")
        if by is not None:
            left_s = self.progress.left_s if self.progress is not None else None
            end = self.ended_at or (None if left_s is None else now + left_s)
            verb = "ended" if self.ended_at else "will end"
            if self.outcome is not None and self.outcome.kind != "done":
                said["finish_by"] = f"missed: {self.outcome.kind}"
            elif end is None:
                said["finish_by"] = "unknown yet" if now <= by else f"missed by {now - by:.0f} s so far"
            elif end <= by:
                said["finish_by"] = f"kept: {verb} {by - end:.0f} s before"
            else:
                said["finish_by"] = f"missed: {verb} {end - by:.0f} s after"
        return said

    @property
    def state(self) -> str:
        """A short description of its phase."""
        if self.outcome is not None:
            return self.outcome.kind
        if self.asked:
            return {"drain": "draining", "cancel": "being cancelled"}[self.asked]
        if self.moving:
            return "moving"
        if self.waits:
            return "queued"
        return self.progress.phase if self.progress is not None else "starting"

    @property
    def why(self) -> str:
        """How far it is, what it waits for, or why it ended."""
        if self.outcome is not None:
            return self.outcome.reason
        if self.waits or self.progress is None:
            return self.waits
        paused = self.sharing.paused if self.sharing is not None else ""
        doing = f"; {self.progress.phase}" if self.asked else f"; {paused}" if paused else ""
        return f"step {self.progress.step}/{self.progress.of}{doing}"


@dataclass(frozen=True)
class PoolState:
    """Contents of the state file: the pool's name, the unit of its slots, and its pipelines."""

    submissions: Annotated[list[Submission], Field(alias="lives")] = field(default_factory=list)
    residents: list[Resident] = field(default_factory=list)
    name: str = ""
    unit: str = "GPU"
    gone: list[int] = field(default_factory=list)  # nodes that are to leave, or away
    requests: dict[str, list[int]] = field(default_factory=dict)  # ids of requests for nodes to leave, and those nodes

    def write(self, path: Path) -> None:
        """Replaces the state file atomically, and waits for the disk."""
        replace_file(path, _STATE.dump_json(self, by_alias=True), durable=True)

    @classmethod
    def read(cls, path: Path) -> PoolState:
        """Reads the state file; an empty state if there is none. Raises PoolStateDamaged: the file does not parse."""
        try:
            return _STATE.validate_json(path.read_bytes()) if path.exists() else cls()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            raise PoolStateDamaged(
                f"{path}: is damaged ({first}); move it away to start the pool without what it knew: end the processes "
                "of its pipelines first, and submit them again"
            ) from error


_STATE = TypeAdapter(PoolState)
