"""Whole GRPO pipelines on one pool, with real engines and trainers: as users start them, and with processes killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.time_sharing.agents.actors import CONTROL_NAMESPACE, POOL_NAME, SCHEDULER_NAME
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace, rank_actor_name
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import EngineBuilt, GroupTrained, ShardSlept, StepFinished, VersionPublished
from tests import forks
from tests.end_to_end.test_runs import BASE, ROOT, Command
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
LONG = 1000
SHARED = (*BASE, f"grpo.max_num_steps={STEPS}", "checkpointing.save_period=1")
# A request that loses its shard starts its turn again with its own seed, so that who shares draws what it draws alone.
SYNCHRONOUS = ("policy.generation.on_preempt=redo_turn",)
STREAMED_BY_MEGATRON = {
    "async_rl": {"min_groups_for_streaming_train": 2, "max_inflight_prompts": 8, "max_buffered_rollouts": 8},
    "policy": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}},
}


# Twenty pieces of work, with a place to go on from; not done before another run has logged something.
COMMAND = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
place, other = map(pathlib.Path, sys.argv[1:])
done = int(place.read_text() or 0) if place.exists() else 0
while done < 20 or not any(other.glob("exp_*/metrics.jsonl")):
    time.sleep(0.2)
    done = min(20, done + 1)
    place.write_text(str(done))
"""


def write(folder: Path, name: str, model: Path, config: str, **sections: Any) -> Path:
    """A configuration as a user writes it, with directories of its own."""
    content = {
        "defaults": str(ROOT / "examples" / "configs" / config),
        "policy": {"model_name": str(model)} | sections.pop("policy", {}),
        "logger": {"log_dir": str(folder / name / "logs")},
        "checkpointing": {"checkpoint_dir": str(folder / name / "checkpoints")},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def weights(folder: Path, name: str, step: int = STEPS) -> bytes:
    return (folder / name / "checkpoints" / f"step_{step}" / "policy" / "weights" / "model.safetensors").read_bytes()


def test_a_pipeline_trains_beside_others_of_every_kind_what_it_trains_alone(
    tiny_model: Path, tmp_path: Path, whole: Command
) -> None:
    """GRPO trains on slot 0 and generates on both; fine-tuning and a command take turns on slot 1; an evaluation
    generates on slot 0.
    """
    turns = write(tmp_path, "inner", tiny_model, "grpo_arithmetic_cpu.yaml")
    sft = write(tmp_path, "warm", tiny_model, "sft_arithmetic_cpu.yaml")
    evaluated = {
        "defaults": str(ROOT / "examples" / "configs" / "eval_arithmetic_cpu.yaml"),
        "generation": {"model_name": str(tiny_model)},
        "tokenizer": {"name": str(tiny_model)},
        "data": {"max_samples": 16},
        "eval": {"save_path": str(tmp_path / "evaluated")},
    }
    (tmp_path / "evaluated.yaml").write_text(yaml.safe_dump(evaluated))
    script = tmp_path / "work.py"
    script.write_text(COMMAND)
    working = [sys.executable, str(script), str(tmp_path / "worked"), str(tmp_path / "warm" / "logs")]
    probe = {"external": {"command": working, "stop_s": 20}}
    (tmp_path / "command.yaml").write_text(yaml.safe_dump(probe))
    wrappers = {
        "turns": {"nemo_config_path": str(turns), "nemo_config_overrides": [*SHARED, *SYNCHRONOUS]},
        "warm_start": {"nemo_config_path": str(sft), "train_device_mapping": [1], "slice_s": 1},
        "score": {"nemo_config_path": "evaluated.yaml", "infer_device_mapping": [0]},
        "probe": {"nemo_config_path": "command.yaml", "infer_device_mapping": [1]},
    }
    for name, wrapper in wrappers.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(wrapper))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NRL_OBJECT_STORE_BYTES": str(256 << 20)}
    line = ["examples/run_time_sharing.py", "--gpus", "2", "--device", "cpu"]
    line += ["--log-dir", str(tmp_path / "pool"), "--pipelines", *(str(tmp_path / f"{name}.yaml") for name in wrappers)]
    line += ["sft.max_num_steps=60", "sft.val_period=0"]
    ended = forks.run(line, environment, timeout_s=800)
    assert ended.returncode == 0, ended.stderr
    assert "record kept every invariant" in ended.stderr

    entries = list(merge_by_machine_time(sorted((tmp_path / "pool" / "latest").glob("*.jsonl"))))
    of = [entry.event for entry in entries if entry.source.startswith("turns/")]
    trained = [event.group_id for event in of if isinstance(event, GroupTrained)]
    assert len(trained) == len(set(trained)) == STEPS * 4
    assert [event.version for event in of if isinstance(event, StepFinished)] == [1, 2]
    # A rank on the training slot left, and every version was served.
    assert any(isinstance(event, ShardSlept) for event in of)
    assert {event.version for event in of if isinstance(event, VersionPublished)} >= {1, 2}

    # Fine-tuning gave its slot back while the command waited, and both came to their end.
    granted = [e.event for e in entries if isinstance(e.event, ev.Granted) and e.event.pipeline == "warm_start"]
    assert len(granted) >= 2
    assert weights(tmp_path, "warm", 60)
    assert (tmp_path / "worked").read_text() == "20"
    assert json.loads((tmp_path / "evaluated" / "summary.json").read_text())["problems"] == 16

    alone = whole.checkpoint(STEPS) / "policy" / "weights" / "model.safetensors"
    assert alone.read_bytes() == weights(tmp_path, "inner")


@pytest.mark.parametrize("driver", ["grpo", "sft"])
def test_the_gate_without_a_pool_ends_in_one_line_before_anything_starts(
    driver: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, "lonely", tiny_model, f"{driver}_arithmetic_cpu.yaml")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RLIX_CONTROL_PLANE": "rlix", "RAY_ADDRESS": "local"}
    environment["TMPDIR"] = str(tmp_path)
    line = [f"examples/run_{driver}.py", "--config", str(file)]
    ended = forks.run(line, environment, timeout_s=120)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "open a pool with python -m nemo_rl.time_sharing serve" in ended.stderr
    assert not (tmp_path / "lonely").exists()


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def kill_actor(name: str, namespace: str) -> None:
    actor = ray.get_actor(name, namespace=namespace)
    entry: Any = ray._private.state.actors(actor._actor_id.hex())
    os.kill(entry["Pid"], signal.SIGKILL)


def test_a_command_that_dies_is_quoted_and_leaves_no_process_when_its_pipeline_dies(pool: Any, tmp_path: Path) -> None:
    says = "echo reading the data; echo the disk is full >&2; echo"
    commands = {
        "killed": [f"{says}; kill -9 $$"],
        "failed": [f"{says}; exit 3"],
        "orphan": ["echo $$ > $0; sleep 600", str(tmp_path / "pid")],
    }
    for name, arguments in commands.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"external": {"command": ["bash", "-c", *arguments]}}))
        (job,) = read_jobs([file], Pool(1, 2))
        ray.get(pool.submit.remote(job), timeout=60)

    def outcomes() -> dict[str, Any]:
        return {s.name: s.outcome for s in ray.get(pool.standings.remote(), timeout=60) if s.outcome is not None}

    until(lambda: {"killed", "failed"} <= set(outcomes()), 120, "the end of the commands that die")
    reasons = {name: outcome.reason for name, outcome in outcomes().items() if outcome.kind == "failed"}
    for name, how in (("killed", "was ended by SIGKILL"), ("failed", "ended with exit code 3")):
        assert f"{name}: bash {how}; its last line: the disk is full; see " in reasons[name]

    until((tmp_path / "pid").exists, 120, "the start of the third command")
    command = int((tmp_path / "pid").read_text())
    (agent,) = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True)
                if e["namespace"] == agent_namespace("orphan")]  # fmt: skip
    kill_actor(agent, agent_namespace("orphan"))
    until(lambda: "orphan" in outcomes(), 120, "the end of the pipeline that was killed")
    assert outcomes()["orphan"].kind == "died"
    assert "Worker exit type" in outcomes()["orphan"].reason and "causes" not in outcomes()["orphan"].reason
    wait_until_gone([command])


def test_whatever_is_killed_costs_nobody_else_anything(
    pool: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline, an engine, the scheduler, the pool's actor and a trainer, one after the other. The survivor generates
    ahead of training, the victim streams and trains with Megatron-Core.
    """
    monkeypatch.chdir(ROOT)
    survivor = write(tmp_path, "survivor", tiny_model, "grpo_arithmetic_async_cpu.yaml")
    victim = write(tmp_path, "victim", tiny_model, "grpo_arithmetic_streaming_cpu.yaml", **STREAMED_BY_MEGATRON)
    # Neither ends by itself before everything is killed: both are drained.
    overrides = [*SHARED, f"grpo.max_num_steps={LONG}"]
    jobs = {job.name: job for job in read_jobs([survivor, victim], Pool(1, 2), overrides)}
    # Samples of a step are few: at eight of them to a rank both ranks are of use.
    jobs = {
        name: replace(job, options={**job.options, "rank_batch": 8}, measures_batch=False) for name, job in jobs.items()
    }
    scheduler: Any = ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)

    def phase(name: str, rank: int) -> str | None:
        try:
            known = ray.get(scheduler.describe.remote(), timeout=60)["pipelines"].get(name)
        except ray.exceptions.RayActorError:
            return None  # it is being started anew
        return known["ranks"].get(rank, "asleep") if known is not None else None

    def serves(name: str, rank: int) -> bool:
        return phase(name, rank) == "serving"

    ray.get(pool.submit.remote(jobs["survivor"]), timeout=60)
    # Nobody trains on slot 1 yet: its engine there is built beside its policy. Who comes in the middle waits for it.
    until(lambda: phase("survivor", 1) == "building", 100, "an engine that is built ahead")
    ray.get(pool.submit.remote(jobs["victim"]), timeout=60)

    def standing(name: str) -> Any:
        return next(s for s in ray.get(pool.standings.remote(), timeout=60) if s.name == name)

    def incarnation(name: str) -> int:
        named = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True)
                 if e["namespace"] == agent_namespace(name) and e["name"].startswith("agent.")]  # fmt: skip
        return max(int(actor.rpartition(".")[2]) for actor in named)

    def checkpoint(name: str, step: int) -> Path:
        return tmp_path / name / "checkpoints" / f"step_{step}"

    def lives_again(name: str) -> None:
        ray.get(pool.submit.remote(jobs[name]), timeout=60)

    def await_step_of_victim() -> None:
        """Until it has one more checkpoint."""
        before = len(list((tmp_path / "victim" / "checkpoints").glob("step_*")))
        until(lambda: checkpoint("victim", before + 1).exists(), 400, f"step {before + 1} of the victim")

    def kill_victim(actor: str, outcome: str) -> None:
        await_step_of_victim()
        kill_actor(f"{actor}.{incarnation('victim')}", agent_namespace("victim"))
        until(lambda: standing("victim").outcome is not None, 200, "the victim's end")
        assert standing("victim").outcome.kind == outcome, standing("victim").outcome

    kill_victim("agent", "died")

    # Alone on slot 1: beside the victim, whose steps are short, its rank there would seldom get as far as to serve.
    until(lambda: checkpoint("survivor", 1).exists() and serves("survivor", 1), 400, "a step, and rank 1")
    kill_actor(rank_actor_name(1, incarnation("survivor")), agent_namespace("survivor"))
    until(lambda: not serves("survivor", 1), 60, "the end of the rank whose engine is gone")
    # It goes on from its checkpoint, on GPUs that were verified free.
    lives_again("victim")
    await_step_of_victim()
    kill_actor(SCHEDULER_NAME, CONTROL_NAMESPACE)
    kill_actor(POOL_NAME, CONTROL_NAMESPACE)

    kill_victim("lm_policy_0", "failed")
    assert "lm_policy" in standing("victim").outcome.reason
    lives_again("victim")

    def ends(name: str, outcome: str) -> None:
        until(lambda: standing(name).outcome is not None, 400, f"the end of {name}")
        assert standing(name).outcome.kind == outcome, standing(name).outcome

    await_step_of_victim()
    ray.get(pool.drain.remote("victim"), timeout=60)
    ends("victim", "drained")
    until(lambda: serves("survivor", 1), 400, "an engine in the place of the one that was killed")
    ray.get(pool.drain.remote("survivor"), timeout=60)
    ends("survivor", "drained")
    assert all(checkpoint(name, standing(name).outcome.steps).exists() for name in jobs)

    # What a killed life had drawn and not saved, the next one draws again under the same names: of the victim's runs
    # only the last is judged.
    killed = sorted((tmp_path / "pool").glob("victim.*.run.jsonl"))[:-1]
    records = sorted(set((tmp_path / "pool").glob("*.jsonl")) - set(killed))
    entries = list(merge_by_machine_time(records, recover=True))
    assert [str(violation) for violation in check(entries, ended=False)] == []
    assert len([e for e in entries if isinstance(e.event, ev.Fenced) and e.event.pipeline == "victim"]) == 2
    assert [e.event.term for e in entries if isinstance(e.event, ev.SchedulerStarted)] == [1, 2]
    # The rank whose engine was killed was noticed, and the survivor went on without it.
    moves = [e.event for e in entries if isinstance(e.event, ev.RankMoved) and e.event.pipeline == "survivor"]
    ahead = [move.phase.value for move in moves if move.rank == 1][:2]
    assert ahead == ["building", "asleep"]
    built = [e.event for e in entries if isinstance(e.event, EngineBuilt) and e.source == "survivor/agent"]
    # Whether it cools off first depends on what the kill met: a rank that serves, or one that is just wanted back.
    assert [event.shard for event in built].count(1) == 2, "once ahead, and once more after it was killed"
