"""Host memory, open files and disk of jobs: what is measured, and which job is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import ConfigError
from nemo_rl.distributed.memory_groups import MEMORY_GROUP
from nemo_rl.time_sharing.agents import host_use
from nemo_rl.time_sharing.agents.host_use import (
    HostWatch,
    NodeUse,
    bytes_of,
    disk_of,
    free_memory,
    measure_node,
    measure_nodes,
    most_over_its_part,
    over_limit,
)
from nemo_rl.time_sharing.agents.ray_reaper import INCARNATION_VARIABLE, PIPELINE_VARIABLE, agent_variables
from nemo_rl.time_sharing.log.pool_state import HostLimits, HostUse, PoolState, Standing, Submission
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.pool_jobs import PoolError, PoolJobs, PoolOptions
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.viewing import page_server
from nemo_rl.time_sharing.viewing.page_server import PoolView

GIB = 1 << 30
TAKES = "import sys, time; taken = b'x' * int(sys.argv[1]); open(sys.argv[2], 'w').close(); time.sleep(600)"


def use(memory: int, *, files: int = 9, node: str = "n1") -> HostUse:
    return HostUse(node, memory, files, 1, 0)


def submitted(name: str) -> Submission:
    return Submission(name, (), (0,), 0.0, incarnation=1)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (HostLimits(), ""),
        (HostLimits(memory=66 * GIB, files=9, disk=5), ""),
        (HostLimits(memory=64 * GIB), "used 66.0 GiB of host memory on n2, its cap is 64.0 GiB"),
        (HostLimits(files=8), "had 9 files open on n1, its cap is 8"),
        (HostLimits(disk=4), "its logs and checkpoints take 5 B of disk, its cap is 4 B"),
    ],
)
def test_a_job_is_over_its_limit_on_one_node_or_on_the_disk(limits: HostLimits, why: str) -> None:
    assert over_limit([use(1), use(66 * GIB, node="n2")], 5, limits) == why
    assert over_limit([], None, limits) == ""


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 1 << 40), min_size=1),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)
def test_a_node_short_of_memory_ends_the_job_that_is_most_above_its_part(
    taken: dict[str, int], free: int, keep: int
) -> None:
    chosen, why = most_over_its_part(NodeUse("n", free, {name: use(size) for name, size in taken.items()}), keep)
    assert taken[chosen] == max(taken.values())
    if why:
        assert free < keep < sum(taken.values()) + free
        assert taken[chosen] * len(taken) > sum(taken.values()) + free - keep, "it has more than its part"
    else:
        assert free >= keep or sum(taken.values()) + free <= keep, "the end of all of them would not help"


def test_a_node_short_of_memory_says_who_had_how_much() -> None:
    node = NodeUse("n1", 2 * GIB, {"small": use(GIB), "large": use(9 * GIB)})
    assert most_over_its_part(node, 4 * GIB) == (
        "large",
        "used 9.0 GiB of host memory on n1, which has 2.0 GiB free where the pool keeps 4.0 GiB; a fair part among 2 "
        "jobs is 4.0 GiB, and it exceeds its part by most",
    )


def test_one_job_at_a_time_is_ended_on_a_node_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    jobs = {name: submitted(name) for name in ("large", "larger", "capped")}
    taken = {f"{name}.1": use(size * GIB) for name, size in (("large", 8), ("larger", 9), ("capped", 1))}
    taken |= {"stranger.1": use(90 * GIB), "large.0": use(70 * GIB)}
    monkeypatch.setattr(host_use, "measure_node", lambda _: NodeUse("n1", GIB, taken))
    ended: list[str] = []

    def end(job: Submission, why: str) -> None:
        ended.append(job.name)
        job.refused = why

    watch = HostWatch(lambda: list(jobs.values()), end, nodes=1, keep_free=2 * GIB)
    watch.look_at_hosts()
    assert ended == ["larger"] and watch.of("large") == ((use(8 * GIB),), None)
    jobs["larger"].limits = HostLimits(memory=1)
    watch.look_at_hosts()
    assert ended == ["larger"], "what it has comes back first, and it is ended once"
    del jobs["larger"], taken["larger.1"]
    jobs["capped"].limits = HostLimits(memory=GIB - 1)
    watch.look_at_hosts()
    assert ended == ["larger", "capped"]
    del jobs["capped"], taken["capped.1"]
    watch.look_at_hosts()
    assert ended == ["larger", "capped", "large"]
    jobs.clear()
    watch.look_at_hosts()
    assert watch.of("large") == ((), None)


def test_a_job_that_the_kernel_ended_is_ended_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    kernels = {"above.1": True, "unlucky.1": False, "fine.0": True}
    nodes = [NodeUse("n1", GIB, {}), NodeUse("n2", GIB, {}, ended=kernels)]
    asked: list[object] = []
    monkeypatch.setattr(host_use, "measure_nodes", lambda capped: asked.append(capped) or nodes)
    ended: dict[str, str] = {}
    jobs = {name: submitted(name) for name in ("above", "unlucky", "fine", "free")}
    watch = HostWatch(lambda: [*jobs.values()], lambda job, why: ended.update({job.name: why}), nodes=2, keep_free=0)
    watch.look_at_hosts()
    watch.leave()
    assert asked == [None] and watch.caps == "" and watch.why_by_kernel(jobs["free"]) == ""
    ended.clear()
    for name in ("above", "unlucky", "fine"):
        jobs[name].limits = HostLimits(memory=GIB)
    watch.look_at_hosts()
    assert ended == {
        "above": "ended by the kernel on n2: above its cap of 1.0 GiB",
        "unlucky": "ended by the kernel on n2: the node had no memory left",
    }
    assert asked[-1] == ["above.1", "unlucky.1", "fine.1", "free.1"]
    assert watch.caps == "host memory: capped by the pool's watch and the kernel"
    assert [watch.why_by_kernel(jobs[name]) for name in ("above", "fine")] == [ended["above"], ""]
    nodes[0] = nodes[0]._replace(uncapped="no cgroup v2")
    jobs.clear()
    watch.leave()
    assert asked[-1] == [], "no group of a job stays"
    assert watch.caps == "host memory: capped by the pool's watch alone on n1 (no cgroup v2)"


def test_the_end_of_a_job_that_the_kernel_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def died(*_: object, **__: object) -> None:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "get", died)
    actor: Any = PoolJobs.__new__(PoolJobs)
    actor._actors, whys, noted = {"one": MagicMock()}, ["ended by the kernel", ""], []
    actor._hosts = SimpleNamespace(why_by_kernel=lambda job: whys.pop(0))
    actor._note_end = lambda job, outcome: noted.append((outcome.kind, outcome.reason))
    for _ in range(2):
        actor._watch(submitted("one"))
    assert noted[0] == ("failed", "ended by the kernel") and noted[1][0] == "died"


def test_a_job_above_its_disk_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "weights").write_bytes(b"x" * 40960)
    job = replace(submitted("saves"), saves_in=str(tmp_path / "saved"), limits=HostLimits(memory=1, disk=40000))
    ended: list[str] = []
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "log").write_bytes(b"x" * 40960)
    pools_own = str(tmp_path / "pool")
    command = replace(submitted("command"), log_dir=pools_own, limits=HostLimits(disk=1))
    jobs = [job, command]
    watch = HostWatch(lambda: jobs, lambda job, why: ended.append(why), nodes=1, keep_free=0, pools_own=pools_own)
    watch.look_at_disks()
    assert len(ended) == 1 and ended[0].startswith("its logs and checkpoints take 4")
    assert watch.of("saves")[1] in range(40960, 50000)


def test_a_failed_round_is_said_once_and_measured_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_use, "_ROUND_S", 0.01)
    monkeypatch.setattr(host_use, "_PART_OF_TIME", 100.0)
    rounds: list[int] = []

    def jobs() -> list[Submission]:
        rounds.append(1)
        raise RuntimeError("no answer")

    HostWatch(jobs, lambda name, why: None, nodes=1, keep_free=0)
    deadline = time.monotonic() + 20
    while len(rounds) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("event=hosts_not_measured work=look_at_hosts reason=no answer") == 1 and len(rounds) >= 10


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_processes_of_a_job_and_what_they_started_are_measured(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second has a name in its environment no more, as helpers of this package do.
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TAKES!r}, *sys.argv[1:]], env={{}})"
    other_pool = {"RAY_RAYLET_PID": "1"}
    run = {INCARNATION_VARIABLE: "7"}
    for name, code, extra in (("own", parent, {}), ("alone", TAKES, {}), ("own", TAKES, other_pool)):
        line = [sys.executable, "-c", code, str(200 << 20), str(tmp_path / f"{len(processes)}")]
        processes.append(subprocess.Popen(line, env=os.environ | agent_variables(name) | run | extra))
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = measure_node().jobs
    assert set(found) == {"own.7", "alone.7"}
    assert (found["own.7"].processes, found["alone.7"].processes) == (2, 1)
    assert all(200 << 20 < job.memory < 300 << 20 and job.files >= 3 for job in found.values())
    assert all(job.node_free > 0 for job in found.values())
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    assert {name: job.processes for name, job in measure_node().jobs.items()} == {"own.7": 1}


@pytest.mark.parametrize("names", host_use._CGROUP_FILES)
def test_a_container_with_less_than_the_machine_counts(tmp_path: Path, names: tuple[str, ...]) -> None:
    limit, usage, stat, cached = names
    assert free_memory(tmp_path) > GIB
    for name, text in ((limit, "max"), (usage, "7000000"), (stat, f"anon 5\n{cached} 1000000\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) > GIB
    (tmp_path / limit).write_text("10000000")
    assert free_memory(tmp_path) == 4_000_000


def test_a_folders_disk_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "weights").write_bytes(b"x" * 40960)
    os.link(tmp_path / "a" / "b" / "weights", tmp_path / "a" / "same")
    (tmp_path / "a" / "gone").symlink_to("nowhere")
    assert disk_of([str(tmp_path), str(tmp_path / "a"), str(tmp_path / "none")]) in range(40960, 50000)


@pytest.mark.parametrize("text", ["", "0", "-1G", "64X", "G", "1e3", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size above 0, as 64G, 500M or 2T"):
        bytes_of(text)


def test_a_jobs_own_limits_are_read_and_are_never_above_the_pools(tmp_path: Path) -> None:
    (tmp_path / "command.yaml").write_text(yaml.safe_dump({"external": {"command": ["true"]}}))
    file = tmp_path / "job.yaml"

    def written(**keys: object) -> HostLimits:
        file.write_text(yaml.safe_dump({"nemo_config_path": "command.yaml", **keys}))
        return read_jobs([file], Pool(1, 2))[0].limits

    own = written(job_memory="1.5G", job_files=100)
    assert own == HostLimits(memory=3 * GIB // 2, files=100)
    assert own.within(HostLimits(memory=2 * GIB, disk=7)) == HostLimits(3 * GIB // 2, 100, 7)
    assert own.within(HostLimits(files=100)).files == 100
    with pytest.raises(ValueError, match="job_files: 100 is above the pool's --job-files 99; lower it"):
        own.within(HostLimits(files=99))
    for key, value in (("job_memory", "much"), ("job_files", "10G"), ("job_files", True), ("job_disk", 0)):
        with pytest.raises(ConfigError, match=f"{key}: .*expected a"):
            written(**{key: value})


def test_the_page_shows_the_memory_of_all_nodes(tmp_path: Path) -> None:
    shown = Standing("one", (), (0,), 0.0, hosts=(use(GIB), use(GIB // 2)))
    data: Any = PoolView(tmp_path, lambda: [shown, replace(shown, hosts=())]).data()
    assert [row[-1] for row in data["standings"]] == ["1.5 GiB", ""] and data["columns"][-1] == "host memory"
    assert all(len(row) == len(data["columns"]) for row in data["standings"])


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_job_above_its_memory_is_ended_by_name_and_another_goes_on(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from nemo_rl.distributed.accelerator_slots import CPU
    from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool

    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    options = PoolOptions(limits=HostLimits(memory=GIB))
    actor: Any = open_pool(Pool(1, 2), CPU, log_dir, LIVE_LIMITS, options=options)
    try:
        for name, size in (("hungry", GIB), ("modest", 1 << 20)):
            command = [sys.executable, "-c", TAKES, str(size), str(tmp_path / f"{name}.took")]
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"external": {"command": command}}))
            ray.get(actor.submit.remote(read_jobs([tmp_path / f"{name}.yaml"], Pool(1, 2))[0]), timeout=60)

        def stands(name: str) -> Standing:
            return next(s for s in ray.get(actor.standings.remote(), timeout=60) if s.name == name)

        deadline = time.monotonic() + 120
        while stands("hungry").outcome is None or not stands("modest").hosts:
            assert time.monotonic() < deadline, (stands("hungry"), stands("modest"))
            time.sleep(0.2)
        outcome = stands("hungry").outcome
        assert outcome is not None and outcome.kind == "failed"
        assert outcome.reason.startswith("used 1.") and outcome.reason.endswith("its cap is 1.0 GiB")
        assert not stands("hungry").hosts
        caps = ray.get(actor.about.remote(), timeout=60).caps
        assert caps.startswith("host memory: capped by the pool's watch"), caps
        held = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
        groups = [one.get(MEMORY_GROUP, "") for one in held if one.get(PIPELINE_VARIABLE) == "modest"]
        store = int(ray.nodes()[0]["Resources"]["object_store_memory"])
        assert any(group.startswith(f"{GIB + store} modest.") for group in groups), groups
        modest = stands("modest")
        assert modest.outcome is None and 0 < modest.hosts[0].memory < GIB and modest.hosts[0].processes >= 2
        (node,) = measure_nodes()
        # Ray keeps workers of tasks for others, with the name of a job of an earlier pool that is long gone.
        ours = {"hungry", "modest"} & {run.partition(".")[0] for run in node.jobs}
        assert node.free > 0 and ours == {"modest"}, "asked through Ray"
        monkeypatch.setattr(page_server, "_WRITTEN_S", 2.0)
        assert PoolView(log_dir, list)._judged(ended=False) == [], "a pool that runs keeps every invariant"
        (job,) = read_jobs([tmp_path / "modest.yaml"], Pool(1, 2))
        with pytest.raises(ray.exceptions.RayTaskError) as refused:
            more = replace(job, name="more", limits=HostLimits(memory=2 * GIB))
            ray.get(actor.submit.remote(more), timeout=60)
        assert isinstance(refused.value.cause, PoolError)
        assert "more: job_memory: 2147483648 is above the pool's --job-memory 1073741824" in str(refused.value.cause)
    finally:
        close_pool(actor)
    assert {s.name: s.limits.memory for s in PoolState.read(log_dir / "pool.json").submissions} == {
        "hungry": GIB,
        "modest": GIB,
    }
