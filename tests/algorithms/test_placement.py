"""What is told of a run's training before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms import placement
from nemo_rl.algorithms.placement import tell_cpu_memory, tell_step_time
from nemo_rl.config import MasterConfig


@pytest.mark.parametrize(("gflops", "told"), [(1e-2, True), (1e9, False)])
def test_a_slow_step_is_told_before_it_starts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, gflops: float, told: bool
) -> None:
    monkeypatch.setattr(placement, "processor_flops_per_s", lambda: gflops * 1e9)
    policy = {"model_name": str(tiny_model), "train_global_batch_size": 48, "max_total_sequence_length": 96}
    config, said = MasterConfig(policy=policy), list[str]()
    tell_step_time(config, said.append, forward_passes=2)
    assert [("48 samples has 96 tokens" in line) for line in said] == [True] * told
    if told:
        seconds = float(said[0].split("about ")[1].split(" s ")[0].replace(",", ""))
        tell_step_time(config, said.append, forward_passes=1)
        # Training counts as three passes.
        fewer = float(said[1].split("about ")[1].split(" s ")[0].replace(",", ""))
        assert fewer / seconds == pytest.approx(4 / 5, abs=0.02)


@pytest.mark.parametrize(("free_gib", "told"), [(10, True), (100, False)])
def test_memory_of_processes_on_cpus_is_told_where_it_is_much_of_what_is_free(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, told: bool
) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda device: free_gib << 30)
    config = MasterConfig(policy={"model_name": str(tiny_model), "precision": "float32"})
    actors: Any = SimpleNamespace(workers=[object()])
    said = list[str]()
    tell_cpu_memory(config, actors, said.append, reference=True)
    parts = "a policy worker 0.6 GB", "an engine 3.6 GB", "this machine has", "10.7 GB of them free"
    assert [all(part in line for part in parts) for line in said] == [True] * told
