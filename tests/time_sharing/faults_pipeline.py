"""Pipelines of several real processes for tests of what a killed one costs: the real pool's actor, scheduler, agent and
reaper, with a trainer and engines that only take time.

A phase of a pipeline can be held: the operation stands still in its middle, so that a test may kill whichever process
it likes just then. What is held, and what was reached, are files.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace, rank_actor_name
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, EngineError
from nemo_rl.time_sharing.log.pool_state import Outcome
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, Progress
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import read_record

SAMPLES = 8
WAIT_S = 60.0
PHASES = ("training", "checkpointing", "syncing", "releasing", "waking")


class TrainerDied(UserError, RuntimeError):
    """The trainer's process is gone."""


class Worker:
    """A process that works for a while; knows nothing of ours, so that it starts fast."""

    def pid(self) -> int:
        import os

        return os.getpid()

    def work(self, seconds: float) -> None:
        import time

        time.sleep(seconds)


class Held:
    """Lets a test hold a phase: while the file `hold` names it, whoever comes to it says so and waits."""

    def __init__(self, folder: Path, name: str) -> None:
        self._hold, self._reached = folder / f"{name}.hold", folder / f"{name}.reached"

    def at(self, phase: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._phase() == phase:
            self._reached.write_text(phase)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{phase} was held for {WAIT_S:g} s")
            time.sleep(0.01)

    def _phase(self) -> str:
        try:
            return self._hold.read_text()
        except FileNotFoundError:  # the test lets go, maybe just now
            return ""


class Engines:
    """One process per rank, built when it is first woken, and again when it has died."""

    def __init__(self, name: str, incarnation: int, held: Held) -> None:
        self._name, self._incarnation, self._held = name, incarnation, held
        self._actors: dict[int, Any] = {}
        self.active: set[int] = set()

    def _work(self, rank: int, seconds: float) -> None:
        import ray

        actor = self._actors.get(rank)
        if actor is None:
            raise EngineError(f"the process of rank {rank} was ended")
        try:
            ray.get(actor.work.remote(seconds), timeout=WAIT_S)
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"the process of rank {rank} is gone") from error

    def drain(self, rank: int) -> None:
        self._held.at("draining")
        self._work(rank, 0.005)

    def sleep(self, rank: int) -> None:
        self._held.at("releasing")
        self._work(rank, 0.005)

    def wake(self, rank: int) -> None:
        import ray

        if rank not in self._actors:
            name = rank_actor_name(rank, self._incarnation)
            options = {"name": name, "namespace": agent_namespace(self._name), "num_cpus": 0}
            self._actors[rank] = ray.remote(Worker).options(**options).remote()
        self._held.at("waking")
        self._work(rank, 0.01)

    def load(self, rank: int, version: int) -> int:
        self._held.at("syncing")
        self._work(rank, 0.01)
        return version

    def set_routable(self, rank: int, active: bool) -> None:
        (self.active.add if active else self.active.discard)(rank)

    def ended(self, rank: int) -> None:
        self.active.discard(rank)
        self._actors.pop(rank, None)


class ManyProcesses(LentPipeline):
    """Steps of generate, train, save, publish and release until a file `<name>.stop` is there."""

    def __init__(self, job: Job, handles: Any, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._folder, self._trained = Path(job.folder), 0

    def progress(self) -> Progress:
        return Progress("running", self._trained, 0, "")

    def live(self) -> Outcome:
        import ray

        name, record = self._job.name, self.open_record()
        self._saved = self._folder / f"{name}.saved"
        self._trained = json.loads(self._saved.read_text()) if self._saved.exists() else 0
        for group in self._left_open():
            record.emit(rec.GroupDropped(group, "lost_in_restart"))
        self._held = held = Held(self._folder, name)
        self._mine = engines = Engines(name, self._incarnation, held)
        options = {"name": f"trainer_0.{self._incarnation}", "namespace": agent_namespace(name), "num_cpus": 0}
        self._trainer = ray.remote(Worker).options(**options).remote()
        runtime = self.join(engines, record)
        runtime.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, WAIT_S)
        self._train(0.01)
        runtime.begin_at(self._trained)
        runtime.release(ACTOR_TRAIN, target=SAMPLES)
        while not (self._folder / f"{name}.stop").exists():
            self._step(runtime, record, self._trained)
        runtime.leave(WAIT_S)
        return Outcome("done", steps=self._trained)

    def _left_open(self) -> list[str]:
        found: dict[str, None] = {}
        for path in sorted(Path(self._handles.log_dir).glob(f"{self._job.name}.*.jsonl")):
            for entry in read_record(path, recover=True):
                if isinstance(entry.event, rec.GroupAdmitted):
                    found[entry.event.group_id] = None
                elif isinstance(entry.event, rec.GroupTrained | rec.GroupDropped):
                    found.pop(entry.event.group_id, None)
        return list(found)

    def _train(self, seconds: float) -> None:
        import ray

        try:
            ray.get(self._trainer.work.remote(seconds), timeout=WAIT_S)
        except ray.exceptions.RayActorError as error:
            raise TrainerDied("the trainer's process is gone") from error

    def _step(self, runtime: AgentRuntime, record: Any, step: int) -> None:
        group = f"{self._job.name}.{step}.{self._incarnation}"
        record.emit(rec.GroupAdmitted(group, group, 0, step))
        self._generate(runtime)
        record.emit(rec.GroupCommitted(group, -1))
        runtime.acquire(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, WAIT_S)
        self._held.at("training")
        self._train(0.02)
        record.emit(rec.GroupTrained(group, step))
        record.emit(rec.StepFinished(step, step + 1, 1))
        beside = self._saved.with_suffix(".part")
        beside.write_text(json.dumps(step + 1))
        self._held.at("checkpointing")
        self._train(0.005)
        os.replace(beside, self._saved)
        runtime.publish(step + 1, WAIT_S)
        runtime.release(ACTOR_TRAIN, target=SAMPLES)
        self._trained = step + 1

    def _generate(self, runtime: AgentRuntime) -> None:
        made, deadline = 0, time.monotonic() + WAIT_S
        runtime.set_demand(SAMPLES)
        while made < SAMPLES:
            if time.monotonic() > deadline or runtime.closed.is_set():
                raise TrainerDied(f"{self._job.name}: no active rank, or dismissed")
            threading.Event().wait(0.01)
            if self._mine.active:
                made += 1
                runtime.set_demand(SAMPLES, made)
        runtime.set_demand(0)


class PoolOfMany(PoolActor):
    """A pool that runs them."""

    def pipeline_class(self, job: Job) -> type[LentPipeline]:
        return ManyProcesses
