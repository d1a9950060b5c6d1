"""Gates 2, 2.5 and memory: an engine and a policy over two accelerators that take turns there, and keep their weights.

    python -m tests.gpu.gate_engine FOLDER DEVICE BACKEND

DEVICE is `cuda` or `cpu`, BACKEND `dtensor` or `megatron`; the policy is tensor parallel, and so is the engine. Prints
what was measured; an assertion ends it where a gate is not passed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from nemo_rl.distributed.devices import process_memory
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.policy.weights import PolicyWeightCache
from nemo_rl.weight_sync.cache import CacheManifest
from nemo_rl.weight_sync.sync_session import SyncOptions
from tests.gpu.conftest import save_model
from tests.gpu.hashed_engine import hashing_engines, held_by_a_rank, sha256
from tests.models.engines import Colocated, colocated
from tests.models.policy_ranks import MEGATRON

CYCLES, RANKS = 3, 2
# What groups held comes back, of training state what was resident, and two bfloat16 implementations of one model agree.
GROUPS, STATE, AGREE = 0.7, 0.9, {"cuda": 1.05, "cpu": 1.001}
_VLLM = "policy.generation.vllm_cfg"
_BASE = (f"{_VLLM}.tensor_parallel_size={RANKS}", "policy.sequence_packing.enabled=false", "weight_sync.verify=true")
_BACKENDS = {
    "dtensor": (f"policy.dtensor_cfg.tensor_parallel_size={RANKS}",),
    "megatron": (*MEGATRON, f"policy.megatron_cfg.tensor_model_parallel_size={RANKS}"),
}
_ON_GPUS = (
    "cluster.device=cuda",
    "policy.precision=bfloat16",
    f"{_VLLM}.enforce_eager=true",
    f"{_VLLM}.gpu_memory_utilization=0.3",
    "policy.generation.vllm_kwargs.kv_cache_memory_bytes=2147483648",
)


def check_engine(engine: Colocated, manifest: CacheManifest, version: int, device: str) -> None:
    """Asserts that the engine holds the cache's weights, bit for bit, and draws with them."""
    weights = {name: tensor.clone() for name, tensor in manifest.weights()}
    (worker,) = engine.generation.group.workers
    arrived = ray.get(worker.rlix_model_update_rpc.remote("nrl_arrived"), timeout=120)
    assert arrived == [{name: sha256(tensor) for name, tensor in weights.items()}] * RANKS
    wanted = [held_by_a_rank(weights, rank, RANKS) for rank in range(RANKS)]
    rows = {name: count for _, of in wanted for name, count in of.items()}
    held = ray.get(worker.rlix_model_update_rpc.remote("nrl_held", rows), timeout=120)
    for (hashes, _), of_rank in zip(wanted, held, strict=True):
        # vLLM repacks what it multiplies by on a CPU.
        read = [name for name in of_rank if device == "cuda" or not name.endswith("_proj.weight")]
        assert read and {name: of_rank[name] for name in read} == {name: hashes.get(name) for name in read}
    requests = engine.requests(8)
    results = engine.run(requests)
    assert {span.version for result in results for span in result.spans} == {version}
    assert engine.disagreement(requests, results) <= AGREE[device]


def take_turns(engine: Colocated, device: str) -> None:
    """Train, cache, drop groups, wake, sync, rebuild, as a pool does, several times."""
    policy, generation = engine.policy, engine.generation
    options = SyncOptions(bucket_bytes=1 << 20, verify=True, timeout_s=150.0, keep_group=False)
    cache = PolicyWeightCache(policy, bucket_bytes=options.bucket_bytes, may_stage=False)
    elastic = ElasticGeneration(generation, cache, options, record=engine.record)

    def free() -> int:
        return policy.get_free_memory_bytes()

    def state() -> int:
        workers = policy.worker_group.workers
        used = ray.get([worker.__ray_call__.remote(process_memory) for worker in workers], timeout=120)
        return max(of.device or 0 for of in used)

    freed, left, states = [], [], []
    elastic.shrink([0])
    for version in range(1, CYCLES + 1):
        policy.prepare_for_training()
        engine.train_step()
        manifest = cache.build(version)
        trained = {name: sha256(tensor) for name, tensor in manifest.weights()}
        states.append(state())
        resident = free()
        policy.offload_to_cpu()
        offloaded = free()
        policy.destroy_nccl_groups()
        dropped = free()
        if device == "cuda":
            freed.append((offloaded - resident, dropped - offloaded))
            left.append(dropped)
        elastic.expand([0])
        check_engine(engine, manifest, version, device)
        elastic.shrink([0])
        # Groups are built again and the state comes back: the same bits, packed once more.
        policy.prepare_for_training()
        again = cache.build(version)
        assert {name: sha256(tensor) for name, tensor in again.weights()} == trained
    if device != "cuda":
        sys.stdout.write(f"gates 2, 2.5 and memory: {CYCLES} cycles, SHA-256 equal; no memory measured\n")
        return
    mib = 1 << 20
    shares = [of_state / of for (of_state, _), of in zip(freed, states, strict=True)]
    assert min(shares) >= STATE, (freed, states)
    # Every cycle gives back what the first one did, and no less is free at its end.
    groups = [of_groups for _, of_groups in freed]
    assert groups[0] > 0 and min(groups) >= GROUPS * groups[0], groups
    assert min(left) >= left[0] - 64 * mib, left
    sys.stdout.write(
        f"gates 2, 2.5 and memory: {CYCLES} cycles, SHA-256 equal; of {max(states) / mib:.0f} MiB of training state "
        f"{min(shares):.0%} came back, of {groups[0] / mib:.0f} MiB of groups {min(groups) / groups[0]:.0%}\n"
    )


def main(folder: Path, device: str, backend: str) -> None:
    """Runs the three gates with one policy and one engine."""
    shape = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4} if device == "cuda" else {}
    save_model(folder / "model", **shape)
    init_ray(device=device, cpu_slots=RANKS)
    try:
        overrides = [*_BASE, *_BACKENDS[backend], *(_ON_GPUS if device == "cuda" else ())]
        with hashing_engines(), colocated(folder / "model", RANKS, *overrides, cuda=device == "cuda") as engine:
            take_turns(engine, device)
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
