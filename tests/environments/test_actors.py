"""Environments as Ray actors: one class and one line of YAML, and failures that name the environment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import assembly
from nemo_rl.algorithms.placement import OwnPlacement
from nemo_rl.compat.loops import setup_response_data
from nemo_rl.config import ConfigError, EnvConfig, MasterConfig, load_master_config
from nemo_rl.distributed.accelerator_slots import CPU, Accelerator
from nemo_rl.environments import environment_registry
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.code_environment import CodeEnvironment
from nemo_rl.environments.environment_registry import (
    await_environments,
    create_env,
    end_environments,
    start_environments,
)
from nemo_rl.environments.interfaces import EnvironmentFailure, UnknownEnvironment

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

THEIRS = """
import os, signal, time, torch

def plays(task, base_url, session):
    return 1.0

def reward(response, expected, factor=1):
    return factor * (response == expected)

class Env:
    def __init__(self, cfg):
        self.bonus = cfg["bonus"]
        if cfg.get("build") == "hang":
            time.sleep(60)
        if cfg.get("build") == "raise":
            raise RuntimeError("no such judge\\nat all")

    def step(self, message_log_batch, metadata):
        what = message_log_batch[0][-1]["content"]
        if what == "raise":
            raise KeyError("nothing here")
        if what == "hang":
            time.sleep(60)
        if what == "die":
            os._exit(3)
        if " once " in what and not os.path.exists(what.split()[-1]):
            open(what.split()[-1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL) if "die" in what else os._exit(0)
        size = len(metadata) - (what == "short")
        observations = [{"role": "environment", "content": ""}] * size
        return observations, metadata, None, torch.full((size,), self.bonus), torch.ones(size), None
"""


@pytest.fixture(scope="module", autouse=True)
def their_environment(ray_session: None, user_modules: Path) -> None:
    (user_modules / "their_env.py").write_text(THEIRS)


def started(tokenizer: Any = None) -> Any:
    config = MasterConfig(
        env={"mine": {"class": "their_env.Env", "bonus": 2.5}},
        data={
            "train": {
                "dataset_name": "arithmetic",
                "num_problems": 9,
                "held_out": 2,
                "env_name": "mine",
                "prompt_file": None,
                "split_validation_size": 2,
            }
        },
    )
    train, validation, task_to_env, val_task_to_env = setup_response_data(tokenizer, config.data, config.env)
    assert len(train) == 7 and validation is not None and task_to_env == val_task_to_env
    return task_to_env["arithmetic"]


def said(what: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": what}]] * 2


def test_a_users_environment_becomes_an_actor_and_its_failures_name_it() -> None:
    actor = started()
    result = step_environment(actor, said("fine"), [{}, {}], timeout_s=60, name="mine")
    assert not isinstance(result.rewards, dict) and result.rewards.tolist() == [2.5, 2.5]
    for what, message in (
        ("raise", "environment mine raised on 2 conversations: KeyError"),
        ("short", r"1 observations for 2"),
    ):
        with pytest.raises(EnvironmentFailure, match=message):
            step_environment(actor, said(what), [{}, {}], timeout_s=60, name="mine")
    with pytest.raises(EnvironmentFailure, match="environment mine did not answer for 2 conversations within 1 s"):
        step_environment(actor, said("hang"), [{}, {}], timeout_s=1, name="mine")
    dying = started()
    with pytest.raises(EnvironmentFailure, match="environment mine died while judging 2 conversations"):
        step_environment(dying, said("die"), [{}, {}], timeout_s=60, name="mine")
    for handle in (actor, dying):
        ray.kill(handle)


@pytest.mark.parametrize("when", ["killed at work", "killed idle", "leaves by itself"])
def test_an_environment_that_dies_is_started_again_and_judges_what_it_held(when: str, tmp_path: Path) -> None:
    actor = started()
    what = {"killed at work": f"die once {tmp_path}/k", "leaves by itself": f"exit once {tmp_path}/e"}.get(when, "fine")
    step_environment(actor, said("fine"), [{}, {}], timeout_s=60, name="mine")
    if when == "killed idle":
        ray.kill(actor, no_restart=False)
    result = step_environment(actor, said(what), [{}, {}], timeout_s=60, name="mine")
    assert not isinstance(result.rewards, dict) and result.rewards.tolist() == [2.5, 2.5]
    ray.kill(actor)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"environment mine cannot be built from the keys of env.mine \(none\): KeyError: 'bonus'"),
        ({"bonus": 1, "build": "raise"}, r"\(bonus, build\).*at all\n"),
        ({"bonus": 1, "build": "hang", "step_timeout_s": 3}, r"not built within 3 s \(env.mine.step_timeout_s\)"),
    ],
)
def test_an_environment_that_cannot_be_built_is_named_with_its_keys(settings: dict[str, Any], message: str) -> None:
    env = EnvConfig.read({"mine": {"class": "their_env.Env", **settings}})
    actors = start_environments(["mine"], env)
    with pytest.raises(EnvironmentFailure, match=message):
        await_environments(actors, env)
    end_environments(actors)


def test_a_function_rewards_in_an_actor_and_is_built_before_it_is_asked() -> None:
    env = EnvConfig.read({"mine": {"function": "their_env.reward", "factor": 3}})
    actors = start_environments(["mine"], env)
    await_environments(actors, env)
    result = step_environment(
        actors["mine"][0], said("four"), [{"ground_truth": "four"}, {"ground_truth": "5"}], timeout_s=60, name="mine"
    )
    assert not isinstance(result.rewards, dict) and result.rewards.tolist() == [3.0, 0.0]
    end_environments(actors)


class Nowhere(OwnPlacement):
    """Slots that nothing is started on."""

    def connect(self, config: object) -> Accelerator:
        return CPU


@pytest.fixture
def starting(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MasterConfig:
    """The configuration of a run whose actors are not started."""
    clusters = SimpleNamespace(training=None, generation=None, distinct=list)
    monkeypatch.setattr(assembly, "_begin", lambda *_: assembly.Begun(CPU, clusters, None, None, {}, []))
    path = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
    folders = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/checkpoints"]
    return load_master_config(path, [f"policy.model_name={tiny_model}", *folders])


def test_environments_are_built_before_engines_start(starting: MasterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(actors: object, env_configs: object) -> None:
        raise EnvironmentFailure("environment math cannot be built")

    monkeypatch.setattr(assembly, "await_environments", failing)
    monkeypatch.setattr(assembly, "start_generation", lambda *_: pytest.fail("engines were started"))
    with pytest.raises(EnvironmentFailure):
        assembly.setup(starting, placement=Nowhere())


def test_a_mistake_in_the_endpoint_ends_the_run_before_the_policy_starts(
    starting: MasterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting.policy.generation.vllm_cfg.expose_http_server = True
    ended: list[bool] = []
    generation = SimpleNamespace(generate_one=None, shutdown=lambda: ended.append(True))

    def failing(*_: object, **__: object) -> None:
        raise ConfigError(["tool_parser: there is no hermez"])

    monkeypatch.setattr(assembly, "start_generation", lambda *_: generation)
    monkeypatch.setattr(assembly, "start_endpoint", failing)
    monkeypatch.setattr(assembly, "start_policy", lambda *_, **__: pytest.fail("the policy was started"))
    with pytest.raises(ConfigError, match="hermez"):
        assembly.setup(starting, placement=Nowhere())
    assert ended == [True]


def test_agents_play_on_the_machine_whose_endpoint_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def options(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(remote=lambda settings: None)

    monkeypatch.setattr(environment_registry, "ray_actor", lambda found: SimpleNamespace(options=options))
    env = EnvConfig.read({"plays": {"agent": "their_env.plays"}, "mine": {"class": "their_env.Env"}})
    start_environments(["plays", "mine"], env)
    start_environments(["plays"], env, agents_anywhere=True)
    nodes = [getattr(given.get("scheduling_strategy"), "node_id", None) for given in asked]
    assert nodes == [ray.get_runtime_context().get_node_id(), None, None]


def test_mathematics_runs_as_an_actor() -> None:
    config = MasterConfig(
        env={"math": {"num_workers": 1}},
        data={"train": {"dataset_name": "arithmetic", "num_problems": 9, "held_out": 2, "prompt_file": None}},
    )
    _, _, task_to_env, _ = setup_response_data(None, config.data, config.env)
    actor = task_to_env["arithmetic"]
    result = step_environment(
        actor, said("so \\boxed{19.0}"), [{"ground_truth": "19"}, {"ground_truth": "20"}], timeout_s=120, name="math"
    )
    assert not isinstance(result.rewards, dict) and result.rewards.tolist() == [1.0, 0.0]
    ray.get(actor.shutdown.remote())
    ray.kill(actor)


@pytest.mark.ray
@pytest.mark.slow
def test_a_built_in_environment_starts_as_an_actor_by_itself(ray_session: None) -> None:
    import ray

    metadata = [{"ground_truth": "3"}]
    for actor in (
        CodeEnvironment.remote({"num_workers": 1}),
        create_env("code", {"num_workers": 1}),
    ):
        result = step_environment(
            actor, [[{"role": "assistant", "content": "<code>print(3)</code>"}]], metadata, timeout_s=60, name="code"
        )
        assert result.rewards.tolist() == [1.0]
        ray.kill(actor)
    assert isinstance(CodeEnvironment({}), CodeEnvironment)


def test_an_unknown_environment_starts_nothing() -> None:
    config = MasterConfig(
        data={
            "train": {
                "dataset_name": "arithmetic",
                "num_problems": 9,
                "held_out": 2,
                "env_name": "mth",
                "prompt_file": None,
            }
        }
    )
    with pytest.raises(UnknownEnvironment, match="Did you mean 'math'"):
        setup_response_data(None, config.data, config.env)
