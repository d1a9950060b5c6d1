"""Measures the gain of running pipelines at the same time on shared GPUs, and keeps a group only while it pays.

A trial runs one pipeline alone for a few steps while those that share its GPUs pause, and compares its seconds per step
with those measured while all ran. Gain = sum over members of alone / together: 2 for two that do not slow each other, 1
if they could as well run one after the other. A group without gain is split into halves which run in turn, and each
half is measured too. Pipelines that do not both train and generate make no comparable steps: they always run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import PipelineState, SchedulerState
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN

_LEFT_OUT = 2
"""Steps that do not count after a change of who runs: one began before it, one uses what was generated before it."""
_ENOUGH, _MOST = 4, 16
"""Steps that a figure is made of, where `trial_steps` does not ask for fewer, and of how many of the newest at most."""
_BETWEEN = 5
"""How many times `trial_steps` lie between one time that pipelines are tried and the next, at least."""
_PATIENCE = 4.0
"""A trial or a turn whose pipelines make no steps ends after so many times what they should have taken."""

Group = tuple[str, ...]


class StepTimes:
    """Ends of each pipeline's steps since the running group last changed."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._ends: dict[str, list[tuple[float, int]]] = {}

    def released(self, name: str, version: int, now: float) -> None:
        """A pipeline gave its training GPUs back with this version published. Parts of a step keep the version."""
        before = self._versions.get(name, version)
        self._versions[name] = max(version, before)
        if version > before:
            self._ends.setdefault(name, []).append((now, version))

    def forget(self, name: str) -> None:
        """Forgets a pipeline."""
        self._versions.pop(name, None)
        self._ends.pop(name, None)

    def begin(self) -> None:
        """Starts measuring after a change of the running group."""
        self._ends.clear()

    def ended(self, name: str) -> int:
        """How many steps have ended since then."""
        return len(self._ends.get(name, ()))

    def seconds(self, name: str, count: int) -> float | None:
        """Mean seconds of its newest steps, over several because a pipeline that generates ahead may train two in a
        row. None with fewer than `count` usable steps.
        """
        used = self._ends.get(name, [])[_LEFT_OUT - 1 :]
        if len(used) <= count:
            return None
        (began, before), (ended, version) = used[-min(len(used), _MOST + 1)], used[-1]
        return (ended - began) / (version - before)


class Trials:
    """Decides which pipelines run at the same time. `emit`: writes an event and applies it. `drop_claims`: withdraws a
    pipeline's claims, with a reason.

    Invariant: at least one pipeline that makes steps is not paused. Every trial and turn ends when a pipeline registers
    or ends.
    """

    def __init__(
        self, state: SchedulerState, emit: Callable[[object], None], drop_claims: Callable[[str, str], None]
    ) -> None:
        self.steps = StepTimes()
        self._state, self._emit, self._drop_claims = state, emit, drop_claims
        self._members: frozenset[tuple[str, int]] = frozenset()
        self._groups: list[Group] = []
        """Who runs together, those that run now first."""
        self._paying: set[Group] = set()
        self._together: dict[str, float] = {}
        self._alone: dict[str, float] = {}
        self._to_try: list[str] = []
        """Whom the group that runs now still needs a trial of; the first is being tried."""
        self._since = 0.0
        self._again_at = 0.0

    @property
    def _enough(self) -> int:
        return max(min(_ENOUGH, self._state.limits.trial_steps), 1)

    def update(self, now: float) -> None:
        """Pauses and resumes whom it is time for; where nothing is measured, none pauses."""
        if self._state.limits.measure_s and self._state.pool.slots_per_gpu > 1 and not self._state.recovering:
            self._measure(now)
        self._pause(self._resting())

    def _measure(self, now: float) -> None:
        """Goes on with the trial or turn that is under way, and begins the next ones."""
        members = frozenset((name, p.incarnation) for name, p in self._state.pipelines.items() if _compares(p))
        if members != self._members:
            self._gather(members, now)
        elif now >= self._again_at:
            self._alone.clear()
            self._again_at = float("inf")
            self._begin(now)
        if self._to_try:
            self._try(now)
        if self._groups and not self._to_try:
            self._judge(now)
        if len(self._groups) > 1 and not self._to_try:
            self._rotate(now)

    def _gather(self, members: frozenset[tuple[str, int]], now: float) -> None:
        """Somebody came or went. One that had the GPUs to itself until now needs no trial."""
        if len(self._members) == 1:
            (name, _), *_ = self._members
            if (seconds := self.steps.seconds(name, self._enough)) is not None:
                self._alone[name] = seconds
        stay = {name for name, _ in members & self._members}
        self._alone = {name: seconds for name, seconds in self._alone.items() if name in stay}
        self._members, self._again_at = members, float("inf")
        self._begin(now)

    def _begin(self, now: float) -> None:
        """All run together until there are figures."""
        names = sorted(name for name, _ in self._members)
        sharing = tuple(name for name in names if self._neighbours(name, names))
        self._groups = [sharing] if sharing else []
        self._paying.clear()
        self._together.clear()
        self._to_try.clear()
        self._changed(now)

    def _changed(self, now: float) -> None:
        self._since = now
        self.steps.begin()

    def _neighbours(self, name: str, others: Collection[str]) -> set[str]:
        """The others that may use a GPU which this one may use."""
        gpus = self._gpus(name)
        return {other for other in others if other != name and not gpus.isdisjoint(self._gpus(other))}

    def _gpus(self, name: str) -> set[int]:
        return {self._state.pool.gpu_of(slot) for slot in self._state.pipelines[name].topology.mapped_gpus}

    def _judge(self, now: float) -> None:
        """Decides on the running group once each member has been tried alone."""
        group = self._groups[0]
        if len(group) == 1 or group in self._paying:
            return
        if not self._together.keys() >= set(group):
            before = max(self._state.limits.trial_steps, 1)
            untried = [name for name in group if name not in self._alone]
            found = {name: self.steps.seconds(name, before if untried else self._enough) for name in group}
            if None in found.values():
                return
            self._together = {name: seconds for name, seconds in found.items() if seconds is not None}
            self._to_try = untried
            if self._to_try:
                self._changed(now)
                return
        alone = {name: self._alone[name] for name in group}
        gain = sum(alone[name] / self._together[name] for name in group)
        self._emit(ev.SharingMeasured(dict(self._together), alone, round(gain, 3), gain > 1.0))
        self._put_off(now)
        self._together.clear()
        if gain > 1.0:
            self._paying.add(group)
        else:
            self._groups[0:1] = [group[::2], group[1::2]]
            self._changed(now)

    def _try(self, now: float) -> None:
        """Ends the trial that is under way once it has a figure; without one nothing is decided until the next time."""
        name = self._to_try[0]
        seconds = self.steps.seconds(name, self._enough)
        if seconds is not None:
            self._alone[name] = seconds
            del self._to_try[0]
            self._changed(now)
        elif now > self._since + _PATIENCE * (_LEFT_OUT + self._enough) * self._together[name]:
            self._put_off(now)
            self._begin(now)
            self._paying.update(self._groups)

    def _put_off(self, now: float) -> None:
        limits = self._state.limits
        self._again_at = now + max(limits.measure_s, _BETWEEN * limits.trial_steps * max(self._together.values()))

    def _rotate(self, now: float) -> None:
        """Switches to the next group when this one's turn is over and its steps suffice for a measurement."""
        group, turn = self._groups[0], self._state.limits.turn_s
        needed = 1 if len(group) == 1 or group in self._paying else _LEFT_OUT + self._enough
        most = _PATIENCE * max(turn, *(needed * self._alone.get(name, 0.0) for name in group))
        due = self._since + (turn if all(self.steps.ended(name) >= needed for name in group) else most)
        if now >= due:
            self._groups.append(self._groups.pop(0))
            self._changed(now)

    def _resting(self) -> set[str]:
        names = {name for name, _ in self._members}
        if self._to_try:
            return self._neighbours(self._to_try[0], names)
        return {name for group in self._groups[1:] for name in group}

    def _pause(self, resting: set[str]) -> None:
        changed = [
            name
            for name, pipeline in self._state.pipelines.items()
            if not pipeline.fenced and pipeline.paused != (name in resting)
        ]
        for name in sorted(changed, key=resting.__contains__):
            if name not in resting:
                self._emit(ev.Resumed(name))
                continue
            who = self._to_try[0] if self._to_try else ", ".join(self._groups[0])
            self._emit(ev.Paused(name, f"{who} {'is measured alone' if self._to_try else 'has its turn'}"))
            self._drop_claims(name, "paused")


def _compares(pipeline: PipelineState) -> bool:
    """Whether the pipeline makes comparable steps: it trains and generates."""
    generates = bool(pipeline.awake) or pipeline.service > 0 or pipeline.demand.target > 0
    there = not pipeline.leaving and not pipeline.fenced
    return there and generates and ACTOR_TRAIN in pipeline.topology.clusters
