"""The actor of a pool: what its users may ask of it, on a pool for a team each within the rights of a role.

`PoolActor` outlives the submitter; it starts each pipeline as an actor of its own and notes how it ended (see
`pool_jobs`). If it dies, Ray restarts it and it goes on with the running pipelines, which do not notice.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from nemo_rl.config.errors import UserError, why_not_written
from nemo_rl.distributed.unix_users import why_unusable
from nemo_rl.time_sharing.agents.scheduler_actor import restarting, started_anew
from nemo_rl.time_sharing.job_queue import JobQueueLimits
from nemo_rl.time_sharing.log.pool_state import Submission
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.residents import SlotBytes
from nemo_rl.time_sharing.pool_jobs import (
    ANSWER_S,
    NOTHING_MORE,
    PoolError,
    PoolJobs,
    PoolOptions,
    check_unix_user,
    owner_of,
)
from nemo_rl.time_sharing.pool_nodes import Node
from nemo_rl.time_sharing.protocol.types import HIGH
from nemo_rl.time_sharing.team import (
    ADD_NODE,
    DRAIN_NODE,
    GIVE_BACK,
    RELOAD,
    SUBMIT,
    SUBMIT_HIGH,
    Rights,
    Team,
    TeamError,
    TeamFileError,
    User,
    changes,
    read_team,
)
from nemo_rl.utils.files import replace_file, why_unwritable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class About:
    """A pool in general."""

    name: str
    unit: str  # name of a slot
    log_dir: str
    trouble: str = ""  # obstacle to the scheduler's decisions, with the remedy
    memory: SlotBytes | None = None  # of a slot; None on CPU slots
    team: str = ""  # the file of its team; empty where its user alone uses it
    unheard: str = ""  # why ends of jobs did not reach the webhook
    caps: str = ""  # how host memory is capped


def log_trouble(log_dir: Path) -> str:
    """Message for users if a pool's log cannot be written; empty if it can."""
    why = why_unwritable(log_dir)
    return (
        f"{log_dir}: {why}; the scheduler decides nothing until its log can be written; free some space" if why else ""
    )


def check_unix_users(team: Team, log_dir: str, *, run_as_submitter: bool) -> None:
    """Raises TeamFileError: a user who may submit has no Unix user whose processes could work for the pool, or names
    one that is not asked for.
    """
    if run_as_submitter:
        shared = [log_dir, tempfile.gettempdir(), "/dev/shm"]
        submitters = [user for user in team.users.values() if user.role != "viewer"]
        with ThreadPoolExecutor(8) as threads:
            names = [user.runs_as for user in submitters]
            found = [*threads.map(partial(why_unusable, writes=shared), names)]
    else:
        submitters = [user for user in team.users.values() if user.unix_user]
        found = ["is for serve --run-as-submitter; leave it out, or add that"] * len(submitters)
    problems = [f"users.{user.name}.unix_user: {why}" for user, why in zip(submitters, found, strict=True) if why]
    if any(log_dir in problem for problem in problems):
        problems.append("the pool's log is open to the Unix group of the team file's folder; its users must be in it")
    if problems:
        raise TeamFileError(problems, team.source)


_TEAM = TypeAdapter(Team)
_NO_TEAM = "the pool is for no team; open one with python -m nemo_rl.time_sharing serve --gpus N --team FILE"


class PoolActor(PoolJobs):
    """Runs pipelines on a pool, inside Ray. With a `team`, what users do needs their `token`; without, none is read."""

    def __init__(self, handles: PoolHandles, team: Team | None = None, options: PoolOptions = NOTHING_MORE) -> None:
        with restarting("pool", handles.log_dir, Exception):
            super().__init__(handles, options)
            self._team_path, self._quotas_set = Path(handles.log_dir) / "team.json", False
            self._team: Team | None = None
            if team is not None:
                if started_anew():
                    # It was made with the team of the pool's opening, which may have been changed since.
                    team = _TEAM.validate_json(self._team_path.read_bytes())
                else:
                    self._keep_team(team)
                self._set_quotas(team)
                self._take_team(team)
            self._go_on()

    def _set_quotas(self, team: Team) -> list[str]:
        """Tells the scheduler a team's shares and limits of GPUs; a line for each limit that jobs are above now."""
        import ray

        if not (team.shares_gpus or self._quotas_set):
            return []
        self._quotas_set = True
        ask = self._handles.scheduler.set_quotas.remote(team.nodes, team.half_life_hours * 3600.0)
        above: dict[str, float] = ray.get(ask, timeout=ANSWER_S)
        return [
            f"{node}: its jobs have {gpus:g} {self._handles.unit}s, more than its limit: engines give theirs back now, "
            "training at the end of its step"
            for node, gpus in above.items()
        ]

    def about(self) -> About:
        """The pool in general."""
        log_dir = self._handles.log_dir
        team = self._team.source if self._team is not None else ""
        trouble, unheard = log_trouble(Path(log_dir)), self._notices.trouble if self._notices is not None else ""
        handles, caps = self._handles, self._hosts.caps
        return About(handles.name, handles.unit, log_dir, trouble, handles.memory, team, unheard, caps)

    def rights(self, token: str) -> Rights:
        """What the user of a token may do now. Raises PoolError: the pool has no team; TeamError: the token is no
        user's.
        """
        team = self._team
        if team is None:
            raise PoolError(_NO_TEAM)
        user = team.user_of(token)
        submissions = list(self._submissions.values())
        jobs = (one.name for one in submissions if team.may_manage(user, owner_of(one)))
        return Rights(user.name, user.role, frozenset(jobs))

    @contextmanager
    def _acting(self, token: str, action: str, subject: str) -> Generator[User | None]:
        """The user of a token does something in the block, which the log says in any case; None without a team. Raises
        TeamError: the user may not.
        """
        if self._team is None:
            yield None
            return
        name, outcome = "", "done"
        known = self._submissions.get(subject)
        try:
            user = self._team.user_of(token)
            name = user.name
            self._team.check(user, action, subject, owner_of(known) if known else None)
            yield user
        except Exception as error:
            why = " ".join(str(error).split())
            outcome = f"{'refused' if isinstance(error, UserError) else 'failed'}: {why}"
            raise
        finally:
            self._note_acted(name, action, subject, outcome)

    def _note_acted(self, user: str, action: str, subject: str, outcome: str) -> None:
        import ray

        try:
            ray.get(self._handles.scheduler.acted.remote(user, action, subject, outcome), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            logger.error("user=%s action=%s subject=%s log=not_written reason=%s", user, action, subject, error)

    def see_logs(self, name: str, token: str = "") -> None:
        """Raises TeamError: the user of the token may not read the logs of this job."""
        with self._acting(token, "see the logs of", name):
            self._known(name)

    def reload(self, token: str = "") -> list[str]:
        """Reads the team file again; what that changes, a line each. Raises PoolError: the pool has no team, its copy
        of the file cannot be written, or the scheduler is down; ConfigError, NotPrivate: see `read_team`. The team
        stays as it was then.
        """
        import ray

        if self._team is None:
            raise PoolError(_NO_TEAM)
        with self._acting(token, RELOAD, self._team.source):
            before, after = self._team, read_team(Path(self._team.source))
            check_unix_users(after, self._handles.log_dir, run_as_submitter=self._options.run_as_submitter)
            try:
                above = self._set_quotas(after)
                self._keep_team(after)
            except ray.exceptions.RayError as error:
                raise PoolError(f"the scheduler does not answer ({type(error).__name__}); reload again") from error
            except OSError as error:
                raise PoolError(f"{self._team_path} cannot be written ({why_not_written(error)})") from error
            self._take_team(after)
            said = [
                *changes(before, after),
                *above,
                *self._queue.exceeded(map(owner_of, self._running())),
            ]
            gone = (one for one in self._open() if one.user not in after.users)
            said += [f"job {one.name} of {one.user}, who is gone, goes on" for one in gone]
            said += [
                f"job {one.name}: {above}: it cannot {'begin' if one.waits else 'go on'}; cancel it, or raise the limit"
                for one in self._open()
                if (above := self._above_limit(one))
            ]
        self._begin_waiting()
        return said

    def _keep_team(self, team: Team) -> None:
        replace_file(self._team_path, _TEAM.dump_json(team), durable=True, mode=0o600)

    def _take_team(self, team: Team) -> None:
        self._team, self._queue = team, JobQueueLimits(self._options.queue, team.queue, team.above)

    def submit(self, job: Job, token: str = "") -> str:
        """Starts a pipeline, on the training GPUs on which the least goes on where it may train anywhere, or lets it
        wait for its turn; its name. Raises PoolError: a pipeline of this name runs already, or as many wait as may;
        RegistrationError: it does not fit the pool; TeamError: the user may not submit it, or the name is another
        user's job's.
        """
        with self._acting(token, SUBMIT, job.name) as user:
            return self._submit(self._as_users(job, user))

    def take_over(self, job: Job) -> str:
        """Submits a job that an earlier pool had not ended, with the rights and the Unix user that its user has in this
        one. Raises TeamError: its user may not submit it any more; else as `submit`.
        """
        user = None
        if self._team is not None:
            name = job.options.get("user", "")
            if (user := self._team.users.get(name)) is None:
                raise TeamError(f"its user, {name or 'who is not named'}, is none of the team; submit it again")
            self._team.check(user, SUBMIT, job.name)
        return self._submit(self._as_users(job, user))

    def _as_users(self, job: Job, user: User | None) -> Job:
        """A job as it is its user's, by the team file. Raises TeamError, PoolError: see `submit`."""
        if user is not None and self._team is not None:
            if job.options.get("priority") == HIGH:
                self._team.check(user, SUBMIT_HIGH, job.name)
            job = replace(job, options={**job.options, "user": user.name, "group": user.group})
        job = replace(job, unix_user=user.runs_as if user is not None and self._options.run_as_submitter else "")
        check_unix_user(job)
        return job

    def _above_limit(self, submission: Submission) -> str:
        if self._team is None:
            return ""
        limits = {node.name: node.limit for node in self._team.nodes}
        for name in self._team.above(owner_of(submission)):
            if (limit := limits.get(name)) is not None and submission.needs > limit:
                return f"{name} may have {limit:g} {self._handles.unit}s at once, and it needs {submission.needs:g}"
        return ""

    def cancel(self, name: str, token: str = "") -> str:
        """Ends a pipeline whatever it does; its checkpoints stay. Returns what happens, in words. Raises PoolError:
        there is none of this name; TeamError: the user may not.
        """
        with self._acting(token, "cancel", name):
            return self.end(name)

    def drain(self, name: str, token: str = "") -> str:
        """Asks a pipeline to end at the next place from which it can resume; returns in words what it does first.
        Raises PoolError: no pipeline has this name; TeamError: the user may not.
        """
        with self._acting(token, "drain", name):
            return self._drain(name)

    def nodes(self) -> list[Node]:
        """The pool's nodes, in order."""
        return self._nodes.all()

    def drain_node(self, name: str, within_s: float | None = None, token: str = "", request: str = "") -> list[str]:
        """Has a node cleared and given back, within so many seconds; what that means for it and for jobs, a line each.
        `request`: an id, by which it is known when Ray asks again after this actor died. Raises NodeError: see
        `PoolNodes.leaves`; TeamError: the user may not.
        """
        with self._acting(token, DRAIN_NODE, name):
            return self._drain_nodes(request, lambda: [self._nodes.leaves(name)], within_s)

    def give_back(self, gpus: int, within_s: float, token: str = "", request: str = "") -> list[str]:
        """The same for as many nodes as have so many GPUs, those on which the least trains. Raises NodeError: see
        `PoolNodes.least_used`.
        """
        with self._acting(token, GIVE_BACK, f"{gpus} GPUs"):
            per_node = self._handles.pool.gpus_per_node
            trained = Counter(gpu // per_node for one in self._running() for gpu in one.train)
            return self._drain_nodes(request, lambda: self._nodes.least_used(gpus, trained), within_s)

    def add_node(self, name: str, token: str = "") -> list[str]:
        """Takes a node in; see `PoolNodes.add`."""
        with self._acting(token, ADD_NODE, name):
            node = self._nodes.add(name)
        self._begin_waiting()
        return [f"{node}: here"]

    def adapters(self, name: str, command: str, values: Sequence[str], token: str = "") -> object:
        """Adds, removes or lists adapters of a pipeline; see `CommandPipeline.adapters`. Raises PoolError: there is no
        such pipeline, it has no adapters, or it refused; TeamError: the user may not.
        """
        with self._acting(token, f"{command} adapters of", name):
            return self._adapters(name, command, values)
