"""The scheduler on real Ray: eight agent processes on sixteen CPU slots, with the scheduler and agents killed while they work."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.time_sharing.actors import CONTROL_NAMESPACE, SCHEDULER_NAME, Orchestrator, agent_actor_name, agent_namespace, start_scheduler
from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.topology import Pool, RegistrationError
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN, Limits
from nemo_rl.utils.record import merge_records

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

LIMITS = Limits(
    heartbeat_s=0.5,
    lease_s=10.0,
    retry_s=0.3,
    drain_s=5.0,
    sleep_s=5.0,
    wake_s=8.0,
    sync_s=8.0,
    route_s=8.0,
    grant_s=8.0,
    reap_s=6.0,
    min_hold_s=0.2,
    aging_s=2.0,
    quarantine_s=5.0,
    plan_interval_s=0.05,
    replan_s=0.5,
)
STEPS = 25
RECOVERY_S = 120.0
"""From the last kill to the end of every job: lease + reap + the restart of a process + the steps that are left, with room for a busy machine."""


def _pipeline_class() -> Any:
    spec = importlib.util.spec_from_file_location("ray_pipeline", Path(__file__).with_name("ray_pipeline.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    module = _pipeline_class()
    owned = not ray.is_initialized()
    if owned:
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False, object_store_memory=100_000_000)
    try:
        ray.cloudpickle.register_pickle_by_value(module)
        yield ray, module
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
        if owned:
            ray.shutdown()


def _start(ray: Any, module: Any, name: str, number: int, steps: int, log_dir: Path, scheduler: Any, incarnation: int) -> Any:
    train, infer = [2 * number], sorted({2 * number, 2 * number + 1, (2 * number + 2) % 16, (2 * number + 3) % 16})
    actor = (
        ray.remote(module.PipelineActor)
        .options(name=agent_actor_name(incarnation), namespace=agent_namespace(name), num_cpus=0, max_concurrency=8)
        .remote(name, train, infer, steps, str(log_dir), scheduler, LIMITS, incarnation)
    )
    ray.get(actor.start.remote(), timeout=60)
    return actor


def _check_logs(log_dir: Path) -> list[str]:
    return [str(violation) for violation in check(merge_records(sorted(log_dir.glob("*.jsonl")), recover=True))]


def _ask(ray: Any, method: Any) -> Any:
    """Calls the scheduler, waiting while Ray restarts it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ray.get(method.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Supervisor:
    """Starts the jobs, and starts a job again under the next incarnation when its process is gone or was dismissed."""

    def __init__(self, ray: Any, module: Any, scheduler: Any, log_dir: Path, steps: int) -> None:
        self.names = [f"job{i}" for i in range(8)]
        self._ray, self._module, self._scheduler, self._log_dir, self._steps = ray, module, scheduler, log_dir, steps
        self.incarnations = dict.fromkeys(self.names, 0)
        self.actors = {name: self._start(name) for name in self.names}
        self.finished: set[str] = set()

    def _start(self, name: str) -> Any:
        return _start(self._ray, self._module, name, self.names.index(name), self._steps, self._log_dir, self._scheduler, self.incarnations[name])

    def look(self) -> None:
        for name in self.names:
            if name in self.finished:
                continue
            try:
                done = self._ray.get(self.actors[name].done.remote(), timeout=60)
                failed = done and self._ray.get(self.actors[name].error.remote(), timeout=60)
            except self._ray.exceptions.RayActorError:
                done, failed = False, "gone"
            if failed:
                self.incarnations[name] += 1
                self.actors[name] = self._start(name)
                self.actors[name].start.remote()
            elif done:
                self.finished.add(name)

    def kill(self, name: str) -> None:
        try:
            os.kill(self._ray.get(self.actors[name].pid.remote(), timeout=60), signal.SIGKILL)
        except self._ray.exceptions.RayActorError:
            return


@pytest.mark.xfail(reason="a job that has trained all its steps is taken for failed and started again for ever after a kill; not yet understood")
def test_agents_and_scheduler_survive_kills_in_every_phase(cluster: Any, tmp_path: Path) -> None:
    ray, module = cluster
    scheduler = start_scheduler(tmp_path, Pool(2, 8), LIMITS)
    jobs, rng = Supervisor(ray, module, scheduler, tmp_path, steps=STEPS), random.Random(0)
    for actor in jobs.actors.values():
        ray.get(actor.pid.remote(), timeout=120)
    for actor in jobs.actors.values():
        actor.start.remote()
    for kill in range(6):
        time.sleep(0.5 + rng.random())
        if kill % 2:
            os.kill(_ask(ray, scheduler.pid), signal.SIGKILL)
        else:
            jobs.kill(jobs.names[kill])
        jobs.look()
    last_kill = time.monotonic()
    while len(jobs.finished) < 8 and time.monotonic() < last_kill + RECOVERY_S:
        time.sleep(0.2)
        jobs.look()
    assert jobs.finished == set(jobs.names), _ask(ray, scheduler.describe)
    assert _ask(ray, scheduler.describe)["term"] == 4
    _ask(ray, scheduler.stop)
    assert _check_logs(tmp_path) == []


def test_the_orchestrator_registers_then_admits(cluster: Any, tmp_path: Path) -> None:
    ray, _ = cluster
    pool = Pool(1, 4)
    scheduler = start_scheduler(tmp_path, pool, LIMITS)
    orchestrator = Orchestrator(scheduler, pool)
    pipeline = orchestrator.allocate_pipeline_id("ft")
    with pytest.raises(RegistrationError, match="not registered"):
        orchestrator.admit_pipeline(pipeline)
    with pytest.raises(RegistrationError, match="GPU 9 is outside the pool of 4"):
        orchestrator.register_pipeline(pipeline, "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [9]})
    orchestrator.register_pipeline(pipeline, "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]})
    orchestrator.admit_pipeline(pipeline)
    assert list(ray.get(scheduler.describe.remote(), timeout=30)["pipelines"]) == [pipeline]
    assert ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE) is not None
