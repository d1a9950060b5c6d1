"""The live page of one run: what it shows, to whom, and what is left of it."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_rl.algorithms import launch
from nemo_rl.config import LoggerConfig
from nemo_rl.utils.files import PAGE_ADDRESS
from nemo_rl.utils.http_server import PageError
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.run_page import RunPage, run_page


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunPage, str]]:
    """A page of a run that has done one step."""
    own = tmp_path / "exp_000"
    progress = RunProgress(5, console=Console(file=io.StringIO()))
    with run_page(tmp_path, 0) as (page, url), Logger(LoggerConfig(log_dir=str(own))) as logger:
        logger.log_metrics({"reward": 0.5, "loss": 1.0}, 1, "train")
        samples = {"content": ["1+1=\n<b>2</b>\x1b[31m", "2+2="], "rewards": [1.0, 0.0]}
        logger.log_batched_dict_as_jsonl(samples, "train_data_step1.jsonl")
        (own / "actors").mkdir()
        (own / "actors" / "vllm-0.log").write_text("loading\n" * 500 + "ready\n")
        (own / "link").symlink_to("/etc/passwd")
        progress.step_done(1, loss=1.0, tokens=10, reward=0.5)
        progress.phase("generation")
        page.follow(progress, own)
        yield page, url


def get(url: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)


def status_of(url: str, **headers: str) -> int:
    try:
        return int(get(url, **headers).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_page_shows_the_step_the_samples_the_logs_and_the_report(run: tuple[RunPage, str]) -> None:
    page, url = run
    bare, _, token = url.partition("?")
    data = json.load(get(f"{bare}data.json?{token}"))
    assert data["state"] == "generation" and data["line"].startswith("step 1 of 5, reward 0.500")
    assert [sample["reward"] for sample in data["samples"]] == [1.0, 0.0]
    assert "<b>2</b>" in data["samples"][0]["text"] and "\x1b" not in data["samples"][0]["text"]
    ((name, tail),) = data["logs"].items()
    assert name == "actors/vllm-0.log" and tail.endswith("ready") and len(tail.splitlines()) <= 40
    report = get(f"{bare}files/report.html?{token}")
    assert report.headers["Content-Security-Policy"].startswith("sandbox")
    assert "reward" in report.read().decode()
    assert "metrics.jsonl" in get(f"{bare}files/?{token}").read().decode().split()
    page.ended = "ending"
    assert json.load(get(f"{bare}data.json?{token}"))["state"] == "ending"


@pytest.mark.parametrize("path", ["", "data.json", "files/", "files/config.yaml", "files/actors/vllm-0.log", "other"])
def test_nothing_is_shown_without_the_token(run: tuple[RunPage, str], path: str) -> None:
    bare, _, token = run[1].partition("?token=")
    assert status_of(bare + path) == 403
    assert status_of(f"{bare}{path}?token={token}x") == 403
    assert status_of(bare + path, Authorization="Bearer x", Cookie="nrl_run_token=x") == 403


def test_the_cookie_of_the_page_is_enough_and_links_lead_nowhere(run: tuple[RunPage, str]) -> None:
    bare = run[1].partition("?")[0]
    cookie = get(run[1]).headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    mine = {"Cookie": cookie.partition(";")[0]}
    assert status_of(f"{bare}data.json", **mine) == 200
    for outside in ("link", "../page.json", "%2e%2e/page.json", "..%2fpage.json", "/etc/passwd"):
        assert status_of(f"{bare}files/{outside}", **mine) == 404


def test_the_address_is_its_owners_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    old = tmp_path / PAGE_ADDRESS
    old.write_text("left by a run that was killed")
    with run_page(tmp_path, 0) as (page, url):
        assert stat.S_IMODE(old.stat().st_mode) == 0o600
        assert json.loads(old.read_text()) == {"url": url, "pid": os.getpid()}
        assert url.startswith("http://127.0.0.1:") and page.data()["state"] == "starting"
        taken = int(url.split(":")[2][:5])
        with pytest.raises(PageError, match="^--page-port .* cannot be listened on"), run_page(tmp_path, taken):
            pass
        assert status_of(url) == 200
    assert not old.exists()
    with pytest.raises(urllib.error.URLError):
        get(url)


@pytest.mark.parametrize("command", ["grpo", "sft"])
@pytest.mark.parametrize(("given", "port"), [(["--page"], 0), (["--page-port", "8123"], 8123), ([], None)])
def test_the_command_line_asks_for_the_page(
    command: str, given: list[str], port: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    run_to_end = lambda config, page_port=None: asked.append(page_port) or 0  # noqa: E731
    monkeypatch.setattr("nemo_rl.utils.hub.use_cache_if_unreachable", lambda name: None)
    root = Path(sys.modules["nemo_rl"].__file__ or "").parents[1]
    file = root / "examples" / "configs" / f"{command}_arithmetic_cpu.yaml"
    assert replace(getattr(launch, command), run=run_to_end)(given, default_config=file) == 0
    assert asked == [port]
