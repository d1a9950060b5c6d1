"""Recovery of the scheduler: from a whole log, and from a log cut at any point, without a GPU ever being on two
ledger.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import InconsistentLog, replay
from nemo_rl.time_sharing.protocol.types import Phase, Priority, Verb
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord, RecordWriter, read_record


def scenario() -> Scenario:
    job = {"steps": 6, "groups": 2, "samples_per_group": 4, "train_s": 3.0, "tokens": {"median": 200}, "staleness": 1}
    places = {"a": ([0], [0, 1, 2]), "b": ([1], [0, 1, 2, 3]), "c": ([2], [2, 3])}
    jobs = [{"name": name, "train": train, "infer": infer, **job} for name, (train, infer) in places.items()]
    limits = {"lease_s": 12.0, "heartbeat_s": 2.0, "min_hold_s": 2.0}
    return parse_scenario(
        {"pool": {"nodes": 1, "gpus_per_node": 4}, "limits": limits, "horizon_s": 600.0, "jobs": jobs}
    )


class CutWorld(World):
    """Crashes its scheduler at `crash_s`, and loses the last `lose` entries of its log; kills the next one `again_s`
    later, when the log loses nothing.
    """

    crash_s, lose, again_s = 0.0, 0, float("inf")
    lost: tuple[Entry, ...] = ()

    def run(self, *, max_events: int | None = None) -> None:
        self.loop.at(self.crash_s, self._crash_and_lose)
        if self.again_s < float("inf"):
            self.loop.at(self.crash_s + self.again_s, self._strike_scheduler)
        super().run(max_events=max_events)

    def _crash_and_lose(self) -> None:
        before = list(self._log.entries)
        self.lose_log(self.lose)
        self.lost = tuple(before[len(self._log.entries) :])
        self._strike_scheduler()


def occupied_twice(entries: list[Entry]) -> list[str]:
    """The ground truth alone: memory of one GPU taken while another pipeline has it."""
    taken: dict[int, str] = {}
    found = []
    for entry in entries:
        if isinstance(entry.event, ev.MemoryTaken):
            for gpu in entry.event.gpus:
                if gpu in taken:
                    found.append(
                        f"{entry.time:.2f} s: GPU {gpu} taken by {entry.source} {entry.event.what} while "
                        f"{taken[gpu]} has it"
                    )
                taken[gpu] = f"{entry.source} {entry.event.what}"
        elif isinstance(entry.event, ev.MemoryFreed):
            for gpu in entry.event.gpus:
                taken.pop(gpu, None)
    return found


@pytest.mark.slow
@given(
    crash_s=st.floats(1.0, 60.0),
    lose=st.integers(0, 60),
    seed=st.integers(0, 4),
    again_s=st.one_of(st.just(float("inf")), st.floats(1.0, 30.0)),
)
@settings(max_examples=30, deadline=None)
@example(
    crash_s=21.873688441635203, lose=20, seed=2, again_s=float("inf")
)  # the order to drain was in the part that was lost
def test_after_a_cut_log_no_gpu_is_used_twice_and_every_job_ends(
    crash_s: float, lose: int, seed: int, again_s: float
) -> None:
    records: list[MemoryRecord] = []
    world = CutWorld(scenario(), seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    world.crash_s, world.lose, world.again_s = crash_s, lose, again_s
    world.run()
    assert occupied_twice(records[0].entries) == []
    assert {job.outcome for job in world.jobs.values()} == {"done"}, f"at {world.loop.now:.0f} s"
    assert check(records[0].entries) == [], "with what was lost, as in another copy of the log"
    assert check(without_what_was_lost(world, records[0].entries)) == []


def test_what_occupies_gpus_that_the_log_gave_to_others_keeps_them_until_it_is_ended() -> None:
    """Its processes cannot be ended at first, so that its registration goes and they stay."""
    records: list[MemoryRecord] = []
    drawn = random_scenario(842708)
    faults = drawn.faults.model_copy(update={"outages": 0.0, "one_way_partitions": 0.0})
    scenario = drawn.model_copy(update={"limits": {**drawn.limits, "isolation_s": 0.0}, "faults": faults})
    world = CutWorld(scenario, 842708, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    world.crash_s, world.lose = 41.19352491456709, 27
    world.run()
    entries = records[0].entries
    fenced = next(entry.event for entry in entries if isinstance(entry.event, ev.Fenced))
    assert "which the log has given to others" in fenced.reason
    assert any(
        isinstance(entry.event, ev.Unregistered) and entry.event.reason == "could not be ended" for entry in entries
    )
    assert occupied_twice(entries) == []


def without_what_was_lost(world: CutWorld, entries: list[Entry]) -> list[Entry]:
    """The record as its files have it: the pipelines' whole, the scheduler's without the end that it lost."""
    lost = {id(entry.event) for entry in world.lost}
    return [entry for entry in entries if id(entry.event) not in lost]


@pytest.mark.slow
@pytest.mark.parametrize("crash_s", [12.0, 20.0, 31.0])
def test_a_gpu_used_twice_is_found_in_a_record_whose_log_lost_its_end(crash_s: float) -> None:
    records: list[MemoryRecord] = []
    world = CutWorld(scenario(), 1, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    world.crash_s, world.lose = crash_s, 20
    world.run()
    entries = records[0].entries
    restart = next(
        i
        for i, entry in enumerate(entries)
        if isinstance(entry.event, ev.SchedulerStarted) and not entry.event.complete
    )
    taken: dict[int, str] = {}
    for entry in entries[:restart]:
        if isinstance(entry.event, ev.MemoryTaken):
            taken |= dict.fromkeys(entry.event.gpus, entry.source)
        elif isinstance(entry.event, ev.MemoryFreed):
            taken = {gpu: source for gpu, source in taken.items() if gpu not in entry.event.gpus}
    gpu, source = next(iter(taken.items()))
    other = "b/driver" if source != "b/driver" else "a/driver"
    entries.insert(restart + 1, Entry(restart, entries[restart].time, other, ev.MemoryTaken("rank 9", (gpu,))))
    assert any(violation.invariant == 1 and f"GPU {gpu}" in violation.message for violation in check(entries))


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_log_file_cut_at_any_byte_folds_to_the_state_of_the_lines_that_are_left(
    data: st.DataObject, log: tuple[bytes, list[Entry]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, entries = log
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("cut") / "scheduler.jsonl"
    path.write_bytes(whole[:cut])
    state = replay(read_record(path, recover=True))
    expected = replay(entries[: whole[:cut].count(b"\n")])
    assert (
        state.owner == expected.owner
        and state.epoch == expected.epoch
        and state.pipelines.keys() == expected.pipelines.keys()
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Entry]]:
    world = World(scenario(), 1, lambda clock: MemoryRecord(clock=clock))
    world.run()
    path: Path = tmp_path_factory.mktemp("log") / "scheduler.jsonl"
    with RecordWriter(path, source="scheduler", clock=lambda: 0.0) as writer:
        for entry in world.entries:
            writer.emit(entry.event)
    return path.read_bytes(), list(read_record(path))


def test_a_log_that_contradicts_itself_is_not_believed() -> None:
    def entries(*events: object) -> list[Entry]:
        return [Entry(i, float(i), "scheduler", event) for i, event in enumerate(events)]

    opened = ev.PoolOpened(1, 2)
    with pytest.raises(InconsistentLog, match=r"entry 1 .* pipeline 'a' is not registered"):
        replay(entries(opened, ev.Granted("a", "actor_train", 1, (0,), Priority.ACTOR_TRAINING, 0, 0, 1.0)))


@pytest.mark.parametrize(
    ("readings", "steady"), [((10.0, 11.0, 12.5), 2.5), ((10.0, 5.0, 6.0), 1.0), ((10.0, 90_000.0, 90_001.0), 6.0)]
)
def test_the_clock_goes_forward_and_never_jumps(readings: tuple[float, ...], steady: float) -> None:
    clock = SteadyClock(max_step_s=5.0)
    jumps = [clock.advance(reading) for reading in readings]
    assert clock.now == steady
    assert any(jumps) == (steady != readings[-1] - readings[0])


def test_a_log_that_names_the_steps_of_a_hand_over_is_read(tmp_path: Path) -> None:
    """As logs did before the scheduler sent one command for each rise and fall."""
    writer = RecordWriter(tmp_path / "scheduler.jsonl", source="scheduler", clock=lambda: 1.0, flush_interval_s=0.0)
    for before in ("waking", "active", "sleeping"):
        writer.emit(ev.RankMoved("a", 0, before, 1))  # type: ignore[arg-type]
    writer.close()
    moves = [
        entry.event for entry in read_record(tmp_path / "scheduler.jsonl") if isinstance(entry.event, ev.RankMoved)
    ]
    assert [move.phase for move in moves] == [Phase.RISING, Phase.SERVING, Phase.FALLING]
    assert (Verb("route"), Verb("drain")) == (Verb.SERVE, Verb.VACATE)
