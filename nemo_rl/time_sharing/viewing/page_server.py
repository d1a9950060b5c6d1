"""The web page of a pool: holders of GPUs and reasons, live or from a finished log, and metrics for Prometheus.

Reads the scheduler's log and asks for standings; changes nothing except through `act`. Invariants: without a token
nothing is shown to another machine and no file of a job to anybody, and no action is taken; the port is free again
after `close`.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.host_use import in_words
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.accounts import Accounts, UnaccountableLog
from nemo_rl.time_sharing.log.events import LogClosed
from nemo_rl.time_sharing.log.pool_state import PoolState, Standing
from nemo_rl.time_sharing.log.reading import LogTail, Reread, merge_by_machine_time
from nemo_rl.time_sharing.viewing.pool_report import TEMPLATE, report_data
from nemo_rl.time_sharing.viewing.standings_table import adapter_cells, cells, columns, has_users, steps_of, waited_s
from nemo_rl.time_sharing.viewing.timeline import Timeline, TimelineBuilder
from nemo_rl.utils.http_server import (
    NEEDS_TOKEN,
    PROMETHEUS_TEXT,
    bearer,
    file_of,
    guarded_app,
    of_this_machine,
    serve_page,
    shows_token,
)
from nemo_rl.utils.record import Entry, RecordError
from nemo_rl.utils.record_events import StepFinished
from nemo_rl.utils.text import filled_page

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

    from nemo_rl.time_sharing.team import Rights

_FRESH_S = 1.0
_MOST_BARS = 20_000
_WRITTEN_S = 60.0
_JUDGE_S, _PARTS = 600.0, 20.0
"""How often a running pool's records are judged, and one over the part of the time that this may take."""
_COOKIE = "nrl_pool_token"
_ACTIONS = ("drain", "cancel")

_NO_BOUNDARY = (
    "The users of this pool trust each other: all jobs run as {} on one Ray cluster, so roles prevent mistakes and are "
    "no security boundary between tenants."
)

Act = Callable[[str, str, str], str]
"""Takes `drain` or `cancel`, a job's name and the visitor's token; says what happens."""


@dataclass(frozen=True)
class TeamAccess:
    """How a page asks the pool of a team what its visitors may do.

    Attributes:
        rights: Of the user of a token; None where it is no user's.
        see_logs: Takes a job's name and a token. Raises UserError: its user may not read the job's logs.
        run_as_submitter: Whether jobs run as the Unix users of their submitters.
    """

    rights: Callable[[str], Rights | None]
    see_logs: Callable[[str, str], None]
    run_as_submitter: bool = False

    def known(self, shown: Sequence[str]) -> bool:
        """Whether one of some strings is a user's token."""
        return any(self.rights(one) is not None for one in shown if one)


class PoolView:
    """Data of one pool's page, at most a second old. `standings`: its pipelines; None if only the log is left."""

    def __init__(self, log_dir: Path, standings: Callable[[], Sequence[Standing]] | None = None) -> None:
        self._log_dir, self._standings = log_dir, standings
        kept = PoolState.read(log_dir / "pool.json")
        self.name, self._unit = kept.name or log_dir.resolve().name, kept.unit
        self._ended = {job.name: job.log_dir for job in kept.submissions}
        self._tail, self._builder = LogTail(log_dir / "scheduler.jsonl"), TimelineBuilder()
        self._accounts: Accounts | None = Accounts()
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._known: Sequence[Standing] = ()
        self._closed = False
        self._violations: list[Any] | None = None
        self._judge: threading.Thread | None = None
        self._judge_at = float("-inf")
        self._found_open: int | None = None
        self._steps: dict[str, int] = {}

    def _timeline(self) -> Timeline:
        if time.monotonic() - self._asked > _FRESH_S:
            for entry in self._tail.new():
                self._builder.take(entry)
                self._account(entry)
                self._closed = isinstance(entry.event, LogClosed)
            if self._standings is not None:
                self._known = self._standings()
            self._asked = time.monotonic()
        origin = self._builder.timeline.origin
        live = self._standings is not None and not self._closed
        return self._builder.so_far(time.time() - origin if live and origin else None)

    def _account(self, entry: Entry) -> None:
        if self._accounts is not None:
            try:
                self._accounts.take(entry)
            except UnaccountableLog:
                self._accounts = None

    def data(self, managed: frozenset[str] | None = None) -> dict[str, object]:
        """Data of the page. `managed`: the jobs that its visitor may end, and whose logs it may read; None for all."""
        with self._lock:
            timeline = self._timeline()
            if self._closed and self._violations is None:
                self._violations = self._judged(ended=True)
            timeline.steps = self._steps | {standing.name: steps_of(standing) for standing in self._known}
            if self._accounts is not None:
                self._accounts.until(timeline.origin + timeline.end)
            data = report_data(timeline, self._accounts, self._violations or [], self.name, self._unit)
            bars: Any = data["bars"]
            users = has_users(self._known)
            said = "" if self._tail.damage is None else f"the log cannot be read any further: {self._tail.damage}"
            return data | {
                "live": not self._closed,
                "checked": self._violations is not None,
                "bars": bars[-_MOST_BARS:],
                "columns": [*columns(self._unit, users=users), "host memory"],
                "standings": [[*cells(standing, users=users), _host_memory(standing)] for standing in self._known],
                "adapters": [[[*row, ""] for row in adapter_cells(standing, users=users)] for standing in self._known],
                "may": [managed is None or standing.name in managed for standing in self._known],
                "why": [standing.why for standing in self._known],
                "ended": [standing.outcome is not None for standing in self._known],
                "reports": [bool(one.log_dir) and Path(one.log_dir, "report.html").exists() for one in self._known],
                "about": said,
            }

    def folder_of(self, job: str) -> Path | None:
        """Folder of a job's own logs, once it has reported it."""
        with self._lock:
            self._timeline()
            known = {standing.name: standing.log_dir for standing in self._known}
        folder = (self._ended | known).get(job)
        return Path(folder) if folder else None

    def is_of_pool(self, folder: Path) -> bool:
        """Whether a folder is that of the pool's log."""
        return folder.resolve() == self._log_dir.resolve()

    def _judged(self, *, ended: bool) -> list[object]:
        """Violations in all records of the pool; once the log is closed, also counts its pipelines' steps. Before that
        the newest entries are left out, since one process may have written its own before another has.
        """
        until = time.time() - _WRITTEN_S
        try:
            paths = sorted(self._log_dir.glob("*.jsonl"))
            merged = Reread(lambda: merge_by_machine_time(paths, recover=not ended))
            if not ended:
                written = Reread(lambda: takewhile(lambda entry: entry.time < until, merged))
                return list(check(written, ended=False)) if any(True for _ in written) else []
            done = [entry.source for entry in merged if isinstance(entry.event, StepFinished)]
            self._steps = dict(Counter(source.partition("/")[0] for source in done))
            return list(check(merged, ended=True))
        except RecordError as error:
            return [error]

    def metrics(self) -> bytes:
        """For Prometheus."""
        with self._lock:
            timeline = self._timeline()
            if self._standings is not None and not self._closed:
                self._judge_beside()
            found = self._found_open if self._violations is None else len(self._violations)
            disk = shutil.disk_usage(self._log_dir)
            return prometheus_text(timeline, self._known, Health(found, disk.free, disk.total))

    def _judge_beside(self) -> None:
        """Has the records of a running pool judged in a thread, now and then."""
        if time.monotonic() < self._judge_at or (self._judge is not None and self._judge.is_alive()):
            return

        def judge() -> None:
            began = time.monotonic()
            try:
                self._found_open = len(self._judged(ended=False))
            finally:
                self._judge_at = time.monotonic() + max(_JUDGE_S, _PARTS * (time.monotonic() - began))

        self._judge = threading.Thread(target=judge, name="judge-of-pool", daemon=True)
        self._judge.start()


def _host_memory(standing: Standing) -> str:
    return in_words(sum(use.memory for use in standing.hosts)) if standing.hosts else ""


class PageServer:
    """Serves `/`, `/data.json`, `/metrics`, each job's report and logs under `/jobs/`, and drains and cancels jobs.

    Args:
        port: Port; 0 takes a free one.
        token: Secret of visitors, as `?token=`, as a bearer token or by the page's cookie. By default a random one is
            made;
            then visitors from this machine see the page without it, but not the files of jobs.
        act: Drains or cancels a job and returns a message. Requests always need the token as a bearer token, which no
            other
            site can make a browser send. None if the pool is closed.
        team: Who may see and do what, in the place of `token`; None where the pool has no team. Everything needs a
            user's token then.

    Attributes:
        url: Address of the page, with the token where there is no team.

    Raises PageError: the address cannot be listened on.
    """

    def __init__(
        self,
        view: PoolView,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        act: Act | None = None,
        team: TeamAccess | None = None,
    ) -> None:
        token_to_read = team is not None or token is not None or not of_this_machine(host)
        token = None if team is not None else token or secrets.token_urlsafe(16)
        self._view, self._act, self._team = view, act, team
        self._known = team.known if team is not None else partial(shows_token, token or "")
        routes = [
            Route("/", self._page),
            Route("/data.json", self._data),
            Route("/metrics", self._metrics),
            Route("/jobs/{name}/files/{path:path}", self._files),
            Route("/jobs/{name}/{what}", self._acted, methods=["POST"]),
        ]
        app = guarded_app(routes, self._known, token_to_read=token_to_read, cookie=_COOKIE)
        self._server, self.url = serve_page(app, token, host=host, port=port, name="pool-page")

    def close(self) -> None:
        """Stops serving. Safe to call twice."""
        self._server.close()

    def _shown(self, request: Request) -> list[str]:
        return [request.query_params.get("token", ""), bearer(request), request.cookies.get(_COOKIE, "")]

    def _data_for(self, request: Request) -> dict[str, object]:
        if self._team is None:
            return self._view.data() | {"acts": self._act is not None}
        rights = next(
            (found for one in self._shown(request) if one and (found := self._team.rights(one)) is not None), None
        )
        you = f" You are {rights.user} ({rights.role})." if rights is not None else ""
        data = self._view.data(rights.jobs if rights is not None else frozenset())
        whose = "the Unix users of their submitters, but" if self._team.run_as_submitter else "one Unix user"
        return data | {"acts": self._act is not None, "notice": _NO_BOUNDARY.format(whose) + you}

    def _page(self, request: Request) -> Response:
        return HTMLResponse(filled_page(TEMPLATE, f"{self._view.name}: pool", self._data_for(request)))

    def _data(self, request: Request) -> Response:
        return JSONResponse(self._data_for(request))

    def _metrics(self, request: Request) -> Response:
        return Response(self._view.metrics(), media_type=PROMETHEUS_TEXT)

    def _files(self, request: Request) -> Response:
        name, path = request.path_params["name"], request.path_params.get("path", "")
        token = next((one for one in self._shown(request) if self._known([one])), None)
        if token is None:
            return PlainTextResponse(NEEDS_TOKEN, 403)
        if self._team is not None:
            try:
                self._team.see_logs(name, token)
            except UserError as error:
                return PlainTextResponse(f"{error}\n", 403)
        folder = self._view.folder_of(name)
        if folder is None:
            return PlainTextResponse(f"{name}: has not said yet where its logs are\n", 404)
        # Commands write into the pool's own folder, where the files of other users' jobs are, too.
        return file_of(folder, path, f"{name}." if self._team is not None and self._view.is_of_pool(folder) else "")

    def _acted(self, request: Request) -> Response:
        name, what = request.path_params["name"], request.path_params["what"]
        if self._act is None or what not in _ACTIONS:
            return PlainTextResponse("see /\n", 404)
        if not self._known([bearer(request)]):
            return PlainTextResponse(NEEDS_TOKEN, 403)
        try:
            return PlainTextResponse(f"{name}: {self._act(what, name, bearer(request))}\n")
        except UserError as error:
            return PlainTextResponse(f"{error}\n", 409)


_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Health(NamedTuple):
    """State of a pool's records: broken invariants, None before they were judged; bytes of the disk of its log."""

    violations: int | None = None
    free: int = 0
    disk: int = 0


def prometheus_text(timeline: Timeline, standings: Sequence[Standing], health: Health | None = None) -> bytes:
    """The figures in Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Figures:
        def collect(self) -> Iterable[Metric]:
            yield from _metrics(timeline, standings)
            yield from _health(timeline, standings, health)

    registry = CollectorRegistry()
    registry.register(Figures())
    return generate_latest(registry)


def _metrics(timeline: Timeline, standings: Sequence[Standing]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    here = (timeline.pool.nodes - len(timeline.away)) * timeline.pool.gpus_per_node
    yield gauge("nrl_pool_gpus", "GPUs of the pool's nodes that are not away.", here)
    in_use = sorted(_in_use(timeline).items())
    yield _family(gauge, "gpus_in_use", "GPUs by pipeline and use.", in_use, ("pipeline", "use"))
    closed = [o for o in timeline.of("out") if o.phase == "quarantined" and o.end >= timeline.end]
    out = sum(timeline.pool.gpus_in(outage.gpus) for outage in closed)
    yield gauge("nrl_pool_gpus_quarantined", "GPUs out of use.", out)
    demand = {(level.pipeline,): level.value for level in timeline.demand}
    yield _family(gauge, "demand_samples", "Samples still to be generated.", demand.items())
    spans = timeline.handovers
    buckets = [(str(edge), float(sum(span <= edge for span in spans))) for edge in _BUCKETS_S]
    yield HistogramMetricFamily(
        "nrl_pool_handover_seconds",
        "From the decision to give GPUs until they are used.",
        buckets=[*buckets, ("+Inf", float(len(spans)))],
        sum_value=sum(spans),
    )
    yield counter("nrl_pool_faults", "Pipelines cut off, quarantines, ranks taken out.", len(timeline.faults))

    steps = [((s.name,), steps_of(s)) for s in standings]
    yield _family(counter, "steps", "Completed steps.", steps)
    waited = [((s.name,), waited_s(s)) for s in standings]
    yield _family(counter, "waited_seconds", "Waits for training GPUs.", waited)
    sharing = [((s.name,), s.sharing) for s in standings if s.sharing is not None]
    share = [(of, found.share) for of, found in sharing]
    yield _family(gauge, "share", "Part of the pool's GPU time held so far.", share)
    slowdown = [(of, found.slowdown) for of, found in sharing]
    yield _family(gauge, "slowdown", "Time passed over time not lost to other pipelines, estimated.", slowdown)
    gain = [(of, found.gain.of_all) for of, found in sharing if found.gain is not None]
    about = "How many times the work of one after the other those do that share this one's GPUs, measured."
    yield _family(gauge, "sharing_gain", about, gain)

    adapters = [((s.name, a.name), a, s) for s in standings if s.progress is not None for a in s.progress.adapters]
    labels = ("pipeline", "adapter")
    trained = [(of, adapter.step) for of, adapter, _ in adapters]
    yield _family(counter, "adapter_steps", "Completed steps of an adapter.", trained, labels)
    open_samples = [(of, 0 if job.outcome is not None else adapter.open_samples) for of, adapter, job in adapters]
    yield _family(gauge, "adapter_open_samples", "Samples that an adapter waits for.", open_samples, labels)
    waits = [(of, adapter.waited_s) for of, adapter, _ in adapters]
    yield _family(counter, "adapter_waited_seconds", "Waits of an adapter for training passes.", waits, labels)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    about: str,
    values: Iterable[tuple[tuple[str, ...], float]],
    labels: Sequence[str] = ("pipeline",),
) -> Metric:
    made = kind(f"nrl_pool_{name}", about, labels=labels)
    for of, value in values:
        made.add_metric(of, value)
    return made


def _health(timeline: Timeline, standings: Sequence[Standing], health: Health | None) -> Iterator[Metric]:
    """What alerts are about beside the GPUs."""
    from prometheus_client.core import GaugeMetricFamily as Gauge

    newest_first = sorted(timeline.of("queue"), key=lambda wait: -wait.start)
    waits = {o.pipeline: timeline.end - o.start for o in newest_first if o.end >= timeline.end}
    about = "For how long the job has waited now for GPUs to train on."
    yield _family(Gauge, "waiting_seconds", about, [((name,), waited) for name, waited in waits.items()])
    # Nodes of one name would be one series twice, which Prometheus refuses.
    used = {(s.name, use.node): use for s in standings for use in s.hosts}.items()
    of = ("pipeline", "node")
    memory = [(names, use.memory) for names, use in used]
    yield _family(Gauge, "job_memory_bytes", "Host memory of a job's processes.", memory, of)
    files = [(names, use.files) for names, use in used]
    yield _family(Gauge, "job_open_files", "Open file descriptors of a job's processes.", files, of)
    disk = [((s.name,), s.disk) for s in standings if s.disk is not None]
    yield _family(Gauge, "job_disk_bytes", "Disk space of a job's logs and checkpoints.", disk)
    free = {(use.node,): use.node_free for _, use in used}
    yield _family(Gauge, "node_free_bytes", "Host memory that a node with jobs has left.", free.items(), ["node"])
    if health is not None and health.violations is not None:
        yield Gauge("nrl_pool_violations", "Broken invariants in the pool's records.", health.violations)
    if health is not None:
        yield Gauge("nrl_pool_log_free_bytes", "Free space where the pool's log is.", health.free)
        yield Gauge("nrl_pool_log_disk_bytes", "Size of the disk that the pool's log is on.", health.disk)


def _in_use(timeline: Timeline) -> dict[tuple[str, str], float]:
    """GPUs by pipeline and use, of occupations that are open at the end."""
    uses = {"TRN": "training", "INIT": "initialising"}
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for o in timeline.of("gpus"):
        if o.end >= timeline.end:
            generating = "generating" if o.phase == "serving" else "handover"
            use = "ended" if o.phase == "fenced" else generating if o.tag == "GEN" else uses.get(o.tag, "log_probs")
            found[o.pipeline, use] += timeline.pool.gpus_in(o.gpus)
    return found
