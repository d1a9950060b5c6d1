"""The files by which a user's commands find an open pool: who may read them, which are stale, which one is meant."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemo_rl.config import ConfigError
from nemo_rl.time_sharing.open_pools import (
    NoOpenPool,
    OpenPool,
    announced,
    announced_to_team,
    open_pools,
    team_group,
    team_pool_file,
    the_open_pool,
)
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.pool_commands import check_code, submitters_env
from nemo_rl.time_sharing.pool_jobs import PoolError
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.files import NotPrivate, users_directory

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def pool(name: str = "p", **changes: object) -> OpenPool:
    return replace(OpenPool(name, "127.0.0.1:6379", "token", "secret", "http://page", "logs"), **changes)  # type: ignore[arg-type]


def found(name: str | None = None) -> OpenPool | None:
    return the_open_pool(name, lambda line: None)


def test_a_pool_is_found_while_it_is_open_and_its_token_is_not_shown() -> None:
    assert found() is None
    with announced(pool()):
        there = found()
        assert there is not None and there.token == "secret" and "secret" not in repr(there)
        (path,) = users_directory().iterdir()
        assert path.stat().st_mode & 0o777 == 0o600 and users_directory().stat().st_mode & 0o777 == 0o700
    assert found() is None


@pytest.mark.parametrize("spoilt", ["open directory", "link directory", "open file", "link file", "no json", "no pool"])
def test_what_others_could_have_written_is_refused(spoilt: str, tmp_path: Path) -> None:
    with announced(pool()):
        (path,) = users_directory().iterdir()
        if spoilt == "open directory":
            users_directory().chmod(0o755)
        elif spoilt == "link directory":
            moved = path.parent.rename(tmp_path / "elsewhere")
            path.parent.symlink_to(moved)
        elif spoilt == "open file":
            path.chmod(0o644)
        elif spoilt == "link file":
            moved = path.rename(tmp_path / "elsewhere")
            path.symlink_to(moved)
        else:
            path.write_text("{" if spoilt == "no json" else '{"name": "p"}')
        with pytest.raises((NoOpenPool, NotPrivate), match="remove it"):
            found()
        # So that the file can be removed again.
        if spoilt == "open directory":
            directory_of = path.parent
            directory_of.chmod(0o700)


def test_a_pool_whose_process_is_gone_is_said_and_forgotten() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(announced(pool("gone", pid=ended.pid)))
        # Its number is another process's now.
        stack.enter_context(announced(pool("replaced", started=1.0)))
        assert open_pools(said.append) == []
        assert len(said) == 2 and all("ended without being closed" in line for line in said)
        assert open_pools(said.append) == [] and len(said) == 2
        stack.enter_context(announced(pool("elsewhere", host="another-machine", pid=ended.pid)))
        assert [each.name for each in open_pools(said.append)] == ["elsewhere"], "not seen from here"


def test_of_several_pools_one_is_chosen_and_other_versions_are_refused() -> None:
    with announced(pool("a")), announced(pool("b", host="another-machine", pid=1)):
        with pytest.raises(NoOpenPool, match=r"several pools are open: a .*, b .*--pool"):
            found()
        assert found("a") == pool("a") and found("1") is not None
        with pytest.raises(NoOpenPool, match="--pool c: there is no such pool"):
            found("c")
    with announced(pool(versions="nemo-rl 0.0.1, ray 2.0, Python 3.8.0")), pytest.raises(NoOpenPool, match="runs nemo"):
        found()


def test_a_teams_pool_is_found_by_the_file_beside_the_teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team, path = tmp_path / "team.yaml", tmp_path / "team.pool"
    group = team_group(team)
    with announced_to_team(team, pool(page="http://page/?token=secret"), group):
        about = path.stat()
        assert (about.st_mode & 0o777, about.st_gid) == (0o640, group)
        there = found(str(path))
        assert there is not None and (there.token, there.page) == ("secret", "http://page/")
        path.chmod(0o660)
        with pytest.raises(NotPrivate, match="team.pool: the address of a team's pool must be writable by its owner"):
            found(str(path))
        path.chmod(0o640)
        monkeypatch.setattr("nemo_rl.time_sharing.open_pools.os.getpid", lambda: 1)
        with pytest.raises(NoOpenPool, match=r"--team .*team.yaml: the pool p is open with it already \(process"):
            team_pool_file(team)
    with pytest.raises(NoOpenPool, match=r"--pool .*team.pool: there is no such file; a pool that serve --team opened"):
        found(str(path))
    with announced_to_team(team, pool("gone", started=1.0), group):
        with pytest.raises(NoOpenPool, match="--pool .*: the pool gone ended without being closed"):
            found(str(path))
        assert team_pool_file(team) == path, "a stale one is replaced"


def test_the_session_of_a_teams_cluster_is_for_its_unix_group(tmp_path: Path) -> None:
    group = os.getegid()
    shared = users_directory(str(tmp_path), group)
    assert shared != users_directory(str(tmp_path)) and shared.name == f"nemo_rl_{os.getuid()}_g{group}"
    assert (shared.stat().st_mode & 0o777, shared.stat().st_gid) == (0o710, group)
    assert users_directory(str(tmp_path), group) == shared
    shared.chmod(0o711)
    with pytest.raises(NotPrivate, match="mode 0710"):
        users_directory(str(tmp_path), group)


def test_a_job_takes_its_folder_python_path_and_named_variables_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/absolute")
    monkeypatch.setenv("MODE", "fast")
    env = submitters_env(["MODE", "OTHER=x=y", "EMPTY="])
    assert env["PYTHONPATH"] == f"{tmp_path}{os.pathsep}{tmp_path}/relative{os.pathsep}/absolute"
    assert (env["MODE"], env["OTHER"], env["EMPTY"]) == ("fast", "x=y", "")
    with pytest.raises(PoolError, match="--env MISSING: is not set here"):
        submitters_env(["MISSING"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": {"mine": {"class": "nowhere_here.Sorting"}}}, "env.mine.class: 'nowhere_here.Sorting'"),
        ({"env": {"mine": {"class": "beside_the_file.Nothing"}}}, "the module beside_the_file has no 'Nothing'"),
        ({"env": {"mine": {"class": "broken_module.Sorting"}}}, "env.mine.class.*planted"),
        (
            {
                "env": {"mine": {"agent": "nowhere_here.play"}},
                "policy": {"generation": {"vllm_cfg": {"expose_http_server": True}}},
            },
            "env.mine.agent: 'nowhere_here.play'",
        ),
        ({"loss_fn": {"class": "nowhere_here.loss"}}, "loss_fn.class"),
        ({"data": {"train": {"processor": "nowhere_here.rows"}}}, "data.train.*processor"),
        ({"env": {"mine": {"class": "beside_the_file.Sorting"}}}, ""),
    ],
)
def test_code_that_a_file_names_is_imported_from_where_it_is_submitted(
    changes: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_file.py").write_text("class Sorting: pass")
    (tmp_path / "broken_module.py").write_text("raise LookupError('planted')")
    judged = {"data": {"default": {"env_name": "mine"}}} if "env" in changes else {}
    content = {"defaults": str(CONFIGS / "grpo_arithmetic_cpu.yaml"), **judged, **changes}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.chdir(tmp_path)
    jobs = read_jobs(["a.yaml"], Pool(1, 2))
    if said:
        with pytest.raises(ConfigError, match=said):
            check_code(jobs)
    else:
        check_code(jobs)
