"""The sampling seed of every request, derived from where it stands in the run.

A pure function of run seed, step, prompt, sample and turn, so that a run gives the same tokens whatever the order of
arrival, the number of shards, or a restart in between. It keeps no state.
"""

from __future__ import annotations

import hashlib

VALIDATION_STEP_OFFSET = 1 << 40


def request_seed(run_seed: int, step: int, prompt: int, sample: int, turn: int = 0) -> int:
    """A 31-bit seed for one request.

    Args:
        run_seed: `grpo.seed`.
        step: RL step, from 0; validation adds `VALIDATION_STEP_OFFSET` so that it never shares a draw with training.
        prompt: Number of the prompt inside the step, counting refills of dynamic sampling.
        sample: Number of the sample inside its prompt group.
        turn: Turn of a multi-turn rollout.
    """
    text = f"{run_seed}/{step}/{prompt}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & 0x7FFFFFFF
