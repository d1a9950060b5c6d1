"""One rank of a step that several GPUs share, each rank on a GPU of its own."""

from __future__ import annotations

import os
from typing import Any

from tests.models.policy_ranks import one_step


def step_of_rank(model: str, device: str, overrides: list[str]) -> dict[str, Any]:
    """This rank's `one_step`; with `device` cuda on the visible GPU of its number."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(world)))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[rank]
    return one_step(model, world, [f"cluster.device={device}", *overrides])
