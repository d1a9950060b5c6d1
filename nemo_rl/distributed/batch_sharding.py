"""Plans which rows of a global batch go to which data-parallel rank, and each rank's microbatches.

Works on row counts and lengths alone, so the driver can plan for rows it does not hold. Rows with a common prefix are
bundled by group numbers and token counts, so that a microbatch computes it once; which tokens are shared is decided
later from the tokens themselves (`models/policy/packed.py`), so a wrong number here costs memory or time only.
Packers put sequences, by length, into microbatches of bounded token count. Invariants: every row goes to exactly one
rank and one bin, no bin is empty or above its capacity, and every rank has the same number of microbatches per global
batch; one more on one rank would hang the gradient collectives.
"""

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Literal, NotRequired, TypedDict

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
    """Random order, each into the first bin with room. It depends on the number of sequences alone, so every process of
    a job packs alike.
    """

    def _pack(self, lengths: Sequence[int]) -> list[list[int]]:
        order = list(range(len(lengths)))
        random.Random(0).shuffle(order)
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


WORTHWHILE = 16
"""Tokens below which a prefix is not worth a segment of its own."""
WORTHWHILE_ON_CPU = 4
"""Likewise on a CPU, where a pass takes as long as its tokens; bundles of rows are not planned for less."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Common prefixes of rows."""

    group_of_row: Sequence[int]  # rows of one number begin with the same tokens
    tokens_of_row: Sequence[int]  # how many tokens a row shares with its group


@dataclass(frozen=True)
class Bundle:
    """Rows that go into the same microbatch, and the tokens that they take there."""

    rows: list[int]
    tokens: int


def bundles(
    rows: Sequence[int],
    lengths: Sequence[int],
    prefixes: SharedPrefixes,
    *,
    max_tokens: int,
    pad_multiple: int,
    at_least: int = 1,
) -> list[Bundle]:
    """Cuts rows into bundles, as few as the cap allows.

    Args:
        lengths: Tokens of every row there is.
        max_tokens: Most tokens of a bundle.
        pad_multiple: Prefixes and what follows them count as rounded up to a multiple of this.
        at_least: Bundles that are wanted; there are fewer only where every row has its own.

    Returns bundles in the order of their groups' first rows.
    """

    def bundle(members: list[int]) -> Bundle:
        return Bundle(members, _tokens(members, lengths, prefixes, pad_multiple))

    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(prefixes.group_of_row[row], []).append(row)
    found: list[Bundle] = []
    for members in groups.values():
        open_bundle = bundle(members[:1])
        for row in members[1:]:
            grown = bundle([*open_bundle.rows, row])
            if grown.tokens > max_tokens:
                found.append(open_bundle)
                grown = bundle([row])
            open_bundle = grown
        found.append(open_bundle)
    while len(found) < at_least and (at := _largest(found)) is not None:
        half = len(found[at].rows) // 2
        found[at : at + 1] = [bundle(found[at].rows[:half]), bundle(found[at].rows[half:])]
    return found


def _tokens(members: Sequence[int], lengths: Sequence[int], prefixes: SharedPrefixes, multiple: int) -> int:
    # A prefix's last token stays with each row: what follows it differs.
    prefix = min(prefixes.tokens_of_row[row] for row in members) - 1 if len(members) > 1 else 0
    prefix = prefix if prefix >= WORTHWHILE else 0
    parts = [prefix, *(lengths[row] - prefix for row in members)]
    return sum(math.ceil(part / multiple) * multiple for part in parts)


def _largest(found: Sequence[Bundle]) -> int | None:
    several = [index for index, one in enumerate(found) if len(one.rows) > 1]
    return max(several, key=lambda index: found[index].tokens, default=None)


class DynamicBatchingArgs(TypedDict):
    """How to form microbatches of a bounded number of padded tokens."""

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """How to pack sequences into microbatches of a bounded number of tokens."""

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]
    prefixes: NotRequired[SharedPrefixes | None]


@dataclass(frozen=True)
class ShardPlan:
    """The rows of one rank, in its order.

    Attributes:
        micro_batch_indices: per global batch, `[start, end)` of each microbatch, counted from that global batch's first
            row.
        micro_batch_lengths: per global batch and microbatch: its padded sequence length (dynamic batching) or its
            padded tokens in all (packing).
    """

    rows: list[int] = field(default_factory=list)  # indices into the unsharded batch
    elem_counts_per_gb: list[int] | None = None  # rows of each global batch (None when microbatches are not planned)
    micro_batch_indices: list[list[tuple[int, int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None


def plan_even(size: int, shards: int, batch_size: int | None = None) -> list[ShardPlan]:
    """Cut rows into chunks of `batch_size`, each chunk into `shards` equal parts, and give rank i part i of every
    chunk.

    Args:
        batch_size: rows of a chunk (one global batch); all rows when None.

    Raises ValueError: the chunks do not divide the rows, or the shards a chunk.
    """
    chunk = _chunk_size(size, shards, batch_size)
    part = chunk // shards
    return [
        ShardPlan([row for start in range(rank * part, size, chunk) for row in range(start, start + part)])
        for rank in range(shards)
    ]


def plan_uneven(size: int, shards: int) -> list[ShardPlan]:
    """Contiguous parts of `ceil(size / shards)` rows; the last ones may be short or empty."""
    if shards < 1:
        raise ValueError(f"shards={shards} must be at least 1")
    part = math.ceil(size / shards)
    return [ShardPlan(list(range(min(rank * part, size), min((rank + 1) * part, size)))) for rank in range(shards)]


def plan_dynamic(
    lengths: Sequence[int],
    shards: int,
    batch_size: int | None,
    *,
    max_tokens: int,
    length_round: int,
    max_length: int | None = None,
) -> list[ShardPlan]:
    """Microbatches of similar lengths: sort each global batch by length, deal it round-robin over the ranks, and close
    a microbatch when one more row would lift rows x padded length above `max_tokens`. All ranks share one microbatch
    plan, of the longest row in each slot.

    Args:
        batch_size: rows of one global batch; all rows when None.
        max_tokens: most padded tokens of one microbatch.
        length_round: microbatch lengths are rounded up to a multiple of this.
        max_length: width of the padded rows; rounded lengths stop there.

    Raises ValueError: sizes do not divide; BinPackingError: a row alone is above `max_tokens`.
    """
    chunk = _chunk_size(len(lengths), shards, batch_size)
    if length_round < 1:
        raise ValueError(f"sequence_length_round={length_round} must be at least 1")
    longest = max(lengths)
    if longest > max_tokens:
        raise BinPackingError(
            f"a sequence of {longest} tokens is above the {max_tokens} tokens a microbatch may hold; raise "
            "the token cap of dynamic_batching"
        )
    plans = [ShardPlan([], [], [], []) for _ in range(shards)]
    limit = max_tokens if max_length is None else min(max_tokens, max_length)
    for start in range(0, len(lengths), chunk):
        by_length = sorted(range(start, start + chunk), key=lambda row: lengths[row])
        slots = [max(lengths[row] for row in by_length[k : k + shards]) for k in range(0, chunk, shards)]
        padded = [min(math.ceil(length / length_round) * length_round, limit) for length in slots]
        spans, span_lengths = _dynamic_microbatches(padded, max_tokens)
        for rank, plan in enumerate(plans):
            _extend(plan, by_length[rank::shards], spans, span_lengths)
    return plans


def plan_packed(
    lengths: Sequence[int],
    shards: int,
    batch_size: int | None,
    *,
    max_tokens: int,
    algorithm: str,
    pad_multiple: int,
    order: str = "packer",
    prefixes: SharedPrefixes | None = None,
) -> list[ShardPlan]:
    """Pack each global batch into bins, as many as a multiple of `shards`, and give bin j to rank `j mod shards`.

    Args:
        batch_size: rows of one global batch; all rows when None.
        max_tokens: most tokens of one bin, after padding each row.
        algorithm: a `nemo_rl.distributed.batch_sharding.PackingAlgorithm`.
        pad_multiple: each row counts as its length rounded up to a multiple of this.
        order: `packer` keeps the packer's order of bins, `largest_first` sorts each rank's bins by tokens.
        prefixes: common prefixes of rows, counted once in a bin; their rows then lie side by side.

    Raises ValueError: a row is above `max_tokens`, there are fewer rows than ranks, or an argument is unknown.
    """
    if order not in ("packer", "largest_first"):
        raise ValueError(f"microbatch_order={order!r} must be packer or largest_first")
    if pad_multiple < 1:
        raise ValueError(f"sequence_length_pad_multiple={pad_multiple} must be at least 1")
    size = len(lengths)
    chunk = size if batch_size is None else batch_size
    if shards < 1 or chunk < 1 or size % chunk:
        raise ValueError(f"cannot cut {size} rows into global batches of {chunk} for {shards} ranks")
    packer = get_packer(algorithm, max_tokens, min_bin_count=shards, bin_count_multiple=shards)
    plans = [ShardPlan([], [], [], []) for _ in range(shards)]
    for start in range(0, size, chunk):
        rows = range(start, start + chunk)
        padded = [math.ceil(lengths[row] / pad_multiple) * pad_multiple for row in rows]
        try:
            if prefixes is None:
                bins = _pack(packer, [Bundle([row], tokens) for row, tokens in zip(rows, padded, strict=True)])
            else:
                packer.check(padded)
                cut = partial(bundles, rows, lengths, prefixes, max_tokens=max_tokens, pad_multiple=pad_multiple)
                bins = _pack_bundles(packer, cut, shards)
        except BinPackingError as error:
            raise BinPackingError(f"global batch of rows {start} to {start + chunk - 1}: {error}") from error
        for rank, plan in enumerate(plans):
            own = bins[rank::shards]
            if order == "largest_first":
                own = sorted(own, key=lambda one: -one.tokens)
            ends = [0]
            for one in own:
                ends.append(ends[-1] + len(one.rows))
            _extend(
                plan,
                [row for one in own for row in one.rows],
                list(itertools.pairwise(ends)),
                [one.tokens for one in own],
            )
    return plans


def plan_shards(
    lengths: Sequence[int],
    shards: int,
    batch_size: int | None,
    packing: SequencePackingArgs | None,
    dynamic: DynamicBatchingArgs | None,
    *,
    width: int | None = None,
) -> list[ShardPlan]:
    """`plan_packed` or `plan_dynamic` with these arguments, or `plan_even`. `width`: of the padded rows. Raises
    ValueError: see there, or both arguments are given.
    """
    if packing is not None and dynamic is not None:
        raise ValueError("sequence_packing_args and dynamic_batching_args exclude each other")
    if packing is not None:
        return plan_packed(
            lengths,
            shards,
            batch_size,
            max_tokens=packing["max_tokens_per_microbatch"],
            algorithm=packing["algorithm"],
            pad_multiple=packing["sequence_length_pad_multiple"],
            order=packing.get("microbatch_order", "packer"),
            prefixes=packing.get("prefixes"),
        )
    if dynamic is not None:
        return plan_dynamic(
            lengths,
            shards,
            batch_size,
            max_tokens=dynamic["max_tokens_per_microbatch"],
            length_round=dynamic["sequence_length_round"],
            max_length=width,
        )
    return plan_even(len(lengths), shards, batch_size)


def _pack(packer: SequencePacker, items: Sequence[Bundle]) -> list[Bundle]:
    """The bins as bundles of all their rows."""
    return [
        Bundle([row for i in chosen for row in items[i].rows], sum(items[i].tokens for i in chosen))
        for chosen in packer.pack([item.tokens for item in items])
    ]


def _pack_bundles(packer: SequencePacker, cut: Callable[..., list[Bundle]], shards: int) -> list[Bundle]:
    """Bins of whole bundles, which are split until there are as many bins as the ranks need."""
    wanted = shards
    while True:
        items = cut(at_least=wanted)
        try:
            return _pack(packer, items)
        except BinPackingError:
            if len(items) < wanted:
                raise
            wanted = len(items) + 1


def permutation(plans: Sequence[ShardPlan]) -> list[int]:
    """Original row at each position of the shards joined in rank order; `BatchedDataDict.reorder_data` undoes it."""
    return [row for plan in plans for row in plan.rows]


def _chunk_size(size: int, shards: int, batch_size: int | None) -> int:
    chunk = size if batch_size is None else batch_size
    if shards < 1 or chunk < 1 or size < 1:
        raise ValueError(f"cannot shard {size} rows in chunks of {chunk} over {shards} shards: all must be at least 1")
    if size % chunk:
        raise ValueError(f"{size} rows are not a multiple of batch_size={chunk}")
    if chunk % shards:
        raise ValueError(
            f"batch_size={chunk} is not a multiple of shards={shards}; choose a global batch size that the "
            "data-parallel size divides"
        )
    return chunk


def _dynamic_microbatches(padded: Sequence[int], max_tokens: int) -> tuple[list[tuple[int, int]], list[int]]:
    spans: list[tuple[int, int]] = []
    span_lengths: list[int] = []
    first, longest = 0, 0
    for slot, length in enumerate(padded):
        grown = max(longest, length)
        if slot > first and (slot + 1 - first) * grown > max_tokens:
            spans.append((first, slot))
            span_lengths.append(longest)
            first, grown = slot, length
        longest = grown
    return [*spans, (first, len(padded))], [*span_lengths, longest]


def _extend(plan: ShardPlan, rows: list[int], spans: list[tuple[int, int]], lengths: list[int]) -> None:
    if plan.elem_counts_per_gb is None or plan.micro_batch_indices is None or plan.micro_batch_lengths is None:
        raise ValueError("this plan has no microbatches")
    plan.rows.extend(rows)
    plan.elem_counts_per_gb.append(len(rows))
    plan.micro_batch_indices.append(list(spans))
    plan.micro_batch_lengths.append(list(lengths))
