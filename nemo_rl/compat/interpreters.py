"""NeMo-RL's names for interpreters and for starting Ray.

There is one Python environment here, so every actor runs in the interpreter of the driver. Invariant: asking about an
interpreter never starts or installs anything.
"""

from __future__ import annotations

import sys


class PY_EXECUTABLES:
    """One interpreter under each of NeMo-RL's names."""

    SYSTEM = sys.executable
    BASE = sys.executable
    VLLM = sys.executable
    FSDP = sys.executable
    AUTOMODEL = sys.executable
    MCORE = sys.executable
    SGLANG = sys.executable
    TRTLLM = sys.executable
    NEMO_GYM = sys.executable


# Class path -> interpreter. Writing to it is allowed and changes nothing.
ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {}


def get_actor_python_env(actor_class_fqn: str) -> str:
    """The interpreter of an actor: this one, whatever the class."""
    return ACTOR_ENVIRONMENT_REGISTRY.get(actor_class_fqn, sys.executable)


def init_ray(log_dir: str | None = None) -> object:
    """Joins the cluster that RAY_ADDRESS names, or starts one here with an accelerator slot per GPU (CPU slots where
    there is none). `log_dir`: where Ray puts its session when it is started; None is its usual place. Returns what an
    accelerator slot is; see `nemo_rl.distributed.devices`.
    """
    from nemo_rl.distributed import ray_runtime

    return ray_runtime.init_ray(log_dir=log_dir)
