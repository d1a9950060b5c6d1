"""Makes the builders beside the tests importable under `--import-mode=importlib`, and opens a pool for live tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def pool(ray_session: None, tmp_path: Path) -> Iterator[Any]:
    """An open pool of two slots; nothing of it is left afterwards."""
    # Most tests here need no Ray.
    from ray.util.placement_group import placement_group_table

    from nemo_rl.distributed.accelerator_slots import CPU
    from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool
    from nemo_rl.time_sharing.protocol.topology import Pool

    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    # A rank that failed is left alone for a second, not for minutes.
    actor = open_pool(Pool(1, 2), CPU, log_dir, replace(LIVE_LIMITS, quarantine_s=1.0))
    yield actor
    close_pool(actor)
    reserved = [group for group in placement_group_table().values() if group["name"].startswith("time_sharing_")]
    assert all(group["state"] == "REMOVED" for group in reserved)
