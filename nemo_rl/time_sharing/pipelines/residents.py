"""What stays in the memory of a pool's GPUs while its pipelines are away, and whether there is room for one more.

Contexts, sleeping engines and trainers on the host leave something behind on a GPU; it is measured when a pipeline has
been built and has moved to the host, while everybody else's ranks on that GPU sleep. Pure; knows no GPU. Invariant: on
every GPU in the ledger, what stays and the largest of what its pipelines need at once fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nemo_rl.config.errors import UserError

_GIB = 1 << 30


class PoolFull(UserError, RuntimeError):
    """The pool's GPUs cannot hold one more pipeline beside those that are there."""


class SlotMemory(NamedTuple):
    """One GPU's memory in bytes: in use by whoever is away, and all of it."""

    used: int
    total: int


class Residents:
    """The ledger of one pool."""

    def __init__(self) -> None:
        self._left: dict[str, dict[int, int]] = {}
        self._needs: dict[str, dict[int, int]] = {}

    def admit(self, pipeline: str, measured: Mapping[int, SlotMemory], needs: Mapping[int, int]) -> None:
        """Enters a pipeline that was built and is away now.

        Args:
            pipeline: Its id; one that was there before is entered anew.
            measured: Memory by GPU, with what this pipeline has left there.
            needs: Bytes that it needs on a GPU when it is awake there, by GPU.

        Raises:
            PoolFull: It does not fit; it is not entered.
        """
        self.leave(pipeline)
        left = {gpu: max(0, memory.used - self._left_on(gpu)) for gpu, memory in measured.items()}
        for gpu, memory in sorted(measured.items()):
            asked = {name: their.get(gpu, 0) for name, their in self._needs.items()} | {pipeline: needs.get(gpu, 0)}
            neediest = max(asked, key=lambda name: asked[name])
            if memory.used + asked[neediest] > memory.total:
                there = [f"{name} {_gib(their[gpu])}" for name, their in self._left.items() if gpu in their]
                each = ", ".join([*there, f"{pipeline} {_gib(left[gpu])}"])
                raise PoolFull(
                    f"{pipeline}: GPU {gpu} cannot hold it: {_gib(memory.used)} of {_gib(memory.total)} stay in use "
                    f"while everybody is away ({each}), and {neediest} needs {_gib(asked[neediest])} when it is "
                    "awake; lower its policy.generation.vllm_cfg.gpu_memory_utilization, train on other GPUs, or "
                    "submit the job when another has ended"
                )
        self._left[pipeline], self._needs[pipeline] = left, dict(needs)

    def leave(self, pipeline: str) -> None:
        """The pipeline's processes are gone; one that is not there is no error."""
        self._left.pop(pipeline, None)
        self._needs.pop(pipeline, None)

    def _left_on(self, gpu: int) -> int:
        return sum(left.get(gpu, 0) for left in self._left.values())


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
