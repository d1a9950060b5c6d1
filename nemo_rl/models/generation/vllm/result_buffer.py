"""What one client of a generation worker waits for: results and failures, until they are fetched in one list.

Knows no engine beyond the name of its fatal error. Invariant: what is put in is fetched once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from nemo_rl.models.generation.interfaces import GenerationResult
from nemo_rl.models.generation.vllm.parent_watchdog import last_errors


@dataclass(frozen=True)
class RequestFailure:
    """A request that ended without a result; `engine_dead` when no other request can be served either."""

    request_id: str
    message: str
    engine_dead: bool = False


def is_engine_death(error: BaseException | None) -> bool:
    """Whether an error of a request or call says that the engine's own process is gone."""
    return error is not None and (type(error).__name__ == "EngineDeadError" or "root cause" in str(error))


def failure_of(request_id: str, error: BaseException) -> RequestFailure:
    """The error as text; where it only says that the engine is gone, also what the engine itself said."""
    text = f"{type(error).__name__}: {error}"
    if not is_engine_death(error):
        return RequestFailure(request_id, text)
    said = last_errors()
    more = (
        f"\nThe engine's own errors:\n{said}"
        if said
        else " The engine's processes left no message: they were killed from outside."
    )
    return RequestFailure(request_id, text + more, engine_dead=True)


@dataclass
class ResultBuffer:
    """Finished results of one client, and the signal that there are some."""

    results: list[GenerationResult | RequestFailure] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, result: GenerationResult | RequestFailure) -> None:
        """Adds a result, and says so."""
        self.results.append(result)
        self.ready.set()
