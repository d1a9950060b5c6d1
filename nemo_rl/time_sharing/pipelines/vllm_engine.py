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

from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm.fleet import EngineFleet, ShardState
from nemo_rl.time_sharing.agents.runtime import EngineError, Ranks
from nemo_rl.time_sharing.pipelines.residents import SlotMemory
from nemo_rl.weight_sync.cache import CacheError
from nemo_rl.weight_sync.transports.base import TransportError

_GATHER_S = 0.05
_KEEP_WEIGHTS = 1
_FAILURES = (WorkerError, TransportError, CacheError, ShardStateError, GenerationError, TimeoutError)


@dataclass(frozen=True)
class FirstSleep:
    """What building an engine showed."""

    seconds: float
    measured: list[SlotMemory]  # memory of each of its devices while it sleeps
    needs: list[int]  # bytes that it needs besides on each when it is awake


FirstSlept = Callable[[int, FirstSleep], None]
"""Is called with a rank whose engine was built and sleeps."""


def build_engine(fleet: EngineFleet, rank: int, on_first_sleep: FirstSlept, level: int | None = None) -> None:
    """Builds the rank's engine where none stands, and puts it to sleep: its next wake, which may follow a neighbour's
    training, is not the first use that it makes of an allocator.

    Args:
        on_first_sleep: Hears what it leaves on its devices while it sleeps.

    Raises WorkerError: it did not start, or did not fall asleep.
    """
    began = time.monotonic()
    if not fleet.build([rank]):
        return
    awake: list[int] = fleet.call([rank], "memory_in_use")[0]
    fleet.sleep([rank], level)
    used, free = (fleet.call([rank], what)[0] for what in ("memory_in_use", "free_memory"))
    measured = [SlotMemory(stays, stays + rest) for stays, rest in zip(used, free, strict=True)]
    needs = [max(0, before - stays) for before, stays in zip(awake, used, strict=True)]
    on_first_sleep(rank, FirstSleep(time.monotonic() - began, measured, needs))


class BuildableEngines:
    """The shards of one generation backend while there are no weights for them: they can be built and sleep.
    `on_first_sleep`: see `build_engine`. `level`: at which they sleep; the configured one by default.
    """

    def __init__(self, fleet: EngineFleet, on_first_sleep: FirstSlept, level: int | None = None) -> None:
        self._fleet, self._on_first_sleep, self._level = fleet, on_first_sleep, level

    def drain(self, rank: int) -> None:
        """Ends the rank's requests, which go on elsewhere with the tokens they have, and waits until it is idle."""
        with engine_errors(f"drain of rank {rank}"):
            self._fleet.drain([rank])
        if self._fleet.state(rank) is ShardState.FAILED:
            raise EngineError(f"rank {rank} did not end its requests")

    def sleep(self, rank: int) -> None:
        """Gives the rank's memory back, and verifies it."""
        with engine_errors(f"sleep of rank {rank}"):
            self._fleet.sleep([rank], self._level)
        if self._fleet.state(rank) not in (ShardState.ASLEEP, ShardState.UNBUILT):
            raise EngineError(f"rank {rank} failed while it was put to sleep")

    def wake(self, rank: int) -> None:
        """Builds the rank's engine where none stands; it sleeps on."""
        with engine_errors(f"build of rank {rank}"):
            build_engine(self._fleet, rank, self._on_first_sleep, self._level)

    def load(self, rank: int, version: int) -> int:
        """There is nothing to load yet. Raises EngineError: always."""
        raise EngineError(f"rank {rank} cannot be loaded: the pipeline is still initialising and has no weights")

    def set_routable(self, rank: int, active: bool) -> None:
        """Routes the rank or takes it out of routing; returns at once."""
        self._fleet.set_routable(rank, active)

    def ended(self, rank: int) -> None:
        """The rank's processes were ended from outside: its requests go on elsewhere, and its next wake builds it."""
        self._fleet.fail({rank: "its processes were ended by the scheduler"})


class VllmEngine(BuildableEngines):
    """Implements `runtime.Engine` over the shards of one generation backend. `version`: the version that the weight
    cache serves; None before the first. `on_first_sleep`: see `build_engine`.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        elastic: ElasticGeneration,
        version: Callable[[], int | None],
        on_first_sleep: FirstSlept,
    ) -> None:
        super().__init__(fleet, on_first_sleep)
        self._elastic, self._version = elastic, version
        self._loads = Together(self._load_all, _GATHER_S)

    def wake(self, rank: int) -> None:
        """Makes room for the rank's weights: wakes its engine, or builds one where none stands."""
        with engine_errors(f"wake of rank {rank}"):
            build_engine(self._fleet, rank, self._on_first_sleep)
            self._elastic.wake_weights([rank])

    def load(self, rank: int, version: int) -> int:
        """Brings the cached weights to a rank that woke, or to one that serves; the version they are, `version` or a
        newer one.
        """
        self._loads.run(rank)
        served = self._version()
        return version if served is None else max(version, served)

    def _load_all(self, ranks: Sequence[int]) -> dict[int, str]:
        serving = [rank for rank in ranks if self._fleet.state(rank) is ShardState.ACTIVE]
        woken = [rank for rank in ranks if rank not in serving]
        failed: dict[int, str] = {}
        with engine_errors(f"load of ranks {list(ranks)}"):
            if serving:
                failed |= self._elastic.refresh(serving).failed
            if woken:
                failed |= self._elastic.expand(woken, routes=False).failed
        return failed


class FixedWeights(BuildableEngines):
    """Implements `runtime.Engine` over shards that loaded their model from disk, and keep it on the host while they
    sleep. `on_first_sleep`: see `build_engine`.
    """

    def __init__(self, fleet: EngineFleet, on_first_sleep: FirstSlept) -> None:
        super().__init__(fleet, on_first_sleep, _KEEP_WEIGHTS)

    def wake(self, rank: int) -> None:
        """Wakes the rank's engine, or builds one where none stands."""
        with engine_errors(f"wake of rank {rank}"):
            build_engine(self._fleet, rank, self._on_first_sleep, _KEEP_WEIGHTS)
            self._fleet.wake([rank])

    def load(self, rank: int, version: int) -> int:
        """Its weights came with it."""
        with engine_errors(f"load of rank {rank}"):
            self._fleet.accept([rank])
        return version


class EngineSlot:
    """Stands for the engines of a pipeline until they can be built: the scheduler wakes no rank without demand."""

    def __init__(self) -> None:
        self._engine: Ranks | None = None

    def put(self, engine: Ranks) -> None:
        """From here on commands reach these engines."""
        self._engine = engine

    @property
    def engine(self) -> Ranks:
        """The engines. Raises EngineError: they cannot be built yet."""
        if self._engine is None:
            raise EngineError("the pipeline is still initialising; it has asked for no generation yet")
        return self._engine

    def drain(self, rank: int) -> None:
        self.engine.drain(rank)

    def sleep(self, rank: int) -> None:
        self.engine.sleep(rank)

    def wake(self, rank: int) -> None:
        self.engine.wake(rank)

    def load(self, rank: int, version: int) -> int:
        return self.engine.load(rank, version)

    def set_routable(self, rank: int, active: bool) -> None:
        self.engine.set_routable(rank, active)

    def ended(self, rank: int) -> None:
        """See `VllmEngine`; nothing to forget where nothing was built."""
        if self._engine is not None:
            self._engine.ended(rank)


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
