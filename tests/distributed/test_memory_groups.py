"""Cgroups of jobs: where they may be made, what moves there, and what the kernel says of an end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl.distributed import memory_groups
from nemo_rl.distributed.memory_groups import (
    MEMORY_GROUP,
    ended_by_kernel,
    enter_memory_group,
    groups_folder,
)

MIB = 1 << 20
JOB = """
import subprocess, sys, time
from nemo_rl.distributed.memory_groups import enter_memory_group
enter_memory_group()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
taken = b"x" * int(sys.argv[1])
print("took", flush=True)
time.sleep(600)
"""


def cgroup(folder: Path, *, controllers: str = "cpu memory", limited: str = "", pids: str = "1 2") -> Path:
    """Plain files that look like a cgroup below the root of a hierarchy."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"controllers": controllers, "subtree_control": limited, "procs": pids, "type": "domain"}
    for name, text in files.items():
        (folder / f"cgroup.{name}").write_text(text)
    return folder


def found(root: Path, own: str) -> Path:
    (root / "own").write_text(f"4:memory:/elsewhere\n0::{own}\n")
    return groups_folder(root, root / "own")


def why(root: Path, own: str) -> str:
    with pytest.raises(OSError) as refused:
        found(root, own)
    return str(refused.value)


def test_where_jobs_cannot_have_cgroups_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = "there is no memory controller of cgroup v2"
    assert why(tmp_path, "/") == none and why(tmp_path, "/gone") == none
    (tmp_path / "v1").write_text("4:memory:/job\n")
    with pytest.raises(OSError, match=none):
        groups_folder(tmp_path, tmp_path / "v1")
    assert why(cgroup(tmp_path, controllers="cpu"), "/") == none
    shared = cgroup(tmp_path / "shared")
    monkeypatch.setattr(memory_groups, "_SYSTEMD", tmp_path)
    assert why(tmp_path, "/shared") == f"{shared} was not delegated to the pool"
    assert why(cgroup(tmp_path, pids="1 0"), "/") == f"{tmp_path} was not delegated to the pool"
    cgroup(tmp_path / "nrl.7.job.1")
    assert "was not delegated" in why(tmp_path, "/nrl.7.job.1"), "a pool in the job of another one"
    assert not list(tmp_path.rglob("nrl-pool")), "nothing was changed"
    monkeypatch.setattr(memory_groups.os, "access", lambda *_: False)
    assert why(tmp_path, "/shared") == f"{shared} cannot be written"


@pytest.mark.parametrize("given", ["container", "delegated", "owned"])
def test_processes_of_a_cgroup_that_was_handed_over_move_beside_those_of_jobs(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "/" if given == "container" else "/given"
    base = cgroup(tmp_path / own[1:], pids="17")
    marks = ["user.delegate"] if given == "delegated" else []
    monkeypatch.setattr(memory_groups.os, "listxattr", lambda _: marks)
    monkeypatch.setattr(memory_groups, "_SYSTEMD", tmp_path / ("none" if given == "owned" else ""))
    if given == "owned" and os.getuid() == 0:
        os.chown(base, 1, 1)
        monkeypatch.setattr(memory_groups.os, "geteuid", lambda: 1)
    assert found(tmp_path, own) == base
    assert (base / "nrl-pool" / "cgroup.procs").read_text() == "17"
    assert (base / "cgroup.subtree_control").read_text() == "+memory"
    cgroup(base, limited="cpu memory")
    assert found(tmp_path, f"{own.rstrip('/')}/nrl-pool") == base, "from there, too"


def test_the_root_of_the_machine_keeps_its_processes(tmp_path: Path) -> None:
    (cgroup(tmp_path) / "cgroup.type").unlink()
    assert found(tmp_path, "/") == tmp_path
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory" and not (tmp_path / "nrl-pool").exists()


def test_a_group_with_its_limit_is_made_before_a_worker_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_groups, "groups_folder", lambda: tmp_path)
    monkeypatch.setenv("RAY_RAYLET_PID", "41")
    monkeypatch.delenv(MEMORY_GROUP, raising=False)
    enter_memory_group()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(MEMORY_GROUP, "4096 job.1")
    enter_memory_group()
    files = {file.name: file.read_text() for file in (tmp_path / "nrl.41.job.1").iterdir()}
    assert files == {"memory.oom.group": "1", "memory.max": "4096", "cgroup.procs": str(os.getpid())}
    monkeypatch.setattr(memory_groups, "groups_folder", lambda: tmp_path / "none" / "here")
    monkeypatch.setattr(memory_groups, "_TRIES", 3)
    enter_memory_group()


def test_ends_by_the_kernel_are_read_and_groups_of_ended_jobs_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getppid()))
    mine, others = f"nrl.{os.getppid()}", f"nrl.{os.getpid()}"
    for run, oom, kills in (("capped.1", 3, 2), ("short.1", 0, 2), ("fine.1", 3, 0)):
        (tmp_path / f"{mine}.{run}").mkdir()
        (tmp_path / f"{mine}.{run}" / "memory.events").write_text(f"max 9\noom {oom}\noom_kill {kills}\n")
    for left in (f"{mine}.ended.1", f"{others}.job.1", f"nrl.{1 << 30}.job.1", "nrl-pool"):
        (tmp_path / left).mkdir()
    assert ended_by_kernel(tmp_path, ["capped.1", "short.1", "fine.1", "new.1"]) == {"capped.1": True, "short.1": False}
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {f"{mine}.{run}" for run in ("capped.1", "short.1", "fine.1")} | {f"{others}.job.1", "nrl-pool"}


@pytest.fixture
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    started: dict[str, subprocess.Popen[str]] = {}
    yield started
    for process in started.values():
        for each in (*psutil.Process(process.pid).children(), process) if process.poll() is None else ():
            each.kill()
        process.wait()


def test_the_kernel_ends_a_job_above_its_cap_whole_and_no_other(
    processes: dict[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        base = groups_folder()
    except OSError as refused:
        pytest.skip(str(refused))
    if psutil.swap_memory().total:
        pytest.skip("what is above the cap goes to swap space")
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    child = {}
    for name, takes in (("neighbour", 8), ("hungry", 512)):
        environment = os.environ | {MEMORY_GROUP: f"{128 * MIB} {name}.1"}
        line = [sys.executable, "-c", JOB, str(takes * MIB)]
        processes[name] = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
        out = processes[name].stdout
        assert out is not None
        child[name] = psutil.Process(int(out.readline()))
        assert out.readline() == ("took\n" if name == "neighbour" else "")
    assert processes["hungry"].wait(60) == -9
    assert not psutil.wait_procs([child["hungry"]], 60)[1], "the whole group"
    assert processes["neighbour"].poll() is None and child["neighbour"].is_running()
    assert ended_by_kernel(base, ["neighbour.1", "hungry.1"]) == {"hungry.1": True}
    assert ended_by_kernel(base, ["neighbour.1"]) == {}
    assert [group.name.split(".")[2] for group in base.glob(f"nrl.{os.getpid()}.*")] == ["neighbour"]
    for process in (processes["neighbour"], child["neighbour"]):
        process.kill()
    processes["neighbour"].wait(60)
    deadline = time.monotonic() + 60
    while [*base.glob(f"nrl.{os.getpid()}.*")]:
        assert time.monotonic() < deadline
        ended_by_kernel(base, [])
        time.sleep(0.05)
