"""Waiting on the event loop that dispatches requests, and for it from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl.models.generation.interfaces import GenerationError

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")

# Every request has a deadline of its own; this one only ends a wait for rollouts whose loop hangs.
LOOP_TIMEOUT_S = 6 * 3600.0


async def answer_of(ref: ObjectRef[object]) -> Any:
    """What an actor answers, as a coroutine that can have a deadline."""
    return await ref


def wait_on_loop(work: Coroutine[object, object, T], loop: asyncio.AbstractEventLoop, timeout_s: float) -> T:
    """Runs a coroutine on a dispatcher's loop, from another thread, and waits. Raises GenerationError: it has not ended
    after `timeout_s`, and was cancelled.
    """
    name = getattr(work, "__qualname__", type(work).__name__)
    future = asyncio.run_coroutine_threadsafe(work, loop)
    done, _ = wait([future], timeout=timeout_s)
    if not done:
        future.cancel()
        raise GenerationError(
            f"the loop that dispatches requests did not finish {name} within {timeout_s:.0f} s: it is blocked, or what "
            "it waits for hangs"
        )
    return future.result()
