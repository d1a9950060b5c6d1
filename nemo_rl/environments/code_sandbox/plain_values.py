"""Values that cross between processes as they are, as JSON: nothing that runs code when it is read."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import importlib
import pathlib
import sys
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

SCALARS = (bool, int, float, str)
_STANDARD = {
    "Decimal": (decimal.Decimal, str),
    "Fraction": (fractions.Fraction, str),
    "UUID": (uuid.UUID, str),
    "PosixPath": (pathlib.PosixPath, str),
    "date": (datetime.date.fromisoformat, datetime.date.isoformat),
    "datetime": (datetime.datetime.fromisoformat, datetime.datetime.isoformat),
    "time": (datetime.time.fromisoformat, datetime.time.isoformat),
}
_STANDARD_TYPES = {
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    pathlib.PosixPath,
    datetime.date,
    datetime.datetime,
    datetime.time,
}
MUTABLE = {
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


def _copied(base: Any, value: Any) -> object:
    return dict(dict.items(value)) if base is dict else base(base.__iter__(value))


# How the plain part of an object of a derived type is read without a method of that type.
BASES: dict[type, Callable[[Any], object]] = {
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    bytes: partial(_copied, bytes),
    tuple: partial(_copied, tuple),
    list: partial(_copied, list),
    set: partial(_copied, set),
    frozenset: partial(_copied, frozenset),
    dict: partial(_copied, dict),
}
PLAIN_CLASSES = (*SCALARS, bytes, tuple, list, set, frozenset, dict, bytearray, complex, range, object, type(None))


def encode_immutable(value: Any, encode: Callable[[object], object]) -> object:
    """A value that cannot change as [kind, content]; None for one that is not plain."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return [kind.__name__, [encode(item) for item in value]]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind in (range, slice):
        return [kind.__name__, [value.start, value.stop, value.step]]
    if kind is datetime.timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind in _STANDARD_TYPES:
        return ["standard", [kind.__name__, _STANDARD[kind.__name__][1](value)]]
    if kind.__module__ == "numpy" and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.generic):
            return encode(value.item())
        if kind is numpy.ndarray and value.dtype.kind in "biufc":
            return ["array", [value.dtype.str, list(value.shape), value.tobytes().hex()]]
    return None


def decode_immutable(kind: str, content: Any, decode: Callable[[object], object]) -> object:
    """The value that `encode_immutable` was given. Raises TypeError: there is no such kind."""
    match kind:
        case "tuple" | "frozenset":
            items = [decode(item) for item in content]
            return tuple(items) if kind == "tuple" else frozenset(items)
        case "bytes":
            return bytes.fromhex(content)
        case "complex":
            return complex(*content)
        case "range":
            return range(*content)
        case "slice":
            return slice(*content)
        case "timedelta":
            return datetime.timedelta(*content)
        case "standard":
            return _STANDARD[content[0]][0](content[1])
        case "array":
            numpy = importlib.import_module("numpy")
            dtype = numpy.dtype(content[0])
            if dtype.kind not in "biufc":
                refuse(kind)
            return numpy.frombuffer(bytes.fromhex(content[2]), dtype=dtype).reshape(content[1]).copy()
    return refuse(kind)


def refuse(sent: object) -> NoReturn:
    """Refuses what the other side sent."""
    raise TypeError(f"no value is sent as {sent!s:.80}")
