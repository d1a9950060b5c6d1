"""The processes of one incarnation of a simulated job, with the prompt groups that they generate."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.standing_demand import StandingDemand
from nemo_rl.time_sharing.simulation.agent_watch import AgentWatch
from nemo_rl.time_sharing.simulation.engines import Generation
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
    demand: StandingDemand
    groups: dict[str, Group] = field(default_factory=dict)
    missing: int = 0
    admitted_step: int = -1
    validating: int = 0
    validated: int = -1
    started_ranks: set[int] = field(default_factory=set)
    initialised: bool = False
    dead: bool = False
