"""Waiting for workers: the first failure is reported at once, with who failed and where.

A collective in which one worker died never returns on the others, so waiting in rank order could hang on a healthy
worker. `wait_for_workers` watches all of them and raises on the first failure. Every wait has a deadline.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl.config.errors import UserError

TIMEOUT_VARIABLE = "NRL_WORKER_TIMEOUT_SECONDS"
_ROOT_CAUSE_WAIT_S = 5.0


class WorkerError(UserError, RuntimeError):
    """A worker raised or died. The message names worker, rank, node and the remote traceback."""


class WorkerDiedError(WorkerError):
    """The worker's process is gone."""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer within the deadline."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Who a worker is, for error messages."""

    name: str
    rank: int
    node_ip: str

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, node {self.node_ip})"


def worker_timeout_s() -> float:
    """Seconds that workers may take for one call (a training step, a start with its download):
    `NRL_WORKER_TIMEOUT_SECONDS`, by default half an hour.
    """
    return float(os.environ.get(TIMEOUT_VARIABLE, "1800"))


def wait_for_workers(
    refs: Sequence[ray.ObjectRef[Any]],
    identities: Sequence[WorkerIdentity],
    *,
    what: str,
    timeout_s: float | None = None,
) -> list[Any]:
    """Results in the order of `refs`.

    Args:
        refs: One call each.
        identities: Who was called, aligned with `refs`.
        what: Name of the call, for messages.
        timeout_s: Deadline for all of them together, in seconds; `worker_timeout_s` by default.

    Raises:
        WorkerError: A worker raised; as soon as the first one did.
        WorkerDiedError: A worker's process ended.
        WorkerTimeoutError: The deadline passed.
    """
    who = dict(zip(refs, identities, strict=True))
    limit_s = worker_timeout_s() if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False
        )
        if not ready:
            missing = ", ".join(str(who[ref]) for ref in pending)
            hint = f"; where calls take longer, set {TIMEOUT_VARIABLE}" if timeout_s is None else ""
            raise WorkerTimeoutError(f"{what}: no answer within {limit_s:.0f} s from {missing}{hint}")
        for ref in ready:
            failure = worker_failure(ref, who[ref], what)
            if failure is not None:
                raise _root_failure(failure, [(other, who[other]) for other in pending], what) from failure.__cause__
    return ray.get(list(refs), timeout=max(1.0, deadline - time.monotonic()))


def _root_failure(
    first: WorkerError, others: Sequence[tuple[ray.ObjectRef[Any], WorkerIdentity]], what: str
) -> WorkerError:
    """The failure to report: a worker whose peer died often raises a moment before the death itself is known."""
    if isinstance(first, WorkerDiedError) or not others:
        return first
    ready, _ = ray.wait(
        [ref for ref, _ in others], num_returns=len(others), timeout=_ROOT_CAUSE_WAIT_S, fetch_local=False
    )
    failures = [worker_failure(ref, identity, what) for ref, identity in others if ref in ready]
    return next((failure for failure in failures if isinstance(failure, WorkerDiedError)), first)


def worker_failure(ref: ray.ObjectRef[Any], identity: WorkerIdentity, what: str) -> WorkerError | None:
    """The failure behind a finished call, None if it succeeded."""
    try:
        ray.get(ref, timeout=60.0)
    except RayActorError as error:
        text = _plain(error)
        if error.actor_init_failed:
            return _caused(WorkerError(f"{what}: {identity} could not start: {_last_line(text)}\n{text}"), error)
        return _caused(WorkerDiedError(f"{what}: {identity} died: {text}"), error)
    except RayTaskError as error:
        return _caused(
            WorkerError(f"{what}: {identity} raised {type(error.cause).__name__}: {error.cause}\n{_plain(error)}"),
            error.cause,
        )
    except RayError as error:
        return _caused(WorkerError(f"{what}: {identity} failed: {_plain(error)}"), error)
    return None


def _caused(failure: WorkerError, cause: BaseException | None) -> WorkerError:
    failure.__cause__ = cause
    return failure


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def _last_line(traceback: str) -> str:
    """The exception behind a formatted traceback: what follows its last indented line."""
    tail: list[str] = []
    for line in reversed(traceback.strip().splitlines()):
        if line.startswith("  "):
            break
        tail.insert(0, line)
    return "\n".join(tail) or traceback
