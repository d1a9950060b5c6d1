"""Turns `policy.generation` into what vLLM's asynchronous engine is started with.

Pure: keyword arguments and environment variables out of configuration. Knows nothing of actors. Invariant: what the
user put into `vllm_kwargs` wins over what is derived here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_rl.config import PolicyConfig

EXTENSION = "nemo_rl.models.generation.vllm.extension.VllmInternalWorkerExtension"


@dataclass(frozen=True)
class EngineSpec:
    """How one engine is started.

    Attributes:
        engine_kwargs: Keyword arguments of `AsyncEngineArgs`.
        env: Environment variables that must be set before vLLM is imported.
        cuda: Whether the engine runs on GPUs.
        sleep_level: Level at which the engine sleeps.
        max_model_len: Longest sequence in tokens.
        stats_interval_s: Seconds between readings of the engine's statistics; None reads none.
        cuts_to_room: Whether a request's limit is cut to the room left in `max_model_len`, or the request refused.
        seeds_requests: Whether each request is drawn from its own seed, or all from the engine's.
    """

    engine_kwargs: dict[str, object]
    env: dict[str, str] = field(default_factory=dict)
    cuda: bool = False
    sleep_level: int = 2
    max_model_len: int = 0
    cuts_to_room: bool = True
    seeds_requests: bool = True
    stats_interval_s: float | None = None

    def kwargs_of(self, shard: int) -> dict[str, object]:
        """Keyword arguments of one shard's engine: no two draw the same numbers."""
        seed = self.engine_kwargs.get("seed")
        return self.engine_kwargs | ({"seed": seed + shard} if isinstance(seed, int) else {})


def engine_spec(
    policy: PolicyConfig, *, cuda: bool, seed: int, sleeps: bool, refits: bool, cpu_slot_memory_gb: float, threads: int
) -> EngineSpec:
    """The start of one engine.

    Args:
        policy: The policy section; generation lives under it.
        cuda: Whether slots are GPUs.
        seed: Seed of the first engine; shard n takes `seed + n`.
        sleeps: Whether the engine must be able to sleep.
        refits: Whether training sends its weights, so that loading them from disk can be skipped.
        cpu_slot_memory_gb: Memory budget of a CPU slot; a quarter of it holds the KV cache.
        threads: CPU threads of one engine rank.
    """
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    kwargs: dict[str, object] = {
        "model": policy.model_name,
        "tokenizer": policy.tokenizer.name,
        "trust_remote_code": policy.trust_remote_code,
        "dtype": vllm.precision,
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
    if vllm.enable_prefix_caching is not None or not cuda:
        # Reused prefixes would make log-probabilities depend on the order of arrival on CPU, where runs are bit-equal.
        kwargs["enable_prefix_caching"] = bool(vllm.enable_prefix_caching)
    if cuda:
        kwargs |= {
            "enforce_eager": vllm.enforce_eager,
            "gpu_memory_utilization": vllm.gpu_memory_utilization,
            "enable_sleep_mode": sleeps,
        }
    else:
        # vLLM rewinds a seeded request's generator when it splits a prompt, which a CPU generator cannot do: prompts
        # stay whole.
        batched_tokens = max(vllm.max_model_len, 4096)
        kwargs |= {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": batched_tokens}
        kwargs["kv_cache_memory_bytes"] = int(cpu_slot_memory_gb * (1 << 30) / 4)
    if vllm.tensor_parallel_size * vllm.pipeline_parallel_size > 1:
        named = vllm.distributed_executor_backend
        kwargs["distributed_executor_backend"] = "mp" if named in (None, "ray") else named
        if cuda:
            # FlashInfer's fused all-reduce holds memory that sleep cannot free, and its workers can spin for ever at
            # their end.
            kwargs["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return EngineSpec(
        kwargs | dict(generation.vllm_kwargs),
        _environment(policy, cuda=cuda, threads=threads),
        cuda,
        vllm.sleep_level,
        vllm.max_model_len,
        vllm.cap_max_tokens_to_context,
        stats_interval_s=vllm.vllm_metrics_logger_interval if vllm.enable_vllm_metrics_logger else None,
        seeds_requests=not cuda if vllm.request_seeds is None else vllm.request_seeds,
    )


def _environment(policy: PolicyConfig, *, cuda: bool, threads: int) -> dict[str, str]:
    vllm = policy.generation.vllm_cfg
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_SKIP_P2P_CHECK": "1"}
    if not cuda:
        ranks = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(threads)
        if ranks == 1:
            # One engine process without a separate worker process: half the start time and memory.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env | vllm.env_vars
