"""The run that chaos disturbs, seen from outside: its processes, what it records, and what it leaves behind.

Each life of it is one command line: a run by itself, or the only pipeline of a pool, with a scheduler beside it. Every
life goes on from the last checkpoint. Knows no part of a run but by the title of its process and the events of its
record.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from nemo_rl.utils.checkpoint import saved_steps
from nemo_rl.utils.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
MARK = "NRL_CHAOS_RUN"
CONFIG = "examples/configs/grpo_arithmetic_async_cpu.yaml"
# How a process is known by the title that Ray or vLLM gives it.
TARGETS = {
    "engine": ("ray::VllmGenerationWorker", "VLLM::EngineCore"),
    "engines": ("VLLM::EngineCore",),
    "scheduler": ("ray::SchedulerActor",),
    "worker": ("ray::PolicyWorker",),
    "storage unit": ("ray::SimpleStorageUnit",),
    "driver": ("examples/run_grpo.py", "ray::NemoRLFullFinetunePipeline", "examples/run_time_sharing.py"),
}
# Of these one stands still instead of dying.
STOPPED = {f"{kind} stopped": TARGETS[kind] for kind in ("engine", "worker", "storage unit")}
# What happens to files: to the newest checkpoint while the run is down, and to the disk of its logs while it works.
DAMAGES = ("flipped bytes", "missing file", "full disk")
LOG_DISK_MIB = 512
# Of these all that there are die at once, of the others one.
TOGETHER = ("engines",)
KEPT = ("ray", "torchinductor_")
SHARDS = 2
STEPS_ON = 2
ENDS_AFTER_S, GONE_WITHIN_S, STEP_WITHIN_S = 300.0, 90.0, 900.0
_POLL_S = 0.25


class Failed(Exception):
    """What the run must not do."""


def processes(variables: Mapping[str, str], titles: Sequence[str] = ("",)) -> list[psutil.Process]:
    """Living processes started with these environment variables whose command line holds one of `titles`."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = variables.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE
            if ours and any(title in " ".join(process.cmdline()) for title in titles):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Progress:
    """What the records of all lives say since this was made, as far as it is not compressed yet.

    Args:
        logs: Where the lives log.

    Attributes:
        steps: Steps that were finished.
        served: Shards that have answered a request.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[Path, int] = {}
        self.steps = 0
        self.served: set[int] = set()
        self.look()
        self.forget()

    def look(self) -> None:
        """Takes in what was written since the last time."""
        for path in self._logs.glob("exp_*/record.jsonl"):
            with path.open("rb") as file:
                # What is compressed is cut off.
                offset = min(self._read.get(path, 0), path.stat().st_size)
                file.seek(offset)
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = offset + len(whole) + bool(whole)
            for line in whole.splitlines():
                with suppress(ValueError):
                    self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        self.steps += entry["kind"] == "step_finished"
        if entry["kind"] == "request_finished" and entry["outcome"] == "done":
            self.served.add(entry["shard"])

    def forget(self) -> None:
        """Begins to count anew."""
        self.steps, self.served = 0, set()


class Run:
    """The run under way, and what it has left behind.

    Args:
        folder: Where it logs and saves.
        model: The model that it trains.
        overrides: More settings.
    """

    def __init__(self, folder: Path, model: str, overrides: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        # Sockets lie here, and the paths of sockets must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self._settings = [
            f"policy.model_name={model}",
            f"logger.log_dir={folder}/logs",
            f"checkpointing.checkpoint_dir={self.checkpoints}",
            "checkpointing.save_period=2",
            "checkpointing.metric_name=null",
            "checkpointing.keep_top_k=2",
            "checkpointing.save_on_signal=true",
            "data_plane.enabled=true",
            f"cluster.gpus_per_node={SHARDS + 1}",
            f"cluster.cpu_slots={SHARDS + 1}",
            f"policy.generation.colocated.resources.gpus_per_node={SHARDS}",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
            *overrides,
        ]
        self._mark = ""
        self._shared_memory: set[str] = set()
        self.process: subprocess.Popen[bytes] | None = None
        self.shared = False
        self.unlogged: set[int] = set()
        self._disk = False

    def small_log_disk(self) -> None:
        """Puts the logs on a small disk of their own.

        Raises:
            Failed: This process may not mount one.
        """
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK_MIB}m", "tmpfs", str(logs)]
        if subprocess.run(mount, check=False).returncode:
            raise Failed("a full disk needs the right to mount one; leave it out of --kinds")
        self._disk = True

    def damage(self, kind: str, draw: random.Random) -> str:
        """Damages a file of the newest checkpoint; its name."""
        folder = self.checkpoints / f"step_{self.saved()}"
        # Without its manifest a checkpoint is one of an earlier version, and people may edit its configuration.
        spared = ("manifest.json", "config.yaml")
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in spared)
        path = draw.choice([path for path in files if path.stat().st_size])
        if kind == "missing file":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            at = draw.randrange(len(data))
            data[at : at + 64] = bytes(byte ^ 0x55 for byte in data[at : at + 64])
            path.write_bytes(data)
        return path.relative_to(folder).as_posix()

    def fill_log_disk(self) -> Path:
        """Takes all room on the disk of the logs; the file that does."""
        filler = self.folder / "logs" / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        return filler

    def said(self, text: str) -> bool:
        """Whether it has written a text to the terminal."""
        return text in (self.folder / "output.txt").read_text(errors="replace")

    def start(self, steps: int, *, shared: bool, more: Sequence[str] = ()) -> None:
        """Begins, or goes on from the last checkpoint, up to a step; `shared` as a pipeline of a pool, with a
        scheduler beside it.
        """
        self._mark, self.shared = uuid.uuid4().hex, shared
        line = [sys.executable, "examples/run_grpo.py", "--config", CONFIG]
        if shared:
            line = [sys.executable, "examples/run_time_sharing.py", "--gpus", str(SHARDS), "--device", "cpu"]
            # A rank that failed is built anew at once: the next kill comes in a minute.
            line += ["--port", "0", "--quarantine", "1", "--log-dir", f"{self.folder}/pool", "--pipelines", CONFIG]
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
        environment = {MARK: self._mark, "PYTHONPATH": path, "RAY_ADDRESS": "local", "TMPDIR": str(self.temporary)}
        # A shell that starts this in the background makes its children ignore Ctrl-C.
        listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        with (self.folder / "output.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*line, *self._settings, *more, f"grpo.max_num_steps={steps}"],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=listen,  # noqa: PLW1509 - one thread
            )

    def ended(self, within_s: float) -> int:
        """Its exit code.

        Raises:
            Failed: It does not end.
        """
        if self.process is None:
            raise Failed("the run was never started")
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the run did not end within {within_s:.0f} s; see {self.folder}/output.txt") from error

    def saved(self) -> int:
        """The last checkpoint's step; 0 without one."""
        return max(saved_steps(self.checkpoints), default=0)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Waits while the run lives; one that has done all of its steps needs to be waited for no more.

        Raises:
            Failed: It ended otherwise, or hangs.
        """
        deadline = time.monotonic() + STEP_WITHIN_S
        while not condition():
            if self.process is not None and self.process.poll() == 0:
                return
            if self.process is None or self.process.poll() is not None:
                raise Failed(f"the run ended by itself, before {what}; see {self.folder}/output.txt")
            if time.monotonic() > deadline:
                raise Failed(f"not within {STEP_WITHIN_S:.0f} s: {what}; see {self.folder}/output.txt")
            time.sleep(_POLL_S)

    def wait_until_whole(self, without: Collection[psutil.Process] = ()) -> tuple[float, float]:
        """Waits until the run has finished a step, and until all of its parts are at work again.

        Args:
            without: The processes that were killed.

        Returns:
            Seconds until the next step was finished; seconds until every part stood, the shards had answered requests
            since and further steps were finished. In a pool the shard on the training slot may sleep for long, and one
            that died asleep is built when it is woken: it is not waited for.

        Raises:
            Failed: It ended, or hangs.
        """
        began, progress = time.monotonic(), Progress(self.folder / "logs")
        shards = set(range(1 if self.shared else 0, SHARDS))

        def went_on() -> bool:
            progress.look()
            return progress.steps > 0

        def complete() -> bool:
            want = {"engines": len(shards), "scheduler": int(self.shared)}
            return all(len(set(self.processes(TARGETS[kind])) - set(without)) >= want[kind] for kind in want)

        def at_work() -> bool:
            progress.look()
            return progress.steps >= STEPS_ON and progress.served >= shards

        self.wait_for(went_on, "its next step")
        stepped_s = time.monotonic() - began
        self.wait_for(complete, "all of its parts stood")
        progress.look()
        progress.forget()
        self.wait_for(at_work, "all of its parts were at work")
        return stepped_s, time.monotonic() - began

    def processes(self, titles: Sequence[str] = ("",)) -> list[psutil.Process]:
        """The run's living processes whose command line holds one of `titles`."""
        return processes({MARK: self._mark}, titles)

    def note_shared_memory(self) -> None:
        """Remembers which shared memory the run uses now, by name."""
        for process in self.processes():
            try:
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except OSError:
                continue
            named = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
            self._shared_memory |= {path for path in named if not path.endswith(" (deleted)")}

    def wait_until_gone(self) -> None:
        """Waits until no process of the run is left.

        Raises:
            Failed: Some are.
        """
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := self.processes():
            if time.monotonic() > deadline:
                names = sorted({" ".join(process.cmdline())[:80] for process in left})
                raise Failed(f"{len(left)} processes outlived the run: {names}")
            time.sleep(_POLL_S)

    def check_nothing_is_left(self) -> None:
        """Looks for shared memory, sockets and temporary files; what Ray logged and torch compiled is meant to stay.

        Raises:
            Failed: There is some.
        """
        left = [path for path in sorted(self._shared_memory) if Path(path).exists()]
        # The folder of a user's open pools stays, but says of none that is gone; Ray's logs lie in it, too.
        pools = self.temporary / f"nemo_rl_{os.getuid()}"
        left += [str(path) for path in self.temporary.iterdir() if not path.name.startswith(KEPT) and path != pools]
        left += [str(path) for path in pools.glob("*") if not path.name.startswith(KEPT)]
        if left:
            raise Failed(f"left behind: {left}")

    def accuracy(self) -> float:
        """Of the validation at the end."""
        found = read_metrics(self.folder / "logs").last("validation/accuracy")
        if found is None:
            raise Failed(f"{self.folder} has no validation")
        return found

    def close(self) -> None:
        """Ends what is left, whatever it is."""
        for process in self.processes():
            process.kill()
        if self._disk:
            subprocess.run(["umount", "--lazy", str(self.folder / "logs")], check=False)
        shutil.rmtree(self.temporary, ignore_errors=True)
