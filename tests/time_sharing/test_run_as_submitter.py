"""`serve --run-as-submitter`: whose processes and files a job's are, and what is refused before it begins."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.experimental import internal_kv

from nemo_rl.distributed import unix_users
from nemo_rl.distributed.private_variables import KEYS, of_a_command, take_private_variables, without_private
from nemo_rl.distributed.unix_users import RUN_AS, UnixUserError, become_user, why_not_root, why_unusable
from nemo_rl.distributed.worker_groups import how_it_ended
from nemo_rl.time_sharing import pool_jobs
from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.agents import host_use
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.job_queue import JobLimits
from nemo_rl.time_sharing.log.pool_state import Outcome
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pool import PoolActor, check_unix_users
from nemo_rl.time_sharing.pool_jobs import PoolError, PoolOptions
from nemo_rl.time_sharing.protocol.topology import Pool as Slots
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.team import Team, TeamError, TeamFileError, User, hash_of
from tests.end_to_end.test_runs import BASE, ROOT
from tests.time_sharing.test_jobs import GRPO, only

root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can run processes as other users")
SLOTS = Slots(1, 2)
ANN = User("ann", "lab", "member", ("0" * 64,), "nrl-missing")
VIC = User("vic", "lab", "viewer", ("1" * 64,))


def team(*users: User) -> Team:
    return Team("/team.yaml", {"lab": ""}, {user.name: user for user in users})


def interpreter(user: str) -> str | None:
    """A Python of this version that a Unix user can run with the packages of this one."""
    entry = pwd.getpwnam(user)
    for found in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        try:
            line = [found, "-c", "import nemo_rl, ray, torch"]
            subprocess.run(
                line, user=entry.pw_uid, group=entry.pw_gid, env=importing(), cwd="/", timeout=120, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return found
    return None


def importing() -> dict[str, str]:
    """Variables with which another Python imports what this one does."""
    packages = str(Path(pytest.__file__).parents[1])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "NRL_", "XDG_", "VLLM_"))}
    return kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}


@pytest.fixture
def submitter() -> Iterator[str]:
    """A Unix user with a home, for as long as the test runs."""
    name = f"nrl{os.getpid()}"
    made = subprocess.run(
        ["useradd", "--create-home", "--user-group", name], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no Unix user can be made here: {made.stderr}")
    yield name
    subprocess.run(["userdel", "--force", "--remove", name], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("000001ffffffffff", ""),
        ("00000000a80425fb", "root has no CAP_SYS_PTRACE here; give its container that"),
        ("0000000000000000", "root has no CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE here"),
    ],
)
def test_root_in_a_container_may_lack_what_it_takes(
    held: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapPrm:\t{'0' * 16}\nCapEff:\t{held}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    said = why_not_root(tmp_path / "status")
    assert said.startswith(why) and bool(said) == bool(why)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "takes root, and this process runs as the Unix user with the id 1000" in why_not_root(tmp_path / "status")


@pytest.mark.parametrize(
    ("words", "uid", "message"),
    [
        ([], 0, "--run-as-submitter: give --team FILE"),
        (["--team", "team.yaml"], 7, "--run-as-submitter: it takes root, and this process runs as the Unix user with"),
        (["--team", "team.yaml", "--mps", "on"], 0, "--mps on serves the processes of one Unix user at a time"),
    ],
)
def test_a_pool_that_cannot_run_jobs_as_their_submitters_is_refused(
    words: list[str], uid: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(unix_users, "_NEEDED", {})
    assert main(["serve", "--gpus", "2", "--device", "cpu", "--run-as-submitter", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_unix_user_that_is_missing_or_is_not_asked_for_is_named() -> None:
    with pytest.raises(TeamFileError) as refused:
        check_unix_users(team(ANN, VIC), "/tmp", run_as_submitter=True)
    assert refused.value.problems == [
        "users.ann.unix_user: there is no Unix user 'nrl-missing' on this machine; make one, or name another"
    ], "a viewer submits nothing"
    with pytest.raises(TeamFileError, match=r"users.ann.unix_user: is for serve --run-as-submitter; leave it out"):
        check_unix_users(team(ANN, VIC), "/tmp", run_as_submitter=False)
    check_unix_users(team(VIC), "/tmp", run_as_submitter=False)
    assert "'root' is root; name a user without its rights" in why_unusable("root")


class Begun(PoolActor):
    """A pool's actor without Ray, which keeps the jobs that begin and what was done."""

    def __init__(self, folder: Path, *, run_as_submitter: bool, jobs: int = 1) -> None:
        self.begun: list[Job] = []
        users = [replace(ANN, token_sha256=(hash_of("of-ann"),), unix_user="anna"), VIC]
        options = PoolOptions(queue=JobLimits(jobs), run_as_submitter=run_as_submitter)
        super().__init__(PoolHandles(None, SLOTS, "cpu", Limits(), str(folder)), team(*users), options)

    def create_pipeline_actor(self, job: Job, incarnation: int) -> object:
        self.begun.append(job)
        return job

    def _begin_watch(self, submission: Any) -> None: ...

    def _note_acted(self, user: str, action: str, subject: str, outcome: str) -> None: ...


def test_the_team_file_says_as_whom_a_job_runs_and_its_user_is_looked_for_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why, asked = {"anna": ""}, list[object]()

    def why_unusable(name: str, enters: str = "/", writes: Sequence[str] = ()) -> str:
        asked.append((name, enters, writes))
        return why[name]

    monkeypatch.setattr(pool_jobs, "why_unusable", why_unusable)
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    job = Job("first", CommandConfig(command=["true"]), (), (0,), folder="/there", unix_user="root")
    (tmp_path / "one").mkdir()
    as_pool = Begun(tmp_path / "one", run_as_submitter=False)
    as_pool.submit(job, "of-ann")
    assert [begun.unix_user for begun in as_pool.begun] == [""] and not asked

    pool = Begun(tmp_path, run_as_submitter=True)
    for name in ("first", "second", "third"):
        pool.submit(replace(job, name=name), "of-ann")
    assert [begun.unix_user for begun in pool.begun] == ["anna"] and asked[0] == ("anna", "/there", ())
    why["anna"] = "there is no Unix user 'anna'"
    with pytest.raises(PoolError, match="fourth: there is no Unix user 'anna'"):
        pool.submit(replace(job, name="fourth"), "of-ann")
    pool._note_end(pool._submissions["first"], Outcome("done"))
    ended = [pool._submissions[name].outcome for name in ("second", "third")]
    assert all(one is not None and one.reason.endswith("there is no Unix user 'anna'") for one in ended)
    assert len(pool.begun) == 1


def test_a_job_that_another_pool_left_runs_as_its_users_unix_user_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier pool had no --run-as-submitter, another Unix user for ann, or users that are gone."""
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    monkeypatch.setattr(pool_jobs, "why_unusable", lambda name, *_: "" if name == "anna" else f"no {name}")
    for as_submitter, runs_as in ((True, "anna"), (False, "")):
        (folder := tmp_path / f"as{as_submitter}").mkdir()
        pool = Begun(folder, run_as_submitter=as_submitter, jobs=9)
        left = Job("left", CommandConfig(command=["true"]), (), (0,), {"user": "ann", "group": "old"})
        for name, before in (("a", ""), ("b", "stale")):
            pool.take_over(replace(left, name=name, unix_user=before))
        assert [(one.unix_user, one.options["group"]) for one in pool.begun] == [(runs_as, "lab")] * 2
        for user, why in (("vic", "viewer of lab. may not submit left"), ("bob", "bob, is none"), ("", "not named")):
            with pytest.raises(TeamError, match=why):
                pool.take_over(replace(left, options={"user": user}))
        with pytest.raises(TeamError, match="may not submit with priority high"):
            pool.take_over(replace(left, options=left.options | {"priority": "high"}))
        assert len(pool.begun) == 2
        if as_submitter:
            with pytest.raises(PoolError, match="left: has no Unix user to run as"):
                PoolActor.create_pipeline_actor(pool, left, 1)


def test_a_job_that_trains_is_asked_to_write_its_logs_and_checkpoints() -> None:
    job = only(GRPO)
    logs, checkpoints = job.writes_in
    assert logs == str(Path("logs/grpo_arithmetic_cpu").absolute())
    assert job.saves_in == checkpoints == str(Path("results/arithmetic/grpo").absolute())
    assert replace(job, teaches=True).writes_in == ()


def test_a_worker_that_cannot_become_its_user_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_AS, raising=False)
    become_user()
    monkeypatch.setenv(RUN_AS, "nrl-missing")
    with pytest.raises(UnixUserError, match="there is no Unix user 'nrl-missing' on the node"):
        become_user()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setenv(RUN_AS, "nobody")
    for call in ("initgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UnixUserError, match="which cannot become 'nobody'; start it as root"):
        become_user()


def test_a_workers_search_path_waits_until_it_is_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, namespace: kept.update({key: value}))
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: kept[key])
    monkeypatch.delenv(RUN_AS, raising=False)
    monkeypatch.delenv(KEYS, raising=False)
    job = {"PYTHONPATH": f"/own{os.pathsep}/own/more", "OMP_NUM_THREADS": "1"}
    assert without_private(job) == job
    given = without_private(job | {RUN_AS: "ann"})
    assert "PYTHONPATH" not in given and given["OMP_NUM_THREADS"] == "1" and given[RUN_AS] == "ann"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", "/pools")
    monkeypatch.setattr(sys, "path", ["/script", "/pools"])
    take_private_variables()
    assert sys.path == ["/script", "/own", "/own/more", "/pools"] and os.environ["PYTHONPATH"] == job["PYTHONPATH"]
    assert "PYTHONPATH" not in without_private({"PYTHONPATH": "/own"}), "a worker of such a worker"
    assert RUN_AS not in of_a_command(os.environ), "a command of the job starts its own workers as itself"


def test_a_job_whose_worker_could_not_become_its_user_says_why() -> None:
    said = how_it_ended(
        RuntimeError(
            "The actor died before its creation task finished.\n\tpid: 7\nThe actor is dead. Worker exit type: "
            "SYSTEM_ERROR Worker exit detail: Failed to execute the setup hook\nTraceback (most recent call last):\n"
            "    raise UnixUserError(\nnemo_rl.distributed.unix_users.UnixUserError: there is no Unix user 'ann'\n\nEnd"
        )
    )
    assert said.endswith("setup hook nemo_rl.distributed.unix_users.UnixUserError: there is no Unix user 'ann'")


@root_only
def test_a_process_becomes_its_user_for_good_and_stays_open_to_its_siblings(submitter: str) -> None:
    code = """
import os, nemo_rl
from nemo_rl.distributed.unix_users import become_user
become_user()
open("/proc/self/environ").read(1), os.listdir("/proc/self/fd")  # a process that Linux has closed cannot
variables = [os.environ.get(name) for name in ("HOME", "USER", "XDG_CACHE_HOME")]
print(os.getresuid(), os.getresgid(), os.getgroups(), variables)
os.setresuid(0, 0, 0)
"""
    environment = importing() | {RUN_AS: submitter, "HOME": "/root", "XDG_CACHE_HOME": "/root/.cache"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    user, group = pwd.getpwnam(submitter).pw_uid, pwd.getpwnam(submitter).pw_gid
    ids = f"{(user,) * 3} {(group,) * 3} [{group}]"
    assert done.stdout == f"{ids} ['/home/{submitter}', '{submitter}', None]\n"
    assert done.stderr.strip().endswith("PermissionError: [Errno 1] Operation not permitted"), "the way back is closed"


@root_only
def test_a_user_without_rights_to_the_folders_or_the_interpreter_is_refused(
    submitter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = interpreter(submitter)
    if found is None:
        pytest.skip(f"no other user can run {sys.executable}")
    for name, value in importing().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", found)
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name, mode in (("own", 0o700), ("closed", 0o700), ("shown", 0o755)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        shutil.chown(folder / "own", submitter, submitter)
        own, closed, shown = (str(folder / name) for name in ("own", "closed", "shown"))
        assert why_unusable(submitter, own, [own, f"{own}/a/b"]) == ""
        assert why_unusable(submitter, shown, ["/tmp"]) == ""
        said = why_unusable(submitter, f"{closed}/x", [f"{shown}/a/b", own])
        assert said == (
            f"{closed} cannot be entered, {shown} cannot be written by the Unix user '{submitter}'; give it the right, "
            "or name another folder"
        )
        with pytest.raises(TeamFileError) as refused:
            check_unix_users(team(replace(ANN, unix_user=submitter)), shown, run_as_submitter=True)
        assert refused.value.problems == [
            f"users.ann.unix_user: {shown} cannot be written by the Unix user '{submitter}'; give it the right, or "
            "name another folder",
            "the pool's log is open to the Unix group of the team file's folder; its users must be in it",
        ]
        monkeypatch.setattr(sys, "executable", f"{closed}/python")
        assert f"cannot run {closed}/python" in why_unusable(submitter)
        broken = folder / "broken"
        broken.write_text("#!/bin/sh\necho 'No module named nemo_rl' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(broken))
        assert "(No module named nemo_rl); install it where every user can" in why_unusable(submitter)


# -- on real processes -----------------------------------------------------------------------------------------------


class Pool:
    """A pool of two CPU slots for ann, who is a Unix user of its own."""

    def __init__(self, folder: Path, python: str, submitter: str) -> None:
        self.folder, self.work, self.python = folder, folder / "work", python
        self.user = pwd.getpwnam(submitter)
        users = {"ann": {"group": "lab", "role": "admin", "unix_user": submitter, "token_sha256": hash_of("of-ann")}}
        self.team: dict[str, Any] = {"groups": {"lab": None}, "users": users}
        for made, owner in ((self.work, submitter), (folder / "tmp", "root"), (folder / "roots", "root")):
            made.mkdir()
            shutil.chown(made, owner)
        folder.chmod(0o755)
        (folder / "tmp").chmod(0o1777)
        self.write()
        os.chown(folder, -1, self.user.pw_gid)
        self.environment = importing() | {"TMPDIR": str(folder / "tmp"), "NRL_POOL": str(folder / "team.pool")}
        self.environment |= {"NRL_POOL_TOKEN": "of-ann", "NRL_OBJECT_STORE_BYTES": str(256 << 20)}
        line = ["serve", "--gpus", "2", "--device", "cpu", "--port", "0", "--team", "team.yaml", "--run-as-submitter"]
        line += ["--job-memory", "16G"]
        self.serving = self.start(*line)
        self.until((folder / "team.pool").exists)

    def write(self) -> None:
        (self.folder / "team.yaml").write_text(yaml.safe_dump(self.team))
        (self.folder / "team.yaml").chmod(0o644)

    def start(self, *words: str, **process: Any) -> subprocess.Popen[str]:
        line = [self.python, "-m", "nemo_rl.time_sharing", *words]
        options = {"cwd": self.folder, "env": self.environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(line, text=True, **(options | process))

    def type(self, *words: str) -> subprocess.Popen[str]:
        """What ann types in a shell of ann's."""
        environment = self.environment | {"HOME": self.user.pw_dir}
        ids = {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}
        return self.start(*words, cwd=self.work, env=environment, **ids)

    def run(self, *words: str, code: int = 0) -> str:
        ended = self.type(*words)
        said = ended.communicate(timeout=420)[0]
        assert ended.returncode == code, said
        return said

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline and self.serving.poll() is None
            time.sleep(0.2)

    def job(self, name: str, content: dict[str, Any]) -> str:
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        return str(self.folder / f"{name}.yaml")


@pytest.fixture
def pool(submitter: str) -> Iterator[Pool]:
    found = interpreter(submitter)
    if found is None:
        pytest.skip(f"no other user can run {sys.executable}, nor a Python of its version in /usr/bin")
    # The folders of pytest are closed to others.
    folder = Path(tempfile.mkdtemp(prefix="p", dir="/tmp"))
    made = Pool(folder, found, submitter)
    yield made
    if made.serving.poll() is None:
        made.serving.send_signal(signal.SIGINT)
        made.serving.communicate(timeout=90)
    shutil.rmtree(folder, ignore_errors=True)


@root_only
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_and_its_files_are_its_submitters(pool: Pool, submitter: str, tiny_model: Path) -> None:
    uid = pwd.getpwnam(submitter).pw_uid
    shown = "import os; open('shown', 'w').write(f'{os.getresuid()} {os.getgroups()} {os.environ[\"HOME\"]}')"
    command = pool.job("command", {"external": {"command": [pool.python, "-c", shown]}})
    # Root must not import what lies beside a job; Python and Ray import these first of all.
    for module in ("code", "sitecustomize"):
        (pool.work / f"{module}.py").write_text("import os; open(f'imported_{os.getuid()}', 'a').close()\n")
    pool.run("submit", command, "--wait")
    assert (pool.work / "shown").read_text() == f"({uid}, {uid}, {uid}) [{pool.user.pw_gid}] /home/{submitter}"
    assert (pool.work / "shown").stat().st_uid == uid
    assert (pool.work / f"imported_{uid}").exists() and not (pool.work / "imported_0").exists()
    for module in ("code", "sitecustomize"):
        (pool.work / f"{module}.py").unlink()
    pool.run("submit", pool.job("sleeps", {"external": {"command": ["sleep", "600"]}}))
    assert "sleeps: cancelled" in pool.run("cancel", "sleeps")
    page = json.loads((pool.folder / "team.pool").read_text())["page"]
    with urllib.request.urlopen(f"{page}data.json?token=of-ann", timeout=30) as answer:
        notice = json.load(answer)["notice"]
    assert "run as the Unix users of their submitters, but on one Ray cluster" in notice and "no security" in notice

    shutil.copytree(tiny_model, pool.folder / "model")
    for path in (pool.folder / "model").iterdir():
        path.chmod(0o644)
    trains: dict[str, Any] = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"),
        "policy": {"model_name": str(pool.folder / "model")},
        "logger": {"log_dir": "logs"},
        "checkpointing": {"checkpoint_dir": "checkpoints"},
    }
    overrides = [*BASE, "grpo.max_num_steps=1"]
    lost = pool.job("lost", trains | {"logger": {"log_dir": str(pool.folder / "roots" / "logs")}})
    said = pool.run("submit", lost, *overrides, code=2)
    assert f"lost: {pool.folder}/roots cannot be written by the Unix user '{submitter}'; give it the right" in said
    started = pool.type("submit", pool.job("trains", trains), *overrides, "--wait")
    hosts: list[Any] = []
    while started.poll() is None:
        hosts += json.loads(pool.run("status", "--json"))["pipelines"][-1]["hosts"]
        time.sleep(2)
    assert started.returncode == 0, started.communicate()[0]
    assert max(host["processes"] for host in hosts) >= 3, "the pool measures another user's processes"
    left = [path for path in pool.work.rglob("*") if not path.is_symlink()]
    assert {path.stat().st_uid for path in left} == {uid}
    assert (pool.work / "checkpoints" / "step_1").is_dir() and list((pool.work / "logs").rglob("metrics.jsonl"))

    pool.team["users"]["ann"]["unix_user"] = "nrl-missing"
    pool.write()
    assert "users.ann.unix_user: there is no Unix user 'nrl-missing'" in pool.run("reload", code=2)
    pool.serving.send_signal(signal.SIGINT)
    pool.serving.communicate(timeout=90)
    log_dir = pool.folder / "logs/time_sharing/latest"
    kept = {path.name.partition(".")[0]: path.lstat().st_uid for path in log_dir.glob("*.*.jsonl")}
    assert kept["trains"] == kept["command"] == uid and (log_dir / "scheduler.jsonl").stat().st_uid == 0
    assert check(list(merge_by_machine_time(sorted(log_dir.glob("*.jsonl")))), ended=True) == []
    assert grp.getgrgid(log_dir.stat().st_gid).gr_name == submitter
