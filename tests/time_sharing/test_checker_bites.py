"""The history checker finds each planted defect, under the invariant that it breaks, within 200 random scenarios."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

SEEDS = 200
END_S = 3000.0
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


def first_seed_that_bites(invariant: int) -> int | None:
    for seed in range(SEEDS):
        records: list[MemoryRecord] = []
        world = World(random_scenario(seed).model_copy(update={"horizon_s": END_S}), seed, partial(remember, records))
        try:
            world.run()
        except Exception:  # a defect may also break the simulation itself; only what the checker says counts here
            logging.getLogger(__name__).debug("seed %d stopped the simulation", seed, exc_info=True)
        if any(violation.invariant == invariant for violation in check(records[0].entries)):
            return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "_"))
def test_a_planted_defect_is_found(defect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level(logging.CRITICAL)
    defect.plant(monkeypatch)
    assert first_seed_that_bites(defect.invariant) is not None
