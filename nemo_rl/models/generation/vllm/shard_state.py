"""What an `EngineFleet` knows of one shard."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_rl.distributed.worker_calls import WorkerDiedError, WorkerError, WorkerTimeoutError
from nemo_rl.models.generation.vllm.request_state import is_engine_death


class ShardState(Enum):
    """Where a shard is on its way."""

    UNBUILT = "unbuilt"  # its actor stands, its engine was never started
    ASLEEP = "asleep"
    WAKING = "waking"  # its weights are resident, its KV cache is not
    INACTIVE = "inactive"  # awake, takes no requests
    ACTIVE = "active"
    FAILED = "failed"  # quarantined until it is built again


@dataclass
class Shard:
    """What is known of a shard but whether it failed, which the dispatcher finds out."""

    state: ShardState
    version: int | None = None  # of its weights; None where it has none, or its version is not known
    half_new: bool = False  # whether a session broke off that may have replaced some of its weights
    freed: int = 0  # bytes that its last sleep gave back
    kept_at_first: int | None = None  # bytes that a rank of its engine kept at its first sleep
    outgrown: bool = False  # whether it keeps too much since, so that it is rebuilt before it wakes
    ranks: list[dict[str, Any]] = field(default_factory=list)  # device and process id of each rank of its engine
    starts: int = 0  # by `build` and `rebuild`
    attempts: int = 0  # rebuilds that failed since its engine last stood
    build: Future[None] | None = None  # the rebuild under way

    def has(self, version: int | None, *, half_new: bool = False) -> None:
        """Writes down what weights it has from here on."""
        self.version, self.half_new = version, half_new


def is_lost(error: WorkerError) -> bool:
    """Whether a failure means that the shard is gone: its process or engine died, or it does not answer."""
    return isinstance(error, (WorkerDiedError, WorkerTimeoutError)) or is_engine_death(error.__cause__)
