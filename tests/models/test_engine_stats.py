"""What engines say of themselves, as metrics: readings at intervals, every token once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_rl.models.generation.vllm.engine_stats import EngineSample, EngineStats, generation_metrics


def test_gauges_are_read_at_intervals_and_tokens_are_all_counted() -> None:
    now = 0.0
    stats = EngineStats(0.5, clock=lambda: now)
    logger = stats(vllm_config=None, engine_index=0)
    for step, running in enumerate((8, 100, 100, 4)):
        now = 0.2 * step
        logger.record(
            SimpleNamespace(num_running_reqs=running, num_waiting_reqs=step, kv_cache_usage=0.25),
            SimpleNamespace(num_generation_tokens=running),
        )
    logger.record(None, None)
    taken = stats.take()
    assert taken == EngineSample(
        2,
        {"inflight_batch_sizes": 12, "num_pending_samples": 3, "kv_cache_usage_perc": 0.5},
        {"inflight_batch_sizes": 8, "num_pending_samples": 3, "kv_cache_usage_perc": 0.25},
        212,
    )
    assert stats.take() == EngineSample(0, dict.fromkeys(taken.sums, 0.0), dict.fromkeys(taken.sums, 0.0), 0)


def test_engines_are_averaged_over_their_readings_and_shown_one_by_one() -> None:
    busy = EngineSample(
        3,
        *({"inflight_batch_sizes": v, "num_pending_samples": 0.0, "kv_cache_usage_perc": 0.3} for v in (30.0, 16.0)),
        generation_tokens=70,
    )
    calm = EngineSample(
        1,
        *({"inflight_batch_sizes": 2.0, "num_pending_samples": 4.0, "kv_cache_usage_perc": 0.1} for _ in range(2)),
        generation_tokens=30,
    )
    metrics = generation_metrics([busy, calm, EngineSample()])
    assert metrics["inflight_batch_sizes"] == 8.0 and metrics["inflight_batch_sizes/max"] == 16.0
    assert metrics["kv_cache_usage_perc"] == pytest.approx(0.1)
    assert metrics["generation_tokens"] == 100.0
    assert metrics["engine_0/inflight_batch_sizes"] == 10.0 and metrics["engine_1/num_pending_samples"] == 4.0
    assert metrics["engine_2/generation_tokens"] == 0.0 and "engine_2/inflight_batch_sizes" not in metrics
    assert generation_metrics([EngineSample()]) == {"generation_tokens": 0.0}
