"""The data-plane client: rows by id in partitions, to which columns are added.

A stage is done when its column is written. Invariants: a read returns the last write bit for bit; a cleared row is
never read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nemo_rl.config.errors import UserError
from nemo_rl.data_plane.meta import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

Buffer = NDArray[np.uint8]  # the bytes of one row of a block


class DataPlaneClient(ABC):
    """One process's access to the data plane. Can be pickled: the copy connects by itself when it is first used."""

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: object | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        """Writes columns and tags of rows; rows and columns that exist are written over.

        Args:
            sample_ids: Rows, in the order of the columns.
            fields: A TensorDict or mapping of tensors [N, ...], jagged tensors, and arrays or lists of N objects.
            tags: Primitive values by name, one mapping per row; merged into those that are there.

        Returns a meta whose fields are those of this call. Raises ValueError: columns or tags do not match the ids;
        TypeError: a value cannot travel; DataPlaneCapacityError: the storage stayed full until the deadline.
        """

    @abstractmethod
    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        """Columns of rows, in the order of the ids; token columns are jagged where lengths differ. Raises
        MissingRowsError: a row was never written or is cleared; MissingColumnsError: a column is not written for all of
        the rows.
        """

    @abstractmethod
    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Drops rows; None drops all of the partition, and warns when there are none."""

    @abstractmethod
    def close(self) -> None:
        """Ends this client, and the data plane when this client started it. Safe to call twice."""

    @abstractmethod
    def put_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        columns: Mapping[str, object],
        lengths: Sequence[int],
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        """`put_samples` of a padded batch: token columns travel without their padding. `columns`: tensors [N, S, ...]
        and [N], and lists of N objects. `tags`: see `put_samples`.
        """

    @abstractmethod
    def get_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        width: int = 0,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """`get_samples` as a padded batch. `width`: width of token columns; 0 for the longest row. `pad_value_dict`:
        padding by column; 0 where absent.
        """

    @abstractmethod
    def list_samples(self, partition_id: str) -> dict[str, dict[str, object]]:
        """Tags of every row of a partition, by id."""


@dataclass(frozen=True)
class Located:
    """Rows as an adapter found them."""

    partition_id: str
    sample_ids: tuple[str, ...]
    blocks: tuple[str, ...]  # names of the blocks that all of them have
    tags: tuple[Mapping[str, object], ...]
    native: Any = None


class Storage(Protocol):
    """Storage adapter: blocks of bytes by row and name, and tags. Everything else is written once above it."""

    def locate(self, partition_id: str, sample_ids: Sequence[str], *, create: bool) -> Located:
        """Finds rows; makes those that do not exist when `create`. Raises MissingRowsError: a row does not exist."""
        ...

    def put(
        self, rows: Located, blocks: Mapping[str, Sequence[Buffer]], tags: Sequence[Mapping[str, object]] | None
    ) -> None:
        """Writes blocks, one buffer of uint8 per row each, and replaces tags."""
        ...

    def get(self, rows: Located, blocks: Sequence[str]) -> dict[str, list[Buffer]]:
        """The buffers of blocks, one per row each."""
        ...

    def clear(self, partition_id: str, sample_ids: Sequence[str]) -> None:
        """Drops rows; those that do not exist are left out."""
        ...

    def tags(self, partition_id: str) -> dict[str, dict[str, object]]:
        """Tags of every row."""
        ...

    def close(self) -> None:
        """Lets go of the connection. Safe to call twice."""
        ...


class DataPlaneError(UserError, RuntimeError):
    """The data plane failed; the message names what and where."""


class DataPlaneTimeout(DataPlaneError):
    """No answer within the deadline."""


class DataPlaneCapacityError(DataPlaneError):
    """The storage stayed full until the deadline; its contents are unchanged."""


class DataPlaneClosedError(DataPlaneError):
    """The client was closed."""


class _NotStored(KeyError):
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingRowsError(_NotStored):
    """Rows were never written or are cleared already."""


class MissingColumnsError(_NotStored):
    """Columns were not written for all of the rows."""


class MooncakeUnavailableError(DataPlaneError):
    """Mooncake cannot be loaded on this machine; the message names the missing part and how to install it."""
