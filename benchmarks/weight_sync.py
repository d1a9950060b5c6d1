"""Seconds per phase of taking one shard away and giving it back with the cache's weights, and the pause of shards that
serve.

    python benchmarks/weight_sync.py --shape 7b [--cycles 20] [--tp 1] [--engines 1] [--transport auto|host|nccl]
    [--share] [--work DIR]

Random weights of a Qwen2.5 shape. `--engines` shards of `--tp` accelerators each sleep, wake their weights, are synced
from the cache, wake their KV caches and are routed, all at the same time, again and again; then they take new weights
while requests run. `--transport nccl` needs one GPU more, for the owner of the cache; with `--share` the owner sits on
the first shard's first GPU, which it reaches by CUDA IPC, and the others over the group. Figures are medians; the rate
that counts is the pinned host-to-device rate that was measured into as many GPUs at the same time as there are shards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import make_config  # noqa: E402

from nemo_rl.models.dtensor.export import on_disk, remember_disk_names  # noqa: E402
from nemo_rl.models.policy.model_config import empty_model  # noqa: E402
from nemo_rl.weight_sync.cache import BucketCache, CacheBuilder, CacheManifest  # noqa: E402
from nemo_rl.weight_sync.layout import TensorMeta  # noqa: E402

_BLOCK = 16 << 20


def metas_of(model: Path, dtype: str) -> list[TensorMeta]:
    """Names and shapes of a model's weights as a policy sends them, experts one by one; without weights."""
    from transformers import AutoConfig

    skeleton = empty_model(AutoConfig.from_pretrained(model))
    remember_disk_names(skeleton)
    shapes = [(name, torch.empty(weight.shape, device="meta")) for name, weight in skeleton.named_parameters()]
    parts = [part for name, shape in shapes for part in on_disk(skeleton, name, shape).items()]
    return [TensorMeta(name, tuple(part.shape), dtype) for name, part in parts]


def random_weights(metas: list[TensorMeta], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Small random weights; one random block is used again and again, for drawing billions of numbers takes minutes."""
    draw = torch.Generator().manual_seed(version)
    block = (0.02 * torch.randn(_BLOCK, generator=draw)).to(getattr(torch, metas[0].dtype))
    for meta in metas:
        count = meta.nbytes // block.element_size()
        repeated = block if count <= _BLOCK else block.repeat(-(-count // _BLOCK))
        yield meta.name, repeated[:count].view(meta.shape)


class CacheOwner:
    """A rank that owns the cache and can push it; a Ray actor where bytes travel over NCCL."""

    def __init__(self, model: str, dtype: str, bucket_bytes: int) -> None:
        self._metas = metas_of(Path(model), dtype)
        self._builder = CacheBuilder(bucket_bytes, torch.device("cpu"))
        self._sender: Any = None
        self._groups: Any = None

    def build(self, version: int, served: str | None) -> CacheManifest:
        """Packs a version beside the buffer that is served."""
        return self._builder.build(version, self._metas, random_weights(self._metas, version), served=served)

    def device(self) -> str:
        """Identity of this rank's device."""
        from nemo_rl.distributed.devices import device_of_process, device_uuid

        return device_uuid(device_of_process())

    def begin_cached_export(self, spec: Any, manifest: CacheManifest) -> None:
        """Opens a session that pushes."""
        from nemo_rl.distributed.devices import device_of_process
        from nemo_rl.weight_sync.cache import CACHE_OWNER
        from nemo_rl.weight_sync.sender import WeightSender
        from nemo_rl.weight_sync.transports import KeptGroup

        self._groups = self._groups or KeptGroup()
        weights, device = iter(manifest.weights()), device_of_process()
        self._sender = WeightSender(spec, weights, device, source=CACHE_OWNER, groups=self._groups)

    def kept_group(self) -> str | None:
        """Id of the group that this rank holds for the next session."""
        return self._groups.group_id if self._groups is not None else None

    def export_window(self, index: int) -> Any:
        """Packs a window on the device."""
        return self._sender.export_window(index)

    def send_window(self, index: int) -> None:
        """Broadcasts a window."""
        self._sender.send_window(index)

    def close_export(self, failed: bool) -> None:
        """Ends the session."""
        if self._sender is not None:
            self._sender.close(failed=failed)
            self._sender = None


class RemoteOwner:
    """The owner actor, to which the cache's sessions turn where bytes are pushed."""

    def __init__(self, actor: Any, cluster: Any) -> None:
        import ray

        self._actor, self._cluster, self._get = actor, cluster, ray.get
        self._device = ray.get(actor.device.remote(), timeout=300.0)

    def devices(self) -> list[str]:
        return [self._device]

    def rendezvous(self) -> tuple[str, int]:
        return self._cluster.get_master_address_and_port()

    def on_first(self, method: str, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(**kwargs), timeout=timeout_s)


def pinned_rate(gpus: int) -> float:
    """Bytes per second from pinned host memory into so many GPUs at the same time, in total; 0 without GPUs."""
    if not torch.cuda.is_available():
        return 0.0
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    devices = [torch.empty_like(host, device=f"cuda:{gpu}") for gpu in range(gpus)]
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        for device in devices:
            device.copy_(host, non_blocking=True)
        for gpu in range(gpus):
            torch.cuda.synchronize(gpu)
        rates.append(gpus * host.numel() / (time.perf_counter() - started))
    del devices
    torch.cuda.empty_cache()
    return statistics.median(rates)


def config_of(args: argparse.Namespace, model: Path, cuda: bool) -> Any:
    """The configuration of the engines."""
    from nemo_rl.config import load_master_config

    overrides = [
        f"policy.model_name={model}",
        f"policy.precision={'bfloat16' if cuda else 'float32'}",
        "policy.max_total_sequence_length=1024",
        "policy.generation.max_new_tokens=512",
        "policy.generation.vllm_cfg.max_model_len=1024",
        f"policy.generation.vllm_cfg.tensor_parallel_size={args.tp}",
        f"policy.generation.vllm_cfg.gpu_memory_utilization={args.gpu_memory}",
        "policy.generation.vllm_kwargs.max_num_seqs=256",
        f"cluster.gpus_per_node={args.tp * args.engines}",
        f"cluster.cpu_slots={max(4, args.tp * args.engines)}",
    ]
    if cuda:
        overrides += ["cluster.device=cuda", "~policy.generation.vllm_kwargs.kv_cache_memory_bytes"]
    return load_master_config(ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml", overrides)


def cycle(engines: Any, elastic: Any, ranks: list[int]) -> dict[str, float]:
    """One sleep and wake of these ranks; seconds per phase."""
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    report = engines.sleep_partial(ranks)
    mark()
    engines.wake_up_partial(ranks, skip_activate=True, tags=["weights"])
    mark()
    sync = elastic.sync_selected_workers(ranks)
    mark()
    engines.wake_up_partial(ranks, skip_activate=True, tags=["kv_cache"])
    mark()
    engines.activate_dp_ranks(ranks)
    mark()
    names = ("sleep_s", "wake_weights_s", "sync_s", "wake_kv_s", "route_s")
    seconds = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
    inside = {f"sync_{phase}_s": value for phase, value in sync.seconds.items() if phase != "total"}
    asleep = report[0]["after"] if report else 0
    return (
        seconds
        | inside
        | {
            "total_s": marks[-1] - marks[0],
            "asleep_gib": asleep / (1 << 30),
            "sync_gb_per_s": len(ranks) * sync.nbytes / 1e9 / seconds["sync_s"],
        }
    )


def timed_cycle(number: int, engines: Any, elastic: Any, ranks: list[int]) -> dict[str, float]:
    """One cycle, told as it ends: a session that hangs is seen where it hangs."""
    seconds = cycle(engines, elastic, ranks)
    print(f"cycle {number}: {seconds['total_s']:.3f} s, of which sync {seconds['sync_s']:.3f} s", flush=True)
    return seconds


def serving(engines: Any, elastic: Any, refreshes: int) -> dict[str, float]:
    """Refreshes below running requests; quantiles of the pause, and how many tokens were drawn meanwhile."""
    from nemo_rl.models.generation.interfaces import GenerationRequest

    stop = threading.Event()
    drawn = [0]

    async def load(lane: int) -> None:
        number = 0
        while not stop.is_set():
            request = GenerationRequest(
                f"{lane}-{number}", [65 + lane % 26] * 64, 256, engines.default_sampling(), seed=number
            )
            drawn[0] += len((await engines.generate_one(request)).token_ids)
            number += 1

    async def all_lanes() -> None:
        await asyncio.gather(*(load(lane) for lane in range(64)))

    thread = threading.Thread(target=lambda: asyncio.run(all_lanes()))
    thread.start()
    time.sleep(2.0)
    seconds = []
    for _ in range(refreshes):
        started = time.perf_counter()
        elastic.refresh()
        seconds.append(time.perf_counter() - started)
        time.sleep(0.5)
    stop.set()
    thread.join(timeout=120.0)
    return {"refresh_s": statistics.median(seconds), **elastic.pause_metrics(), "tokens_meanwhile": float(drawn[0])}


def main() -> None:
    """Runs the cycles and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--refreshes", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1, help="shards that are synced at the same time")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--share", action="store_true", help="the owner of the cache sits on the shard's first GPU")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--gpu-memory", type=float, default=0.35)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", default="/tmp/nemo_rl_bench")
    args = parser.parse_args()

    from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray

    rate = pinned_rate(args.engines)
    accelerator = init_ray(device=args.device, cpu_slots=max(4, args.tp * args.engines))
    try:
        measure(args, rate, accelerator.is_cuda)
    finally:
        shutdown_ray()


def measure(args: argparse.Namespace, rate: float, cuda: bool) -> None:
    """Everything on a started Ray."""
    import ray

    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.generation.elastic import ElasticGeneration
    from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.weight_sync.sync_session import SyncOptions

    model = make_config(args.shape, Path(args.work))
    config = config_of(args, model, cuda)
    dtype = "bfloat16" if cuda else "float32"
    bucket_bytes = args.bucket_mib << 20
    groups = 2 if args.share else 1
    gpus = args.tp * args.engines
    ranks = list(range(args.engines))
    cluster = RayVirtualCluster(
        [gpus], use_gpus=cuda, max_colocated_worker_groups=groups, num_gpus_per_node=gpus, name="shard"
    )
    began = time.perf_counter()
    engines = VllmGeneration(
        start_engine_actors(cluster, config.policy, config.cluster, seed=1, colocated=False, sleeps=True),
        pad_token_id=256,
        stop_token_ids=[],
    )
    owner: Any = None
    if args.transport == "nccl":
        own = cluster if args.share else RayVirtualCluster([1], use_gpus=cuda, num_gpus_per_node=1, name="owner")
        slot = own.slots()[0]
        environment = {
            "CUDA_VISIBLE_DEVICES": str(slot.device_index),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        }
        actor = ray.remote(CacheOwner).options(
            num_cpus=0,
            num_gpus=0.4,
            scheduling_strategy=own.strategy_for(slot.node_rank, slot.bundle_index),
            runtime_env={"env_vars": environment},
        )
        owner = actor.remote(str(model), dtype, bucket_bytes)
        cache = BucketCache(
            lambda version, served: ray.get(owner.build.remote(version, served), timeout=600.0),
            owner=RemoteOwner(owner, own),
        )
    else:
        local = CacheOwner(str(model), dtype, bucket_bytes)
        cache = BucketCache(local.build)
    engines.wait_until_started()
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    cache.build(1)
    build_s = time.perf_counter() - began
    options = SyncOptions(args.transport, bucket_bytes, args.verify, 300.0)
    elastic = ElasticGeneration(engines, cache, options)
    try:
        first, *runs = (timed_cycle(number, engines, elastic, ranks) for number in range(args.cycles + 1))
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        grown = runs[-1]["asleep_gib"] - runs[0]["asleep_gib"]
        refreshed = elastic.refresh().sync
        pauses = serving(engines, elastic, args.refreshes) if args.refreshes else {}
    finally:
        engines.shutdown()
    gib = sum(meta.nbytes for meta in cache.manifest().metas) / (1 << 30)
    print(
        f"\nshape {args.shape} ({gib:.2f} GiB), tp {args.tp}, {args.engines} engines, transport "
        f"{refreshed.transport if refreshed else 'none'}, {args.cycles} cycles"
    )
    print(f"engine up in {start_s:.0f} s, cache built in {build_s:.1f} s")
    print(f"{'phase':22s} {'first':>9s} {'median':>9s} {'worst':>9s}")
    for name in median:
        print(f"{name:22s} {first[name]:9.4f} {median[name]:9.4f} {max(run[name] for run in runs):9.4f}")
    for name, value in pauses.items():
        print(f"{name:22s} {value:29.4f}")
    print(f"memory asleep grew by {grown * 1024:.1f} MiB over {args.cycles} cycles")
    share = median["sync_gb_per_s"] * 1e9 / rate if rate else 0.0
    print(
        f"all engines together {median['sync_gb_per_s']:.1f} GB/s, pinned rate {rate / 1e9:.1f} GB/s; sync / pinned "
        f"rate: {share:.2f}; sleep + wake + sync: {median['total_s']:.3f} s"
    )
    print(
        "RESULT "
        + json.dumps(
            {
                "first": first,
                "median": median,
                "grown_gib": grown,
                "pinned_gb_per_s": rate / 1e9,
                "share": share,
                **pauses,
            }
        )
    )


if __name__ == "__main__":
    main()
