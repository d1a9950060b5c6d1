"""Shards of a generation backend as the targets of a sync session.

Sends a session's calls to the workers of its shards only, and reports which failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_calls import WorkerError, WorkerIdentity, wait_for_workers, worker_failure
from nemo_rl.models.generation.interfaces import ShardStateError
from nemo_rl.models.generation.vllm.shard_state import Shard, ShardState, is_lost

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_ABSENT = (ShardState.UNBUILT, ShardState.ASLEEP, ShardState.FAILED)
_ANSWER_S = 30.0
_CULPRITS_S = 5.0
_STAGING_MARGIN = 1.2


class Target(NamedTuple):
    """A shard that is to take weights."""

    shard: int
    worker: ActorHandle[object]
    identity: WorkerIdentity
    known: Shard  # what its fleet knows of it


class ShardTargets:
    """Targets of one session.

    Args:
        state: Where a shard is now.
        recompute_kv: Whether running requests recompute keys and values under the new weights.

    Attributes:
        culprits: After a failure, the shards that caused it and their errors.
        died: Whether the culprits are gone rather than raised.
    """

    def __init__(
        self, targets: Sequence[Target], state: Callable[[int], ShardState], *, recompute_kv: bool = True
    ) -> None:
        self.shards = tuple(target.shard for target in targets)
        self._state, self._known = state, [target.known for target in targets]
        self._workers = [target.worker for target in targets]
        self._identities = [target.identity for target in targets]
        self._devices = [[rank["device"] for rank in known.ranks] for known in self._known]
        self._recompute_kv, self._staged = recompute_kv, False
        self.culprits: dict[int, str] = {}
        self.died = False

    def devices(self) -> list[str]:
        """Device identity of every engine rank, shard by shard."""
        return [device for shard in self._devices for device in shard]

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        """Id of the group that each engine rank holds from a session before, in the order of `devices`."""
        refs: list[ObjectRef[object]] = [worker.kept_groups.remote(timeout_s=timeout_s) for worker in self._workers]
        return [held for shard in self._wait(refs, "kept_groups", timeout_s) for held in shard]

    def begin(self, session: dict[str, object], routes: Sequence[dict[str, object]], timeout_s: float) -> None:
        """Opens the session on every target, each rank by its own route. Raises ShardStateError: a target sleeps or is
        quarantined; WorkerError: a target refused: its version is newer, or another session is open.
        """
        states = {shard: self._state(shard) for shard in self.shards}
        out = {shard: state.value for shard, state in states.items() if state in _ABSENT}
        if out:
            # One may have died since it was chosen.
            self.culprits = {shard: "it is quarantined" for shard, state in out.items() if state == "failed"}
            self.died = bool(self.culprits)
            raise ShardStateError(
                f"session {session['id']} cannot sync shards that are {out}; wake their weights first, or "
                "leave them out"
            )
        self._staged = bool(session["staged"])
        message = session | {"recompute_kv": self._recompute_kv}
        refs: list[ObjectRef[object]] = []
        first = 0
        for worker, devices in zip(self._workers, self._devices, strict=True):
            refs.append(
                worker.begin_sync.remote(
                    session=message, routes=list(routes[first : first + len(devices)]), timeout_s=timeout_s
                )
            )
            first += len(devices)
        self._wait(refs, "begin_sync", timeout_s)

    def receive_window(self, window: dict[str, object], timeout_s: float) -> None:
        """Takes a window on every target."""
        if not self._staged:
            self._have(None, half_new=True)
        self._wait(
            [worker.receive_window.remote(window=window, timeout_s=timeout_s) for worker in self._workers],
            "receive_window",
            timeout_s,
        )

    def finish(self, version: int, timeout_s: float) -> list[float]:
        """Finalises every target; seconds for which each stopped serving."""
        # What was staged is loaded here.
        self._have(None, half_new=True)
        pauses_s = self._wait(
            [worker.finish_sync.remote(version=version, timeout_s=timeout_s) for worker in self._workers],
            "finish_sync",
            timeout_s,
        )
        self._have(version)
        return pauses_s

    def _have(self, version: int | None, *, half_new: bool = False) -> None:
        for known in self._known:
            known.has(version, half_new=half_new)

    def abort(self, session_id: str) -> None:
        """Ends the session on every target that still answers."""
        refs: list[ObjectRef[object]] = [worker.abort_sync.remote(session_id) for worker in self._workers]
        ray.wait(refs, num_returns=len(refs), timeout=30.0)

    def staging_fits(self, nbytes: int) -> bool:
        """Whether every target has memory for a second copy of the weights."""
        free = self._wait([worker.free_memory.remote() for worker in self._workers], "free_memory", _ANSWER_S)
        # Copies on one device add up: on a GPU that several engines share, in the one memory of a host's CPU slots.
        copies = Counter(self.devices())
        return all(
            rank > _STAGING_MARGIN * nbytes * copies[device]
            for shard, devices in zip(free, self._devices, strict=True)
            for rank, device in zip(shard, devices, strict=True)
        )

    def _wait(self, refs: list[ObjectRef[object]], what: str, timeout_s: float) -> list[Any]:
        try:
            return wait_for_workers(refs, self._identities, what=f"generation.{what}", timeout_s=timeout_s)
        except WorkerError:
            ended, _ = ray.wait(refs, num_returns=len(refs), timeout=_CULPRITS_S)
            failures = {
                shard: worker_failure(ref, who, what)
                for shard, ref, who in zip(self.shards, refs, self._identities, strict=True)
                if ref in ended
            }
            lost = {shard: failure for shard, failure in failures.items() if failure is not None and is_lost(failure)}
            if lost:
                # The others may wait for the dead one, in a collective for example: it alone is to blame.
                self.culprits, self.died = {shard: first_line(failure) for shard, failure in lost.items()}, True
                raise
            self.culprits = {shard: first_line(failure) for shard, failure in failures.items() if failure is not None}
            # Beside one that raised, the others wait for it; where none did, those that do not answer hang.
            self.died = not self.culprits
            self.culprits |= {
                shard: f"no answer to {what}" for shard, ref in zip(self.shards, refs, strict=True) if ref not in ended
            }
            raise
