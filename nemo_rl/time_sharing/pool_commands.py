"""Commands for a pool that is open: submit, status, drain, cancel, explain.

The pool is found by its file (`open_pools`), or by its Ray cluster where RAY_ADDRESS names one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, add_config, log_to_stderr
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import ConfigError, UserError
from nemo_rl.time_sharing.agents.actors import CONTROL_NAMESPACE, POOL_NAME
from nemo_rl.time_sharing.arguments import check_variables
from nemo_rl.time_sharing.log.pool_state import PoolState, Standing
from nemo_rl.time_sharing.log.reading import LogTail
from nemo_rl.time_sharing.open_pools import OpenPool, the_open_pool
from nemo_rl.time_sharing.pipelines.admission import doubt, estimated_needs, what_it_takes
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pool import About
from nemo_rl.time_sharing.pool_jobs import Expectation, PoolError
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import HIGH, SCAVENGER
from nemo_rl.time_sharing.team import own_token
from nemo_rl.time_sharing.viewing.standings_table import StandingsTable
from nemo_rl.time_sharing.viewing.timeline import Timeline, TimelineBuilder, in_unit

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_ANSWER_S = 60.0
_POLL_S, _TROUBLE_S = 1.0, 15.0
_CANCEL_S, _CLEAR_S = 60.0, 900.0
_NEWEST = 10
_CODE_KEYS = {"agent", "class", "function", "custom_dataloader", "processor", "dataset_name", "target"}
"""Keys of a configuration that may name a class or function of the user's."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")


def guarded(work: Callable[[], int], interrupted: str = "interrupted; the pool and its jobs go on") -> int:
    """Runs a command; a UserError becomes one line and exit code 2, an interrupt a line and exit code 130: its own
    text, or `interrupted`.
    """
    log_to_stderr()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return work()
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"{str(interrupt) or interrupted}\n")
        return EXIT_INTERRUPTED


def submit(chosen: argparse.Namespace) -> int:
    """Submits files to the open pool; with `--wait`, until they have ended."""
    env = submitters_env(chosen.env)
    actor, pool = _join(chosen.pool)
    token = _users_token(actor)
    files, overrides = files_and_overrides(chosen.files)
    jobs = read_jobs(files, pool, overrides)
    if chosen.wait:
        return follow(actor, jobs, env, token)
    _admit(actor, jobs, env, token, [])
    return EXIT_OK


def _admit(
    actor: ActorHandle[object], jobs: Sequence[Job], env: Mapping[str, str], token: str, names: list[str]
) -> None:
    """Submits jobs to a pool that others use, and says of each what it takes and when it can begin. `token`, `names`:
    see `submit_all`.
    """
    about = _about(actor)
    needs = {job.name: estimated_needs(job, about.memory) for job in jobs}
    for name in submit_all(actor, jobs, env, token=token, names=names):
        found: Expectation = ask(actor.expected_start.remote(name))
        said = what_it_takes(
            found.train, found.infer, needs[name], found.seconds, in_unit(found.why, about.unit), about.unit
        )
        sys.stderr.write(f"{name}: {said}{doubt(needs[name], about.memory)}\n")
    _say(*names)


def status(chosen: argparse.Namespace) -> int:
    """Shows every pipeline of the open pool on standard output."""
    actor, pool = _join(chosen.pool)
    about = _about_for_user(actor)
    nodes = ask(actor.nodes.remote()) if pool.nodes > 1 else []
    standings = _standings(actor, None)
    if chosen.json:
        pipelines = [asdict(each) | {"state": each.state} for each in standings]
        for one in pipelines if not about.team else ():
            del one["user"], one["group"]
        shown: dict[str, object] = {"pool": about.name, "pipelines": pipelines}
        if nodes:
            shown["nodes"] = [node._asdict() for node in nodes]
        _say(json.dumps(shown, indent=2))
    elif not standings:
        _say(f"pool {about.name}: no pipelines; submit FILE adds one")
    else:
        lines = [f"pool {about.name}", about.trouble, about.unheard, about.caps]
        _say(*filter(None, lines), *(f"{node}: {node.state}" for node in nodes))
        StandingsTable(about.unit, file=sys.stdout).print(standings)
    return EXIT_OK


def drain(chosen: argparse.Namespace) -> int:
    """Lets pipelines finish their step, save and leave; waits for that until the deadline."""
    return _end_each(chosen, "drain", chosen.deadline)


def cancel(chosen: argparse.Namespace) -> int:
    """Ends pipelines whatever they do."""
    return _end_each(chosen, "cancel", _CANCEL_S)


def _end_each(chosen: argparse.Namespace, method: str, deadline_s: float) -> int:
    actor, _ = _join(chosen.pool)
    token = _users_token(actor)
    for name in chosen.names:
        _say(f"{name}: {ask(getattr(actor, method).remote(name, token))}")
    deadline, left = time.monotonic() + deadline_s, set(chosen.names)
    while True:
        late = time.monotonic() > deadline
        for standing in _standings(actor, left):
            said = f"{standing.state} {standing.why}".rstrip()
            if standing.outcome is not None:
                left.remove(standing.name)
                _say(f"{standing.name}: {said}")
            elif late:
                _say(
                    f"{standing.name}: has not ended after {deadline_s:g} s ({said}); it still does when it can; "
                    f"python -m nemo_rl.time_sharing cancel {standing.name} ends it at once"
                )
        if late or not left:
            return EXIT_FAILED if left else EXIT_OK
        time.sleep(_POLL_S)


def adapters(chosen: argparse.Namespace) -> int:
    """Adds, removes or lists the adapters of a pipeline of the open pool."""
    if (chosen.what == "list") == bool(chosen.values):
        wanted = {"add": "files of adapters", "remove": "names of adapters", "list": "nothing more"}[chosen.what]
        raise PoolError(f"adapters {chosen.what} {chosen.name}: give {wanted}")
    actor, _ = _join(chosen.pool)
    values = [str(Path(value).resolve()) if chosen.what == "add" else value for value in chosen.values]
    for answer in ask(actor.adapters.remote(chosen.name, chosen.what, values, _users_token(actor))):
        _say(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
    return EXIT_OK


def drain_node(chosen: argparse.Namespace) -> int:
    """Has a node cleared and given back, and waits for that."""
    return _leave(chosen, "drain_node", chosen.node)


def give_back(chosen: argparse.Namespace) -> int:
    """The same for as many nodes as have so many GPUs."""
    return _leave(chosen, "give_back", chosen.gpus)


def _leave(chosen: argparse.Namespace, method: str, what: object) -> int:
    actor, _ = _join(chosen.pool)
    before = {node.number for node in ask(actor.nodes.remote()) if node.state != "here"}
    _say(*ask(getattr(actor, method).remote(what, chosen.by, _users_token(actor), uuid.uuid4().hex)))
    limit_s = _CLEAR_S if chosen.by is None else chosen.by + _CANCEL_S
    deadline, said = time.monotonic() + limit_s, ""
    while not chosen.no_wait:
        nodes = [node for node in ask(actor.nodes.remote()) if node.state != "here" and node.number not in before]
        left = [node for node in nodes if node.state == "draining"]
        if not left:
            _say(*(f"node {node.number}: given back" for node in nodes))
            return EXIT_OK
        waits = "; ".join(f"{one.name} ({one.why or one.state})" for one in _standings(actor, None) if one.moving)
        now = f"waits for {waits or 'its engines to sleep'}"
        if time.monotonic() > deadline:
            _say(f"{left[0]}: {now} after {limit_s:g} s; it is given back once it is clear")
            return EXIT_FAILED
        if now.partition(" (")[0] != said:
            said = now.partition(" (")[0]
            _say(f"{left[0]}: {now}")
        time.sleep(_POLL_S)
    return EXIT_OK


def add_node(chosen: argparse.Namespace) -> int:
    """Takes a node into the open pool."""
    actor, _ = _join(chosen.pool)
    _say(*ask(actor.add_node.remote(chosen.node, _users_token(actor))))
    return EXIT_OK


def reload(chosen: argparse.Namespace) -> int:
    """Has the pool read its team file again; prints what that changes."""
    actor, _ = _join(chosen.pool)
    _say(*ask(actor.reload.remote(_users_token(actor))) or ["the team file says what it said before"])
    return EXIT_OK


def explain(chosen: argparse.Namespace) -> int:
    """Prints for every GPU its holder and the reason, in the words of the plans."""
    log_dir: Path | None = chosen.log_dir
    wishes: list[str] = []
    if log_dir is None:
        actor, _ = _join(chosen.pool)
        about = _about_for_user(actor)
        for standing in _standings(actor, chosen.names or None):
            wishes += [f"{standing.name}: {wish} {said}" for wish, said in standing.kept(time.time()).items()]
        log_dir = Path(about.log_dir)
    builder = TimelineBuilder()
    for entry in LogTail(log_dir / "scheduler.jsonl").new():
        builder.take(entry)
    timeline = builder.so_far(None)
    if not timeline.origin and not timeline.decisions:
        raise PoolError(f"{log_dir}: there is no scheduler.jsonl with a plan in it; give the folder of a pool's log")
    _say(*explained(timeline, chosen.names, PoolState.read(log_dir / "pool.json").unit), *wishes)
    return EXIT_OK


def explained(timeline: Timeline, names: Sequence[str], unit: str) -> Iterator[str]:
    """Holders of the GPUs at the end of a timeline and the newest decisions about them, of these pipelines or all."""
    held = [o for o in timeline.of("gpus") if o.end >= timeline.end and (not names or o.pipeline in names)]
    for slot in range(timeline.pool.slots):
        gpu = timeline.pool.name_of(slot)
        now = [o for o in held if slot in o.gpus]
        if not now:
            if not names:
                yield f"{unit} {gpu}: free"
            continue
        for o in now:
            whose = _whose(timeline, o.pipeline)
            yield f"{unit} {gpu}: {o.label} ({o.phase} for {timeline.end - o.start:.1f} s){whose}"
            for _, plan, text in timeline.decisions:
                if plan == o.plan and o.pipeline in text:
                    yield f"    plan {plan}: {in_unit(text, unit)}"
    for name, gpus in timeline.entitled.items():
        if not names or name in names:
            yield f"{name}: entitled to {gpus:.2f} {unit}s by the newest plan{_whose(timeline, name)}"
    yield from _quota_lines(timeline, unit)
    demand, up = {level.pipeline: level.value for level in timeline.demand}, {o.pipeline for o in held}
    for name in demand:
        scavenges = timeline.priorities.get(name) == SCAVENGER
        if scavenges and demand[name] and name not in up and (not names or name in names):
            yield f"{name}: waits for a gap: {unit}s that no job can use now, and that none trains on soon"
    for name in timeline.pipelines:
        if timeline.priorities.get(name) == HIGH and (not names or name in names):
            waits = [min(o.end, timeline.end) - o.start for o in timeline.of("queue") if o.pipeline == name]
            longest, promised = max(waits, default=0.0), timeline.high_wait_s
            kept = "kept" if longest <= promised else f"missed by {longest - promised:.0f} s"
            yield f"{name}: waited {longest:.0f} s for training {unit}s at most; high_wait_s is {promised:g}: {kept}"
    newest = [d for d in timeline.decisions if not names or any(name in d[2] for name in names)][-_NEWEST:]
    yield "newest decisions:" if newest else "no decisions yet"
    for when, plan, text in newest:
        by = f", plan {plan}" if plan >= 0 else ""
        yield f"    {when:.1f} s{by}: {in_unit(text, unit)}"


def _whose(timeline: Timeline, name: str) -> str:
    rules = {
        HIGH: f"; priority high: its requests come before those that others made in the {timeline.lead_s:g} s before",
        SCAVENGER: "; priority scavenger: it runs in gaps, and any job that can use its place gets it",
    }
    user = f", of {timeline.users[name]}" if name in timeline.users else ""
    return user + rules.get(timeline.priorities.get(name, ""), "")


def _quota_lines(timeline: Timeline, unit: str) -> Iterator[str]:
    """Share and limit of each group and user that has one, and its part of what was had of late."""
    for node in timeline.quotas:
        said = [] if node.share is None else [f"share {node.share:g} of {node.parent or 'the pool'}"]
        said += [] if node.limit is None else [f"at most {node.limit:g} {unit}s"]
        had = sum(timeline.use.get(other.name, 0.0) for other in timeline.quotas if other.parent == node.parent)
        if node.share is not None and had:
            said.append(f"had {timeline.use.get(node.name, 0.0) / had:.0%} of it of late")
        if said:
            yield f"{node.name}: {', '.join(said)}"


def run_under_control_plane(arguments: Sequence[str], *, default_config: Path, prog: str | None = None) -> int:
    """Entry of the scripts under `examples` with `RLIX_CONTROL_PLANE=rlix`: submits the run to the open pool and
    follows it to its end.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Runs on a shared pool.")
    add_config(parser, default_config)
    chosen, overrides = parser.parse_known_args(list(arguments))

    def work() -> int:
        env = submitters_env()
        actor, pool = _join(None)
        token = _users_token(actor)
        jobs = read_jobs([chosen.config or default_config], pool, overrides)
        return follow(actor, jobs, env, token)

    return guarded(work)


# -- shared with the launcher ----------------------------------------------------------------------------------------


def files_and_overrides(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Overrides that follow a list of files belong to the list, as far as the command line's parser knows."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    return [Path(argument) for argument in arguments if argument not in overrides], overrides


def submitters_env(named: Sequence[str] = ()) -> dict[str, str]:
    """Variables that a job takes along from where it is submitted: PYTHONPATH with the working directory, and those
    that are named, as NAME or NAME=VALUE. Raises PoolError: a variable is named that is not set; ForeignVariable: see
    `check_variables`.
    """
    folders = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(os.path.abspath(folder) for folder in folders))}
    for text in named:
        name, given, value = text.partition("=")
        if not given and name not in os.environ:
            raise PoolError(f"--env {name}: is not set here; set it, or give --env {name}=VALUE")
        env[name] = value if given else os.environ[name]
    check_variables(os.environ, {name: value for name, value in env.items() if name != "PYTHONPATH"})
    return env


def submit_all(
    actor: ActorHandle[object],
    jobs: Sequence[Job],
    env: Mapping[str, str],
    *,
    admit_delay_s: float = 0.0,
    token: str = "",
    names: list[str] | None = None,
) -> list[str]:
    """Submits jobs whose code can be imported; their names. `admit_delay_s`: seconds for which each waits at most until
    the one before it has made its first step or ended. `token`: the user's, on a pool for a team. `names`: gets the
    name of each at once. Raises ConfigError: a file names code that cannot be imported; PoolError: the pool refuses
    one.
    """
    check_code(jobs)
    names = [] if names is None else names
    for job in jobs:
        deadline = time.monotonic() + admit_delay_s
        while names and time.monotonic() < deadline:
            (last,) = _standings(actor, names[-1:])
            if last.outcome is not None or (last.progress is not None and last.progress.step > 0):
                break
            time.sleep(_POLL_S)
        answer = actor.submit.remote(replace(job, env=env, request=uuid.uuid4().hex), token)
        try:
            names.append(ask(answer))
        except KeyboardInterrupt:
            with suppress(PoolError):
                names.append(ask(answer))  # it is submitted all the same
            raise
    return names


def check_code(jobs: Sequence[Job]) -> None:
    """Imports the classes and functions that the files name, from where the jobs will: a job would fail minutes later.
    Raises ConfigError: one cannot be imported.
    """
    problems: list[str] = []
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        for job in jobs:
            for key, path in _named_code(job.config.model_dump(mode="python", by_alias=True)):
                try:
                    import_dotted(path, f"{job.name}: {key}")
                except ConfigError as error:
                    problems += error.problems
                except Exception as error:
                    raise ConfigError([f"{job.name}: {key}: {path!r} cannot be imported: {error!r}"]) from error
    finally:
        with suppress(ValueError):
            sys.path.remove(here)
    if problems:
        where = "put its folder on PYTHONPATH, or submit from there"
        raise ConfigError([f"{problem}; {where}" for problem in problems])


def _named_code(node: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and paths of a user's own code in a configuration."""
    from nemo_rl.data.datasets.registry import SOURCES

    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from _named_code(value, f"{key}.{index}")
    if isinstance(node, dict):
        for name, value in node.items():
            at = f"{key}.{name}".lstrip(".")
            if name in _CODE_KEYS and isinstance(value, str) and _DOTTED.fullmatch(value) and value not in SOURCES:
                yield at, value
            yield from _named_code(value, at)


def watch(actor: ActorHandle[object], names: Sequence[str]) -> list[Standing]:
    """Shows the pipelines until all of them have ended; how they stand then."""
    about = _about(actor)
    with StandingsTable(about.unit) as table:
        asked = time.monotonic()
        while True:
            ours = _standings(actor, names)
            if time.monotonic() - asked > _TROUBLE_S:
                about, asked = _about(actor), time.monotonic()
            table.show(ours, about.trouble)
            if all(standing.outcome is not None for standing in ours):
                return ours
            time.sleep(_POLL_S)


def follow(actor: ActorHandle[object], jobs: Sequence[Job], env: Mapping[str, str], token: str) -> int:
    """Submits jobs and shows them until they have ended; an interrupt cancels them. `env`, `token`: see `submit_all`.
    Raises as that.
    """
    names: list[str] = []
    try:
        _admit(actor, jobs, env, token, names)
        standings = watch(actor, names)
    except KeyboardInterrupt:
        said = [f"{name} {ask(actor.cancel.remote(name, token))}" for name in names]
        raise KeyboardInterrupt(f"interrupted: {'; '.join(said) or 'nothing was submitted yet'}") from None
    return EXIT_OK if all(s.outcome is not None and s.outcome.kind == "done" for s in standings) else EXIT_FAILED


def _about(actor: ActorHandle[object]) -> About:
    about: About = ask(actor.about.remote())
    return about


def _users_token(actor: ActorHandle[object]) -> str:
    """The token of this command's user; "" where the pool has no team, and asks for none."""
    return own_token() if _about(actor).team else ""


def _about_for_user(actor: ActorHandle[object]) -> About:
    """The pool, for commands that only read. Raises PoolError: its team has no user with this command's token."""
    about = _about(actor)
    if about.team:
        ask(actor.rights.remote(own_token()))
    return about


def _standings(actor: ActorHandle[object], names: Collection[str] | None) -> list[Standing]:
    """Those of these pipelines, or of all."""
    return [standing for standing in ask(actor.standings.remote()) if names is None or standing.name in names]


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def ask(answer: ObjectRef[object]) -> Any:
    """The pool's answer; its refusal is the user's to read, without the trace of the actor."""
    import ray

    try:
        return ray.get(answer, timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise PoolError(str(error.cause)) from error
        raise


def _join(name: str | None) -> tuple[ActorHandle[object], Pool]:
    """The pool on the Ray cluster that RAY_ADDRESS names; else this user's open pool on this machine; else that of the
    Ray cluster that runs here.

    Args:
        name: Which one, where several are open, or the path of a team's pool file; by default what NRL_POOL says.
    """
    import ray

    from nemo_rl.distributed.ray_joining import LOCAL, join_cluster, running_cluster

    name = name or os.environ.get("NRL_POOL") or None
    named = os.environ.get("RAY_ADDRESS")
    found: OpenPool | None = None
    if named in (None, "", LOCAL) or name is not None:
        found = the_open_pool(name, lambda line: sys.stderr.write(f"{line}\n"))
    address = found.address if found is not None else running_cluster()
    if address is None:
        raise PoolError(
            "no pool of yours is open on this machine and RAY_ADDRESS names none; open a pool with "
            "python -m nemo_rl.time_sharing serve --gpus N"
        )
    join_cluster(address, None if found is None else (found.auth_mode, found.token))
    try:
        actor = ray.get_actor(POOL_NAME, namespace=CONTROL_NAMESPACE)
    except ValueError as error:
        raise PoolError(
            f"no pool is open on the Ray cluster {address}; open one with python -m nemo_rl.time_sharing serve --gpus N"
        ) from error
    return actor, ask(actor.handles.remote()).pool
