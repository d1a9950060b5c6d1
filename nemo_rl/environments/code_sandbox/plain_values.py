"""Values that cross between the processes of response and tests, as JSON: reading them runs no code.

Mutable containers go into a table, by identity, so that what a call changes in its arguments comes back. An object of a
class derived from a plain type crosses as that plain type. Everything else raises `NotPlain`.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import importlib
import pathlib
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

_SCALARS = (bool, int, float, str)
# JSON readers limit the digits of an integer.
_LARGEST_JSON_INT = 2**63
_STANDARD: dict[str, tuple[type, Callable[[str], object], Callable[[Any], str]]] = {
    "Decimal": (decimal.Decimal, decimal.Decimal, str),
    "Fraction": (fractions.Fraction, fractions.Fraction, str),
    "UUID": (uuid.UUID, uuid.UUID, str),
    "PosixPath": (pathlib.PosixPath, pathlib.PosixPath, str),
    "date": (datetime.date, datetime.date.fromisoformat, datetime.date.isoformat),
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat, datetime.datetime.isoformat),
    "time": (datetime.time, datetime.time.fromisoformat, datetime.time.isoformat),
}
_MUTABLE: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        list,
        set,
        bytearray,
        dict,
        collections.deque,
        collections.OrderedDict,
        collections.Counter,
        collections.defaultdict,
    )
}
_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict, object, type(None))
}
# Numbers, texts and times: whose bytes are their whole value.
_ARRAY_KINDS = "biufcmMUS"
# How the plain part of an object of a derived type is read without a method of that type.
_BASES: dict[type, Callable[[Any], object]] = {
    int: int.__index__,
    float: float.__float__,
    str: lambda value: str.__str__(value)[:],
    bytes: lambda value: bytes(bytes.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}


class NotPlain(TypeError):
    """A value that does not cross."""


class Encoder:
    """Encodes the values of one message.

    Args:
        number_of: the other side's number of an object that belongs to it; None for any other.
        originals: containers that the other side sent, in the order of its table.
    """

    def __init__(
        self, number_of: Callable[[object], int | None] = lambda _: None, originals: Sequence[object] = ()
    ) -> None:
        self.originals = list(originals)
        self.table: list[object] = []
        self._number_of = number_of
        self._known = {id(value): index for index, value in enumerate(originals)}
        self.table = [None] * len(self.originals)
        for index, value in enumerate(originals):
            self.table[index] = self._contents(value)

    def encode(self, value: Any) -> object:
        """The value as JSON. Raises NotPlain."""
        kind = type(value)
        if kind is int and not -_LARGEST_JSON_INT < value < _LARGEST_JSON_INT:
            return ["int", hex(value)]
        if value is None or kind in _SCALARS:
            return value
        if _MUTABLE.get(kind.__name__) is kind or _is_array(value):
            if id(value) not in self._known:
                self._known[id(value)] = len(self.originals)
                self.originals.append(value)
                self.table.append(None)
                self.table[self._known[id(value)]] = self._contents(value)
            return ["mutable", self._known[id(value)]]
        if (number := self._number_of(value)) is not None:
            return ["yours", number]
        return self._immutable(value)

    def _immutable(self, value: Any) -> object:
        kind = type(value)
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        if kind in (range, slice):
            return [kind.__name__, [self.encode(part) for part in (value.start, value.stop, value.step)]]
        if kind is datetime.timedelta:
            return ["timedelta", [value.days, value.seconds, value.microseconds]]
        if kind.__name__ in _STANDARD and _STANDARD[kind.__name__][0] is kind:
            return ["standard", [kind.__name__, _STANDARD[kind.__name__][2](value)]]
        if kind is type and _TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and kind.__module__ == "numpy":
            return ["scalar", self._contents(numpy.asarray(value))]
        for base, read in _BASES.items():
            if issubclass(kind, base):
                return self.encode(read(value))
        raise NotPlain(f"{_article(kind.__name__)} is no plain value")

    def _contents(self, value: Any) -> list[object]:
        kind = type(value)
        if kind is bytearray:
            return ["bytearray", value.hex()]
        if kind.__name__ == "ndarray":
            if value.dtype.kind not in _ARRAY_KINDS:
                raise NotPlain(f"an array of {value.dtype} is no plain value")
            return ["ndarray", [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]]
        if issubclass(kind, dict):
            return [kind.__name__, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        return [kind.__name__, [self.encode(item) for item in value]]


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None)


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def filled(table: Sequence[Any], originals: Sequence[Any]) -> list[Any]:
    """The containers of a message: the originals with their new contents, then new ones. Raises TypeError, ValueError
    or LookupError: the table is not one.
    """
    kept = list(originals)
    for kind, contents in table[len(kept) :]:
        kept.append(_array(contents) if kind == "ndarray" else _MUTABLE[kind]())
    for index, (value, (kind, contents)) in enumerate(zip(kept, table, strict=True)):
        if type(value).__name__ != kind:
            raise TypeError(f"{kind!s:.80} came for {_article(type(value).__name__)}")
        if kind == "ndarray":
            if index < len(originals) and value.flags.writeable:
                value[...] = _array(contents)
        elif kind == "bytearray":
            value[:] = bytes.fromhex(contents)
        else:
            value.clear()
            if issubclass(_MUTABLE[kind], dict):
                for key, item in contents:
                    dict.__setitem__(value, decoded(key, kept), decoded(item, kept))
            else:
                add = value.add if kind == "set" else value.append
                for item in contents:
                    add(decoded(item, kept))
    return kept


def decoded(sent: Any, containers: Sequence[object], mine: Callable[[int], object] | None = None) -> Any:
    """A value from JSON. `mine`: this side's object of a number, where the other side may name one. Raises TypeError,
    ValueError or LookupError: it is no value.
    """
    if not isinstance(sent, list):
        if sent is None or type(sent) in _SCALARS:
            return sent
        raise TypeError(f"no value is sent as {sent!s:.80}")
    kind, content = sent
    match kind:
        case "mutable":
            return containers[content]
        case "yours" if mine is not None:
            return mine(content)
        case "int":
            return int(content, 16)
        case "tuple":
            return tuple([decoded(item, containers, mine) for item in content])
        case "frozenset":
            return frozenset(decoded(item, containers, mine) for item in content)
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
        case "range" | "slice":
            return {"range": range, "slice": slice}[kind](*[decoded(part, containers, mine) for part in content])
        case "timedelta":
            return datetime.timedelta(*content)
        case "standard":
            return _STANDARD[content[0]][1](content[1])
        case "type":
            return _TYPES[content]
        case "scalar":
            return _array(content[1])[()]
    raise TypeError(f"no value is sent as {kind!s:.80}")


def _array(contents: Any) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = numpy.dtype(contents[0])
    if dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"no array of {dtype} is sent")
    return numpy.frombuffer(base64.b64decode(contents[2]), dtype=dtype).reshape(contents[1]).copy()
