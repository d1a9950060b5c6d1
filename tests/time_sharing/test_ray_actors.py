"""The scheduler on real Ray: eight agent processes on sixteen slots, with the scheduler and agents killed at once and
again while they work; and jobs that are no pipelines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from nemo_rl.time_sharing.agents.actors import (
    CONTROL_NAMESPACE,
    SCHEDULER_NAME,
    Orchestrator,
    SchedulerInUse,
    register_at,
    start_scheduler,
    stop_scheduler,
)
from nemo_rl.time_sharing.agents.ray_reaper import (
    Reaper,
    actors_in,
    agent_actor_name,
    agent_namespace,
    rank_actor_name,
)
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.log.segments import segments_of
from nemo_rl.time_sharing.pool import log_trouble
from nemo_rl.time_sharing.protocol.topology import IncarnationUsed, Pool, RegistrationError
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Limits

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

LIMITS = Limits(
    heartbeat_s=0.5,
    lease_s=20.0,
    retry_s=0.5,
    drain_s=10.0,
    sleep_s=10.0,
    wake_s=10.0,
    sync_s=10.0,
    route_s=10.0,
    grant_s=10.0,
    reap_s=20.0,
    min_hold_s=0.2,
    aging_s=2.0,
    quarantine_s=5.0,
    plan_interval_s=0.05,
    replan_s=0.5,
    max_tick_s=60.0,
)
STEPS = 3
RECOVERY_S = LIMITS.lease_s + LIMITS.reap_s + 5.0
"""From a restart of the scheduler to its next plan, and from the fencing of a pipeline to its GPUs: at most one lease,
one reaping, and the timers."""


def _load_pipelines() -> Any:
    spec = importlib.util.spec_from_file_location("ray_pipeline", Path(__file__).with_name("ray_pipeline.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pipelines = _load_pipelines()


@pytest.fixture
def cluster(ray_session: None) -> Iterator[None]:
    """The session's Ray; afterwards neither a scheduler nor a job is left on it."""
    ray.cloudpickle.register_pickle_by_value(pipelines)
    yield
    ray.cloudpickle.unregister_pickle_by_value(pipelines)
    for entry in ray.util.list_named_actors(all_namespaces=True):
        ours = entry["namespace"] == CONTROL_NAMESPACE or entry["namespace"].startswith("pipeline_")
        if ours:
            ray.kill(ray.get_actor(entry["name"], namespace=entry["namespace"]), no_restart=True)
    _until(
        lambda: not any(e["namespace"] == CONTROL_NAMESPACE for e in ray.util.list_named_actors(all_namespaces=True)),
        60,
    )


class _Idle:
    def pid(self) -> int:
        return os.getpid()


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _ask(method: Any, *arguments: object) -> Any:
    """Calls the scheduler, waiting while Ray restarts it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ray.get(method.remote(*arguments), timeout=60)
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _violations(log_dir: Path) -> list[str]:
    return [str(violation) for violation in check(merge_by_machine_time(sorted(log_dir.glob("*.jsonl")), recover=True))]


def _start_pipeline(
    name: str, train: list[int], infer: list[int], steps: int, log_dir: Path, scheduler: Any, incarnation: int = 0
) -> Any:
    return (
        ray.remote(pipelines.PipelineActor)
        .options(name=agent_actor_name(incarnation), namespace=agent_namespace(name), num_cpus=0, max_concurrency=8)
        .remote(name, train, infer, steps, str(log_dir), scheduler, LIMITS, incarnation)
    )


def _start_external(
    gpus: list[int], log_dir: Path, scheduler: Any, *, stubborn: bool = False, limits: Limits = LIMITS
) -> Any:
    return (
        ray.remote(pipelines.ExternalActor)
        .options(name=agent_actor_name(0), namespace=agent_namespace("external"), num_cpus=0, max_concurrency=8)
        .remote("external", gpus, str(log_dir), scheduler, limits, 0, stubborn)
    )


class Supervisor:
    """Runs the jobs, and starts a job again under the next incarnation when its process is gone or was dismissed."""

    def __init__(self, jobs: dict[str, tuple[list[int], list[int]]], scheduler: Any, log_dir: Path) -> None:
        self._jobs, self._scheduler, self._log_dir = jobs, scheduler, log_dir
        self.incarnations = dict.fromkeys(jobs, 0)
        self.outcomes = dict.fromkeys(jobs, "running")
        self._actors = {name: self._start(name) for name in jobs}

    def _start(self, name: str) -> Any:
        return _start_pipeline(name, *self._jobs[name], STEPS, self._log_dir, self._scheduler, self.incarnations[name])

    def all_done(self) -> bool:
        for name in self._jobs:
            if self.outcomes[name] != "done":
                self._look(name)
        return set(self.outcomes.values()) == {"done"}

    def _look(self, name: str) -> None:
        try:
            self.outcomes[name] = ray.get(self._actors[name].outcome.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            self.outcomes[name] = "killed"
        if self.outcomes[name] not in ("running", "done"):
            self.incarnations[name] += 1
            self._actors[name] = self._start(name)


def test_agents_and_scheduler_survive_kills_that_come_thick_and_fast(cluster: None, tmp_path: Path) -> None:
    jobs = {f"job{i}": ([2 * i], sorted({2 * i, 2 * i + 1, (2 * i + 2) % 16, (2 * i + 3) % 16})) for i in range(8)}
    strikes = [[phase, victim] for victim in ("agent", "scheduler") for phase in pipelines.PHASES]
    for number, name in enumerate(jobs):
        mine = sorted(strikes[number::8], key=lambda strike: strike[0] == "leave")
        (tmp_path / f"{name}.strikes").write_text(json.dumps(mine))
    scheduler = start_scheduler(tmp_path, Pool(2, 8), LIMITS, segment_lines=150)
    supervisor = Supervisor(jobs, scheduler, tmp_path)
    assert _until(supervisor.all_done, 300), (supervisor.outcomes, _ask(scheduler.describe))
    assert [path.read_text() for path in tmp_path.glob("*.strikes")] == ["[]"] * 8
    assert sum(supervisor.incarnations.values()) >= len(pipelines.PHASES)
    assert _until(lambda: not _ask(scheduler.describe)["pipelines"], RECOVERY_S)
    assert _ask(scheduler.describe)["term"] >= len(pipelines.PHASES) // 2
    stop_scheduler(scheduler)
    assert _violations(tmp_path) == []
    segments = segments_of(tmp_path / "scheduler.jsonl")
    assert len(segments) > 3, "most of the restarts began with a saved state"
    slowest = max(_recoveries(segments))
    assert slowest <= RECOVERY_S


def _recoveries(segments: list[Path]) -> list[float]:
    """Seconds from each restart of the scheduler to its first plan, and from each fence to the return of the GPUs."""
    began: dict[str, float] = {}
    seconds = []
    for entry in merge_by_machine_time(segments):
        event = entry.event
        if isinstance(event, ev.SchedulerStarted) and event.term > 1:
            began["scheduler"] = entry.time
        elif isinstance(event, ev.Fenced):
            began[event.pipeline] = entry.time
        elif isinstance(event, ev.InventoryDone | ev.Unregistered):
            since = began.pop("scheduler" if isinstance(event, ev.InventoryDone) else event.pipeline, None)
            if since is not None:
                seconds.append(entry.time - since)
    assert not began, f"never recovered: {began}"
    return seconds


def test_an_engine_that_was_its_pipelines_only_one_is_ended_alone(cluster: None) -> None:
    """Killed before anyone asked for its end, it is still known to have been an actor of its own."""
    namespace, reaper = agent_namespace("lonely"), Reaper()
    agent, engine = [
        ray.remote(_Idle).options(name=name, namespace=namespace, num_cpus=0).remote()
        for name in (agent_actor_name(7), rank_actor_name(0, 7))
    ]
    os.kill(ray.get(engine.pid.remote(), timeout=60), signal.SIGKILL)
    assert _until(lambda: actors_in(namespace) == {agent_actor_name(7)}, 60)
    assert reaper.end("lonely", 7, 0, timeout_s=10.0)
    assert ray.get(agent.pid.remote(), timeout=60)
    assert not reaper.ends_single_ranks("other", 7)


def test_the_orchestrator_registers_then_admits_drains_and_unregisters(cluster: None, tmp_path: Path) -> None:
    pool = Pool(1, 4)
    scheduler = start_scheduler(tmp_path, pool, LIMITS)
    orchestrator = Orchestrator(scheduler, pool)
    pipeline = orchestrator.allocate_pipeline_id("ft")
    with pytest.raises(RegistrationError, match="not registered"):
        orchestrator.admit_pipeline(pipeline)
    with pytest.raises(RegistrationError, match="GPU 9 is outside the pool of 4"):
        orchestrator.register_pipeline(pipeline, "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [9]})
    orchestrator.register_pipeline(
        pipeline, "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}
    )
    for _ in range(2):
        orchestrator.admit_pipeline(pipeline)
        assert list(_ask(scheduler.describe)["pipelines"]) == [pipeline]
    assert ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE) is not None
    for _ in range(2):
        orchestrator.unregister_pipeline(pipeline)
        assert _until(lambda: not _ask(scheduler.describe)["pipelines"], 30)
    orchestrator.register_pipeline(pipeline, "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]})
    with pytest.raises(IncarnationUsed, match="the next free one is 1"):
        orchestrator.admit_pipeline(pipeline)
    orchestrator.register_pipeline(pipeline, "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, incarnation=1)
    orchestrator.admit_pipeline(pipeline)
    for _ in range(2):
        orchestrator.unregister_pipeline(pipeline)
        assert _until(lambda: not _ask(scheduler.describe)["pipelines"], 30)


def test_a_stopped_scheduler_is_started_anew_and_goes_on_from_its_log(cluster: None, tmp_path: Path) -> None:
    pool = Pool(1, 4)
    scheduler = start_scheduler(tmp_path, pool, LIMITS)
    arguments = ("a", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, {})
    _ask(scheduler.register, *arguments)
    with pytest.raises(SchedulerInUse, match="runs on this cluster already"):
        start_scheduler(tmp_path, Pool(2, 4), LIMITS)
    stop_scheduler(scheduler)
    again = start_scheduler(tmp_path, pool, LIMITS)
    assert _ask(again.describe)["term"] == 2 and list(_ask(again.describe)["pipelines"]) == ["a"]
    _ask(again.register, *arguments)


def test_a_registration_is_known_to_the_scheduler_that_follows_a_killed_one(cluster: None, tmp_path: Path) -> None:
    scheduler = start_scheduler(tmp_path, Pool(1, 4), LIMITS)
    arguments = ("a", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, {})
    _ask(scheduler.register, *arguments)
    os.kill(_ask(scheduler.pid), signal.SIGKILL)
    # While there is none.
    register_at(scheduler, ("b", *arguments[1:]), 60.0)
    assert _until(lambda: _ask(scheduler.describe)["term"] == 2, 60)
    assert list(_ask(scheduler.describe)["pipelines"]) == ["a", "b"]
    _ask(scheduler.register, *arguments)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own, of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_scheduler_whose_disk_is_full_goes_on_when_there_is_room(cluster: None, small_disk: Path) -> None:
    scheduler = start_scheduler(small_disk, Pool(1, 4), LIMITS)
    arguments = ("ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, {})
    first = psutil.Process(_ask(scheduler.pid))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    # What is left of the last block of the log is written still.
    known: list[str] = []
    with pytest.raises(ray.exceptions.RayError):
        for number in range(1000):
            ray.get(scheduler.register.remote(f"job{number}", *arguments), timeout=30)
            known.append(f"job{number}")
    assert _until(lambda: not first.is_running(), 30), "what is not in the log has not happened"
    assert "no space left on the disk; the scheduler decides nothing" in log_trouble(small_disk)
    # The next ones find the disk full too.
    time.sleep(4.0)
    assert len(list(small_disk.glob("*.cut*"))) <= 1
    filler.unlink()
    assert log_trouble(small_disk) == ""
    assert _until(lambda: _ask(scheduler.describe)["term"] >= 2, 60)
    assert known and set(known) <= set(_ask(scheduler.describe)["pipelines"]) <= {*known, f"job{len(known)}"}
    _ask(scheduler.register, "after", *arguments)


def test_an_external_job_acquires_yields_to_a_pipeline_and_releases(cluster: None, tmp_path: Path) -> None:
    scheduler = start_scheduler(tmp_path, Pool(1, 2), LIMITS)
    job = _start_external([0, 1], tmp_path, scheduler)
    ray.get(job.acquire.remote(2, 60.0), timeout=90)
    assert _until(lambda: ray.get(job.held.remote(), timeout=60) == [(0,), (1,)], 60)
    pipeline = _start_pipeline("pipeline", [0], [0, 1], 2, tmp_path, scheduler)
    assert _until(lambda: ray.get(pipeline.outcome.remote(), timeout=60) != "running", 120)
    assert ray.get(pipeline.outcome.remote(), timeout=60) == "done"
    assert 0 in ray.get(job.asked.remote(), timeout=60), "training wanted GPU 0, so the job had to be asked for it"
    assert _until(lambda: ray.get(job.held.remote(), timeout=60) == [(0,), (1,)], 60), "what it still wants comes back"
    ray.get(job.release.remote(60.0), timeout=90)
    assert not _ask(scheduler.describe)["pipelines"]
    stop_scheduler(scheduler)
    assert _violations(tmp_path) == []


def test_an_external_job_that_does_not_yield_is_ended(cluster: None, tmp_path: Path) -> None:
    limits = replace(LIMITS, lease_s=5.0, drain_s=2.0)
    scheduler = start_scheduler(tmp_path, Pool(1, 2), limits)
    job = _start_external([0, 1], tmp_path, scheduler, stubborn=True, limits=limits)
    ray.get(job.acquire.remote(2, 60.0), timeout=90)
    pid = ray.get(job.pid.remote(), timeout=60)
    pipeline = _start_pipeline("pipeline", [0], [0, 1], 1, tmp_path, scheduler)
    assert _until(lambda: ray.get(pipeline.outcome.remote(), timeout=60) == "done", 120)
    assert _until(lambda: not os.path.exists(f"/proc/{pid}"), 30)
    assert _until(lambda: not _ask(scheduler.describe)["pipelines"], RECOVERY_S), (
        "its other GPU comes back with its lease"
    )
    stop_scheduler(scheduler)
    assert _violations(tmp_path) == []
