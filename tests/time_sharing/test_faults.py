"""kill -9 of every kind of process in every phase: what a killed one costs, and whom."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.time_sharing.agents.actors import CONTROL_NAMESPACE, POOL_NAME, SCHEDULER_NAME
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.opening import close_pool, open_pool
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.protocol.topology import Pool, RegistrationError
from nemo_rl.time_sharing.protocol.types import Limits, Phase
from tests import forks

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

LIMITS = Limits(
    heartbeat_s=0.5,
    lease_s=20.0,
    retry_s=0.5,
    reap_s=20.0,
    min_hold_s=0.2,
    aging_s=2.0,
    quarantine_s=0.5,
    plan_interval_s=0.05,
    replan_s=0.5,
)
ROOT = Path(__file__).parents[2]
VICTIMS = ("trainer", "engine", "pipeline", "coordinator", "scheduler")


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("faults_pipeline", Path(__file__).with_name("faults_pipeline.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pipelines = _load()


def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Scene:
    """Two pipelines on two slots, each of which trains on one and generates on both."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder = folder
        self.log_dir = folder / "pool"
        self.log_dir.mkdir()
        self.actor = open_pool(Pool(1, 2), CPU, self.log_dir, limits, pipelines.PoolOfMany)

    def submit(self, name: str, train: int) -> None:
        options = {"staleness": 0, "rank_batch": 4, "full_overlap": False}
        config = CommandConfig(command=["none"])
        ray.get(self.actor.submit.remote(Job(name, config, (train,), (0, 1), options, folder=str(self.folder))))

    def standing(self, name: str) -> Standing:
        return next(s for s in ray.get(self.actor.standings.remote(), timeout=60) if s.name == name)

    def saved(self, name: str) -> int:
        path = self.folder / f"{name}.saved"
        return int(path.read_text()) if path.exists() else 0

    def goes_on(self, *names: str) -> None:
        """Each of them trains and saves a further step."""
        before = {name: self.saved(name) for name in names}
        until(lambda: all(self.saved(name) > before[name] for name in names), f"a further step of {names}")

    def hold(self, name: str, phase: str) -> None:
        """Returns once the pipeline stands in that phase."""
        reached = self.folder / f"{name}.reached"
        reached.unlink(missing_ok=True)
        (self.folder / f"{name}.hold").write_text(phase)
        until(reached.exists, f"{name} in {phase}")

    def let_go(self, name: str) -> None:
        (self.folder / f"{name}.hold").unlink()

    def signal(self, what: str, of: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process; an engine is the one of the lowest rank that stands."""
        if what in ("coordinator", "scheduler"):
            name, namespace = POOL_NAME if what == "coordinator" else SCHEDULER_NAME, CONTROL_NAMESPACE
        else:
            namespace = agent_namespace(of)
            begins = {"trainer": "trainer_0.", "engine": "rank_", "pipeline": "agent."}[what]
            named = [e["name"] for e in ray.util.list_named_actors(all_namespaces=True) if e["namespace"] == namespace]
            newest = max(int(name.rpartition(".")[2]) for name in named)
            name = min(name for name in named if name.startswith(begins) and name.endswith(f".{newest}"))
        actor: Any = ray.get_actor(name, namespace=namespace)
        os.kill(ray.get(actor.pid.remote(), timeout=60), number)

    def said(self, kind: type[Any], **fields: object) -> list[Any]:
        """Events of a kind in the scheduler's log, with these values."""
        entries = merge_by_machine_time(sorted(self.log_dir.glob("scheduler*.jsonl")), recover=True)
        events = [entry.event for entry in entries if isinstance(entry.event, kind)]
        return [event for event in events if all(getattr(event, name) == value for name, value in fields.items())]

    def violations(self) -> list[str]:
        entries = list(merge_by_machine_time(sorted(self.log_dir.glob("*.jsonl")), recover=True))
        return [str(violation) for violation in check(entries)]

    def stop(self, *names: str) -> None:
        """Has them leave."""
        for name in names:
            (self.folder / f"{name}.stop").touch()
        until(lambda: all(self.standing(name).outcome is not None for name in names), f"the end of {names}")
        assert [self.standing(name).outcome.kind for name in names] == ["done"] * len(names)  # type: ignore[union-attr]


@pytest.fixture
def scene(ray_session: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Nothing of it is left afterwards; limits may be given as a parameter."""
    ray.cloudpickle.register_pickle_by_value(pipelines)
    scene = Scene(tmp_path, getattr(request, "param", LIMITS))
    yield scene
    close_pool(scene.actor)
    ray.cloudpickle.unregister_pickle_by_value(pipelines)


def test_a_process_killed_in_any_phase_costs_its_own_pipeline_at_most(scene: Scene) -> None:
    """All 25 of (trainer, engine, pipeline, coordinator, scheduler) x (training, checkpointing, syncing, releasing,
    waking). The coordinator is the pool's actor, which starts and watches pipelines.
    """
    scene.submit("survivor", 1)
    scene.submit("victim", 0)
    scene.goes_on("survivor", "victim")
    lost = 0
    for phase, what in itertools.product(pipelines.PHASES, VICTIMS):
        scene.hold("victim", phase)
        saved = scene.saved("victim")
        scene.signal(what, "victim")
        scene.let_go("victim")
        if what in ("trainer", "pipeline"):
            until(lambda: scene.standing("victim").outcome is not None, f"the victim's end: {what} in {phase}")
            outcome = scene.standing("victim").outcome
            assert outcome is not None and outcome.kind == ("failed" if what == "trainer" else "died"), (phase, outcome)
            # Submitted again it goes on from its checkpoint, on GPUs that were verified free.
            scene.submit("victim", 0)
            lost += 1
        assert scene.saved("victim") - saved in (0, 1), (phase, what)
        scene.goes_on("survivor", "victim")
    assert scene.standing("survivor").outcome is None
    scene.stop("survivor", "victim")
    assert scene.violations() == []
    assert [event.pipeline for event in scene.said(ev.Fenced)] == ["victim"] * lost == ["victim"] * 10
    assert [event.term for event in scene.said(ev.SchedulerStarted)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("scene", [replace(LIMITS, lease_s=4.0, drain_s=2.0)], indirect=True)
def test_what_does_not_answer_does_not_fit_or_is_cancelled_costs_itself(scene: Scene) -> None:
    scheduler: Any = ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)
    scene.submit("survivor", 1)
    scene.submit("victim", 0)
    scene.goes_on("survivor", "victim")
    with pytest.raises(RegistrationError, match="GPU 5 is outside the pool of 2"):
        scene.submit("outside", 5)
    assert sorted(ray.get(scheduler.describe.remote(), timeout=60)["pipelines"]) == ["survivor", "victim"]

    # A shard that does not drain is ended, and its GPU given on; its pipeline builds another.
    scene.hold("victim", "draining")
    until(lambda: bool(scene.said(ev.RankMoved, phase=Phase.FAILED)), "the end of the rank that does not drain")
    scene.goes_on("survivor")
    scene.let_go("victim")
    scene.goes_on("survivor", "victim")
    assert scene.standing("victim").outcome is None

    def starts_again(saved: int) -> None:
        until(lambda: scene.standing("victim").outcome is not None, "the victim's end")
        assert scene.saved("victim") - saved in (0, 1)
        scene.submit("victim", 0)
        scene.goes_on("survivor", "victim")

    # A pipeline that lives and says nothing is ended like a dead one.
    saved = scene.saved("victim")
    scene.signal("pipeline", "victim", signal.SIGSTOP)
    starts_again(saved)

    scene.hold("victim", "training")
    saved = scene.saved("victim")
    ray.get(scene.actor.cancel.remote("victim"), timeout=60)
    scene.let_go("victim")
    starts_again(saved)

    scene.stop("survivor", "victim")
    assert scene.violations() == []
    ended = [*scene.said(ev.Fenced), *scene.said(ev.RankMoved, phase=Phase.FAILED)]
    assert {event.pipeline for event in ended} == {"victim"}


WORK = """
import pathlib, sys, time
place = pathlib.Path(sys.argv[1])
done = int(place.read_text()) if place.exists() else 0
while done < 10:
    time.sleep(0.1)
    done += 1
    place.write_text(str(done))
"""


def test_two_pools_on_one_machine_know_nothing_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    pools = []
    for number in range(2):
        folder = tmp_path / f"machine_{number}"
        folder.mkdir()
        command = [sys.executable, str(tmp_path / "work.py"), str(folder / "worked")]
        (folder / "probe.yaml").write_text(yaml.safe_dump({"external": {"command": command, "stop_s": 20}}))
        line = ["examples/run_time_sharing.py", "--gpus", "1", "--device", "cpu"]
        line += ["--log-dir", str(folder / "pool"), "--pipelines", str(folder / "probe.yaml")]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "NRL_OBJECT_STORE_BYTES": str(100 << 20)}
        environment["RAY_ADDRESS"] = "local"
        with (folder / "said").open("w") as said:
            pools.append((folder, forks.start(line, environment, said.fileno())))
    for folder, process in pools:
        assert process.wait(timeout=180) == 0, (folder / "said").read_text()
        assert (folder / "worked").read_text() == "10"
        said = (folder / "said").read_text()
        assert "record kept every invariant" in said
        registered = [
            entry.event.pipeline
            for entry in merge_by_machine_time(sorted((folder / "pool" / "latest").glob("scheduler*.jsonl")))
            if isinstance(entry.event, ev.Registered)
        ]
        assert registered == ["probe"]
