"""Known failures that take a whole run to show: the same jobs under the gap-ratio rule or an old convention and under
ours, judged by the checker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from nemo_rl.time_sharing.agents.agent import Agent, Host, ProtocolError
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Phase, Priority
from nemo_rl.time_sharing.simulation import jobs as jobs_module
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, OURS, accept_all, way
from nemo_rl.time_sharing.simulation.jobs import SimulatedJob
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry, MemoryRecord, Record

JOB: dict[str, Any] = {
    "groups": 4,
    "samples_per_group": 4,
    "train_s": 8.0,
    "init_s": 1.0,
    "tokens": {"median": 200, "sigma": 0.8, "max": 1000},
    "engine": {"tokens_per_s": 100, "half_batch": 16},
}
LIMITS = {"aging_s": 5.0, "min_hold_s": 2.0, "lease_s": 12.0, "heartbeat_s": 2.0}


class Run(NamedTuple):
    """When each job ended, how often a rank was sent to sleep, the invariants that were broken, and the whole
    record.
    """

    ended: dict[str, float]
    preemptions: int
    broken: set[int]
    entries: list[Entry]


def runs(
    gpus: int,
    jobs: list[dict[str, Any]],
    *,
    costs: dict[str, float] | None = None,
    limits: dict[str, float] | None = None,
) -> tuple[Run, Run]:
    """The jobs under our planner and under the gap-ratio rule."""
    scenario = parse_scenario(
        {
            "pool": {"gpus_per_node": gpus},
            "limits": {**LIMITS, **(limits or {})},
            "horizon_s": 3000.0,
            "costs": {"start_s": 1.0, **(costs or {})},
            "jobs": jobs,
        }
    )
    return _run(scenario, OURS), _run(scenario, GAP_RATIO)


def _run(scenario: Any, name: str) -> Run:
    records: list[MemoryRecord] = []
    changed, rule = way(scenario, name)
    validator = validate if name == OURS else accept_all
    world = World(
        changed,
        0,
        lambda clock: records.append(MemoryRecord(clock=clock)) or records[0],
        rule=rule,
        validator=validator,
    )
    world.run()
    entries = records[0].entries
    ended = {name: job.finished_at or float("inf") for name, job in world.jobs.items()}
    preemptions = sum(isinstance(entry.event, ev.RankMoved) and entry.event.phase is Phase.FALLING for entry in entries)
    return Run(ended, preemptions, {violation.invariant for violation in check(entries)}, entries)


@pytest.mark.slow
def test_a_stream_of_narrow_trainings_overtakes_a_wide_one() -> None:
    """Its three GPUs are never free at the same moment, as nothing is kept for it; meanwhile generation on them is
    evicted in vain.
    """
    narrow = [
        {
            "name": f"narrow{i}",
            "train": [i % 2],
            "infer": [0, 1, 2, 3],
            "steps": 15,
            **JOB,
            "train_s": 16.0,
            "groups": 2,
            "staleness": 2,
        }
        for i in range(4)
    ]
    wide = {
        "name": "wide",
        "train": [0, 1, 2],
        "infer": [0, 1, 2, 3],
        "steps": 3,
        **JOB,
        "train_s": 2.0,
        "groups": 2,
        "arrive_s": 20.0,
    }
    ours, old = runs(4, [wide, *narrow])
    assert 9 in old.broken and not ours.broken
    assert old.ended["wide"] > 1.5 * ours.ended["wide"]
    assert old.preemptions > 5 * ours.preemptions


@pytest.mark.slow
def test_newcomers_wait_until_the_incumbents_have_finished() -> None:
    """With as many incumbents as GPUs, each keeps its last rank whatever is left to do; we have them take turns."""
    busy = [
        {"name": name, "train": [i], "infer": [0, 1], "steps": 8, **JOB, "train_s": 1.0, "staleness": 4, "groups": 16}
        for i, name in enumerate("ab")
    ]
    new = [
        {"name": f"new{i}", "train": [i], "infer": [0, 1], "steps": 2, **JOB, "train_s": 1.0, "arrive_s": 30.0}
        for i in range(2)
    ]
    ours, old = runs(2, [*busy, *new])
    assert min(old.ended["new0"], old.ended["new1"]) > max(old.ended["a"], old.ended["b"])
    assert max(ours.ended["new0"], ours.ended["new1"]) < min(ours.ended["a"], ours.ended["b"])
    assert not ours.broken


@pytest.mark.slow
def test_generation_is_evicted_again_and_again_for_a_training_that_cannot_begin() -> None:
    wide = {"name": "wide", "train": [0, 1], "infer": [0, 1, 2], "steps": 6, **JOB, "train_s": 2.0, "arrive_s": 10.0}
    generator = {"name": "generator", "train": [2], "infer": [0, 2], "steps": 8, **JOB, "train_s": 2.0, "groups": 32}
    trainer = {"name": "trainer", "train": [1], "infer": [1, 2], "steps": 8, **JOB, "train_s": 40.0}
    ours, old = runs(3, [wide, generator, trainer])
    assert old.preemptions > 3 * ours.preemptions
    assert ours.ended["generator"] < 0.75 * old.ended["generator"]
    assert not ours.broken


def _waits_for_training(run: Run, name: str) -> list[float]:
    asked, waits = {}, []
    for entry in run.entries:
        if (
            isinstance(entry.event, ev.Requested)
            and entry.event.pipeline == name
            and entry.event.priority is Priority.ACTOR_TRAINING
        ):
            asked[entry.event.request] = entry.time
        elif isinstance(entry.event, ev.Granted) and entry.event.request in asked and entry.event.pipeline == name:
            waits.append(entry.time - asked[entry.event.request])
    return waits


@pytest.mark.slow
def test_one_slow_hand_over_stalls_every_pipeline() -> None:
    """Cycles that wait for all hand-overs of the last one make a pipeline wait for syncs on GPUs which it does not even
    share.
    """
    slow = {"name": "slow", "train": [0], "infer": [0, 1], "steps": 8, **JOB, "staleness": 0, "train_s": 3.0}
    other = {"name": "other", "train": [2], "infer": [2, 3], "steps": 8, **JOB, "staleness": 0}
    ours, old = runs(4, [slow, other], costs={"sync_s": 6.0, "refresh_s": 0.1, "jitter": 0.0})
    assert max(_waits_for_training(old, "other")) > 4.0
    assert max(_waits_for_training(ours, "other")) < 1.0
    assert not ours.broken


def _most_at_once(run: Run) -> int:
    """How many pipelines initialised at the same time."""
    now: set[str] = set()
    most = 0
    for entry in run.entries:
        if isinstance(entry.event, ev.Granted) and entry.event.priority is Priority.INITIALIZATION:
            now.add(entry.event.pipeline)
        elif isinstance(entry.event, ev.Released):
            now.discard(entry.event.pipeline)
        most = max(most, len(now))
    return most


def test_pipelines_that_start_together_exhaust_the_process_ids_of_the_machine() -> None:
    """Each had GPUs of its own, so nothing kept them from spawning their workers in the same seconds. A place is free
    when one has initialised.
    """
    jobs = [{"name": f"job{i}", "train": [2 * i], "infer": [2 * i, 2 * i + 1], "steps": 2, **JOB} for i in range(4)]
    ours, old = runs(8, jobs, limits={"max_initialising": 1})
    assert _most_at_once(old) == 4 and _most_at_once(ours) == 1
    assert not ours.broken and max(ours.ended.values()) < float("inf")


@pytest.mark.slow
def test_base_weights_called_minus_one_by_one_side_and_zero_by_the_other_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector generates for version 0, the first published version is -1, and each waits for the other. Base
    weights are 0 everywhere.
    """
    job = {"name": "a", "train": [0], "infer": [0, 1], "steps": 2, **JOB}
    assert runs(2, [job])[0].ended["a"] < 200.0

    class CountsFromMinusOne(Agent):
        def __init__(
            self, topology: Topology, incarnation: int, host: Host, record: Record, *, version: int = 0
        ) -> None:
            super().__init__(topology, incarnation, host, record, version=version - 1)

    monkeypatch.setattr(jobs_module, "Agent", CountsFromMinusOne)
    assert runs(2, [job])[0].ended["a"] == float("inf")


def test_weights_published_under_the_number_of_the_step_that_made_them_pause_the_collector_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All prompts for version N are there already when N is published again. After step N the version is N + 1, and
    another label is refused at once.
    """
    job = {"name": "a", "train": [0], "infer": [0, 1], "steps": 3, **JOB}
    ours = runs(2, [job])[0]
    published = [entry.event.version for entry in ours.entries if isinstance(entry.event, rec.VersionPublished)]
    assert sorted(set(published)) == [0, 1, 2, 3] and published == sorted(published)
    monkeypatch.setattr(SimulatedJob, "_cached", lambda job, life, step: life.agent.cache_built(step))
    with pytest.raises(ProtocolError, match="cache version 0 does not follow 0"):
        runs(2, [job])


@pytest.mark.slow
def test_demand_that_is_told_only_after_the_wait_has_begun_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait needs GPUs and the GPUs need the demand. A driver that does not begin its progress first is what the
    second run shows.
    """
    job = {"name": "a", "train": [0], "infer": [0, 1], "steps": 2, **JOB}
    assert runs(2, [job])[0].ended["a"] < 200.0
    monkeypatch.setattr(Agent, "set_demand", lambda agent, target, done=0, unit=1: None)
    assert runs(2, [job])[0].ended["a"] == float("inf")
