"""A pipeline for tests on real Ray: the real agent runtime and scheduler actors, with engines that only take time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from nemo_rl.time_sharing.actors import RayLink
from nemo_rl.time_sharing.runtime import AgentRuntime, Dismissed
from nemo_rl.time_sharing.scheduler import StillRegistered
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN, Command, Limits, Priority, Reply
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import RecordWriter


class TimedEngine:
    """Engines that take a few milliseconds for everything and generate one sample per millisecond and active rank."""

    def __init__(self) -> None:
        self.active: set[int] = set()

    def drain(self, rank: int) -> None:
        time.sleep(0.005)

    def sleep(self, rank: int) -> None:
        time.sleep(0.005)

    def wake(self, rank: int) -> None:
        time.sleep(0.02)

    def load(self, rank: int, version: int) -> None:
        time.sleep(0.02)

    def set_routable(self, rank: int, active: bool) -> None:
        (self.active.add if active else self.active.discard)(rank)


class PipelineActor:
    """One job: registers, then steps of generate, train, publish, release, until done. Its record survives it."""

    def __init__(self, name: str, train: list[int], infer: list[int], steps: int, log_dir: str, scheduler: Any, limits: Limits, incarnation: int) -> None:
        self._name, self._steps, self._limits, self._incarnation = name, steps, limits, incarnation
        self._scheduler, self._mappings = scheduler, {ACTOR_TRAIN: train, ACTOR_INFER: infer}
        self._progress_file = Path(log_dir) / f"{name}.progress"
        self._record = RecordWriter(Path(log_dir) / f"{name}.{incarnation}.jsonl", source=f"{name}/driver", flush_interval_s=0.0)
        self._engine = TimedEngine()
        self._runtime: AgentRuntime | None = None
        self._error = ""
        self._done = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def done(self) -> bool:
        return self._done.is_set()

    def error(self) -> str:
        return self._error

    def command(self, command: Command) -> None:
        if self._runtime is not None:
            self._runtime.command(command)

    def heard(self, reply: Reply) -> None:
        if self._runtime is not None:
            self._runtime.heard(reply)

    def rank_ended(self, rank: int) -> None:
        if self._runtime is not None:
            self._runtime.rank_ended(rank)

    def _run(self) -> None:
        try:
            self._live()
        except BaseException as error:
            self._error = repr(error)
            raise
        finally:
            self._done.set()

    def _register(self) -> Any:
        import ray

        deadline = time.monotonic() + 60
        while True:
            try:
                options = {"incarnation": self._incarnation, "staleness": 0}
                return ray.get(self._scheduler.register.remote(self._name, "ns", {ACTOR_TRAIN: 1, ACTOR_INFER: 1}, self._mappings, options), timeout=30)
            except (StillRegistered, ray.exceptions.RayActorError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _live(self) -> None:
        trained = int(self._progress_file.read_text()) if self._progress_file.exists() else 0
        runtime = AgentRuntime(self._register(), self._incarnation, self._engine, RayLink(self._scheduler), self._record, self._limits, version=trained)
        self._runtime = runtime
        runtime.start()
        runtime.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 120)
        time.sleep(0.02)
        runtime.release(ACTOR_TRAIN, target=8)
        for step in range(trained, self._steps):
            group = f"{self._name}.{step}.{self._incarnation}"
            self._record.emit(rec.GroupAdmitted(group, f"{self._name}.{step}", 0, step))
            self._generate(runtime)
            self._record.emit(rec.GroupCommitted(group, -1))
            runtime.acquire(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, 120)
            time.sleep(0.03)
            self._record.emit(rec.GroupTrained(group, step))
            self._record.emit(rec.StepFinished(step, step + 1, 1))
            self._progress_file.write_text(str(step + 1))
            runtime.publish(step + 1, 60)
            runtime.release(ACTOR_TRAIN, target=8 if step + 1 < self._steps else 0)
        runtime.leave(60)

    def _generate(self, runtime: AgentRuntime) -> None:
        made, deadline = 0, time.monotonic() + 120
        while made < 8:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name}: no active rank for 120 s")
            if runtime.closed.is_set():
                raise Dismissed(self._name)
            time.sleep(0.005)
            if self._engine.active:
                made += 1
                runtime.report_progress(made)
        runtime.end_progress()
