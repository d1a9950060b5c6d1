"""A pipeline's generation ranks as live vLLM shards: what the agent's commands do to engines.

Several loads that arrive together become one sync session. Invariants: an engine is built, woken, loaded or put to
sleep only by a command, hence under a lease; it has slept once under the lease that it was built under; a rank becomes
routable only after a load; routing changes never wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm.fleet import EngineFleet, ShardState
from nemo_rl.time_sharing.agents.runtime import EngineError
from nemo_rl.time_sharing.pipelines.residents import SlotMemory
from nemo_rl.weight_sync.cache import CacheError
from nemo_rl.weight_sync.transports import TransportError

_GATHER_S = 0.05
_KEEP_WEIGHTS = 1
_FAILURES = (WorkerError, TransportError, CacheError, ShardStateError, GenerationError, TimeoutError)


@dataclass(frozen=True)
class FirstSleep:
    """What building an engine showed."""

    seconds: float
    measured: list[SlotMemory]  # memory of each of its devices while it sleeps
    needs: list[int]  # bytes that it needs besides on each when it is awake


class _Engines(NamedTuple):
    fleet: EngineFleet
    elastic: ElasticGeneration | None  # where they get weights of a cache
    fixed: bool  # whether their weights come from disk, and stay on the host while they sleep


class EngineSlot:
    """A pipeline's generation ranks, as `runtime.Ranks`. Commands are refused until `put` has said what can be built;
    until it has said where weights come from, a wake builds an engine, which sleeps on.

    Args:
        on_first_sleep: Called with each rank whose engine was built and sleeps.
    """

    def __init__(self, on_first_sleep: Callable[[int, FirstSleep], None]) -> None:
        self._on_first_sleep = on_first_sleep
        self._engines: _Engines | None = None
        self._loads = Together(self._load_all, _GATHER_S)

    def put(self, fleet: EngineFleet, elastic: ElasticGeneration | None = None, *, fixed: bool = False) -> None:
        """From here on commands reach these engines.

        Args:
            elastic: Brings them the weights of a cache.
            fixed: Whether they have loaded their model from disk, and keep it on the host while they sleep.
        """
        self._engines = _Engines(fleet, elastic, fixed)

    def _found(self) -> _Engines:
        if self._engines is None:
            raise EngineError("the pipeline is still initialising; it has asked for no generation yet")
        return self._engines

    def drain(self, rank: int) -> None:
        """Ends the rank's requests, which go on elsewhere with the tokens they have, and waits until it is idle."""
        fleet = self._found().fleet
        with engine_errors(f"drain of rank {rank}"):
            fleet.drain([rank])
        if fleet.state(rank) is ShardState.FAILED:
            raise EngineError(f"rank {rank} did not end its requests")

    def sleep(self, rank: int) -> None:
        """Gives the rank's memory back, and verifies it."""
        fleet, _, fixed = self._found()
        with engine_errors(f"sleep of rank {rank}"):
            fleet.sleep([rank], _KEEP_WEIGHTS if fixed else None)
        if fleet.state(rank) not in (ShardState.ASLEEP, ShardState.UNBUILT):
            raise EngineError(f"rank {rank} failed while it was put to sleep")

    def wake(self, rank: int) -> None:
        """Makes room for the rank's weights: wakes its engine, or builds one where none stands."""
        fleet, elastic, fixed = self._found()
        with engine_errors(f"{'wake' if elastic or fixed else 'build'} of rank {rank}"):
            self._build(fleet, rank, _KEEP_WEIGHTS if fixed else None)
            if elastic is not None:
                elastic.wake_weights([rank])
            elif fixed:
                fleet.wake([rank])

    def _build(self, fleet: EngineFleet, rank: int, level: int | None) -> None:
        """Builds the rank's engine where none stands, and puts it to sleep, so that its first wake under load does not
        pay for the warm-up of an allocator.
        """
        began = time.monotonic()
        if not fleet.build([rank]):
            return
        awake: list[int] = fleet.call([rank], "memory_in_use")[0]
        fleet.sleep([rank], level)
        used, free = (fleet.call([rank], what)[0] for what in ("memory_in_use", "free_memory"))
        measured = [SlotMemory(stays, stays + rest) for stays, rest in zip(used, free, strict=True)]
        needs = [max(0, before - stays) for before, stays in zip(awake, used, strict=True)]
        self._on_first_sleep(rank, FirstSleep(time.monotonic() - began, measured, needs))

    def load(self, rank: int, version: int) -> int:
        """Brings the cached weights to a rank that woke, or to one that serves; the version they are, `version` or a
        newer one. Fixed weights came with the rank. Raises EngineError: there are no weights yet, or it failed.
        """
        fleet, elastic, fixed = self._found()
        if fixed:
            with engine_errors(f"load of rank {rank}"):
                fleet.accept([rank])
            return version
        if elastic is None:
            raise EngineError(f"rank {rank} cannot be loaded: the pipeline is still initialising and has no weights")
        self._loads.run(rank)
        return max(version, elastic.cache.version or 0)

    def _load_all(self, ranks: Sequence[int]) -> dict[int, str]:
        fleet, elastic, _ = self._found()
        serving = [rank for rank in ranks if fleet.state(rank) is ShardState.ACTIVE]
        woken = [rank for rank in ranks if rank not in serving]
        failed: dict[int, str] = {}
        with engine_errors(f"load of ranks {list(ranks)}"):
            if serving and elastic is not None:
                failed |= elastic.refresh(serving).failed
            if woken and elastic is not None:
                failed |= elastic.expand(woken, routes=False).failed
        return failed

    def set_routable(self, rank: int, active: bool) -> None:
        """Routes the rank or takes it out of routing; returns at once."""
        self._found().fleet.set_routable(rank, active)

    def ended(self, rank: int) -> None:
        """The rank's processes were ended from outside: its requests go on elsewhere, and its next wake builds it."""
        if self._engines is not None:
            self._engines.fleet.fail({rank: "its processes were ended by the scheduler"})


class Together:
    """Runs what several threads ask for within a short time as one call.

    Args:
        work: Does it for a list of ranks; those that failed and why. What it raises, every rank of the call gets.
        gather_s: How long the first asker waits for others.
    """

    def __init__(self, work: Callable[[Sequence[int]], dict[int, str]], gather_s: float) -> None:
        self._work, self._gather_s = work, gather_s
        self._lock = threading.Lock()
        self._asked: dict[int, Future[None]] = {}
        self._turn = threading.Lock()

    def run(self, rank: int) -> None:
        """Returns once the call that this rank is part of has ended well for it. Raises EngineError: it has not."""
        with self._lock:
            first = not self._asked
            answer = self._asked.setdefault(rank, Future())
        if first:
            threading.Event().wait(self._gather_s)
            # One call at a time: who comes while it runs is gathered for the next.
            with self._turn:
                with self._lock:
                    asked = dict(self._asked)
                    self._asked.clear()
                self._answer(asked)
        answer.result()

    def _answer(self, asked: dict[int, Future[None]]) -> None:
        try:
            failed = self._work(sorted(asked))
        except BaseException as error:
            for answer in asked.values():
                answer.set_exception(error)
            if not isinstance(error, EngineError):
                raise
            return
        for rank, answer in asked.items():
            if rank in failed:
                answer.set_exception(EngineError(f"rank {rank}: {failed[rank]}"))
            else:
                answer.set_result(None)


@contextmanager
def engine_errors(what: str) -> Generator[None]:
    try:
        yield
    except _FAILURES as error:
        raise EngineError(f"{what}: {error}") from error
