"""A pool that `serve --team` opened, on real processes: what its users may do, and what it keeps of that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.team import hash_of
from tests import forks

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

MODULE = ["-m", "nemo_rl.time_sharing"]


class TeamPool:
    """A pool of two CPU slots for ann (vision), bob (nlp) and dan, an admin."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        users: dict[str, Any] = {"ann": {"group": "vision"}, "bob": {"group": "nlp"}}
        users["dan"] = {"group": "lab", "role": "admin"}
        groups: dict[str, Any] = {"lab": None, "vision": {"parent": "lab", "jobs": 1, "waiting": 1, "share": 0.6}}
        groups["nlp"] = {"parent": "lab", "share": 0.4, "limit": 1}
        for name, keys in users.items():
            keys["token_sha256"] = hash_of(f"of-{name}")
        self.team: dict[str, Any] = {"groups": groups, "users": users}
        self.write()
        for name in ("scan", "chat", "next", "third"):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump({"external": {"command": ["sleep", "600"]}}))
        (folder / "wide.yaml").write_text(yaml.safe_dump({"external": {"command": ["sleep", "600"], "gpus": 2}}))
        (folder / "first.yaml").write_text(yaml.safe_dump({"nemo_config_path": "scan.yaml", "priority": "high"}))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "NRL_P", "XDG_"))}
        self.environment = kept | {"TMPDIR": str(temporary), "HOME": str(temporary)}
        self.environment |= {"NRL_OBJECT_STORE_BYTES": str(128 << 20)} | forks.forking_environment()
        line = [*MODULE, "serve", "--gpus", "2", "--device", "cpu", "--port", "0", "--team", "team.yaml"]
        self.serving = forks.start(line, self.environment, subprocess.PIPE, folder=folder)
        self.file = folder / "team.pool"
        self.until(self.file.exists)
        self.page = json.loads(self.file.read_text())["page"]

    def write(self) -> None:
        (self.folder / "team.yaml").write_text(yaml.safe_dump(self.team))
        (self.folder / "team.yaml").chmod(0o644)

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline and self.serving.poll() is None
            time.sleep(0.2)

    def run(self, user: str, *words: str, code: int = 0) -> str:
        """What a command of a user says, who has the token in a variable."""
        environment = self.environment | {"NRL_POOL": str(self.file), "NRL_POOL_TOKEN": f"of-{user}"}
        ended = forks.run([*MODULE, *words], environment, folder=self.folder, timeout_s=90)
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, said
        return said

    def queued(self) -> list[str]:
        """The jobs that wait for their turn."""
        shown = json.loads(self.run("ann", "status", "--json"))
        return [one["name"] for one in shown["pipelines"] if one["state"] == "queued"]

    def post(self, user: str, path: str) -> int:
        headers = {"Authorization": f"Bearer of-{user}"}
        method = "POST" if path.endswith(("drain", "cancel")) else "GET"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.page + path, method=method, headers=headers), timeout=30
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[TeamPool]:
    # Paths of sockets must be short.
    temporary = Path(tempfile.mkdtemp(prefix="p", dir="/tmp"))
    made = TeamPool(tmp_path, temporary)
    yield made
    if made.serving.poll() is None:
        made.serving.send_signal(signal.SIGINT)
        made.serving.communicate(timeout=90)
    shutil.rmtree(temporary, ignore_errors=True)


def test_a_team_shares_a_pool_within_its_roles(pool: TeamPool) -> None:
    assert "open with it already" in pool.run("dan", "serve", "--gpus", "2", "--team", "team.yaml", code=2)
    assert pool.file.stat().st_mode & 0o777 == 0o640
    assert pool.run("ann", "submit", "scan.yaml").splitlines()[-1].startswith("scan")
    pool.run("bob", "submit", "chat.yaml")
    said = pool.run("ann", "submit", "next.yaml")
    assert "next: runs on CPU slots 0, 1; cannot begin yet" in said and "1 job of group vision runs" in said
    assert "1 job of group vision waits, as many as may" in pool.run("ann", "submit", "third.yaml", code=2)
    status = pool.run("bob", "status")
    assert "queued" in status
    assert "ann (vision)" in status and "bob (nlp)" in status
    assert "bob (member of nlp) may not cancel scan, a job of ann" in pool.run("bob", "cancel", "scan", code=2)
    assert "may not submit scan, a job of ann" in pool.run("bob", "submit", "scan.yaml", code=2)
    said = pool.run("bob", "submit", "wide.yaml", code=2)
    assert "wide: group nlp may have 1 CPU slots at once, and it needs 2; make it smaller" in said
    said = pool.run("bob", "submit", "first.yaml", code=2)
    assert "bob (member of nlp) may not submit with priority high first: that takes the role lead or admin" in said
    assert "group nlp: share 0.4 of group lab, at most 1 CPU slots" in pool.run("bob", "explain")
    assert "the token is no user's" in pool.run("eve", "status", code=2)
    assert "may not reload" in pool.run("ann", "reload", code=2)
    assert [pool.post(name, "jobs/scan/drain") for name in ("bob", "eve")] == [409, 403]
    assert [pool.post(name, "data.json") for name in ("bob", "eve")] == [200, 403]

    del pool.team["users"]["bob"]
    pool.team["groups"]["nlp"]["limit"] = 0.5
    pool.write()
    said = pool.run("dan", "reload")
    assert said.splitlines()[:4] == [
        "group nlp: limit 1 -> 0.5",
        "user bob (member of nlp): removed",
        "group nlp: its jobs have 1 CPU slots, more than its limit: engines give theirs back now, training at the end "
        "of its step",
        "job chat of bob, who is gone, goes on",
    ]
    # Ray starts the pool's actor again, with the team as it was read last.
    (actor,) = [one for one in psutil.process_iter(["cmdline"]) if _is_pool_of(one, pool)]
    actor.kill()
    assert "the token is no user's" in pool.run("bob", "cancel", "chat", code=2)
    assert "chat: cancelled" in pool.run("dan", "cancel", "chat")
    assert "scan: drained" in pool.run("ann", "drain", "scan")
    # The restarted actor knows who waits.
    pool.until(lambda: not pool.queued())
    assert "next: cancelled" in pool.run("ann", "cancel", "next")
    pool.serving.send_signal(signal.SIGINT)
    pool.serving.communicate(timeout=90)
    assert not pool.file.exists()

    entries = list(merge_by_machine_time(sorted((pool.folder / "logs/time_sharing/latest").glob("*.jsonl"))))
    registered = {one.event.pipeline: one.event for one in entries if isinstance(one.event, ev.Registered)}
    assert {name: (event.user, event.group) for name, event in registered.items()} == {
        "scan": ("ann", "vision"),
        "chat": ("bob", "nlp"),
        "next": ("ann", "vision"),
    }
    acted = [one.event for one in entries if isinstance(one.event, ev.UserActed)]
    assert [(event.user, event.action, event.outcome.partition(":")[0]) for event in acted] == [
        ("ann", "submit", "done"),
        ("bob", "submit", "done"),
        ("ann", "submit", "done"),
        ("ann", "submit", "refused"),
        ("bob", "cancel", "refused"),
        ("bob", "submit", "refused"),
        ("bob", "submit", "refused"),
        ("bob", "submit", "refused"),
        ("ann", "reload", "refused"),
        ("bob", "drain", "refused"),
        ("dan", "reload", "done"),
        ("", "cancel", "refused"),
        ("dan", "cancel", "done"),
        ("ann", "drain", "done"),
        ("ann", "cancel", "done"),
    ]
    assert check(entries, ended=True) == []


def _is_pool_of(process: psutil.Process, pool: TeamPool) -> bool:
    """Whether a process is the pool's actor of this test and of no other pool on the machine."""
    try:
        return (
            "PoolActor" in " ".join(process.cmdline()) and process.environ().get("TMPDIR") == pool.environment["TMPDIR"]
        )
    except psutil.Error:
        return False
