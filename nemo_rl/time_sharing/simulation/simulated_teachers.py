"""Simulated teachers and the jobs that share them: a job asks for training GPUs once its teacher has scored the step's
samples, and the teacher's engines are wanted only while samples wait for scores.

Invariant: samples that a teacher lost with its processes are sent again by the job that waits for them.
"""

from __future__ import annotations

from nemo_rl.time_sharing.simulation.job_process import Group, JobProcess, Surroundings
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.simulation.scenario import Costs, Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.scenario_reading import TEACHER_FOUND_S
from nemo_rl.time_sharing.simulation.simulated_adapters import SimulatedAdapters
from nemo_rl.time_sharing.simulation.simulated_generation import Sample


def jobs_of(scenario: Scenario, world: Surroundings) -> dict[str, SimulatedJob]:
    """All jobs of a scenario by name, its teachers and its jobs of adapters last."""
    teachers = {one.name: SimulatedTeacher(one.as_job(), world, scenario.costs) for one in scenario.teachers}
    jobs: dict[str, SimulatedJob] = {}
    for job in scenario.jobs:
        if job.teacher:
            jobs[job.name] = Student(job, world, scenario.costs, teachers[job.teacher])
        else:
            jobs[job.name] = SimulatedJob(job, world, scenario.costs)
    adapters = {plan.name: SimulatedAdapters(plan, world, scenario.costs) for plan in scenario.adapter_jobs}
    return jobs | teachers | adapters


class SimulatedTeacher(SimulatedJob):
    """Engines that score what students send."""

    def __init__(self, job: ScenarioJob, world: Surroundings, costs: Costs) -> None:
        super().__init__(job, world, costs)
        self.students: list[Student] = []
        self.batches = 0
        self._open: dict[str, Student] = {}
        self._left: dict[str, int] = {}
        self._total = 0

    @property
    def fate(self) -> str:
        """Why it did not end properly, in words; empty when it ended after its last student, or was stopped."""
        if self.finished_at is not None and self.outcome in ("done", "stopped"):
            return ""
        return super().fate if self.finished_at is not None else "still there when the simulation ended"

    def take(self, student: Student, batch: str, lengths: list[int]) -> None:
        """Scores samples of so many tokens each, unless it is not up, or does so already."""
        process = self.process
        if process is None or process.agent.leaving or batch in self._left:
            return
        samples = [Sample(f"{batch}.{number}", "", length) for number, length in enumerate(lengths)]
        self._open |= {sample.name: student for sample in samples}
        self._left[batch] = len(samples)
        self._total += len(samples)
        process.open_samples(len(self._open), self._total)
        process.generation.submit(samples)

    def one_has_ended(self) -> None:
        """A student has ended."""
        process = self.process
        if process is not None and not process.agent.leaving and all(s.finished_at is not None for s in self.students):
            self._leave(process)

    def _begun(self, process: JobProcess) -> None:
        self._open.clear()
        self._left.clear()
        self._total = 0
        for student in self.students:
            student.ask()
        self.one_has_ended()

    def _sample_done(self, sample: Sample) -> None:
        process, student = self.process, self._open.pop(sample.name)
        batch = sample.name.rpartition(".")[0]
        self._left[batch] -= 1
        if process is None:
            return
        if self._open:
            process.open_samples(len(self._open), self._total)
        else:
            self._total = 0
            process.agent.set_demand(0)
        if not self._left[batch]:
            del self._left[batch]
            self.batches += 1
            student.take_scores(batch)

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        for student in self.students:
            student.ask()


class Student(SimulatedJob):
    """A job whose teacher scores a step's samples before it asks for training GPUs."""

    def __init__(self, job: ScenarioJob, world: Surroundings, costs: Costs, teacher: SimulatedTeacher) -> None:
        super().__init__(job, world, costs)
        self._teacher = teacher
        teacher.students.append(self)
        self._waits_for = self._has = ""
        self._lengths: list[int] = []
        self._gave_up = False

    @property
    def fate(self) -> str:
        """Why it did not finish, in words; empty when it trained all its steps, or was stopped by its user."""
        if self._gave_up and self.finished_at is not None:
            return (
                f"{self.trained_steps} of {self.job.steps} steps trained when it had waited {TEACHER_FOUND_S:.0f} s "
                f"for its teacher {self._teacher.job.name!r}, which had ended"
            )
        return super().fate

    def ask(self) -> None:
        """Sends the samples that wait for scores; a teacher that has ended is waited for a while."""
        process = self.process
        if process is None or not self._waits_for:
            return
        if self._teacher.finished_at is not None:
            self.world.loop.after(TEACHER_FOUND_S, self._give_up, self._waits_for)
        else:
            self._teacher.take(self, self._waits_for, self._lengths)

    def take_scores(self, batch: str) -> None:
        """Scores of samples that it waits for, or of such that it has lost."""
        process = self.process
        if process is not None and batch == self._waits_for:
            self._has, self._waits_for = batch, ""
            self._train_if_ready(process)

    def _scored(self, process: JobProcess, groups: list[Group]) -> bool:
        batch = f"{self.job.name}.i{process.incarnation}.s{process.agent.published}"
        if self._has == batch:
            return True
        if self._waits_for != batch:
            samples = self.job.samples_per_group
            self._lengths = [max(group.tokens // samples, 1) for group in groups for _ in range(samples)]
            self._waits_for = batch
            self.ask()
        return False

    def _give_up(self, batch: str) -> None:
        if self.process is not None and batch == self._waits_for:
            self._gave_up = True
            self._leave(self.process)

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        self._teacher.one_has_ended()
