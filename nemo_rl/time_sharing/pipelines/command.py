"""Any command as a job of the pool: started when it gets GPUs, stopped when they are wanted back, started again.

The command sees its GPUs as `CUDA_VISIBLE_DEVICES` and finds its place by itself: what it had not saved when SIGTERM
came is lost. Invariants: it runs only while its GPUs are held, and they are given back when no process of it is left.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import psutil

from nemo_rl.algorithms.multi_lora.http import call
from nemo_rl.config.errors import UserError
from nemo_rl.distributed.private_variables import of_a_command
from nemo_rl.distributed.processes import kill_and_wait
from nemo_rl.time_sharing.agents.actors import RayLink
from nemo_rl.time_sharing.agents.external import ExternalJob
from nemo_rl.time_sharing.log.pool_state import AdapterProgress, Outcome, Progress
from nemo_rl.time_sharing.pipelines.adapters import STOP_S, AdaptersConfig
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.protocol.types import KILLED_S
from nemo_rl.utils.files import ADAPTERS_ADDRESS, adapter_states

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_LEAVE_S = 300.0
_POLL_S = 1.0
_STARTED_POLL_S = 0.2


class CommandFailed(UserError, RuntimeError):
    """A command of the pool could not be started, or ended with an error of its own."""


class CommandPipeline(LentPipeline):
    """A command on one rank of GPUs."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._client: ExternalJob | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._turn, self._adapters_turn = threading.Lock(), threading.Lock()
        self._ended_by_drain = False
        self._named: dict[int, int | str] = {}  # GPUs of the pool as the driver names them on their node
        self._starts = 0
        self._cut_off = ""  # said where it was killed when it last gave its GPUs back
        # By `job.PIPELINES` it is one; adapters are those of the next start.
        self._config = cast("CommandConfig", job.config)
        # An earlier job of this name left it.
        adapter_states(Path(handles.log_dir), job.name).unlink(missing_ok=True)

    # -- the command --------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """How often it was started, as steps; those of its adapters, where it has some."""
        running = self._process is not None and self._process.poll() is None
        phase = "running" if running else "waiting for GPUs"
        if running and self._stopping.is_set():
            phase = f"yielding, for {self._config.stop_s:g} s at most"
        phase = f"{phase}{self._cut_off}"
        if not isinstance(self._config, AdaptersConfig):
            return Progress(phase, self._starts, 0, self._handles.log_dir)
        adapters = self._adapters_so_far()
        steps, of = sum(one.step for one in adapters), sum(one.of for one in adapters)
        return Progress(phase, steps, of, self._handles.log_dir, adapters=adapters)

    def _adapters_so_far(self) -> tuple[AdapterProgress, ...]:
        """How far each adapter is, by what the job said last; none before its first start has joined them."""
        path = adapter_states(Path(self._handles.log_dir), self._job.name)
        states: list[dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else []
        return tuple(
            AdapterProgress(
                state["name"],
                state["phase"],
                state["step"],
                state["total_steps"],
                state["open_samples"],
                state["waited_s"],
            )
            for state in states
        )

    def drain(self) -> str:
        """Stops the command as when its GPUs are wanted back, and does not start it again."""
        super().drain()
        threading.Thread(target=self._stop_for_good, name="drain", daemon=True).start()
        return "gets SIGTERM and leaves"

    def _stop_for_good(self) -> None:
        with self._turn:
            self._end(self._config.stop_s)

    def live(self) -> Outcome:
        handles = self._handles
        self._client = self._runtime = client = ExternalJob(
            self.register(),
            self._incarnation,
            RayLink(handles.scheduler),
            self.open_record(),
            handles.limits,
            asked_to_yield=self._make_room,
        )
        self._ready.set()
        try:
            code, waited_s = self._run_until_it_ends(client)
        finally:
            self._end(0.0)
        client.release(_LEAVE_S)
        adapters = self._adapters_so_far()
        steps = sum(one.step for one in adapters) if adapters else self._starts
        reached = ", ".join(f"{one.name} {one.step}/{one.of}" for one in adapters)
        if self._ended_by_drain:
            return Outcome("drained", reached or "stopped by SIGTERM", steps, waited_s)
        if code:
            said = _last_line(self._log())
            how = f"ended with exit code {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
            last = f"; its last line: {said}" if said else "; it wrote nothing"
            raise CommandFailed(f"{self._job.name}: {self._config.command[0]} {how}{last}; see {self._log()}")
        return Outcome("done", reached, steps, waited_s)

    def _log(self) -> Path:
        return Path(self._handles.log_dir) / f"{self._job.name}.{self._incarnation}.log"

    def _run_until_it_ends(self, client: ExternalJob) -> tuple[int, float]:
        """The exit code of the command when it ended by itself, and the seconds for which it waited for GPUs."""
        waited_s = 0.0
        with self._log().open("ab") as log:
            while True:
                began = time.monotonic()
                has_gpus = self._wait_for_gpus(client)
                waited_s += time.monotonic() - began
                if not has_gpus:
                    return 0, waited_s
                process = self._start(client, log)
                if process is None:
                    continue
                code = self._wait_for(process, client)
                # One that is being stopped for somebody else starts again with its next GPUs.
                with self._turn:
                    if self._draining.is_set():
                        self._ended_by_drain = True
                        return code, waited_s
                    if not self._stopping.is_set():
                        return code, waited_s

    def _wait_for(self, process: subprocess.Popen[bytes], client: ExternalJob) -> int:
        """Waits for a command's exit code; the scheduler hears of what its adapters wait for meanwhile."""
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if isinstance(self._config, AdaptersConfig):
                    client.report_open(sum(one.open_samples for one in self._adapters_so_far()))

    def _wait_for_gpus(self, client: ExternalJob) -> bool:
        """Waits for GPUs; False where the pipeline is drained first. Raises TimeoutError: none were granted in time."""
        deadline = time.monotonic() + self._handles.limits.request_s
        while not self._draining.is_set():
            try:
                client.acquire(1, _POLL_S)
                return True
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
        self._ended_by_drain = True
        return False

    def _start(self, client: ExternalJob, log: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """Starts the command; None where its GPUs were wanted back first."""
        config, held = self._config, client.held()
        if not held:
            return None
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._devices(held[0])))}
        with self._turn:
            if client.held() != held or self._draining.is_set():
                return None
            self._stopping.clear()
            self._starts += 1
            if isinstance(config, AdaptersConfig):
                # One that was killed left it there.
                (Path(self._job.folder) / config.log_dir / ADAPTERS_ADDRESS).unlink(missing_ok=True)
            try:
                self._process = subprocess.Popen(
                    self._arguments(),
                    env=of_a_command(os.environ) | visible | config.env,
                    cwd=self._job.folder,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise CommandFailed(f"{self._job.name}: {config.command[0]}: {error.strerror}") from error
            return self._process

    def _devices(self, slots: Sequence[int]) -> list[int | str]:
        """The GPUs that some slots lie on, as the driver names them on their node."""
        pool = self._handles.pool
        if self._handles.accelerator != "cuda":
            return list(pool.local_gpus(slots))
        gpus = sorted({pool.gpu_of(slot) for slot in slots})
        if missing := [gpu for gpu in gpus if gpu not in self._named]:
            found = self.cluster(missing, leads_ranks=False).slots()
            self._named |= {gpu: slot.device_index for gpu, slot in zip(missing, found, strict=True)}
        return [self._named[gpu] for gpu in gpus]

    def _arguments(self) -> list[str]:
        now = self._config
        if not isinstance(now, AdaptersConfig):
            return now.command
        records, slot = str(Path(self._handles.log_dir).absolute()), self._handles.slot_bytes
        if slot is None or self._job.column is None:
            return now.arguments(self._job.name, records)
        from nemo_rl.time_sharing.pipelines.slot_choice import needs_of

        needs = needs_of(replace(self._job, config=now))
        if (lack := needs.lacks(slot)) is not None:
            raise CommandFailed(f"{lack}; make the pool with fewer --slots-per-gpu, or give the job whole_gpus: true")
        return now.arguments(self._job.name, records, needs.divided(slot.engines))

    def adapters(self, command: str, values: Sequence[str]) -> list[object]:
        """Adds files of adapters, removes adapters by name, or lists them: in the running job, and for its next start.
        Raises CommandFailed: the job has none; ConfigError: one does not fit; JobUnreachable: the job refused one.
        """
        answers: list[object] = []
        with self._adapters_turn:
            for value in values if command != "list" else ("",):
                answers += self._change_adapters(command, value)
        return answers

    def _change_adapters(self, command: str, value: str) -> list[object]:
        config = self._config
        if not isinstance(config, AdaptersConfig):
            raise CommandFailed(f"{self._job.name}: is no job of adapters")
        log_dir = Path(self._job.folder) / config.log_dir
        alive = self._process is not None and self._process.poll() is None
        # A command that yields would forget a change; its next start reads the files of now.
        leaves = alive and self._stopping.is_set()
        runs = alive and not leaves and (log_dir / ADAPTERS_ADDRESS).is_file()
        waits = "as soon as the job has GPUs"
        if command == "list":
            if not runs:
                phase = "yielding" if leaves else "starting" if alive else "waiting"
                return [{"name": Path(file).stem, "phase": phase, "file": file} for file in config.files]
            listed: Any = call(log_dir, "GET", "/adapters")
            return list(listed)
        if alive and not runs and not leaves:
            # What its command began with is settled, and it does not take requests yet.
            raise CommandFailed(
                f"{self._job.name}: is starting; {command} {Path(value).stem} again when adapters list shows its "
                "adapters running"
            )
        if command == "remove":
            changed = config.without_adapter(value)
            answer = call(log_dir, "DELETE", f"/adapters/{value}") if runs else f"{value}: removed"
        else:
            if runs:
                states: Any = call(log_dir, "GET", "/adapters")
                config = config.those_on(states)
            changed = config.checked([*config.files, value])
            asked = {"file": value}
            if not runs:
                # The next start would refuse all adapters for this one.
                changed.check_layers(value)
            answer = call(log_dir, "POST", "/adapters", asked) if runs else f"{Path(value).stem}: joins {waits}"
        self._config = changed
        return [answer]

    def _make_room(self, rank: int) -> None:
        stop_s = self._config.stop_s
        with self._turn:
            if self._process is not None and self._process.poll() is None:
                self._stopping.set()
                if self._client is not None:
                    # What it does from here on is use of its GPUs, not waiting for them.
                    self._client.withdraw()
                left_s, key = stop_s, "external.stop_s"
                if isinstance(self._config, AdaptersConfig):
                    address = Path(self._job.folder) / self._config.log_dir / ADAPTERS_ADDRESS
                    left_s, key = self._started_within(stop_s, address), STOP_S
                self._cut_off = ""
                if not self._end(left_s):
                    self._cut_off = f" (killed at its last yield: raise {key} above {stop_s:g})"
                    logger.warning("event=cut_off pipeline=%s%s", self._job.name, self._cut_off)
            if self._client is not None:
                self._client.yielded(rank)

    def _started_within(self, stop_s: float, answers: Path) -> float:
        """Waits until a job of adapters that is starting can finish its first steps; the seconds that are left for
        them. If its start takes longer than others leave it the GPUs, it would never get on.

        Args:
            stop_s: How long it may take in all.
            answers: A file that is there once the job has started.
        """
        deadline = time.monotonic() + stop_s
        while not answers.is_file() and time.monotonic() < deadline and not self._draining.is_set():
            if self._process is None or self._process.poll() is not None:
                break
            time.sleep(_STARTED_POLL_S)
        return max(0.0, deadline - time.monotonic())

    def _end(self, grace_s: float) -> bool:
        """Ends the command with all its processes: politely for `grace_s`, then at once. Returns whether it ended by
        itself.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return True
        family = psutil.Process(process.pid)
        with suppress(psutil.NoSuchProcess):
            everybody = [*family.children(recursive=True), family]
            if grace_s:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            by_itself = process.poll() is not None
            kill_and_wait([one for one in everybody if one.is_running()], KILLED_S)
            return by_itself
        return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _last_line(log: Path) -> str:
    """The last line with text in it that a command wrote; most errors say there what they are."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
