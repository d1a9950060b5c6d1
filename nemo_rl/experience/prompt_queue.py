"""The prompts of a run that generates ahead, from the loader to their optimizer step: drawn, rolling, ready, taken.

A state machine without threads, clocks or tokens. The open `Step` owns the groups it took and the prompts given up in
it. Invariants: every drawn prompt is trained once, given up with a reason, or saved in a checkpoint; rolling and ready
groups never exceed the capacity; a step takes only what its sampler allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nemo_rl.experience.prompts import BufferedGroup, GroupKey, Position
from nemo_rl.experience.samplers import Sampler, Slot, SlotStatus


class QueueProtocolError(RuntimeError):
    """A call names an unknown group or comes in the wrong order."""


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of the queue. `replaces`: whether later prompts move up for a given-up one; else its step is smaller."""

    wanted: int  # prompt groups of a step
    last_step: int  # no prompt is drawn for this step or later ones
    capacity: int = sys.maxsize  # groups that may be rolling or ready at a time
    max_inflight: int | None = None  # groups that may be rolling at a time; None for as many as the capacity allows
    min_fraction: float = 1.0  # share of a step's groups without which it is not trained
    replaces: bool = False


@dataclass
class Step:
    """One open optimizer step. `replaced`: prompts that were given up and replaced by another."""

    version: int  # of the weights that it starts from, which is its number
    wanted: int  # groups that it is made of
    taken: list[GroupKey] = field(default_factory=list)  # groups that were given to training, in that order
    dropped: list[GroupKey] = field(default_factory=list)  # prompts that were given up and make it smaller
    replaced: list[GroupKey] = field(default_factory=list)
    batches: int = 1  # generation batches that were drawn for it

    @property
    def missing(self) -> int:
        """Groups that it still waits for."""
        return self.wanted - len(self.taken) - len(self.dropped)


def worth_a_pass(ready: int, step: Step, least: int) -> bool:
    """Whether to train `ready` groups now instead of waiting for more: from `least` groups on. The rest of a step that
    fits one more pass is halved repeatedly, so that the last pass, under which nothing is generated, is the smallest.
    """
    return ready >= least or (bool(step.taken) and step.missing <= least and 2 * ready >= step.missing)


class SavedBatch(NamedTuple):
    """A drawn batch in a checkpoint: its number, its prompts, and `(row, attempt, number)` of those not yet trained."""

    batch: int
    rows: int
    open: tuple[tuple[int, int, int], ...]


@dataclass
class Drawn:
    """One batch of prompts: which of its rows are not trained yet, and the attempt that each of them is in. `before`:
    where the loader stood.
    """

    batch: int
    rows: int
    open: dict[int, GroupKey]
    before: Position | None = None

    def saved(self) -> SavedBatch:
        """Its form in a checkpoint."""
        return SavedBatch(
            self.batch, self.rows, tuple((row, key.attempt, key.number) for row, key in self.open.items())
        )


class PromptQueue:
    """The prompts of a run on their way to a step. `sampler`: chooses a step's groups."""

    def __init__(self, sampler: Sampler, limits: QueueLimits, version: int = 0) -> None:
        self._sampler, self._limits = sampler, limits
        self._drawn: list[Drawn] = []
        self._slots: dict[GroupKey, Slot] = {}
        self._next_batch = version
        self._next_place = version * limits.wanted
        self._arrivals = 0
        self._given_up: list[tuple[int, GroupKey]] = []
        self.exhausted = False
        self.step = Step(version, limits.wanted)

    @property
    def version(self) -> int:
        """Of the weights that the open step starts from."""
        return self.step.version

    @property
    def max_lag(self) -> int | None:
        """Largest age of a group in versions when it is trained; None for any."""
        return self._sampler.max_lag

    def slots(self) -> list[Slot]:
        """Every group that is neither taken nor given up, by its place."""
        return sorted(self._slots.values(), key=lambda slot: slot.place)

    def drawn(self) -> list[Drawn]:
        """The batches that are not wholly trained, and those between them."""
        return list(self._drawn)

    def live(self) -> int:
        """Groups that are rolling or ready."""
        return sum(slot.status is not SlotStatus.WAITING for slot in self._slots.values())

    def rolling(self) -> int:
        """Groups with running rollouts."""
        return sum(slot.status is SlotStatus.ROLLING for slot in self._slots.values())

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def wants_batch(self, *, ahead: bool = False) -> bool:
        """Whether to draw more prompts, for dispatch now or as soon as there is capacity; with `ahead` also those for
        the next version.
        """
        if self.exhausted or not self._admits(self._next_place, self.step.version + ahead):
            return False
        return self._sampler.paced or len(self._slots) < self._limits.capacity

    def draw(self, rows: int, before: Position | None = None) -> list[GroupKey]:
        """A batch of `rows` prompts came from the loader; its groups, in order."""
        batch = self._next_batch
        keys = [GroupKey(batch, 0, row) for row in range(rows)]
        self._next_batch += 1
        self._add(Drawn(batch, rows, dict(enumerate(keys)), before))
        return keys

    def extend_step(self, rows: int, before: Position | None = None) -> list[GroupKey]:
        """Adds a further batch of `rows` prompts to the open step, which grows by them; returns its groups, in order.
        Raises QueueProtocolError: the step has not taken all the groups it waited for, or takes groups of any batch.
        """
        step = self.step
        if step.missing or not self._fixed:
            raise QueueProtocolError(f"step {step.version} still waits for {step.missing} of its groups")
        # The places of the groups that it took are free.
        keys = [GroupKey(step.version, step.batches, step.batches * rows + row) for row in range(rows)]
        step.batches += 1
        step.wanted += rows
        self._add(Drawn(step.version, rows, dict(enumerate(keys)), before))
        return keys

    def restore(self, batch: int, rows: int, open: dict[int, GroupKey], before: Position | None = None) -> None:
        """A batch that a checkpoint held; batches come in their order, before any other is drawn."""
        self._next_batch = max(self._next_batch, batch + 1)
        if self._fixed:
            # Groups that are neither open nor of an earlier step were given up before the restart.
            places = {row: batch * self._limits.wanted + row for row in range(rows) if row not in open}
            self._given_up += [
                (place, GroupKey(batch, 0, row)) for row, place in places.items() if place >= self._first
            ]
            self.step.dropped = self._dropped_of_step()
        self._add(Drawn(batch, rows, dict(open), before))

    def _add(self, drawn: Drawn) -> None:
        self._drawn.append(drawn)
        for row in sorted(drawn.open):
            place = drawn.batch * self._limits.wanted + row if self._fixed else self._next_place
            self._slots[drawn.open[row]] = Slot(drawn.open[row], place)
            self._next_place = max(self._next_place, place + 1)

    @property
    def _fixed(self) -> bool:
        """Whether a group's step is the batch that it was drawn with."""
        return self._sampler.in_order and not self._limits.replaces

    @property
    def _first(self) -> int:
        return self.step.version * self._limits.wanted

    def _admits(self, place: int, version: int | None = None) -> bool:
        last = self._limits.last_step
        if self._sampler.paced:
            last = min(last, (self.step.version if version is None else version) + self._sampler.window() + 1)
        return place < last * self._limits.wanted

    def to_launch(self, published: int) -> list[GroupKey]:
        """Groups whose rollouts may start now, in order. `published`: the version they start under, which may be that
        of the step before.
        """
        version = min(published, self.step.version)
        waiting = [
            slot for slot in self.slots() if slot.status is SlotStatus.WAITING and self._admits(slot.place, version)
        ]
        return [slot.key for slot in waiting[: self._room()]]

    def _room(self) -> int:
        room = self._limits.capacity - self.live()
        if self._limits.max_inflight is not None:
            room = min(room, self._limits.max_inflight - self.rolling())
        return max(0, room)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def launched(self, key: GroupKey, version: int) -> None:
        """The rollouts of a group begin under `version`."""
        self._slots[key] = replace(self._get(key, SlotStatus.WAITING), status=SlotStatus.ROLLING, started=version)

    def ready(self, key: GroupKey) -> None:
        """The rollouts of a group are finished."""
        slot = self._get(key, SlotStatus.ROLLING)
        self._slots[key] = replace(slot, status=SlotStatus.READY, arrived=self._arrivals)
        self._arrivals += 1

    def failed(self, key: GroupKey) -> int:
        """A rollout of a group failed and is tried again, if the caller likes; failures of the group so far."""
        slot = self._get(key, SlotStatus.ROLLING)
        self._slots[key] = replace(slot, attempts=slot.attempts + 1)
        return slot.attempts + 1

    def give_up(self, key: GroupKey) -> None:
        """The prompt of a rolling group is not trained at all."""
        slot = self._get(key, SlotStatus.ROLLING)
        del self._slots[key]
        self._close(key)
        if not self._fixed:
            # Those behind it move up, so that no step is smaller.
            self._slots = {
                other.key: replace(other, place=other.place - 1) if other.place > slot.place else other
                for other in self._slots.values()
            }
            self._next_place -= 1
            self.step.replaced.append(key)
        else:
            self._given_up.append((slot.place, key))
            self.step.dropped = self._dropped_of_step()

    def _get(self, key: GroupKey, status: SlotStatus) -> Slot:
        slot = self._slots.get(key)
        if slot is None or slot.status is not status:
            found = "unknown" if slot is None else slot.status.value
            raise QueueProtocolError(f"group {key} is {found}, expected {status.value}")
        return slot

    def _dropped_of_step(self) -> list[GroupKey]:
        return [key for place, key in self._given_up if self._first <= place < self._first + self._limits.wanted]

    def _close(self, key: GroupKey) -> None:
        drawn = self._drawn_with(key)
        del drawn.open[key.number % drawn.rows]

    def _drawn_with(self, key: GroupKey) -> Drawn:
        return next(one for one in self._drawn if one.open.get(key.number % one.rows) == key)

    def again(self, key: GroupKey) -> GroupKey:
        """Restarts a group whose rollouts became useless, under a new key, in its place."""
        slot = self._slots.pop(key)
        drawn = self._drawn_with(key)
        fresh = GroupKey(key.target, key.attempt + 1, key.number + drawn.rows)
        drawn.open[key.number % drawn.rows] = fresh
        self._slots[fresh] = Slot(fresh, slot.place, attempts=slot.attempts)
        return fresh

    def stale(self) -> list[GroupKey]:
        """Groups, ready or rolling, that no step will take as they are."""
        return [slot.key for slot in self._sampler.stale(self.slots(), self.version)]

    def may_still_take(self, group: BufferedGroup) -> bool:
        """Whether a finished group of a checkpoint is young enough for the step that would take it."""
        if self._fixed:
            return group.key.target >= self.version and not group.is_stale(group.key.target, self.max_lag)
        return self.max_lag is None or group.generated_at >= self.version - self.max_lag

    # -- groups out ---------------------------------------------------------------------------------------------------

    def select(self, enough: Callable[[Sequence[GroupKey]], bool]) -> list[GroupKey] | None:
        """Takes groups for the open step: when `enough`, when the step is complete, or when no rolling group can join.
        None:
        wait; empty: the step has all of its groups, or no prompt is left for it.
        """
        missing = self.step.missing
        if missing == 0:
            return []
        slots = self.slots()
        found = self._eligible(slots)[:missing]
        if not found:
            return [] if not slots and self._none_left() else None
        keys = [slot.key for slot in found]
        if len(found) < missing and not enough(keys) and self._more_may_come(slots, found):
            return None
        for key in keys:
            del self._slots[key]
        self.step.taken += keys
        return keys

    def _eligible(self, slots: Sequence[Slot]) -> list[Slot]:
        return list(self._sampler.eligible(slots, self.version, self._first, self._limits.wanted))

    def _more_may_come(self, slots: Sequence[Slot], found: Sequence[Slot]) -> bool:
        """Whether an unfinished group could become eligible together with these."""
        moves = self.rolling() > 0 or self._room() > 0
        later = [
            replace(slot, status=SlotStatus.READY, started=self.version if slot.started is None else slot.started,
                    arrived=self._arrivals if slot.arrived is None else slot.arrived)
            for slot in slots
            if slot.status is not SlotStatus.WAITING or (moves and self._admits(slot.place))
        ]  # fmt: skip
        return len(self._eligible(later)) > len(found)

    def _none_left(self) -> bool:
        return self.exhausted or not self._admits(self._next_place)

    def too_small(self) -> bool:
        """Whether so many prompts were given up, or are not there, that the open step is not worth training."""
        there = len(self.step.taken) if self._none_left() and not self._slots else self.step.wanted
        return min(there, self.step.wanted - len(self.step.dropped)) < self._limits.min_fraction * self.step.wanted

    def taken_in_order(self) -> list[tuple[GroupKey, int]]:
        """The groups of the open step with a number that is their own in it: that of their prompt in its batch, or the
        next free one.
        """
        numbers: dict[int, GroupKey] = {}
        for key in self.step.taken:
            number = key.number
            while number in numbers:
                number += self._limits.wanted
            numbers[number] = key
        return [(key, number) for number, key in numbers.items()]

    def finish_step(self) -> Step:
        """The open step is trained; the next one begins from its weights."""
        done = self.step
        for key in done.taken:
            self._close(key)
        while self._drawn and not self._drawn[0].open:
            self._drawn.pop(0)
        self.step = Step(done.version + 1, self._limits.wanted)
        self._given_up = [(place, key) for place, key in self._given_up if place >= self._first]
        self.step.dropped = self._dropped_of_step()
        if not self._fixed:
            # Whatever was taken leaves a gap that the others close, so that places are steps again.
            for place, slot in enumerate(self.slots(), start=self._first):
                self._slots[slot.key] = replace(slot, place=place)
            self._next_place = self._first + len(self._slots)
        return done

    def ready_for_step(self, version: int | None = None) -> int:
        """Groups that the open step took or could take now; with `version` those that a later step could take, if it
        began now.
        """
        if version is None or version == self.step.version:
            return min(self.step.wanted, len(self.step.taken) + len(self._eligible(self.slots())))
        wanted = self._limits.wanted
        return min(wanted, len(self._sampler.eligible(self.slots(), version, version * wanted, wanted)))
