"""Actors of a run that need no accelerator: started on the driver's node, called with a deadline, ended with the run.

Knows nothing of what they do. Invariant: what an actor raised is raised here as it was, with its own type.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.worker_calls import WorkerDiedError, WorkerTimeoutError

_CLOSE_TIMEOUT_S = 10.0


def start_actor(kind: type, *args: Any) -> Any:
    """An actor on this node.

    Args:
        kind: Its class.
        args: For its constructor.
    """
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(
        dict.fromkeys([package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(kind)
    # It waits for others most of the time; spinning threads would take their cores.
    env = {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    return actor_class.options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": env}).remote(*args)


def call(ref: Any, *, what: str, timeout_s: float) -> Any:
    """The answer of an actor.

    Raises:
        WorkerDiedError: Its process ended.
        WorkerTimeoutError: No answer within the deadline.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from error
    except GetTimeoutError as error:
        raise WorkerTimeoutError(f"{what}: no answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerDiedError(f"{what}: its process died: {error}") from error


def stop_actor(actor: Any) -> None:
    """Lets an actor close what it holds, and ends it. Nothing to do for None."""
    if actor is None or not ray.is_initialized():
        return
    ray.wait([actor.close.remote()], timeout=_CLOSE_TIMEOUT_S)
    ray.kill(actor)
