"""What an engine is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config import load_master_config
from nemo_rl.models.generation.vllm.engine_actors import engine_spec

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


@pytest.mark.parametrize(
    ("ranks", "named", "started"),
    [(1, "null", None), (2, "null", "mp"), (2, "mp", "mp"), (2, "ray", "mp"), (2, "uni", "uni")],
)
def test_the_ranks_of_an_engine_are_processes_of_its_node(ranks: int, named: str, started: str | None) -> None:
    vllm = "policy.generation.vllm_cfg"
    overrides = [f"{vllm}.tensor_parallel_size={ranks}", f"{vllm}.distributed_executor_backend={named}"]
    policy = load_master_config(CONFIG, [*overrides, "cluster.gpus_per_node=2"]).policy
    spec = engine_spec(policy, cuda=False, seed=0, sleeps=True, refits=True, cpu_slot_memory_gb=1.0, threads=1)
    assert spec.engine_kwargs.get("distributed_executor_backend") == started
