"""A grid of ranks with named axes, such as (pipeline, data, context, tensor) parallel.

Invariant: the grid is rectangular and every rank appears exactly once.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class NamedSharding:
    """An integer rank grid with one name per axis.

    Args:
        layout: nested lists (or an array) of integer ranks, rectangular, without duplicates.
        names: one distinct name per axis of `layout`.

    Raises:
        ValueError: the layout is ragged, not integer, or repeats a rank; or the names do not match its axes.

    >>> grid = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
    >>> grid.get_worker_coords(2)
    {'data_parallel': 1, 'tensor_parallel': 0}
    >>> grid.get_ranks(data_parallel=1, tensor_parallel=1)
    3
    """

    def __init__(self, layout: Sequence[object] | NDArray[np.int64], names: Sequence[str]) -> None:
        self._layout = _as_rank_grid(layout)
        self._names = list(names)
        if self._layout.ndim != len(self._names):
            raise ValueError(
                f"layout has {self._layout.ndim} axes but {len(self._names)} names were given: {self._names}"
            )
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"axis names must be distinct, got {self._names}")
        self._coords = {int(rank): tuple(int(c) for c in at) for at, rank in np.ndenumerate(self._layout)}
        if len(self._coords) != self._layout.size:
            ranks, counts = np.unique(self._layout, return_counts=True)
            raise ValueError(f"every rank may appear once, these appear more often: {ranks[counts > 1].tolist()}")

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name, in axis order."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """Axis names in order."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    @property
    def layout(self) -> NDArray[np.int64]:
        """A copy of the rank grid."""
        return self._layout.copy()

    def get_axis_index(self, name: str) -> int:
        """Position of the axis called `name`. Raises ValueError: there is no such axis."""
        if name not in self._names:
            raise ValueError(f"no axis {name!r} in this sharding; its axes are {self._names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Number of positions along the axis called `name`."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis. Raises ValueError: the rank is not in the grid."""
        if rank not in self._coords:
            raise ValueError(f"rank {rank} is not in this sharding of {self.size} ranks {self.shape}")
        return dict(zip(self._names, self._coords[rank], strict=True))

    def get_ranks(self, **coords: int) -> "NamedSharding | int":
        """The ranks at the given coordinates. Returns the rank itself when every axis is given, else the sub-sharding
        over the axes not given. Raises ValueError: an axis is unknown, or a coordinate outside its range.
        """
        for name, position in coords.items():
            if not 0 <= position < self.get_axis_size(name):
                raise ValueError(f"{name}={position} is outside its {self.get_axis_size(name)} positions")
        selected = self._layout[tuple(coords.get(name, slice(None)) for name in self._names)]
        free = [name for name in self._names if name not in coords]
        return NamedSharding(selected, free) if free else int(selected)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Sorted ranks at the given coordinates; empty when a coordinate is outside its range. Raises ValueError: an
        axis is unknown.
        """
        if any(not 0 <= position < self.get_axis_size(name) for name, position in coords.items()):
            return []
        found = self.get_ranks(**coords)
        return [found] if isinstance(found, int) else sorted(found.layout.flatten().tolist())

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: str | Sequence[str]) -> bool:
        """Whether `coords` (from `get_worker_coords`) is at position 0 of every one of `axes`."""
        return all(coords[axis] == 0 for axis in ([axes] if isinstance(axes, str) else axes))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NamedSharding)
            and self._names == other._names
            and np.array_equal(self._layout, other._layout)
        )

    def __hash__(self) -> int:
        return hash((tuple(self._names), self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding(shape={self.shape}, layout={self._layout.tolist()})"


def _as_rank_grid(layout: Sequence[object] | NDArray[np.int64]) -> NDArray[np.int64]:
    try:
        grid = np.asarray(layout)
    except ValueError as error:
        raise ValueError(f"layout is ragged: every list of one level must have the same length ({error})") from error
    if grid.size == 0:
        raise ValueError("layout holds no ranks")
    if not np.issubdtype(grid.dtype, np.integer):
        raise ValueError(f"ranks must be integers, layout has dtype {grid.dtype}")
    return grid.astype(np.int64)
