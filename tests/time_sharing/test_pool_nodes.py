"""Which nodes of an open pool may leave and come, what becomes of the jobs on them, and what commands say of it."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray

from nemo_rl.time_sharing import launcher, pool_commands, pool_jobs, pool_nodes
from nemo_rl.time_sharing.__main__ import main, parser
from nemo_rl.time_sharing.agents import host_use
from nemo_rl.time_sharing.arguments import from_now
from nemo_rl.time_sharing.launcher import _left_by, _pool_of, options_of
from nemo_rl.time_sharing.log.events import Registered
from nemo_rl.time_sharing.log.pool_state import Outcome, PoolState, Progress
from nemo_rl.time_sharing.pipelines import shared_cluster
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.planning.job_placement import Mapped
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.pool_jobs import PoolError, PoolJobs, PoolOptions
from nemo_rl.time_sharing.pool_nodes import NodeError, PoolNodes
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.team import TeamError, hash_of, read_team
from nemo_rl.utils.record import RecordWriter

_HOSTS = {"aaaa0": "alpha", "bbbb1": "beta", "cccc2": "gamma", "dddd3": "delta"}


class Scheduler:
    """Notes what it is asked, and lets nodes go when `clear`."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.clear = True
        self.registered: dict[str, dict[str, int]] = {}
        self.trouble: list[Exception] = []
        self.describe = SimpleNamespace(remote=self._describe)
        for name in ("drain_node", "node_comes", "node_leaves", "acted"):
            setattr(self, name, SimpleNamespace(remote=lambda *given, name=name: self._answer(name, *given)))

    def _answer(self, name: str, *given: object) -> bool:
        self.asked.append((name, *given))
        return self.clear

    def _describe(self) -> dict[str, object]:
        if self.trouble:
            raise self.trouble.pop()
        return {"pipelines": self.registered}


class Cluster:
    """Ray nodes alpha to gamma are nodes 0 to 2 of a pool of four with two GPUs each; delta is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = {0: "aaaa0", 1: "bbbb1", 2: "cccc2"}
        self.on: dict[str, str] = {}
        self.killed: list[object] = []
        monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
        monkeypatch.setattr(ray, "kill", lambda actor, no_restart: self.killed.append(actor))
        monkeypatch.setattr(pool_nodes, "_hosts", lambda: _HOSTS)
        monkeypatch.setattr(PoolNodes, "_own", lambda nodes: "aaaa0")
        monkeypatch.setattr(PoolNodes, "is_on", lambda _, actor, node: self.on.get(actor.name, "aaaa0") == node.ray_id)
        monkeypatch.setattr(
            shared_cluster, "reservations", lambda: {number: (None, node) for number, node in self.reserved.items()}
        )
        monkeypatch.setattr(shared_cluster, "release_node", lambda number: self.reserved.pop(number, None))
        monkeypatch.setattr(
            shared_cluster, "reserve_node", lambda pool, accelerator, number, on: self.reserved.update({number: on})
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    yield Cluster(monkeypatch)
    for pool in Noded.made:
        pool._nodes.gone.clear()
    Noded.made.clear()
    for thread in threading.enumerate():
        if thread.name.startswith("node-"):
            thread.join(10)


class Process:
    """A job's process."""

    def __init__(self, name: str) -> None:
        self.name, self.drains = name, 0
        self.drain = SimpleNamespace(remote=self._drain)

    def _drain(self) -> None:
        self.drains += 1


@pytest.fixture(autouse=True)
def _no_watch_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would ask Ray about other nodes, and so start it in the tests that come after.
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)


class Noded(PoolActor):
    """A pool's actor without Ray: jobs end when the test says so."""

    made: ClassVar[list[Noded]] = []

    def __init__(self, folder: Path, team: Any = None) -> None:
        self.made.append(self)
        self.scheduler = Scheduler()
        self.begun: list[tuple[str, tuple[int, ...]]] = []
        folder.mkdir(exist_ok=True)
        handles = PoolHandles(self.scheduler, Pool(4, 2), "cpu", Limits(), str(folder), name="ours")
        super().__init__(handles, team, options=PoolOptions(away=1))

    def create_pipeline_actor(self, job: Job, incarnation: int) -> object:
        self.begun.append((job.name, job.train))
        return Process(job.name)

    def _begin_watch(self, submission: Any) -> None: ...

    def _go_on_with(self, submission: Any) -> None:
        self._actors[submission.name] = Process(submission.name)

    def unregister_pipeline(self, pipeline: str) -> None: ...

    def standings_of(self, *names: str) -> list[str]:
        found = (self._submissions[name] for name in names)
        return ["moving" if one.moving else "queued" if one.waits else "runs" for one in found]

    def finish(self, name: str, outcome: Outcome) -> None:
        self._note_end(self._submissions[name], outcome)


class Training(Job):
    """A job that trains, as a configuration of a run would say."""

    resumes = True  # type: ignore[assignment]


class Forgetful(Training):
    resumes = False  # type: ignore[assignment]


def trains(name: str, train: tuple[int, ...], kind: type[Job] = Training, *, anywhere: bool = True) -> Job:
    return kind(name, CommandConfig(command=["true"]), train, tuple(range(6)), anywhere=anywhere)


def until(what: Any) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_moves_off_a_node_that_leaves_and_another_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    pool = Noded(tmp_path)
    for job in (trains("a", (2, 3), anywhere=False), trains("b", (2,)), trains("c", (3,), Forgetful, anywhere=False)):
        pool.submit(job)
    b = pool._submissions["b"]
    b.train = (2,)
    pool.scheduler.clear = False
    assert pool.drain_node("beta", 600.0) == [
        "node 1 (beta, bbbb1): draining",
        "a: finishes its step, saves, and goes on where it has a place",
        "b: finishes its step, saves, and goes on where it has a place",
        "c: goes on, as it saves nothing; it fails if it is not done when the node has to leave",
    ]
    assert pool.scheduler.asked[0] == ("drain_node", 1, 600.0)
    assert [pool._actors[name].drains for name in "abc"] == [1, 1, 0]
    first = b.incarnation
    pool.finish("b", Outcome("drained", "saved"))
    assert pool.begun[-1] == ("b", (0,)) and b.incarnation > first and not b.moving and b.outcome is None
    pool.finish("a", Outcome("dismissed", "node 1 leaves"))
    a = pool._submissions["a"]
    assert a.waits and a.outcome is None and pool.expected_start("a").why == "GPUs that it needs are away"
    pool.finish("c", Outcome("dismissed", "node 1 leaves"))
    ended = pool._submissions["c"].outcome
    assert ended is not None and (ended.kind, ended.reason) == ("failed", "its node had to leave, and it saves nothing")
    pool.scheduler.clear = True
    until(lambda: 1 not in cluster.reserved)
    assert [node.state for node in pool.nodes()] == ["here", "away", "here", "away"]
    # Another actor goes on with the nodes as they are.
    kept = PoolState.read(tmp_path / "pool.json")
    assert kept.gone == [1, 3]
    assert pool.add_node("1") == ["node 1 (beta, bbbb1): here"]
    assert pool.begun[-1] == ("a", (2, 3)) and not a.waits and not a.moving


def test_a_job_that_is_done_or_cancelled_while_it_moves_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    pool = Noded(tmp_path)
    for name in "ab":
        pool.submit(trains(name, (2,), anywhere=False))
    pool.drain_node("1")
    pool.finish("a", Outcome("done"))
    pool._submissions["b"].asked = "cancel"
    pool.finish("b", Outcome("cancelled"))
    outcomes = [pool._submissions[name].outcome for name in "ab"]
    assert [outcome.kind for outcome in outcomes if outcome is not None] == ["done", "cancelled"]
    assert [name for name, _ in pool.begun] == ["a", "b"] and not list((tmp_path / "waiting").iterdir())


def _raises(error: Exception) -> None:
    raise error


def test_an_end_is_noted_as_it_was_once_the_scheduler_answers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_jobs, "_NODE_S", 0.0)
    full_disk = ray.exceptions.RayTaskError("describe", "", OSError(28, "full")).as_instanceof_cause()
    pool, gone = Noded(tmp_path), ray.exceptions.ActorDiedError()
    for name, outcome in (("a", Outcome("done")), ("b", Outcome("failed", "DirectoryInUse"))):
        pool.submit(trains(name, (0,)))
        pool.scheduler.trouble = [full_disk, gone]
        answers = [_raises, lambda _, outcome=outcome: outcome]
        away = ray.exceptions.ActorUnavailableError("its connection broke", None)
        pool._actors[name].outcome = SimpleNamespace(remote=lambda answers=answers, away=away: answers.pop(0)(away))
        pool._actors[name].progress = SimpleNamespace(remote=lambda: _raises(gone))
        pool._watch(pool._submissions[name])
        assert pool._submissions[name].outcome == outcome
        assert cluster.killed.pop() is pool._actors[name], "one that the scheduler does not know, too"
    pool.submit(trains("a", (0,)))
    pool.scheduler.registered["a"] = {"incarnation": pool._submissions["a"].incarnation}
    pool.finish("a", Outcome("failed"))
    assert not cluster.killed, "the scheduler shows that the processes of those that it knows are gone"


@pytest.mark.parametrize("fails", [False, True])
def test_jobs_move_while_another_is_being_started(fails: bool, cluster: Cluster, tmp_path: Path) -> None:
    pool, comes = Noded(tmp_path), threading.Event()
    for name in "ab":
        pool.submit(trains(name, (2,), anywhere=False))
    pool.finish("a", Outcome("done"))
    del pool._actors["a"]
    cluster.on["a"] = "bbbb1"

    def create(job: Job, incarnation: int) -> object:
        comes.wait(20)
        return _raises(OSError("no process")) if fails else Process(job.name)

    pool.create_pipeline_actor = create  # type: ignore[method-assign]

    def submit() -> None:
        with suppress(OSError):
            pool.submit(trains("a", (0,), anywhere=False))

    starting = threading.Thread(target=submit)
    starting.start()
    until(lambda: pool._submissions["a"].outcome is None)
    threading.Timer(0.2, comes.set).start()
    said = pool.suspend() if fails else pool.drain_node("1")[1:]
    assert [line.partition(":")[0] for line in said] == (["b"] if fails else ["a", "b"])
    assert [process.drains for process in pool._actors.values()] == ([1] if fails else [1, 1])
    starting.join()


def test_a_node_is_cleared_whatever_fails_once_and_a_job_that_has_ended_does_not_move(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_jobs, "_NODE_S", 0.0)
    pool = Noded(tmp_path)
    pool.submit(trains("a", (2,), anywhere=False))
    pool._nodes.gone.add(1)
    cluster.on["a"], node = "bbbb1", pool.nodes()[1]
    running = pool._started()
    pool.finish("a", Outcome("done"))
    assert [list(pool._move(one)) for one in running] == [[]], "its file is gone"
    found = [list[Any](), running]
    monkeypatch.setattr(pool, "_started", found.pop)
    pool._clear(node, -1.0)
    assert 1 not in cluster.reserved


def test_a_job_whose_process_is_on_the_node_moves_and_one_without_gpus_elsewhere_waits(
    cluster: Cluster, tmp_path: Path
) -> None:
    pool = Noded(tmp_path)
    pool.submit(trains("a", (0,), anywhere=False))
    pool.submit(Job("engines", CommandConfig(command=["true"]), (), (4, 5)))
    cluster.on["a"] = "cccc2"
    assert pool.drain_node("cccc") == [
        "node 2 (gamma, cccc2): draining",
        "a: finishes its step, saves, and goes on where it has a place",
        "engines: waits until a node of its GPUs is back",
    ]
    pool.submit(Job("new", CommandConfig(command=["true"]), (), (4, 5)))
    assert pool._submissions["new"].waits


def test_nodes_that_may_not_leave_or_come_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    pool = Noded(tmp_path)
    refused = {
        "betta": "there is no node 'betta'. Did you mean 'beta'?",
        "7": "there is no node '7'. The pool has node 0 (alpha, aaaa0): here, node 1 (beta, bbbb1): here, node 2",
        "0": "node 0 (alpha, aaaa0) runs the pool itself and stays as long as that",
        "3": "node 3 is away already",
    }
    for name, why in refused.items():
        with pytest.raises(NodeError) as error:
            pool.drain_node(name)
        assert why in str(error.value)
    for gpus in (0, 5):
        with pytest.raises(NodeError, match=f"{gpus} GPUs: 1 to 4 may be given back, of the nodes node 1"):
            pool.give_back(gpus, 60.0)
    assert pool.add_node("beta") == ["node 1 (beta, bbbb1): here"], "as it was"
    with pytest.raises(
        NodeError, match=r"no node 'epsilon' has joined the Ray cluster and is free; free Ray nodes: de"
    ):
        pool.add_node("epsilon")
    assert pool.add_node("delta") == ["node 3 (delta, dddd3): here"]
    pool.scheduler.clear = False
    pool.drain_node("1")
    with pytest.raises(NodeError, match="is draining already"):
        pool.drain_node("1")
    assert pool.add_node("1") == ["node 1 (beta, bbbb1): here"], "one that drains stays after all"
    for name in "13":
        pool.drain_node(name)
    pool._nodes.gone |= {2}
    with pytest.raises(NodeError, match="is the last node of the pool; end the pool instead, or add a node first"):
        pool.drain_node("0")


def test_a_pool_that_ends_keeps_its_jobs_for_the_next_one(cluster: Cluster, tmp_path: Path) -> None:
    pool = Noded(tmp_path / "first")
    jobs = [trains("a", (2, 3), anywhere=False), trains("b", (3,), Forgetful), trains("c", (0,))]
    for job in jobs:
        pool.submit(job)
    assert pool.suspend() == [
        "a: finishes its step, saves, and goes on in the next pool",
        "b: saves nothing, and begins again from its start",
        "c: finishes its step, saves, and goes on in the next pool",
    ]
    pool.finish("a", Outcome("drained", "saved"))
    pool.finish("c", Outcome("done"))
    pool.submit(trains("late", (0,)))
    begun = len(pool.begun)
    assert pool.standings_of("a", "late") == ["moving", "queued"]
    assert pool._why_it_waits(pool._submissions["late"]) == "the pool is about to end"
    assert [pool.end(name) for name in ("a", "b", "late")] == ["is kept for the pool that continues from this one"] * 3
    pool.finish("b", Outcome("died", "ended"))
    assert pool.end("c") == "has ended already: done" and len(pool.begun) == begun
    left = _left_by(tmp_path / "first")
    assert [job.name for job in left] == ["a", "b", "late"]
    again = Noded(tmp_path / "second")
    assert [again.take_over(job) for job in left] == ["a", "b", "late"] and len(again.begun) == 3


def test_a_job_whose_end_could_not_be_written_is_not_continued(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Noded(tmp_path)
    for name in "ab":
        pool.submit(trains(name, (0,)))
    monkeypatch.setattr(pool, "_write", lambda: _raises(OSError(28, "No space left on device")))
    pool.finish("a", Outcome("done"))
    assert [job.name for job in _left_by(tmp_path)] == ["b"]
    assert capsys.readouterr().err.startswith("a: not continued: [Errno 2] No such file")


def test_the_state_is_written_under_the_lock_and_before_a_job_is_forgotten(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, there = Noded(tmp_path), list[bool]()
    pool.submit(trains("a", (0,)))
    monkeypatch.setattr(
        pool, "_write", lambda: there.append(pool._lock.locked() and (tmp_path / "waiting" / "a.job").exists())
    )
    pool.drain_node("2")
    pool.add_node("2")
    pool.finish("a", Outcome("done"))
    assert there == [True] * 3


def test_a_job_that_waits_says_for_what_and_shows_no_earlier_jobs_progress(cluster: Cluster, tmp_path: Path) -> None:
    pool, last = Noded(tmp_path), Progress("trains", 100, 100, "")
    pool.submit(trains("a", (2, 3), anywhere=False))
    pool._note_progress(pool._submissions["a"], last)
    pool.finish("a", Outcome("done"))
    pool.drain_node("1")
    pool.submit(trains("a", (2, 3), anywhere=False))
    (queued,) = pool.standings()
    assert (queued.progress, queued.why) == (None, "GPUs that it needs are away")
    assert replace(queued, progress=last).why == queued.why, "one that has moved"


def test_a_restarted_actor_starts_what_had_not_begun_and_moves_what_it_was_to_move(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Noded(tmp_path)
    for name, kind in (("a", Training), ("b", Forgetful), ("c", Training)):
        pool.submit(trains(name, (2, 3), kind, anywhere=False))
    pool._change(pool._submissions["c"], asked="cancel")
    pool._nodes.drain(pool.nodes()[1], None)
    again = Noded(tmp_path)
    until(lambda: [again._actors[name].drains for name in "abc"] == [1, 0, 1])
    again.add_node("1")
    for submission in again._submissions.values():
        again._change(submission, moving=False)
    with closing(RecordWriter(tmp_path / "scheduler.jsonl", source="scheduler")) as record:
        for name, incarnation in (("a", 1), ("b", pool._submissions["b"].incarnation)):
            record.emit(Registered(name, incarnation, "", ()))
    monkeypatch.setattr(Noded, "_go_on_with", PoolJobs._go_on_with)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: _raises(ValueError("there is none")))
    again = Noded(tmp_path)
    assert again.begun == [("a", (2, 3))] and again._submissions["a"].incarnation > pool._submissions["a"].incarnation
    until(lambda: again._submissions["b"].outcome and again._submissions["c"].outcome)
    assert len(again.begun) == 1


def test_what_is_asked_again_after_the_actor_died_is_done_once(cluster: Cluster, tmp_path: Path) -> None:
    pool, job = Noded(tmp_path), replace(trains("a", (0,), anywhere=False), request="one")
    cluster.on["a"] = "cccc2"
    said = [
        "node 2 (gamma, cccc2): draining",
        "a: finishes its step, saves, and goes on where it has a place",
    ]
    assert pool.submit(job) == "a" and pool.give_back(2, 60.0, request="two") == said
    again = Noded(tmp_path)
    assert again.submit(job) == "a" and not again.begun
    assert again.give_back(2, 60.0, request="two") == said == again.drain_node("2", request="two")
    assert again._nodes.gone == {2, 3}
    with pytest.raises(PoolError, match="a pipeline 'a' runs already"):
        again.submit(replace(job, request="three"))


def test_a_log_that_nothing_can_continue_from_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError, match="there is no pool.json; give the folder of a pool's log"):
        _left_by(tmp_path)
    PoolState().write(tmp_path / "pool.json")
    monkeypatch.setattr(launcher, "open_pools", lambda say: [SimpleNamespace(name="ours", log_dir=str(tmp_path))])
    with pytest.raises(PoolError, match="that pool, ours, is still open; end it first"):
        _left_by(tmp_path)


def test_the_command_waits_until_the_node_is_given_back_and_says_for_what(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Noded(tmp_path)
    pool.submit(trains("a", (2, 3), anywhere=False))
    pool.scheduler.clear = False
    remote = SimpleNamespace(
        **{
            name: SimpleNamespace(remote=getattr(pool, name))
            for name in ("nodes", "drain_node", "give_back", "add_node")
        }
    )
    monkeypatch.setattr(pool_commands, "_join", lambda name: (remote, Pool(4, 2)))
    monkeypatch.setattr(pool_commands, "_users_token", lambda actor: "")
    moving = [SimpleNamespace(name="a", why="step 3/8", state="moving", moving=True)]
    monkeypatch.setattr(pool_commands, "_standings", lambda actor, names: moving)
    monkeypatch.setattr(pool_commands, "_POLL_S", 0.05)
    monkeypatch.setattr(pool_commands, "_CANCEL_S", 0.2)
    chosen = parser().parse_args(["drain-node", "1", "--by", "0"])
    assert pool_commands.drain_node(chosen) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "node 1 (beta, bbbb1): draining" and said[2:] == [
        "node 1 (beta, bbbb1): waits for a (step 3/8)",
        "node 1 (beta, bbbb1): waits for a (step 3/8) after 0.2 s; it is given back once it is clear",
    ]
    assert pool_commands.drain_node(parser().parse_args(["drain-node", "2", "--no-wait"])) == 0
    assert capsys.readouterr().out == "node 2 (gamma, cccc2): draining\n"
    assert pool_commands.add_node(parser().parse_args(["add-node", "2"])) == 0
    pool.scheduler.clear = True
    assert pool_commands.give_back(parser().parse_args(["give-back", "1", "--by", "1m"])) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "node 2: given back"


def test_given_back_are_the_nodes_on_which_the_least_trains(cluster: Cluster, tmp_path: Path) -> None:
    pool = Noded(tmp_path)
    pool.submit(trains("a", (4, 5), anywhere=False))
    assert pool.give_back(2, 60.0) == ["node 1 (beta, bbbb1): draining"]
    assert pool.give_back(1, 60.0)[0] == "node 2 (gamma, cccc2): draining"


def test_only_an_admin_of_a_team_moves_nodes_and_each_try_is_in_the_log(cluster: Cluster, tmp_path: Path) -> None:
    tokens = {name: f"token-of-{name}" for name in ("ann", "dan")}
    users = "".join(
        f"  {name}: {{group: lab, role: {role}, token_sha256: {hash_of(tokens[name])}}}\n"
        for name, role in (("ann", "lead"), ("dan", "admin"))
    )
    (tmp_path / "team.yaml").write_text(f"groups: {{lab: }}\nusers:\n{users}")
    (tmp_path / "team.yaml").chmod(0o600)
    pool = Noded(tmp_path, read_team(tmp_path / "team.yaml"))
    for method, arguments in (("drain_node", ("1", None)), ("give_back", (2, 60.0)), ("add_node", ("delta",))):
        with pytest.raises(TeamError, match=f"may not {method.replace('_', '-')} .*that takes the role admin"):
            getattr(pool, method)(*arguments, tokens["ann"])
        getattr(pool, method)(*arguments, tokens["dan"])
    acted = [asked[1:] for asked in pool.scheduler.asked if asked[0] == "acted"]
    assert [(user, action, subject) for user, action, subject, _ in acted] == [
        (user, *what)
        for what in (("drain-node", "1"), ("give-back", "2 GPUs"), ("add-node", "delta"))
        for user in ("ann", "dan")
    ]


def test_a_job_is_placed_beside_gpus_that_are_away() -> None:
    pool, busy = Pool(2, 2), [Mapped((0,), (0, 1, 2, 3))]
    anywhere = trains("a", (0,))
    anywhere = anywhere.__class__(**(vars(anywhere) | {"infer": (0, 1, 2, 3)}))
    assert (anywhere.placed(pool, busy).train, anywhere.placed(pool, busy).infer) == ((1,), (0, 1, 2, 3))
    left = anywhere.placed(pool, busy, {0, 1})
    assert (left.train, left.infer, left.options) == ((2,), (2, 3), {"full_overlap": False})
    named = anywhere.__class__(**(vars(anywhere) | {"anywhere": False}))
    assert named.placed(pool, [], {2, 3}).options == {"full_overlap": False}
    for job, gone in ((named, {0, 1}), (anywhere, {0, 1, 2, 3})):
        with pytest.raises(ValueError, match="a: GPUs that it needs are away"):
            job.placed(pool, [], gone)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5h", 5400), ("10m", 600), ("2d", 172800), ("5s", 5)])
def test_a_time_may_be_a_duration(text: str, seconds: float) -> None:
    assert from_now(text) == seconds


def test_a_time_may_be_on_the_clock_and_is_ahead() -> None:
    now = datetime.now()
    assert 0 <= from_now(f"{now.hour}:{now.minute:02}") <= 86400
    assert from_now("00:00") <= 86400
    for wrong in ("25:00", "12:60", "soon", "-5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a time as 18:30, or a duration"):
            from_now(wrong)


def test_a_pool_may_have_more_nodes_than_there_are() -> None:
    chosen = parser().parse_args(["serve", "--gpus", "2", "--nodes", "2", "--max-nodes", "3"])
    assert _pool_of(chosen) == Pool(3, 2) and options_of(chosen).away == 1
    chosen = parser().parse_args(["serve", "--gpus", "2", "--nodes", "2"])
    assert _pool_of(chosen) == Pool(2, 2) and options_of(chosen).away == 0
    with pytest.raises(PoolError, match="--max-nodes 1: the pool begins with --nodes 2; give at least as many"):
        _pool_of(parser().parse_args(["serve", "--gpus", "2", "--nodes", "2", "--max-nodes", "1"]))


def test_give_back_needs_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["give-back", "2"])
    assert "--by" in capsys.readouterr().err
