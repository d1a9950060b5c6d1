"""Verifier processes that share out answers, with a deadline per answer.

A process that runs past its deadline is ended and replaced, and that answer earns 0. Knows processes and pipes, no
mathematics. Invariant: `verify` returns one verdict per pair, in order, at most (answers / workers + 1) * deadline
later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from nemo_rl.distributed.processes import LastWords
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.environments.verifiers import Verdict

logger = logging.getLogger(__name__)
_START_UP_S = 120.0
# The process ends itself at the deadline; only one that cannot be woken is ended from here, this much later.
_GRACE_S = 2.0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    task: int | None
    give_up_at: float
    last_words: LastWords
    ready: bool = False

    @property
    def replies(self) -> IO[bytes]:
        if self.process.stdout is None:
            raise EnvironmentFailure("a verifier process has no standard output")
        return self.process.stdout


class VerifierPool:
    """Verifies answers in processes of its own.

    Args:
        verifier: a name in `verifiers.VERIFIERS`.
        num_workers: processes, started when they are first needed.
        deadline_s: seconds per answer.
    """

    def __init__(self, verifier: str, num_workers: int, deadline_s: float) -> None:
        self._verifier = verifier
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self.timeouts = 0

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on pairs of response and expected answer.

        Raises:
            EnvironmentFailure: verifier processes cannot start.
        """
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = list(range(len(pairs)))[::-1]
        while any(verdict is None for verdict in verdicts):
            while len(self._workers) < min(self._num_workers, len(pairs)):
                self._start()
            for worker in self._workers:
                if worker.ready and worker.task is None and waiting:
                    self._assign(worker, waiting.pop(), pairs)
            for worker in self._answered_or_late():
                self._collect(worker, verdicts)
        return [verdict for verdict in verdicts if verdict is not None]

    def shutdown(self) -> None:
        """Ends all processes."""
        for worker in list(self._workers):
            self._end(worker)
        self._selector.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "nemo_rl.environments.verifier_process", self._verifier]
        # The process must find this package wherever this one found it, installed or not.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        worker = _Worker(process, None, time.monotonic() + _START_UP_S, LastWords(process))
        self._workers.append(worker)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)

    def _assign(self, worker: _Worker, task: int, pairs: Sequence[tuple[str, str]]) -> None:
        response, expected = pairs[task]
        request = {
            "verifier": self._verifier,
            "response": response,
            "expected": expected,
            "deadline_s": self._deadline_s,
        }
        worker.task, worker.give_up_at = task, time.monotonic() + self._deadline_s + _GRACE_S
        if worker.process.stdin is None:
            return
        # A process that died while idle shows as the end of its replies, which `_collect` sees.
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.write(json.dumps(request).encode() + b"\n")
            worker.process.stdin.flush()

    def _answered_or_late(self) -> list[_Worker]:
        busy = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        wait_bound = max(0.0, min(worker.give_up_at for worker in busy) - time.monotonic())
        answered = [key.data for key, _ in self._selector.select(wait_bound)]
        now = time.monotonic()
        return answered or [worker for worker in busy if worker.give_up_at <= now]

    def _collect(self, worker: _Worker, verdicts: list[Verdict | None]) -> None:
        late = time.monotonic() >= worker.give_up_at and not self._selector_has(worker)
        line = b"" if late else worker.replies.readline()
        if not line:
            self._lost(worker, verdicts, late=late)
            return
        reply = json.loads(line)
        if not worker.ready:
            worker.ready = True
        elif worker.task is not None:
            if reply["problem"]:
                logger.debug("verifier=%s event=unreadable problem=%s", self._verifier, reply["problem"])
            verdicts[worker.task] = Verdict(float(reply["reward"]), reply["answer"])
            worker.task = None

    def _lost(self, worker: _Worker, verdicts: list[Verdict | None], *, late: bool) -> None:
        how = f"was not ready after {_START_UP_S:g} s" if late else f"ended {worker.last_words.of_ended()}"
        self._end(worker)
        if not worker.ready:
            raise EnvironmentFailure(f"a process that verifies by {self._verifier} {how}")
        if worker.task is not None:
            self.timeouts += 1
            logger.warning(
                "verifier=%s event=ended deadline_s=%g exit_code=%s reward=0",
                self._verifier,
                self._deadline_s,
                worker.process.returncode,
            )
            verdicts[worker.task] = Verdict(0.0, None)

    def _selector_has(self, worker: _Worker) -> bool:
        return any(key.data is worker for key, _ in self._selector.select(0))

    def _end(self, worker: _Worker) -> None:
        self._selector.unregister(worker.replies)
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                pipe.close()
