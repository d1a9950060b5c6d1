"""Whether the pipelines, clusters, ranks and GPUs that an entry names exist and belong together.

The other checks see only entries that pass this one, so that they need not guard every look-up; one that does not is a
violation of invariant 10 itself. After a lost end of the log (see `gaps`) the scheduler may speak of registrations as
they were earlier, of each until it ends it again; these are taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nemo_rl.time_sharing.history.ledger import Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER


class References:
    """Checks that events name registered pipelines, their clusters and GPUs of the pool, by the `ledger`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: set[str] = set()
        self._unsure: set[str] = set()
        self._gone: set[str] = set()
        """Pipelines whose leave-taking may be in what is lost."""

    def judges(self) -> dict[type, Callable[[Any], str | None]]:
        """By kind of event, a function that returns its fault in words, or None."""
        named = (ev.DemandReported, ev.Leaving, ev.Paused, ev.Resumed, ev.Fenced)
        clustered = (ev.Requested, ev.RequestDropped, ev.PriorityChanged, ev.Released)
        return {
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
        self._gone = self._ledger.clusters.keys() - self._unsure

    def _registered(self, event: ev.Registered) -> str | None:
        infer = next((cluster for cluster in event.clusters if cluster.name == ACTOR_INFER), None)
        if infer is None or infer.tp_size < 1 or len(infer.gpus) % infer.tp_size:
            return f"{event.pipeline} is registered without {ACTOR_INFER} ranks of whole GPUs"
        for cluster in event.clusters:
            outside = self._inside(cluster.gpus)
            if outside is not None:
                return f"{event.pipeline}/{cluster.name} is registered: {outside}"
        twice = event.pipeline in self._known and event.pipeline not in self._unsure
        self._unsure.discard(event.pipeline)
        self._gone.discard(event.pipeline)
        self._known.add(event.pipeline)
        return f"{event.pipeline} is registered while it is registered" if twice else None

    def _unregistered(self, event: ev.Unregistered) -> str | None:
        problem = self._of(event.pipeline)
        self._known.discard(event.pipeline)
        return problem

    def _of(self, pipeline: str) -> str | None:
        if pipeline in self._known:
            return None
        if pipeline in self._gone:
            self._gone.discard(pipeline)
            self._known.add(pipeline)
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
        size = self._ledger.pool.size
        outside = sorted(gpu for gpu in gpus if not 0 <= gpu < size)
        return f"GPU {outside[0]} is outside the pool of {size}" if outside else None

    def _rank(self, pipeline: str, rank: int) -> str | None:
        infer = self._ledger.clusters[pipeline][ACTOR_INFER]
        ranks = len(infer.gpus) // infer.tp_size
        return None if 0 <= rank < ranks else f"{pipeline} has no rank {rank}, its ranks are 0..{ranks - 1}"

    def _cluster(
        self, event: ev.Requested | ev.RequestDropped | ev.PriorityChanged | ev.Released | ev.Granted
    ) -> str | None:
        problem = self._of(event.pipeline)
        if problem is None and (
            event.cluster not in self._ledger.clusters[event.pipeline] or event.cluster == ACTOR_INFER
        ):
            problem = f"{event.pipeline} has no fixed cluster {event.cluster!r}"
        return problem

    def _placed(self, event: ev.Claimed | ev.ClaimDropped | ev.CommandSent) -> str | None:
        problem = self._of(event.pipeline)
        if problem is None and event.rank >= 0:
            problem = self._rank(event.pipeline, event.rank)
        elif problem is None and event.cluster and event.cluster not in self._ledger.clusters[event.pipeline]:
            problem = f"{event.pipeline} has no cluster {event.cluster!r}"
        return problem

    def _granted(self, event: ev.Granted) -> str | None:
        return self._cluster(event) or self._mapped(event, event.cluster, "granted")

    def _claimed(self, event: ev.Claimed) -> str | None:
        problem = self._placed(event)
        if problem is not None:
            return problem
        if event.cluster == ACTOR_INFER:
            problem = self._rank(event.pipeline, event.rank)
            return problem or self._mapped(event, f"rank {event.rank}", "promised", event.rank)
        if event.rank >= 0 or event.cluster not in self._ledger.clusters[event.pipeline]:
            return f"{event.pipeline} has no rank {event.rank} of {event.cluster!r}"
        return self._mapped(event, event.cluster, "promised")

    def _mapped(self, event: ev.Granted | ev.Claimed, who: str, what: str, rank: int = -1) -> str | None:
        ledger, name = self._ledger, event.pipeline
        mapping = ledger.clusters[name][event.cluster].gpus if rank < 0 else ledger.rank_gpus(name, rank)
        if tuple(event.gpus) == tuple(mapping):
            return None
        return f"{name}/{who} is {what} GPUs {event.gpus}, it is mapped to {mapping}"

    def _command(self, event: ev.CommandSent) -> str | None:
        # Ending processes goes on after their pipeline is gone, and for one whose registration was lost.
        return None if event.verb == "reap" and event.pipeline not in self._known else self._placed(event)
