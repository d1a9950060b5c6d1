"""Rules between keys: combinations of valid values that no mode could honour.

A rule is a function of a configuration, of the kind that its parameter is annotated with, which yields one line per
mistake: dotted keys, their values and a way out. Rules know the schemas only; whether a file, a model or a GPU exists
is found out later. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from nemo_rl.config.errors import NotBuilt, Problem
from nemo_rl.config.master import CompleteConfig, MasterConfig

Rule = Callable[[Any], Iterator[Problem]]
_RULES: list[Rule] = []
_CAUTIONS: list[Rule] = []


def rule(check: Rule) -> Rule:
    """Registers a function as a rule for configurations of its kind; the lines it yields are mistakes."""
    _RULES.append(check)
    return check


def caution(check: Rule) -> Rule:
    """Decorator of a rule about values that are allowed but perhaps not meant."""
    _CAUTIONS.append(check)
    return check


def broken_rules(config: CompleteConfig) -> list[Problem]:
    """One line per rule that the configuration breaks, and per part that a combination asks for and is not built."""
    return _lines(_RULES, config)


def cautions(config: CompleteConfig) -> list[str]:
    """Lines about values that are allowed but perhaps not meant."""
    return list(map(str, _lines(_CAUTIONS, config)))


def _lines(rules: list[Rule], config: CompleteConfig) -> list[Problem]:
    asked = [check for check in rules if isinstance(config, _kind_of(check))]
    return [_spelled(line, config) for check in asked for line in check(config)]


@functools.cache
def _kind_of(check: Rule) -> Any:
    return get_type_hints(check)["config"]


def _spelled(line: Problem, config: CompleteConfig) -> Problem:
    """The line under the name that the training loop's section has in this kind of configuration."""
    if isinstance(line, NotBuilt) or not isinstance(config, MasterConfig):
        return line
    return re.sub(r"\bgrpo\.(?=[a-z])", f"{config.section()}.", line)
