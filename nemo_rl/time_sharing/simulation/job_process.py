"""Simulated job: the processes of one incarnation with the prompt groups that they generate, and their environment of
virtual time, crowded GPUs and the link to the scheduler.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.standing_demand import FALLS_AFTER_S, StandingDemand
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Answer, Status, limits_from
from nemo_rl.time_sharing.simulation.event_loop import Loop, Wire
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.simulated_generation import Crowding, Generation
from nemo_rl.time_sharing.simulation.watch import AgentWatch
from nemo_rl.utils.record import Record


class Surroundings:
    """The cluster as jobs see it; `world.World` is the whole. `make_record`: makes the record of all sources."""

    def __init__(self, scenario: Scenario, seed: int, make_record: Callable[[Callable[[], float]], Record]) -> None:
        self.scenario, self.seed = scenario, seed
        self.limits = limits_from(scenario.limits)
        self.loop = Loop()
        self.wire = Wire(self.loop, scenario.network, random.Random(f"{seed}/wire"))
        self.crowding = Crowding(scenario.pool.neighbours_slow)
        self._record = make_record(lambda: self.loop.now)

    def record_of(self, source: str) -> Record:
        """The record of one source."""
        return self._record.bind(source)

    def gpus_of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """The GPUs that slots lie on."""
        return tuple(dict.fromkeys(map(self.scenario.gpu_pool.gpu_of, slots)))

    def trainer_works(self, job: ScenarioJob) -> float:
        """A trainer begins; how many times as long its work takes for what else is on its GPUs."""
        gpus = self.gpus_of(job.train)
        self.crowding.begin(job.name, gpus)
        return self.crowding.factor(job.name, gpus)

    def trainer_rests(self, job: ScenarioJob) -> None:
        """A trainer ends its work on GPUs."""
        self.crowding.end(job.name, self.gpus_of(job.train))

    def place(self, name: str) -> bool:
        """Lets a job lie on nodes that stay; False where it has to wait for a node, which starts it later."""
        raise NotImplementedError

    def register(self, spec: ScenarioJob, incarnation: int) -> Topology | None:
        """A registration call: None when the scheduler is down or not ready for this job yet."""
        raise NotImplementedError

    def to_scheduler_status(self, name: str, status: Status) -> None:
        """Sends a job's status on its way."""
        raise NotImplementedError

    def to_scheduler_answer(self, name: str, answer: Answer) -> None:
        """Sends a job's answer to a command on its way."""
        raise NotImplementedError

    def leave_orphans(self, name: str, process: JobProcess) -> None:
        """Notes the GPUs of the workers of a job's process, which outlived its driver."""
        raise NotImplementedError

    def job_ended(self, name: str) -> None:
        """A job has ended for good."""
        raise NotImplementedError


@dataclass(slots=True)
class Group:
    """A prompt group on its way: how many of its samples are missing, and the step it is for."""

    name: str
    step: int
    missing: int
    tokens: int = 0
    version: int = 0
    committed: bool = False


@dataclass(slots=True)
class JobProcess:
    """One incarnation of a job: everything that dies with its processes."""

    incarnation: int
    agent: Agent
    watch: AgentWatch
    generation: Generation
    record: Record
    loop: Loop
    turns: int  # of each sample
    demand: StandingDemand = field(init=False)
    groups: dict[str, Group] = field(default_factory=dict)
    missing: int = 0
    admitted_step: int = -1
    validating: int = 0
    to_validate: int = 0
    validated: int = -1
    started_ranks: set[int] = field(default_factory=set)
    initialised: bool = False
    compiled: bool = False
    training_s: float = 0.0
    dead: bool = False

    def __post_init__(self) -> None:
        self.demand = StandingDemand(self.agent.set_demand)

    def wait_for(self, missing: int, total: int) -> None:
        """Waits for other samples from here on: `missing` of `total` are not there yet."""
        self.demand = StandingDemand(self.agent.set_demand)
        self.open_samples(missing, total)

    def open_samples(self, missing: int, total: int) -> None:
        """Reports that `missing` of the awaited `total` samples are not there yet."""
        self.demand.open_groups(total - missing, total, 1, self.loop.now)
        self.requests_changed()

    def requests_changed(self) -> None:
        """Reports the requests under way, now and once fewer of them count. Of samples of one turn each, all that are
        open are under way.
        """
        if self.turns > 1:
            self._count_requests()
            self.loop.after(FALLS_AFTER_S * 1.01, self._count_requests)

    def _count_requests(self) -> None:
        if not self.dead and self.agent.demand.target:
            self.demand.under_way(self.generation.under_way, self.loop.now)
