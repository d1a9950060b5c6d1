"""The state that a segment of the log begins with is the state that the log before it leads to, and goes on as that one
would.
"""

from __future__ import annotations

import random
from dataclasses import fields
from functools import cache
from typing import Any

import pytest

from nemo_rl.time_sharing.log.segments import saved
from nemo_rl.time_sharing.log.state import PipelineState, SavedPipeline, SchedulerState, StateSaved, replay
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord, decode_line, encode_entry

# What follows from the rest, and when the last event was.
DERIVED = {"owner", "trainers", "claimed", "quarantined", "withheld", "time"}


def on_disk(state: SchedulerState, at: float = 0.0) -> Entry:
    return decode_line(encode_entry(Entry(0, at, "scheduler", saved(state))), 0)


def everything(state: SchedulerState) -> dict[str, Any]:
    """Every value of a state, comparable, and the order in which it will be looked through."""
    plain = {name: value for name, value in vars(state).items() if name not in ("pipelines", "claimed", "time")}
    plain["claimed"] = {gpu: claim.key for gpu, claim in state.claimed.items()}
    plain["order"] = [list(part) for part in (state.pipelines, state.claims, state.commands)]
    for name, pipeline in state.pipelines.items():
        plain["order"] += [list(part) for part in (pipeline.wants, pipeline.held, pipeline.awake)]
        plain[name] = {
            member.name: getattr(pipeline, member.name) for member in fields(PipelineState) if member.name != "topology"
        }
        plain[name]["spec"] = pipeline.spec
    return plain


SEEDS = (*range(11), 143)
"""The last one is of a pool with slots, whose jobs are paused now and then."""


@cache
def history(seed: int) -> list[Entry]:
    """What is left of what the scheduler of a random scenario has written, crashes and restarts included."""
    world = World(random_scenario(seed), seed, lambda clock: MemoryRecord(clock=clock))
    world.run()
    return world.entries


def test_every_part_of_a_state_is_saved_or_follows_from_what_is() -> None:
    saved_parts = {member.name for member in fields(StateSaved)} - {"nodes", "gpus_per_node", "slots_per_gpu"} | {
        "pool"
    }
    assert saved_parts | DERIVED == vars(SchedulerState()).keys() and not saved_parts & DERIVED
    kept = {member.name for member in fields(SavedPipeline)}
    assert kept | {"topology", "wake_order", "claimed_ranks"} == {member.name for member in fields(PipelineState)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_comes_back_from_its_line_and_goes_on_as_it_would_have(seed: int) -> None:
    entries = history(seed)
    draw = random.Random(seed)
    for cut in sorted(draw.sample(range(1, len(entries)), 3)):
        before = replay(entries[:cut])
        line = on_disk(before, entries[cut - 1].time)
        assert everything(replay([line])) == everything(before)
        until = min(cut + 400, len(entries))
        assert everything(replay([line, *entries[cut:until]])) == everything(replay(entries[:until]))
        # Segments that are read one behind the other say the same again.
        assert everything(replay([*entries[:cut], line, *entries[cut:until]])) == everything(replay(entries[:until]))


@pytest.mark.slow
def test_the_histories_have_all_that_a_state_can_hold() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        state = SchedulerState()
        for entry in history(seed):
            state.apply(entry.event, entry.time)
            seen |= {name for name in ("claims", "quarantines", "commands", "recovering") if getattr(state, name)}
            for pipeline in state.pipelines.values():
                seen |= {member.name for member in fields(PipelineState) if getattr(pipeline, member.name)}
    # A request expires after a day, and no scenario lasts as long.
    assert {member.name for member in fields(PipelineState)} - {"expired"} <= seen
    assert {"claims", "quarantines", "commands", "recovering"} <= seen


def test_what_is_saved_does_not_change_with_the_state() -> None:
    entries = history(0)
    state = replay(entries[:300])
    event = saved(state)
    line = encode_entry(Entry(0, 0.0, "scheduler", event))
    for entry in entries[300:900]:
        state.apply(entry.event, entry.time)
    assert encode_entry(Entry(0, 0.0, "scheduler", event)) == line
    restored = replay([Entry(0, 0.0, "scheduler", event)])
    for entry in entries[300:900]:
        restored.apply(entry.event, entry.time)
    assert encode_entry(Entry(0, 0.0, "scheduler", event)) == line
