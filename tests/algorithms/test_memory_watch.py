"""Memory of a run's processes: what is logged, and when growth is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.memory_watch import GrowthWatch, MemoryWatch, figures_of
from nemo_rl.distributed.devices import MemoryUse
from nemo_rl.utils.logger import Logger

GIB = 1 << 30
NAME = "gpu/trainer_allocated_gib"


def said(values: Iterable[float], name: str = NAME, limits: dict[str, float] | None = None) -> list[tuple[int, str]]:
    watch = GrowthWatch({"gpu/": 1 / 16, "host/": 0.5})
    return [
        (step, line)
        for step, value in enumerate(values, start=1)
        for line in watch.observe({name: value}, limits or {})
    ]


def test_a_trainer_that_keeps_a_copy_of_its_weights_after_every_step_is_named_in_time() -> None:
    # The figures of a run that ended in step 23 with an out-of-memory error.
    values = [14.44, 28.87, *(31.74 + 2.875 * step for step in range(21))]
    (step, line), *more = said(values, limits={NAME: 139.8})
    assert step == 8
    assert "31.74, 34.61, 37.49, 40.36, 43.24, 46.11 GiB" in line
    assert "139.8 GiB are full in 32 steps" in line
    assert len(more) < 6


def test_warm_up_noise_and_growth_that_stops_are_not_named() -> None:
    assert said([1.0, 20.0] + [23.1] * 30) == []
    assert said([1.0, 20.0] + [23.1 + 0.3 * (step % 2) for step in range(30)]) == []
    assert said([1.0, 20.0, 21.0, 22.0, 23.0, 23.0, 24.0, 25.0, 26.0, 26.0]) == []
    # A heap that creeps by a megabyte a step.
    assert said([2.0 + step / 1024 for step in range(200)], name="host/engine_gib") == []


@given(st.lists(st.floats(0.1, 100.0), max_size=30))
def test_nothing_is_named_unless_five_steps_in_a_row_grew(values: list[float]) -> None:
    for step, _ in said(values):
        last = values[step - 6 : step]
        assert last == sorted(set(last)) and len(last) == 6 and last[-1] - last[0] >= 1 / 16


@given(st.floats(0.07, 5.0), st.integers(8, 40))
def test_steady_growth_is_always_named(pace: float, steps: int) -> None:
    assert said([pace * step for step in range(steps)])[0][0] == 8


def test_figures_are_of_the_fullest_gpu_and_of_all_hosts() -> None:
    readings = {
        "trainer": [MemoryUse(GIB, 2 * GIB, 5 * GIB, 80 * GIB), MemoryUse(3 * GIB, GIB, 7 * GIB, 80 * GIB)],
        "engine": [MemoryUse(GIB, GIB // 2, GIB // 2)],
        "driver": [MemoryUse(GIB)],
    }
    figures, limits = figures_of(readings)
    assert figures == {
        "host/trainer_gib": 4.0,
        "gpu/trainer_allocated_gib": 2.0,
        "gpu/trainer_peak_gib": 7.0,
        "host/engine_gib": 1.0,
        "gpu/engine_allocated_gib": 0.5,
        "gpu/engine_peak_gib": 0.5,
        "host/driver_gib": 1.0,
    }
    assert limits == {NAME: 80.0}


_KEPT = """
from nemo_rl.distributed.devices import host_bytes, process_memory
before = host_bytes()
kept = bytearray(64 << 20)
print(host_bytes() - before, process_memory().host)
"""


def test_a_process_is_measured_with_those_below_it_and_without_what_files_back() -> None:
    grown, used = printed(_KEPT)
    assert 60 << 20 <= grown <= 90 << 20 and used >= 64 << 20


def printed(program: str) -> list[int]:
    """The numbers that a program prints in a process of its own: a large one has room for what it keeps."""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return [int(number) for number in said.split()]


_CYCLES = """
import gc
from nemo_rl.distributed.devices import process_memory, tidy_process_memory
before = tidy_process_memory().host
gc.disable()
for _ in range(300_000):
    itself = []
    itself.append(itself)
print(process_memory().host - before, tidy_process_memory().host - before)
"""


def test_tidying_gives_cycles_and_freed_heap_back() -> None:
    grown, tidied = printed(_CYCLES)
    assert grown > 24 << 20 and tidied < 8 << 20


class Holder:
    def hold(self, mib: int) -> None:
        self.kept = bytearray(mib << 20)


class Written(Logger):
    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = {}

    def log_metrics(self, metrics, step, prefix="", **_) -> None:  # type: ignore[no-untyped-def]
        for name, value in metrics.items():
            self.figures.setdefault(f"{prefix}/{name}", []).append(value)


@pytest.mark.ray
def test_an_actor_that_grows_is_named_and_one_that_died_costs_only_its_figure(ray_session: None) -> None:
    holder = ray.remote(num_cpus=0)(Holder)
    growing, dying = holder.remote(), holder.remote()
    lines: list[str] = []
    logger = Written()
    actors = {"environment": lambda: [growing], "teacher": lambda: [dying]}
    watch = MemoryWatch(actors, None, logger, lines.append)
    for step in range(9):
        ray.get(growing.hold.remote(200 * (step + 1)))
        if step == 4:
            ray.kill(dying)
        watch.after_step(step + 1)
        ray.wait([ref for _, ref in watch._asked], num_returns=len(watch._asked), timeout=30)
    watch.last()
    assert len(logger.figures["host/environment_gib"]) == len(logger.figures["host/driver_gib"]) == 9
    assert len(logger.figures["host/teacher_gib"]) == 4
    assert len(lines) >= 1 and all("host/environment_gib grew" in line for line in lines)
