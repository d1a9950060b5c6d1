"""What an engine is started with."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config import ConfigError, load_master_config
from nemo_rl.distributed.virtual_cluster import AcceleratorSlot
from nemo_rl.models.generation.decisions import Recording
from nemo_rl.models.generation.vllm.engine_actors import (
    Rendezvous,
    engine_slots,
    engine_spec,
    parameters_of,
    weight_bytes,
)

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


@pytest.mark.parametrize(
    ("cuda", "ranks", "named", "started"),
    [
        (False, 1, "null", None),
        (False, 1, "mp", "mp"),
        (False, 2, "null", "mp"),
        (False, 2, "mp", "mp"),
        (False, 2, "ray", "mp"),
        (False, 2, "uni", "uni"),
        (True, 1, "null", "mp"),
        (True, 1, "ray", "mp"),
        (True, 1, "uni", "uni"),
        (True, 2, "null", "mp"),
    ],
)
def test_the_ranks_of_an_engine_are_processes_of_its_node(
    cuda: bool, ranks: int, named: str, started: str | None
) -> None:
    vllm = "policy.generation.vllm_cfg"
    overrides = [f"{vllm}.tensor_parallel_size={ranks}", f"{vllm}.distributed_executor_backend={named}"]
    policy = load_master_config(CONFIG, [*overrides, "cluster.gpus_per_node=2"]).policy
    spec = engine_spec(policy, cuda=cuda, seed=0, sleeps=True, refits=True, cpu_slot_memory_gb=1.0, threads=1)
    assert spec.engine_kwargs.get("distributed_executor_backend") == started
    # vLLM makes mp of uni on CPUs, unless it is told that there is no other process.
    one_process = spec.env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    assert one_process == (not cuda and started in (None, "uni"))
    assert (spec.env.get("TORCHDYNAMO_DISABLE") == "1") == (not cuda)  # engines on CPUs are eager


def test_options_within_an_argument_are_added_to_what_is_set_for_it() -> None:
    keys = ["policy.generation.vllm_cfg.tensor_parallel_size=2", "cluster.gpus_per_node=2"]
    config = "{compilation_config: {backend: eager, pass_config: {fuse_norm_quant: true}}}"
    policy = load_master_config(CONFIG, [*keys, f"policy.generation.vllm_kwargs={config}"]).policy
    spec = engine_spec(policy, cuda=True, seed=0, sleeps=True, refits=True, cpu_slot_memory_gb=1.0, threads=1)
    passes = {"fuse_allreduce_rms": False, "fuse_norm_quant": True}
    assert spec.engine_kwargs["compilation_config"] == {"backend": "eager", "pass_config": passes}


def test_engines_on_gpus_record_routes_themselves() -> None:
    policy, routes = load_master_config(CONFIG).policy, Recording(layers=(0, 2), experts=4, per_token=2)
    rest: dict[str, Any] = {"seed": 0, "sleeps": True, "refits": True, "cpu_slot_memory_gb": 1.0, "threads": 1}
    for cuda, recording in [(True, routes), (False, routes), (True, Recording(masks=True)), (True, None)]:
        spec = engine_spec(policy, cuda=cuda, recording=recording, **rest)
        asked = spec.engine_kwargs.get("enable_return_routed_experts", False)
        assert asked == (cuda and recording is routes)


@pytest.mark.parametrize("engines", [1, 3])
def test_engines_of_a_device_share_its_memory_and_its_turns(tiny_model: Path, engines: int) -> None:
    vllm, model = "policy.generation.vllm_cfg", f"policy.model_name={tiny_model}"
    keys = [f"{vllm}.engines_per_gpu={engines}", f"{vllm}.gpu_memory_utilization=0.6", model]
    policy = load_master_config(CONFIG, [*keys, "~policy.generation.vllm_kwargs.kv_cache_memory_bytes"]).policy
    rest = {"seed": 0, "sleeps": True, "refits": True, "cpu_slot_memory_gb": 6.0, "threads": 1}
    on_gpu, on_cpu = (engine_spec(policy, cuda=cuda, **rest) for cuda in (True, False))
    assert on_gpu.engine_kwargs["gpu_memory_utilization"] == pytest.approx(0.6 / engines)
    assert on_gpu.sized == (engines > 1) and on_cpu.memory_share is None
    assert on_cpu.engine_kwargs["kv_cache_memory_bytes"] == (6 << 30) // 4 // engines
    devices = [on_gpu.shared_device(shard) for shard in range(6)]
    assert len(set(devices)) == (1 if engines == 1 else 2)
    if engines > 1:
        assert devices[:3] == [devices[0]] * 3 and None not in devices
        assert devices[0] != on_cpu.shared_device(0)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_engines_that_start_beside_others_know_their_cache_before(tiny_model: Path, engines: int) -> None:
    vllm, model = "policy.generation.vllm_cfg", f"policy.model_name={tiny_model}"
    keys = [f"{vllm}.engines_per_gpu={engines}", f"{vllm}.gpu_memory_utilization=0.6", model]
    policy = load_master_config(CONFIG, [*keys, "~policy.generation.vllm_kwargs.kv_cache_memory_bytes"]).policy
    rest: dict[str, Any] = {"cuda": True, "seed": 0, "sleeps": True, "refits": True, "cpu_slot_memory_gb": 6.0}
    share = engine_spec(policy, beside=True, threads=1, **rest).memory_share
    assert share is not None
    caches = [share.cache_bytes(device << 30) for device in (80, 140)]
    assert caches[1] - caches[0] == pytest.approx(0.6 * (60 << 30) / engines, abs=8)
    assert 0 < caches[0] < 0.6 * (80 << 30) / engines - weight_bytes(policy) - (2 << 30)
    sized = load_master_config(CONFIG, keys).policy  # this file sets `kv_cache_memory_bytes`
    assert engine_spec(sized, beside=True, threads=1, **rest).memory_share is None
    assert engine_spec(sized, beside=True, threads=1, **rest).sized
    assert engine_spec(policy, slot_bytes=20 << 30, beside=True, threads=1, **rest).memory_share is None


@pytest.mark.parametrize(("wanted", "on_cpu", "on_gpus"), [("null", True, False), ("true", True, True)])
def test_requests_have_seeds_of_their_own_or_engines_have(wanted: str, on_cpu: bool, on_gpus: bool) -> None:
    policy = load_master_config(CONFIG, [f"policy.generation.vllm_cfg.request_seeds={wanted}"]).policy
    rest = {"seed": 7, "sleeps": True, "refits": True, "cpu_slot_memory_gb": 1.0, "threads": 1}
    for cuda, seeds in ((False, on_cpu), (True, on_gpus)):
        spec = engine_spec(policy, cuda=cuda, **rest)
        assert spec.seeds_requests == seeds
        assert [spec.kwargs_of(shard)["seed"] for shard in range(3)] == [7, 8, 9]


def _slots(*per_node: int) -> list[AcceleratorSlot]:
    places = [(node, index) for node, count in enumerate(per_node) for index in range(count)]
    return [AcceleratorSlot(node, index, f"n{node}", f"10.0.0.{node}", index) for node, index in places]


@pytest.mark.parametrize(
    ("per_node", "width", "engines"),
    [
        ((2, 2), 1, [[(0, [0])], [(0, [1])], [(1, [0])], [(1, [1])]]),
        ((2, 4), 2, [[(0, [0, 1])], [(1, [0, 1])], [(1, [2, 3])]]),
        ((2, 2), 4, [[(0, [0, 1]), (1, [0, 1])]]),
        ((1, 1, 1, 1), 2, [[(0, [0]), (1, [0])], [(2, [0]), (3, [0])]]),
    ],
)
def test_an_engine_takes_neighbours_of_a_node_or_whole_nodes(
    per_node: tuple[int, ...], width: int, engines: list[list[tuple[int, list[int]]]]
) -> None:
    assert engine_slots(_slots(*per_node), width) == engines


@pytest.mark.parametrize(("per_node", "width"), [((2, 2), 3), ((2, 2, 2), 4), ((2, 4), 6), ((3,), 2)])
def test_an_engine_that_would_take_part_of_a_node_is_refused(per_node: tuple[int, ...], width: int) -> None:
    with pytest.raises(ConfigError, match=f"parallel size {width} neither divides the"):
        engine_slots(_slots(*per_node), width)


def test_the_nodes_of_an_engine_meet_at_the_first_one() -> None:
    rendezvous = Rendezvous("10.0.0.1", 20000, further=(None, None))  # type: ignore[arg-type]
    first, *further = (rendezvous.arguments(node) for node in range(3))
    assert [first["node_rank"], *(node["node_rank"] for node in further)] == [0, 1, 2]
    assert all(first | {"node_rank": None} == node | {"node_rank": None} for node in further)
    assert (first["nnodes"], first["master_addr"], first["master_port"]) == (3, "10.0.0.1", 20000)


def test_fp8_engines_quantise_what_arrives_except_what_is_named(tiny_model: Path) -> None:
    vllm = {"precision": "fp8", "num_first_layers_in_bf16": 1, "quantization_ignored_layer_kws": ["a.b"]}
    keys = [f"policy.model_name={tiny_model}", "cluster.device=cuda", "loss_fn.use_importance_sampling_correction=true"]
    keys += [f"++policy.generation.vllm_cfg.{key}={value}" for key, value in vllm.items()]
    rest = {"seed": 0, "sleeps": True, "refits": True, "cpu_slot_memory_gb": 1.0, "threads": 1}
    policy = load_master_config(CONFIG, keys).policy
    spec = engine_spec(policy, cuda=True, **rest)
    assert (spec.engine_kwargs["dtype"], spec.engine_kwargs["quantization"]) == ("bfloat16", "online")
    blocks = spec.engine_kwargs["quantization_config"]
    assert blocks["linear"] == blocks["moe"] == "fp8_per_block"
    name, first = (re.compile(pattern.removeprefix("re:")) for pattern in blocks["ignore"])
    assert name.match("model.layers.1.a.b") and not name.match("model.layers.1.a_b")
    assert first.match("model.layers.0.mlp.down_proj")
    assert not first.match("model.layers.1.mlp.down_proj") and not first.match("model.layers.10.mlp.down_proj")
    assert spec.env["VLLM_USE_DEEP_GEMM"] == "0"
    # Everything but embeddings and the layers left out takes a byte.
    plain = load_master_config(CONFIG, [*keys[:3], "policy.generation.vllm_cfg.precision=bfloat16"]).policy
    parameters = parameters_of(plain)
    assert parameters < weight_bytes(policy) < weight_bytes(plain) == parameters * 2
    mx = load_master_config(CONFIG, [*keys, "++policy.generation.vllm_cfg.is_mx=true"]).policy
    assert engine_spec(mx, cuda=True, **rest).engine_kwargs["quantization_config"]["linear"] == "mxfp8"
    with pytest.raises(ConfigError, match="fp8: engines quantise to fp8 on GPUs alone, and there is no GPU here"):
        engine_spec(policy, cuda=False, **rest)


def test_a_head_that_is_the_embedding_counts_once(tiny_model: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny_model / "model.safetensors", "pt") as stored:
        names = stored.keys()
        sizes = {name: math.prod(stored.get_slice(name).get_shape()) for name in names}
    assert "lm_head.weight" not in sizes
    policy = load_master_config(CONFIG, [f"policy.model_name={tiny_model}"]).policy
    assert parameters_of(policy) == sum(sizes.values())
