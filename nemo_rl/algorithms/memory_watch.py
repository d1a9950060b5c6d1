"""Reads the memory of a run's processes after each step, logs it, and says when it grows.

The readings are asked for without waiting and logged one step later, so a step costs nothing for them. Invariant: a
process that does not answer, or ended, only loses its own reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from nemo_rl.distributed.devices import MemoryUse, own_host_bytes, process_memory, tidy, tidy_process_memory

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.utils.logger import Logger

_GIB = 1 << 30
_STEPS, _TIDY_STEPS = 5, 16
_LAST_ANSWERS_S = 5.0

WatchedActors = Callable[[], Sequence["ActorHandle[Any]"]]


class GrowthWatch:
    """Finds figures that grow in every step.

    Args:
        least_gib: Growth over five steps below which nothing is said, by prefix of the figure's name.
        warm_up: Steps whose figures are not looked at: kernels, buffers and the optimizer's state come in them.
    """

    def __init__(self, least_gib: Mapping[str, float], warm_up: int = 2) -> None:
        self._least_gib = least_gib
        self._warm_up = warm_up
        self._seen = 0
        self._recent: dict[str, deque[float]] = {}
        self._said_at: dict[str, float] = {}

    def observe(self, figures: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
        """Takes the figures of a step, in GiB; returns a line for each that grew in each of the last five steps.
        `limits`: at which figure memory is full, where that is known. A figure is named again once it has grown by a
        quarter.
        """
        self._seen += 1
        if self._seen <= self._warm_up:
            return []
        lines = []
        for name, value in figures.items():
            recent = self._recent.setdefault(name, deque(maxlen=_STEPS + 1))
            recent.append(value)
            line = self._line(name, list(recent), limits.get(name))
            if line is not None and value >= 1.25 * self._said_at.get(name, 0.0):
                self._said_at[name] = value
                lines.append(line)
        return lines

    def _line(self, name: str, values: list[float], limit: float | None) -> str | None:
        least = next((least for prefix, least in self._least_gib.items() if name.startswith(prefix)), 0.0)
        growing = len(values) > _STEPS and all(after > before for before, after in pairwise(values))
        if not growing or values[-1] - values[0] < least:
            return None
        line = f"memory: {name} grew in each of the last {_STEPS} steps: {', '.join(f'{v:.2f}' for v in values)} GiB"
        if limit is not None:
            pace = (values[-1] - values[0]) / _STEPS
            left = max(0, int((limit - values[-1]) / pace))
            line += f"; at this pace the GPU's {limit:.1f} GiB are full in {left} steps"
        return line


class MemoryWatch:
    """Memory of one run's processes.

    Args:
        actors: The actors of each role, such as `trainer`; asked for at each step, since they may be replaced.
        generation: The run's engines, if it has some.
        logger: Takes `gpu/*` and `host/*`, in GiB.
        say: Prints a line for the person.
    """

    def __init__(
        self,
        actors: Mapping[str, WatchedActors],
        generation: VllmGeneration | None,
        logger: Logger,
        say: Callable[[str], None],
    ) -> None:
        self._actors, self._generation = actors, generation
        self._logger, self._say = logger, say
        # A heap moves by tens of megabytes on its own.
        self._growth = GrowthWatch({"gpu/": 1 / 16, "host/": 1 / 2})
        self._asked: list[tuple[str, Any]] = []  # role and answer, of the calls under way
        self._driver: MemoryUse | None = None
        self._step = 0

    def after_step(self, step: int) -> None:
        """Asks every process for its memory, after logging what they said of the step before."""
        self.log()
        tidies = step % _TIDY_STEPS == 0
        if tidies:
            tidy()
        # Without the processes below it, among which is a Ray that it started.
        self._step, self._driver = step, MemoryUse(own_host_bytes())
        call: Any
        for role, actors in self._actors.items():
            for actor in actors():
                call = actor.__ray_call__
                self._asked.append((role, call.remote(tidy_process_memory if tidies else process_memory)))
        if self._generation is not None:
            self._asked += [("engine", answer) for answer in self._generation.ask_memory_use()]

    def log(self, wait_s: float = 0.0) -> None:
        """Logs the answers that are there, after at most `wait_s` seconds."""
        if self._driver is None:
            return
        refs = [ref for _, ref in self._asked]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=wait_s) if refs else ([], [])
        readings: dict[str, list[MemoryUse]] = {"driver": [self._driver]}
        for role, ref in self._asked:
            if ref not in answered:
                continue
            try:
                reading: Any = ray.get(ref)
            except RayError:
                continue
            readings.setdefault(role, []).append(reading)
        self._asked.clear()
        self._driver = None
        figures, limits = figures_of(readings)
        for prefix in ("gpu", "host"):
            own = {name.removeprefix(f"{prefix}/"): value for name, value in figures.items() if name.startswith(prefix)}
            if own:
                self._logger.log_metrics(own, self._step, prefix=prefix)
        watched = {name: value for name, value in figures.items() if not name.endswith("_peak_gib")}
        for line in self._growth.observe(watched, limits):
            self._say(line)

    def last(self) -> None:
        """Logs the last step's answers."""
        self.log(_LAST_ANSWERS_S)


def figures_of(readings: Mapping[str, Sequence[MemoryUse]]) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of readings by role, in GiB: `gpu/<role>_allocated_gib` and `gpu/<role>_peak_gib` of the fullest process,
    `host/<role>_gib` over all of them. Second, the size of the GPU for each `allocated` where it is known. For an
    engine, `allocated` is what it keeps while it sleeps.
    """
    figures: dict[str, float] = {}
    limits: dict[str, float] = {}
    for role, uses in readings.items():
        figures[f"host/{role}_gib"] = sum(use.host for use in uses) / _GIB
        on_gpu = [use for use in uses if use.device is not None]
        if on_gpu:
            figures[f"gpu/{role}_allocated_gib"] = max(use.device or 0 for use in on_gpu) / _GIB
            figures[f"gpu/{role}_peak_gib"] = max(use.peak or 0 for use in on_gpu) / _GIB
            if all(use.total for use in on_gpu):
                limits[f"gpu/{role}_allocated_gib"] = max(use.total or 0 for use in on_gpu) / _GIB
    return figures, limits
