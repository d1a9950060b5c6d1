"""Environment of a simulated job: virtual time, crowded GPUs, and the link to the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Answer, Status
from nemo_rl.time_sharing.simulation.event_loop import Loop, Wire
from nemo_rl.time_sharing.simulation.job_process import JobProcess
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.simulated_generation import Crowding
from nemo_rl.utils.record import Record


class Surroundings:
    """The cluster as jobs see it; `world.World` is the whole. `make_record`: makes the record of all sources."""

    def __init__(self, scenario: Scenario, seed: int, make_record: Callable[[Callable[[], float]], Record]) -> None:
        self.scenario, self.seed = scenario, seed
        self.limits = scenario.scheduler_limits
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
