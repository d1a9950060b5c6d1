"""What every configuration section is: a pydantic model that refuses keys it does not know.

Also carries the two annotations by which a schema speaks about a key beyond its type: `NotYet` (known, but not built: any value that
switches it on is refused by its dotted name) and `DefaultFrom` (the default is another key's value). This file knows no key, no file and
no other section. Invariant: a default lives in the schema and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class NotYet:
    """Marks a key that is known but not built yet; removing the annotation is what makes it honoured.

    Args:
        why: what is missing, as the end of the sentence "not built yet: ...".
        values: the refused values. Empty: every value but the default; for a section, switching it on (`enabled`), or any difference from its defaults.
    """

    why: str
    values: tuple[object, ...] = ()


@dataclass(frozen=True)
class DefaultFrom:
    """Marks a key whose default is an interpolation over other keys, e.g. `${policy.max_total_sequence_length}`.

    The literal default beside it is what the interpolation gives when every key has its default; it serves sections built on their own.
    """

    interpolation: str


class Section(BaseModel):
    """One mapping of the configuration: attributes are the YAML keys, unknown keys are refused, assignments are checked.

    Items are readable as `section["key"]` too, as code written for NeMo-RL reads them.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, coerce_numbers_to_str=True, protected_namespaces=(), populate_by_name=True)

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, self._attribute(key))

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            raise KeyError(key)
        setattr(self, self._attribute(key), value)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def keys(self) -> list[str]:
        """The YAML keys of this section, in the schema's order."""
        names = [field.alias or name for name, field in type(self).model_fields.items()]
        return names + list(self.model_extra or {})

    def items(self) -> Iterator[tuple[str, Any]]:
        """Pairs of YAML key and value, in the schema's order."""
        return ((key, self[key]) for key in self.keys())

    def to_dict(self) -> dict[str, Any]:
        """The section as plain containers under its YAML keys."""
        return self.model_dump(mode="python", by_alias=True)

    @classmethod
    def _attribute(cls, key: str) -> str:
        for name, field in cls.model_fields.items():
            if field.alias == key:
                return name
        return key
