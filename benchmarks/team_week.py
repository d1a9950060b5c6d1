"""Simulates a week of a team's pool, with its quotas and priorities and without, and prints whether they were kept.

    python benchmarks/team_week.py [--seed 0] [--days 7] [--log week.jsonl] [--picture week.png]

Five users of two groups submit forty jobs to sixteen GPUs on four nodes, of which two leave for a while: training jobs,
four of high priority, and six scavengers. Of each day and each group or user with a share the table says what its jobs
had of the pool's time, and what they were due: at every moment what the shares give them by what they can use then, so
that a share that is not asked for is owed to no one. The second run has the same jobs without quotas and priorities.
Exit status 1: a job was lost, or an invariant is broken.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.reading import Reread
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.planning.apportionment import claimants_of, leaves_of
from nemo_rl.time_sharing.planning.division import Claimant, divide_by_quotas
from nemo_rl.time_sharing.planning.plan import PlanState, Snapshot
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.timeline import percentile
from nemo_rl.utils.record import Record, RecordWriter, read_record

DAY_S = 86400.0
_SAMPLE_S = 30.0
_NODES, _PER_NODE = 4, 4
GROUPS: dict[str, dict[str, Any]] = {"vision": {"share": 0.6}, "nlp": {"share": 0.4, "limit": 12.0}}
USERS: dict[str, dict[str, Any]] = {
    "ann": {"parent": "vision", "share": 0.5},
    "bob": {"parent": "vision", "share": 0.25},
    "cyd": {"parent": "vision", "share": 0.25},
    "dan": {"parent": "nlp", "share": 0.5},
    "eve": {"parent": "nlp", "share": 0.5, "limit": 6.0},
}
LIMITS = {
    "heartbeat_s": 60.0,
    "lease_s": 600.0,
    "aging_s": 120.0,
    "min_hold_s": 40.0,
    "max_slice_s": 600.0,
    "plan_interval_s": 2.0,
    "replan_s": 60.0,
    "request_s": 1e7,
    "high_lead_s": 3600.0,
    "high_wait_s": 1200.0,
}


def week(seed: int, days: float, *, quotas: bool) -> Scenario:
    """The jobs of a week, or of as many days: they fill the pool for about four fifths of that time."""
    rng = random.Random(f"week/{seed}")
    jobs = [_job(rng, number, days, quotas=quotas) for number in range(40)]
    team: dict[str, Any] = {"groups": GROUPS, "users": USERS} if quotas else {}
    return parse_scenario(
        {
            "name": f"a week of a team, {'with' if quotas else 'without'} quotas",
            "pool": {"nodes": _NODES, "gpus_per_node": _PER_NODE},
            "jobs": jobs,
            "limits": LIMITS,
            # Weights of a large model take seconds to arrive; a time slice is four times as long.
            "costs": {"start_s": 60.0, "wake_s": 3.0, "sync_s": 7.0},
            "horizon_s": 3 * days * DAY_S,
            "absences": [
                {"node": 3, "notice_at_s": 0.20 * days * DAY_S, "leaves_at_s": 0.21 * days * DAY_S}
                | {"returns_at_s": 0.35 * days * DAY_S},
                {"node": 1, "notice_at_s": 0.50 * days * DAY_S, "leaves_at_s": 0.51 * days * DAY_S}
                | {"returns_at_s": 0.60 * days * DAY_S},
            ],
            **team,
        }
    )


def _job(rng: random.Random, number: int, days: float, *, quotas: bool) -> dict[str, Any]:
    priority = "high" if number % 10 == 3 else "scavenger" if number % 7 == 6 and number > 5 else "normal"
    width = rng.choice((1, 2, 2, 4))
    scavenges = priority == "scavenger"
    whose = {"user": list(USERS)[number % 5], "priority": priority} if quotas else {}
    return {
        "name": f"job{number:02d}",
        # Without quotas a scavenger trains like others, on one GPU, for no time.
        "train": [] if scavenges and quotas else list(range(1 if scavenges else width)),
        "infer": list(range(_NODES * _PER_NODE)),
        "steps": max(round(rng.uniform(52, 165) * days / 7 / width**0.5), 2),
        "groups": 8,
        "samples_per_group": 4,
        "staleness": 0 if scavenges else 1,
        "train_s": 1.0 if scavenges else rng.uniform(200, 500),
        "tokens": {"median": 8000, "sigma": 0.7, "max": 32000},
        "engine": {"tokens_per_s": 48.0, "half_batch": 16.0, "max_running": 16},
        "arrive_s": rng.uniform(0.0, 0.55) * days * DAY_S,
        "placed": True,
        **whose,
    }


class Day(NamedTuple):
    """What a node of the quotas had on a day, and was due, in parts of the pool's time."""

    day: int
    node: str
    had: float
    due: float


def _usable(plan_state: PlanState, claimant: Claimant) -> Claimant:
    """What a job can use now: one whose training waits for its GPUs has no use for engines on others."""
    pipeline = plan_state.pipelines[claimant.name]
    widths = [len(pipeline.topology.clusters[cluster].gpus) for cluster in pipeline.wants]
    most = plan_state.fixed_gpus[claimant.name] + max(widths, default=0)
    return claimant._replace(minimum=0.0, maximum=float(most)) if widths else claimant


class Observer(Record):
    """Follows a run: every so many seconds what each node holds and is due; waits of jobs of high priority."""

    def __init__(self, writer: Record, clock: Callable[[], float], sample_s: float = _SAMPLE_S) -> None:
        self._writer, self._inner, self._clock, self._sample_s = writer, writer, clock, sample_s
        self.state = SchedulerState()
        self._next_s = 0.0
        self.had: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.due: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.most: defaultdict[str, float] = defaultdict(float)
        self.waits: list[float] = []
        self._asked: dict[tuple[str, int], float] = {}
        self.levels: list[tuple[float, dict[str, int]]] = []

    def emit(self, event: object) -> None:
        self.take(event, self._clock())
        self._inner.emit(event)

    def take(self, event: object, at: float) -> None:
        """Takes an event of the scheduler. `at`: by its clock."""
        now = self._clock()
        while now >= self._next_s:
            self._sample(self._next_s)
            self._next_s += self._sample_s
        self.state.apply(event, at)
        match event:
            case ev.Requested():
                self._asked[event.pipeline, event.request] = now
            case ev.Granted() | ev.PriorityChanged():
                asked = self._asked.pop((event.pipeline, event.request), now)
                if self.state.pipelines[event.pipeline].spec.is_high:
                    self.waits.append(now - asked)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> Record:
        # Only the scheduler's own record is bound with a clock.
        bound = self._writer.bind(source, clock=clock)
        if clock is None:
            return bound
        self._inner = bound
        return self

    def flush(self) -> None:
        self._inner.flush()

    def _sample(self, now: float) -> None:
        use = self.state.quota_use
        if use is None:
            return
        day = int(now / DAY_S)
        plan_state = PlanState(Snapshot.of(self.state), now)
        leaves = leaves_of(plan_state, [_usable(plan_state, one) for one in claimants_of(plan_state)])
        away = len(self.state.withheld)
        due = divide_by_quotas(plan_state.slots - away, leaves, use.quotas, {}).entitled
        for leaf in leaves:
            gpus = due.get(leaf.claimant.name, float(leaf.fixed))
            for node in leaf.above:
                self.due[day, node] += gpus * self._sample_s
        levels = {node: use.holds.get(node, 0) for node in use.quotas.nodes}
        for node, gpus in levels.items():
            self.had[day, node] += gpus * self._sample_s
            self.most[node] = max(self.most[node], gpus)
        self.levels.append((now, levels))

    def days(self, until_s: float) -> list[Day]:
        """Whole days, by node."""
        pool = _NODES * _PER_NODE * DAY_S
        return [
            Day(day, node, self.had[day, node] / pool, self.due[day, node] / pool)
            for (day, node) in sorted(self.due)
            if (day + 1) * DAY_S <= until_s
        ]


def run(scenario: Scenario, seed: int, log: Path) -> tuple[World, Observer]:
    """Simulates a week, with its record in a file, since millions of events do not fit into memory."""
    observers: list[Observer] = []
    writers: list[RecordWriter] = []

    def make(clock: Callable[[], float]) -> Record:
        writers.append(RecordWriter(log, source="world", clock=clock))
        observers.append(Observer(writers[0], clock))
        return observers[0]

    world = World(scenario, seed, make)
    world.run()
    writers[0].close()
    return world, observers[0]


def busy(world: World) -> tuple[float, float]:
    """Part of GPU time in which GPUs worked until the last job had ended, and that end in seconds."""
    ended = max(job.finished_at or world.loop.now for job in world.jobs.values())
    worked = sum(job.train_gpu_s + job.generate_gpu_s for job in world.jobs.values())
    return worked / (ended * _NODES * _PER_NODE), ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--log", type=Path, help="write the record here (a week has 3 GB), and keep it")
    parser.add_argument("--picture", type=Path, help="draw what each user's jobs had over the week")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return judge(chosen, chosen.log or Path(scratch) / "week.jsonl", Path(scratch) / "without.jsonl")


def judge(chosen: argparse.Namespace, log: Path, other_log: Path) -> int:
    """Runs both weeks and prints what their records say; the exit status."""
    # Millions of objects without cycles, which the collector would look through again and again.
    gc.disable()
    began = time.monotonic()
    world, observer = run(week(chosen.seed, chosen.days, quotas=True), chosen.seed, log)
    part, ended = busy(world)
    simulated_s = time.monotonic() - began
    entries = Reread(lambda: read_record(log))
    violations = check(entries)
    lost = [name for name, job in world.jobs.items() if not job.finished]
    checked_s = time.monotonic() - began - simulated_s
    print(
        f"with quotas: {sum(1 for _ in entries):,} events, {ended / DAY_S:.2f} days, busy {part:.1%}, simulated in "
        f"{simulated_s:.0f} s, checked in {checked_s:.0f} s; {len(lost)} of {len(world.jobs)} jobs lost; "
        f"{len(violations)} violations"
    )
    for violation in violations[:5]:
        print(f"  {violation}")
    print(f"{'day':>4} {'':14} {'had':>7} {'due':>7} {'short of due':>13}")
    worst = 0.0
    for day in observer.days(ended):
        short = day.due - day.had
        worst = max(worst, short)
        print(f"{day.day:4} {day.node:14} {day.had:7.1%} {day.due:7.1%} {short:13.1%}")
    print(f"largest shortfall of a day: {worst:.1%} of the pool")
    for name, quota in (GROUPS | USERS).items():
        if "limit" in quota:
            node = f"{'group' if name in GROUPS else 'user'} {name}"
            print(f"{node}: at most {observer.most[node]:g} GPUs, its limit is {quota['limit']:g}")
    waits = observer.waits
    print(
        f"high priority: {len(waits)} waits, p50 {percentile(waits, 50):.0f} s, p99 {percentile(waits, 99):.0f} s; "
        f"promised {LIMITS['high_wait_s']:.0f} s"
    )
    other, _ = run(week(chosen.seed, chosen.days, quotas=False), chosen.seed, other_log)
    without, other_ended = busy(other)
    print(
        f"without quotas: {other_ended / DAY_S:.2f} days, busy {without:.1%}; with quotas {part / without:.2f} of that"
    )
    if chosen.picture is not None:
        draw(observer, ended, chosen.picture)
    kept = worst <= 0.02 and percentile(waits, 99) <= LIMITS["high_wait_s"] and part >= 0.9 * without
    print("kept" if kept and not lost and not violations else "NOT KEPT")
    return 1 if lost or violations else 0


def draw(observer: Observer, ended: float, path: Path) -> None:
    """GPUs of each user over the week, as means of half an hour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    step = int(1800 / _SAMPLE_S)
    users = [f"user {name}" for name in USERS]
    means = {user: [] for user in users}
    hours = []
    for start in range(0, len(observer.levels) - step, step):
        part = observer.levels[start : start + step]
        if part[0][0] > ended:
            break
        hours.append(part[0][0] / DAY_S)
        for user in users:
            means[user].append(sum(levels[user] for _, levels in part) / step)
    figure, axes = plt.subplots(figsize=(10, 3.2), constrained_layout=True)
    axes.stackplot(hours, [means[user] for user in users], labels=[user.removeprefix("user ") for user in users])
    axes.set(xlabel="day", ylabel="GPUs", xlim=(0, hours[-1]), ylim=(0, _NODES * _PER_NODE))
    axes.legend(loc="upper right", ncols=len(users), fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
