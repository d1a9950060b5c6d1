"""Jobs of many adapters on the real scheduler with simulated engines: adapters are added and removed at random and
their jobs killed, and the checker finds no prompt lost and no token with another adapter or version.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.simulation.baselines import OURS, QUEUE, SERIAL, STATIC, worth_comparing
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.results import AloneTimes, run_way
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import ScenarioError, parse_scenario
from nemo_rl.time_sharing.simulation.simulated_adapters import Member, SimulatedAdapterGeneration, SimulatedAdapters
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord
from nemo_rl.utils.record_events import (
    GroupDropped,
    GroupTrained,
    RecordOpened,
    StepBegun,
    StepFinished,
    job_of_adapter,
)

SCHEDULES = 40


def run(scenario: Scenario, seed: int) -> tuple[World, list[Entry]]:
    records: list[MemoryRecord] = []
    world = World(scenario, seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    world.run()
    return world, records[0].entries


def jobs_of_adapters(world: World) -> list[SimulatedAdapters]:
    return [job for job in world.jobs.values() if isinstance(job, SimulatedAdapters)]


def of(entries: list[Entry], adapter: str, kind: type) -> list[Any]:
    return [entry.event for entry in entries if entry.source == f"{adapter}/driver" and isinstance(entry.event, kind)]


def random_adapters(seed: int) -> Scenario:
    """The random scenario of a seed, made smaller, beside jobs of adapters that are added and removed at random.
    Adapters of different jobs have equal names.
    """
    scenario, rng = random_scenario(seed), random.Random(f"adapters/{seed}")
    pool = scenario.gpu_pool.slots
    few = scenario.jobs[: rng.choice((1, 1, 2))]
    small = {"steps": 2, "groups": 2, "samples_per_group": 4}
    jobs = tuple(job.model_copy(update=small) for job in few)
    faults = scenario.faults.model_copy(update={"agent_crashes": rng.choice((0.0, 40.0, 120.0)), "until_s": 200.0})
    # Steps have to end before GPUs are taken by force, most of the time.
    stop = {"stop_s": rng.choice((5.0, 60.0, 60.0))}
    plans = [_adapter_job(rng, number, pool) | stop for number in range(rng.choice((1, 1, 2)))]
    changed = {"jobs": jobs, "faults": faults}
    return parse_scenario(scenario.model_copy(update=changed).model_dump() | {"adapter_jobs": plans})


def _adapter_job(rng: random.Random, number: int, pool: int) -> dict[str, Any]:
    names = ["add", "subtract", "reverse", "sort", "count"][: rng.randint(2, 5)]
    return {
        "name": f"adapters{number}",
        "infer": sorted(rng.sample(range(pool), rng.randint(1, min(pool, 3)))),
        "adapters": [_adapter(rng, name) for name in names],
        "slots": rng.choice((1, 2, 3, 8)),
        "pass_tokens": rng.choice((None, 200, 2000)),
        "pass_share": rng.choice((0.3, 0.5, 1.0)),
        "wait_s": rng.choice((0.0, 0.5, 5.0)),
        "train_s": rng.uniform(0.2, 3.0),
        "save_period": rng.choice((1, 1, 3)),
        "tokens": {"median": rng.choice((20, 100)), "sigma": 0.8, "max": 1000},
        "engine": {"half_batch": rng.choice((8, 64)), "max_running": rng.choice((4, 256))},
        "arrive_s": rng.choice((0.0, rng.uniform(0, 60))),
    }


def _adapter(rng: random.Random, name: str) -> dict[str, Any]:
    joins = rng.choice((0.0, 0.0, rng.uniform(0, 100)))
    return {
        "name": name,
        "steps": rng.randint(1, 6),
        "groups": rng.choice((1, 2, 4)),
        "samples_per_group": rng.choice((2, 4)),
        "weight": rng.choice((1.0, 1.0, 3.0)),
        "joins_s": joins,
        "leaves_s": rng.choice((None, None, joins + rng.uniform(0, 120))),
    }


@pytest.mark.slow
def test_random_schedules_lose_no_prompt_and_mix_no_adapter() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        world, entries = run(random_adapters(seed), seed)
        assert not check(entries), seed
        assert all(job.finished_at is not None for job in world.jobs.values()), seed
        for job in jobs_of_adapters(world):
            seen["starts"] += job.starts
            seen["kills"] += job.incarnations
            for name, member in job.members.items():
                seen[member.over or "left with its job"] += 1
                if member.over == "done":
                    steps = of(entries, f"{job.plan.name}:{name}", StepFinished)
                    assert steps[-1].version == member.spec.steps and len(steps) >= member.spec.steps, seed
        inside = [entry.event for entry in entries if job_of_adapter(entry.source.partition("/")[0]) is not None]
        seen.update(type(event).__name__ for event in inside)
    # Every kind of thing happens many times: kills, yields with a later start, removals in the middle of a step.
    assert min(seen[kind] for kind in ("kills", "removed", "GroupDropped")) > 10, seen
    assert seen["done"] > 60 and seen["starts"] > seen["kills"] + SCHEDULES and seen["GroupTrained"] > 600, seen


def scenario(**changes: Any) -> Scenario:
    plan = {
        "name": "shared",
        "infer": [1],
        "adapters": [{"name": "one", "steps": 8}, {"name": "two", "steps": 8}, {"name": "late", "joins_s": 20.0}],
        "tokens": {"median": 400, "max": 800},
        "train_s": 0.1,
        "arrive_s": 1.0,
    }
    job = {"name": "whole", "train": [1], "infer": [0, 1], "steps": 4, "arrive_s": 30.0}
    limits = {"lease_s": 12.0, "heartbeat_s": 2.0, "drain_s": 60.0, "min_hold_s": 2.0, "max_slice_s": 2.0}
    sections = {"jobs": [job], "adapter_jobs": [plan | changes], "limits": limits, "horizon_s": 600.0}
    return parse_scenario({"pool": {"gpus_per_node": 2}} | sections)


def test_adapters_go_on_from_their_checkpoints_when_their_gpus_come_back() -> None:
    world, entries = run(scenario(), 0)
    assert not check(entries)
    (job,) = jobs_of_adapters(world)
    assert {name: member.over for name, member in job.members.items()} == dict.fromkeys(("one", "two", "late"), "done")
    # It gave its GPU back and got it again.
    assert job.starts > 1 and len(of(entries, "shared:one", RecordOpened)) > 1
    assert [event.step for event in of(entries, "shared:one", StepBegun)] == [*range(8)]


def test_steps_longer_than_the_limit_of_all_are_lost_only_beyond_the_jobs_own() -> None:
    # A pass alone takes longer than `drain_s`, and the other job wants the GPU back all the time.
    long = {"adapters": [{"name": "one", "steps": 2}, {"name": "two", "steps": 2}], "train_s": 100.0}
    job = {"name": "whole", "train": [1], "infer": [0, 1], "steps": 400, "train_s": 20.0}
    given = scenario(**long).model_dump() | {"jobs": [job], "horizon_s": 700.0}
    for stop_s in (900.0, 20.0):
        given["adapter_jobs"] = [{**given["adapter_jobs"][0], "stop_s": stop_s}]
        world, entries = run(parse_scenario(given), 0)
        assert not check(entries, ended=False)
        (adapters,) = jobs_of_adapters(world)
        begun = [event.step for name in ("one", "two") for event in of(entries, f"shared:{name}", StepBegun)]
        # Those that end with the job's own time are made again with its next GPUs.
        assert (begun == [0, 1] * 2) is (stop_s == 900.0), begun
        assert adapters.starts > 1 and adapters.incarnations == 0, "it is asked to leave, and its pipeline stays"


def test_an_adapter_that_is_removed_in_its_step_leaves_the_others_alone() -> None:
    gone = {"name": "gone", "steps": 1000, "leaves_s": 25.0}
    world, entries = run(scenario(adapters=[{"name": "one", "steps": 4}, gone], slots=2), 0)
    assert not check(entries)
    (job,) = jobs_of_adapters(world)
    assert [member.over for member in job.members.values()] == ["done", "removed"]
    assert {event.reason for event in of(entries, "shared:gone", GroupDropped)} == {"adapter_left"}
    assert len(of(entries, "shared:one", GroupTrained)) == 4 * 4


def test_adapters_wait_for_a_slot_and_share_passes() -> None:
    names = ["a", "b", "c", "d"]
    plan = {"adapters": [{"name": name, "steps": 2} for name in names], "wait_s": 30.0}
    for slots, share, at_once in ((1, 1.0, 1), (4, 1.0, 4), (4, 0.5, 2)):
        _, entries = run(scenario(**plan, slots=slots, pass_share=share), 0)
        assert not check(entries)
        ends = Counter(
            entry.time
            for entry in entries
            if entry.source.startswith("shared:") and isinstance(entry.event, StepFinished) and entry.event.step == 0
        )
        assert max(ends.values()) == at_once


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's first version is sent again and again."""
    plain = SimulatedAdapters._sync

    def sync(self: SimulatedAdapters, process: Any, member: Member) -> None:
        trained, member.trained = member.trained, 0
        plain(self, process, member)
        member.trained = trained

    monkeypatch.setattr(SimulatedAdapters, "_sync", sync)


def _mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine stamps the tokens of one adapter with the next version."""
    monkeypatch.setattr(SimulatedAdapterGeneration, "_version_of", lambda self, shard, sample: sample.version + 1)


def _another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of an adapter are drawn with another."""
    plain = SimulatedAdapterGeneration._start

    def start(self: Any, shard: Any, sample: Any) -> None:
        plain(self, shard, sample)
        sample.adapter = "two" if sample.adapter == "one" else sample.adapter

    monkeypatch.setattr(SimulatedAdapterGeneration, "_start", start)


def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of an adapter that leaves in a step are not accounted for."""
    monkeypatch.setattr(SimulatedAdapters, "_drop", lambda self, member: member.groups.clear())


def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters go on when their GPUs are wanted back."""

    def yielded(self: SimulatedAdapters) -> None:
        if self._yields is not None:
            (process, operation), self._yields = self._yields, None
            self._later(process, 0.0, "_performed", operation, True)

    monkeypatch.setattr(SimulatedAdapters, "_yielded", yielded)


@pytest.mark.parametrize(
    ("plant", "invariant"), [(_stale, 4), (_mixed, 3), (_another, 3), (_forgotten, 2), (_without_gpus, 7)]
)
def test_planted_defects_of_adapters_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], invariant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    adapted: list[dict[str, Any]] = [{"name": "one", "steps": 8}, {"name": "two", "steps": 8}]
    adapted.append({"name": "gone", "steps": 40, "leaves_s": 25.0})
    _, entries = run(scenario(adapters=adapted), 0)
    assert invariant in {violation.invariant for violation in check(entries)}


@pytest.mark.slow
def test_jobs_of_adapters_enter_no_comparison_that_has_no_gpus_for_them() -> None:
    one = scenario()
    assert not {STATIC, QUEUE} & set(worth_comparing(one)) and SERIAL in worth_comparing(one)
    outcome = run_way(one, OURS, 0, AloneTimes(one))
    assert not outcome.unfinished and outcome.seconds.keys() == {"whole"}
    with pytest.raises(ValueError, match="jobs of adapters"):
        run_way(one, STATIC, 0, AloneTimes(one))
    endless = run_way(scenario(adapters=[{"name": "one", "steps": 10_000}]), OURS, 0, AloneTimes(one))
    assert endless.unfinished == ("shared",)
    assert endless.fates["shared"] == "1 of 1 adapters had not ended when the simulation ended: one"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapters": []}, "adapter_jobs.0.adapters: job 'shared': give at least one adapter"),
        ({"adapters": [{"name": "a"}, {"name": "a"}]}, "has two adapters called 'a'; rename one"),
        ({"adapters": [{"name": "a/b"}]}, "adapter_jobs.0.adapters.0.name: 'a/b'"),
        ({"adapters": [{"name": "a", "joins_s": 5.0, "leaves_s": 1.0}]}, "is before it joins"),
        ({"name": "whole"}, "two jobs are called 'whole'"),
        ({"infer": [0, 7]}, "adapter_jobs.0.infer"),
        ({"slots": 0}, "adapter_jobs.0.slots"),
    ],
)
def test_a_wrong_job_of_adapters_is_refused_by_its_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said.replace("[", r"\[")):
        scenario(**changes)
