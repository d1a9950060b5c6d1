"""Calls of Ray actors: waiting for many workers, and single actors on the driver's node.

A collective in which one worker died never returns on the others, so waiting in rank order could hang on a healthy
worker. `wait_for_workers` watches all of them and raises on the first failure, with who failed and where. Invariants:
every wait has a deadline; what a single actor raised is raised here as it was, with its own type.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.errors import UserError, first_line

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

Actor = TypeVar("Actor")
Answer = TypeVar("Answer")

TIMEOUT_VARIABLE = "NRL_WORKER_TIMEOUT_SECONDS"
_ROOT_CAUSE_WAIT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


class WorkerError(UserError, RuntimeError):
    """A worker raised or died. The message names worker, rank and node, and holds the remote traceback unless a
    `UserError` was raised.
    """


class WorkerDiedError(WorkerError):
    """The worker's process is gone."""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer within the deadline."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Name and place of a worker, for error messages."""

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
    refs: Sequence[ray.ObjectRef[object]],
    identities: Sequence[WorkerIdentity],
    *,
    what: str,
    timeout_s: float | None = None,
) -> list[object]:
    """Results in the order of `refs`.

    Args:
        identities: The called workers, aligned with `refs`.
        what: Name of the call, for messages.
        timeout_s: Deadline for all of them together, in seconds; `worker_timeout_s` by default.

    Raises WorkerError: a worker raised; as soon as the first one did; WorkerDiedError: a worker's process ended;
    WorkerTimeoutError: the deadline passed.
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
    first: WorkerError, others: Sequence[tuple[ray.ObjectRef[object], WorkerIdentity]], what: str
) -> WorkerError:
    """The failure to report: a worker whose peer died often raises just before the death is known."""
    if isinstance(first, WorkerDiedError) or not others:
        return first
    ready, _ = ray.wait(
        [ref for ref, _ in others], num_returns=len(others), timeout=_ROOT_CAUSE_WAIT_S, fetch_local=False
    )
    failures = [worker_failure(ref, identity, what) for ref, identity in others if ref in ready]
    return next((failure for failure in failures if isinstance(failure, WorkerDiedError)), first)


def worker_failure(ref: ray.ObjectRef[object], identity: WorkerIdentity, what: str) -> WorkerError | None:
    """The failure behind a finished call, None if it succeeded."""
    try:
        ray.get(ref, timeout=60.0)
    except RayActorError as error:
        text = _plain(error)
        if error.actor_init_failed:
            return _caused(WorkerError(f"{what}: {identity} could not start: {_last_line(text)}\n{text}"), error)
        return _caused(WorkerDiedError(f"{what}: {identity} died: {text}"), error)
    except RayTaskError as error:
        # A UserError says what to do; its place in the code does not help.
        trace = "" if isinstance(error.cause, UserError) else f"\n{_plain(error)}"
        return _caused(
            WorkerError(f"{what}: {identity} raised {type(error.cause).__name__}: {error.cause}{trace}"), error.cause
        )
    except RayError as error:
        return _caused(WorkerError(f"{what}: {identity} failed: {_plain(error)}"), error)
    return None


def _caused(failure: WorkerError, cause: BaseException | None) -> WorkerError:
    failure.__cause__ = cause
    return failure


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def how_it_ended(error: BaseException) -> str:
    """Ray's message about an actor that is gone, on one line: its first sentence, its process and how that ended."""
    text = _plain(error)
    process = re.search(r"^\s*pid: \d+$", text, re.MULTILINE)
    # Ray's guesses at the causes follow.
    end = re.search(r"Worker exit type: .*?(?= Some common causes|$)", text, re.MULTILINE)
    return " ".join([first_line(error), *(found[0].strip() for found in (process, end) if found)])


def _last_line(traceback: str) -> str:
    """The exception behind a formatted traceback: what follows its last indented line."""
    tail: list[str] = []
    for line in reversed(traceback.strip().splitlines()):
        if line.startswith("  "):
            break
        tail.insert(0, line)
    return "\n".join(tail) or traceback


def start_actor(kind: type, *args: object) -> Any:
    """An actor on this node that needs no accelerator."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(
        dict.fromkeys([package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(kind)
    # It waits for others most of the time; spinning threads would take their cores.
    env = {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    return actor_class.options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": env}).remote(*args)


def call(ref: ObjectRef[Answer], *, what: str, timeout_s: float) -> Answer:
    """The answer of an actor. Raises WorkerDiedError: its process ended; WorkerTimeoutError: no answer within the
    deadline.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from error
    except GetTimeoutError as error:
        raise WorkerTimeoutError(f"{what}: no answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerDiedError(f"{what}: its process died: {error}") from error


def stop_actor(actor: ActorHandle[Actor] | None) -> None:
    """Calls an actor's `close`, and ends it. Does nothing for None."""
    if actor is None or not ray.is_initialized():
        return
    ray.wait([actor.close.remote()], timeout=_CLOSE_TIMEOUT_S)
    ray.kill(actor)
