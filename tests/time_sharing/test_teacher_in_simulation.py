"""A teacher that two students share, on the real scheduler with simulated engines: nobody waits for GPUs that the other
holds, on one GPU too, and whoever dies costs the others nothing but time.
"""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.log.events import MemoryFreed, MemoryTaken
from nemo_rl.time_sharing.simulation.engines import Sample
from nemo_rl.time_sharing.simulation.job_process import JobProcess
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.simulation.scenario import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

STEPS, STUDENTS = 4, ("math", "code")
JOB: dict[str, Any] = {
    "steps": STEPS,
    "groups": 8,
    "samples_per_group": 2,
    "train_s": 6.0,
    "tokens": {"median": 150, "sigma": 0.8, "max": 800},
    "engine": {"tokens_per_s": 100, "half_batch": 16},
}
SCORING_TOKENS = 40


class Teacher(SimulatedJob):
    """Engines alone: its demand stands while samples of a student are open, and it leaves after the last student."""

    students: tuple[Student, ...] = ()

    def _begun(self, process: JobProcess) -> None:
        self._open: dict[str, Student] = {}
        self._total = self.batches = 0
        for student in self.students:
            student.ask()

    def take(self, student: Student, batch: str) -> bool:
        """Scores a step's samples; False where it is not up."""
        process = self.process
        if process is None or process.agent.leaving or not hasattr(self, "_open"):
            return False
        samples = [Sample(f"{batch}.{i}", "", SCORING_TOKENS) for i in range(JOB["groups"] * JOB["samples_per_group"])]
        if samples[0].name in self._open:
            return True
        self._open |= {sample.name: student for sample in samples}
        self._total += len(samples)
        process.agent.begin_progress(self._total, self._total - len(self._open))
        process.generation.submit(samples)
        return True

    def _sample_done(self, sample: Sample) -> None:
        process, student = self.process, self._open.pop(sample.name)
        if process is None:
            return
        if self._open:
            process.agent.report_progress(self._total - len(self._open))
        else:
            self._total = 0
            process.agent.end_progress()
        batch = sample.name.rpartition(".")[0]
        if not any(name.startswith(f"{batch}.") for name in self._open):
            self.batches += 1
            student.scored(batch)

    def one_left(self) -> None:
        """A student has ended."""
        if all(student.finished_at is not None for student in self.students) and self.process is not None:
            self._leave(self.process)


class Student(SimulatedJob):
    """Asks for training GPUs once its samples are scored, not before."""

    teacher: Teacher
    waiting = ""
    done = ""

    def _train_if_ready(self, process: JobProcess) -> None:
        step = process.agent.published
        ready = [group for group in process.groups.values() if group.step == step]
        if not ready or not all(group.committed for group in ready):
            return
        batch = f"{self.job.name}.i{process.incarnation}.s{step}"
        if self.done == batch:
            super()._train_if_ready(process)
        elif self.waiting != batch:
            self.waiting = batch
            self.ask()

    def ask(self) -> None:
        """Sends what waits; a teacher that is not up asks for it when it is."""
        if self.waiting:
            self.teacher.take(self, self.waiting)

    def scored(self, batch: str) -> None:
        """Scores of the samples that it has now, or of those that it lost."""
        if batch == self.waiting and self.process is not None:
            self.done, self.waiting = batch, ""
            self._train_if_ready(self.process)

    def _end(self, outcome: str) -> None:
        super()._end(outcome)
        self.teacher.one_left()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("crashes", [0.0, 60.0])
@pytest.mark.parametrize("seed", range(3))
def test_students_and_their_teacher_take_turns_and_all_of_them_end(gpus: int, crashes: float, seed: int) -> None:
    infer = list(range(gpus))
    jobs = [{**JOB, "name": name, "train": [n % gpus], "infer": infer} for n, name in enumerate(STUDENTS)]
    jobs.append({**JOB, "name": "teacher", "train": [0], "infer": infer, "staleness": 0})
    scenario = parse_scenario(
        {
            "pool": {"gpus_per_node": gpus},
            "limits": {"aging_s": 5.0, "min_hold_s": 2.0, "lease_s": 12.0, "heartbeat_s": 2.0},
            "horizon_s": 5000.0,
            "faults": {"agent_crashes": crashes, "restarts": 100},
            "jobs": [job | {"full_overlap": gpus == 1} for job in jobs],
        }
    )
    records: list[MemoryRecord] = []
    world = World(scenario, seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    teacher = Teacher(scenario.jobs[-1], world, scenario.costs)
    students = [Student(job, world, scenario.costs) for job in scenario.jobs[:-1]]
    for student in students:
        student.teacher = teacher
    teacher.students = tuple(students)
    world.jobs = {job.job.name: job for job in (*students, teacher)}
    world.run()
    assert [student.trained_steps for student in students] == [STEPS] * len(STUDENTS)
    assert all(job.finished_at is not None for job in world.jobs.values())
    entries = records[0].entries
    assert not check(entries)
    changed = [entry.event for entry in entries if entry.source.startswith("teacher/")]
    assert any(isinstance(event, MemoryTaken) for event in changed)
    assert sum(isinstance(event, MemoryFreed) for event in changed) >= 2, "its GPUs are lent between two batches"
    if not crashes:
        assert teacher.batches == STEPS * len(STUDENTS)
