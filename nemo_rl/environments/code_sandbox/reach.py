"""Which operations reach an object of the other process, and what the response reaches of the tests' objects."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_OTHERS = (
    "call iter next len getitem setitem delitem contains enter exit neg pos abs invert int float complex index round "
    "trunc floor ceil bytes reversed format instancecheck subclasscheck bool hash str repr"
)
FORWARDED = {
    *(f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r", "i")),
    *(f"__{name}__" for name in _OTHERS.split()),
    *COMPARED,
}
# Objects of the tests whose public attributes lead to their globals, and so to the verdict.
_CLOSED = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.GeneratorType,
    types.CoroutineType,
    types.FrameType,
    types.CodeType,
    types.TracebackType,
    types.ModuleType,
    type,
)


def refuse_reach(target: object, operation: str, args: Sequence[Any]) -> None:
    """Refuses operations on an object of the tests that lead to their globals or undo their checks. Raises
    AttributeError: the attribute is not for the response; TypeError: nor is the operation.
    """
    if operation in ("getattr", "setattr"):
        name = args[0]
        closed = isinstance(target, _CLOSED) or (name.startswith("_") and name not in ("__name__", "__doc__"))
        # A mock's own checks, and the methods of a class of the tests, are no fields to write.
        fixed = operation == "setattr" and (type(target).__module__ != "__main__" or hasattr(type(target), name))
        if closed or fixed:
            raise AttributeError(f"{name} of an object of the tests is out of reach")
    elif operation not in FORWARDED:
        raise TypeError(f"{operation} of an object of the tests is out of reach")
