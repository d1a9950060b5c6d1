"""Known failures of the gap-ratio rule that take a whole run to show: the same jobs under it and under our planner, judged by the checker."""

from __future__ import annotations

from typing import Any, NamedTuple

from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.scenario import parse_scenario
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, OURS, accept_all, way
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.types import Phase
from nemo_rl.time_sharing.validator import validate
from nemo_rl.utils.record import MemoryRecord

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
    """When each job ended, how often a rank was sent to sleep, and the invariants that were broken."""

    ended: dict[str, float]
    preemptions: int
    broken: set[int]


def runs(gpus: int, jobs: list[dict[str, Any]]) -> tuple[Run, Run]:
    """The jobs under our planner and under the gap-ratio rule."""
    scenario = parse_scenario({"pool": {"gpus_per_node": gpus}, "limits": LIMITS, "horizon_s": 3000.0, "costs": {"start_s": 1.0}, "jobs": jobs})
    return _run(scenario, OURS), _run(scenario, GAP_RATIO)


def _run(scenario: Any, name: str) -> Run:
    records: list[MemoryRecord] = []
    changed, rule = way(scenario, name)
    validator = validate if name == OURS else accept_all
    world = World(changed, 0, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0], rule=rule, validator=validator)
    world.run()
    entries = records[0].entries
    ended = {name: job.finished_at or float("inf") for name, job in world.jobs.items()}
    preemptions = sum(isinstance(entry.event, ev.RankMoved) and entry.event.phase is Phase.DRAINING for entry in entries)
    return Run(ended, preemptions, {violation.invariant for violation in check(entries)})


def test_a_stream_of_narrow_trainings_overtakes_a_wide_one() -> None:
    """Its three GPUs are never free at the same moment, as nothing is kept for it; meanwhile generation on them is evicted in vain."""
    narrow = [
        {"name": f"narrow{i}", "train": [i % 2], "infer": [0, 1, 2, 3], "steps": 15, **JOB, "train_s": 16.0, "groups": 2, "staleness": 2} for i in range(4)
    ]
    wide = {"name": "wide", "train": [0, 1, 2], "infer": [0, 1, 2, 3], "steps": 3, **JOB, "train_s": 2.0, "groups": 2, "arrive_s": 20.0}
    ours, old = runs(4, [wide, *narrow])
    assert 9 in old.broken and not ours.broken
    assert old.ended["wide"] > 1.5 * ours.ended["wide"]
    assert old.preemptions > 5 * ours.preemptions


def test_newcomers_wait_until_the_incumbents_have_finished() -> None:
    """With as many incumbents as GPUs, each keeps its last rank whatever is left to do; we have them take turns."""
    busy = [{"name": name, "train": [i], "infer": [0, 1], "steps": 8, **JOB, "train_s": 1.0, "staleness": 4, "groups": 16} for i, name in enumerate("ab")]
    new = [{"name": f"new{i}", "train": [i], "infer": [0, 1], "steps": 2, **JOB, "train_s": 1.0, "arrive_s": 30.0} for i in range(2)]
    ours, old = runs(2, [*busy, *new])
    assert min(old.ended["new0"], old.ended["new1"]) > max(old.ended["a"], old.ended["b"])
    assert max(ours.ended["new0"], ours.ended["new1"]) < min(ours.ended["a"], ours.ended["b"])
    assert not ours.broken


def test_generation_is_evicted_again_and_again_for_a_training_that_cannot_begin() -> None:
    wide = {"name": "wide", "train": [0, 1], "infer": [0, 1, 2], "steps": 6, **JOB, "train_s": 2.0, "arrive_s": 10.0}
    generator = {"name": "generator", "train": [2], "infer": [0, 2], "steps": 8, **JOB, "train_s": 2.0, "groups": 32}
    trainer = {"name": "trainer", "train": [1], "infer": [1, 2], "steps": 8, **JOB, "train_s": 40.0}
    ours, old = runs(3, [wide, generator, trainer])
    assert old.preemptions > 3 * ours.preemptions
    assert ours.ended["generator"] < 0.75 * old.ended["generator"]
    assert not ours.broken
