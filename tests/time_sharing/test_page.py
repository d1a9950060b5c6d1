"""The web page of a pool: what it serves, to whom, and what a browser makes of it."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_rl.time_sharing.log.events import LogClosed, UserActed
from nemo_rl.time_sharing.log.pool_state import AdapterProgress, Outcome, PoolState, Standing
from nemo_rl.time_sharing.log.sharing import Sharing
from nemo_rl.time_sharing.pipelines.grpo import Progress
from nemo_rl.time_sharing.pool_commands import explained
from nemo_rl.time_sharing.pool_jobs import PoolError
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Demand, GivenBack, Priority, Want
from nemo_rl.time_sharing.team import Rights
from nemo_rl.time_sharing.viewing.page_server import PageServer, PoolView, TeamAccess
from nemo_rl.time_sharing.viewing.standings_table import StandingsTable
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.time_sharing.viewing.trace import trace_events
from nemo_rl.utils.http_server import PageError
from nemo_rl.utils.record import read_record
from tests.time_sharing.bench import Bench

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Two pipelines on two GPUs: one has trained and generates, the other waits for its turn."""
    bench = Bench(2, log=tmp_path / "scheduler.jsonl")
    for name, gpu in (("long", 0), ("short", 1)):
        bench.register(name, [gpu], [0, 1])
    bench.status("long", demand=Demand(64, 0, 4, 1))
    bench.settle(20.0)
    train(bench, "long", 2)
    bench.settle(10.0)
    bench.status("short", demand=Demand(8, 0, 1, 1))
    bench.settle(20.0)
    return bench


def train(bench: Bench, name: str, seq: int) -> None:
    bench.status(name, demand=Demand(64, 0, 4, seq), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, seq, 0),))
    bench.settle(5.0)
    epoch = bench.state.pipelines[name].held[ACTOR_TRAIN].epoch
    back = (GivenBack(ACTOR_TRAIN, epoch, 0),)
    bench.status(name, demand=Demand(64, 0, 4, seq + 1), given_back=back)


def standings() -> list[Standing]:
    return [
        Standing(
            "long",
            (0,),
            (0, 1),
            0.0,
            progress=Progress("training", 3, 9, "logs", 1.5, {"reward": 0.25}),
            sharing=Sharing(0.5, 1.07, 3.0),
        ),
        Standing("short", (1,), (0, 1), 0.0, ended_at=60.0, outcome=Outcome("done", steps=4, waited_s=2.0)),
    ]


@pytest.fixture
def view(bench: Bench, tmp_path: Path) -> PoolView:
    return PoolView(tmp_path, standings)


@pytest.fixture
def page(view: PoolView) -> Iterator[PageServer]:
    server = PageServer(view)
    yield server
    server.close()


def get(url: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)


def status_of(url: str, **headers: str) -> int:
    try:
        return int(get(url, **headers).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_page_follows_the_log_and_says_why(bench: Bench, page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.time_sharing.viewing.page_server._FRESH_S", 0.0)
    before = json.load(get(page.url.replace("?", "data.json?")))
    assert before["pipelines"] == ["long", "short"] and before["live"] and not before["checked"]
    assert {bar[5] for bar in before["bars"]} >= {"train", "generate"}
    assert any("for ACTOR_TRAINING: " in text for _, _, text in before["decisions"])
    assert any("rank" in text and "wakes on GPUs" in text for _, _, text in before["decisions"])
    assert before["standings"][0][3:6] == ["3/9", "training", "0.250"]
    assert before["standings"][0][9:11] == ["50%", "1.07"] and before["standings"][1][9:11] == ["", ""]
    train(bench, "long", 8)
    after = json.load(get(page.url.replace("?", "data.json?")))
    assert len(after["decisions"]) > len(before["decisions"]) and len(after["bars"]) > len(before["bars"])

    bench.record.emit(LogClosed())
    closed = json.load(get(page.url.replace("?", "data.json?")))
    assert not closed["live"] and closed["checked"]


def test_from_another_machine_the_page_asks_for_its_token(view: PoolView) -> None:
    server = PageServer(view, host="0.0.0.0", port=0)
    try:
        bare, _, token = server.url.partition("?token=")
        assert len(token) >= 16
        for path in ("", "data.json", "metrics"):
            assert status_of(bare + path) == 403
            assert status_of(f"{bare}{path}?token={token}x") == 403
            assert status_of(f"{bare}{path}?token={token}") == 200
            assert status_of(bare + path, Authorization=f"Bearer {token}") == 200
        cookie = get(f"{bare}?token={token}").headers["Set-Cookie"]
        assert "HttpOnly" in cookie and status_of(f"{bare}data.json", Cookie=cookie.partition(";")[0]) == 200
        port = bare.rpartition(":")[2].strip("/")
        with pytest.raises(PageError, match="cannot be listened on"):
            PageServer(view, host="0.0.0.0", port=int(port))
    finally:
        server.close()


def test_on_this_machine_the_page_is_open_but_not_to_a_foreign_name(page: PageServer) -> None:
    bare = page.url.partition("?token=")[0]
    assert status_of(bare) == 200
    assert status_of(bare, Host="pool.example.com") == 403
    assert status_of(f"{bare}secrets") == 404


def test_the_adapters_of_a_job_have_rows_and_figures_of_their_own(tmp_path: Path, bench: Bench) -> None:
    adapters = (AdapterProgress("one", "done", 3, 3, 0, 1.5), AdapterProgress("two", "running", 1, 3, 16, 0.25))
    progress = Progress("running", 4, 6, "", adapters=adapters)
    jobs = [*standings(), Standing("many", (), (0,), 0.0, progress=progress)]
    view = PoolView(tmp_path, lambda: jobs)
    data: Any = view.data()
    assert data["adapters"][:2] == [[], []]
    assert [row[0] for row in data["adapters"][2]] == ["many/one", "many/two"]
    assert data["adapters"][2][1][3:5] == ["1/3", "running, waits for 16 samples"]
    assert all(len(row) == len(data["columns"]) for row in data["adapters"][2])
    figures = view.metrics().decode()
    for line in ("steps_total", "open_samples", "waited_seconds_total"):
        assert f'nrl_pool_adapter_{line}{{adapter="two",pipeline="many"}}' in figures
    shown = io.StringIO()
    table = StandingsTable(file=shown)
    table.print(jobs)
    table.show(jobs)
    assert re.search(r"many/two +1/3 +running, waits for 16 samples +0.2 s", shown.getvalue())
    assert "many: step 4/6 one=3/3 two=1/3" in shown.getvalue()


def test_prometheus_reads_the_figures(page: PageServer) -> None:
    text = get(page.url.replace("?", "metrics?")).read().decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["nrl_pool_gpus",] == 2
    assert found["nrl_pool_steps_total", "long"] == 3 and found["nrl_pool_waited_seconds_total", "short"] == 2
    in_use = sum(value for name, value in found.items() if name[0] == "nrl_pool_gpus_in_use")
    assert 0 < in_use <= 2
    assert found["nrl_pool_demand_samples", "short"] == 8
    assert found["nrl_pool_handover_seconds_count",] > 0


def raw(server: PageServer, request: bytes, wait_s: float = 30.0) -> bytes:
    """What comes back for bytes that no client would send."""
    host, port = server.url.removeprefix("http://").partition("/")[0].rsplit(":", 1)
    with socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, int(port)), timeout=wait_s) as visitor:
        visitor.sendall(request)
        answer = b""
        while part := visitor.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize("host", ["[", "[::1", "]", "a b", "127.0.0.1:x", "evil.example", ""])
def test_a_host_that_is_none_is_refused_in_a_line(
    page: PageServer, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = raw(page, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.split()[1] in (b"200", b"400", b"403") and (answer.split()[1] == b"200") == (host == "127.0.0.1:x")
    assert b"Traceback" not in answer and not caplog.records


@pytest.mark.parametrize("planted", ["x%0d%0aSet-Cookie:%20stolen=1", "x%0aEvil:%201", "%22;%20Path=/evil", "x%00"])
def test_what_a_visitor_sends_never_becomes_a_header(view: PoolView, planted: str) -> None:
    server = PageServer(view, host="127.0.0.1", token="right")
    try:
        bare = server.url.partition("?")[0]
        answer = get(f"{bare}?token={planted}", Cookie="nrl_pool_token=right")
        assert answer.status == 200 and not {"Set-Cookie", "Evil"} & set(answer.headers)
        cookie = get(f"{bare}?token=right").headers["Set-Cookie"]
        assert cookie.startswith("nrl_pool_token=right;") and "SameSite=strict" in cookie
    finally:
        server.close()


@pytest.mark.slow
def test_visitors_who_send_half_a_request_hold_no_thread_and_are_cut_off(
    view: PoolView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl.utils.http_server._REQUEST_S", 1.0)
    server = PageServer(view)
    try:
        threads = threading.active_count()
        port = int(server.url.rsplit(":", 1)[1].partition("/")[0])
        halves = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(100)]
        for number, half in enumerate(halves):
            half.sendall((b"", b"GET", b"GET / HTTP/1.1\r\nHost: ")[number % 3])
        assert status_of(server.url) == 200
        assert threading.active_count() < threads + 50
        for half in halves:
            with suppress(ConnectionResetError):
                assert half.recv(1) == b""
            half.close()
        assert status_of(server.url) == 200
    finally:
        server.close()


def test_jobs_are_ended_from_the_page_with_its_token_only(view: PoolView) -> None:
    did: list[tuple[str, str]] = []

    def act(what: str, name: str, token: str) -> str:
        if name == "nobody":
            raise PoolError("there is no pipeline 'nobody'")
        did.append((what, name))
        return "done as asked"

    server = PageServer(view, act=act)
    bare, _, token = server.url.partition("?token=")

    def post(path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(bare + path, method="POST", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    try:
        right = {"Authorization": f"Bearer {token}"}
        # What another site can make a browser send is not enough: cookies, addresses.
        for headers in ({}, {"Cookie": f"nrl_pool_token={token}"}, {"Authorization": "Bearer x"}):
            assert post("jobs/long/drain", **headers)[0] == 403
        assert post(f"jobs/long/drain?token={token}")[0] == 403
        assert status_of(f"{bare}jobs/long/drain", **right) == 404 and not did, "nothing is done by a link"
        assert post("jobs/long/drain", **right) == (200, "long: done as asked\n")
        assert post("jobs/short/cancel", **right)[0] == 200
        assert post("jobs/short/restart", **right)[0] == 404
        assert post("jobs/nobody/drain", **right) == (409, "there is no pipeline 'nobody'\n")
        assert did == [("drain", "long"), ("cancel", "short")]
    finally:
        server.close()


def test_a_team_sees_and_does_on_the_page_what_its_roles_allow(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    everybody = [replace(one, log_dir=str(tmp_path / "job"), user="ann", group="nlp") for one in standings()]
    rights = {"of-ann": Rights("ann", "member", frozenset({"long"})), "of-vic": Rights("vic", "viewer", frozenset())}
    did: list[tuple[str, str, str]] = []

    def allowed(name: str, token: str) -> None:
        if name not in rights[token].jobs:
            raise PoolError(f"{rights[token].user} may not")

    def act(what: str, name: str, token: str) -> str:
        allowed(name, token)
        did.append((what, name, token))
        return "done as asked"

    view = PoolView(tmp_path, lambda: everybody)
    server = PageServer(view, act=act, team=TeamAccess(rights.get, allowed))
    try:
        bare = server.url
        assert "token" not in bare
        for path in ("", "data.json", "metrics", "jobs/long/files/"):
            for wrong in ("", "?token=", "?token=x"):
                assert status_of(f"{bare}{path}{wrong}") == 403, path
        for token, may in (("of-ann", [True, False]), ("of-vic", [False, False])):
            data = json.load(get(f"{bare}data.json?token={token}"))
            assert data["may"] == may and data["acts"] and "no security boundary between tenants" in data["notice"]
            assert f"You are {rights[token].user} ({rights[token].role})" in data["notice"]
            assert data["columns"][-2] == "user" and data["standings"][0][-2] == "ann (nlp)"
            assert b"no security boundary" in get(f"{bare}?token={token}").read()
            assert status_of(f"{bare}metrics", Authorization=f"Bearer {token}") == 200
        cookie = get(f"{bare}?token=of-ann").headers["Set-Cookie"].partition(";")[0]
        assert cookie == "nrl_pool_token=of-ann"
        assert status_of(f"{bare}jobs/long/files/", Cookie=cookie) == 200
        assert status_of(f"{bare}jobs/short/files/", Cookie=cookie) == 403
        assert status_of(f"{bare}jobs/long/files/?token=of-vic") == 403
        for token, code in (("of-ann", 200), ("of-vic", 409), ("x", 403)):
            asked = urllib.request.Request(
                f"{bare}jobs/long/drain", method="POST", headers={"Authorization": f"Bearer {token}"}
            )
            with suppress(urllib.error.HTTPError):
                assert urllib.request.urlopen(asked, timeout=30).status == code == 200
        assert did == [("drain", "long", "of-ann")]
    finally:
        server.close()


def test_of_a_command_a_user_of_a_team_sees_its_own_files_alone(bench: Bench, tmp_path: Path) -> None:
    for name in ("long.1.log", "long.adapters.json", "longer.1.log", "short.1.log", "team.json"):
        (tmp_path / name).write_text(name)
    everybody = [replace(one, log_dir=str(tmp_path), user="ann", group="nlp") for one in standings()]
    rights = {"of-ann": Rights("ann", "member", frozenset({"long"}))}
    team = TeamAccess(rights.get, lambda name, token: None)
    server, alone = (
        PageServer(PoolView(tmp_path, lambda: everybody), team=team),
        PageServer(PoolView(tmp_path, lambda: everybody)),
    )
    try:
        at, right = f"{server.url}jobs/long/files/", {"Authorization": "Bearer of-ann"}
        assert get(at, **right).read().decode().split() == ["long.1.log", "long.adapters.json"]
        assert get(f"{at}long.1.log", **right).read() == b"long.1.log"
        for other in ("longer.1.log", "short.1.log", "team.json", "scheduler.jsonl", "long.1.log/../short.1.log"):
            assert status_of(at + other, **right) == 404, other
        bare, _, token = alone.url.partition("?token=")
        assert status_of(f"{bare}jobs/long/files/short.1.log?token={token}") == 200, "without a team as ever"
    finally:
        server.close()
        alone.close()


def test_what_users_do_and_whose_a_job_is_are_among_the_decisions(tmp_path: Path) -> None:
    bench = Bench(2, log=tmp_path / "scheduler.jsonl")
    bench.register("scan", [0], [0, 1], user="ann", group="nlp")
    bench.status("scan", demand=Demand(64, 0, 4, 1))
    bench.settle(20.0)
    bench.record.emit(UserActed("bob", "cancel", "scan", "refused: bob may not"))
    bench.record.emit(UserActed("", "cancel", "scan", "refused: the token is no user's"))
    timeline = build_timeline(read_record(tmp_path / "scheduler.jsonl"))
    assert timeline.users == {"scan": "ann"}
    said = list(explained(timeline, ["scan"], "GPU"))
    assert any(line.startswith("GPU 0: ") and line.endswith(", of ann") for line in said)
    assert any("entitled to" in line and line.endswith(", of ann") for line in said)
    assert said[-2].endswith("bob: cancel scan: refused: bob may not")
    assert said[-1].endswith("a token that is no user's: cancel scan: refused: the token is no user's")


def test_a_scavenger_without_a_gap_is_said_to_wait_for_one(tmp_path: Path) -> None:
    bench = Bench(2, log=tmp_path / "scheduler.jsonl")
    bench.register("busy", [0], [0, 1])
    bench.status("busy", demand=Demand(64, 0, 4, 1))
    bench.scheduler.register("gaps", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [1]}, bench.now, priority="scavenger")
    bench.status("gaps", demand=Demand(64, 0, 4, 1))
    bench.settle(20.0)
    timeline = build_timeline(read_record(tmp_path / "scheduler.jsonl"))
    waits = "gaps: waits for a gap: GPUs that no job can use now, and that none trains on soon"
    assert waits in explained(timeline, [], "GPU") and waits in explained(timeline, ["gaps"], "GPU")
    assert not any("gap" in line for line in explained(timeline, ["busy"], "GPU"))


def test_a_jobs_report_and_logs_are_shown_and_nothing_beside_them(bench: Bench, tmp_path: Path) -> None:
    logs = tmp_path / "job" / "logs"
    (logs / "actors").mkdir(parents=True)
    (logs / "report.html").write_text("<b>report</b>")
    (logs / "actors" / "policy.log").write_text("<script>")
    (tmp_path / "job" / "secret").write_text("secret")
    (logs / "link").symlink_to(tmp_path / "job" / "secret")
    everybody = [replace(standing, log_dir=str(logs)) for standing in standings()[:1]]
    (logs / "page.json").write_text('{"url": "http://page/?token=secret"}')
    (logs / "page.json").chmod(0o600)
    server = PageServer(PoolView(tmp_path, lambda: everybody))
    bare, _, token = server.url.partition("?token=")
    at, right = f"{bare}jobs/long/files/", {"Authorization": f"Bearer {token}"}
    try:
        assert get(at, **right).read().decode().split() == ["actors/policy.log", "report.html"]
        report = get(f"{at}report.html", **right)
        assert report.headers["Content-Type"].startswith("text/html")
        assert report.headers["Content-Security-Policy"].startswith("sandbox")
        assert get(f"{at}actors/policy.log", **right).headers["Content-Type"].startswith("text/plain")
        for outside in ("link", "../secret", "%2e%2e/secret", "..%2fsecret", "/etc/passwd", "%2fetc%2fpasswd", "none"):
            assert status_of(at + outside, **right) == 404
        assert status_of(f"{bare}jobs/stranger/files/", **right) == 404
        assert status_of(f"{at}page.json", **right) == 404
        # On this machine too: what its user alone may read is not another user's.
        for path in ("", "report.html", "actors/policy.log", "page.json", "none"):
            for shown in ({}, {"Authorization": "Bearer x"}, {"Cookie": "nrl_pool_token=x"}):
                assert status_of(at + path, **shown) == 403
        cookie = get(server.url).headers["Set-Cookie"].partition(";")[0]
        assert status_of(f"{at}report.html", Cookie=cookie) == 200
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_browser_draws_the_page(page: PageServer, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    line = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1600"]
    # A page that asks again and again is never done by itself.
    line += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", f"--screenshot={picture}"]
    shot = subprocess.run([*line, page.url], capture_output=True, text=True, timeout=120, check=False)
    assert picture.exists(), shot.stderr
    colours = {tuple(pixel) for pixel in np.round(matplotlib.image.imread(picture)[:, :, :3] * 15).reshape(-1, 3)}
    assert len(colours) > 50, "the timeline is in the pipelines' colours"

    dumped = subprocess.run(
        [*line[:-1], "--dump-dom", page.url], capture_output=True, text=True, timeout=120, check=False
    ).stdout
    assert "wakes on GPUs" in dumped and "for ACTOR_TRAINING" in dumped
    assert "<td>3/9</td>" in dumped and "hand-overs, p50" in dumped


def test_a_pool_of_cpu_slots_is_described_in_cpu_slots(bench: Bench, tmp_path: Path) -> None:
    PoolState([], [], "team", "CPU slot").write(tmp_path / "pool.json")
    data: Any = PoolView(tmp_path, standings).data()
    said = [text for _, _, text in data["decisions"]]
    assert any("wakes on CPU slots 1" in text for text in said)
    timeline = build_timeline(read_record(tmp_path / "scheduler.jsonl", recover=True))
    said += [*explained(timeline, [], "CPU slot"), *map(str, data["columns"])]
    said += [json.dumps(event) for event in trace_events(timeline, "team", "CPU slot") if event["ph"] in "MCi"]
    assert not [text for text in said if "GPU" in text]
    assert any('"CPU slot 0 (node' in text for text in said)
