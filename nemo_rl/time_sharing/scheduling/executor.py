"""Carries plans out: one state machine per generation rank and per claim, each step a command with a deadline.

A rank rises by SERVE and falls by VACATE, each answered once; what its engine does in between is the job's own. BUILD
has an engine built ahead of its first rise. A claim becomes a lease at the moment when the last of its GPUs is free.
Steps of different pipelines wait for each other only through a GPU they hand over. Commands are repeated until
answered, which is safe because they are idempotent; one that fails or expires costs a rank or its pipeline, never more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import Claim, HeldCluster, PipelineState, SchedulerState
from nemo_rl.time_sharing.planning.plan import Plan
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, SLEEP_PHASES, Answer, Command, CommandOutcome, Phase, Verb

logger = logging.getLogger(__name__)

_EPOCHS_PER_TERM = 1 << 32
_MEANS = {
    Phase.BUILDING: Verb.BUILD,
    Phase.RISING: Verb.SERVE,
    Phase.FALLING: Verb.VACATE,
    Phase.FAILED: Verb.REAP,
}
"""The command by which a rank leaves a phase."""


@dataclass(slots=True)
class _Outgoing:
    command: Command
    resend_at: float


class Executor:
    """Moves ranks and claims. `emit` writes an event and folds it into `state`; `send` hands a command to the network,
    which may lose it.
    """

    def __init__(
        self,
        state: SchedulerState,
        emit: Callable[[object], None],
        send: Callable[[Command], None],
        now: Callable[[], float],
    ) -> None:
        self._state, self._emit, self._send, self._now = state, emit, send, now
        self._outgoing: dict[str, _Outgoing] = {}
        self._of_rank: dict[tuple[str, int], str] = {}
        self._commands = 0
        # The last epoch in which a rank woke and has gone to sleep since, or was ended: (pipeline, incarnation, rank).
        self.slept: dict[tuple[str, int, int], int] = {}

    def start(self, plan: Plan) -> None:
        """Begins everything a plan asks for."""
        number = self._state.plan + 1
        for change_priority in plan.priority_changes:
            self._change_priority(change_priority.pipeline, change_priority.cluster)
        for shrink in plan.shrinks:
            self.begin_shrink(shrink.pipeline, shrink.rank)
        for grant in plan.grants:
            self._emit(ev.Claimed(number, grant.pipeline, grant.cluster, -1, grant.request, grant.gpus, grant.passed))
            self._lease_if_free(self._state.claims[grant.pipeline, grant.cluster, -1])
        for expand in plan.expands:
            what = (number, expand.pipeline, ACTOR_INFER, expand.rank, -1, expand.gpus)
            self._emit(ev.Claimed(*what, guaranteed=expand.guaranteed, ahead=expand.ahead))
            self._lease_if_free(self._state.claims[expand.pipeline, ACTOR_INFER, expand.rank])

    def begin_shrink(self, name: str, rank: int) -> None:
        """Sends a rank to sleep from whatever it is doing. A rising rank is turned round: the agent finishes its step
        in hand first.
        """
        pipeline = self._state.pipelines[name]
        awake = pipeline.awake[rank]
        if awake.phase in SLEEP_PHASES:
            return
        limits = self._state.limits
        deadline_s = limits.deadline_of(Verb.VACATE, pipeline.spec.drain_s)
        if awake.phase is not Phase.SERVING:
            deadline_s += limits.sync_s
        self._end_command_of(name, rank, "superseded")
        self._fall(pipeline, rank, deadline_s)

    def begin_cooling(self, name: str, rank: int) -> None:
        """Sends a rank that cannot serve to sleep and leaves it alone for a while."""
        if self._state.pipelines[name].awake[rank].phase not in SLEEP_PHASES:
            self._emit(ev.RankCooling(name, rank, self._now() + self._state.limits.quarantine_s))
            self.begin_shrink(name, rank)

    def answer(self, answer: Answer) -> bool:
        """Takes an answer. One to a command that has ended (superseded, expired, fenced), or of another incarnation,
        changes nothing: False.
        """
        pending = self._state.commands.get(answer.command)
        if pending is None or (pending.pipeline, pending.incarnation) != (answer.pipeline, answer.incarnation):
            return False
        self._end(pending, answer.outcome.value)
        self._after(pending, answer.outcome, answer.version)
        return True

    def tick(self, *, isolated: bool) -> float:
        """Repeats commands without an answer and expires those past their deadline, unless the scheduler is `isolated`;
        returns when to look again.
        """
        now = self._now()
        due = now + self._state.limits.retry_s
        for key in list(self._outgoing):
            outgoing = self._outgoing.get(key)
            pending = self._state.commands.get(key)
            if outgoing is None or pending is None:
                continue
            if now >= pending.deadline and not isolated:
                self._end(pending, "expired")
                self._after(pending, CommandOutcome.FAILED, -1)
            elif now >= outgoing.resend_at:
                outgoing.resend_at = now + self._state.limits.retry_s
                self._send(outgoing.command)
            due = min(due, outgoing.resend_at if isolated else min(pending.deadline, outgoing.resend_at))
        return due

    def drop_claims(self, name: str, reason: str) -> None:
        """Takes back the GPUs that a pipeline was to get next."""
        for claim in [c for c in self._state.claims.values() if c.pipeline == name]:
            self._emit(ev.ClaimDropped(name, claim.cluster, claim.rank, reason))

    def fence(self, name: str, reason: str, *, contested: tuple[int, ...] = ()) -> None:
        """Cuts a pipeline off and has its processes ended; its GPUs come back when that is verified, and so do
        `contested` ones that it occupies though the ledger has given them to others.
        """
        pipeline = self._state.pipelines[name]
        for pending in [
            c for c in self._state.commands.values() if (c.pipeline, c.incarnation) == (name, pipeline.incarnation)
        ]:
            self._end(pending, "fenced")
        self.drop_claims(name, "fenced")
        logger.warning("event=fenced pipeline=%s incarnation=%d reason=%s", name, pipeline.incarnation, reason)
        self._emit(ev.Fenced(name, pipeline.incarnation, reason))
        if contested:
            until = self._now() + self._state.limits.quarantine_s
            self._emit(
                ev.GpusQuarantined(
                    contested, name, pipeline.incarnation, -1, until, "it occupies what the log has given to others"
                )
            )
        self._command(pipeline, Verb.REAP, deadline_s=self._state.limits.reap_s)

    def end_unknown(self, name: str, incarnation: int) -> None:
        """Ends a pipeline that holds GPUs and whose registration is lost."""
        if not any((c.pipeline, c.incarnation) == (name, incarnation) for c in self._state.commands.values()):
            self._raw_command(name, incarnation, Verb.REAP, -1, 0, "", (), self._state.limits.reap_s)

    def retry_quarantined(self) -> None:
        """Tries again to end what occupies quarantined GPUs whose time has come."""
        now = self._now()
        for quarantine in self._state.quarantines:
            busy = any(
                (c.verb, (c.pipeline, c.incarnation, c.rank)) == (Verb.REAP, quarantine.whose)
                for c in self._state.commands.values()
            )
            if now >= quarantine.until and not busy:
                (name, incarnation, rank), seconds = quarantine.whose, self._state.limits.reap_s
                self._raw_command(name, incarnation, Verb.REAP, rank, 0, "", quarantine.gpus, seconds)

    def resume(self) -> None:
        """Resumes after a restart every command and claim that the log leaves open, with new deadlines for the delayed
        ones.
        """
        for pending in list(self._state.commands.values()):
            verb, pipeline = Verb(pending.verb), self._state.pipelines.get(pending.pipeline)
            self._emit(ev.CommandEnded(pending.command, "restarted"))
            if verb is Verb.GRANT and self._granted(pending) is None:
                continue
            self._raw_command(
                pending.pipeline,
                pending.incarnation,
                verb,
                pending.rank,
                pending.epoch,
                pending.cluster,
                pipeline.topology.ranks[pending.rank] if pipeline is not None and pending.rank >= 0 else (),
                self._state.limits.deadline_of(verb, 0.0 if pipeline is None else pipeline.spec.drain_s),
            )
        # The log may end between a phase and the command that belongs to it.
        for name, pipeline in self._state.pipelines.items():
            if pipeline.fenced:
                if not any(
                    (c.pipeline, c.incarnation) == (name, pipeline.incarnation) for c in self._state.commands.values()
                ):
                    self._command(pipeline, Verb.REAP, deadline_s=self._state.limits.reap_s)
                continue
            for rank, awake in list(pipeline.awake.items()):
                if (name, rank) not in self._of_rank and awake.phase is not Phase.SERVING:
                    self._command(pipeline, _MEANS[awake.phase], rank=rank, epoch=awake.epoch)

    def lease_claims(self) -> None:
        """Turns every claim whose GPUs are all free into a lease."""
        for claim in list(self._state.claims.values()):
            self._lease_if_free(claim)

    def new_epoch(self) -> int:
        """Next epoch: larger than any of this scheduler, and than any of schedulers whose log was lost."""
        return max(self._state.epoch, self._state.term * _EPOCHS_PER_TERM) + 1

    def _after(self, pending: ev.CommandSent, outcome: CommandOutcome, version: int) -> None:
        pipeline = self._state.pipelines.get(pending.pipeline)
        verb = Verb(pending.verb)
        if verb is Verb.REAP:
            self._after_reap(pipeline, pending, outcome)
        elif pipeline is None:
            return
        elif verb is Verb.GRANT:
            self._after_grant(pending, outcome)
        elif pending.rank in pipeline.awake:
            self._after_rank_command(pipeline, pending, verb, outcome, version)

    def _granted(self, pending: ev.CommandSent) -> HeldCluster | None:
        """The hold that a GRANT is about; None where it is over, given back before the answer to the GRANT came."""
        pipeline = self._state.pipelines.get(pending.pipeline)
        held = pipeline.held.get(pending.cluster) if pipeline is not None else None
        return held if held is not None and held.epoch == pending.epoch else None

    def _after_grant(self, pending: ev.CommandSent, outcome: CommandOutcome) -> None:
        held = self._granted(pending)
        if outcome is CommandOutcome.DONE or held is None:
            return
        if outcome is CommandOutcome.REFUSED:
            self._emit(ev.Released(pending.pipeline, pending.cluster, held.epoch, -1))
            self.lease_claims_on(held.gpus)
        else:
            self.fence(
                pending.pipeline,
                f"it did not take its grant of {pending.cluster} within {self._state.limits.grant_s:g} s",
            )

    def _after_rank_command(
        self, pipeline: PipelineState, pending: ev.CommandSent, verb: Verb, outcome: CommandOutcome, version: int
    ) -> None:
        """A rank that cannot rise goes back to sleep and cools off; one that cannot fall has its processes ended."""
        name, rank, awake = pending.pipeline, pending.rank, pipeline.awake[pending.rank]
        if outcome is not CommandOutcome.DONE:
            what = (name, rank, verb.value, awake.epoch)
            logger.warning("event=rank_failed pipeline=%s rank=%d step=%s epoch=%d", *what)
        if outcome is CommandOutcome.DONE and verb is Verb.SERVE:
            self._emit(ev.RankMoved(name, rank, Phase.SERVING, awake.epoch, version))
        elif outcome is CommandOutcome.DONE:
            self._asleep(pipeline, rank, awake.epoch)
        elif verb is Verb.VACATE:
            self._emit(ev.RankMoved(name, rank, Phase.FAILED, awake.epoch))
            self._command(pipeline, Verb.REAP, rank=rank, epoch=awake.epoch)
        else:
            self._emit(ev.RankCooling(name, rank, self._now() + self._state.limits.quarantine_s))
            self._fall(pipeline, rank)

    def _fall(self, pipeline: PipelineState, rank: int, deadline_s: float | None = None) -> None:
        epoch = pipeline.awake[rank].epoch
        self._emit(ev.RankMoved(pipeline.topology.pipeline, rank, Phase.FALLING, epoch))
        self._command(pipeline, Verb.VACATE, rank=rank, epoch=epoch, deadline_s=deadline_s)

    def _after_reap(self, pipeline: PipelineState | None, pending: ev.CommandSent, outcome: CommandOutcome) -> None:
        done = outcome is CommandOutcome.DONE
        whose = (pending.pipeline, pending.incarnation)
        # The end of a whole pipeline is the end of each of its ranks.
        ranks = {q.rank for q in self._state.quarantines} if done and pending.rank < 0 else {pending.rank}
        quarantines = [q for q in self._state.quarantines if (q.pipeline, q.incarnation) == whose and q.rank in ranks]
        for quarantined in quarantines:
            if done:
                # Whatever is still on its way of this rank was said before its end.
                self.slept[quarantined.whose] = self.new_epoch() - 1
                self._emit(ev.GpusCleared(quarantined.gpus, *quarantined.whose))
                self.lease_claims_on(quarantined.gpus)
            else:
                self._quarantine(quarantined.gpus, pending)
        if pipeline is None or pipeline.incarnation != pending.incarnation:
            return
        if pending.rank >= 0:
            failed = pipeline.awake.get(pending.rank)
            if failed is not None and failed.phase is Phase.FAILED:
                if not done and not quarantines:
                    self._quarantine(pipeline.topology.ranks[pending.rank], pending)
                self._asleep(pipeline, pending.rank, failed.epoch)
            return
        if not pipeline.fenced:
            return
        occupied = {g for held in pipeline.held.values() for g in held.gpus}
        occupied |= {g for rank in pipeline.awake for g in pipeline.topology.ranks[rank]}
        if not done and self._state.unsure:
            # It may hold GPUs granted in the lost part of the log, also where others had them before.
            occupied |= pipeline.topology.mapped_gpus
        gpus = tuple(sorted(occupied))
        if not done and gpus:
            self._quarantine(gpus, pending)
        self._emit(ev.Unregistered(pending.pipeline, pipeline.incarnation, "reaped" if done else "could not be ended"))
        self.lease_claims_on(gpus)

    def _quarantine(self, gpus: tuple[int, ...], pending: ev.CommandSent) -> None:
        until = self._now() + self._state.limits.quarantine_s
        logger.error(
            "event=quarantine gpus=%s pipeline=%s rank=%d until=%.1f", gpus, pending.pipeline, pending.rank, until
        )
        self._emit(
            ev.GpusQuarantined(
                gpus, pending.pipeline, pending.incarnation, pending.rank, until, "their processes could not be ended"
            )
        )

    def _asleep(self, pipeline: PipelineState, rank: int, epoch: int) -> None:
        self.slept[pipeline.topology.pipeline, pipeline.incarnation, rank] = epoch
        self._emit(ev.RankMoved(pipeline.topology.pipeline, rank, Phase.ASLEEP, epoch))
        self.lease_claims_on(pipeline.topology.ranks[rank])

    def lease_claims_on(self, gpus: Iterable[int]) -> None:
        """Turns claims on GPUs that have just become free into leases."""
        for claim in {id(c): c for c in (self._state.claimed.get(g) for g in gpus) if c is not None}.values():
            self._lease_if_free(claim)

    def _lease_if_free(self, claim: Claim) -> None:
        if claim.rank >= 0 and not self._state.withheld.isdisjoint(claim.gpus):
            self._emit(ev.ClaimDropped(claim.pipeline, claim.cluster, claim.rank, "its node is leaving"))
            return
        if not all(self._state.free(gpu) for gpu in claim.gpus) or self._state.recovering:
            return
        pipeline, epoch = self._state.pipelines[claim.pipeline], self.new_epoch()
        if claim.rank >= 0:
            phase = Phase.BUILDING if claim.ahead else Phase.RISING
            self._emit(ev.RankMoved(claim.pipeline, claim.rank, phase, epoch, guaranteed=claim.guaranteed))
            self._command(pipeline, _MEANS[phase], rank=claim.rank, epoch=epoch)
            return
        queued = pipeline.wants.get(claim.cluster)
        if queued is None or queued.want.request != claim.request:
            self._emit(ev.ClaimDropped(claim.pipeline, claim.cluster, -1, "withdrawn"))
            return
        want = queued.want
        hold_until = self._now() + self._state.limits.max_hold_s
        self._emit(
            ev.Granted(
                claim.pipeline, claim.cluster, epoch, claim.gpus, want.priority, want.step, want.request, hold_until
            )
        )
        self._command(pipeline, Verb.GRANT, cluster=claim.cluster, epoch=epoch)

    def _change_priority(self, name: str, cluster: str) -> None:
        pipeline = self._state.pipelines[name]
        held, want = pipeline.held[cluster], pipeline.wants[cluster].want
        # The agent may have refused the grant before this, for a request that it took back; that says nothing of now.
        granting = (name, cluster, Verb.GRANT)
        for pending in [c for c in self._state.commands.values() if (c.pipeline, c.cluster, c.verb) == granting]:
            self._end(pending, "superseded")
        self._emit(ev.PriorityChanged(name, cluster, held.epoch, want.priority, want.step, want.request))
        self._command(pipeline, Verb.GRANT, cluster=cluster, epoch=held.epoch)

    def _command(
        self,
        pipeline: PipelineState,
        verb: Verb,
        *,
        rank: int = -1,
        epoch: int = 0,
        cluster: str = "",
        deadline_s: float | None = None,
    ) -> None:
        gpus = pipeline.topology.ranks[rank] if rank >= 0 else pipeline.held[cluster].gpus if cluster else ()
        name, own = pipeline.topology.pipeline, pipeline.spec.drain_s
        seconds = self._state.limits.deadline_of(verb, own) if deadline_s is None else deadline_s
        self._raw_command(name, pipeline.incarnation, verb, rank, epoch, cluster, gpus, seconds)

    def _raw_command(
        self,
        name: str,
        incarnation: int,
        verb: Verb,
        rank: int,
        epoch: int,
        cluster: str,
        gpus: tuple[int, ...],
        seconds: float,
    ) -> None:
        self._commands += 1
        key, now = f"{self._state.term}.{self._commands}", self._now()
        self._emit(ev.CommandSent(key, name, verb.value, rank, cluster, epoch, now + seconds, incarnation))
        command = self._fill_in(Command(key, self._state.term, name, incarnation, verb, rank, epoch, cluster, gpus))
        self._outgoing[key] = _Outgoing(command, now + self._state.limits.retry_s)
        if rank >= 0:
            self._of_rank[name, rank] = key
        self._send(command)

    def _fill_in(self, command: Command) -> Command:
        """A GRANT says for what: taken from the ledger, so that a repeated one says the same."""
        pipeline = self._state.pipelines.get(command.pipeline)
        held = pipeline.held.get(command.cluster) if pipeline is not None else None
        if command.verb is not Verb.GRANT or held is None:
            return command
        return replace(command, gpus=held.gpus, priority=held.priority, step=held.step, request=held.request)

    def _end_command_of(self, name: str, rank: int, outcome: str) -> None:
        pending = self._state.commands.get(self._of_rank.get((name, rank), ""))
        if pending is not None:
            self._end(pending, outcome)

    def _end(self, pending: ev.CommandSent, outcome: str) -> None:
        self._emit(ev.CommandEnded(pending.command, outcome))
        self._outgoing.pop(pending.command, None)
        if self._of_rank.get((pending.pipeline, pending.rank)) == pending.command:
            del self._of_rank[pending.pipeline, pending.rank]
