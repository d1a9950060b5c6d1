"""What a night calls growth: a rise beyond the noise of the process, however it wakes and sleeps meanwhile."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def night() -> dict[str, Any]:
    sys.path.insert(0, str(TOOLS))
    try:
        return runpy.run_path(str(TOOLS / "night.py"))
    finally:
        sys.path.remove(str(TOOLS))


def series(per_hour: float, noise: float, seed: int = 0) -> list[tuple[float, float]]:
    """Half an hour of a process that is awake or asleep, 80 MiB apart, and grows."""
    draw = random.Random(seed)
    return [(15.0 * n, 300.0 + per_hour * 15.0 * n / 3600 + draw.gauss(0, noise) + 80.0 * (n % 2)) for n in range(120)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("per_hour", "noise", "grows"), [(0, 1, False), (-20, 1, False), (40, 1, True), (400, 20, True)]
)
def test_growth_is_told_from_noise(
    night: dict[str, Any], per_hour: float, noise: float, grows: bool, seed: int
) -> None:
    slope = night["slope_of"]("engine", series(per_hour, noise, seed))
    assert slope.grows == grows
    assert slope.per_hour == pytest.approx(per_hour, abs=max(4.0, 5 * slope.noise))


def test_only_processes_that_live_long_enough_have_a_slope(night: dict[str, Any]) -> None:
    samples = []
    for at, mib in series(60.0, 0.5):
        processes = {"old 1": [mib, 5, 5]}
        if at > 1500:
            processes["new 2"] = [mib, 5, 5]
        samples.append({"s": at, "processes": processes})
    assert [slope.process for slope in night["slopes"](samples)] == ["old 1"]
