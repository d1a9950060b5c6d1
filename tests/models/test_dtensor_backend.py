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
    model: Any = torch.nn.Linear(1, 1)
    model.drop_gathered = lambda: None
    backend: Any = DTensorBackend.__new__(DTensorBackend)
    backend.scorer, backend.groups = model, SimpleNamespace(device=torch.device("cpu"))
    backend._clear_every, backend._microbatches = every, 0
    backend._loss = lambda data, loss_fn: (model.weight.sum(), None)
    row = {"input_ids": torch.zeros((1, 2)), "input_lengths": torch.tensor([2])}
    for _ in range(5):
        done.append(backend.forward_backward([row], None, idle=0))
    assert cleared == cleared_after
