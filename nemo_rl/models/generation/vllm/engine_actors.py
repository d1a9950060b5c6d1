"""The actors of engines, one per data-parallel shard, started before their engines; and the start parameters of their
engines.

They take seconds to import vLLM and need nothing but the configuration for it, so they are started as early as the
slots are known. Keyword arguments and environment variables follow from `policy.generation` alone. Invariants: until
`VllmGeneration` starts their engines they touch no accelerator; what the user put into `vllm_kwargs` wins over what is
derived here.

Where an engine's ranks lie on several nodes, vLLM schedules on the first, in the shard's own actor. On each further
node an actor starts vLLM's executor without an engine; its ranks join those of the first node. Invariants: all nodes of
an engine hold equally many ranks, numbered node by node; if a rank, an actor or a node is lost, all of them end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import psutil
import ray
from ray.exceptions import RayError

from nemo_rl.config import ClusterConfig, ConfigError, GenerationConfig, PolicyConfig
from nemo_rl.config.errors import first_line
from nemo_rl.config.generation import VllmConfig
from nemo_rl.config.generation_rules import fp8_needs_gpus
from nemo_rl.config.layers import merge_mappings
from nemo_rl.config.nsight_variables import ENGINES, Profile
from nemo_rl.distributed.virtual_cluster import MEETING_S, AcceleratorSlot, RayVirtualCluster, cores_per_slot
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.decisions import Recording, recording_of
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.generation.vllm.engine_processes import (
    EngineSpec,
    MemoryShare,
    engine_config,
    forked_engine,
    import_engine,
    last_errors,
    measures_nothing,
    set_environment,
    temporary_files_in,
)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_POLL_S = 1.0


@dataclass(frozen=True)
class Rendezvous:
    """Meeting address of an engine's ranks, and the actors on its further nodes, in their order."""

    address: str
    port: int
    further: tuple[ActorHandle[object], ...]

    def arguments(self, node: int) -> dict[str, object]:
        """Keyword arguments of `AsyncEngineArgs` on a node of the engine; 0 is the first."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": 1 + len(self.further),
            "node_rank": node,
            "master_addr": self.address,
            "master_port": self.port,
        }


class EngineNodeWorker:
    """The ranks of an engine on one of its further nodes. `spec`: how the engine is started."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    def prepare(self) -> None:
        """Imports what an engine needs and touches no accelerator."""
        set_environment(self._spec.env)
        import_engine(self._spec.kwargs_of(0))

    def run(self, shard: int, arguments: dict[str, object]) -> None:
        """Starts the ranks and raises GenerationError when one of them has ended. `arguments`: of `Rendezvous`."""
        self.prepare()
        announce_address()
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        arguments = self._spec.kwargs_on_device(shard) | arguments
        with temporary_files_in(os.environ["VLLM_RPC_BASE_PATH"]), forked_engine():
            config = engine_config(arguments, headless=True)
            executor = MultiprocExecutor(config, monitor_workers=False)
        executor.start_worker_monitor(inline=True)
        said = last_errors()
        raise GenerationError(f"a rank of shard {shard} ended{f': {said}' if said else ' without a message'}")


class FurtherRanks:
    """An engine's ranks on its further nodes, as its first node sees them: started here, and watched. Once some of them
    are lost, the processes of this node are ended as well.
    """

    def __init__(self, rendezvous: Rendezvous, shard: int) -> None:
        self.lost: str | None = None  # why ranks of a further node are gone
        self._further = rendezvous.further
        self._shard = shard
        self._closed = threading.Event()
        announce_address()
        running: list[ObjectRef[object]] = [
            actor.run.remote(shard, rendezvous.arguments(node)) for node, actor in enumerate(rendezvous.further, 1)
        ]
        threading.Thread(target=self._watch, args=(running,), name="ranks on further nodes", daemon=True).start()

    def _watch(self, running: list[ObjectRef[object]]) -> None:
        ended: list[ObjectRef[object]] = []
        while not ended and not self._closed.is_set():
            ended, _ = ray.wait(running, num_returns=1, timeout=_POLL_S)
        if self._closed.is_set():
            return
        try:
            ray.get(ended[0])
        except RayError as error:
            self.lost = first_line(error.cause if hasattr(error, "cause") else error)
        logger.error("shard=%d further_node=lost reason=%s", self._shard, self.lost)
        # What is left waits in a collective for the lost ranks; vLLM sees a dead rank of its own node at once. Ranks
        # that are only now started would wait as well.
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._closed.wait(_POLL_S):
                return

    def close(self) -> None:
        """Ends the ranks."""
        self._closed.set()
        for actor in self._further:
            ray.kill(actor)


class EngineNodes:
    """The actors on the further nodes of all engines.

    Args:
        group: One per further node, those of a shard side by side.
        first_nodes: Node of the cluster on which each shard's own actor is.
    """

    def __init__(self, group: RayWorkerGroup, first_nodes: Sequence[int]) -> None:
        self._group, self._first_nodes = group, first_nodes
        self._per_engine = group.world_size // len(first_nodes)

    def _of(self, shard: int) -> range:
        return range(shard * self._per_engine, (shard + 1) * self._per_engine)

    def rendezvous(self, shard: int) -> Rendezvous:
        """A place where the ranks of a shard have not met lately."""
        cluster, node = self._group.cluster, self._first_nodes[shard]
        (port,) = cluster.free_ports(1, node_rank=node, hold_s=MEETING_S)
        address = next(slot.node_ip for slot in cluster.slots() if slot.node_rank == node)
        return Rendezvous(address, port, tuple(self._group.workers[rank] for rank in self._of(shard)))

    def restart(self, shard: int) -> None:
        """Starts the actors of a shard in the place of those that were there before."""
        for rank in self._of(shard):
            self._group.start_worker(rank)

    def end(self, shard: int) -> None:
        """Ends the actors of a shard and with them their ranks."""
        for rank in self._of(shard):
            ray.kill(self._group.workers[rank])

    def shutdown(self) -> None:
        """Ends all of them."""
        self._group.shutdown()


def announce_address() -> None:
    """Makes the processes of this node known to the others by the address that Ray uses for it."""
    os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()


DEEP_GEMM_VARIABLE = "VLLM_USE_DEEP_GEMM"
EXTENSION = "nemo_rl.models.generation.vllm.extension.VllmInternalWorkerExtension"
_GIB = 1 << 30
_CPU_ENGINE_BYTES = int(2.5e9)
_ACTIVATION_BYTES = 3 * _GIB
_LEAST_REQUESTS = 16
_WEIGHTS_OVERHEAD = 1.1
_WORKER = "nemo_rl.models.generation.vllm.worker.VllmGenerationWorker"
_FURTHER = "nemo_rl.models.generation.vllm.engine_actors.EngineNodeWorker"


def engine_spec(
    policy: PolicyConfig,
    *,
    cuda: bool,
    seed: int,
    sleeps: bool,
    refits: bool,
    cpu_slot_memory_gb: float,
    threads: int,
    slot_bytes: int | None = None,
    beside: bool = False,
    recording: Recording | None = None,
) -> EngineSpec:
    """The start parameters of one engine.

    Args:
        policy: The policy section.
        seed: Seed of the first engine; shard n takes `seed + n`.
        sleeps: Whether the engine must be able to sleep.
        refits: Whether training sends its weights, so that loading them from disk can be skipped.
        cpu_slot_memory_gb: Memory budget of a CPU slot; a quarter of it holds the KV caches of its engines.
        threads: CPU threads of one engine rank.
        slot_bytes: Device memory for the engine beside other jobs; None for `gpu_memory_utilization` of the device.
        beside: Whether training starts on the device at the same time.
        recording: Decisions of the engine to record.

    Raises ConfigError: the weights alone do not fit into the slot, or the engine cannot quantise there.
    """
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    shares = beside or vllm.engines_per_gpu > 1
    kwargs: dict[str, object] = {
        "model": policy.model_name,
        "tokenizer": policy.tokenizer.name,
        "trust_remote_code": policy.trust_remote_code,
        "dtype": vllm.dtype,
        "kv_cache_dtype": vllm.kv_cache_dtype,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "pipeline_parallel_size": vllm.pipeline_parallel_size,
        "enable_expert_parallel": vllm.enable_expert_parallel or vllm.expert_parallel_size > 1,
        "max_model_len": vllm.max_model_len,
        "load_format": vllm.load_format or ("dummy" if refits else "auto"),
        # Prompts and environments may bring stop strings of their own, which the engine finds by detokenizing.
        "skip_tokenizer_init": bool(vllm.skip_tokenizer_init),
        "logprobs_mode": vllm.logprobs_mode,
        "seed": seed,
        "worker_extension_cls": EXTENSION,
        "hf_overrides": dict(policy.hf_config_overrides),
        "disable_log_stats": not vllm.enable_vllm_metrics_logger,
        "generation_config": "vllm",
    }
    kwargs |= _gpu_arguments(policy, sleeps, slot_bytes) if cuda else _cpu_arguments(vllm, cpu_slot_memory_gb)
    if vllm.precision == "fp8":
        kwargs |= quantization_arguments(policy, cuda=cuda)
    if vllm.num_gpu_blocks_override is not None:
        kwargs["num_gpu_blocks_override"] = vllm.num_gpu_blocks_override
    if recording is not None and recording.layers and cuda:
        # vLLM records routes itself.
        kwargs["enable_return_routed_experts"] = True
    executor = _executor(vllm, cuda=cuda)
    if executor is not None:
        kwargs["distributed_executor_backend"] = executor
    return EngineSpec(
        merge_mappings(kwargs, generation.vllm_kwargs),
        _environment(policy, cuda=cuda, threads=threads),
        cuda,
        vllm.sleep_level,
        vllm.max_model_len,
        vllm.cap_max_tokens_to_context,
        stats_interval_s=vllm.vllm_metrics_logger_interval if vllm.enable_vllm_metrics_logger else None,
        seeds_requests=not cuda if vllm.request_seeds is None else vllm.request_seeds,
        engines_per_device=vllm.engines_per_gpu,
        has_neighbours=slot_bytes is not None,
        recording=recording,
        engine_records_routes=cuda,
        memory_share=_memory_share(policy) if cuda and slot_bytes is None and shares else None,
    )


def _memory_share(policy: PolicyConfig) -> MemoryShare | None:
    """An engine's part of its device, as `gpu_memory_utilization` says; None where the user sizes the cache."""
    vllm = policy.generation.vllm_cfg
    if "kv_cache_memory_bytes" in policy.generation.vllm_kwargs or vllm.num_gpu_blocks_override is not None:
        return None
    return MemoryShare(vllm.gpu_memory_utilization / vllm.engines_per_gpu, _beside_cache_bytes(policy))


def _beside_cache_bytes(policy: PolicyConfig) -> int:
    """Bytes that a rank of an engine takes besides its KV cache."""
    vllm = policy.generation.vllm_cfg
    weights = weight_bytes(policy) / (vllm.tensor_parallel_size * vllm.pipeline_parallel_size)
    return int(weights * _WEIGHTS_OVERHEAD) + _ACTIVATION_BYTES


def _gpu_arguments(policy: PolicyConfig, sleeps: bool, slot_bytes: int | None) -> dict[str, object]:
    vllm = policy.generation.vllm_cfg
    kwargs: dict[str, object] = {
        "enforce_eager": vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization / vllm.engines_per_gpu,
        "enable_sleep_mode": sleeps,
    }
    if vllm.enable_prefix_caching is not None:
        kwargs["enable_prefix_caching"] = vllm.enable_prefix_caching
    if slot_bytes is not None:
        kwargs |= measures_nothing(_kv_cache_bytes(policy, slot_bytes))
    if vllm.tensor_parallel_size * vllm.pipeline_parallel_size > 1:
        # FlashInfer's fused all-reduce holds memory that sleep cannot free, and its workers can spin for ever at their
        # end.
        kwargs["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return kwargs


def _cpu_arguments(vllm: VllmConfig, slot_memory_gb: float) -> dict[str, object]:
    return {
        "enforce_eager": True,
        # Reused prefixes would make log-probabilities depend on the order of arrival, and runs are bit-equal here.
        "enable_prefix_caching": bool(vllm.enable_prefix_caching),
        # vLLM rewinds a seeded request's generator when it splits a prompt, which a CPU generator cannot do: prompts
        # stay whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(vllm.max_model_len, 4096),
        "kv_cache_memory_bytes": int(slot_memory_gb * (1 << 30) / 4 / vllm.engines_per_gpu),
    }


def cpu_engine_bytes(policy: PolicyConfig, slot_memory_gb: float) -> int:
    """Host memory of an engine of one rank on CPU slots and of the actor beside it, as measured with SmolLM2 135M."""
    cache = policy.generation.vllm_kwargs.get("kv_cache_memory_bytes")
    if not isinstance(cache, int):
        cache = int(slot_memory_gb * (1 << 30) / 4 / policy.generation.vllm_cfg.engines_per_gpu)
    return weight_bytes(policy) + cache + _CPU_ENGINE_BYTES


def quantization_arguments(policy: PolicyConfig, *, cuda: bool) -> dict[str, object]:
    """Arguments with which vLLM quantises weights in bfloat16 as they arrive. Raises ConfigError: on CPU slots."""
    from nemo_rl.models.policy.model_config import model_config

    vllm = policy.generation.vllm_cfg
    if not cuda:
        raise ConfigError([fp8_needs_gpus("generation.vllm_cfg", "there is no GPU here")])
    ignored = [rf"re:.*{re.escape(part)}.*" for part in vllm.quantization_ignored_layer_kws]
    first, last = vllm.num_first_layers_in_bf16, vllm.num_last_layers_in_bf16
    if first or last:
        layers = model_config(policy).get_text_config().num_hidden_layers
        plain = "|".join(str(layer) for layer in range(layers) if layer < first or layer >= layers - last)
        ignored.append(rf"re:.*\.layers\.(?:{plain})\..*")
    blocks = "mxfp8" if vllm.is_mx else "fp8_per_block"
    return {
        "quantization": "online",
        "quantization_config": {"linear": blocks, "moe": blocks, "ignore": ignored},
    }


def _kv_cache_bytes(policy: PolicyConfig, slot_bytes: int) -> int:
    """Bytes of a slot that remain for the KV cache of one rank. Raises ConfigError: none remain."""
    vllm = policy.generation.vllm_cfg
    weights = weight_bytes(policy) / (vllm.tensor_parallel_size * vllm.pipeline_parallel_size)
    left = slot_bytes - _beside_cache_bytes(policy)
    if left <= 0:
        raise ConfigError(
            [
                f"policy.model_name: {policy.model_name} has {weights / _GIB:.1f} GiB of weights on each GPU, and a "
                f"slot has {slot_bytes / _GIB:.1f} GiB, of which an engine needs {_ACTIVATION_BYTES / _GIB:.0f} GiB "
                "for activations and CUDA graphs; make the pool with fewer --slots-per-gpu, or give the job "
                "whole_gpus: true"
            ]
        )
    return left


def least_slot_bytes(policy: PolicyConfig) -> int:
    """Device memory that one rank of an engine takes at least: weights, activations, and the KV cache of some requests
    of full length.
    """
    from nemo_rl.models.policy.model_config import model_config
    from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture

    vllm, width = policy.generation.vllm_cfg, _element_size(policy)
    try:
        shape = TransformerShape.from_hf_config(model_config(policy))
        cache = 2 * shape.layers * shape.key_value_width * width * vllm.max_model_len * _LEAST_REQUESTS
    except UnknownArchitecture:
        cache = 0
    ranks = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    return int((weight_bytes(policy) * _WEIGHTS_OVERHEAD + cache) / ranks) + _ACTIVATION_BYTES


def weight_bytes(policy: PolicyConfig) -> int:
    """Bytes of the model's weights as the engine holds them, from its configuration alone. An fp8 engine quantises
    neither embeddings nor the layers that are left in bfloat16.
    """
    from nemo_rl.models.policy.model_config import model_config

    parameters, vllm = parameters_of(policy), policy.generation.vllm_cfg
    if vllm.precision != "fp8":
        return parameters * _element_size(policy)
    config = model_config(policy).get_text_config()
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    layers = config.num_hidden_layers
    plain = min(vllm.num_first_layers_in_bf16 + vllm.num_last_layers_in_bf16, layers) / layers
    return parameters + embeddings + int((parameters - embeddings) * plain)


def parameters_of(policy: PolicyConfig) -> int:
    """Number of the model's parameters, from its configuration alone."""
    return _parameters(policy.model_name, policy.trust_remote_code, json.dumps(dict(policy.hf_config_overrides)))


@lru_cache
def _parameters(name: str, trusted: bool, overrides: str) -> int:
    from nemo_rl.models.policy.model_config import empty_model, model_config

    named = PolicyConfig(model_name=name, trust_remote_code=trusted, hf_config_overrides=json.loads(overrides))
    model = empty_model(model_config(named), trust_remote_code=trusted)
    # A head that is the embedding counts once.
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _element_size(policy: PolicyConfig) -> int:
    import torch

    return torch.tensor([], dtype=getattr(torch, policy.generation.vllm_cfg.precision, torch.bfloat16)).element_size()


def _executor(vllm: VllmConfig, *, cuda: bool) -> str | None:
    """Executor backend that starts an engine's ranks; None leaves the choice to vLLM."""
    named = vllm.distributed_executor_backend
    if named is not None:
        return "mp" if named == "ray" else named
    # Scheduling takes Python as long as kernels of a small model take a GPU: in one process each waits for the other.
    return "mp" if cuda or vllm.tensor_parallel_size * vllm.pipeline_parallel_size > 1 else None


def _environment(policy: PolicyConfig, *, cuda: bool, threads: int) -> dict[str, str]:
    vllm = policy.generation.vllm_cfg
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_SKIP_P2P_CHECK": "1"}
    if vllm.precision == "fp8":
        env[DEEP_GEMM_VARIABLE] = str(int(vllm.use_deep_gemm))
    if not cuda:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(threads)
        # Engines are eager here. What vLLM compiles all the same, the rank of a sampled token, costs the first batch
        # seconds and saves none.
        env["TORCHDYNAMO_DISABLE"] = "1"
        if _executor(vllm, cuda=cuda) in (None, "uni"):
            # One engine process without a separate worker process: half the start time and memory.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env | vllm.env_vars


@dataclass(frozen=True)
class EngineActors:
    """Actors of which `VllmGeneration` is made. `lent`: whether a scheduler lends the slots shard by shard: engines are
    then built one by one (`fleet.build`), and nothing is routed at first.
    """

    cfg: GenerationConfig
    group: RayWorkerGroup
    colocated: bool  # whether the slots are shared with training, so that engines must sleep
    lent: bool
    nodes: EngineNodes | None = None  # the actors on further nodes, where engines lie on several
    sized: bool = False  # whether engines take a known share of their device, so that others may start on it meanwhile

    def shutdown(self) -> None:
        """Ends all actors."""
        self.group.shutdown()
        if self.nodes is not None:
            self.nodes.shutdown()


def start_engine_actors(
    cluster: RayVirtualCluster,
    policy: PolicyConfig,
    cluster_cfg: ClusterConfig,
    *,
    seed: int,
    colocated: bool,
    refits: bool = True,
    sleeps: bool | None = None,
    lent: bool = False,
    name_prefix: str = ENGINES,
    profile: Profile | None = None,
    worker: str = _WORKER,
) -> EngineActors:
    """Starts the actors on the slots of a cluster; they import what an engine needs.

    Args:
        cluster: Slots; tensor x pipeline parallel size of them form one shard, inside one node or on several whole
            ones, or each of them holds `engines_per_gpu` shards.
        policy: The policy section, generation below it.
        cluster_cfg: Accelerator budget of CPU slots.
        seed: Base seed of the engines.
        colocated: Whether the slots are shared with training.
        refits: Whether training sends its weights.
        sleeps: Whether engines must be able to sleep; by default where slots are shared or lent.
        lent: Whether a scheduler lends the slots.
        profile: Which shards start under Nsight Systems; none by default.
        worker: Dotted name of the actors' class.
    """
    vllm = policy.generation.vllm_cfg
    tied = engine_slots(cluster.slots(), vllm.tensor_parallel_size * vllm.pipeline_parallel_size)
    spec = engine_spec(
        policy,
        cuda=cluster.accelerator.is_cuda,
        seed=seed,
        sleeps=colocated or lent if sleeps is None else sleeps,
        refits=refits,
        cpu_slot_memory_gb=cluster_cfg.cpu_slot_memory_gb,
        threads=cores_per_slot(cluster.world_size() // cluster.node_count() * vllm.engines_per_gpu),
        slot_bytes=cluster.slot_bytes,
        beside=colocated,
        recording=recording_of(policy),
    )
    nodes = _start_further_nodes(cluster, spec, tied, f"{name_prefix}_nodes")
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(worker, spec, policy.generation.bad_words),
        name_prefix=name_prefix,
        bundle_indices_list=[slots[0] for slots in tied for _ in range(vllm.engines_per_gpu)],
        env_vars=spec.env,
        max_concurrency=4096,
        profile=profile,
    )
    group.run_all_workers_single_data("prepare")
    return EngineActors(policy.generation, group, colocated, lent, nodes, spec.sized)


def _start_further_nodes(
    cluster: RayVirtualCluster, spec: EngineSpec, tied: list[list[tuple[int, list[int]]]], name: str
) -> EngineNodes | None:
    further = [slots for engine in tied for slots in engine[1:]]
    if not further:
        return None
    if not spec.cuda and len(further[0][1]) > 1:
        raise ConfigError(
            [
                f"policy.generation.vllm_cfg: an engine would have {len(further[0][1])} ranks on each of several "
                "nodes, and on CPU slots vLLM takes one rank of a node for such an engine; set cluster.gpus_per_node "
                "to 1, or let the engine fit into a node"
            ]
        )
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(_FURTHER, spec),
        name_prefix=name,
        bundle_indices_list=further,
        env_vars=spec.env,
    )
    group.run_all_workers_single_data("prepare")
    return EngineNodes(group, [engine[0][0] for engine in tied])


def engine_slots(slots: Sequence[AcceleratorSlot], width: int) -> list[list[tuple[int, list[int]]]]:
    """The slots of each engine as (node, bundles), node by node: `width` neighbours inside one node, or all slots of
    several nodes. Raises ConfigError: engines of this width do not fill the nodes.
    """
    by_node: dict[int, list[int]] = {}
    for slot in slots:
        by_node.setdefault(slot.node_rank, []).append(slot.bundle_index)
    counts = {len(bundles) for bundles in by_node.values()}
    if all(count % width == 0 for count in counts):
        return [
            [(node, bundles[start : start + width])]
            for node, bundles in by_node.items()
            for start in range(0, len(bundles), width)
        ]
    per_engine = width // min(counts)
    if len(counts) > 1 or width % min(counts) or len(by_node) % per_engine:
        raise ConfigError(
            [
                f"policy.generation.vllm_cfg: tensor x pipeline parallel size {width} neither divides the "
                f"{' or '.join(map(str, sorted(counts)))} slots of a node nor is all slots of some of the "
                f"{len(by_node)} nodes"
            ]
        )
    whole = list(by_node.items())
    return [whole[start : start + per_engine] for start in range(0, len(whole), per_engine)]
