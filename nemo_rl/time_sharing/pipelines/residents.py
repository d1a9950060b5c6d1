"""What stays in the memory of a pool's GPUs while its pipelines are away, and whether there is room for one more.

Contexts, sleeping engines and trainers on the host leave something behind on a GPU; it is measured when a trainer has
been built and has moved to the host, and when an engine has been built and sleeps, while everybody else is away from
that GPU. Pure; knows no GPU. Invariant: on every GPU in the ledger, what stays and the largest of what its pipelines
need at once fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log.pool_state import Resident

_GIB = 1 << 30


_RESERVED_SHARE = 0.12
_LEAST_SLOT_BYTES = 4 * _GIB


class SlotTooSmall(UserError, ValueError):
    """The GPUs cannot be divided into as many slots."""


class SlotBytes(NamedTuple):
    """Device memory that a job may take on a GPU with slots: with its engines, and with its trainer."""

    engines: int
    trainer: int


def slot_bytes(device_bytes: int, slots_per_gpu: int) -> SlotBytes | None:
    """Device memory of each slot of a GPU; None where the whole GPU is one.

    A part of the GPU is kept back for what stays while jobs sleep: CUDA contexts, and the CUDA graphs of engines. The
    rest is divided into one part for each slot and one for the training turn. A trainer has two of them: that of its
    slot, where its engines sleep meanwhile, and that of the turn, which one trainer has at a time.

    Raises SlotTooSmall: a slot would have less than an engine of the smallest model needs.
    """
    if slots_per_gpu == 1:
        return None
    usable = device_bytes * (1 - _RESERVED_SHARE)
    part = int(usable / (slots_per_gpu + 1))
    if part < _LEAST_SLOT_BYTES:
        raise SlotTooSmall(
            f"--slots-per-gpu {slots_per_gpu}: each slot would have {in_gib(part)} of {in_gib(device_bytes)}, and an "
            f"engine needs {in_gib(_LEAST_SLOT_BYTES)} at least; ask for at most "
            f"{max(int(usable / _LEAST_SLOT_BYTES) - 1, 1)}"
        )
    return SlotBytes(part, 2 * part)


class PoolFull(UserError, RuntimeError):
    """The pool's GPUs cannot hold one more pipeline beside those that are there."""


class Part(str, Enum):
    """What of a pipeline stays on a GPU."""

    TRAINER = "trainer"
    ENGINES = "engines"


class SlotMemory(NamedTuple):
    """One GPU's memory in bytes: in use by pipelines that are away, and all of it."""

    used: int
    total: int


class _Entry(NamedTuple):
    """Bytes on one GPU: what stays while a part is away, and what it needs besides when it is awake."""

    left: int
    needs: int


class Residents:
    """The ledger of one pool. `kept`: what is in it already."""

    def __init__(self, kept: Iterable[Resident] = ()) -> None:
        self._entries = {(name, Part(part), gpu): _Entry(left, needs) for name, part, gpu, left, needs in kept}

    def entries(self) -> list[Resident]:
        """All there is, to be kept."""
        return [Resident(name, part.value, gpu, *entry) for (name, part, gpu), entry in self._entries.items()]

    def admit(
        self,
        pipeline: str,
        measured: Mapping[int, SlotMemory],
        needs: Mapping[int, int],
        part: Part = Part.TRAINER,
    ) -> None:
        """Enters a part of a pipeline that was built and is away now.

        Args:
            measured: Memory by GPU, with what this part has left there; what was entered of it for these GPUs before is
                forgotten.
            needs: Bytes that it needs on a GPU when it is awake there, by GPU.

        Raises PoolFull: it does not fit; it is not entered.
        """
        for gpu in measured:
            self._entries.pop((pipeline, part, gpu), None)
        there = {gpu: self._on(gpu) for gpu in measured}
        mine = {
            gpu: _Entry(max(0, memory.used - sum(entry.left for entry in there[gpu].values())), needs.get(gpu, 0))
            for gpu, memory in measured.items()
        }
        for gpu, memory in sorted(measured.items()):
            asked = {name: entry.needs for name, entry in there[gpu].items()}
            asked[pipeline] = max(asked.get(pipeline, 0), mine[gpu].needs)
            neediest = max(asked, key=lambda name: asked[name])
            if memory.used + asked[neediest] > memory.total:
                left = {name: entry.left for name, entry in there[gpu].items()}
                left[pipeline] = left.pop(pipeline, 0) + mine[gpu].left
                each = ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in left.items())
                raise PoolFull(
                    f"{pipeline}: GPU {gpu} cannot hold it: {in_gib(memory.used)} of {in_gib(memory.total)} stay in "
                    f"use while everybody is away ({each}), and {neediest} needs {in_gib(asked[neediest])} when it is "
                    "awake; lower its policy.generation.vllm_cfg.gpu_memory_utilization, train on other GPUs, or "
                    "submit the job when another has ended"
                )
        self._entries |= {(pipeline, part, gpu): entry for gpu, entry in mine.items()}

    def leave(self, pipeline: str) -> None:
        """The pipeline's processes are gone; one that is not there is no error."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != pipeline}

    def _on(self, gpu: int) -> dict[str, _Entry]:
        """What each pipeline leaves on a GPU with all its parts, and the most that one of them needs."""
        found: dict[str, _Entry] = {}
        for (name, _, where), entry in self._entries.items():
            if where == gpu:
                other = found.get(name, _Entry(0, 0))
                found[name] = _Entry(other.left + entry.left, max(other.needs, entry.needs))
        return found


def in_gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
