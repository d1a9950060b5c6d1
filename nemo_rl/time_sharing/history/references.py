"""Whether the pipelines, clusters, ranks and GPUs that an entry names exist and belong together.

The other checks see only entries that pass this one, so that they need not guard every look-up; one that does not is a
violation of invariant 10 itself. After a lost end of the log (see `gaps`) the scheduler may speak of registrations as
they were earlier, of each until it ends it again; these are taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec


class _Shape(NamedTuple):
    clusters: dict[str, tuple[int, ...]]
    tp: int

    @property
    def ranks(self) -> int:
        return len(self.clusters[ACTOR_INFER]) // self.tp


class References:
    """Checks that events name registered pipelines, their clusters and GPUs of the pool."""

    def __init__(self) -> None:
        self.opened = False
        self._size = 0
        self._known: dict[str, _Shape] = {}
        self._past: dict[str, _Shape] = {}
        self._unsure: set[str] = set()
        self._gone: set[str] = set()
        """Pipelines whose leave-taking may be in what is lost."""

    def judges(self) -> dict[type, Callable[[Any], str | None]]:
        """By kind of event, a function that returns its fault in words, or None."""
        named = (ev.DemandReported, ev.Leaving, ev.Paused, ev.Resumed, ev.Fenced)
        clustered = (ev.Requested, ev.RequestDropped, ev.PriorityChanged, ev.Released)
        return {
            ev.PoolOpened: self._opened,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            **dict.fromkeys(named, self._named),
            **dict.fromkeys(clustered, self._cluster),
            ev.Granted: self._granted,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._placed,
            ev.RankMoved: self._ranked,
            ev.RankCooling: self._ranked,
            ev.CommandSent: self._command,
            ev.GpusQuarantined: self._gpus,
            ev.GpusCleared: self._gpus,
        }

    def tail_lost(self) -> None:
        """From here on the scheduler may have forgotten earlier entries."""
        self._unsure = set(self._known)
        self._gone = set(self._past) - self._unsure

    def _opened(self, event: ev.PoolOpened) -> str | None:
        self.opened, self._size = True, event.pool.size
        return None

    def _registered(self, event: ev.Registered) -> str | None:
        clusters: dict[str, ClusterSpec] = {cluster.name: cluster for cluster in event.clusters}
        infer = clusters.get(ACTOR_INFER)
        if infer is None or infer.tp_size < 1 or len(infer.gpus) % infer.tp_size:
            return f"{event.pipeline} is registered without {ACTOR_INFER} ranks of whole GPUs"
        for cluster in event.clusters:
            outside = self._inside(cluster.gpus)
            if outside is not None:
                return f"{event.pipeline}/{cluster.name} is registered: {outside}"
        twice = event.pipeline in self._known and event.pipeline not in self._unsure
        self._unsure.discard(event.pipeline)
        self._gone.discard(event.pipeline)
        self._known[event.pipeline] = self._past[event.pipeline] = _Shape(
            {name: tuple(spec.gpus) for name, spec in clusters.items()}, infer.tp_size
        )
        return f"{event.pipeline} is registered while it is registered" if twice else None

    def _unregistered(self, event: ev.Unregistered) -> str | None:
        problem = self._of(event.pipeline)
        self._known.pop(event.pipeline, None)
        return problem

    def _of(self, pipeline: str) -> str | None:
        if pipeline in self._known:
            return None
        if pipeline in self._gone:
            self._gone.discard(pipeline)
            self._known[pipeline] = self._past[pipeline]
            self._unsure.add(pipeline)
            return None
        return f"pipeline {pipeline!r} is not registered"

    def _named(self, event: ev.DemandReported | ev.Leaving | ev.Paused | ev.Resumed | ev.Fenced) -> str | None:
        return self._of(event.pipeline)

    def _ranked(self, event: ev.RankMoved | ev.RankCooling) -> str | None:
        return self._of(event.pipeline) or self._rank(event.pipeline, event.rank)

    def _gpus(self, event: ev.GpusQuarantined | ev.GpusCleared) -> str | None:
        return self._inside(event.gpus)

    def _inside(self, gpus: Iterable[int]) -> str | None:
        outside = sorted(gpu for gpu in gpus if not 0 <= gpu < self._size)
        return f"GPU {outside[0]} is outside the pool of {self._size}" if outside else None

    def _rank(self, pipeline: str, rank: int) -> str | None:
        ranks = self._known[pipeline].ranks
        return None if 0 <= rank < ranks else f"{pipeline} has no rank {rank}, its ranks are 0..{ranks - 1}"

    def _cluster(
        self, event: ev.Requested | ev.RequestDropped | ev.PriorityChanged | ev.Released | ev.Granted
    ) -> str | None:
        problem = self._of(event.pipeline)
        if problem is None and (
            event.cluster not in self._known[event.pipeline].clusters or event.cluster == ACTOR_INFER
        ):
            problem = f"{event.pipeline} has no fixed cluster {event.cluster!r}"
        return problem

    def _placed(self, event: ev.Claimed | ev.ClaimDropped | ev.CommandSent) -> str | None:
        problem = self._of(event.pipeline)
        if problem is None and event.rank >= 0:
            problem = self._rank(event.pipeline, event.rank)
        elif problem is None and event.cluster and event.cluster not in self._known[event.pipeline].clusters:
            problem = f"{event.pipeline} has no cluster {event.cluster!r}"
        return problem

    def _granted(self, event: ev.Granted) -> str | None:
        problem = self._cluster(event)
        return problem or self._mapped(
            f"{event.pipeline}/{event.cluster}",
            "granted",
            event.gpus,
            self._known[event.pipeline].clusters[event.cluster],
        )

    def _claimed(self, event: ev.Claimed) -> str | None:
        problem = self._placed(event)
        if problem is not None:
            return problem
        shape = self._known[event.pipeline]
        if event.cluster == ACTOR_INFER:
            first = event.rank * shape.tp
            problem = self._rank(event.pipeline, event.rank)
            return problem or self._mapped(
                f"{event.pipeline}/rank {event.rank}",
                "promised",
                event.gpus,
                shape.clusters[ACTOR_INFER][first : first + shape.tp],
            )
        if event.rank >= 0 or event.cluster not in shape.clusters:
            return f"{event.pipeline} has no rank {event.rank} of {event.cluster!r}"
        return self._mapped(f"{event.pipeline}/{event.cluster}", "promised", event.gpus, shape.clusters[event.cluster])

    def _mapped(self, who: str, what: str, gpus: tuple[int, ...], mapping: tuple[int, ...]) -> str | None:
        return None if tuple(gpus) == mapping else f"{who} is {what} GPUs {gpus}, it is mapped to {mapping}"

    def _command(self, event: ev.CommandSent) -> str | None:
        # Ending processes goes on after their pipeline is gone, and for one whose registration was lost.
        return None if event.verb == "reap" and event.pipeline not in self._known else self._placed(event)
