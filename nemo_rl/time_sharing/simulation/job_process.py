"""The processes of one incarnation of a simulated job, with the prompt groups that they generate."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.standing_demand import FALLS_AFTER_S, StandingDemand
from nemo_rl.time_sharing.simulation.event_loop import Loop
from nemo_rl.time_sharing.simulation.simulated_generation import Generation
from nemo_rl.time_sharing.simulation.watch import AgentWatch
from nemo_rl.utils.record import Record


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
    validated: int = -1
    started_ranks: set[int] = field(default_factory=set)
    initialised: bool = False
    compiled: bool = False
    training_s: float = 0.0
    dead: bool = False

    def __post_init__(self) -> None:
        self.demand = StandingDemand(self.agent)

    def wait_for(self, missing: int, total: int) -> None:
        """Waits for other samples from here on: `missing` of `total` are not there yet."""
        self.demand = StandingDemand(self.agent)
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
