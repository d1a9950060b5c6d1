"""The arithmetic that configuration files may use in interpolations: add, mul, div and max.

Knows no key. Invariant: registering twice is harmless, and nothing is registered by importing.
"""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import OmegaConf

Number = int | float


def _add(*values: Number) -> Number:
    return sum(values)


def _mul(*values: Number) -> Number:
    product: Number = 1
    for value in values:
        product *= value
    return product


def _div(left: Number, right: Number) -> Number:
    quotient = left / right
    whole = isinstance(left, int) and isinstance(right, int) and left % right == 0
    return left // right if whole else quotient


def _max(*values: Number) -> Number:
    return max(values)


_RESOLVERS: dict[str, Callable[..., Number]] = {"add": _add, "mul": _mul, "div": _div, "max": _max}


def register_omegaconf_resolvers() -> None:
    """Makes `${add:a,b}`, `${mul:a,b}`, `${div:a,b}` and `${max:a,b}` known to OmegaConf; a quotient that is whole is an int."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
