"""One engine whose weights a service on another GPU replaces over NCCL, through the receiver's methods: after a sleep
that lost them, and below running requests.

    python -m tests.gpu.broadcast_to_engine MODEL
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_rl.distributed.devices import device_uuid
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from tests.models.broadcasting_service import broadcast_weights
from tests.models.elastic_engines import Elastic, elastic_engines

# How many times further off the tokens are under the weights of the version before; their own differ by rounding.
CLEARLY = 5.0
OVERRIDES = (
    "cluster.device=cuda",
    "policy.precision=bfloat16",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.2",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "~policy.generation.vllm_kwargs.kv_cache_memory_bytes",
)


def check(engines: Elastic, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> None:
    """Asserts that the labels are right: recomputed under any other version, tokens are far off."""
    own = statistics.mean(engines.differences(requests, results))
    other = statistics.mean(engines.differences(requests, results, shift=-1))
    assert CLEARLY * own < other, (own, other)


def main(model: Path) -> None:
    """Asserts that tokens are drawn with the weights of the version that they are labelled with."""
    init_ray(device="cuda")
    try:
        with elastic_engines(model, 1, *OVERRIDES) as engines:
            generation = engines.generation
            taken = set(generation.get_model_update_receiver([0]).devices())
            everywhere = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
            sender = next(device for device in everywhere if device_uuid(device) not in taken)

            def replace(version: int) -> None:
                ready = broadcast_weights(generation.group.workers, engines.versions.weights(version), sender)
                assert ready == [[True]], ready
                generation.finalize_weight_update([0], version)

            generation.sleep_partial([0], level=2)
            generation.wake_up_partial([0], skip_activate=True)
            replace(41)
            generation.activate_dp_ranks([0])
            requests = engines.requests(8)
            results = asyncio.run(engines.run(requests))
            assert {span.version for result in results for span in result.spans} == {41}
            check(engines, requests, results)

            requests, results = asyncio.run(engines.under_load(lambda: replace(43)))
            assert {43} <= {span.version for result in results for span in result.spans} <= {41, 43}
            check(engines, requests, results)
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
