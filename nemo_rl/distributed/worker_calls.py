"""Waiting for workers: the first failure is reported at once, with who failed and where.

A collective in which one worker died never returns on the others, so waiting in rank order could hang on a healthy
worker. `wait_for_workers` watches all of them and raises on the first failure. Every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

DEFAULT_TIMEOUT_S = 1800.0


class WorkerError(RuntimeError):
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


def wait_for_workers(
    refs: Sequence[ray.ObjectRef[Any]],
    identities: Sequence[WorkerIdentity],
    *,
    what: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Results in the order of `refs`.

    Args:
        refs: One call each.
        identities: Who was called, aligned with `refs`.
        what: Name of the call, for messages.
        timeout_s: Deadline for all of them together, in seconds.

    Raises:
        WorkerError: A worker raised; as soon as the first one did.
        WorkerDiedError: A worker's process ended.
        WorkerTimeoutError: The deadline passed.
    """
    who = dict(zip(refs, identities, strict=True))
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
        if not ready:
            missing = ", ".join(str(who[ref]) for ref in pending)
            raise WorkerTimeoutError(f"{what}: no answer within {timeout_s:.0f} s from {missing}")
        for ref in ready:
            raise_worker_failure(ref, who[ref], what)
    return ray.get(list(refs), timeout=max(1.0, deadline - time.monotonic()))


def raise_worker_failure(ref: ray.ObjectRef[Any], identity: WorkerIdentity, what: str) -> None:
    """Raises the failure behind a finished call, if it failed."""
    try:
        ray.get(ref, timeout=60.0)
    except (ActorDiedError, ActorUnavailableError) as error:
        raise WorkerDiedError(f"{what}: {identity} died: {error}") from error
    except RayActorError as error:
        raise WorkerDiedError(f"{what}: {identity} is gone: {error}") from error
    except RayTaskError as error:
        raise WorkerError(f"{what}: {identity} raised {type(error.cause).__name__}: {error.cause}\n{error}") from error.cause
    except RayError as error:
        raise WorkerError(f"{what}: {identity} failed: {error}") from error
