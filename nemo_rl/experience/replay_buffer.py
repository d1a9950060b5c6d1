"""Finished prompt groups that wait for the step they were generated for.

A plain class without threads, clocks or actors. Every group is assigned to one batch of one step (its target) before it
is generated, which bounds its staleness. Invariants: a group is in the buffer at most once and leaves it once; batches
are complete and within the staleness bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle


class StaleGroupError(RuntimeError):
    """A group is older than the staleness bound allows at its step."""


class BufferProtocolError(RuntimeError):
    """A group arrived twice, for no known batch, or a batch was taken that is not complete."""


class GroupKey(NamedTuple):
    """A prompt group's place: the step that trains it, its generation batch (from 0), its number in the step."""

    target: int
    attempt: int
    number: int


@dataclass
class BufferedGroup:
    """One finished group."""

    key: GroupKey  # its place in the run
    tokens: BatchHandle  # handle of its token columns, pending in the store
    rows: BatchedDataDict  # its small columns [G]
    metrics: dict[str, Any] = field(default_factory=dict)
    generated_at: int = 0  # version that was published when its generation began

    @property
    def oldest(self) -> int:
        """Oldest version among its tokens; -1 if no sample has tokens, because their prompts fill the sequence."""
        versions_G = self.rows["weight_version"]
        with_tokens_N = versions_G[versions_G >= 0]
        return int(with_tokens_N.min()) if len(with_tokens_N) else -1

    def is_stale(self, max_age: int) -> bool:
        """Whether it is older than its step allows."""
        return 0 <= self.oldest < self.key.target - max_age


class ReplayBuffer:
    """Groups by batch. `max_age`: how many versions older than its step's weights a group's oldest token may be."""

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        self._expected: dict[tuple[int, int], set[int]] = {}
        self._groups: dict[GroupKey, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def expect(self, target: int, attempt: int, numbers: Sequence[int]) -> None:
        """Announces a batch of group numbers. Raises BufferProtocolError: it was announced before."""
        if (target, attempt) in self._expected:
            raise BufferProtocolError(f"generation batch {attempt} of step {target} is expected already")
        self._expected[target, attempt] = set(numbers)

    def knows(self, target: int, attempt: int) -> bool:
        """Whether a batch is expected, finished or not."""
        return (target, attempt) in self._expected

    def add(self, group: BufferedGroup) -> None:
        """A group is finished. Raises BufferProtocolError: it was not expected, or is here already."""
        key = group.key
        if key.number not in self._expected.get((key.target, key.attempt), set()):
            raise BufferProtocolError(
                f"group {key.number} of step {key.target} (generation batch {key.attempt}) was not expected"
            )
        if key in self._groups:
            raise BufferProtocolError(f"group {key.number} of step {key.target} arrived twice")
        self._groups[key] = group

    def ready(self, target: int, attempt: int) -> int:
        """Finished groups of a batch."""
        return sum((key.target, key.attempt) == (target, attempt) for key in self._groups)

    def count_intended_for_step(self, version: int) -> int:
        """Finished groups that the step starting from `version` trains."""
        return sum(key.target == version for key in self._groups)

    def complete(self, target: int, attempt: int) -> bool:
        """Whether every group of a batch is finished."""
        return self.knows(target, attempt) and self.ready(target, attempt) == len(self._expected[target, attempt])

    def missing(self, target: int, attempt: int) -> list[int]:
        """Numbers of a batch's groups that are not finished."""
        return sorted(
            number
            for number in self._expected[target, attempt]
            if GroupKey(target, attempt, number) not in self._groups
        )

    def take(self, target: int, attempt: int) -> list[BufferedGroup]:
        """Removes and returns a whole batch, in prompt order. Raises BufferProtocolError: groups are missing;
        StaleGroupError: a group is too old for its step.
        """
        if not self.complete(target, attempt):
            raise BufferProtocolError(
                f"generation batch {attempt} of step {target} is not complete: "
                f"{self.missing(target, attempt)} are missing"
            )
        groups = [
            self._groups.pop(GroupKey(target, attempt, number))
            for number in sorted(self._expected.pop((target, attempt)))
        ]
        self._check_age(groups)
        return groups

    def _check_age(self, groups: Sequence[BufferedGroup]) -> None:
        for group in groups:
            if group.is_stale(self._max_age):
                raise StaleGroupError(
                    f"group {group.key.number} of step {group.key.target} has tokens of version {group.oldest}; "
                    f"at most {self._max_age} versions of age are allowed"
                )

    def groups(self) -> list[BufferedGroup]:
        """Everything that waits, by step and prompt."""
        return [self._groups[key] for key in sorted(self._groups)]
