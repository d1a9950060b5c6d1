"""A simulated pipeline: the real agent state machine with a driver, a trainer and engines that take virtual time.

The driver does what a GRPO driver does: admit prompt groups up to the staleness bound, generate, train a step when its
groups are there, cache, offload, refresh, publish, release. It can be killed at any moment and comes back from its last
trained step under a new incarnation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from nemo_rl.time_sharing.agents.agent import Agent, LocalPhase, Operation, RankStep, longest_s
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Answer, Command, Priority, Reply, Status, Want
from nemo_rl.time_sharing.simulation.job_process import Group, JobProcess, Surroundings
from nemo_rl.time_sharing.simulation.scenario import Costs, ScenarioJob
from nemo_rl.time_sharing.simulation.simulated_generation import Generation, Sample
from nemo_rl.time_sharing.simulation.watch import AgentWatch
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Record


class SimulatedJob:
    """A job as the outside sees it, over all its incarnations."""

    def __init__(self, job: ScenarioJob, world: Surroundings, costs: Costs) -> None:
        self.job, self.world, self.costs = job, world, costs
        self.process: JobProcess | None = None
        self.trained_steps = 0
        self.incarnations = 0
        self.first_seen: float | None = None
        self.finished_at: float | None = None
        self.outcome = "waiting"
        self.stopping = False
        self.moving = False
        self.moves = 0
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
        """Why the job did not finish, in words; empty when it trained all its steps, or was stopped by its user."""
        if self.finished_at is not None and (self.finished or self.outcome == "stopped"):
            return ""
        done = f"{self.trained_steps} of {self.job.steps} steps trained"
        if self.finished_at is not None:
            last = self.outcome.removeprefix("lost: ")
            return (
                f"{done}, given up at {self.finished_at:.0f} s after {self.incarnations} starts "
                f"(faults.restarts allows no more); the last one {last}"
            )
        now, horizon_s = self.world.loop.now, self.world.scenario.horizon_s
        return f"{done} when the simulation ended at {now:.0f} s{' (horizon_s)' if now >= horizon_s else ''}"

    # Starts and ends.

    def arrive(self) -> None:
        """The user starts the job; or its supervisor starts it again."""
        if self.first_seen is None:
            self.first_seen = self.world.loop.now
        if not self.world.place(self.job.name):
            return
        topology = self.world.register(self.job, self.incarnations)
        if topology is None:
            self.world.loop.after(1.0, self.arrive)
            return
        self._begin_life(topology)

    def kill(self, reason: str) -> None:
        """All processes of the job end at once; its supervisor brings it back later."""
        process = self.process
        if process is None or process.dead:
            return
        process.dead = True
        process.generation.drop_all()
        self.world.trainer_rests(self.job)
        self.generate_gpu_s += process.generation.busy_rank_s * self.job.tp
        if self.stopping:
            # It is not restarted, so they are accounted for here.
            self._drop_groups(process)
        self._unended = [g.name for g in process.groups.values()]
        self.process = None
        self.incarnations += 1
        self.moving = False
        if self.incarnations - self.moves > self.world.scenario.faults.restarts or self.stopping:
            self._end("stopped" if self.stopping else f"lost: {reason}")
        else:
            self.world.loop.after(self.world.scenario.faults.restart_s, self.arrive)

    def crash(self, reason: str = "crashed") -> None:
        """The agent process dies; its workers' GPU memory stays occupied until they are ended."""
        if self.process is not None:
            self.world.leave_orphans(self.job.name, self.process)
            self.kill(reason)

    def stop(self) -> None:
        """The user stops the job."""
        self.stopping = True
        if self.first_seen is None:
            # It still waits in a batch queue.
            self._end("stopped")
            return
        process = self.process
        # A step in hand is finished first: half-trained weights are worth nothing.
        if process is not None and not process.agent.leaving and not process.agent.holds:
            self._leave(process)

    def move(self) -> None:
        """A node that it trains on is to leave: it leaves at its step's end, or at once if it does nothing, and begins
        again.
        """
        process = self.process
        if process is not None and not process.agent.leaving:
            self.moving = True
            asleep = all(rank.phase is LocalPhase.ASLEEP for rank in process.agent.ranks)
            if asleep and not process.agent.holds:
                self._leave(process)

    def _begin_life(self, topology: Topology) -> None:
        world = self.world
        record = world.record_of(f"{self.job.name}/driver")
        agent = Agent(topology, self.incarnations, self, record, version=self.trained_steps)
        generation = self._generation([world.gpus_of(slots) for slots in topology.ranks], record)
        self.process = process = JobProcess(
            self.incarnations, agent, AgentWatch(agent), generation, record, world.loop, self.job.turns
        )
        for name in self._unended:
            record.emit(rec.GroupDropped(name, "lost_in_restart"))
        self._unended = []
        if self.stopping:
            self._leave(process)
        elif self.job.begin_s:
            self._trainer_later(process, self.job.begin_s, "_begun")
        else:
            self._begun(process)
        if self.job.builds_ahead and not self.stopping:
            agent.builds_ahead()
        self._heartbeat(process)

    def _generation(self, ranks: Sequence[tuple[int, ...]], record: Record) -> Generation:
        loop, crowding = self.world.loop, self.world.crowding
        return Generation(loop, crowding, self.job.engine, ranks, record, self._sample_done, self._turn_over)

    def _heartbeat(self, process: JobProcess) -> None:
        if process.dead or process is not self.process:
            return
        now = self.world.loop.now
        for rank in process.generation.stalled():
            if now - self._stalls.setdefault(rank, now) > self.world.limits.lease_s:
                process.agent.rank_broken(rank)
                self._stalls.pop(rank, None)
        process.watch.check()
        process.agent.send_status()
        self.world.loop.after(self.world.limits.heartbeat_s, self._heartbeat, process)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.finished_at = self.world.loop.now
        self.world.job_ended(self.job.name)

    def _leave(self, process: JobProcess) -> None:
        self._drop_groups(process)
        process.generation.cancel()
        process.agent.leave()

    def _drop_groups(self, process: JobProcess) -> None:
        reason = "lost_in_restart" if self.moving else "end_of_run"
        for group in list(process.groups.values()):
            process.record.emit(rec.GroupDropped(group.name, reason))
        process.groups.clear()
        process.missing = process.validating = 0

    # The driver.

    def _begun(self, process: JobProcess) -> None:
        if not self.job.train:
            self._next_step(process)
        elif not process.agent.leaving:
            process.agent.want(ACTOR_TRAIN, Priority.INITIALIZATION, -1, self.world.loop.now)

    def _validation_due(self, process: JobProcess) -> bool:
        plan, step = self.job.validation, self.trained_steps
        if not self.job.train:
            return step < self.job.steps and not self.stopping
        if not plan.samples or process.validated == step or self.stopping or (self.moving and not self.finished):
            return False
        if step == 0:
            return plan.at_start
        return (plan.at_end and step >= self.job.steps) or (plan.period > 0 and step % plan.period == 0)

    def _validate(self, process: JobProcess) -> None:
        job = self.job
        samples = job.validation.samples if job.train else job.groups * job.samples_per_group
        process.validating, process.to_validate, process.validated = samples, samples, self.trained_steps
        name = f"{self.job.name}.v{self.trained_steps}.i{process.incarnation}"
        rng = random.Random(f"{self.world.seed}/{name}")
        process.wait_for(process.validating, process.validating)
        self._submit(process, [Sample.drawn(f"{name}.{n}", "", self.job, rng) for n in range(process.validating)])

    def _validation_sample_done(self, process: JobProcess) -> None:
        process.validating -= 1
        if process.validating:
            process.open_samples(process.validating, process.to_validate)
        else:
            process.record.emit(rec.Validated(process.validated, process.to_validate, 0.0))
            if not self.job.train:
                self.trained_steps += 1
            with process.agent.one_status():
                self._next_step(process)

    def _next_step(self, process: JobProcess) -> None:
        """Admits groups up to the staleness bound and reports the demand; validation goes first."""
        if self._validation_due(process):
            self._validate(process)
            return
        if self.finished or self.stopping or self.moving:
            self._leave(process)
            return
        last = min(process.agent.published + self.job.staleness, self.job.steps - 1)
        new: list[Sample] = []
        for step in range(max(process.admitted_step + 1, process.agent.published), last + 1):
            new += self._admit(process, step)
        if self.job.measures_batch and process.admitted_step >= 0:
            process.agent.batch_measured(self.job.engine.good_batch)
        process.admitted_step = max(process.admitted_step, last)
        process.wait_for(*self._progress(process))
        if new:
            self._submit(process, new)
        self._train_if_ready(process)

    def _submit(self, process: JobProcess, samples: list[Sample]) -> None:
        process.generation.submit(samples)
        process.requests_changed()

    def _turn_over(self, sample: Sample) -> None:
        process = self.process
        if process is not None:
            process.requests_changed()
            self._trainer_later(process, self.job.environment_s, "_answered", sample)

    def _answered(self, process: JobProcess, sample: Sample) -> None:
        if not process.agent.leaving:
            self._submit(process, [sample])

    def _admit(self, process: JobProcess, step: int) -> list[Sample]:
        samples: list[Sample] = []
        for number in range(self.job.groups):
            prompt = f"{self.job.name}.s{step}.g{number}"
            group = Group(f"{prompt}.i{process.incarnation}", step, self.job.samples_per_group)
            process.groups[group.name] = group
            process.missing += group.missing
            process.record.emit(rec.GroupAdmitted(group.name, prompt, group.missing, step))
            rng = random.Random(f"{self.world.seed}/{prompt}")
            samples += [Sample.drawn(f"{group.name}.{n}", group.name, self.job, rng) for n in range(group.missing)]
        return samples

    def _progress(self, process: JobProcess) -> tuple[int, int]:
        return process.missing, len(process.groups) * self.job.samples_per_group

    def _sample_done(self, sample: Sample) -> None:
        process = self.process
        if process is not None and not sample.group and process.validating:
            self._validation_sample_done(process)
        if process is None or sample.group not in process.groups:
            return
        group = process.groups[sample.group]
        group.missing -= 1
        process.missing -= 1
        group.tokens += sample.length
        group.version = max(group.version, *(span.version for span in sample.spans))
        if group.missing == 0:
            group.committed = True
            process.record.emit(rec.GroupCommitted(group.name, group.version, group.tokens))
        missing, total = self._progress(process)
        if process.validating:
            return
        with process.agent.one_status():
            if process.agent.demand.target:
                process.open_samples(missing, total)
            if group.missing == 0:
                self._train_if_ready(process)

    def _train_if_ready(self, process: JobProcess) -> None:
        step = process.agent.published
        if process.agent.leaving or ACTOR_TRAIN in process.agent.wants or ACTOR_TRAIN in process.agent.holds:
            return
        ready = [group for group in process.groups.values() if group.step == step]
        if ready and all(group.committed for group in ready) and self._scored(process, ready):
            priority = Priority.OLD_LOG_PROBS if self.job.log_probs_s else Priority.ACTOR_TRAINING
            process.agent.want(ACTOR_TRAIN, priority, step, self.world.loop.now)

    def _scored(self, process: JobProcess, groups: list[Group]) -> bool:
        """Whether a teacher has scored these groups, where there is one; asks it if it has not."""
        return True

    def _later(self, process: JobProcess, seconds: float, action: str, *arguments: object) -> None:
        self.world.loop.after(self._vary(seconds, self._rng), self._if_alive, process, action, arguments)

    def _trainer_later(self, process: JobProcess, seconds: float, action: str, *arguments: object) -> None:
        """Work of the trainer or the environment. Its jitter belongs to job, step and sample, so that a job does the
        same work beside any neighbour.
        """
        of = tuple(f"{a.name}/{a.turn}" if isinstance(a, Sample) else a for a in arguments)
        rng = random.Random(f"{self.world.seed}/{self.job.name}/{action}/{of}")
        self.world.loop.after(self._vary(seconds, rng), self._if_alive, process, action, arguments)

    def _if_alive(self, process: JobProcess, action: str, arguments: tuple[object, ...]) -> None:
        if not process.dead and process is self.process:
            getattr(self, action)(process, *arguments)

    def _vary(self, seconds: float, rng: random.Random) -> float:
        jitter = self.costs.jitter
        return seconds * rng.lognormvariate(0.0, jitter) if jitter and seconds else seconds

    def _initialised(self, process: JobProcess) -> None:
        self.train_gpu_s += self.job.init_s * len(self.job.train)
        process.initialised = True
        with process.agent.one_status():
            process.agent.release(ACTOR_TRAIN)
            self._next_step(process)

    def _log_probs_done(self, process: JobProcess, step: int) -> None:
        self.train_gpu_s += self.job.log_probs_s * len(self.job.train)
        process.agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, self.world.loop.now)

    def _train(self, process: JobProcess, step: int) -> None:
        process.record.emit(rec.StepBegun(step))
        resident = self.job.log_probs_s > 0
        alone_s = self.job.train_s + (0.0 if process.compiled else self.job.compile_s)
        process.training_s = alone_s * self.world.trainer_works(self.job)
        process.compiled = True
        self._trainer_later(process, process.training_s + (0.0 if resident else self.costs.load_s), "_trained", step)

    def _trained(self, process: JobProcess, step: int) -> None:
        self.train_gpu_s += process.training_s * len(self.job.train)
        for group in [g for g in process.groups.values() if g.step == step]:
            process.record.emit(rec.GroupTrained(group.name, step))
            del process.groups[group.name]
        self.trained_steps = step + 1
        process.record.emit(rec.StepFinished(step, step + 1, self.job.groups))
        self._trainer_later(process, self.costs.cache_s, "_cached", step)

    def _cached(self, process: JobProcess, step: int) -> None:
        process.agent.cache_built(step + 1)
        self._trainer_later(process, self.costs.offload_s, "_offloaded")

    def _offloaded(self, process: JobProcess) -> None:
        process.watch.refreshes()
        process.agent.refresh()

    # Calls of the agent to its host.

    def perform(self, operation: Operation) -> None:
        process = self.process
        if process is None:
            return
        process.watch.begins(operation)
        costs, faults, now = self.costs, self.world.scenario.faults, self.world.loop.now
        seconds = {
            RankStep.DRAIN: costs.drain_s,
            RankStep.SLEEP: costs.sleep_s,
            RankStep.WAKE: costs.wake_s,
            RankStep.SYNC: costs.sync_s,
            RankStep.REFRESH: costs.refresh_s,
        }[operation.kind]
        if operation.kind is RankStep.WAKE and operation.rank not in process.started_ranks:
            seconds = costs.start_s
        longest = longest_s(operation.kind, self.world.limits, process.agent.topology.spec.drain_s)
        if seconds > longest:
            self._later(process, longest, "_overdue", operation)
        ok = True
        if now < faults.until_s:
            if faults.operation_hangs and self._rng.random() < faults.operation_hangs:
                self._later(process, longest, "_overdue", operation)
                return
            ok = not (faults.operation_fails and self._rng.random() < faults.operation_fails)
        self._later(process, seconds, "_performed", operation, ok)

    def _overdue(self, process: JobProcess, operation: Operation) -> None:
        process.agent.step_overdue(operation)

    def _performed(self, process: JobProcess, operation: Operation, ok: bool) -> None:
        process.watch.ends(operation)
        if process.agent.ranks[operation.rank].busy != operation:
            return
        if operation.kind is RankStep.DRAIN:
            process.generation.preempt(operation.rank)
        if ok and operation.kind is RankStep.WAKE:
            process.started_ranks.add(operation.rank)
            process.generation.set_speed(operation.rank, 1.0)
        if ok and operation.kind in (RankStep.SYNC, RankStep.REFRESH):
            process.generation.load(operation.rank, operation.version)
        process.agent.performed(operation, ok)

    def answer(self, answer: Answer) -> None:
        if self.process is not None:
            self.process.watch.answered(answer)
        self.world.to_scheduler_answer(self.job.name, answer)

    def status(self, status: Status) -> None:
        self.world.to_scheduler_status(self.job.name, status)

    def granted(self, cluster: str, priority: Priority, step: int) -> None:
        process = self.process
        if process is None:
            return
        if priority is Priority.INITIALIZATION:
            self._trainer_later(process, self.job.init_s, "_initialised")
        elif priority is Priority.OLD_LOG_PROBS:
            log_probs_s = self.job.log_probs_s * self.world.trainer_works(self.job)
            self._trainer_later(process, self.costs.load_s + log_probs_s, "_log_probs_done", step)
        else:
            self._train(process, step)

    def request_ended(self, want: Want, reason: str) -> None:
        process = self.process
        if process is not None:
            self._later(process, 0.0, "_ask_again", want)

    def take_back(self) -> bool:
        """The job asks for nothing more, and soon again; False if it asked for nothing."""
        process = self.process
        want = next(iter(process.agent.wants.values()), None) if process is not None else None
        if process is None or want is None:
            return False
        process.agent.withdraw(want.cluster)
        self._later(process, self._rng.random(), "_ask_again", want)
        return True

    def _ask_again(self, process: JobProcess, want: Want) -> None:
        agent, held = process.agent, process.agent.holds.get(want.cluster)
        done = process.initialised if want.priority is Priority.INITIALIZATION else want.step != agent.published
        goes_on = held is None or (held.priority, want.priority) == (Priority.OLD_LOG_PROBS, Priority.ACTOR_TRAINING)
        if not agent.leaving and want.cluster not in agent.wants and goes_on and not done:
            agent.want(want.cluster, want.priority, want.step, self.world.loop.now)

    def routing_changed(self, rank: int, active: bool) -> None:
        if self.process is not None:
            self._stalls.pop(rank, None)
            self.process.generation.set_active(rank, active)

    def refreshed(self, version: int) -> None:
        process = self.process
        self.world.trainer_rests(self.job)
        if process is not None:
            with process.agent.one_status():
                process.agent.release(ACTOR_TRAIN)
                self._next_step(process)

    def dismissed(self, left: bool) -> None:
        process = self.process
        if process is None:
            return
        if not left:
            # Fenced while alive: its processes are ended by the reaper; it stops at once.
            self.crash("fenced")
            return
        process.dead = True
        self.generate_gpu_s += process.generation.busy_rank_s * self.job.tp
        process.generation.drop_all()
        self.world.leave_orphans(self.job.name, process)
        self.process = None
        if self.moving and not self.finished and not self.stopping:
            self.moving = False
            self.moves, self.incarnations = self.moves + 1, self.incarnations + 1
            self.world.loop.after(self.world.scenario.faults.restart_s, self.arrive)
            return
        self._end("stopped" if self.stopping and self.trained_steps < self.job.steps else "done")

    def hear(self, reply: Reply) -> None:
        if self.process is not None:
            self.process.watch.heard(reply)
            self.process.agent.heard(reply)

    def obey(self, command: Command) -> None:
        if self.process is not None:
            self.process.watch.obeys(command, self.process.agent.command)
