"""The dashboard and the alerts of a pool, and the webhook that hears of ended jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from nemo_rl.distributed.private_variables import without_private
from nemo_rl.time_sharing import launcher, pool_commands
from nemo_rl.time_sharing.__main__ import main, parser
from nemo_rl.time_sharing.agents import end_notices
from nemo_rl.time_sharing.agents.end_notices import EndNotices
from nemo_rl.time_sharing.launcher import launcher_parser, options_of, run_together
from nemo_rl.time_sharing.log.events import GpusQuarantined
from nemo_rl.time_sharing.log.pool_state import (
    AdapterProgress,
    HostLimits,
    HostUse,
    Outcome,
    PoolState,
    Progress,
    Standing,
    Submission,
)
from nemo_rl.time_sharing.log.sharing import Gain, Sharing
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.pool_jobs import PoolOptions, variables_of
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Demand, Limits, Priority, Want
from nemo_rl.time_sharing.viewing import page_server
from nemo_rl.time_sharing.viewing.page_server import PoolView
from nemo_rl.time_sharing.viewing.timeline import Interval, Timeline
from tests.time_sharing.bench import Bench

INFRA = Path(__file__).parents[2] / "infra"
ALERTS, BOARD = INFRA / "prometheus" / "alerts.yaml", INFRA / "grafana" / "pool.json"
PROMTOOL = shutil.which("promtool")
ASIDE = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def standings() -> list[Standing]:
    adapters = (AdapterProgress("one", "running", 1, 3, 16, 0.25),)
    return [
        Standing(
            "long",
            (0,),
            (0, 1),
            0.0,
            progress=Progress("training", 3, 9, "logs", 1.5, adapters=adapters),
            sharing=Sharing(0.5, 1.07, 3.0, Gain(1.0, 1.5, 1.3, True)),
            hosts=(HostUse("n1", 1 << 30, 20, 3, 7 << 30), HostUse("n1", 1 << 30, 20, 3, 7 << 30)),
            disk=5000,
        ),
        Standing("short", (1,), (0, 1), 0.0, ended_at=60.0, outcome=Outcome("done", steps=4, waited_s=2.0)),
    ]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Every metric that a page serves, with its labels, from a log in which two jobs want the same GPU."""
    monkeypatch.setattr(page_server, "_FRESH_S", 0.0)
    bench = Bench(2, log=tmp_path / "scheduler.jsonl")
    for name in ("long", "short"):
        bench.register(name, [0], [0, 1])
        bench.status(name, demand=Demand(64, 0, 4, 1))
    bench.settle(20.0)
    for name in ("long", "short"):
        bench.status(name, demand=Demand(64, 0, 4, 2), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 0),))
    bench.settle(5.0)
    bench.record.emit(GpusQuarantined((1,), "long", 1, -1, 1e9, "a process is left"))
    view = PoolView(tmp_path, standings)
    view.metrics()
    found: dict[str, set[str]] = {}
    deadline = time.monotonic() + 20
    while "nrl_pool_violations" not in found:
        assert time.monotonic() < deadline, "the records of a pool that runs are judged beside it"
        for family in text_string_to_metric_families(view.metrics().decode()):
            series = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
            assert len(set(series)) == len(series), "no series comes twice"
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        time.sleep(0.05)
    return found


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    board = json.loads(BOARD.read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    yield from (variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query")


def test_dashboard_and_alerts_ask_for_what_the_page_serves(served: dict[str, set[str]]) -> None:
    asked: set[str] = set()
    for expression in expressions():
        names = set(re.findall(r"\bnrl_\w+", expression))
        assert names and names <= set(served), f"{expression}: {names - set(served)} is not served"
        asked |= names
        has = set.union(*(served[name] for name in names)) | ASIDE
        lists = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)|label_values\(.*, (\w+)\)", expression)
        used = {label.strip() for found in lists for label in ",".join(found).split(",") if label.strip()}
        for name, selected in re.findall(r"\b(nrl_\w+)\{([^}]*)\}", expression):
            own = set(re.findall(r"(\w+)=~", selected))
            assert own <= served[name] | ASIDE, f"{name} has no label {own - served[name] - ASIDE}"
        assert used <= has, f"{expression}: {used - has} is no label of them"
    gauges = {name for name in served if not re.search(r"_(created|count|sum)$", name)}
    assert gauges <= asked | {"nrl_pool_adapter_waited_seconds_total"}, "a figure is on no panel and in no alert"


def test_a_wait_is_that_of_the_oldest_request_that_still_waits() -> None:
    waits = [("before", 10.0, 20.0), ("now", 70.0, 100.0), ("now", 40.0, 100.0), ("now", 60.0, 100.0)]
    timeline = Timeline(end=100.0, intervals=[Interval("queue", start, end, name) for name, start, end in waits])
    served = page_server.prometheus_text(timeline, ()).decode().splitlines()
    assert [line for line in served if line.startswith("nrl_pool_waiting_seconds")] == [
        'nrl_pool_waiting_seconds{pipeline="now"} 60.0'
    ]


def test_legends_and_annotations_name_labels_that_there_are(served: dict[str, set[str]]) -> None:
    everything = set.union(*served.values()) | ASIDE
    texts = ALERTS.read_text() + BOARD.read_text()
    assert set(re.findall(r"\{\{ ?\$labels\.(\w+) ?\}\}", texts)) <= everything
    assert set(re.findall(r"\{\{(\w+)\}\}", texts)) <= everything


def promtool(*line: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROMTOOL), *map(str, line)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here")
def test_promtool_accepts_the_rules_and_each_alert_fires_as_it_should(tmp_path: Path) -> None:
    for name in ("alerts.yaml", "alerts_test.yaml"):
        shutil.copy(ALERTS.with_name(name), tmp_path / name)
    assert promtool("check", "rules", tmp_path / "alerts.yaml").returncode == 0
    done = promtool("test", "rules", tmp_path / "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        kept, rule["expr"] = rule["expr"], "vector(0) > 1"
        (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
        assert promtool("test", "rules", tmp_path / "alerts_test.yaml").returncode != 0, rule["alert"]
        rule["expr"] = kept


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here")
def test_promtool_accepts_each_query_of_the_dashboard(tmp_path: Path) -> None:
    targets = [target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]]
    # As Grafana sends them: a variable is its values, an interval is a time.
    queries = [re.sub(r"\$\w+", "all", re.sub(r"\$__\w+", "5m", query)) for query in targets]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "board.yaml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = promtool("check", "rules", tmp_path / "board.yaml")
    assert done.returncode == 0 and f"{len(targets)} rules found" in done.stdout, done.stdout + done.stderr


class Hook:
    """An HTTP server that keeps what is posted to it, after an answer of the test's choice."""

    def __init__(self) -> None:
        hook = self
        self.took: list[Any] = []
        self.asked: list[str] = []
        self.answers: Callable[[BaseHTTPRequestHandler], None] = lambda handler: self.answer(handler, 204)
        self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.asked.append(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                hook.took.append(json.loads(body))
                hook.answers(self)

            def do_GET(self) -> None:
                hook.asked.append(f"GET {self.path}")
                hook.answer(self, 204)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, status: int, **headers: str) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a byte at a time, so that no socket ever waits for long."""
        while not self.over.wait(0.05):
            handler.wfile.write(b"H")

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(end_notices, "_PAUSES_S", (0.0, 0.05, 0.05))
    hook = Hook()
    yield hook
    hook.close()


def test_an_end_is_posted_once_and_again_only_where_it_did_not_arrive(hook: Hook) -> None:
    notices, arrived = EndNotices(hook.url), []
    notices.post({"name": "one"}, lambda: arrived.append("one"))
    assert notices.settle(20) and arrived == ["one"] and hook.took == [{"name": "one"}]
    failures = [500, 503]
    hook.answers = lambda handler: hook.answer(handler, failures.pop() if failures else 200)
    notices.post({"name": "two"}, lambda: arrived.append("two"))
    assert notices.settle(20) and arrived == ["one", "two"] and len(hook.took) == 4 and notices.trouble == ""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("fails", "answers 500 Internal Server Error"),
        ("redirects", "answers 302 Found"),
        ("hangs", "does not answer within 0.3 s"),
        ("drips", "does not answer within 0.3 s"),
    ],
)
def test_a_webhook_that_fails_is_said_once_and_holds_nothing_up(
    hook: Hook, how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook.answers = {
        "fails": lambda handler: hook.answer(handler, 500),
        "redirects": lambda handler: hook.answer(handler, 302, Location="/elsewhere"),
        "hangs": lambda handler: hook.over.wait(60),
        "drips": hook.drip,
    }[how]
    notices, arrived = EndNotices(hook.url, deadline_s=0.3), []
    began = time.monotonic()
    for number in range(8):
        notices.post({"number": number}, lambda: arrived.append(1))
    assert time.monotonic() - began < 0.3, "posting waits for nobody"
    assert not notices.settle(0.0) or how in ("fails", "redirects")
    assert notices.settle(30) and not arrived
    server = hook.url.removesuffix("/secret")
    assert notices.trouble == f"--on-end {server}: {why}; ends of jobs do not arrive there"
    assert len(hook.took) == 24 and set(hook.asked) == {"/secret"}
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"event=ends_not_posted {notices.trouble}"]
    hook.answers = lambda handler: hook.answer(handler, 200)
    notices.post({"number": 9})
    assert notices.settle(20) and notices.trouble == ""
    assert [record.getMessage() for record in caplog.records][1:] == [f"event=ends_posted_again server={server}"]


def test_a_server_that_is_not_there_is_named_without_the_rest_of_its_address(hook: Hook) -> None:
    hook.close()
    notices = EndNotices(hook.url)
    notices.post({})
    assert notices.settle(20) and "Connection refused" in notices.trouble and "secret" not in notices.trouble


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "ftp://example.com", "http://", "https://:80/x", "http://a:0", "http://a:x", "http://a b"],
)
def test_what_is_no_address_is_refused_before_the_pool_opens(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["serve", "--gpus", "1", "--on-end", url])
    assert ended.value.code == 2
    assert f"--on-end: {url}: expected an address as https://example.com/path" in capsys.readouterr().err


def test_a_secret_address_is_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "hook").write_text("https://example.com/secret\n")
    assert parser().parse_args(["serve", "--gpus", "1", "--on-end", f"@{file}"]).on_end == "https://example.com/secret"
    monkeypatch.setenv("NRL_POOL_ON_END", "https://example.com/other")
    assert parser().parse_args(["serve", "--gpus", "1"]).on_end == "https://example.com/other"
    file.write_text("secret")
    for given in (f"@{file}", f"@{file}s"):
        with pytest.raises(SystemExit):
            parser().parse_args(["serve", "--gpus", "1", "--on-end", given])
        assert f"--on-end: {given}: expected an address" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--gpus", "1"], ["--gpus", "1", "--pipelines", "one.yaml"]])
def test_ray_and_the_jobs_inherit_no_secret_of_the_pool(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every user's jobs have the admin's token, and act as the admin."""
    names = ("NRL_POOL_TOKEN", "NRL_POOL_ON_END")
    for name in names:
        monkeypatch.setenv(name, "https://example.com/secret")
    seen = list[object]()

    @contextmanager
    def opened(_: object, chosen: Any, *more: object) -> Iterator[None]:
        seen.extend([chosen.token, chosen.on_end, *(os.environ.get(name) for name in names)])
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(launcher, "_pool", opened)
    monkeypatch.setattr(launcher, "_new_log_dir", lambda root: root)
    monkeypatch.setattr(launcher, "fitted", lambda files, *_, **named: files)
    monkeypatch.setattr(launcher, "_jobs_of", lambda chosen, pool, *_: (pool, []))
    assert (main(command) if command[0] == "serve" else run_together(command)) == 130
    assert seen == ["https://example.com/secret"] * 2 + [None] * 2
    given = without_private(variables_of(Job("a", CommandConfig(command=["true"]), (), (0,))))
    assert given["NRL_POOL_TOKEN"] == "", "where Ray runs already, and has it"


@pytest.mark.parametrize("command", [["serve", "--gpus", "1"], ["--gpus", "1", "--pipelines", "one.yaml"]])
def test_a_pool_posts_and_caps_only_what_its_command_line_says(command: list[str]) -> None:
    parse = (parser() if command[0] == "serve" else launcher_parser()).parse_args
    bare, caps = (
        parse(command),
        ["--job-memory", "64G", "--job-disk", "1.5T", "--job-files", "900", "--keep-free", "8G"],
    )
    assert options_of(bare) == PoolOptions()
    asked = options_of(parse([*command, *caps, "--on-end", "https://example.com:8443/a?b=c"]))
    assert asked == PoolOptions("https://example.com:8443/a?b=c", HostLimits(64 << 30, 900, 3 << 39), 8 << 30)
    with pytest.raises(SystemExit):
        parse([*command, "--job-memory", "64X"])


def test_status_says_that_ends_do_not_arrive_and_a_restarted_pool_posts_them_again(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Submission("old", (), (0,), 10.0, 12.5, Outcome("done", "score 1", 7), log_dir="logs/old", user="ann")
    PoolState([ended, replace(ended, name="known", notified=True)], [], "ours").write(tmp_path / "pool.json")
    hook.answers = lambda handler: hook.answer(handler, 500)

    def opened() -> PoolActor:
        handles = PoolHandles(None, Pool(1, 1), "cpu", Limits(), str(tmp_path), name="ours")
        actor = PoolActor(handles, options=PoolOptions(on_end=hook.url))
        assert actor.settle_notices(20)
        return actor

    about = opened().about()
    why = f"--on-end {hook.url.removesuffix('/secret')}: answers 500 Internal Server Error; ends of jobs"
    assert about.unheard.startswith(why)
    standing = SimpleNamespace(standings=SimpleNamespace(remote=lambda: [Standing("old", (), (0,), 0.0)]))
    monkeypatch.setattr(pool_commands, "_join", lambda name: (standing, Pool(1, 1)))
    monkeypatch.setattr(pool_commands, "_about", lambda actor: about)
    monkeypatch.setattr("ray.get", lambda answer, timeout: answer)
    assert pool_commands.status(parser().parse_args(["status"])) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["pool ours", about.unheard]

    hook.took.clear()
    hook.answers = lambda handler: hook.answer(handler, 200)
    for _ in range(2):
        assert opened().about().unheard == ""
    (notice,) = hook.took
    assert list(notice.values()) == ["ours", "old", "ann", "done", "score 1", 7, 2.5, "logs/old"]


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_pool_posts_each_end_with_what_became_of_the_job(ray_session: None, hook: Hook, tmp_path: Path) -> None:
    import ray

    from nemo_rl.distributed.accelerator_slots import CPU
    from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool

    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    actor: Any = open_pool(Pool(1, 2), CPU, log_dir, LIVE_LIMITS, name="ours", options=PoolOptions(on_end=hook.url))
    try:
        for name, line in (("good", "true"), ("bad", "echo no data >&2; exit 3"), ("long", "sleep 600")):
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"external": {"command": ["bash", "-c", line]}}))
            ray.get(actor.submit.remote(read_jobs([tmp_path / f"{name}.yaml"], Pool(1, 2))[0]), timeout=60)
        deadline = time.monotonic() + 120
        while len(hook.took) < 2:
            assert time.monotonic() < deadline, ray.get(actor.standings.remote(), timeout=60)
            time.sleep(0.1)
    finally:
        close_pool(actor)
    ends = {end["name"]: end for end in hook.took}
    assert len(hook.took) == 3, "each once, and the last one when the pool closes"
    assert {name: end["outcome"] for name, end in ends.items()} == {
        "good": "done",
        "bad": "failed",
        "long": "cancelled",
    }
    assert "ended with exit code 3; its last line: no data" in ends["bad"]["reason"]
    keys = {"pool", "name", "outcome", "reason", "steps", "seconds", "log_dir"}
    assert all(keys <= set(end) <= keys | {"user"} and end["pool"] == "ours" for end in hook.took)
    assert all(0 < end["seconds"] < 300 for end in hook.took)
    assert all(submission.notified for submission in PoolState.read(log_dir / "pool.json").submissions)
