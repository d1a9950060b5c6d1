"""Jobs of many adapters on a pool: what a wrapper of a base and its adapters becomes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.multi_lora.assembly import AdapterRecords
from nemo_rl.algorithms.multi_lora.job import AdapterPhase, AdapterState
from nemo_rl.config import ConfigError
from nemo_rl.config.multi_lora import load_base
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.time_sharing.log.pool_state import AdapterProgress
from nemo_rl.time_sharing.opening import LIVE_LIMITS
from nemo_rl.time_sharing.pipelines.adapters import AdaptersConfig
from nemo_rl.time_sharing.pipelines.command import CommandFailed, CommandPipeline
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job, Kind, read_jobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import KILLED_S
from nemo_rl.utils.files import ADAPTERS_ADDRESS, adapter_states

_CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
_SCENARIOS = _CONFIGS.parent / "time_sharing" / "pipelines"
_BASE = {
    "defaults": str(_CONFIGS / "grpo_arithmetic_cpu.yaml"),
    "multi_lora": {"slots": 2},
    "policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 8}}},
}


def _submitted(folder: Path, adapters: object, **files: dict[str, Any]) -> AdaptersConfig:
    for name, content in ({"base": _BASE} | files).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    wrapper = {"nemo_config_path": "base.yaml", "pipeline_cls": "RollMultiLoraPipeline"}
    wrapper |= {} if adapters is None else {"adapters": adapters}
    (folder / "job.yaml").write_text(yaml.safe_dump(wrapper | {"nemo_config_overrides": ["grpo.max_num_steps=3"]}))
    (job,) = read_jobs([folder / "job.yaml"], Pool(1, 2))
    assert job.kind is Kind.EXTERNAL and isinstance(job.config, AdaptersConfig)
    return job.config


def test_adapters_become_a_command_on_the_gpus_of_their_base(tmp_path: Path) -> None:
    command = _submitted(tmp_path, ["one.yaml"], one={"grpo": {"seed": 1}})
    words = command.arguments("mine", "/pool")
    assert words[:3] == [sys.executable, "-m", "nemo_rl.algorithms.multi_lora"]
    pool = ["--job", "mine", "--records", "/pool"]
    assert words[3:9] == ["--config", str(tmp_path / "base.yaml"), *pool]
    assert words[9:] == ["--adapters", str(tmp_path / "one.yaml"), "grpo.max_num_steps=3"]
    # Its Ray cluster is its own: the pool's has lent the GPUs away.
    assert command.gpus == 1 and command.env == {"RAY_ADDRESS": "local"}


@pytest.mark.parametrize(
    ("adapters", "own", "said"),
    [
        (None, {}, "adapters: list the adapters' files"),
        (["one.yaml", "one.yaml"], {}, "names an adapter so already"),
        (["one.yaml"], {"cluster": {"gpus_per_node": 2}}, "cluster: belongs to the base"),
        (["one.yaml"], {"checkpointing": {"enabled": False}}, "goes on from its checkpoint"),
    ],
)
def test_what_could_not_run_is_refused_when_it_is_submitted(
    tmp_path: Path, adapters: object, own: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _submitted(tmp_path, adapters, one=own)


def test_a_wrapper_says_how_long_its_adapters_may_take_to_finish_their_steps(tmp_path: Path) -> None:
    for name in ("base", "one"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(_BASE if name == "base" else {"grpo": {"seed": 1}}))
    wrapper = {"nemo_config_path": "base.yaml", "adapters": ["one.yaml"]}

    def read(**keys: Any) -> Job:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(wrapper | keys))
        return read_jobs([tmp_path / "job.yaml"], Pool(1, 2))[0]

    assert [read().options["drain_s"], read(stop_s=300).options["drain_s"]] == [900 + KILLED_S, 300 + KILLED_S]
    for wrong in (0, 1801, "long", True):
        with pytest.raises(ConfigError, match="stop_s: .* must be seconds above 0, at most 1800"):
            read(stop_s=wrong)
    with pytest.raises(ConfigError, match="stop_s: is for a wrapper with adapters; a command has external.stop_s"):
        read(stop_s=300, adapters=None)


def test_scenarios_c_and_d_can_be_submitted() -> None:
    names = [["scenario_c"], ["scenario_d_0", "scenario_d_1"]]
    for files in names:
        jobs = read_jobs([_SCENARIOS / f"{name}.yaml" for name in files], Pool(1, 4))
        assert [job.name for job in jobs] == files
        adapters = jobs[-1].config
        assert isinstance(adapters, AdaptersConfig) and adapters.gpus == 2
        assert [Path(file).name for file in adapters.files] == ["adapter_0.yaml", "adapter_1.yaml"]


def test_jobs_with_adapters_of_equal_names_have_directories_of_their_own() -> None:
    file = _SCENARIOS / "scenario_c.yaml"
    jobs = read_jobs([file, file, _SCENARIOS / "scenario_d_0.yaml"], Pool(1, 4))
    assert [job.name for job in jobs] == ["scenario_c", "scenario_c_2", "scenario_d_0"]
    folders: list[tuple[str, str]] = []
    for job in jobs[:2]:
        assert isinstance(job.config, AdaptersConfig)
        base, _ = load_base(job.config.base, job.config.overrides)
        folders.append((base.logger.log_dir, base.checkpointing.checkpoint_dir))
        assert folders[-1] == (job.config.log_dir, job.config.checkpoint_dir)
        assert all(Path(folder).name == job.name for folder in folders[-1])
    assert len({*folders}) == 2


def test_adapters_that_come_and_go_are_those_of_the_next_start(tmp_path: Path) -> None:
    job = _submitted(tmp_path, ["one.yaml", "two.yaml"], one={"grpo": {"seed": 1}}, two={"grpo": {"seed": 2}})
    late = tmp_path / "late.yaml"
    late.write_text("grpo: {seed: 3}")
    with pytest.raises(ConfigError, match=r"these are 3 \(one, two, late\), and multi_lora.slots is 2; remove one"):
        job.checked([*job.files, late])
    # Adapters that have ended hold no slot.
    going = job.those_on([{"name": "one", "phase": "done"}, {"name": "two", "phase": "running"}])
    assert [Path(file).stem for file in going.checked([*going.files, late]).files] == ["two", "late"]
    left = job.without_adapter("one")
    assert left.arguments("mine", "/pool")[-2:] == [str(tmp_path / "two.yaml"), "grpo.max_num_steps=3"]
    with pytest.raises(ConfigError, match="there is no adapter one here; there are two"):
        left.without_adapter("one")
    with pytest.raises(ConfigError, match="two is the job's only adapter; drain the job instead"):
        left.without_adapter("two")


def test_adapters_that_come_and_go_while_a_command_yields_are_those_of_the_next_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = _BASE | {"policy": {"model_name": str(tiny_model), "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 8}}}}
    config = _submitted(tmp_path, ["one.yaml"], one={"grpo": {"seed": 1}}, base=base)
    late, odd = tmp_path / "late.yaml", tmp_path / "odd.yaml"
    odd.write_text("policy: {dtensor_cfg: {lora_cfg: {target_modules: [q_prj]}}}")
    late.write_text("grpo: {seed: 3}")
    (tmp_path / config.log_dir).mkdir(parents=True)
    (tmp_path / config.log_dir / ADAPTERS_ADDRESS).write_text("an address at which nothing may be asked any more")
    job = Job("adapters", config, (), (0,), folder=str(tmp_path))
    pipeline = CommandPipeline(job, PoolHandles(None, Pool(1, 1), "cpu", LIVE_LIMITS, str(tmp_path)), 0)
    monkeypatch.setattr(pipeline, "_process", SimpleNamespace(poll=lambda: None))
    pipeline._stopping.set()
    with pytest.raises(UnsupportedModelError, match="odd.yaml: .*q_prj matches no linear layer"):
        pipeline.adapters("add", [str(odd)])
    assert pipeline.adapters("add", [str(late)]) == ["late: joins as soon as the job has GPUs"]
    assert pipeline.adapters("remove", ["one"]) == ["one: removed"]
    assert pipeline.adapters("list", []) == [{"name": "late", "phase": "yielding", "file": str(late)}]
    pipeline._stopping.clear()
    (tmp_path / config.log_dir / ADAPTERS_ADDRESS).unlink()
    with pytest.raises(CommandFailed, match="is starting; add two again"):
        pipeline.adapters("add", ["two.yaml"])


_STARTING = """
import pathlib, signal, sys, time
address, said = map(pathlib.Path, sys.argv[1:3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(said.write_text("asked to leave") and 0))
print("ready", flush=True)
time.sleep(0.3)
if sys.argv[3] == "starts":
    address.write_text("")
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "stop_s", "left"), [("starts", 60.0, True), ("hangs", 0.5, False)])
def test_adapters_that_lose_their_gpus_while_they_start_are_asked_to_leave_once_they_stand(
    how: str, stop_s: float, left: bool, tmp_path: Path
) -> None:
    config = _submitted(tmp_path, ["one.yaml"], one={})
    config = config.model_copy(update={"log_dir": str(tmp_path), "stop_s": stop_s})
    address, said = tmp_path / ADAPTERS_ADDRESS, tmp_path / "said"
    command = [sys.executable, "-c", _STARTING, str(address), str(said), how]
    handles = PoolHandles(None, Pool(1, 1), "cpu", LIVE_LIMITS, str(tmp_path))
    pipeline = CommandPipeline(Job("adapters", config, (), (0,), folder=str(tmp_path)), handles, 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        pipeline._process = process
        told: list[str] = []
        client: Any = SimpleNamespace(
            withdraw=lambda: told.append(pipeline.progress().phase),
            yielded=lambda rank: told.append(f"{rank} yielded, {'running' if process.poll() is None else 'ended'}"),
        )
        pipeline._client = client
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        pipeline._make_room(0)
        assert told == [f"yielding, for {stop_s:g} s at most", "0 yielded, ended"] and said.exists() is left
        cut_off = "" if left else " (killed at its last yield: raise stop_s above 0.5)"
        assert pipeline.progress().phase == f"waiting for GPUs{cut_off}"


def test_a_job_shows_how_far_each_of_its_adapters_is_and_ends_with_their_steps(tmp_path: Path) -> None:
    config = _submitted(tmp_path, ["one.yaml"], one={}).model_copy(update={"command": [sys.executable, "-c", ""]})
    file = adapter_states(tmp_path, "adapters")
    file.write_text("of an earlier job of this name")
    handles = PoolHandles(None, Pool(1, 1), "cpu", LIVE_LIMITS, str(tmp_path))
    pipeline = CommandPipeline(Job("adapters", config, (), (0,), folder=str(tmp_path)), handles, 0)
    assert pipeline.progress().adapters == () and pipeline.progress().step == 0
    states = [
        AdapterState(name, phase, 0, step, 3, waits, 8 * waits, 1.5, 2.0, "logs")
        for name, phase, step, waits in (("one", AdapterPhase.DONE, 3, 0), ("two", AdapterPhase.RUNNING, 2, 4))
    ]
    AdapterRecords("adapters", tmp_path).keep([state.plain() for state in states])
    said = pipeline.progress()
    assert (said.step, said.of) == (5, 6)
    assert said.adapters == (
        AdapterProgress("one", "done", 3, 3, 0, 1.5),
        AdapterProgress("two", "running", 2, 3, 32, 1.5),
    )
    heard: list[int] = []
    client: Any = SimpleNamespace(report_open=heard.append)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"]) as process:
        assert pipeline._wait_for(process, client) == 0
    assert heard == [32]
