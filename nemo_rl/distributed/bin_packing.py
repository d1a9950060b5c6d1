"""Bin packing of sequences, by length, into microbatches of bounded token count.

Invariant: every index is in exactly one bin, no bin is above its capacity, no bin is empty, and the number of bins is
at least `min_bin_count` and a multiple of `bin_count_multiple` (so that all data-parallel ranks run the same number of
microbatches: a rank with one more would hang the first collective).
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from nemo_rl.config.errors import UserError


class BinPackingError(UserError, ValueError):
    """The sequences cannot be packed as asked."""


class PackingAlgorithm(str, Enum):
    """The values `policy.sequence_packing.algorithm` may take."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePacker(ABC):
    """Packs sequence lengths into bins. `bin_capacity`: most tokens of one bin. `bin_count_multiple`: the number of
    bins is a multiple of this. `collect_metrics`: keep the number of sequences and bins and the share of tokens in use
    of the last packing in `metrics`.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        min_bin_count = 1 if min_bin_count is None else min_bin_count
        bin_count_multiple = 1 if bin_count_multiple is None else bin_count_multiple
        if bin_capacity < 1 or min_bin_count < 1 or bin_count_multiple < 1:
            raise BinPackingError(
                f"bin_capacity={bin_capacity}, min_bin_count={min_bin_count} and "
                f"bin_count_multiple={bin_count_multiple} must each be at least 1"
            )
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self.collect_metrics = collect_metrics
        self.metrics: dict[str, float] = {}

    @abstractmethod
    def _pack(self, lengths: Sequence[int]) -> list[list[int]]: ...

    def pack(self, lengths: Sequence[int]) -> list[list[int]]:
        """Assign sequences to bins.

        Args:
            lengths: tokens of each sequence (already rounded up to any padding multiple).

        Returns one list of indices into `lengths` per bin. Raises BinPackingError: a sequence is longer than a bin, or
        there are fewer sequences than bins required.
        """
        if not lengths:
            return []
        self.check(lengths)
        bins = self._raise_bin_count([items for items in self._pack(lengths) if items], lengths)
        if self.collect_metrics:
            used = sum(lengths) / (len(bins) * self.bin_capacity)
            self.metrics = {"sequences": float(len(lengths)), "bins": float(len(bins)), "used": used}
        return bins

    def check(self, lengths: Sequence[int]) -> None:
        """Whether every sequence fits into a bin. Raises BinPackingError: one does not, or there is none."""
        if not lengths:
            raise BinPackingError("no sequences to pack")
        longest = max(range(len(lengths)), key=lambda i: lengths[i])
        if lengths[longest] > self.bin_capacity:
            raise BinPackingError(
                f"sequence {longest} has {lengths[longest]} tokens after padding, more than a microbatch may "
                f"hold ({self.bin_capacity}); "
                "raise the token cap (train_mb_tokens or logprob_mb_tokens) or lower policy.max_total_sequence_length"
            )

    def _raise_bin_count(self, bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        multiple = self.bin_count_multiple
        target = math.ceil(max(len(bins), self.min_bin_count) / multiple) * multiple
        if target > len(lengths):
            raise BinPackingError(
                f"{len(lengths)} sequences cannot fill {target} microbatches (at least {self.min_bin_count}, "
                f"a multiple of {multiple}); "
                "use a larger batch or fewer data-parallel ranks"
            )
        # A heap of splittable bins, fullest first. Taking the longest item out of the fullest bin keeps the slowest
        # microbatch as fast as it can be.
        splittable = [(-sum(lengths[i] for i in items), n) for n, items in enumerate(bins) if len(items) > 1]
        heapq.heapify(splittable)
        while len(bins) < target:
            negative_load, n = heapq.heappop(splittable)
            moved = max(bins[n], key=lambda i: lengths[i])
            bins[n].remove(moved)
            bins.append([moved])
            if len(bins[n]) > 1:
                heapq.heappush(splittable, (negative_load + lengths[moved], n))
        return bins


class ConcatenativePacker(SequencePacker):
    """Keeps the given order and opens a new bin whenever the next sequence does not fit."""

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        bins: list[list[int]] = [[]]
        load = 0
        for i, length in enumerate(lengths):
            if load + length > self.bin_capacity:
                bins.append([])
                load = 0
            bins[-1].append(i)
            load += length
        return bins


class FirstFitDecreasingPacker(SequencePacker):
    """Longest first, each into the first bin with room."""

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        return _first_fit(_descending(lengths), lengths, self.bin_capacity)


class FirstFitShufflePacker(SequencePacker):
    """Random order, each into the first bin with room.

    The order depends on `seed` and the number of sequences alone, so every process of a job packs alike.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        self.seed = seed

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        order = list(range(len(lengths)))
        random.Random(self.seed).shuffle(order)
        return _first_fit(order, lengths, self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first-fit decreasing (Johnson and Garey, 1985), worst case 71/60 of the optimum.

    Items are large (> C/2), medium (> C/3), small (> C/6) or tiny. Each large item opens a bin; one medium item joins
    each bin going forward (largest bin first); two small items join each bin without a medium one going backward; what
    is left is filled in greedily, and the leftovers go, descending, into the emptiest open bin, or a new one.
    """

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        order = _descending(lengths)
        capacity = self.bin_capacity
        large = [i for i in order if lengths[i] * 2 > capacity]
        medium = [i for i in order if lengths[i] * 3 > capacity >= lengths[i] * 2]
        small = [i for i in order if lengths[i] * 6 > capacity >= lengths[i] * 3]
        tiny = [i for i in order if capacity >= lengths[i] * 6]

        bins = [[i] for i in large]
        room = [capacity - lengths[i] for i in large]
        has_medium = self._add_medium(bins, room, medium, lengths)
        self._add_small_pairs(bins, room, small, has_medium, lengths)
        left = sorted([*medium, *small, *tiny], key=lambda i: (-lengths[i], i))
        left = _fill_greedily(bins, room, left, lengths)
        _into_emptiest(bins, room, left, lengths, capacity)
        return bins

    @staticmethod
    def _add_medium(bins: list[list[int]], room: list[int], medium: list[int], lengths: Sequence[int]) -> list[bool]:
        """Forward pass: the largest medium item that fits joins each bin. Takes the placed items out of `medium`."""
        has_medium = [False] * len(bins)
        for n in range(len(bins)):
            fitting = next((i for i in medium if lengths[i] <= room[n]), None)
            if fitting is None:
                continue
            medium.remove(fitting)
            bins[n].append(fitting)
            room[n] -= lengths[fitting]
            has_medium[n] = True
        return has_medium

    @staticmethod
    def _add_small_pairs(
        bins: list[list[int]], room: list[int], small: list[int], has_medium: list[bool], lengths: Sequence[int]
    ) -> None:
        """Backward pass: the smallest item and the largest that fits beside it join each bin without a medium one."""
        for n in reversed(range(len(bins))):
            if has_medium[n] or len(small) < 2 or lengths[small[-1]] + lengths[small[-2]] > room[n]:
                continue
            smallest = small.pop()
            partner = next(i for i in small if lengths[i] <= room[n] - lengths[smallest])
            small.remove(partner)
            bins[n].extend((smallest, partner))
            room[n] -= lengths[smallest] + lengths[partner]


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        n = next((n for n, free in enumerate(room) if lengths[i] <= free), None)
        if n is None:
            bins.append([i])
            room.append(capacity - lengths[i])
        else:
            bins[n].append(i)
            room[n] -= lengths[i]
    return bins


def _fill_greedily(bins: list[list[int]], room: list[int], items: list[int], lengths: Sequence[int]) -> list[int]:
    """Forward pass over the bins: each takes the longest items that still fit. Returns what fitted nowhere."""
    for n in range(len(bins)):
        left = []
        for i in items:
            if lengths[i] <= room[n]:
                bins[n].append(i)
                room[n] -= lengths[i]
            else:
                left.append(i)
        items = left
    return items


def _into_emptiest(
    bins: list[list[int]], room: list[int], items: list[int], lengths: Sequence[int], capacity: int
) -> None:
    emptiest = [(-free, n) for n, free in enumerate(room)]
    heapq.heapify(emptiest)
    for i in items:
        if emptiest and lengths[i] <= -emptiest[0][0]:
            negative_free, n = heapq.heappop(emptiest)
            bins[n].append(i)
        else:
            n, negative_free = len(bins), -capacity
            bins.append([i])
        heapq.heappush(emptiest, (negative_free + lengths[i], n))


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> SequencePacker:
    """The packer called `algorithm`.

    Args:
        algorithm: a `PackingAlgorithm` or its value, in any case.
        bin_capacity: most tokens of one bin.
        collect_metrics: keep `metrics` of the last packing.
        bin_count_multiple: the number of bins is a multiple of this.

    Raises BinPackingError: there is no such algorithm, or a count is below 1.
    """
    name = algorithm.value if isinstance(algorithm, PackingAlgorithm) else algorithm.lower()
    known = [a.value for a in PackingAlgorithm]
    if name not in known:
        raise BinPackingError(f"unknown packing algorithm {algorithm!r}; expected one of {', '.join(known)}")
    return _PACKERS[PackingAlgorithm(name)](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
