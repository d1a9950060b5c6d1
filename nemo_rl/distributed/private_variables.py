"""Environment variables of workers that no other user of the machine may see.

Ray writes a worker's variables into a log and into the command line that starts it, and both can be read by every user
of the machine. So what could hold a secret goes through the cluster's own store, which asks for the cluster's token,
and the worker takes it from there before it imports anything of the run.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping

from nemo_rl.distributed.unix_users import RUN_AS

KEYS = "NRL_PRIVATE_VARIABLES"
_NAMESPACE = b"nemo_rl"
# Read when a process or its first library starts, so they must be there from the beginning.
_AT_START = (
    *(
        "PYTHON",
        "LD_",
        "MALLOC_",
        "GLIBC_",
        "OMP_",
        "MKL_",
        "OPENBLAS_",
        "RAYON_",
        "CUDA_",
        "NCCL_",
        "TORCH",
        "PYTORCH_",
    ),
    *("VLLM_", "NVTE_", "ONEDNN_", "DNNL_", "RAY_", "NRL_", "TOKENIZERS_"),
)
_NO_SECRET = ("TOKENIZERS_PARALLELISM", "PIPELINE_ID", "ROLL_RAY_NAMESPACE")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")
_PATH = "PYTHONPATH"
_keys_of: dict[str, str] = {}


def is_private(name: str) -> bool:
    """Whether a variable may hold a secret."""
    if name in (*_NO_SECRET, KEYS):
        return False
    return not name.startswith(_AT_START) or any(word in name.upper() for word in _SECRET)


def without_private(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for Ray's `env_vars`: in the place of the private ones, the key under which this cluster keeps them for
    `take_private_variables`. This process must be connected to the cluster.
    """
    # Root starts a submitter's worker, and must import nothing of the submitter's.
    late = (_PATH,) if RUN_AS in variables or RUN_AS in os.environ else ()
    private = {name: value for name, value in variables.items() if (value and is_private(name)) or name in late}
    if not private:
        return dict(variables)
    from ray.experimental.internal_kv import _internal_kv_put

    content = json.dumps(private, sort_keys=True)
    key = _keys_of.setdefault(content, secrets.token_hex(8))
    _internal_kv_put(key, content, namespace=_NAMESPACE)
    # A worker's variables take the place of its parent's, whose keys go along.
    keys = [*filter(None, os.environ.get(KEYS, "").split(",")), key]
    public = {name: value for name, value in variables.items() if name not in private}
    return public | {KEYS: ",".join(dict.fromkeys(keys))}


def take_private_variables() -> None:
    """Sets this worker's private variables. Raises RuntimeError: the cluster does not have them any more."""
    keys = [*filter(None, os.environ.get(KEYS, "").split(","))]
    if not keys:
        return
    from ray.experimental.internal_kv import _internal_kv_get

    for key in keys:
        content = _internal_kv_get(key, namespace=_NAMESPACE)
        if content is None:
            raise RuntimeError(
                f"the Ray cluster has lost the variables that this worker needs ({KEYS}={key}); submit the job again"
            )
        variables = json.loads(content)
        os.environ.update(variables)
        folders = variables.get(_PATH, "").split(os.pathsep)
        sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]


def of_a_command(variables: Mapping[str, str]) -> dict[str, str]:
    """A worker's variables for a command that it starts, whose own Ray cluster knows no key of this one."""
    return {name: value for name, value in variables.items() if name not in (KEYS, RUN_AS)}
