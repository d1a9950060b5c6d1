"""The command line of many adapters: what is said before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.multi_lora import __main__ as commands
from nemo_rl.algorithms.multi_lora import http
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.multi_lora import AdapterConfig
from nemo_rl.utils.directory_lock import locked

_BASE = Path(__file__).parents[2] / "examples" / "configs" / "multi_lora"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, list[str]]]:
    """The seed of the base and the names of the adapters of every job that would run, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    jobs: list[tuple[int, list[str]]] = []

    def run(base: Any, raw: object, adapters: Sequence[AdapterConfig], **further: object) -> int:
        jobs.append((base.grpo.seed, [adapter.name for adapter in adapters]))
        return 0

    monkeypatch.setattr(commands, "run", run)
    return jobs


def test_overrides_may_stand_before_and_behind_the_files(asked: list[tuple[int, list[str]]]) -> None:
    files = [str(_BASE / "add.yaml"), str(_BASE / "sort.yaml")]
    base = ["--config", str(_BASE / "base.yaml")]
    assert commands.main([*base, "grpo.seed=5", "--adapters", *files]) == 0
    assert commands.main([*base, "--adapters", *files, "grpo.seed=6"]) == 0
    assert asked == [(5, ["add", "sort"]), (6, ["add", "sort"])]


def test_two_jobs_do_not_write_into_one_directory(
    asked: list[tuple[int, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--config", str(_BASE / "base.yaml"), "--adapters", str(_BASE / "add.yaml")]
    with locked(tmp_path / "logs" / "multi_lora", "logger.log_dir"):
        assert commands.main(line) == 1
    assert "logger.log_dir" in capsys.readouterr().err and not asked
    assert commands.main(line) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--adapters: names no file"),
        (["--adapters", "missing.yaml"], "there is no file missing.yaml"),
        (["--adapters", str(_BASE / "add.yaml"), "multi_lora.slot=1"], "multi_lora.slot"),
        (["--adapters", *map(str, sorted(_BASE.glob("s*.yaml"))), "multi_lora.slots=1"], "slots is 1; raise it"),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_its_line(
    asked: list[tuple[int, list[str]]], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert commands.main(["--config", str(_BASE / "base.yaml"), *more]) == 2
    assert said in capsys.readouterr().err and not asked


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "said"),
    [
        ("GET", "/adapters", {"Authorization": "Bearer wrong"}, "", 401, "token"),
        ("GET", "/adapters", {"Authorization": "Bearer \xe9"}, "", 401, "token"),
        ("GET", "/other", {}, "", 404, "there is no /other"),
        ("GET", "/adapters/one", {}, "", 404, "there is no /adapters/one"),
        ("POST", "/adapters", {}, " " * (1 << 20) + "{}", 400, "at most 1048576 bytes"),
        ("POST", "/adapters", {}, "{", 400, "Expecting"),
        ("POST", "/adapters", {}, '{"name": "a"}', 400, "the path of an adapter's YAML file"),
        ("DELETE", "/adapters/none", {}, "", 400, "no adapter none"),
    ],
)
def test_a_wrong_request_is_refused(
    method: str, path: str, headers: dict[str, str], body: str, status: int, said: str, tmp_path: Path
) -> None:
    class Job:
        def remove(self, name: str) -> Any:
            raise ConfigError([f"there is no adapter {name}"])

    job: Any = Job()
    with http.serve(job, {}, tmp_path, 0) as address:
        token = json.loads((tmp_path / http.ADAPTERS_ADDRESS).read_text())["token"]
        connection = HTTPConnection(address.removeprefix("http://"), timeout=20)
        connection.request(method, path, body or None, {"Authorization": f"Bearer {token}"} | headers)
        answer = connection.getresponse()
        assert answer.status == status and said in json.loads(answer.read())["error"]


def test_a_command_on_no_job_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["list", "--log-dir", str(tmp_path)]) == 1
    assert f"{tmp_path}/adapters.json: no job of adapters runs" in capsys.readouterr().err
