"""Verifier processes with a deadline per answer.

A process that exceeds its deadline is replaced and its answer earns 0. One that dies otherwise or hangs is replaced
too, and its answer is verified once more, since something outside may have killed it. Invariant: `verify` returns one
verdict per pair, in order, within (2 * answers / workers + 1) * deadline.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from nemo_rl.distributed.processes import OutputTail, plain_environment
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.environments.verifiers import Verdict

logger = logging.getLogger(__name__)
_START_UP_S = 120.0
# The process ends itself at the deadline; only one that cannot be woken is ended from here, this much later.
_GRACE_S = 2.0
_STARTS_KILLED = 3
_TRIES = 2
_CHUNK = 1 << 16


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]
    task: int | None
    give_up_at: float
    output_tail: OutputTail
    ready: bool = False
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)


_LOST = Verdict(0.0, None, given_up=True)


class VerifierPool:
    """Verifies answers in processes of its own, started at first use.

    Args:
        verifier: a name in `verifiers.VERIFIERS`.
        deadline_s: seconds per answer.
    """

    def __init__(self, verifier: str, num_workers: int, deadline_s: float) -> None:
        self._verifier = verifier
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._starts_killed = 0
        self.timeouts = 0

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on pairs of response and expected answer. Raises EnvironmentFailure: verifier processes cannot
        start.
        """
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = list(range(len(pairs)))[::-1]
        lost: Counter[int] = Counter()
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._end(worker)
        while any(verdict is None for verdict in verdicts):
            while len(self._workers) < min(self._num_workers, len(pairs)):
                self._start()
            for worker in self._workers:
                if worker.ready and worker.task is None and waiting:
                    self._assign(worker, waiting.pop(), pairs)
            for worker in self._answered_or_late():
                task = worker.task
                if (verdict := self._collect(worker)) is None or task is None:
                    continue
                lost[task] += verdict is _LOST
                if verdict is _LOST and lost[task] < _TRIES:
                    waiting.append(task)
                else:
                    verdicts[task] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def shutdown(self) -> None:
        """Ends all processes."""
        for worker in list(self._workers):
            self._end(worker)
        self._selector.close()

    def _start(self) -> None:
        command = [sys.executable, "-m", "nemo_rl.environments.verifier_process", self._verifier]
        # The process must find this package wherever this one found it, installed or not.
        environment = {**plain_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        if process.stdin is None or process.stdout is None:
            raise EnvironmentFailure("a verifier process has no pipes")
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        give_up_at = time.monotonic() + _START_UP_S
        worker = _Worker(process, process.stdin, process.stdout, None, give_up_at, OutputTail(process))
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
        worker.outgoing = json.dumps(request).encode() + b"\n"
        self._selector.register(worker.requests, selectors.EVENT_WRITE, worker)

    def _answered_or_late(self) -> list[_Worker]:
        busy = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        timeout_s = max(0.0, min(worker.give_up_at for worker in busy) - time.monotonic())
        answered = []
        for key, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE:
                self._send(key.data)
            else:
                answered.append(key.data)
        now = time.monotonic()
        late = [worker for worker in busy if worker.give_up_at <= now and worker not in answered]
        return answered + late

    def _send(self, worker: _Worker) -> None:
        try:
            worker.outgoing = worker.outgoing[os.write(worker.requests.fileno(), worker.outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # It died, which shows as the end of its replies.
            worker.outgoing = b""
        if not worker.outgoing:
            self._selector.unregister(worker.requests)

    def _collect(self, worker: _Worker) -> Verdict | None:
        """A worker's answer; `_LOST` if none will come, None if it is still pending."""
        try:
            said = os.read(worker.replies.fileno(), _CHUNK)
        except BlockingIOError:
            said = None
        if not said:
            return self._lost(worker, late=said is None)
        worker.incoming += said
        if not said.endswith(b"\n"):
            return None
        reply = json.loads(worker.incoming)
        worker.incoming.clear()
        if not worker.ready:
            worker.ready, self._starts_killed = True, 0
            return None
        if reply["problem"]:
            logger.debug("verifier=%s event=unreadable problem=%s", self._verifier, reply["problem"])
        worker.task = None
        return Verdict(float(reply["reward"]), reply["answer"])

    def _lost(self, worker: _Worker, *, late: bool) -> Verdict | None:
        how = f"was not ready after {_START_UP_S:g} s" if late else f"ended {worker.output_tail.of_ended()}"
        self._end(worker)
        code = worker.process.returncode
        if not worker.ready:
            self._starts_killed += 1
            if late or code >= 0 or self._starts_killed >= _STARTS_KILLED:
                raise EnvironmentFailure(f"a process that verifies by {self._verifier} {how}")
        timed_out = not late and code == -signal.SIGALRM
        self.timeouts += timed_out
        logger.warning(
            "verifier=%s event=%s deadline_s=%g exit_code=%s",
            self._verifier,
            "deadline_passed" if timed_out else "stood_still" if late else "died",
            self._deadline_s,
            code,
        )
        return Verdict(0.0, None, given_up=True) if timed_out else _LOST

    def _end(self, worker: _Worker) -> None:
        self._selector.unregister(worker.replies)
        if worker.outgoing:
            self._selector.unregister(worker.requests)
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.wait()
        worker.requests.close()
        worker.replies.close()
