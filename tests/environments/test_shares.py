"""Environments of several runs: who shares an actor, and when it ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_rl.config import EnvConfig
from nemo_rl.environments import environment_registry, shares
from nemo_rl.environments.call import environment_metrics, step_environment
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.environments.shares import SharedEnvironments


class _Actors:
    """Stands in for Ray's actors: what was started, and what is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self.alive: set[object] = set()
        monkeypatch.setattr(environment_registry, "create_env", self._start)
        monkeypatch.setattr(environment_registry.ray, "kill", self.alive.discard)

    def _start(self, name: str, config: EnvConfig, **_: object) -> Any:
        self.started += 1
        actor = (name, self.started)
        self.alive.add(actor)
        return actor


def _env(**sections: dict[str, object]) -> EnvConfig:
    return EnvConfig.read(sections)


def test_runs_with_equal_settings_share_what_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, shared = _Actors(monkeypatch), SharedEnvironments()
    first = shared.lend("a", ["math", "math"], _env(math={"num_workers": 2}))
    assert shared.lend("b", ["math"], _env(math={"num_workers": 2})) == first
    other = shared.lend("c", ["math"], _env(math={"num_workers": 3}))
    assert other["math"] != first["math"]
    # Code of responses leaves files behind, and what a user's class keeps is unknown.
    code = [shared.lend(run, ["code"], _env(code={}))["code"] for run in "de"]
    assert code[0] != code[1] and actors.started == 4
    shared.give_back("a")
    shared.give_back("a")
    assert set(first["math"]) <= actors.alive
    for run in "bcde":
        shared.give_back(run)
    assert not actors.alive
    # More runs than one environment serves, and a run that comes after all have left.
    crowd = [shared.lend(f"r{number}", ["math"], _env(math={}))["math"] for number in range(shares._MOST_RUNS + 1)]
    assert len(set(crowd)) == 2 and not set(crowd) & {first["math"], other["math"]}


def test_what_cannot_start_takes_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, shared = _Actors(monkeypatch), SharedEnvironments()
    shared.lend("a", ["math"], _env(math={}))
    with pytest.raises(environment_registry.UnknownEnvironment):
        shared.lend("b", ["math", "mth"], _env(math={}))
    shared.give_back("a")
    assert not actors.alive


def test_a_call_waits_for_those_of_other_runs_before_its_deadline_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, shared = _Actors(monkeypatch), SharedEnvironments()
    (actor,) = shared.lend("a", ["math"], _env(math={}))["math"]
    running, running_at_once, over = [], [], threading.Event()

    def get(reference: object, timeout: float) -> Any:
        running.append(reference)
        running_at_once.append(len(running))
        assert over.wait(30)
        running.remove(reference)
        return {}, {"accuracy": 1.0}

    def remote(*_: object) -> object:
        return object()

    monkeypatch.setattr(ray, "get", get)

    class Handle(SimpleNamespace):
        def __hash__(self) -> int:
            return hash(actor)

        def __eq__(self, other: object) -> bool:
            return bool(actor == other)

    handle = Handle(global_post_process_and_metrics=SimpleNamespace(remote=remote), step=SimpleNamespace(remote=remote))

    def judge() -> None:
        with pytest.raises(EnvironmentFailure, match="not an EnvironmentReturn"):
            step_environment(handle, [], [], timeout_s=60.0, name="math")

    threads = [threading.Thread(target=judge) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    over.set()
    for thread in threads:
        thread.join()
    assert environment_metrics(handle, {}, timeout_s=60.0, name="math") == {"accuracy": 1.0}
    assert running_at_once == [1, 1, 1, 1] and actors.started == 1
