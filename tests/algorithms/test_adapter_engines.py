"""Versions of adapters in engines that are lost and rebuilt, with engines of the test's own; adapters that are refused
before engines start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.multi_lora import engines as module
from nemo_rl.algorithms.multi_lora.assembly import shared_parts
from nemo_rl.algorithms.multi_lora.engines import AdapterEngines
from nemo_rl.config.multi_lora import load_adapter, load_base
from nemo_rl.distributed.worker_groups import WorkerDiedError, WorkerError
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.progress import StartPhases
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import SyncFinished, SyncStarted

_INFO = AdapterInfo("base", 2, 4.0, ["q_proj"])


class Shards:
    """Shards that hold what they are sent, until one is lost or refuses."""

    def __init__(self) -> None:
        self.alive = [0, 1]
        self.holds: dict[int, dict[str, int]] = {0: {}, 1: {}}
        self.fails: WorkerError | None = None

    def enable_rebuilds(self) -> None: ...

    def rebuild_in_background(self, bring_back: Any) -> None: ...

    def close(self) -> None: ...

    def activate_healthy(self, shards: Any) -> None: ...

    def await_rebuild(self, rebuilds: bool) -> None: ...

    def healthy(self) -> list[int]:
        return list(self.alive)

    def call_healthy(self, method: str, shards: Any = None, **sent: Any) -> None:
        if self.fails is not None:
            raise self.fails
        for shard in self.alive if shards is None else [shard for shard in self.alive if shard in shards]:
            if method == "load_adapter":
                self.holds[shard][sent["name"]] = sent["version"]
            else:
                self.holds[shard].pop(sent["name"], None)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AdapterEngines, Shards]]:
    shards = Shards()
    monkeypatch.setattr(module.ray, "put", lambda value: value)
    generation: Any = SimpleNamespace(fleet=shards)
    policy: Any = SimpleNamespace(slot_factors=lambda slot: {"q.lora_A": torch.zeros(2, 3)})
    engines = AdapterEngines(generation, policy)
    yield engines, shards
    engines.close()


def test_a_version_that_meets_no_engine_is_sent_when_one_is_rebuilt(built: tuple[AdapterEngines, Shards]) -> None:
    engines, shards = built
    record = MemoryRecord()
    engines.bring_to("one", 0, _INFO, 0, record)
    shards.fails, shards.alive = WorkerDiedError("gone"), []
    engines.bring_to("one", 0, _INFO, 1, record)
    assert engines.version("one") == 1
    shards.fails, shards.alive = None, [1]
    engines.restore([1])
    assert shards.holds == {0: {"one": 0}, 1: {"one": 1}}
    started, finished = (entry.event for entry in record.entries)
    assert isinstance(started, SyncStarted) and isinstance(finished, SyncFinished)
    assert (started.version, started.targets, started.adapter) == (1, (1,), "one")
    engines.remove("one")
    engines.restore([1])
    assert len(record.entries) == 2, "an adapter that left is not written about"


def test_an_engine_that_refuses_an_adapter_is_said(built: tuple[AdapterEngines, Shards]) -> None:
    engines, shards = built
    shards.fails = WorkerError("does not fit")
    with pytest.raises(WorkerError, match="does not fit"):
        engines.bring_to("one", 0, _INFO, 0, MemoryRecord())


def test_layers_that_no_model_has_are_refused_by_file_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples" / "configs" / "multi_lora"
    base, raw = load_base(examples / "base.yaml", [f"policy.model_name={tiny_model}"])
    for every in (True, False):
        chosen = {"match_all_linear": every, "target_modules": ["q_projection"]}
        file = tmp_path / "wrong.yaml"
        file.write_text(json.dumps({"policy": {"dtensor_cfg": {"lora_cfg": chosen}}}))
        said = f"{file}: policy.dtensor_cfg.lora_cfg.target_modules: q_projection matches no linear layer"
        with (
            pytest.raises(UnsupportedModelError, match=re.escape(said)),
            shared_parts(base, StartPhases(), adapters=[load_adapter(raw, file)]),
        ):
            pass
