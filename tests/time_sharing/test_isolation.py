"""A scheduler whose network is away ends nobody for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.events import Fenced, Isolated, Reconnected
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.scheduling.liveness import Isolation
from nemo_rl.time_sharing.simulation.event_loop import Wire
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

SCENARIO = Path(__file__).parents[2] / "examples" / "time_sharing" / "twelve_jobs.yaml"
LIMITS = Limits(lease_s=10.0, isolation_s=60.0)


@cache
def cut_off(silent: int, seconds: float, **limits: float) -> tuple[World, MemoryRecord]:
    """Twelve jobs, some of which do not reach the scheduler for a while, nor it them."""
    scenario = load_scenario(SCENARIO)
    jobs = [job.model_copy(update={"steps": 2}) for job in scenario.jobs]
    scenario = scenario.model_copy(update={"limits": {**scenario.limits, **limits}, "jobs": jobs})
    records: list[MemoryRecord] = []

    def remember(clock: object) -> MemoryRecord:
        records.append(MemoryRecord(clock=clock))  # type: ignore[arg-type]
        return records[0]

    world = World(scenario, 0, remember)
    names = sorted(world.jobs)[:silent]
    for name in names:
        world.loop.at(60.0, world.wire.cut, name, (Wire.TO, Wire.FROM), 60.0 + seconds)
    world.run()
    return world, records[0]


def of_kind(record: MemoryRecord, kind: type) -> list[object]:
    return [entry.event for entry in record.entries if isinstance(entry.event, kind)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("silent", "seconds", "limits", "ended"),
    [
        (12, 29.0, {}, 0),
        (12, 120.0, {}, 0),
        (8, 120.0, {}, 0),
        # Few are silent while the rest is heard: these are gone.
        (3, 120.0, {}, 3),
        (12, 120.0, {"isolation_s": 0.0}, 12),
        (12, 120.0, {"isolation_s": 40.0}, 12),
    ],
)
def test_most_at_once_are_waited_for_and_a_few_are_not(
    silent: int, seconds: float, limits: dict[str, float], ended: int
) -> None:
    world, record = cut_off(silent, seconds, **limits)
    fenced = {event.pipeline for event in of_kind(record, Fenced)}
    assert len(fenced) == ended
    assert all(job.finished for job in world.jobs.values())
    assert not check(record.entries)
    changes = of_kind(record, Isolated) + of_kind(record, Reconnected)
    assert bool(changes) == (silent > 6 and limits.get("isolation_s") != 0.0)


@pytest.mark.slow
def test_a_scheduler_that_waits_is_not_blamed_and_one_that_waits_too_long_is() -> None:
    _, record = cut_off(12, 120.0)
    end = next(number for number, entry in enumerate(record.entries) if isinstance(entry.event, Reconnected))
    late = record.entries[:end] + [replace(entry, time=entry.time + 1000.0) for entry in record.entries[end:]]
    assert any("cut off for" in str(violation) for violation in check(late))
    without = [entry for entry in record.entries if not isinstance(entry.event, Isolated)]
    assert any("without having been isolated" in str(violation) for violation in check(without))


def test_one_silent_pipeline_says_nothing_of_the_network() -> None:
    isolation = Isolation()
    assert [isolation.update(now, {"only": 0.0}, LIMITS) for now in (4.0, 6.0, 11.0, 100.0)] == [None] * 4
    assert isinstance(isolation.update(100.0, {"one": 0.0, "other": 0.0}, LIMITS), Isolated)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=60))
def test_isolation_ends_in_time_and_begins_anew_only_after_most_were_heard(heard: list[list[bool]]) -> None:
    isolation, seen = Isolation(), dict.fromkeys("abc", 0.0)
    since: float | None = None
    gave_up = False
    for number, who in enumerate(heard):
        now = 4.0 * (number + 1)
        for name, speaks in zip(seen, who, strict=True):
            if speaks:
                seen[name] = now
        most = sum(now - at > LIMITS.lease_s / 2 for at in seen.values()) >= 2
        change = isolation.update(now, seen, LIMITS)
        if isinstance(change, Isolated):
            assert most and not gave_up and since is None
            since = now
        elif isinstance(change, Reconnected):
            assert since is not None and change.seconds == now - since <= LIMITS.isolation_s
            assert change.given_up == most
            since, gave_up = None, most
        elif since is not None:
            assert most and now - since < LIMITS.isolation_s
        gave_up = gave_up and most
        assert isolation.since == since
