"""What one rank's backend does between microbatches; ranks together are in `test_splits`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.models.dtensor.dtensor_backend import DTensorBackend


@pytest.mark.parametrize(("every", "cleared_after"), [(2, [2, 4]), (3, [3]), (None, [])])
def test_cached_memory_goes_back_every_so_many_microbatches(
    every: int | None, cleared_after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    cleared: list[int] = []
    monkeypatch.setattr(
        "nemo_rl.models.dtensor.dtensor_backend.release_cached_memory", lambda device: cleared.append(len(done) + 1)
    )
    alone = SimpleNamespace(size=lambda: 1)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), gradient_mesh=alone)
    model: Any = torch.nn.Linear(1, 1)
    model.drop_gathered = lambda: None
    backend: Any = DTensorBackend(model, mesh, SimpleNamespace(), None, SimpleNamespace(), clear_cache_every=every)
    backend._loss = lambda data, loss_fn: (model.weight.sum(), None)
    row = {"input_ids": torch.zeros((1, 2)), "input_lengths": torch.tensor([2])}
    for _ in range(5):
        done.append(backend.forward_backward([row], None, idle=0))
    assert cleared == cleared_after
