"""An engine's statistics during generation: samples of its queues and KV cache, one per interval.

A vLLM stat logger that keeps sums only, so memory does not grow. Invariant: every value is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

GAUGES = ("inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc")


@dataclass(frozen=True)
class EngineSample:
    """One engine since it was last asked. `sums`: of each gauge's readings: running requests, waiting requests, and the
    used share of the KV cache (0 to 1).
    """

    samples: int = 0  # how often the gauges were read
    sums: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    generation_tokens: int = 0


class EngineStats:
    """One engine's stat logger. `interval_s`: seconds between readings of the gauges. `clock`: monotonic seconds."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock()
        self._clear()

    def _clear(self) -> None:
        self._samples, self._tokens = 0, 0
        self._sums = dict.fromkeys(GAUGES, 0.0)
        self._largest = dict.fromkeys(GAUGES, 0.0)

    def __call__(self, vllm_config: object, engine_index: int = 0) -> EngineStats:
        """Itself: engines make their loggers by a factory."""
        return self

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *_: object, **__: object
    ) -> None:
        """After a step of the engine; either may be None."""
        self._tokens += iteration_stats.num_generation_tokens if iteration_stats is not None else 0
        now = self._clock()
        if scheduler_stats is None or now < self._next:
            return
        self._next = now + self._interval_s
        self._samples += 1
        values = (scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage)
        for name, value in zip(GAUGES, values, strict=True):
            self._sums[name] += value
            self._largest[name] = max(self._largest[name], value)

    def take(self) -> EngineSample:
        """Samples since the last call."""
        sample = EngineSample(self._samples, self._sums, self._largest, self._tokens)
        self._clear()
        return sample

    def log(self) -> None:
        """Ignored: the driver asks."""

    def log_engine_initialized(self) -> None:
        """Ignored."""

    def record_sleep_state(self, *_: object, **__: object) -> None:
        """Ignored: a sleeping engine takes no step."""


def generation_metrics(engines: Sequence[EngineSample]) -> dict[str, float]:
    """The `generation_metrics/`: means over readings and engines with the largest reading, tokens drawn, and with
    several engines those of each. `engines`: one sample per engine; engines that did nothing count for nothing.
    """
    metrics: dict[str, float] = {}
    readings = sum(engine.samples for engine in engines)
    if readings:
        for name in GAUGES:
            metrics[name] = sum(engine.sums[name] for engine in engines if engine.samples) / readings
            metrics[f"{name}/max"] = max(engine.largest[name] for engine in engines if engine.samples)
    metrics["generation_tokens"] = float(sum(engine.generation_tokens for engine in engines))
    if len(engines) > 1:
        for number, engine in enumerate(engines):
            metrics |= {
                f"engine_{number}/{name}": value / engine.samples
                for name, value in engine.sums.items()
                if engine.samples
            }
            metrics[f"engine_{number}/generation_tokens"] = float(engine.generation_tokens)
    return metrics
