"""Which workers Nsight Systems watches, and in which steps: NRL_NSYS_WORKER_PATTERNS and NRL_NSYS_PROFILE_STEP_RANGE.

Reads and checks the two variables. Whether there is a GPU and `nsys` is found out where a run starts. Invariant: both
are given, or neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nemo_rl.config.errors import ConfigError

WORKERS, STEPS = "NRL_NSYS_WORKER_PATTERNS", "NRL_NSYS_PROFILE_STEP_RANGE"
# The groups of workers that a run has.
POLICY_WORKERS, ENGINES = "lm_policy", "vllm"
# How many workers a group has is not known before the cluster is.
_MOST_WORKERS = 4096
_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Profile:
    """Workers and steps to profile.

    Attributes:
        patterns: Shell-style patterns of workers' names.
        first: First step that is profiled; a run's first step is 1.
        end: The step before which profiling ends.
    """

    patterns: tuple[str, ...]
    first: int
    end: int

    def wants(self, group: str, rank: int) -> bool:
        """Whether a worker is profiled, by the name of its group or by its own (`vllm-0`)."""
        return any(fnmatchcase(name, pattern) for name in (group, f"{group}-{rank}") for pattern in self.patterns)

    def covers(self, step: int) -> bool:
        """Whether a step is profiled."""
        return self.first <= step < self.end


def asked_profile(environment: Mapping[str, str], groups: Iterable[str]) -> Profile | None:
    """The profile that the variables ask for; None where they are unset or empty. Raises ConfigError: One is given
    without the other, the range is none, or no worker has such a name.

    Args:
        environment: Variables.
        groups: Names of the run's groups of workers.
    """
    given = {name: environment.get(name, "").strip() for name in (WORKERS, STEPS)}
    if not any(given.values()):
        return None
    for name, other, example in ((WORKERS, STEPS, "3:5"), (STEPS, WORKERS, "*policy*,vllm-0")):
        if not given[other]:
            raise ConfigError([f"{name}={given[name]} needs {other} too (such as {example}); set both or neither"])
    found = _RANGE.fullmatch(given[STEPS])
    first, end = (int(number) for number in found.groups()) if found else (0, 0)
    if not 1 <= first < end:
        raise ConfigError(
            [f"{STEPS}={given[STEPS]} is no range of steps; expected START:STOP with 1 <= START < STOP: 3:5 is 3 and 4"]
        )
    profile = Profile(tuple(filter(None, (part.strip() for part in given[WORKERS].split(",")))), first, end)
    names = [*groups]
    if not any(profile.wants(name, rank) for name in names for rank in range(_MOST_WORKERS)):
        known = ", ".join(f"{name} ({name}-0, ...)" for name in names)
        raise ConfigError([f"{WORKERS}={given[WORKERS]} names no worker of this run; its workers are {known}"])
    return profile
