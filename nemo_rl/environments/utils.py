"""The path under which NeMo-RL's code imports the environment registry, and the sharing-out of work among verifiers.

Decides nothing beyond the cut of a list. Invariant: the chunks joined are the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nemo_rl.environments.registry import create_env, register_env
from nemo_rl.lazy import names_of

__all__ = ["chunk_list_to_workers", "create_env", "register_env"]
Item = TypeVar("Item")


def chunk_list_to_workers(to_chunk: Sequence[Item], num_workers: int) -> list[list[Item]]:
    """Cuts a list into at most `num_workers` runs of nearly equal length, without empty ones."""
    whole, rest = divmod(len(to_chunk), num_workers)
    chunks: list[list[Item]] = []
    start = 0
    for worker in range(num_workers):
        end = start + whole + (1 if worker < rest else 0)
        if end > start:
            chunks.append(list(to_chunk[start:end]))
        start = end
    return chunks


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
