"""What jobs gain by running at the same time is measured, and decides whether they do."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.log.sharing import Gain, SharingWatch
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.scheduling.trials import StepTimes, Trials
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.simulated_generation import Crowding
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.pool_report import report_data
from nemo_rl.time_sharing.viewing.standings_table import cells, columns
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.utils.record import MemoryRecord


def simulate(
    slows: float,
    *,
    jobs: int = 2,
    gpus: int = 1,
    seed: int = 0,
    steps: int = 80,
    apart_s: float = 0.0,
    **scenario: Any,
) -> tuple[World, MemoryRecord]:
    pool = Pool(1, gpus, jobs)
    drawn = {
        "pool": {"gpus_per_node": gpus, "slots_per_gpu": jobs, "neighbours_slow": slows},
        "jobs": [
            {
                "name": f"job{number}",
                "train": pool.slots_on((0,), number),
                "infer": pool.slots_on(range(gpus), number),
                "full_overlap": gpus == 1,
                "steps": steps,
                "groups": 2,
                "samples_per_group": 4,
                "train_s": 4.0,
                "tokens": {"median": 400, "sigma": 0.3},
                "arrive_s": apart_s * number,
            }
            for number in range(jobs)
        ],
    }
    records: list[MemoryRecord] = []
    world = World(
        parse_scenario(drawn | scenario), seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0]
    )
    world.run()
    return world, records[0]


def events_of(record: MemoryRecord, *kinds: type) -> list[Any]:
    return [entry.event for entry in record.entries if isinstance(entry.event, kinds)]


def ends_at(world: World) -> float:
    return max(job.finished_at or float("inf") for job in world.jobs.values())


@pytest.mark.slow
@pytest.mark.parametrize(("slows", "pays"), [(0.0, True), (0.4, True), (2.0, False)])
def test_jobs_run_together_only_while_that_pays(slows: float, pays: bool) -> None:
    world, record = simulate(slows)
    unmeasured, _ = simulate(slows, limits={"measure_s": 0.0})
    alone, _ = simulate(0.0, jobs=1)
    in_turn = 2 * ends_at(alone)
    assert check(record.entries) == []
    measured = events_of(record, ev.SharingMeasured)
    assert {said.keeps for said in measured} == {pays}
    # The trainers take turns whatever the neighbours do.
    true_gain = in_turn / ends_at(unmeasured)
    assert measured[0].gain == pytest.approx(true_gain, rel=0.2)
    paused = {event.pipeline for event in events_of(record, ev.Paused)}
    assert paused == {"job0", "job1"}
    if pays:
        assert ends_at(world) < 1.06 * ends_at(unmeasured)
    else:
        assert ends_at(world) < min(1.1 * in_turn, 0.95 * ends_at(unmeasured))


@pytest.mark.slow
def test_one_that_had_the_gpus_to_itself_needs_no_trial() -> None:
    _, record = simulate(0.4, steps=60, apart_s=150.0)
    assert {event.pipeline for event in events_of(record, ev.Paused)} == {"job0"}
    assert [sorted(said.alone_s) for said in events_of(record, ev.SharingMeasured)] == [["job0", "job1"]]


@pytest.mark.slow
def test_four_that_gain_nothing_together_may_gain_in_pairs() -> None:
    """Beside one neighbour work takes 1.7 times as long, beside three 3.1 times: but their trainers take turns, too."""
    world, record = simulate(0.7, jobs=4, steps=50, limits={"turn_s": 60.0})
    assert check(record.entries) == []
    assert all(job.finished for job in world.jobs.values())
    judged = events_of(record, ev.SharingMeasured)
    assert {len(said.alone_s) for said in judged} <= {2, 3, 4} and len(judged[0].alone_s) == 4


def test_nothing_is_measured_with_a_period_of_zero_or_of_one_that_is_by_itself() -> None:
    for limits, jobs in (({"measure_s": 0.0}, 2), ({}, 1)):
        _, record = simulate(2.0, jobs=jobs, steps=40, limits=limits)
        assert not events_of(record, ev.Paused, ev.SharingMeasured)


def test_who_paused_goes_on_where_a_later_scheduler_measures_nothing() -> None:
    fleet = Fleet(1, measure_s=0.0)
    fleet.add("a", [0], [0])
    fleet.state.apply(ev.Paused("a", "b has its turn"), 1.0)
    emitted: list[object] = []
    Trials(fleet.state, emitted.append, lambda name, reason: None).update(2.0)
    assert emitted == [ev.Resumed("a")]


def test_people_see_what_was_measured() -> None:
    _, record = simulate(2.0, steps=50, limits={"turn_s": 1000.0})
    watch = SharingWatch()
    for entry in record.entries:
        if entry.source == "scheduler":
            watch.take(entry.time, entry.event)
        if isinstance(entry.event, ev.SharingMeasured):
            break
    said = entry.event
    assert isinstance(said, ev.SharingMeasured)
    shared = watch.so_far()
    assert shared["job0"].gain == Gain(said.alone_s["job0"], said.together_s["job0"], said.gain, False)
    assert shared["job0"].paused == "job1 is measured alone" and not shared["job1"].paused
    row = dict(zip(columns("GPU"), cells(Standing("job0", (0,), (0,), 0.0, sharing=shared["job0"])), strict=True))
    assert row["doing"] == "paused" and row["gain"].startswith(f"{said.gain:.2f}x, so in turn (a step ")
    timeline = build_timeline(record.entries)
    assert (
        "they run in turn" in timeline.measured
        and timeline.measured == report_data(timeline, None, (), "x")["measured"]
    )
    assert "job0 pauses: job1 is measured alone." in [text for _, _, text in timeline.decisions]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slows=st.sampled_from((0.0, 0.4, 1.0, 2.0)),
    jobs=st.integers(2, 4),
    gpus=st.integers(1, 2),
    measure_s=st.sampled_from((20.0, 100.0, 1000.0)),
    turn_s=st.sampled_from((0.0, 10.0, 60.0)),
    faults=st.sampled_from(
        ({}, {"agent_crashes": 30.0}, {"scheduler_crashes": 60.0}, {"cancels": 20.0, "drains": 20.0})
    ),
    apart_s=st.sampled_from((0.0, 20.0, 100.0)),
)
def test_whoever_comes_goes_or_dies_every_job_ends_and_every_invariant_holds(
    seed: int,
    slows: float,
    jobs: int,
    gpus: int,
    measure_s: float,
    turn_s: float,
    faults: dict[str, float],
    apart_s: float,
) -> None:
    world, record = simulate(
        slows,
        jobs=jobs,
        gpus=gpus,
        seed=seed,
        steps=25 + seed % 30,
        apart_s=apart_s,
        limits={"measure_s": measure_s, "turn_s": turn_s},
        faults=faults | {"until_s": 400.0},
    )
    assert all(job.finished_at is not None for job in world.jobs.values())
    assert check(record.entries) == []
    balance: dict[str, int] = {}
    for event in events_of(record, ev.Registered, ev.Paused, ev.Resumed):
        change = {ev.Paused: 1, ev.Resumed: -1, ev.Registered: -balance.get(event.pipeline, 0)}[type(event)]
        balance[event.pipeline] = balance.get(event.pipeline, 0) + change
        assert balance[event.pipeline] in (0, 1)


def test_a_step_in_parts_is_one_and_the_first_ones_after_a_change_do_not_count() -> None:
    steps = StepTimes()
    for at, version in ((0.0, 0), (7.0, 1), (8.0, 1), (20.0, 2), (30.0, 3), (50.0, 5), (59.0, 6)):
        steps.released("a", version, at)
    # The step that ends at 20 s began before; from there on four versions came in 39 s.
    assert steps.ended("a") == 5
    assert steps.seconds("a", 3) == 39 / 4 and steps.seconds("a", 4) is None
    steps.begin()
    steps.released("a", 7, 70.0)
    assert steps.ended("a") == 1 and steps.seconds("a", 1) is None
    steps.forget("a")
    steps.released("a", 1, 80.0)
    assert steps.ended("a") == 0


def test_work_is_slowed_by_each_other_piece_on_the_fullest_of_its_gpus() -> None:
    crowding, told = Crowding(0.5), list[str]()
    crowding.begin("a", (0, 1), lambda: told.append("a"))
    crowding.begin("b", (1,), lambda: told.append("b"))
    crowding.begin("c", (1, 2))
    assert told == ["a", "a", "b"]
    assert [crowding.factor(who, gpus) for who, gpus in (("a", (0,)), ("a", (0, 1)), ("c", (2,)))] == [1.0, 2.0, 1.0]
    crowding.end("c", (1, 2))
    crowding.end("c", (1, 2))
    assert crowding.factor("a", (0, 1)) == 1.5 and told[3:] == ["a", "b"] * 2
