"""Engines of a mixture-of-experts model beside a policy whose experts are shared out over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.engines import colocated, without_place

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]


def test_engines_agree_with_shared_out_experts_before_and_after_a_refit(
    ray_session: None, tiny_moe_model: Path
) -> None:
    with colocated(tiny_moe_model, 2, "policy.dtensor_cfg.expert_parallel_size=2") as engine:
        requests = engine.requests(16)
        before = engine.run(requests)
        assert engine.disagreement(requests, before) <= 1.001
        engine.refitter.release_device()
        engine.train_step()
        engine.refitter.bring_to(1)
        after = engine.run(requests)
        assert without_place(after) != without_place(before)
        assert engine.disagreement(requests, after) <= 1.001
