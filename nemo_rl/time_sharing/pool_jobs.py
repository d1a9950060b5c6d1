"""The jobs of a pool: their queue, their processes, how they end, and how they move off nodes that leave.

Invariants: a pipeline that ended in any way is unregistered, so that its GPUs are verified free and given on; its
outcome is kept for later queries, and so is all that a restarted actor needs to go on with those that run and wait.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import UserError, first_line, why_not_written
from nemo_rl.distributed.memory_groups import MEMORY_GROUP
from nemo_rl.distributed.private_variables import without_private
from nemo_rl.distributed.processes import WORKING_DIRECTORY
from nemo_rl.distributed.unix_users import RUN_AS, why_unusable
from nemo_rl.distributed.worker_groups import how_it_ended
from nemo_rl.time_sharing.agents.actors import Orchestrator
from nemo_rl.time_sharing.agents.end_notices import EndNotices
from nemo_rl.time_sharing.agents.host_use import HostWatch, run_of
from nemo_rl.time_sharing.agents.ray_reaper import (
    INCARNATION_VARIABLE,
    agent_actor_name,
    agent_namespace,
    agent_variables,
)
from nemo_rl.time_sharing.job_queue import JobLimits, JobQueueLimits, Owner
from nemo_rl.time_sharing.log.events import Registered
from nemo_rl.time_sharing.log.pool_state import (
    KEPT_AND_SHOWN,
    HostLimits,
    Outcome,
    PoolState,
    Progress,
    Standing,
    Submission,
)
from nemo_rl.time_sharing.log.reading import LogTail
from nemo_rl.time_sharing.log.sharing import SharingWatch
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles
from nemo_rl.time_sharing.pipelines.job import PIPELINES, Job, Kind
from nemo_rl.time_sharing.pipelines.residents import Part, PoolFull, Residents, SlotMemory
from nemo_rl.time_sharing.planning.job_placement import Mapped
from nemo_rl.time_sharing.pool_nodes import Node, PoolNodes
from nemo_rl.time_sharing.team import TOKEN_VARIABLE
from nemo_rl.utils.files import adapter_states, replace_file

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
ACTOR_THREADS = 32
_CAPS = {
    # Many jobs with many processes each, and a thread per core in all of them, run into the limit of threads.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    # NCCL's monitoring thread reads variables while others are set, and takes the process down with it.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_NODE_S = 0.5
_NEXT = "its turn is next"
_CUT_OFF = ("dismissed", "died")
_LEFT = ("done", "drained")
"""Outcomes of pipelines that have given everything back by themselves."""


class PoolError(UserError, RuntimeError):
    """There is no such pool or pipeline, or the pool cannot take it."""


@dataclass(frozen=True)
class Expectation:
    """When a pipeline can begin: in how many seconds (0: at once; infinity: unknown), and why not at once."""

    train: tuple[int, ...]
    infer: tuple[int, ...]
    seconds: float
    why: str


@dataclass(frozen=True)
class PoolOptions:
    """What a pool does beside scheduling."""

    on_end: str | None = None  # address that each job's end is posted to
    limits: HostLimits = HostLimits()  # of each job
    keep_free: int = 0  # bytes of host memory that stay free on each node
    queue: JobLimits = JobLimits()  # of all jobs together
    run_as_submitter: bool = False  # whether a job's processes are those of its user's Unix user
    away: int = 0  # how many of its last nodes have not come yet


NOTHING_MORE = PoolOptions()


class PoolJobs(Orchestrator):
    """Runs pipelines on a pool, inside Ray; who may do what is for `PoolActor` to say."""

    def __init__(self, handles: PoolHandles, options: PoolOptions) -> None:
        super().__init__(handles.scheduler, handles.pool)
        self._handles, self._options = handles, options
        self._lock = threading.Lock()
        folder = Path(handles.log_dir)
        self._path = folder / "pool.json"
        kept = PoolState.read(self._path)
        self._submissions = {submission.name: submission for submission in kept.submissions}
        self._residents = Residents(kept.residents)
        pool, new = handles.pool, not kept.name
        gone = range(pool.nodes - options.away, pool.nodes) if new else kept.gone
        self._requests = kept.requests
        self._nodes = PoolNodes(handles, gone, self._keep_nodes)
        self._suspended = False
        self._actors: dict[str, Any] = {}
        self._seen: dict[str, Progress] = {}
        self._unwritten = False
        self._log = LogTail(folder / "scheduler.jsonl")
        self._sharing = SharingWatch()
        self._waiting, self._queue = WaitingJobs(folder / "waiting"), JobQueueLimits(options.queue)
        self._notices = EndNotices(options.on_end) if options.on_end else None
        self._keep()

    def _go_on(self) -> None:
        """Takes up the jobs that a killed actor of this pool has left, and starts those that wait."""
        options, handles = self._options, self._handles
        self._hosts = HostWatch(
            self._running,
            self._end_for,
            nodes=handles.pool.nodes,
            keep_free=options.keep_free,
            pools_own=handles.log_dir,
        )
        for submission in list(self._submissions.values()):
            if submission.outcome is not None:
                self._notify(submission)
            elif not submission.waits:
                self._go_on_with(submission)
        self._begin_waiting()
        for node in self._nodes.all() if self._nodes.gone else ():
            if node.state == "draining":
                _beside(self._clear, node, None, False)

    def _go_on_with(self, submission: Submission) -> None:
        """Watches a pipeline that a killed actor of this pool has started."""
        import ray

        try:
            self._actors[submission.name] = ray.get_actor(
                agent_actor_name(submission.incarnation), namespace=agent_namespace(submission.name)
            )
        except ValueError:
            if not (submission.asked or submission.refused or self._was_registered(submission)):
                # The actor was killed before its process was there, and a job that waits outlives that.
                submission.waits, submission.incarnation = True, _next_incarnation(submission.incarnation)
                return
            died = Outcome("died", "its process was gone when the pool's actor was restarted")
            # The scheduler may be starting again, too.
            _beside(self._note_end, submission, died)
        else:
            # Calls of the killed actor to a process that was not up yet died with it.
            self._actors[submission.name].start.remote()
            self._begin_watch(submission)

    def _was_registered(self, submission: Submission) -> bool:
        """Whether the scheduler has ever known this start of a pipeline."""
        wanted = submission.name, submission.incarnation
        events = (entry.event for entry in LogTail(Path(self._handles.log_dir) / "scheduler.jsonl").new())
        return any(isinstance(event, Registered) and (event.pipeline, event.incarnation) == wanted for event in events)

    def _begin_watch(self, submission: Submission) -> None:
        _beside(self._watch, submission)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Writes the pool's state under the lock, or leaves it to the next time where the disk is full."""
        try:
            self._write()
        except OSError as error:
            logger.error("pool_state=not_written path=%s reason=%s", self._path, error)

    def _write(self) -> None:
        submissions, residents = list(self._submissions.values()), self._residents.entries()
        self._unwritten = True
        gone = sorted(self._nodes.gone)
        name, unit = self._handles.name, self._handles.unit
        PoolState(submissions, residents, name, unit, gone, self._requests).write(self._path)
        self._unwritten = False

    def _keep_nodes(self) -> None:
        with self._lock:
            self._keep()

    def _change(self, submission: Submission, **values: object) -> None:
        with self._lock:
            vars(submission).update(values)
            self._keep()

    def _open(self) -> list[Submission]:
        """Those that have not ended."""
        return [submission for submission in list(self._submissions.values()) if submission.outcome is None]

    def _running(self) -> list[Submission]:
        """Those of them that have begun."""
        return [submission for submission in self._open() if not submission.waits]

    def _started(self) -> list[Submission]:
        """Those of them with a process; waits for one that is being started."""
        with self._lock:
            return [one for one in self._running() if one.name in self._actors]

    def _known(self, name: str) -> Submission:
        if name not in self._submissions:
            raise PoolError(f"there is no pipeline {name!r}; there are {sorted(self._submissions) or 'none'}")
        return self._submissions[name]

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def handles(self) -> PoolHandles:
        """Actors and settings of the pool that a pipeline needs."""
        return self._handles

    def report_memory(
        self, name: str, measured: Mapping[int, SlotMemory], needs: Mapping[int, int], part: Part = Part.TRAINER
    ) -> None:
        """See `Residents.admit`; a pipeline that does not fit is ended. Raises PoolFull: it does not fit."""
        try:
            with self._lock:
                self._residents.admit(name, measured, needs, part)
                self._keep()
        except PoolFull as full:
            submission = self._submissions.get(name)
            if submission is not None and part is Part.ENGINES:
                # Its run goes on with other engines, or waits for this one: it does not end by itself.
                submission.refused = f"{type(full).__name__}: {full}"
                self.unregister_pipeline(name)
            raise

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> str:
        with self._lock:
            known = self._submissions.get(job.name)
            if job.request and known is not None and known.request == job.request:
                return job.name
            wanted, why = job, ""
            try:
                job = self._placed(job)
            except ValueError as error:
                why = str(error)
            pool, topology = self._handles.pool, job.topology(self._handles.pool)
            try:
                limits = job.limits.within(self._options.limits)
            except ValueError as error:
                raise PoolError(f"{job.name}: {error}") from error
            if known is not None and known.outcome is None:
                raise PoolError(f"a pipeline {job.name!r} runs already; cancel it, or submit under another name")
            submission = Submission(
                job.name,
                job.train,
                job.infer,
                time.time(),
                wishes=job.wishes,
                user=job.options.get("user", ""),
                group=job.options.get("group", ""),
                # Larger than any before, also those of an earlier pool over the same log.
                incarnation=_next_incarnation(known.incarnation if known else 0),
                column=job.column,
                teachers=job.teachers,
                saves_in=job.saves_in,
                limits=limits,
                needs=max(pool.gpus_in(topology.training_gpus), pool.gpus_in(topology.ranks[0])),
                request=job.request,
            )
            if above := self._above_limit(submission):
                raise PoolError(f"{job.name}: {above}; make it smaller, or ask an admin for a higher limit")
            if why := self._why_it_waits(submission) or why:
                waiting = [owner_of(one) for one in self._open() if one.waits]
                if full := self._queue.why_it_may_not_wait(owner_of(submission), waiting):
                    raise PoolError(f"{job.name}: {why}, and {full}; submit it again when one has ended")
                submission.waits = True
            before = dict(self._submissions)
            self._submissions[job.name] = submission
            try:
                self._waiting.keep(wanted)
                self._write()  # first, so that a restarted pool knows of every pipeline that may be there
            except OSError as error:
                self._waiting.drop(job.name)
                self._submissions = before
                raise PoolError(
                    f"{job.name}: {self._path} cannot be written ({why_not_written(error)}); free some space there and "
                    "submit it again"
                ) from error
            self._seen.pop(job.name, None)  # of an earlier job of this name
            if not submission.waits:
                self._start(job, submission)
        return job.name

    def _above_limit(self, submission: Submission) -> str:
        """Which limit allows a job fewer GPUs than it needs at once; empty where none does."""
        return ""

    def _placed(self, job: Job) -> Job:
        """Raises ValueError: it has no place on the nodes that are here."""
        others = [Mapped(one.train, one.infer, one.column) for one in self._running() if one.name != job.name]
        return job.placed(self._handles.pool, others, self._nodes.gpus_gone())

    def _why_it_waits(self, submission: Submission) -> str:
        """What keeps a job from beginning now; empty where nothing does."""
        if why := self._queue.why_it_waits(owner_of(submission), map(owner_of, self._running())):
            return why
        if self._suspended:
            return "the pool is about to end"
        return self._above_limit(submission) or ("" if self._has_place(submission) else "GPUs that it needs are away")

    def _has_place(self, submission: Submission) -> bool:
        """Whether a job that waits could be placed on the nodes that are here."""
        if not self._nodes.gone or not submission.waits:
            return True
        try:
            self._placed(self._waiting.read(submission.name))
        except (OSError, ValueError):
            return False
        return True

    def _begin_waiting(self) -> None:
        """Starts those of the waiting jobs whose turn it is, in order; called whenever a job has ended."""
        with self._lock:
            for submission in sorted(self._open(), key=lambda one: one.submitted_at):
                # One that cannot be started makes room for the next.
                if submission.waits and not self._why_it_waits(submission):
                    self._begin(submission)

    def _begin(self, submission: Submission) -> None:
        submission.waits = submission.moving = False
        try:
            job = self._waiting.read(submission.name)
            check_unix_user(job)
            job = self._placed(job)
            submission.train, submission.infer, submission.column = job.train, job.infer, job.column
            self._keep()
            self._start(job, submission)
        except Exception as error:
            # The next one has its turn all the same.
            logger.exception("pipeline=%s event=not_started", submission.name)
            if submission.outcome is None:
                self._conclude(submission, Outcome("failed", f"could not be started: {type(error).__name__}: {error}"))

    def _leave_queue(self, submission: Submission, kind: str) -> str:
        """Ends a job that waits for its turn; what happened, in words."""
        with self._lock:
            if not submission.waits:
                return ""
            began = " again, after it had moved" if submission.moving else ""
            self._conclude(submission, Outcome(kind, f"before it began{began}"))
        return f"{kind} before it began"

    def expected_start(self, name: str) -> Expectation:
        """Where a pipeline that was just submitted trains, or works at all, and when it can begin there."""
        import ray

        submission = self._known(name)
        if submission.waits:
            why = self._why_it_waits(submission) or _NEXT
            return Expectation(submission.train, submission.infer, math.inf, why)
        pool = self._handles.pool
        slots = pool.slots_on(submission.train or submission.infer[:1], submission.column)
        ask = self._handles.scheduler.expected_start.remote(name, tuple(slots))
        seconds, why = ray.get(ask, timeout=ANSWER_S)
        return Expectation(submission.train, submission.infer, seconds, why)

    # -- processes and their ends ------------------------------------------------------------------------------------

    def _start(self, job: Job, submission: Submission) -> None:
        """Starts a pipeline's process, under the lock. Raises what that raises; the submission has failed then."""
        try:
            self._actors[job.name] = self.create_pipeline_actor(job, submission.incarnation)
        except Exception as error:
            self._conclude(submission, Outcome("failed", f"{type(error).__name__}: {error}"))
            raise
        self._begin_watch(submission)

    def create_pipeline_actor(self, job: Job, incarnation: int) -> object:
        """Starts a job's process under the name and in the namespace by which its GPUs can be taken back; its handle.
        `incarnation`: larger than that of any earlier submission of this pipeline. Raises PoolError: it has no Unix
        user, and this pool's jobs run as theirs.
        """
        import ray

        if self._options.run_as_submitter and not job.unix_user:
            raise PoolError(f"{job.name}: has no Unix user to run as, and would run as the pool's; submit it again")
        variables = variables_of(job)
        if job.unix_user:
            variables[RUN_AS] = job.unix_user
            # A job of this name may have left another user's.
            adapter_states(Path(self._handles.log_dir), job.name).unlink(missing_ok=True)
        if cap := self._submissions[job.name].limits.memory:
            # The kernel counts shared objects for the job that used their pages first.
            store = max(int(node["Resources"].get("object_store_memory", 0)) for node in ray.nodes())
            variables[MEMORY_GROUP] = f"{cap + store} {run_of(job.name, incarnation)}"
        pipeline: Any = ray.remote(self.pipeline_class(job))
        actor = pipeline.options(
            name=agent_actor_name(incarnation),
            namespace=agent_namespace(job.name),
            lifetime="detached",
            num_cpus=0,
            **self._nodes.staying(),
            max_concurrency=ACTOR_THREADS,
            runtime_env={"env_vars": without_private(variables) | {INCARNATION_VARIABLE: str(incarnation)}},
        ).remote(job, self._handles, incarnation)
        actor.start.remote()
        return actor

    def pipeline_class(self, job: Job) -> type[LentPipeline]:
        """Pipeline class of a job."""
        found: type[LentPipeline] = import_dotted(PIPELINES[job.kind], "pipeline_cls")
        return found

    def _watch(self, submission: Submission) -> None:
        import ray

        actor, outcome = self._actors[submission.name], None
        while outcome is None:
            try:
                outcome = ray.get(actor.outcome.remote())
            except ray.exceptions.ActorUnavailableError:
                time.sleep(_NODE_S)  # a connection broke: Ray finds out whether the process is gone, and why
            except ray.exceptions.RayError as error:
                outcome = Outcome("died", how_it_ended(error))
        # The process may be gone by now; how the run ended is known.
        with suppress(ray.exceptions.RayError):
            self._note_progress(submission, ray.get(actor.progress.remote(), timeout=ANSWER_S))
        if submission.asked == "cancel" and outcome.kind != "done":
            seen = self._seen.get(submission.name)
            at = f"at step {seen.step} of {seen.of}; its last finished checkpoint stays" if seen and seen.of else ""
            outcome = Outcome("cancelled", at, seen.step if seen else 0, seen.waited_s if seen else 0.0)
        elif outcome.kind != "done" and (why := submission.refused or self._hosts.why_by_kernel(submission)):
            outcome = Outcome("failed", why, outcome.steps, outcome.waited_s)
        self._note_end(submission, outcome)
        if outcome.kind in _LEFT:
            ray.kill(actor, no_restart=True)

    def _note_progress(self, submission: Submission, progress: Progress) -> None:
        self._seen[submission.name] = progress
        if progress.log_dir and submission.log_dir != progress.log_dir:
            self._change(submission, log_dir=progress.log_dir)

    def _note_end(self, submission: Submission, outcome: Outcome) -> None:
        if outcome.kind not in _LEFT:
            level = logging.INFO if outcome.kind == "cancelled" else logging.ERROR
            logger.log(level, "pipeline=%s outcome=%s reason=%s", submission.name, outcome.kind, outcome.reason)
            # Its processes are ended and its GPUs verified free before anybody else gets them.
            self._end_surely(submission.name)
        with self._lock:
            self._residents.leave(submission.name)
            if submission.moving and not submission.is_ending and not submission.asked:
                cut_off = outcome.kind in _CUT_OFF
                may = outcome.kind == "drained" or self._suspended or self._waiting.read(submission.name).resumes
                if (cut_off or outcome.kind == "drained") and may:
                    # It begins again, ahead of those that were submitted later.
                    submission.waits = True
                    submission.incarnation = _next_incarnation(submission.incarnation)
                    self._keep()
                elif cut_off:
                    outcome = replace(outcome, kind="failed", reason="its node had to leave, and it saves nothing")
            if not submission.waits:
                self._conclude(submission, outcome)
        self._begin_waiting()

    def _conclude(self, submission: Submission, outcome: Outcome) -> None:
        """Notes that a job has ended for good, under the lock."""
        submission.waits = submission.moving = False
        submission.outcome, submission.ended_at = outcome, time.time()
        self._keep()
        self._waiting.drop(submission.name)
        self._notify(submission)

    def _notify(self, submission: Submission) -> None:
        """Posts a job's end to the pool's webhook, once it has one and does not know of it."""
        if self._notices is None or submission.notified or submission.outcome is None:
            return
        self._notices.post(
            {
                "pool": self._handles.name,
                "name": submission.name,
                **({"user": submission.user} if submission.user else {}),
                "outcome": submission.outcome.kind,
                "reason": submission.outcome.reason,
                "steps": submission.outcome.steps,
                "seconds": round((submission.ended_at or time.time()) - submission.submitted_at, 3),
                "log_dir": submission.log_dir,
            },
            lambda: self._change(submission, notified=True),
        )

    def settle_notices(self, timeout_s: float) -> bool:
        """Waits until the ends of jobs have been posted, or were given up; whether that is so."""
        return self._notices is None or self._notices.settle(timeout_s)

    def leave_hosts(self) -> None:
        """Removes what the hosts still have of ended jobs."""
        self._hosts.leave()

    def _end_for(self, submission: Submission, reason: str) -> None:
        logger.error("pipeline=%s event=ended_for_its_host reason=%s", submission.name, reason)
        submission.refused = reason
        try:
            self._end_processes(submission.name)
        except Exception:
            submission.refused = ""  # the next round tries again
            raise

    def _end_processes(self, name: str) -> None:
        import ray

        known = ray.get(self._handles.scheduler.describe.remote(), timeout=ANSWER_S)["pipelines"].get(name, {})
        self.unregister_pipeline(name)
        if known.get("incarnation") != self._submissions[name].incarnation and name in self._actors:
            # Its process is coming up, or has failed before: the scheduler knows nothing that it could end.
            ray.kill(self._actors[name], no_restart=True)

    def _end_surely(self, name: str) -> None:
        """The same as soon as the scheduler answers: it may be starting again, or its disk may be full."""
        import ray

        said = ""
        while True:
            try:
                return self._end_processes(name)
            except ray.exceptions.RayError as error:
                if said != (said := first_line(getattr(error, "cause", error))):
                    logger.error("pipeline=%s event=not_unregistered_yet reason=%s", name, said)
            time.sleep(_NODE_S)

    def end(self, name: str) -> str:
        """Cancels a pipeline, without asking for rights; see `PoolActor.cancel`."""
        submission = self._known(name)
        if submission.outcome is not None:
            return f"has ended already: {submission.outcome.kind}"
        if self._suspended:
            if not submission.waits:
                self._end_processes(name)
            return "is kept for the pool that continues from this one"
        if left := self._leave_queue(submission, "cancelled"):
            return left
        self._change(submission, asked="cancel")
        self._end_processes(name)
        return "is being cancelled"

    def _drain(self, name: str) -> str:
        import ray

        submission = self._known(name)
        if submission.outcome is not None:
            return f"has ended already: {submission.outcome.kind}"
        if left := self._leave_queue(submission, "drained"):
            return left
        try:
            does: str = ray.get(self._process_of(name).drain.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise PoolError(f"{name}: does not answer ({type(error).__name__}); cancel it") from error
        self._change(submission, asked="drain")
        return f"draining: {does}"

    # -- how jobs stand ----------------------------------------------------------------------------------------------

    def standings(self) -> list[Standing]:
        """Every pipeline that was submitted, in order."""
        import ray

        with self._lock:
            if self._unwritten:
                self._keep()
            submissions, actors = dict(self._submissions), dict(self._actors)
        asked = {
            actors[name].progress.remote(): submission
            for name, submission in submissions.items()
            if submission.outcome is None and not submission.waits and name in actors
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1.0) if asked else ([], [])
        for answer in ready:
            with suppress(ray.exceptions.RayError):
                self._note_progress(asked[answer], ray.get(answer))
        with self._lock:
            for entry in self._log.new():
                self._sharing.take(entry.time, entry.event)
            sharing = self._sharing.so_far(time.time())
        found: list[Standing] = []
        for name, submission in submissions.items():
            same = {key: getattr(submission, key) for key in KEPT_AND_SHOWN}
            waits = (self._why_it_waits(submission) or _NEXT) if submission.waits else ""
            hosts, disk = self._hosts.of(name if submission.outcome is None else "")
            now = Standing(**same, progress=self._seen.get(name), sharing=sharing.get(name), waits=waits)
            found.append(replace(now, hosts=hosts, disk=disk))
        return found

    def _adapters(self, name: str, command: str, values: Sequence[str]) -> object:
        import ray

        submission = self._known(name)
        if submission.outcome is not None:
            raise PoolError(f"{name}: has ended already: {submission.outcome.kind}")
        if submission.waits:
            raise PoolError(f"{name}: has not begun: {self._why_it_waits(submission) or _NEXT}")
        method = getattr(self._process_of(name), "adapters", None)
        if method is None:
            raise PoolError(f"{name}: is no job of adapters")
        try:
            return ray.get(method.remote(command, values), timeout=ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise PoolError(f"{name}: {error.cause}") from error
            raise
        except ray.exceptions.RayError as error:
            raise PoolError(f"{name}: does not answer ({type(error).__name__})") from error

    def _process_of(self, name: str) -> Any:
        if name not in self._actors:
            raise PoolError(f"{name}: is just being started; ask again in a few seconds")
        return self._actors[name]

    def students(self, name: str) -> list[str]:
        """The jobs that name this one as a teacher of theirs and have not ended."""
        return [one.name for one in self._open() if name in one.teachers and one.name != name]

    def teacher(self, name: str) -> tuple[Any, str]:
        """The process of a job that is a teacher; None, and why, where there is none."""
        submission, actor = self._submissions.get(name), self._actors.get(name)
        if submission is None or actor is None:
            return None, f"the pool has no job {name!r}"
        if submission.outcome is not None:
            return None, f"the job {name!r} has ended ({submission.outcome.kind})"
        if submission.teachers != (name,):
            return None, f"the job {name!r} is no teacher"
        return actor, ""

    # -- moves -------------------------------------------------------------------------------------------------------

    def suspend(self) -> list[str]:
        """Has the jobs save and wait for a pool that continues from this one's log; what each does, a line."""
        self._suspended = True
        return [line for submission in self._started() for line in self._move(submission)]

    def _drain_nodes(self, request: str, chosen: Callable[[], list[Node]], within_s: float | None) -> list[str]:
        """Drains the nodes of a request, which are chosen when it is first made."""
        if (numbers := self._requests.get(request)) is None:
            numbers = [node.number for node in chosen()]
            if request:
                with self._lock:
                    self._requests[request] = numbers
                    self._keep()
        said: list[str] = []
        for node in map(self._nodes.all().__getitem__, numbers):
            if new := node.number not in self._nodes.gone:
                self._nodes.drain(node, within_s)
            said += [f"{node}: draining", *self._move_off(node)]
            if new:
                _beside(self._clear, node, within_s)
        return said

    def _move_off(self, node: Node) -> Iterator[str]:
        """Drains the jobs that train or have their process on a node, so that they begin again elsewhere."""
        gone, per_node = self._nodes.gpus_gone(), self._handles.pool.gpus_per_node
        for submission in self._started():
            trains = any(gpu // per_node == node.number for gpu in submission.train)
            if trains or self._nodes.is_on(self._actors[submission.name], node):
                yield from self._move(submission)
            elif gone.issuperset(submission.infer):
                yield f"{submission.name}: waits until a node of its GPUs is back"

    def _move(self, submission: Submission) -> Iterator[str]:
        name = submission.name
        with self._lock:
            if submission.outcome is not None:
                return
            submission.moving = True
            self._keep()
            resumes = self._waiting.read(name).resumes
        if resumes:
            self._actors[name].drain.remote()
            where = "in the next pool" if self._suspended else "where it has a place"
            yield f"{name}: finishes its step, saves, and goes on {where}"
        elif self._suspended:
            yield f"{name}: saves nothing, and begins again from its start"
        else:
            yield f"{name}: goes on, as it saves nothing; it fails if it is not done when the node has to leave"

    def _clear(self, node: Node, within_s: float | None, moved: bool = True) -> None:
        """Gives a node back, once nothing of the pool is on it. `moved`: whether all jobs on it have been moved off."""
        deadline = time.monotonic() + (math.inf if within_s is None else within_s)
        while node.number in self._nodes.gone:
            try:
                if not moved:
                    list(self._move_off(node))
                moved = True
                there = [one for one in self._started() if self._nodes.is_on(self._actors[one.name], node)]
                if time.monotonic() > deadline:
                    for one in there:
                        if self._waiting.read(one.name).resumes:
                            self._end_processes(one.name)
                        else:
                            self._end_for(one, f"{node} had to leave, and it saves nothing")
                if not there and self._nodes.let_go(node.number):
                    return
            except Exception as error:  # noqa: BLE001 - a job may have just ended: what fails is tried again
                logger.error("node=%d event=not_cleared_yet reason=%s", node.number, error)
            time.sleep(_NODE_S)


def _beside(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name=work.__name__, daemon=True).start()


def _next_incarnation(last: int) -> int:
    return max(int(time.time()), last + 1)


def check_unix_user(job: Job) -> None:
    """Raises PoolError: a job's Unix user cannot work where it was submitted, or write its logs or checkpoints."""
    if job.unix_user and (why := why_unusable(job.unix_user, job.folder, job.writes_in)):
        raise PoolError(f"{job.name}: {why}")


def owner_of(submission: Submission) -> Owner:
    """Whose job it is."""
    return Owner(submission.user, submission.group)


class WaitingJobs:
    """The jobs that wait for their turn, or may have to begin again, in files of `folder` that the pool's user alone
    can read: a restarted actor starts them, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, job: Job) -> None:
        """Keeps a job."""
        from ray import cloudpickle

        self._folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._file(job.name), cloudpickle.dumps(job), durable=True, mode=0o600)

    def read(self, name: str) -> Job:
        """A job that was kept. Raises OSError: it is not there."""
        from ray import cloudpickle

        job: Job = cloudpickle.loads(self._file(name).read_bytes())
        return job

    def drop(self, name: str) -> None:
        """Forgets a job; one that is not there is no error."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.job"


def variables_of(job: Job) -> dict[str, str]:
    """Environment variables of a job's processes: which pipeline they belong to, and those that it was submitted with,
    where they have a say. A command's threads are its own, and a token that Ray was started with is not the job's.
    """
    caps = {} if job.kind is Kind.EXTERNAL else {name: os.environ.get(name, value) for name, value in _CAPS.items()}
    return {**caps, TOKEN_VARIABLE: "", WORKING_DIRECTORY: job.folder, **job.env, **agent_variables(job.name)}
