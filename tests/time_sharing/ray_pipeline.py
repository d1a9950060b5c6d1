"""Pipelines for tests on real Ray: the real agent runtime and scheduler actors, with engines that only take time.

A pipeline can be told to strike: to send SIGKILL to itself or to the scheduler in the middle of a named operation. What
is still to be struck is kept in a file, since the process that strikes does not live to say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_rl.time_sharing.agents.actors import RayLink
from nemo_rl.time_sharing.agents.external import ExternalJob
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, Dismissed
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Command, Limits, Priority, Reply
from nemo_rl.time_sharing.scheduling.scheduler import StillRegistered
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import RecordWriter, read_record

SAMPLES = 8
# The others are in `test_faults`.
PHASES = ("init", "route", "generate", "publish", "leave")


class Strikes:
    """Which process to kill in which operation, in order; `[[operation, "agent" or "scheduler"], ...]` in a file."""

    def __init__(self, path: Path, scheduler_pid: Callable[[], int]) -> None:
        self._path, self._scheduler_pid, self._lock = path, scheduler_pid, threading.Lock()

    def left(self) -> list[list[str]]:
        return json.loads(self._path.read_text()) if self._path.exists() else []

    def at(self, operation: str) -> None:
        """Called in the middle of each operation."""
        with self._lock:
            left = self.left()
            if not left or left[0][0] != operation:
                return
            victim = os.getpid() if left[0][1] == "agent" else self._scheduler_pid()
            self._path.write_text(json.dumps(left[1:]))
            with contextlib.suppress(ProcessLookupError):  # another job may have struck the same scheduler a moment ago
                os.kill(victim, signal.SIGKILL)


class TimedEngine:
    """Engines that take a few milliseconds for everything."""

    def __init__(self, strikes: Strikes) -> None:
        self.active: set[int] = set()
        self._strikes = strikes

    def drain(self, rank: int) -> None:
        self._work("drain", 0.005)

    def sleep(self, rank: int) -> None:
        self._work("sleep", 0.005)

    def wake(self, rank: int) -> None:
        self._work("wake", 0.02)

    def load(self, rank: int, version: int) -> None:
        self._work("publish" if rank in self.active else "load", 0.02)

    def set_routable(self, rank: int, active: bool) -> None:
        if active:
            self._strikes.at("route")
        (self.active.add if active else self.active.discard)(rank)

    def _work(self, operation: str, seconds: float) -> None:
        time.sleep(seconds / 2)
        self._strikes.at(operation)
        time.sleep(seconds / 2)


class _Process:
    """What every job's actor has: its record, its registration, and the way in for the scheduler."""

    def __init__(self, name: str, log_dir: str, scheduler: Any, limits: Limits, incarnation: int) -> None:
        self._name, self._limits, self._incarnation, self._scheduler = name, limits, incarnation, scheduler
        self._record = RecordWriter(
            Path(log_dir) / f"{name}.{incarnation}.jsonl", source=f"{name}/driver", flush_interval_s=0.0
        )
        self._carrier: Any = None

    def pid(self) -> int:
        return os.getpid()

    def command(self, command: Command) -> None:
        if self._carrier is not None:
            self._carrier.command(command)

    def heard(self, reply: Reply) -> None:
        if self._carrier is not None:
            self._carrier.heard(reply)

    def rank_ended(self, rank: int) -> None:
        if self._carrier is not None:
            self._carrier.rank_ended(rank)

    def _register(self, mappings: dict[str, list[int]]) -> Topology:
        import ray

        deadline = time.monotonic() + 120
        tps = dict.fromkeys(mappings, 1)
        while True:
            try:
                options = {"incarnation": self._incarnation, "staleness": 0}
                return ray.get(self._scheduler.register.remote(self._name, "ns", tps, mappings, options), timeout=60)
            except (StillRegistered, ray.exceptions.RayActorError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _scheduler_pid(self) -> int:
        import ray

        while True:
            try:
                return ray.get(self._scheduler.pid.remote(), timeout=60)
            except ray.exceptions.RayActorError:
                time.sleep(0.1)


class PipelineActor(_Process):
    """One job: registers, then steps of generate, train, publish, release, until it has done its steps and its
    strikes.
    """

    def __init__(
        self,
        name: str,
        train: list[int],
        infer: list[int],
        steps: int,
        log_dir: str,
        scheduler: Any,
        limits: Limits,
        incarnation: int,
    ) -> None:
        super().__init__(name, log_dir, scheduler, limits, incarnation)
        for group in _open_groups([Path(log_dir) / f"{name}.{earlier}.jsonl" for earlier in range(incarnation)]):
            self._record.emit(rec.GroupDropped(group, "lost_in_restart"))
        self._steps, self._mappings = steps, {ACTOR_TRAIN: train, ACTOR_INFER: infer}
        self._progress_file = Path(log_dir) / f"{name}.progress"
        self._strikes = Strikes(Path(log_dir) / f"{name}.strikes", self._scheduler_pid)
        self._engine = TimedEngine(self._strikes)
        self._outcome = "running"
        threading.Thread(target=self._run, daemon=True).start()

    def outcome(self) -> str:
        """`running`, `done`, or what went wrong."""
        return self._outcome

    def _run(self) -> None:
        try:
            self._live()
            self._outcome = "done"
        except BaseException as error:
            self._outcome = repr(error)
            raise

    def _live(self) -> None:
        trained = int(self._progress_file.read_text()) if self._progress_file.exists() else 0
        topology = self._register(self._mappings)
        self._carrier = runtime = AgentRuntime(
            topology,
            self._incarnation,
            self._engine,
            RayLink(self._scheduler),
            self._record,
            self._limits,
            version=trained,
        )
        runtime.start()
        runtime.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 120)
        time.sleep(0.02)
        self._strikes.at("init")
        runtime.release(ACTOR_TRAIN, target=SAMPLES)
        while trained < self._steps or any(operation != "leave" for operation, _ in self._strikes.left()):
            self._step(runtime, trained)
            trained += 1
        self._strikes.at("leave")
        runtime.leave(60)

    def _step(self, runtime: AgentRuntime, step: int) -> None:
        group = f"{self._name}.{step}.{self._incarnation}"
        self._record.emit(rec.GroupAdmitted(group, f"{self._name}.{step}", 0, step))
        self._generate(runtime)
        self._strikes.at("generate")
        self._record.emit(rec.GroupCommitted(group, -1))
        runtime.acquire(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, 120)
        time.sleep(0.03)
        self._strikes.at("train")
        self._progress_file.write_text(str(step + 1))
        self._record.emit(rec.GroupTrained(group, step))
        self._record.emit(rec.StepFinished(step, step + 1, 1))
        runtime.publish(step + 1, 60)
        runtime.release(ACTOR_TRAIN, target=SAMPLES if step + 1 < self._steps or self._strikes.left() else 0)

    def _generate(self, runtime: AgentRuntime) -> None:
        made, deadline = 0, time.monotonic() + 120
        while made < SAMPLES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name}: no active rank for 120 s")
            if runtime.closed.is_set():
                raise Dismissed(self._name)
            time.sleep(0.005)
            if self._engine.active:
                made += 1
                runtime.set_demand(SAMPLES, made)
        runtime.set_demand(0)


def _open_groups(records: list[Path]) -> list[str]:
    """Prompt groups that earlier incarnations admitted and neither trained nor dropped."""
    groups: dict[str, None] = {}
    for path in records:
        for entry in read_record(path, recover=True) if path.exists() else ():
            if isinstance(entry.event, rec.GroupAdmitted):
                groups[entry.event.group_id] = None
            elif isinstance(entry.event, rec.GroupTrained | rec.GroupDropped):
                groups.pop(entry.event.group_id, None)
    return list(groups)


class ExternalActor(_Process):
    """A job that is no RL pipeline, behind the external client; yields at once when it is asked to, unless it is told
    to be stubborn.
    """

    def __init__(
        self,
        name: str,
        gpus: list[int],
        log_dir: str,
        scheduler: Any,
        limits: Limits,
        incarnation: int,
        stubborn: bool = False,
    ) -> None:
        super().__init__(name, log_dir, scheduler, limits, incarnation)
        self._asked: list[int] = []
        self._stubborn = stubborn
        topology = self._register({ACTOR_INFER: gpus})
        self._carrier = ExternalJob(
            topology, incarnation, RayLink(scheduler), self._record, limits, asked_to_yield=self._give_way
        )

    def acquire(self, ranks: int, timeout_s: float) -> list[tuple[int, ...]]:
        return self._carrier.acquire(ranks, timeout_s)

    def held(self) -> list[tuple[int, ...]]:
        return self._carrier.held()

    def asked(self) -> list[int]:
        return list(self._asked)

    def release(self, timeout_s: float) -> None:
        self._carrier.release(timeout_s)

    def _give_way(self, rank: int) -> None:
        self._asked.append(rank)
        if not self._stubborn:
            self._carrier.yielded(rank)
