"""A user's mistake ends the command with one clear message, before Ray starts where the configuration alone says so."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms import launch, startup
from nemo_rl.algorithms.resume import RunState
from nemo_rl.config import CheckpointingConfig, ConfigError
from nemo_rl.data_plane.adapters import mooncake
from nemo_rl.data_plane.interfaces import MooncakeUnavailableError
from nemo_rl.distributed import ray_runtime
from nemo_rl.distributed.ray_runtime import RayStartError
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience.environment_batcher import EnvironmentBatcher, EnvironmentHandle
from nemo_rl.utils.checkpoint import CheckpointError
from nemo_rl.utils.timer import TimeoutChecker
from tests.end_to_end.parity import Hangs, Raises, Short

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command without Ray; exit code and what it wrote to stderr."""

    def no_ray(**_: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray_runtime, "init_ray", no_ray)

    def call(*overrides: str) -> tuple[int, str]:
        places = [
            f"policy.model_name={tiny_model}",
            f"logger.log_dir={tmp_path}/logs",
            f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
        ]
        code = launch.grpo(["--config", str(CONFIG), *places, *overrides], default_config=CONFIG)
        return code, capfd.readouterr().err

    return call


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("grpo.num_prompt_per_step=4", ["grpo.num_prompt_per_step", "num_prompts_per_step"]),
        ("policy.generaton.max_new_tokens=4", ["policy.generaton"]),
        ("grpo.max_num_steps=many", ["grpo.max_num_steps", "'many'", "integer"]),
        ("policy.precision=float31", ["policy.precision", "'float31'", "'float32'"]),
        ("policy.dtensor_cfg.tensor_parallel_size=3", ["policy.dtensor_cfg", "does not divide the 1 accelerators"]),
        ("cluster.gpus_per_node=3", ["cluster.gpus_per_node is 3", "cluster.cpu_slots offers 2"]),
        ("policy.train_global_batch_size=500", ["policy.train_global_batch_size is 500", "512 samples of a step"]),
        (
            "policy.dtensor_cfg.expert_parallel_size=2",
            ["policy.dtensor_cfg.expert_parallel_size is 2", "does not divide the 1 ranks", "possible: 1"],
        ),
        (
            "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel=true",
            ["use_liger_kernel is true", "GPUs only", "cluster.device is cpu"],
        ),
        ("policy.generation.temperature=0", ["policy.generation.temperature is 0", "nothing to learn from"]),
        ("policy.generation.backend=sglang", ["policy.generation.backend", "generation backends other than vllm"]),
    ],
)
def test_a_mistake_in_the_configuration_is_named_with_its_key(run: Any, override: str, says: list[str]) -> None:
    code, message = run(override)
    assert code == launch.EXIT_USAGE
    assert all(part in message for part in says), message
    assert "Traceback" not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy.model_name=/nowhere/model", "policy.tokenizer.name={tiny}"], ["policy.model_name='/nowhere/model'"]),
        (["policy.tokenizer.name=/nowhere/tokenizer"], ["policy.tokenizer.name", "/nowhere/tokenizer"]),
        (["policy.optimizer.name=torch.optim.AdamV"], ["policy.optimizer", "has no 'AdamV'"]),
        (["policy.optimizer.kwargs.rate=1"], ["policy.optimizer", "unexpected keyword argument 'rate'"]),
        (["policy.optimizer.kwargs.lr=fast"], ["policy.optimizer.kwargs.lr: 'fast' is no number"]),
        (["policy.model_name={tmp}/sft/latest"], ["policy.model_name='{tmp}/sft/latest': there is no such directory"]),
        (
            ["data.max_input_seq_length=2"],
            ["(arithmetic): 512 of 512 prompts looked at", "nothing would be"],
        ),
        (["cluster.device=auto", "cluster.gpus_per_node=8"], ["gpus_per_node=8, but there is no GPU here"]),
        (
            ["cluster.device=auto", "policy.hf_config_overrides.vocab_size=2000000"],
            ["billion parameters", "no GPU"],
        ),
        (["policy.scheduler={name: torch.optim.lr_scheduler.StepLR, kwargs: {}}"], ["policy.scheduler.0", "step_size"]),
        (
            [
                "policy.dtensor_cfg.tensor_parallel_size=4",
                "cluster.gpus_per_node=4",
                "cluster.cpu_slots=4",
                *["policy.logprob_batch_size=64"],
            ],
            ["num_key_value_heads=2"],
        ),
        (
            ["policy.generation.vllm_cfg.tensor_parallel_size=8", "cluster.gpus_per_node=8", "cluster.cpu_slots=8"],
            ["vllm_cfg.tensor_parallel_size=8", "heads=4"],
        ),
        (
            ["policy.dtensor_cfg.expert_parallel_size=2", "cluster.gpus_per_node=2"],
            ["expert_parallel_size=2, but the model (qwen3) has no experts"],
        ),
        (["data.train.data_path={tmp}/absent.jsonl", "data.train.dataset_name=ResponseDataset"], ["absent.jsonl"]),
        (["data.train.data_path={tmp}/empty.jsonl", "data.train.dataset_name=ResponseDataset"], ["empty"]),
        (
            [
                "data.train.data_path={tmp}/rows.jsonl",
                "data.train.dataset_name=ResponseDataset",
                "data.train.input_key=question",
            ],
            ["question", "prompt"],
        ),
        (
            [
                "data.train.data_path={tmp}/rows.jsonl",
                "data.train.dataset_name=ResponseDataset",
                "data.train.input_key=prompt",
                "data.train.output_key=answer",
            ],
            ["64"],
        ),
        (["env.mine.class=nowhere.Mine", "data.train.env_name=mine"], ["env.mine.class", "nowhere"]),
        (["checkpointing.checkpoint_dir=/dev/null/here"], ["checkpointing.checkpoint_dir=/dev/null/here"]),
        (["logger.log_dir=/dev/null/logs"], ["logger.log_dir", "/dev/null/logs"]),
    ],
)
def test_what_is_not_there_is_found_before_ray_starts(
    run: Any, tmp_path: Path, tiny_model: Path, overrides: list[str], says: list[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3))
    )
    code, message = run(
        *(override.format(tmp=tmp_path, tiny=tiny_model) if "{t" in override else override for override in overrides)
    )
    assert code in (launch.EXIT_FAILED, launch.EXIT_USAGE)
    assert all(part.replace("{tmp}", str(tmp_path)) in message for part in says), message
    # The start shows the data before it finds some mistakes.
    error = message[max(0, message.find("Error: ")) :]
    assert len([line for line in error.splitlines() if line.strip() and "examples" not in line]) <= 4, message
    assert "Traceback" not in message


def test_mooncake_without_its_libraries_is_told_before_ray_begins_to_start(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MooncakeUnavailableError("planted: libibverbs.so.1 is missing")

    monkeypatch.setattr(mooncake, "load_mooncake", missing)
    monkeypatch.setattr(startup, "RayStart", lambda start, leave: pytest.fail("Ray begins to start"))
    code, message = run("data_plane.enabled=true", "data_plane.backend=mooncake_cpu")
    assert code == launch.EXIT_FAILED and "libibverbs.so.1 is missing" in message


@pytest.mark.slow
def test_a_tracker_that_is_not_installed_is_found_before_ray_starts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, message = run("logger.wandb_enabled=true")
    assert code == launch.EXIT_FAILED
    assert "logger.wandb_enabled=true needs the package 'wandb'" in message and "Traceback" not in message


def test_a_ray_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(RayStartError, match=r"RAY_ADDRESS=127\.0\.0\.1:9 does not answer"):
        ray_runtime._joined(False, {})
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "failure", [WorkerError("lm_policy.train: lm_policy (rank 1) died"), EnvironmentFailure("environment math hangs")]
)
def test_a_failure_of_the_run_is_one_message_and_everything_is_ended(
    failure: Exception, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[Any] = []

    def drive(_: Any) -> None:
        raise failure

    code = launch.run_to_end(_Config(tmp_path), lambda *_: _Run(lambda: ended.append("run")), drive)
    message = capfd.readouterr().err
    assert code == launch.EXIT_FAILED
    assert message.splitlines()[-1] == f"{type(failure).__name__}: {failure}"
    assert len(ended) == 1 and "Traceback" not in message


def test_a_mistake_is_told_before_what_was_begun_beside_the_check_is_ended_and_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def setup(_: Any, start: Any) -> Any:
        with ExitStack() as begun:
            begun.callback(lambda: told.append(capfd.readouterr().err))
            with start.phase("checks"):
                raise ConfigError(["grpo.seed: planted"])

    assert launch.run_to_end(_Config(tmp_path), setup, lambda _: None) == launch.EXIT_FAILED
    assert "grpo.seed: planted" in told[0] and "grpo.seed" not in capfd.readouterr().err


def test_a_checkpoint_that_cannot_be_finished_fails_a_run_that_was_interrupted_or_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def close() -> None:
        raise CheckpointError("disk full")

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    assert launch.run_to_end(_Config(tmp_path), lambda *_: _Run(close), lambda _: None) == launch.EXIT_FAILED
    assert launch.run_to_end(_Config(tmp_path), lambda *_: _Run(close), interrupted) == launch.EXIT_INTERRUPTED
    assert capfd.readouterr().err.count("CheckpointError: disk full") == 2


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Raises({}), r"environment parity raised on 2 conversations: LookupError\('planted'\)"),
        (Hangs({}), "environment parity did not answer for 2 conversations within 0.3 s"),
        (Short({}), r"environment parity returned rewards of shape \[1\] for 2 conversations; expected \[2\]"),
    ],
)
def test_an_environment_that_fails_fails_every_sample_of_the_call_by_its_name(environment: Any, says: str) -> None:
    import asyncio

    async def both() -> list[Any]:
        batcher = EnvironmentBatcher(EnvironmentHandle("parity", (environment,), 0.3))
        log: Any = [{"role": "assistant", "content": "a"}]
        return await asyncio.gather(batcher.step(log, None), batcher.step(log, None), return_exceptions=True)

    for outcome in asyncio.run(both()):
        with pytest.raises(EnvironmentFailure, match=says):
            raise outcome


class _Progress:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _NoTrackers:
    backends: tuple[Any, ...] = ()


class _Checkpoints:
    def get_latest_checkpoint_path(self) -> None: ...


class _Run:
    def __init__(self, close: Any = lambda: None) -> None:
        self.close = close

    progress: Any = _Progress()
    logger: Any = _NoTrackers()
    timeout: Any = TimeoutChecker()
    state: Any = RunState()
    checkpointer: Any = _Checkpoints()


class _Config:
    """As much of a configuration as the end of a run reads."""

    def __init__(self, folder: Path) -> None:
        self.logger = self
        self.log_dir = str(folder)
        self.monitor_gpus = False
        self.checkpointing = CheckpointingConfig(checkpoint_dir=str(folder))
