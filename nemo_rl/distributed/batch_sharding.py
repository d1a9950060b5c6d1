"""Plans which rows of a global batch go to which data-parallel rank, and each rank's microbatches.

Works on row counts and lengths alone, so the driver can plan for rows it does not hold. Invariant: every row goes to
exactly one rank, and every rank has the same number of microbatches per global batch; one more on one rank would hang
the gradient collectives.

Rows with a common prefix are bundled by group numbers and token counts, so that a microbatch computes it once. Which
tokens are shared is decided later from the tokens themselves (`models/policy/packed.py`), so a wrong number
here costs memory or time only.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NotRequired, TypedDict

from nemo_rl.distributed.bin_packing import BinPackingError, SequencePacker, get_packer

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
        algorithm: a `nemo_rl.distributed.bin_packing.PackingAlgorithm`.
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
