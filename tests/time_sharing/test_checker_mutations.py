"""The history checker finds each planted defect, under the invariant that it breaks, within 200 random scenarios."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from nemo_rl.time_sharing.history.checker import INVARIANTS, check
from nemo_rl.time_sharing.log.events import PlanRejected
from nemo_rl.time_sharing.protocol.types import Command
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord

SEEDS = 200
END_S = 3200.0
"""Without a defect every random scenario is over by then (test_random_scenarios says so); one that is not is stuck."""


def _load_defects():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("planted_defects", Path(__file__).with_name("planted_defects.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DEFECTS = _load_defects().DEFECTS


def remember(records: list[MemoryRecord], clock: Callable[[], float]) -> MemoryRecord:
    records.append(MemoryRecord(clock=clock))
    return records[0]


class Detection(NamedTuple):
    """The first violation of the invariant that a planted defect breaks."""

    seed: int
    entry: int
    message: str


def first_detection(invariant: int, first: int) -> Detection | None:
    """The first in a run whose plans are all sound to the validator. `first`: the seed that is tried first."""
    for seed in (first, *(seed for seed in range(SEEDS) if seed != first)):
        entries, crashed = simulate(seed)
        if any(isinstance(entry.event, PlanRejected) for entry in entries):
            continue
        for violation in check(entries, ended=not crashed):
            if violation.invariant == invariant:
                return Detection(seed, violation.seq, violation.message)
    return None


def simulate(seed: int) -> tuple[list[Entry], bool]:
    """The record of one random scenario, and whether the simulation itself broke: its record ends in the middle then,
    which proves nothing.
    """
    records: list[MemoryRecord] = []
    world = World(random_scenario(seed).model_copy(update={"horizon_s": END_S}), seed, partial(remember, records))
    try:
        world.run()
    except Exception:  # whatever a defect breaks in the simulation, only what the checker says of the record counts
        logging.getLogger(__name__).debug("seed %d stopped the simulation", seed, exc_info=True)
        return records[0].entries, True
    return records[0].entries, False


@pytest.mark.slow
@pytest.mark.parametrize("invariant", INVARIANTS)
def test_both_planted_defects_of_an_invariant_are_found_each_in_its_own_way(
    invariant: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    detections = []
    for defect in (defect for defect in DEFECTS if defect.invariant == invariant):
        with monkeypatch.context() as patch:
            defect.plant(patch)
            detection = first_detection(invariant, defect.seed)
        assert detection is not None, f"{defect.name} is not found within {SEEDS} scenarios"
        detections.append(detection)
    assert len({(detection.seed, detection.entry) for detection in detections}) == 2, detections


def test_two_defects_are_planted_for_each_invariant() -> None:
    assert Counter(defect.invariant for defect in DEFECTS) == dict.fromkeys(INVARIANTS, 2)


@pytest.mark.parametrize("seed", range(6))
def test_a_simulation_that_stops_in_the_middle_breaks_no_invariant(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, sent = World._send_command, [0]

    def send(self: World, command: Command) -> None:
        sent[0] += 1
        if sent[0] == 60:
            raise RuntimeError("planted, and no defect of anybody")
        original(self, command)

    monkeypatch.setattr(World, "_send_command", send)
    entries, crashed = simulate(seed)
    assert crashed
    assert check(entries, ended=False) == []
