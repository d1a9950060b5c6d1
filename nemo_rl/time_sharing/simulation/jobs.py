"""A simulated pipeline: the real agent state machine with a driver, a trainer and engines that take virtual time.

The driver does what a GRPO driver does: admit prompt groups up to the staleness bound, generate, train a step when its
groups are there, cache, offload, refresh, publish, release. It can be killed at any moment and comes back from its last
trained step under a new incarnation.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.agent_parts import REFRESH, Operation
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    Command,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.simulation.agent_watch import AgentWatch
from nemo_rl.time_sharing.simulation.engines import Generation, Sample
from nemo_rl.time_sharing.simulation.lives import Group, Life
from nemo_rl.time_sharing.simulation.scenario import Costs, Job
from nemo_rl.utils import record_events as rec

if TYPE_CHECKING:
    from nemo_rl.time_sharing.simulation.world import World


class SimulatedJob:
    """A job as the outside sees it, over all its incarnations."""

    def __init__(self, job: Job, world: World, costs: Costs) -> None:
        self.job, self.world, self.costs = job, world, costs
        self.life: Life | None = None
        self.trained_steps = 0
        self.incarnations = 0
        self.first_seen: float | None = None
        self.finished_at: float | None = None
        self.outcome = "waiting"
        self.stopping = False
        self.train_gpu_s = 0.0
        self.generate_gpu_s = 0.0
        self._rng = random.Random(f"{world.seed}/{job.name}")
        self._unended: list[str] = []
        self._stalls: dict[int, float] = {}

    @property
    def finished(self) -> bool:
        """Whether every step is trained."""
        return self.trained_steps >= self.job.steps

    @property
    def fate(self) -> str:
        """What became of it, for people; empty when it did all its steps, or was stopped by its user."""
        if self.finished_at is not None and (self.finished or self.outcome == "stopped"):
            return ""
        done = f"{self.trained_steps} of {self.job.steps} steps trained"
        if self.finished_at is not None:
            last = self.outcome.removeprefix("lost: ")
            return (
                f"{done}, given up at {self.finished_at:.0f} s after {self.incarnations} starts "
                f"(faults.restarts allows no more); the last one {last}"
            )
        now = self.world.loop.now
        return f"{done} when the simulation ended at {now:.0f} s" + (
            " (horizon_s)" if now >= self.world.scenario.horizon_s else ""
        )

    # Life and death.

    def arrive(self) -> None:
        """The user starts the job; or its supervisor starts it again."""
        if self.first_seen is None:
            self.first_seen = self.world.loop.now
        topology = self.world.register(self, self.incarnations)
        if topology is None:
            self.world.loop.after(1.0, self.arrive)
            return
        self._begin_life(topology)

    def kill(self, reason: str) -> None:
        """All processes of the job end at once; its supervisor brings it back later."""
        life = self.life
        if life is None or life.dead:
            return
        life.dead = True
        life.generation.drop_all()
        self.generate_gpu_s += life.generation.busy_rank_s * self.job.tp
        if self.stopping:
            # Nobody brings it back to account for them.
            self._drop_groups(life)
        self._unended = [g.name for g in life.groups.values()]
        self.life = None
        self.incarnations += 1
        if self.incarnations > self.world.scenario.faults.restarts or self.stopping:
            self._end("stopped" if self.stopping else f"lost: {reason}")
        else:
            self.world.loop.after(self.world.scenario.faults.restart_s, self.arrive)

    def stop(self) -> None:
        """The user stops the job."""
        self.stopping = True
        if self.first_seen is None:
            # It still waits in a batch queue.
            self._end("stopped")
            return
        life = self.life
        # A step in hand is finished first: half-trained weights are worth nothing.
        if life is not None and not life.agent.leaving and not life.agent.holds:
            self._leave(life)

    def _begin_life(self, topology: Topology) -> None:
        world = self.world
        record = world.record_of(f"{self.job.name}/driver")
        agent = Agent(topology, self.incarnations, self, record, version=self.trained_steps)
        generation = Generation(world.loop, self.job.engine, len(topology.ranks), record, self._sample_done)
        self.life = life = Life(self.incarnations, agent, AgentWatch(agent), generation, record)
        for name in self._unended:
            record.emit(rec.GroupDropped(name, "lost_in_restart"))
        self._unended = []
        if self.stopping:
            self._leave(life)
        elif self.job.begin_s:
            self._trainer_later(life, self.job.begin_s, "_begun")
        else:
            self._begun(life)
        if self.job.builds_ahead and not self.stopping:
            agent.builds_ahead()
        self._heartbeat(life)

    def _heartbeat(self, life: Life) -> None:
        if life.dead or life is not self.life:
            return
        now = self.world.loop.now
        for rank in life.generation.stalled():
            if now - self._stalls.setdefault(rank, now) > self.world.limits.lease_s:
                life.agent.rank_broken(rank)
                self._stalls.pop(rank, None)
        life.watch.look()
        life.agent.send_status()
        self.world.loop.after(self.world.limits.heartbeat_s, self._heartbeat, life)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.finished_at = self.world.loop.now
        self.world.job_ended(self)

    def _leave(self, life: Life) -> None:
        self._drop_groups(life)
        life.generation.cancel()
        life.agent.leave()

    def _drop_groups(self, life: Life) -> None:
        for group in list(life.groups.values()):
            life.record.emit(rec.GroupDropped(group.name, "end_of_run"))
        life.groups.clear()
        life.missing = life.validating = 0

    # The driver.

    def _begun(self, life: Life) -> None:
        if not life.agent.leaving:
            life.agent.want(ACTOR_TRAIN, Priority.INITIALIZATION, -1, self.world.loop.now)

    def _validation_due(self, life: Life) -> bool:
        plan, step = self.job.validation, self.trained_steps
        if not plan.samples or life.validated == step or self.stopping:
            return False
        if step == 0:
            return plan.at_start
        return (plan.at_end and step >= self.job.steps) or (plan.period > 0 and step % plan.period == 0)

    def _validate(self, life: Life) -> None:
        life.validating, life.validated = self.job.validation.samples, self.trained_steps
        name = f"{self.job.name}.v{self.trained_steps}.i{life.incarnation}"
        rng = random.Random(f"{self.world.seed}/{name}")
        life.agent.begin_progress(life.validating)
        life.generation.submit([Sample(f"{name}.{index}", "", self._length(rng)) for index in range(life.validating)])

    def _validation_sample_done(self, life: Life) -> None:
        life.validating -= 1
        if life.validating:
            life.agent.report_progress(self.job.validation.samples - life.validating)
        else:
            life.record.emit(rec.Validated(life.validated, self.job.validation.samples, 0.0))
            with life.agent.one_status():
                self._next_step(life)

    def _length(self, rng: random.Random) -> int:
        tokens = self.job.tokens
        return min(max(int(rng.lognormvariate(math.log(tokens.median), tokens.sigma)), 1), tokens.max)

    def _next_step(self, life: Life) -> None:
        """Admits what the staleness bound allows and says what is waited for; validation goes first."""
        if self._validation_due(life):
            self._validate(life)
            return
        if self.trained_steps >= self.job.steps or self.stopping:
            self._leave(life)
            return
        last = min(life.agent.published + self.job.staleness, self.job.steps - 1)
        new: list[Sample] = []
        for step in range(max(life.admitted_step + 1, life.agent.published), last + 1):
            new += self._admit(life, step)
        life.admitted_step = max(life.admitted_step, last)
        missing, total = self._progress(life)
        life.agent.begin_progress(total, total - missing)
        if new:
            life.generation.submit(new)
        self._train_if_ready(life)

    def _admit(self, life: Life, step: int) -> list[Sample]:
        samples = []
        for number in range(self.job.groups):
            prompt = f"{self.job.name}.s{step}.g{number}"
            group = Group(f"{prompt}.i{life.incarnation}", step, self.job.samples_per_group)
            life.groups[group.name] = group
            life.missing += group.missing
            life.record.emit(rec.GroupAdmitted(group.name, prompt, group.missing, step))
            rng = random.Random(f"{self.world.seed}/{prompt}")
            for index in range(group.missing):
                samples.append(Sample(f"{group.name}.{index}", group.name, self._length(rng)))
        return samples

    def _progress(self, life: Life) -> tuple[int, int]:
        return life.missing, len(life.groups) * self.job.samples_per_group

    def _sample_done(self, sample: Sample) -> None:
        life = self.life
        if life is not None and not sample.group and life.validating:
            self._validation_sample_done(life)
        if life is None or sample.group not in life.groups:
            return
        group = life.groups[sample.group]
        group.missing -= 1
        life.missing -= 1
        group.tokens += sample.length
        group.version = max(group.version, *(span.version for span in sample.spans))
        if group.missing == 0:
            group.committed = True
            life.record.emit(rec.GroupCommitted(group.name, group.version, group.tokens))
        missing, total = self._progress(life)
        if life.validating:
            return
        with life.agent.one_status():
            if life.agent.demand.target:
                life.agent.report_progress(max(total - missing, life.agent.demand.done))
            if group.missing == 0:
                self._train_if_ready(life)

    def _train_if_ready(self, life: Life) -> None:
        step = life.agent.published
        if life.agent.leaving or ACTOR_TRAIN in life.agent.wants or ACTOR_TRAIN in life.agent.holds:
            return
        ready = [group for group in life.groups.values() if group.step == step]
        if ready and all(group.committed for group in ready):
            priority = Priority.OLD_LOG_PROBS if self.job.log_probs_s else Priority.ACTOR_TRAINING
            life.agent.want(ACTOR_TRAIN, priority, step, self.world.loop.now)

    def _later(self, life: Life, seconds: float, action: str, *arguments: object) -> None:
        self.world.loop.after(self._vary(seconds, self._rng), self._if_alive, life, action, arguments)

    def _trainer_later(self, life: Life, seconds: float, action: str, *arguments: object) -> None:
        """The trainer's own work: its jitter belongs to job and step, so that a job does the same work whoever shares
        its GPUs.
        """
        rng = random.Random(f"{self.world.seed}/{self.job.name}/{action}/{arguments}")
        self.world.loop.after(self._vary(seconds, rng), self._if_alive, life, action, arguments)

    def _if_alive(self, life: Life, action: str, arguments: tuple[object, ...]) -> None:
        if not life.dead and life is self.life:
            getattr(self, action)(life, *arguments)

    def _vary(self, seconds: float, rng: random.Random) -> float:
        jitter = self.costs.jitter
        return seconds * rng.lognormvariate(0.0, jitter) if jitter and seconds else seconds

    def _initialised(self, life: Life) -> None:
        self.train_gpu_s += self.job.init_s * len(self.job.train)
        life.initialised = True
        with life.agent.one_status():
            life.agent.release(ACTOR_TRAIN)
            self._next_step(life)

    def _log_probs_done(self, life: Life, step: int) -> None:
        self.train_gpu_s += self.job.log_probs_s * len(self.job.train)
        life.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, self.world.loop.now)

    def _train(self, life: Life, step: int) -> None:
        life.record.emit(rec.StepBegun(step))
        resident = self.job.log_probs_s > 0
        self._trainer_later(life, self.job.train_s + (0.0 if resident else self.costs.load_s), "_trained", step)

    def _trained(self, life: Life, step: int) -> None:
        self.train_gpu_s += self.job.train_s * len(self.job.train)
        for group in [g for g in life.groups.values() if g.step == step]:
            life.record.emit(rec.GroupTrained(group.name, step))
            del life.groups[group.name]
        self.trained_steps = step + 1
        life.record.emit(rec.StepFinished(step, step + 1, self.job.groups))
        self._trainer_later(life, self.costs.cache_s, "_cached", step)

    def _cached(self, life: Life, step: int) -> None:
        life.agent.cache_built(step + 1)
        self._trainer_later(life, self.costs.offload_s, "_offloaded")

    def _offloaded(self, life: Life) -> None:
        life.watch.refreshes()
        life.agent.refresh()

    # What the agent tells its host.

    def perform(self, operation: Operation) -> None:
        life = self.life
        if life is None:
            return
        costs, faults, now = self.costs, self.world.scenario.faults, self.world.loop.now
        seconds = {
            Verb.DRAIN.value: costs.drain_s,
            Verb.SLEEP.value: costs.sleep_s,
            Verb.WAKE.value: costs.wake_s,
            Verb.SYNC.value: costs.sync_s,
            REFRESH: costs.refresh_s,
        }[operation.kind]
        if operation.kind == Verb.WAKE.value and operation.rank not in life.started_ranks:
            seconds = costs.start_s
        ok = True
        if now < faults.until_s:
            if faults.operation_hangs and self._rng.random() < faults.operation_hangs and operation.kind != REFRESH:
                return
            ok = not (faults.operation_fails and self._rng.random() < faults.operation_fails)
        self._later(life, seconds, "_performed", operation, ok)

    def _performed(self, life: Life, operation: Operation, ok: bool) -> None:
        if life.agent.ranks[operation.rank].busy != operation:
            return
        if operation.kind == Verb.DRAIN.value:
            life.generation.preempt(operation.rank)
        if ok and operation.kind == Verb.WAKE.value:
            life.started_ranks.add(operation.rank)
            life.generation.set_speed(operation.rank, 1.0)
        if ok and operation.kind in (Verb.SYNC.value, REFRESH):
            life.generation.load(operation.rank, operation.version)
        life.agent.performed(operation, ok)

    def answer(self, answer: Answer) -> None:
        if self.life is not None:
            self.life.watch.answered(answer)
        self.world.to_scheduler_answer(self.job.name, answer)

    def status(self, status: Status) -> None:
        self.world.to_scheduler_status(self.job.name, status)

    def granted(self, cluster: str, priority: Priority, step: int) -> None:
        life = self.life
        if life is None:
            return
        if priority is Priority.INITIALIZATION:
            self._trainer_later(life, self.job.init_s, "_initialised")
        elif priority is Priority.OLD_LOG_PROBS:
            self._trainer_later(life, self.costs.load_s + self.job.log_probs_s, "_log_probs_done", step)
        else:
            self._train(life, step)

    def request_ended(self, want: Want, reason: str) -> None:
        life = self.life
        if life is not None:
            self._later(life, 0.0, "_ask_again", want)

    def take_back(self) -> bool:
        """The job asks for nothing more, and soon again; False if it asked for nothing."""
        life = self.life
        want = next(iter(life.agent.wants.values()), None) if life is not None else None
        if life is None or want is None:
            return False
        life.agent.withdraw(want.cluster)
        self._later(life, self._rng.random(), "_ask_again", want)
        return True

    def _ask_again(self, life: Life, want: Want) -> None:
        agent, held = life.agent, life.agent.holds.get(want.cluster)
        done = life.initialised if want.priority is Priority.INITIALIZATION else want.step != agent.published
        goes_on = held is None or (held.priority, want.priority) == (Priority.OLD_LOG_PROBS, Priority.ACTOR_TRAINING)
        if not agent.leaving and want.cluster not in agent.wants and goes_on and not done:
            agent.want(want.cluster, want.priority, want.step, self.world.loop.now)

    def routing_changed(self, rank: int, active: bool) -> None:
        if self.life is not None:
            self._stalls.pop(rank, None)
            self.life.generation.set_active(rank, active)

    def refreshed(self, version: int) -> None:
        life = self.life
        if life is not None:
            with life.agent.one_status():
                life.agent.release(ACTOR_TRAIN)
                self._next_step(life)

    def dismissed(self, left: bool) -> None:
        life = self.life
        if life is None:
            return
        if not left:
            # Fenced while alive: its processes are ended by the reaper; it stops at once.
            self.world.evict(self)
            return
        life.dead = True
        self.generate_gpu_s += life.generation.busy_rank_s * self.job.tp
        life.generation.drop_all()
        self.world.leave_orphans(self)
        self.life = None
        self._end("stopped" if self.stopping and self.trained_steps < self.job.steps else "done")

    def hear(self, reply: Reply) -> None:
        if self.life is not None:
            self.life.watch.heard(reply)
            self.life.agent.heard(reply)

    def obey(self, command: Command) -> None:
        if self.life is not None:
            self.life.watch.obeys(command, self.life.agent.command)
