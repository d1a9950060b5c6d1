"""What a job takes of a pool, said when it is submitted; one that can never fit is refused then, and a doubt said.

Reads configurations; knows no GPU and no Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.residents import SlotBytes, in_gib
from nemo_rl.time_sharing.pipelines.slot_choice import Needs, needs_of
from nemo_rl.utils.progress import format_duration


class NeverFits(UserError, ValueError):
    """The weights of a job's engines are larger than a slot of the pool."""


def estimated_needs(job: Job, memory: SlotBytes | None) -> Needs | None:
    """What the job takes of each of its slots, as estimated; None on CPU slots, or where its model is not here to be
    looked at. Raises NeverFits: no slot of the pool holds the weights of an engine.

    Args:
        memory: Of a slot of the pool, bytes; None on CPU slots.
    """
    if memory is None:
        return None
    try:
        needs = needs_of(job)
    except (UserError, OSError, ValueError):
        # The job's start says what is wrong with its model.
        return None
    if needs.weights > memory.engines:
        raise NeverFits(
            f"{job.name}: an engine has {in_gib(needs.weights)} of weights on each GPU, and a slot of this pool has "
            f"{in_gib(memory.engines)}; raise vllm_cfg.tensor_parallel_size, or submit it to a pool "
            "with fewer slots on each GPU"
        )
    return needs


def doubt(needs: Needs | None, memory: SlotBytes | None) -> str:
    """What may not fit, by the estimate; empty where all does."""
    lack = needs.lacks(memory) if needs is not None and memory is not None else None
    return f"; it may not fit: {lack}" if lack else ""


def what_it_takes(
    train: Sequence[int], infer: Sequence[int], needs: Needs | None, seconds: float, why: str, unit: str
) -> str:
    """A sentence: what a job takes, when it can begin, and why not now.

    >>> what_it_takes((0,), (0, 1), None, 0.0, "", "GPU")
    'trains on GPU 0, generates on GPUs 0, 1; can begin at once'
    """
    trainer, engines = (0, 0) if needs is None else (needs.trainer, needs.engines)
    parts = []
    if train:
        parts.append(f"trains on {_gpus(train, unit)}" + _at_least(trainer))
    if infer and tuple(infer) != tuple(train):
        parts.append(f"{'generates' if train else 'runs'} on {_gpus(infer, unit)}" + _at_least(engines))
    if not seconds:
        begins = "can begin at once"
    elif math.isinf(seconds):
        begins = f"cannot begin yet, for an unknown time: {why}"
    else:
        begins = f"can begin in about {format_duration(seconds)}: {why}"
    return f"{', '.join(parts)}; {begins}"


def _gpus(gpus: Sequence[int], unit: str) -> str:
    whole = len(gpus) > 3 and gpus[-1] - gpus[0] == len(gpus) - 1
    named = f"{gpus[0]} to {gpus[-1]}" if whole else ", ".join(map(str, gpus))
    return f"{unit}{'s' if len(gpus) > 1 else ''} {named}"


def _at_least(nbytes: int) -> str:
    return f" (about {in_gib(nbytes)} of each)" if nbytes else ""
