"""Where jobs lie that name no GPUs: those of a file, those that are submitted one by one, those of a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.composed_runs import compose
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.events import Registered
from nemo_rl.time_sharing.log.pool_state import Outcome
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.planning.job_placement import Mapped, place
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Limits
from nemo_rl.time_sharing.simulation.baselines import (
    GAP_RATIO,
    OURS,
    PLACED,
    QUEUE,
    SERIAL,
    STATIC,
    WAYS,
    worth_comparing,
)
from nemo_rl.time_sharing.simulation.results import AloneTimes, run_way
from nemo_rl.time_sharing.simulation.scenario import ScenarioJob as SimulatedJob
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.tables import simulated
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GRPO, SFT, EVALUATION = (CONFIGS / f"{name}_arithmetic_cpu.yaml" for name in ("grpo", "sft", "eval"))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[int], int, list[Mapped]]:
    size = draw(st.integers(1, 24))
    gpus = sorted(draw(st.sets(st.integers(0, 31), min_size=size, max_size=size)))
    some = st.sets(st.integers(0, 31), max_size=12).map(sorted)
    return gpus, draw(st.integers(1, size)), draw(st.lists(st.builds(Mapped, some, some), max_size=6))


@pytest.mark.slow
@given(crowds())
def test_neighbours_are_taken_on_which_the_least_goes_on(crowd: tuple[list[int], int, list[Mapped]]) -> None:
    gpus, width, others = crowd

    def load(block: tuple[int, ...]) -> int:
        return sum(2 * (gpu in other.train) + (gpu in other.infer) for gpu in block for other in others)

    taken = place(gpus, width, others)
    at = gpus.index(taken[0])
    assert at % width == 0 and list(taken) == gpus[at : at + width]
    for start in range(0, len(gpus) - width + 1, width):
        block = tuple(gpus[start : start + width])
        assert load(taken) < load(block) or (load(taken) == load(block) and at <= start)


def test_the_first_comers_lie_side_by_side_and_what_is_too_wide_is_refused() -> None:
    there: list[Mapped] = []
    for _ in range(5):
        there.append(Mapped(place(range(8), 2, there), range(8)))
    assert [mapped.train for mapped in there] == [(0, 1), (2, 3), (4, 5), (6, 7), (0, 1)]
    assert place(range(8), 2, [Mapped((0, 1), range(4)), Mapped((4, 5), range(4, 8))]) == (2, 3)
    with pytest.raises(ValueError, match="9 of 8 GPUs"):
        place(range(8), 9, [])


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolActor:
    """A pool of four GPUs whose pipelines are never started."""
    made = PoolActor(PoolHandles(None, Pool(1, 4), "cuda", Limits(), str(tmp_path)))
    monkeypatch.setattr(made, "create_pipeline_actor", lambda job, incarnation: SimpleNamespace(job=job))
    monkeypatch.setattr(made, "_begin_watch", lambda life: None)
    return made


def trains_on(pool: PoolActor, job: Job) -> tuple[int, ...]:
    started: Any = pool._actors[pool.submit(job)]
    life = pool._submissions[job.name]
    assert (started.job.train, started.job.infer) == (life.train, life.infer)
    return life.train


def test_jobs_that_are_submitted_one_by_one_train_on_different_gpus(pool: PoolActor) -> None:
    """Each command reads its own files, and knows nothing of those that came before."""

    def job(number: int) -> Job:
        (read,) = read_jobs([GRPO], Pool(1, 4), ["cluster.gpus_per_node=1"])
        assert read.train == (0,) and read.anywhere
        return replace(read, name=f"job{number}")

    assert [trains_on(pool, job(number)) for number in range(5)] == [(0,), (1,), (2,), (3,), (0,)]
    pool._submissions["job2"].outcome = Outcome("done")
    assert trains_on(pool, job(5)) == (2,)


def test_a_job_trains_where_its_file_says_or_among_its_own_gpus_and_sft_holds_what_it_trains_on(
    pool: PoolActor, tmp_path: Path
) -> None:
    def wrapped(name: str, inner: Path, **keys: Any) -> Job:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"nemo_config_path": str(inner), **keys}))
        return read_jobs([path], Pool(1, 4))[0]

    assert trains_on(pool, wrapped("named", GRPO, train_device_mapping=[0])) == (0,)
    assert trains_on(pool, wrapped("named_too", GRPO, train_device_mapping=[0])) == (0,)
    assert trains_on(pool, wrapped("sft", SFT)) == (1,) == pool._submissions["sft"].infer
    among = wrapped("among", GRPO, infer_device_mapping=[1, 3])
    assert among.options["full_overlap"] is False and trains_on(pool, among) == (3,)
    assert trains_on(pool, wrapped("scores", EVALUATION)) == () and pool._submissions["scores"].infer == (0, 1, 2, 3)


def job(name: str, arrive_s: float, **keys: Any) -> dict[str, Any]:
    shape = {"infer": [0, 1, 2, 3], "train": [0, 1], "steps": 3, "groups": 6, "train_s": 20.0, "staleness": 0}
    return {"name": name, "arrive_s": arrive_s, **shape, **keys}


def test_a_simulated_job_that_names_no_gpus_comes_to_those_that_its_predecessors_leave() -> None:
    scenario = parse_scenario({"jobs": [job("a", 0.0), job("b", 1.0, placed=True), job("late", 2000.0, placed=True)]})
    records: list[MemoryRecord] = []

    def remember(clock: Any) -> MemoryRecord:
        records.append(MemoryRecord(clock=clock))
        return records[0]

    World(scenario, 0, remember).run()
    assert check(records[0].entries) == []
    registered = [entry.event for entry in records[0].entries if isinstance(entry.event, Registered)]
    lie = {event.pipeline: {c.name: c.gpus for c in event.clusters} for event in registered}
    assert lie["b"] == {ACTOR_TRAIN: (4, 5), ACTOR_INFER: (4, 5, 6, 7)}
    assert lie["late"] == lie["a"] == {ACTOR_TRAIN: (0, 1), ACTOR_INFER: (0, 1, 2, 3)}, "the others have ended by then"


@pytest.mark.slow
def test_ways_that_share_place_the_jobs_and_the_others_move_them_as_they_always_did() -> None:
    where = [parse_scenario({"jobs": [job(n, 0.0, placed=placed) for n in "abc"]}) for placed in (False, True)]
    seconds = [
        {way: run_way(scenario, way, 0, AloneTimes(scenario)).total_s for way in (OURS, GAP_RATIO)}
        | {way: compose(scenario, way, 0, AloneTimes(scenario)).total_s for way in (SERIAL, STATIC, QUEUE)}
        for scenario in where
    ]
    assert all(seconds[1][way] < seconds[0][way] for way in (OURS, GAP_RATIO))
    assert all(seconds[1][way] == seconds[0][way] for way in (SERIAL, STATIC, QUEUE))


@pytest.mark.slow
def test_a_simulation_says_what_it_costs_that_jobs_name_gpus_which_collide() -> None:
    collide = parse_scenario({"jobs": [job(name, 0.0) for name in "abc"]})
    apart = parse_scenario({"jobs": [job("a", 0.0), job("b", 0.0, infer=[4, 5, 6, 7], train=[4, 5])]})
    notes = {}
    for title, scenario in {"collide": collide, "apart": apart}.items():
        assert worth_comparing(scenario) == (OURS, PLACED, *WAYS[1:])
        alone = AloneTimes(scenario)
        rows = [(name, [run_way(scenario, name, 0, alone)]) for name in (OURS, PLACED)]
        notes[title] = simulated(scenario, 0, rows).notes
        total = [outcomes[0].total_s for _, outcomes in rows]
    assert total[0] == total[1], "these lie where the pool would put them"
    (note,) = notes["collide"]
    assert "time_sharing_placed" in note and "`placed: true`" in note
    assert notes["apart"] == ()
    # Nothing to compare: jobs that are placed already, or that use the whole pool, or that are alone.
    whole = list(range(8))
    for jobs in ([job("a", 0.0, placed=True), job("b", 0.0, infer=whole)], [job("a", 0.0)]):
        assert worth_comparing(parse_scenario({"jobs": jobs})) == WAYS


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 15), max_size=8))
def test_a_moved_job_keeps_its_shape_and_its_ranks_their_nodes(
    start: int, ranks: int, train: int, busy: set[int]
) -> None:
    infer = list(range(2 * start, 2 * (start + ranks)))
    given_job = job("a", 0.0, infer=infer, train=infer[:train], tp=2, full_overlap=True)
    made = SimulatedJob.model_validate({**given_job, "placed": True})
    moved = made.moved([Mapped(sorted(busy), ())], 16)
    by = moved.infer[0] - made.infer[0]
    assert moved.infer[0] % 2 == 0 and moved.infer[0] >= 0 and moved.infer[-1] < 16
    assert moved.infer == tuple(gpu + by for gpu in made.infer) and moved.train == tuple(gpu + by for gpu in made.train)
    too_wide = SimulatedJob.model_validate({**given_job, "placed": True, "tp": 4, "infer": [1, 2, 3, 4]})
    assert too_wide.moved([], 3) == too_wide
