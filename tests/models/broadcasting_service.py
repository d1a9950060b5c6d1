"""A sync service of its own, as a foreign scheduler brings one: sends weights to engines by a broadcast group, through
the receiver's methods alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch

from nemo_rl.distributed.ports import free_ports
from nemo_rl.models.generation.vllm.extension import bucket_stats
from nemo_rl.weight_sync.transports import BroadcastGroup

LIMIT_S = 120.0
GROUP = "weights of a test"


def broadcast_weights(
    workers: Sequence[Any], weights: Mapping[str, torch.Tensor], device: torch.device
) -> list[list[Any]]:
    """Sends every tensor to the first rank of every engine, from `device`; what each said when the group was set up."""

    def call(name: str, *arguments: Any) -> list[Any]:
        return [worker.rlix_model_update_rpc.remote(name, *arguments) for worker in workers]

    (port,) = free_ports(1)
    world = 1 + len(workers)
    place = ("127.0.0.1", port, 0, world, LIMIT_S)
    with ThreadPoolExecutor(1) as beside:
        joining = beside.submit(BroadcastGroup, *place, device)
        plans = [
            {0: {"address": "127.0.0.1", "port": port, "rank": rank, "world_size": world}} for rank in range(1, world)
        ]
        answers = [
            worker.rlix_model_update_rpc.remote("setup_collective_group", GROUP, plan, "receiver", LIMIT_S)
            for worker, plan in zip(workers, plans, strict=True)
        ]
        ready: list[list[Any]] = ray.get(answers, timeout=LIMIT_S)
        group = joining.result(timeout=LIMIT_S)
    names, shapes = list(weights), [list(tensor.shape) for tensor in weights.values()]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()]
    received = call("broadcast_parameter", GROUP, names, dtypes, shapes, False, [0])
    for tensor in weights.values():
        group.broadcast(tensor.to(device).contiguous())
    ray.get(received, timeout=LIMIT_S)
    ray.get(call("verify_model", bucket_stats(dict(weights))), timeout=LIMIT_S)
    ray.get(call("destroy_collective_group", GROUP), timeout=LIMIT_S)
    group.close()
    return ready
