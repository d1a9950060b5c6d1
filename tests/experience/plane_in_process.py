"""A data plane without processes: rows in memory, actors called in place; and stages on a batch held here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.data_plane.client import StoredClient
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import data_plane_store
from nemo_rl.experience.store import TokenStage
from tests.data_plane.memory_storage import MemoryStorage


class Direct:
    """An actor's method, called here."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(method)})


def plane_in_process(monkeypatch: pytest.MonkeyPatch) -> StoredClient:
    """A client whose stores start no actor."""
    storage = MemoryStorage()
    monkeypatch.setattr(data_plane_store, "start_actor", lambda kind, *args: Direct(kind(*args)))
    monkeypatch.setattr(data_plane_store, "call", lambda answer, **_: answer)
    monkeypatch.setattr(data_plane_store, "stop_actor", lambda actor: None)
    return StoredClient(lambda: storage, poll_s=0.01)


class ApplyInProcess:
    """Runs stages on a batch held by this process: writes their columns into it and returns their rows."""

    def __init__(self, batch: BatchedDataDict[Any]) -> None:
        self.batch = batch

    def __call__(self, stage: TokenStage) -> dict[str, torch.Tensor]:
        output = stage(self.batch)
        self.batch.update(output.columns)
        return output.rows
