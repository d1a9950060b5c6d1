"""Places jobs that name no GPUs on the GPUs with the least work. Knows neither scheduler nor jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_TRAINS = 2
"""How much more than generation the training of a job counts, which keeps a GPU from all others and cannot move."""


class Mapped(NamedTuple):
    """The GPUs of a job that is there already: those that it trains on, and those that it may generate on."""

    train: Sequence[int]
    infer: Sequence[int]
    column: int | None = 0
    """Which slot of each GPU it is on; None for all of them."""


def place(gpus: Sequence[int], width: int, others: Iterable[Mapped], without: Collection[int] = ()) -> tuple[int, ...]:
    """`width` neighbours among these GPUs, none of them in `without`.

    Blocks lie side by side from the first GPU on, so that one whose width divides a node lies in a node. The least goes
    on where the fewest of `others` train; generation, which can move, counts half as much. Of equals the first.

    Args:
        width: At least 1.
        others: Jobs that have not ended.

    Raises ValueError: there are fewer GPUs than that, or no block of so many is left.
    """
    if not 1 <= width <= len(gpus):
        raise ValueError(f"{width} of {len(gpus)} GPUs")
    load: Counter[int] = Counter()
    for mapping in others:
        load.update(dict.fromkeys(mapping.train, _TRAINS))
        load.update(mapping.infer)
    blocks = [tuple(gpus[start : start + width]) for start in range(0, len(gpus) - width + 1, width)]
    if without and not (blocks := [block for block in blocks if not any(gpu in without for gpu in block)]):
        raise ValueError(f"no {width} neighbours among the {len(gpus)} GPUs are there")
    return min(blocks, key=lambda block: sum(load[gpu] for gpu in block))


def column_for(gpus: Sequence[int], slots_per_gpu: int, others: Iterable[Mapped]) -> int:
    """The slot of each of these GPUs on which the fewest of `others` are; of equals the first."""
    load = [0] * slots_per_gpu
    for other in others:
        shared = len(set(gpus).intersection(other.infer))
        for column in range(slots_per_gpu) if other.column is None else (other.column,):
            load[column] += shared
    return load.index(min(load))
