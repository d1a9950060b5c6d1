"""Workers under Nsight Systems: what Ray starts them with, and when they record.

Invariant: a worker records from the first `capture(True)` to the `capture(False)` after it, and its report is written
then.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from nemo_rl.config.errors import UserError

# For Ray's logs of the node, under nsight/.
_OPTIONS = {
    "t": "cuda,cudnn,cublas,nvtx",
    "cuda-graph-trace": "node",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "stop",
    "stop-on-exit": "true",
}


class ProfilerUnavailable(UserError, RuntimeError):
    """Workers are to be profiled where Nsight Systems cannot."""


def runtime_env(env_vars: dict[str, str], profiled_as: str | None) -> dict[str, object]:
    """Ray's runtime environment of a worker. `profiled_as`: its name in the report's, `<name>_<process id>.nsys-rep`;
    None where it is not profiled.
    """
    if profiled_as is None:
        return {"env_vars": env_vars}
    # Under nsys Ray starts the `python` that PATH finds first, which must be this one.
    path = f"{Path(sys.executable).parent}:${{PATH}}"
    report = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', profiled_as)}_%p"
    return {"env_vars": {**env_vars, "PATH": path}, "nsight": {**_OPTIONS, "o": report}}


def check_gpus(*, cuda: bool) -> None:
    """Whether slots can be profiled. Raises ProfilerUnavailable: they are no GPUs."""
    if not cuda:
        raise ProfilerUnavailable(
            "NRL_NSYS_WORKER_PATTERNS: Nsight Systems profiles GPUs, and the run has none; unset the variable"
        )


def check_profiler(*, cuda: bool) -> None:
    """Whether workers of a cluster on this machine can be profiled. Raises ProfilerUnavailable: there is no GPU, or
    `nsys` is not on PATH.
    """
    check_gpus(cuda=cuda)
    if shutil.which("nsys") is None:
        raise ProfilerUnavailable(
            "NRL_NSYS_WORKER_PATTERNS: nsys is not on PATH; install NVIDIA Nsight Systems, or unset the variable"
        )


def capture(on: bool) -> None:
    """Begins or ends what `nsys` records of this process."""
    import torch

    if on:
        torch.cuda.profiler.start()
    else:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
