"""A reference to rows of the data plane: ids, lengths and tags, never tensors. Transforms return new metas.

Invariant: lengths and tags, where known, are in the order of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class KVBatchMeta:
    """Rows of a partition. `extra_info`: values of the batch as a whole; never values derived from its rows.
    Raises ValueError: lengths or tags do not match the ids.
    """

    partition_id: str  # a data flow, such as `train`
    task_name: str | None  # whose rows these are, such as `train`; None where unknown
    sample_ids: list[str]  # row ids, minted once when the rows were rolled out
    fields: list[str] | None = None  # columns that are known to be written; None where unknown
    sequence_lengths: list[int] | None = None  # tokens of each row, unpadded
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, object]] | None = None  # primitive values per row, readable without fetching a tensor

    def __post_init__(self) -> None:
        for name, what, values in (("tags", "tags", self.tags), ("sequence_lengths", "lengths", self.sequence_lengths)):
            if values is not None and len(values) != self.size:
                raise ValueError(f"{name} must align 1:1 with sample_ids: {len(values)} {what} for {self.size} ids")

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def set_tags(self, values: dict[str, Sequence[object]]) -> None:
        """Sets tags in place, one value per row and name. Raises ValueError: a sequence does not have one value per
        row.
        """
        for name, column in values.items():
            if len(column) != self.size:
                raise ValueError(
                    f"tag {name!r} must align 1:1 with sample_ids: {len(column)} values for {self.size} ids"
                )
        tags = self.tags if self.tags is not None else [{} for _ in self.sample_ids]
        for name, column in values.items():
            for tag, value in zip(tags, column, strict=True):
                tag[name] = value
        self.tags = tags

    def common_tags(self) -> dict[str, list[Any]]:
        """The tags that every row has, with a value for each row."""
        tags = self.tags or [{}]
        return {name: [tag[name] for tag in tags] for name in tags[0] if all(name in tag for tag in tags)}

    def tag(self, name: str) -> list[Any]:
        """A tag's value for each row. Raises KeyError: a row does not have it."""
        tags = self.tags if self.tags is not None else [{} for _ in self.sample_ids]
        lacking = [identity for identity, tag in zip(self.sample_ids, tags, strict=True) if name not in tag]
        if lacking:
            raise KeyError(
                f"partition {self.partition_id!r}: {len(lacking)} of {self.size} rows have no tag {name!r}, "
                f"{lacking[:3]} among them"
            )
        return [tag[name] for tag in tags]

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """The rows at `indices`, in that order."""
        return replace(
            self,
            sample_ids=[self.sample_ids[i] for i in indices],
            fields=_copied(self.fields),
            sequence_lengths=None if self.sequence_lengths is None else [self.sequence_lengths[i] for i in indices],
            extra_info=dict(self.extra_info),
            tags=None if self.tags is None else [dict(self.tags[i]) for i in indices],
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Rows `[start, stop)`."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def drop(self, indices: Sequence[int]) -> KVBatchMeta | None:
        """All rows but those at `indices`; None when nothing is left."""
        gone = {index % self.size for index in indices} if self.size else set()
        kept = [index for index in range(self.size) if index not in gone]
        return self.subset(kept) if kept else None

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """These rows, then the others'. Lengths and tags remain only where all have them; fields and extra_info are
        this meta's. Raises ValueError: the partitions differ.
        """
        metas = (self, *others)
        if any(meta.partition_id != self.partition_id for meta in others):
            raise ValueError(f"partition_ids must match to join metas, got {[meta.partition_id for meta in metas]}")
        lengths = [meta.sequence_lengths for meta in metas]
        tags = [meta.tags for meta in metas]
        return replace(
            self,
            sample_ids=[identity for meta in metas for identity in meta.sample_ids],
            fields=_copied(self.fields),
            sequence_lengths=None
            if any(part is None for part in lengths)
            else [n for part in lengths for n in part or []],
            extra_info=dict(self.extra_info),
            tags=None if any(part is None for part in tags) else [dict(tag) for part in tags for tag in part or []],
        )

    def with_fields(self, names: Sequence[str]) -> KVBatchMeta:
        """The same rows, with `names` among the known columns."""
        return self.only_fields([*(self.fields or []), *names])

    def only_fields(self, names: Sequence[str]) -> KVBatchMeta:
        """The same rows, with exactly `names` as columns."""
        narrowed = self.subset(range(self.size))
        narrowed.fields = list(dict.fromkeys(names))
        return narrowed


def _copied(values: list[str] | None) -> list[str] | None:
    return None if values is None else list(values)
