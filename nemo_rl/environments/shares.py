"""Environments that several runs of one process share.

An environment that keeps nothing of what it judges (`EnvironmentInterface.shareable`) serves all runs whose settings of
it are equal; any other is started for its run alone. Invariants: an actor ends when the last run gives it back; a run's
call begins when those of other runs are over, so that its deadline covers its own call alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ray.actor import ActorHandle

from nemo_rl.config import EnvConfig
from nemo_rl.environments.call import end_turns, take_turns
from nemo_rl.environments.environment_registry import (
    Actors,
    calls_at_once,
    end_environments,
    is_shareable,
    section_of,
    start_environments,
)

_MOST_RUNS = 8
"""Runs that one environment serves; further ones get another, so that judging grows with the runs."""


@dataclass
class _Environment:
    name: str
    settings: object  # None for one that is a run's alone
    replicas: tuple[ActorHandle[object], ...]
    runs: set[str] = field(default_factory=set)


class SharedEnvironments:
    """The environments of all runs of this process. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[_Environment] = []

    def lend(self, run: str, names: Iterable[str], env_configs: EnvConfig) -> Actors:
        """The replicas of each name for a run. For errors see `registry.start_environments`.

        Args:
            run: The run's name, with which it gives them back.
            env_configs: `env` of that run.
        """
        with self._lock:
            try:
                return self._lend(run, names, env_configs)
            except BaseException:
                self._give_back(run)
                raise

    def _lend(self, run: str, names: Iterable[str], env_configs: EnvConfig) -> Actors:
        lent: dict[str, tuple[ActorHandle[object], ...]] = {}
        missing: dict[str, object] = {}
        for name in dict.fromkeys(names):
            section = section_of(name, env_configs)
            settings = repr(section) if is_shareable(name, section) else None
            found = self._find(name, settings)
            if found is None:
                missing[name] = settings
            else:
                found.runs.add(run)
                lent[name] = found.replicas
        started = start_environments(missing, env_configs)
        for name, replicas in started.items():
            self._started.append(_Environment(name, missing[name], replicas, {run}))
            if missing[name] is not None:
                for replica in replicas:
                    take_turns(replica, calls_at_once(name, section_of(name, env_configs)))
        return {**lent, **started}

    def _find(self, name: str, settings: object) -> _Environment | None:
        for environment in self._started if settings is not None else ():
            if (environment.name, environment.settings) == (name, settings) and len(environment.runs) < _MOST_RUNS:
                return environment
        return None

    def give_back(self, run: str) -> None:
        """Ends a run's use; environments that no other run uses end. Safe to call twice."""
        with self._lock:
            self._give_back(run)

    def _give_back(self, run: str) -> None:
        for environment in [environment for environment in self._started if run in environment.runs]:
            environment.runs.discard(run)
            if not environment.runs:
                self._started.remove(environment)
                for replica in environment.replicas:
                    end_turns(replica)
                end_environments({environment.name: environment.replicas})
