"""Environments by name, their actors, and the match of a run's data with its environments.

A user's environment needs only `env.<name>.class` or `env.<name>.function` in YAML; `register_env` names a class from
Python. Invariants: an environment gets the keys of its mapping without those that are read here; every task has an
environment, and tasks share its actors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config import ConfigError, EnvConfig, EnvironmentConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.env import NemoGymEnvConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.foreign import UNBUILT
from nemo_rl.environments.agent_environment import AGENTS_AT_ONCE, AgentEnvironment, check_agent
from nemo_rl.environments.function_environment import FunctionEnvironment, reward_function
from nemo_rl.environments.interfaces import EnvironmentFailure, UnknownEnvironment, expected_of, ray_actor
from nemo_rl.environments.other_interpreter import check_interpreter

if TYPE_CHECKING:
    from nemo_rl.data.processors import AllTaskProcessedDataset

CLASSES: dict[str, str] = {
    "math": "nemo_rl.environments.math_environment.MathEnvironment",
    "math_default": "nemo_rl.environments.math_environment.MathEnvironment",
    "dapo": "nemo_rl.environments.math_environment.MathEnvironment",
    "math_multi_reward": "nemo_rl.environments.math_environment.MathMultiRewardEnvironment",
    "code": "nemo_rl.environments.code_environment.CodeEnvironment",
    "code_tests": "nemo_rl.environments.code_environment.CodeTestsEnvironment",
    "reasoning_gym": "nemo_rl.environments.math_environment.ReasoningGymEnvironment",
    "sliding_puzzle": "nemo_rl.environments.sliding_puzzle_environment.SlidingPuzzleEnvironment",
    "code_jaccard": "nemo_rl.environments.code_environment.CodeJaccardEnvironment",
    "nemo_gym": "nemo_rl.environments.agent_environment.AgentEnvironment",
}
# How often a dead environment is started again, and how often a call is made again for it.
_RESTARTS, _CALLED_AGAIN = 5, 1
_READ_HERE = ("class", "function", "agent", "python", "step_timeout_s", "replicas", "max_batch", "max_concurrency")
# Coroutines mostly wait, for a sandbox or another service.
_COROUTINES = 64
Actors = Mapping[str, tuple[ActorHandle[object], ...]]
"""The replicas of every environment, by its name."""


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Gives an environment class a name, for `data.*.env_name`. Raises UnknownEnvironment: another class has that name
    already.
    """
    known = CLASSES.get(env_name)
    if known is not None and known != actor_class_fqn:
        raise UnknownEnvironment(f"there is an environment {env_name!r} already: {known}")
    CLASSES[env_name] = actor_class_fqn


def environment_class(name: str, config: EnvironmentConfig | None) -> Any:
    """The class behind an environment name. Raises UnknownEnvironment: no class has that name; ConfigError: the class
    cannot be imported or has no `step`, or a function in its stead cannot be called.
    """
    if config is not None and config.function is not None:
        reward_function(config.function, f"env.{name}", config.model_extra or {})
        return FunctionEnvironment
    if isinstance(config, NemoGymEnvConfig):
        check_interpreter(config.python or sys.executable, f"env.{name}", package="nemo_gym")
        return AgentEnvironment
    if config is not None and config.agent is not None and config.python is not None:
        check_interpreter(config.python, f"env.{name}")
        return AgentEnvironment
    if config is not None and config.agent is not None:
        check_agent(config.agent, f"env.{name}", config.model_extra or {})
        return AgentEnvironment
    path = config.env_class if config is not None and config.env_class is not None else CLASSES.get(name)
    if path is None:
        hint = (
            "is not built yet"
            if name in UNBUILT["environments"]
            else f"is no environment.{did_you_mean(name, CLASSES)} A new one needs "
            f"env.{name}.class, .function or .agent"
        )
        raise UnknownEnvironment(f"data.*.env_name: {name!r} {hint}")
    found = import_dotted(path, f"env.{name}.class")
    if not callable(getattr(_plain_class(found), "step", None)):
        raise ConfigError(
            [
                f"env.{name}.class: {path} has no method step; derive it from "
                "nemo_rl.environments.interfaces.EnvironmentInterface"
            ]
        )
    return found


def check_rows(
    datasets: Mapping[str, AllTaskProcessedDataset], env_of_task: Mapping[str, str], env_configs: EnvConfig
) -> None:
    """Whether the rows of each task bring along what their environment, or the function that rewards them, asks for.
    Raises ConfigError: they do not.
    """
    for task, name in env_of_task.items():
        section = section_of(name, env_configs)
        if task not in datasets:
            continue
        known = datasets[task][0]["extra_env_info"]
        if section is not None and section.function is not None:
            function = reward_function(section.function, f"env.{name}", section.model_extra or {}, list(known or ()))
            _check_expected(function, section.function, name, task, known)
        needs = getattr(_plain_class(environment_class(name, section)), "needs", ())
        missing = [one for one in needs if one not in (known or {})]
        if missing:
            raise ConfigError(
                [
                    f"data.*.env_name: {name} judges by {', '.join(missing)}, which rows of {task} do not give: they "
                    f"give {', '.join(known or ()) or 'nothing'}; name the environment that is made for them (the "
                    "data set's own, or env.<name>.class or .function), or a data.*.processor that gives it"
                ]
            )


def _check_expected(
    function: Callable[..., object], path: str, name: str, task: str, known: Mapping[str, object] | None
) -> None:
    """Raises ConfigError: a function wants the expected answer, and the rows have none."""
    expected = inspect.signature(function).parameters.get("expected")
    if expected is not None and expected.default is expected.empty and expected_of(known) is None:
        raise ConfigError(
            [
                f"env.{name}.function: {path} wants expected, and rows of {task} have no expected answer; name data "
                "that have one, or write expected: str | None = None where the function judges without it"
            ]
        )


def environment_settings(config: EnvironmentConfig | None, name: str = "<name>") -> dict[str, object]:
    """Constructor settings of an environment: the keys of its mapping except those read here."""
    if config is not None and config.function is not None:
        return {"function": config.function, "key": f"env.{name}", "arguments": dict(config.model_extra or {})}
    if isinstance(config, NemoGymEnvConfig):
        starts = {"config_paths": config.config_paths, "start_timeout_s": config.start_timeout_s}
        own = {"agent": config.agent, "key": f"env.{name}", "arguments": starts | (config.model_extra or {})}
        return {**own, "python": config.python or sys.executable, "calls": calls_at_once(name, config)}
    if config is not None and config.agent is not None:
        own = {"agent": config.agent, "key": f"env.{name}", "arguments": dict(config.model_extra or {})}
        return {**own, "python": config.python, "calls": calls_at_once(name, config)}
    return {} if config is None else {key: value for key, value in config.to_dict().items() if key not in _READ_HERE}


def create_env(
    env_name: str, env_config: EnvConfig | Mapping[str, object], *, agents_anywhere: bool = False
) -> ActorHandle[object]:
    """Starts an environment as a Ray actor, without an accelerator. One that dies is started again, a few times in all,
    and its calls are made again: what belongs to a conversation is in its metadata, not in the actor.

    Args:
        env_config: `env`, as a section or a plain mapping; a mapping may also be that of the environment alone.
        agents_anywhere: Whether an agent may run on another machine than this process, whose endpoint it asks.

    Returns the actor's handle. Raises UnknownEnvironment, ConfigError: see `environment_class`.
    """
    name, env_configs = env_name, _whole(env_name, env_config)
    found = environment_class(name, section_of(name, env_configs))
    actor: Any = found if isinstance(found, ray.actor.ActorClass) else ray_actor(found)
    # Accelerators stay hidden, and the actor takes no CPU slot: it mostly waits for its own helpers.
    section = section_of(name, env_configs)
    here = section is not None and section.agent is not None and not agents_anywhere
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False) if here else None
    return actor.options(
        scheduling_strategy=node,
        num_cpus=0,
        num_gpus=0,
        max_concurrency=calls_at_once(name, section),
        max_restarts=_RESTARTS,
        max_task_retries=_CALLED_AGAIN,
    ).remote(environment_settings(section, name))


def calls_at_once(name: str, config: EnvironmentConfig | None) -> int:
    """Calls of `step` that one actor of an environment works on at once (`env.<name>.max_concurrency`)."""
    chosen = getattr(config, "max_concurrency", None)
    if chosen is not None:
        return chosen
    if config is not None and config.agent is not None:
        return AGENTS_AT_ONCE
    step = getattr(_plain_class(environment_class(name, config)), "step", None)
    awaits = inspect.iscoroutinefunction(step)
    if config is not None and config.function is not None:
        awaits = inspect.iscoroutinefunction(import_dotted(config.function, f"env.{name}.function"))
    return _COROUTINES if awaits else 1


def _whole(name: str, given: EnvConfig | Mapping[str, object]) -> EnvConfig:
    if isinstance(given, EnvConfig):
        return given
    sections = {**EnvConfig.model_fields, **CLASSES}
    alone = not any(key in sections or isinstance(value, (Mapping, EnvironmentConfig)) for key, value in given.items())
    return EnvConfig.read({name: dict(given)} if alone else given)


def is_shareable(name: str, config: EnvironmentConfig | None) -> bool:
    """Whether one actor may judge for several runs. For errors see `environment_class`."""
    return bool(getattr(_plain_class(environment_class(name, config)), "shareable", False))


def section_of(name: str, env_configs: EnvConfig) -> EnvironmentConfig | None:
    """The mapping of an environment; a built-in one that is not written down has its defaults."""
    section = env_configs.of(name)
    if section is not None or name not in CLASSES:
        return section
    return type(env_configs).model_validate({name: {}}).of(name)


def _plain_class(found: object) -> object:
    return getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)


def start_environments(names: Iterable[str], env_configs: EnvConfig, *, agents_anywhere: bool = False) -> Actors:
    """The replicas of each name; all classes are resolved before the first actor starts. `agents_anywhere`: whether
    other machines reach the run's endpoint, and so may play agents.
    """
    wanted = {name: section_of(name, env_configs) for name in names}
    for name, section in wanted.items():
        environment_class(name, section)
    return {
        name: tuple(
            create_env(name, env_configs, agents_anywhere=agents_anywhere)
            for _ in range(1 if section is None else section.replicas)
        )
        for name, section in wanted.items()
    }


def await_environments(actors: Actors, env_configs: EnvConfig) -> None:
    """Waits until every environment is built. Raises EnvironmentFailure: one cannot be built, or takes longer than a
    call of it may.
    """
    for name, replicas in actors.items():
        section = section_of(name, env_configs)
        timeout_s = section.step_timeout_s if section is not None else None
        try:
            ray.get([actor.__ray_ready__.remote() for actor in replicas], timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise EnvironmentFailure(
                f"environment {name} was not built within {timeout_s:g} s (env.{name}.step_timeout_s)"
            ) from error
        except ray.exceptions.RayError as error:
            given = ", ".join(environment_settings(section, name)) or "none"
            raise EnvironmentFailure(
                f"environment {name} cannot be built from the keys of env.{name} ({given}): {_innermost(error)}\n"
                f"{error}"
            ) from error


def _innermost(error: Exception) -> str:
    """The last line of a remote traceback, with the exception."""
    return next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), type(error).__name__)


def end_environments(actors: Actors) -> None:
    """Ends environments. Safe to call twice."""
    for actor in (actor for replicas in actors.values() for actor in replicas):
        ray.kill(actor)


def start_lines(names: Iterable[str], env_configs: EnvConfig) -> list[str]:
    """Lines that environments print at a run's start."""
    lines = []
    for name in dict.fromkeys(names):
        section = section_of(name, env_configs)
        line = getattr(_plain_class(environment_class(name, section)), "start_line", None)
        said = None if line is None else line(environment_settings(section, name))
        if said is not None:
            lines.append(said)
    return lines
