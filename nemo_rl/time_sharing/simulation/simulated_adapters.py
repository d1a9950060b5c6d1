"""Simulated jobs of many adapters: a command on whole ranks whose adapters draw, share training passes, come and go.

Passes are shared by the rule of real jobs (`utils.adapter_turns`). When its rank is wanted back, each adapter finishes
its step, and the command ends; with its next rank it goes on from the saved steps, which are all that a kill leaves.
Invariant: an adapter's state is in its own record, with the versions that its requests were drawn with.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from nemo_rl.time_sharing.agents.agent import Operation, RankStep
from nemo_rl.time_sharing.simulation.job_process import Group, JobProcess, Surroundings
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.simulation.scenario import AdapterJob, Costs, ScenarioAdapter
from nemo_rl.time_sharing.simulation.simulated_generation import Generation, Sample, SimulatedShard
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.adapter_turns import Ready, Turns
from nemo_rl.utils.record import Record


@dataclass(slots=True)
class Member:
    """An adapter over all starts of its job.

    Attributes:
        saved: Steps in its checkpoint; a kill resets `trained` to it.
        version: Version in the engines; None while it is not in the running command.
        over: Reason for its end.
    """

    spec: ScenarioAdapter
    record: Record
    trained: int = 0
    saved: int = 0
    version: int | None = None
    inside: bool = False
    training: bool = False
    removed: bool = False
    over: str = ""
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether all groups of its step are there."""
        return bool(self.groups) and all(group.missing == 0 for group in self.groups.values())


class SimulatedAdapterGeneration(Generation):
    """Engines that draw each request with its adapter, in the version that it began with."""

    def __init__(self, job: SimulatedAdapters, ranks: Sequence[tuple[int, ...]], record: Record) -> None:
        world = job.world
        super().__init__(
            world.loop, world.crowding, job.job.engine, ranks, record, job.take_sample, lambda sample: None
        )
        self._members, self._killed = job.members, job.rank_killed

    @override
    def _record_of(self, sample: Sample) -> Record:
        return self._members[sample.adapter].record

    @override
    def _start(self, shard: SimulatedShard, sample: Sample) -> None:
        version = self._members[sample.adapter].version
        sample.version = -1 if version is None else version
        super()._start(shard, sample)

    @override
    def _version_of(self, shard: SimulatedShard, sample: Sample) -> int:
        return sample.version

    @override
    def preempt(self, rank: int) -> None:
        """The processes of a rank were ended: the command ends with them."""
        self.cancel()
        self._killed(rank)

    def end(self, adapter: str) -> None:
        """Ends the requests of one adapter."""
        self.queue = deque(sample for sample in self.queue if sample.adapter != adapter)
        for shard in self.shards:
            self._advance(shard)
            for sample, start in list(shard.running.values()):
                if sample.adapter == adapter:
                    self._stop(shard, sample, start, "aborted")
            self._arm(shard)
        self._dispatch()


def _turns(plan: AdapterJob) -> Turns:
    return Turns(plan.pass_tokens, plan.wait_s, plan.pass_share)


class SimulatedAdapters(SimulatedJob):
    """A job of many adapters."""

    def __init__(self, plan: AdapterJob, world: Surroundings, costs: Costs) -> None:
        super().__init__(plan.as_job(), world, costs)
        self.plan = plan
        self.members = {
            spec.name: Member(spec, world.record_of(f"{rec.adapter_pipeline(plan.name, spec.name)}/driver"))
            for spec in plan.adapters
        }
        self.starts = 0
        self._coming = {spec.name for spec in plan.adapters}
        self._held: set[int] = set()
        self._rank: int | None = None
        self._up = self._in_pass = False
        self._yields: tuple[JobProcess, Operation] | None = None
        self._turns = _turns(plan)

    @property
    @override
    def finished(self) -> bool:
        return all(member.over for member in self.members.values())

    @property
    @override
    def fate(self) -> str:
        if self.finished_at is not None and (self.finished or self.outcome == "stopped"):
            return ""
        left = [name for name, member in self.members.items() if not member.over]
        ended = "when the simulation ended" if self.finished_at is None else f"({self.outcome})"
        return f"{len(left)} of {len(self.members)} adapters had not ended {ended}: {', '.join(left)}"

    # Its processes.

    @override
    def arrive(self) -> None:
        if self.first_seen is None:
            for member in self.members.values():
                now = self.world.loop.now
                self.world.loop.at(max(now, member.spec.joins_s), self._add, member)
                if member.spec.leaves_s is not None:
                    self.world.loop.at(max(now, member.spec.leaves_s), self.remove, member)
        super().arrive()

    @override
    def _generation(self, ranks: Sequence[tuple[int, ...]], record: Record) -> Generation:
        return SimulatedAdapterGeneration(self, ranks, record)

    @override
    def _begun(self, process: JobProcess) -> None:
        if self.finished:
            self._leave(process)
        else:
            process.wait_for(self.job.engine.good_batch, self.job.engine.good_batch)

    @override
    def kill(self, reason: str) -> None:
        if self.process is not None and not self.process.dead:
            super().kill(reason)
            self._forget()

    def _forget(self) -> None:
        """Drops the state of ended processes, except saved steps."""
        self._up, self._rank, self._yields = False, None, None
        self._held.clear()
        self._lose_steps()

    def _lose_steps(self) -> None:
        self._turns = _turns(self.plan)
        self._in_pass = False
        for member in self.members.values():
            member.inside, member.training, member.version = False, False, None
            member.trained = member.saved
            member.groups.clear()

    @override
    def _leave(self, process: JobProcess) -> None:
        for member in self.members.values():
            self._drop(member)
            member.inside = False
        process.generation.cancel()
        self._up = False
        process.agent.leave()
        self._yielded()

    @override
    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        self._forget()

    @override
    def routing_changed(self, rank: int, active: bool) -> None:
        self._stalls.pop(rank, None)
        (self._held.add if active else self._held.discard)(rank)
        if self.process is not None:
            self._begin_on_a_rank(self.process)

    def _begin_on_a_rank(self, process: JobProcess) -> None:
        """Starts the command on the first rank that may be used, unless it runs."""
        if self._rank is None and self._held and not process.agent.leaving:
            self._rank = min(self._held)
            process.generation.set_active(self._rank, True)
            self.starts += 1
            self._later(process, self.costs.start_s, "_start_adapters", self.starts)

    def rank_killed(self, rank: int) -> None:
        """The command died with a rank: its job ends as one that died by itself does."""
        self.world.loop.after(0.0, self.crash)

    @override
    def perform(self, operation: Operation) -> None:
        process = self.process
        if operation.kind is not RankStep.DRAIN or process is None or operation.rank != self._rank:
            super().perform(operation)
            return
        process.watch.begins(operation)
        self._yields = process, operation
        self.world.loop.after(self.plan.stop_s, self._if_alive, process, "_kill_command", (operation,))
        for member in self.members.values():
            if member.inside and member.version is None:
                member.inside = False
        self._yielded()

    def _yielded(self) -> None:
        """Gives the rank back if it is wanted back and every adapter has finished its step."""
        if self._yields is None or any(member.inside for member in self.members.values()):
            return
        (process, operation), self._yields = self._yields, None
        self._up, self._rank = False, None
        self._turns = _turns(self.plan)
        process.generation.cancel()
        process.generation.set_active(operation.rank, False)
        self._later(process, self.costs.drain_s, "_performed", operation, True)
        self._begin_on_a_rank(process)

    def _kill_command(self, process: JobProcess, operation: Operation) -> None:
        if self._yields == (process, operation):
            self._lose_steps()
            self._yielded()

    def _performed(self, process: JobProcess, operation: Operation, ok: bool) -> None:
        if operation.kind is RankStep.DRAIN:
            process.watch.ends(operation)
            if process.agent.ranks[operation.rank].busy == operation:
                process.agent.performed(operation, ok)
        else:
            super()._performed(process, operation, ok)

    # Adapters come and go.

    def _add(self, member: Member) -> None:
        self._coming.discard(member.spec.name)
        if self._up and self.process is not None:
            self._fill_slots(self.process)

    def remove(self, member: Member) -> None:
        """Removes an adapter: its requests are ended; a step whose training pass has begun is finished."""
        self._coming.discard(member.spec.name)
        member.removed = True
        if member.over or member.training:
            return
        process = self.process
        if member.inside and process is not None and isinstance(process.generation, SimulatedAdapterGeneration):
            process.generation.end(member.spec.name)
            self._go(process, member)
        else:
            self._finish(member)

    def _finish(self, member: Member) -> None:
        member.over = "removed" if member.removed else "done"
        process = self.process
        if self.finished and process is not None and not process.agent.leaving and process.agent.demand.target:
            self._leave(process)

    def _start_adapters(self, process: JobProcess, start: int) -> None:
        if start == self.starts and self._rank is not None and self._yields is None and not process.agent.leaving:
            self._up = True
            self._fill_slots(process)

    def _fill_slots(self, process: JobProcess) -> None:
        for name, member in self.members.items():
            free = self.plan.slots - sum(other.inside for other in self.members.values())
            if free and not (member.inside or member.over or name in self._coming) and self._yields is None:
                member.inside = True
                member.record.emit(rec.RecordOpened(f"{rec.adapter_pipeline(self.plan.name, name)}/driver"))
                self._turns.join(name, member.spec.weight)
                self._sync(process, member)

    def _go(self, process: JobProcess, member: Member) -> None:
        self._drop(member)
        self._turns.leave(member.spec.name)
        member.inside, member.version = False, None
        if member.removed or member.trained >= member.spec.steps:
            self._finish(member)
        if self._up and self._yields is None:
            self._fill_slots(process)
        self._yielded()
        self._pass_if_due(process)

    def _drop(self, member: Member) -> None:
        for group in member.groups.values():
            member.record.emit(rec.GroupDropped(group.name, "adapter_left"))
        member.groups.clear()

    # An adapter's steps.

    def _sync(self, process: JobProcess, member: Member) -> None:
        name, shards = member.spec.name, () if self._rank is None else (self._rank,)
        sync = f"{name}@{member.trained}"
        started = rec.SyncStarted(sync, member.trained, shards, "adapter", recompute_kv=True, adapter=name)
        member.record.emit(started)
        self._later(process, self.costs.refresh_s, "_synced", member, started, self.starts)

    def _synced(self, process: JobProcess, member: Member, started: rec.SyncStarted, start: int) -> None:
        if start != self.starts or not member.inside:
            return
        member.version = started.version
        member.record.emit(rec.SyncFinished(started.sync_id, started.version))
        member.record.emit(rec.VersionPublished(started.version, started.targets))
        if member.removed or self._yields is not None or member.trained >= member.spec.steps:
            self._go(process, member)
            return
        self._begin_step(process, member)

    def _begin_step(self, process: JobProcess, member: Member) -> None:
        spec, step = member.spec, member.trained
        member.record.emit(rec.StepBegun(step, spec.name))
        samples: list[Sample] = []
        rng = random.Random(f"{self.world.seed}/{self.plan.name}/{spec.name}/{step}")
        for number in range(spec.groups):
            group = Group(f"s{step}.g{number}", step, spec.samples_per_group)
            member.groups[group.name] = group
            member.record.emit(rec.GroupAdmitted(group.name, f"p{step}.{number}", group.missing, step, spec.name))
            for index in range(group.missing):
                sample = Sample.drawn(f"{spec.name}.{group.name}.{index}", group.name, self.job, rng)
                sample.adapter = spec.name
                samples.append(sample)
        process.generation.submit(samples)

    def take_sample(self, sample: Sample) -> None:
        """A sample is complete."""
        process, member = self.process, self.members[sample.adapter]
        group = member.groups.get(sample.group)
        if process is None or group is None:
            return
        group.missing -= 1
        group.tokens += sample.length
        group.version = max(group.version, *(span.version for span in sample.spans))
        if group.missing == 0:
            member.record.emit(rec.GroupCommitted(group.name, group.version, group.tokens))
        if member.ready:
            tokens = sum(group.tokens for group in member.groups.values())
            self._turns.put(Ready(member.spec.name, tokens, self.world.loop.now))
            self._pass_if_due(process)

    def _pass_if_due(self, process: JobProcess) -> None:
        if self._in_pass or not self._up or process is not self.process:
            return
        due = self._turns.due(self.world.loop.now)
        if due is None:
            return
        if due > 0.0:
            self.world.loop.after(due + 1e-6, self._pass_if_due, process)
            return
        taken = [self.members[ready.adapter] for ready in self._turns.take()]
        for member in taken:
            member.training = True
        self._in_pass = True
        seconds = self.plan.train_s * len(taken)
        self._trainer_later(process, seconds, "_passed", [m.spec.name for m in taken], self.starts)

    def _passed(self, process: JobProcess, names: list[str], start: int) -> None:
        if start != self.starts:
            return
        self._in_pass = False
        for member in [self.members[name] for name in names]:
            if not member.inside:
                continue
            for group in list(member.groups.values()):
                member.record.emit(rec.GroupTrained(group.name, group.step, member.spec.name))
            step, groups = member.trained, len(member.groups)
            member.groups.clear()
            member.training = False
            member.trained += 1
            member.record.emit(rec.StepFinished(step, step + 1, groups, member.spec.name))
            if member.trained % self.plan.save_period == 0 or member.trained >= member.spec.steps or self._yields:
                member.saved = member.trained
            self._sync(process, member)
        self._pass_if_due(process)
