"""Samplers choose the finished prompt groups of the next optimizer step: pure functions over immutable slots.

`PromptQueue` asks a sampler when prompts may be dispatched, which groups a step may take, and which are too old.
Invariant: `eligible` returns ready groups, at most `max_lag` versions old where the sampler is bounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from nemo_rl.config.errors import UserError
from nemo_rl.experience.prompts import GroupKey


class SamplerError(UserError, ValueError):
    """A sampler that cannot be made, or that was asked for an impossible number of groups."""


class SlotStatus(Enum):
    """State of a prompt group before its step takes it."""

    WAITING = "waiting"
    ROLLING = "rolling"
    READY = "ready"


@dataclass(frozen=True)
class Slot:
    """One prompt group that was drawn and is not trained."""

    key: GroupKey  # its identity: the batch that it was drawn with, the attempt, its number
    place: int  # number of the group in the order of training, over the whole run
    status: SlotStatus = SlotStatus.WAITING
    started: int | None = None  # version that was published when its generation began; None before
    arrived: int | None = None  # number of its arrival; None until it is ready
    attempts: int = 0  # rollouts of it that failed

    @property
    def ready(self) -> bool:
        """Whether its rollouts are finished."""
        return self.status is SlotStatus.READY

    def lag(self, version: int) -> int:
        """How many versions its generation began before `version`."""
        return version - (version if self.started is None else self.started)


class Sampler(Protocol):
    """Chooses groups."""

    paced: bool  # whether prompts are dispatched for at most `max_lag + 1` steps at a time
    in_order: bool  # whether a step takes exactly the groups whose place is its own

    @property
    def max_lag(self) -> int | None:
        """How many versions old a group may be when it is trained; None for any number."""
        ...

    def window(self) -> int:
        """How many versions early prompts are dispatched."""
        ...

    def eligible(self, slots: Sequence[Slot], version: int, first: int, wanted: int) -> Sequence[Slot]:
        """The ready slots that the step starting from `version` may take, preferred ones first. `slots`: every
        untrained slot, by place. `first`: place of the step's first group.
        """
        ...

    def stale(self, slots: Sequence[Slot], version: int) -> Sequence[Slot]:
        """Slots, ready or rolling, that no step from `version` on will take as they are."""
        ...


@dataclass(frozen=True)
class InOrder:
    """Every step takes the groups that were drawn for it; `max_lookahead_versions` steps are dispatched early."""

    max_lookahead_versions: int = 1
    paced = True
    in_order = True

    @property
    def max_lag(self) -> int:
        """The lookahead: prompts dispatched this many versions early are trained this many versions late."""
        return self.max_lookahead_versions

    def window(self) -> int:
        """The lookahead."""
        return self.max_lookahead_versions

    def eligible(self, slots: Sequence[Slot], version: int, first: int, wanted: int) -> Sequence[Slot]:
        """The step's own, as they arrived."""
        return _by_arrival(slot for slot in slots if slot.ready and first <= slot.place < first + wanted)

    def stale(self, slots: Sequence[Slot], version: int) -> Sequence[Slot]:
        """None: pacing bounds their age."""
        return ()


@dataclass(frozen=True)
class _Window:
    """Common part of the samplers with `max_staleness_versions`."""

    max_staleness_versions: int = 1
    in_order = False

    @property
    def max_lag(self) -> int | None:
        """The window."""
        return self.max_staleness_versions

    def window(self) -> int:
        """The staleness that is allowed."""
        return self.max_staleness_versions

    def _inside(self, slot: Slot, version: int) -> bool:
        return slot.started is not None and 0 <= slot.lag(version) <= self.max_staleness_versions

    def stale(self, slots: Sequence[Slot], version: int) -> Sequence[Slot]:
        """Those that fell out of the window."""
        window = self.max_staleness_versions
        return [slot for slot in slots if slot.started is not None and slot.lag(version) > window]


@dataclass(frozen=True)
class WeightFifo(_Window):
    """Takes the groups of the oldest version first, and waits for all of them before younger ones."""

    paced = True

    def eligible(self, slots: Sequence[Slot], version: int, first: int, wanted: int) -> Sequence[Slot]:
        """Those whose generation began under the oldest version inside the window."""
        begun = [slot for slot in slots if self._inside(slot, version)]
        oldest = max((slot.lag(version) for slot in begun), default=0)
        return _by_arrival(slot for slot in begun if slot.ready and slot.lag(version) == oldest)


@dataclass(frozen=True)
class Windowed(_Window):
    """Takes whatever is ready and young enough; prompts are dispatched as fast as the buffer allows."""

    sample_freshest_first: bool = False
    paced = False

    def eligible(self, slots: Sequence[Slot], version: int, first: int, wanted: int) -> Sequence[Slot]:
        """Inside the window, as they arrived or the freshest first."""
        found = _by_arrival(slot for slot in slots if slot.ready and self._inside(slot, version))
        return sorted(found, key=lambda slot: slot.lag(version)) if self.sample_freshest_first else found


@dataclass(frozen=True)
class ReadyFirst(_Window):
    """Takes whatever is ready, however old; `max_staleness_versions` only paces the dispatch of prompts."""

    paced = True
    max_lag: None = None

    def eligible(self, slots: Sequence[Slot], version: int, first: int, wanted: int) -> Sequence[Slot]:
        """All that are ready, as they arrived."""
        return _by_arrival(slot for slot in slots if slot.ready)

    def stale(self, slots: Sequence[Slot], version: int) -> Sequence[Slot]:
        """None."""
        return ()


def _by_arrival(slots: Any) -> list[Slot]:
    return sorted(slots, key=lambda slot: slot.arrived)


BUILT_IN: Mapping[str, type] = {
    "in_order": InOrder,
    "weight_fifo": WeightFifo,
    "windowed": Windowed,
    "ready_first": ReadyFirst,
}
"""The samplers of `async_rl.sampler.name`; `custom` names a class of the user's."""


def custom_sampler(target: str, settings: Mapping[str, object]) -> Sampler:
    """A user's sampler, `module:Class`. Raises SamplerError: it cannot be imported or made, or is incomplete."""
    where = f"async_rl.sampler.target={target}"
    module, _, name = target.partition(":")
    try:
        sampler = getattr(importlib.import_module(module), name)(**settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SamplerError(f"{where}: expected module:Class and the keys that it takes; {error}") from error
    missing = [part for part in ("max_lag", "paced", "in_order", "window", "eligible", "stale")
               if not hasattr(sampler, part)]  # fmt: skip
    if missing:
        raise SamplerError(f"{where}: {name} lacks {missing}; see nemo_rl.experience.samplers.Sampler")
    return sampler
