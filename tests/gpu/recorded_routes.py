"""vLLM's own record of routes on a GPU against our recorder's in its worker: the same routes at the same positions.

python -m tests.gpu.recorded_routes MODEL
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.models.generation.interfaces import GenerationResult
from nemo_rl.models.generation.vllm import engine_actors
from nemo_rl.models.generation.vllm.engine_processes import EngineSpec
from tests.models.elastic_engines import elastic_engines

ON_GPU = (
    "cluster.device=cuda",
    "cluster.gpus_per_node=1",
    "policy.router_replay.enabled=true",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.2",
    "~policy.generation.vllm_kwargs.kv_cache_memory_bytes",
)


@contextmanager
def recorded_by_us() -> Iterator[None]:
    """Engines whose routes our recorder reads."""
    made = engine_actors.engine_spec

    def ours(*args: Any, **kwargs: Any) -> EngineSpec:
        spec = made(*args, **kwargs)
        arguments = {name: value for name, value in spec.engine_kwargs.items() if "routed_experts" not in name}
        return replace(spec, engine_kwargs=arguments, engine_records_routes=False)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_actors, "engine_spec", ours)
        yield


def answers(model: Path) -> list[GenerationResult]:
    with elastic_engines(model, 1, *ON_GPU) as engines:
        requests = [replace(request, record_from=0) for request in engines.requests(24, tokens=24, greedy=True)]
        return asyncio.run(engines.run(requests))


def compare(theirs: list[GenerationResult], ours: list[GenerationResult]) -> None:
    """Asserts that both recorded the same experts for nearly all tokens up to where responses part."""
    same = positions = 0
    for one, other in zip(theirs, ours, strict=True):
        assert one.routes is not None and other.routes is not None
        assert one.routes.valid[:-1].all() and other.routes.valid[:-1].all()
        assert one.routes.experts.shape[1:] == other.routes.experts.shape[1:] == (2, 2)
        # Greedy responses may part where two tokens are as likely; routes are compared up to there.
        parted = next(
            (n for n, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if len(set(pair)) > 1),
            min(len(one.token_ids), len(other.token_ids)),
        )
        end = len(one.routes.valid) - len(one.token_ids) + parted - 1
        chosen = [sorted_experts(result, end) for result in (one, other)]
        same += int((chosen[0] == chosen[1]).all(axis=(1, 2)).sum())
        positions += end
    assert positions > 24 * 4 and same >= 0.99 * positions, (same, positions)


def sorted_experts(result: GenerationResult, end: int) -> Any:
    assert result.routes is not None
    experts = result.routes.experts[:end].copy()
    experts.sort(axis=-1)
    return experts


def main() -> None:
    """Compares the two on one GPU."""
    init_ray(device="cuda")
    try:
        theirs = answers(Path(sys.argv[1]))
        with recorded_by_us():
            compare(theirs, answers(Path(sys.argv[1])))
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main()
