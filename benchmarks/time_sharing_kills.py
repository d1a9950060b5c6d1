"""Equal GRPO jobs on one pool while an engine, a trainer and the scheduler are killed: every job must go on.

    python benchmarks/time_sharing_kills.py [--shape 0.5b] [--jobs 4] [--gpus 4] [--ways slots-mps] [--way-s 600]
    python benchmarks/time_sharing_kills.py --shape tiny --device cpu --ways slots --jobs 2 --gpus 2 --prompts 4
        --generations 4 --prompt-tokens 16 --new-tokens 32 --mean-tokens 16

The jobs are those of `time_sharing.py`, saved every two steps. Each kill is a SIGKILL and happens when every job has
gone on after the one before it:

- an engine of the first job: its requests continue on its other engines.
- a training process of the last job: the pool ends the job, it is submitted again, and must go on from its checkpoint.
- the scheduler: Ray restarts it. Every job must make two further steps, the second of which needs its grants.

Prints for each kill when every job finished its next step. At the end the pool is closed, its record checked, and
`kills=passed` printed; `kills=failed` and the reason with exit code 1 otherwise. `--way-s` bounds the whole run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

from chaos_run import TARGETS, Failed, Progress, processes  # noqa: E402
from shapes import make_model, make_prompts  # noqa: E402
from time_sharing import CLOSE_S, close, config_of, is_open, jobs_of, parser, serve, start  # noqa: E402

_RUN, _JOB = "NRL_KILLS_RUN", "NRL_KILLS_JOB"
_STEPS_BEFORE = 2
_SAVE_PERIOD = 2
_BATCHES = 8
_FOREVER = 10**6
_POLL_S = 0.2
_ENDS_S = 10.0
_TAIL = 3000
_REASON = 200  # characters


class Kills:
    """The pool and its jobs.

    Args:
        args: The command line; `jobs` is one number.
        way: One of the pools of `time_sharing.py`.
    """

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        self._args, self._way, self._mark = args, way, uuid.uuid4().hex
        self._deadline = time.monotonic() + args.way_s
        self.jobs = jobs_of(args)
        self._configs = {job: config_of(args, way, job, args.gpus) for job in self.jobs}
        self._progress = {job: Progress(args.work / way / job) for job in self.jobs}
        self._began, self._stepped = time.monotonic(), dict[str, float]()
        self._submitting: dict[str, subprocess.Popen[bytes]] = {}
        self._pool = serve(args, way, self._mark, **{_RUN: self._mark})

    def open(self) -> None:
        """Waits until jobs can be submitted."""
        self._wait(lambda: is_open(self._args), "the pool is open")

    @property
    def _log_dir(self) -> Path:
        return self._args.work / f"pool_{self._way}" / "latest"

    def _checkpoints(self, job: str) -> Path:
        return Path(self._args.work / "checkpoints" / job)

    def _wait(self, condition: Callable[[], bool], what: str, ends: str = "") -> None:
        """Waits, and notes when each job finishes its next step.

        Args:
            condition: What is waited for.
            what: It in words.
            ends: The job that may end meanwhile.

        Raises:
            Failed: The pool or another job ended, or time is up.
        """
        while not condition():
            if self._pool.poll() is not None:
                raise Failed(f"the pool ended with {self._pool.returncode} before {what}")
            if bad := [name for name, process in self._submitting.items() if process.poll()]:
                raise Failed(f"submitting {bad[0]} ended with {self._submitting[bad[0]].returncode} before {what}")
            if ended := {job: why for job, why in self._outcomes().items() if job != ends}:
                raise Failed(f"jobs ended before {what}: {ended}")
            if time.monotonic() > self._deadline:
                raise Failed(f"{self._args.way_s:.0f} s were over before {what}")
            for job, progress in self._progress.items():
                progress.look()
                if progress.steps and job not in self._stepped:
                    self._stepped[job] = time.monotonic() - self._began
            time.sleep(_POLL_S)

    def _outcomes(self) -> dict[str, str]:
        """How jobs ended, of those that did."""
        from nemo_rl.time_sharing.log.pool_state import PoolState

        names = {self._configs[job].stem: job for job in self.jobs}
        ended = [one for one in PoolState.read(self._log_dir / "pool.json").submissions if one.outcome]
        return {names[one.name]: f"{one.outcome.kind}: {one.outcome.reason[:_REASON]}" for one in ended}

    def submit(self, *jobs: str) -> None:
        """Submits jobs at the same time, and waits until the pool has taken them."""
        for job in jobs:
            settings = {
                "grpo.max_num_steps": _FOREVER,
                "checkpointing.enabled": "true",
                "checkpointing.checkpoint_dir": self._checkpoints(job),
                "checkpointing.save_period": _SAVE_PERIOD,
                "checkpointing.metric_name": "null",
                "checkpointing.keep_top_k": 1,
            }
            line = ["submit", "--pool", self._mark, "--env", f"{_JOB}={job}", str(self._configs[job])]
            line += [f"{key}={value}" for key, value in settings.items()]
            self._submitting[job] = start(self._args, f"submit_{job}", "-m", "nemo_rl.time_sharing", *line)
        taken = self._submitting
        self._wait(lambda: all(taken[job].poll() == 0 for job in jobs), f"jobs {jobs} were submitted", jobs[0])

    def step(self, steps: int, what: str) -> None:
        """Waits until every job has made some steps since the last kill."""
        self._wait(lambda: all(one.steps >= steps for one in self._progress.values()), f"{steps} steps of all {what}")

    def kill(self, kind: str, job: str = "") -> None:
        """Kills one process, of a job where one is given; from now on steps are counted anew."""
        mark = {_RUN: self._mark} | ({_JOB: job} if job else {})
        victims = sorted(processes(mark, TARGETS[kind]), key=lambda process: process.pid)
        if not victims:
            raise Failed(f"there is no {kind} to kill")
        title = " ".join(victims[0].cmdline()).strip()[:60]
        print(f"kill {kind} {job or '-'}: {title}, one of {len(victims)}", flush=True)
        victims[0].kill()
        self._began, self._stepped = time.monotonic(), dict[str, float]()
        for progress in self._progress.values():
            progress.look()
            progress.forget()

    def resume(self, job: str) -> None:
        """Submits a job again when the pool has ended it, and waits until it has gone on from its checkpoint."""
        from nemo_rl.utils.checkpoint import saved_steps
        from nemo_rl.utils.record import read_record
        from nemo_rl.utils.record_events import StepBegun

        self._wait(lambda: job in self._outcomes(), f"the pool ended {job}", job)
        print(f"    {job} ended after {time.monotonic() - self._began:.1f} s: {self._outcomes()[job]}", flush=True)
        saved = max(saved_steps(self._checkpoints(job)), default=0)
        self._stepped.pop(job, None)
        self._progress[job].look()
        self._progress[job].forget()
        self.submit(job)
        self.step(1, f"after {job} was submitted again")
        record = max((self._args.work / self._way / job).glob("exp_*")) / "record.jsonl"
        entries = (entry.event for entry in read_record(record, recover=True))
        first = next(event.step for event in entries if isinstance(event, StepBegun))
        print(f"    {job} went on from step {first}; its last checkpoint was of step {saved}", flush=True)
        if first < max(saved, 1):
            raise Failed(f"{job} went on from step {first}, and its last checkpoint is of step {saved}")

    def show(self) -> None:
        """Prints when jobs finished their next steps after the last kill."""
        told = ", ".join(f"{job} {self._stepped[job]:.1f} s" for job in self.jobs if job in self._stepped)
        print(f"    next step: {told or 'none'}", flush=True)

    def saved(self, job: str) -> None:
        """Waits until a job has a checkpoint."""
        from nemo_rl.utils.checkpoint import saved_steps

        self._wait(lambda: bool(saved_steps(self._checkpoints(job))), f"a checkpoint of {job}")

    def check(self) -> int:
        """Closes the pool; the events of its record, which must keep every invariant and know two schedulers."""
        from nemo_rl.time_sharing.history.checker import check
        from nemo_rl.time_sharing.log.events import SchedulerStarted
        from nemo_rl.time_sharing.log.reading import merge_by_machine_time

        self._end()
        # Ray's workers end by themselves once they see that their node is gone.
        deadline = time.monotonic() + _ENDS_S
        while (left := processes({_RUN: self._mark})) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if left:
            raise Failed(f"{len(left)} processes outlived the pool: {[' '.join(one.cmdline())[:60] for one in left]}")
        # A job that was cut off has ended nothing that was open.
        entries = list(merge_by_machine_time(sorted(self._log_dir.glob("*.jsonl")), recover=True))
        if violations := check(entries, ended=False):
            raise Failed(f"{len(violations)} violations in {self._log_dir.resolve()}, the first: {violations[0]}")
        terms = [entry.event.term for entry in entries if isinstance(entry.event, SchedulerStarted)]
        if terms != [1, 2]:
            raise Failed(f"the terms of schedulers are {terms}, not [1, 2]")
        return len(entries)

    def _end(self) -> None:
        """Ends the pool with all of its jobs.

        Raises:
            Failed: It does not end.
        """
        if not close(self._pool):
            raise Failed(f"the pool did not end within {CLOSE_S:.0f} s")

    def close(self, failed: bool) -> None:
        """Ends what is left, whatever it is; shows what the pool wrote if the run failed."""
        try:
            self._end()
        except Failed as error:
            print(error)
        for process in processes({_RUN: self._mark}):
            process.kill()
        for path in sorted(self._args.work.glob("*.txt")) if failed else ():
            print(f"-- {path.name}\n{path.read_text()[-_TAIL:]}", flush=True)


def main() -> int:
    """Runs, and says what came of it; the exit code."""
    made = parser()
    made.description = __doc__
    made.set_defaults(jobs=[4], gpus=4, ways=["slots-mps"], way_s=600.0, work=Path("/tmp/nemo_rl_time_sharing_kills"))
    args = made.parse_args()
    (args.jobs, *more), (way, *ways) = args.jobs, args.ways
    if more or ways or not way.startswith("slots") or args.jobs < 2:
        made.error("give one number of --jobs, at least 2, and one of the `slots` --ways")
    base, began = args.work, time.monotonic()
    base.mkdir(parents=True, exist_ok=True)
    args.model = make_model(args.shape, base)
    args.prompts_file = make_prompts(args.prompts * _BATCHES, args.prompt_tokens, base / "prompts.jsonl")
    args.work = base / "kills"
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir()
    kills, failed = Kills(args, way), True
    try:
        kills.open()
        first, last = kills.jobs[0], kills.jobs[-1]
        kills.submit(*kills.jobs)
        kills.step(_STEPS_BEFORE, "at the start")
        print(f"every job made {_STEPS_BEFORE} steps within {time.monotonic() - began:.1f} s", flush=True)
        kills.kill("engines", first)
        kills.step(1, "after an engine was killed")
        kills.show()
        kills.saved(last)
        kills.kill("worker", last)
        kills.resume(last)
        kills.show()
        kills.kill("scheduler")
        kills.step(2, "after the scheduler was killed")
        kills.show()
        events = kills.check()
        print(f"kills=passed jobs={args.jobs} events={events} seconds={time.monotonic() - began:.0f}", flush=True)
        failed = False
    except Failed as error:
        print(f"kills=failed {error}", flush=True)
    finally:
        kills.close(failed)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
