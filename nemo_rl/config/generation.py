"""Keys of `policy.generation.*`: sampling, the vLLM engine and where it is placed.

Sampling values hold for training rollouts; the trainer applies the same filters to its own logits. Knows no engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from nemo_rl.config.section import DefaultFrom, NonEmptyStrings, NotYet, Section


def _all_tokens_is_null(value: object) -> object:
    # vLLM's own spelling of "no limit".
    return None if value in (-1, 0) and not isinstance(value, bool) else value


TopK = Annotated[PositiveInt | None, BeforeValidator(_all_tokens_is_null)]


class ColocatedResourcesConfig(Section):
    """`policy.generation.colocated.resources`: what generation takes for itself when it is not colocated."""

    gpus_per_node: PositiveInt | None = None
    """Accelerators per node for generation; on one node they are carved out of it."""
    num_nodes: PositiveInt | None = Field(None, description="Whole nodes for generation in a cluster of several.")


class ColocatedConfig(Section):
    """`policy.generation.colocated`."""

    enabled: bool = Field(True, description="Training and generation take turns on the same accelerators.")
    resources: ColocatedResourcesConfig = ColocatedResourcesConfig()
    """Generation's own accelerators when not colocated."""


class HttpServerConfig(Section):
    """`policy.generation.vllm_cfg.http_server`: the OpenAI-compatible server, if `expose_http_server` is on."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on; others than this machine's own need a token."""
    token_variable: str | None = None
    """Environment variable that holds the token which clients send as Authorization: Bearer; null asks for none."""
    deadline_s: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that a request may wait and run, while engines sleep, are refitted, fail or are lent; then the client
    gets 503 with Retry-After.
    """
    max_requests: PositiveInt = 1024
    """Responses that are made at once; a request of n responses counts n times, and more wait."""
    max_responses: PositiveInt = Field(1024, description="Responses that one request may ask for: its prompts times n.")
    max_body_bytes: PositiveInt = Field(16 << 20, description="Largest body of a request.")

    @property
    def is_local(self) -> bool:
        """Whether no other machine reaches the address."""
        return self.host in ("127.0.0.1", "localhost", "::1")


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`: the engine's options that this package reads itself."""

    async_engine: bool = False
    """Accepted from older recipes; no effect: every engine streams, and answers batches over the same stream."""
    precision: Annotated[
        Literal["float32", "float16", "bfloat16", "fp8"],
        DefaultFrom("${policy.precision}"),
    ] = "bfloat16"
    """Precision of the engine's weights. fp8 (GPUs alone): weights of linear layers and experts are quantised to
    float8_e4m3 as they arrive, at the start and at every refit, with a scale for each block of 128 x 128; activations
    with a scale for each token and 128 channels; everything else is in bfloat16.
    """
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3"], NotYet("fp8 KV cache")] = "auto"
    """Precision of the KV cache."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Log-probabilities after (processed) or before (raw) temperature and filters."""
    tensor_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer of one engine.")
    pipeline_parallel_size: PositiveInt = Field(1, description="Pipeline stages of one engine.")
    expert_parallel_size: PositiveInt = 1
    """Ranks that share the experts: 1, or tensor_parallel_size."""
    enable_expert_parallel: bool = False
    """vLLM's switch: the ranks of an engine share the experts; expert_parallel_size sets it too."""
    distributed_executor_backend: Annotated[
        Literal["mp", "uni", "ray", "external_launcher"] | None,
        NotYet("engines whose ranks another launcher starts", ("external_launcher",), "choose mp, or null"),
    ] = None
    """How vLLM starts the ranks of one engine: mp, each in a process beside the one that schedules, or uni, its only
    one in that process. null is mp on GPUs, and on CPU slots where there are several ranks. ray is taken as mp, whose
    ranks may lie on several nodes too.
    """
    engines_per_gpu: PositiveInt = 1
    """Engines of one rank each that share every accelerator (a GPU or a CPU slot) and what gpu_memory_utilization gives
    it, in equal parts. For small models and many requests, where an engine's own work for each request takes longer
    than its kernels. Each engine has weights and a prefix cache of its own, and what vllm_kwargs says of memory is of
    each.
    """
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Share of an accelerator's memory that its engines may use together."""
    max_model_len: Annotated[PositiveInt, DefaultFrom("${policy.max_total_sequence_length}")] = 512
    """Longest sequence, in tokens."""
    enforce_eager: bool = Field(False, description="Run without CUDA graphs.")
    use_tqdm: bool = True
    """Accepted from older recipes; no effect: a run has one progress display of its own."""
    use_deep_gemm: bool = False
    """Multiply fp8 weights with DeepGEMM's kernels, which an engine refuses where they do not run; otherwise with the
    best of the others.
    """
    num_first_layers_in_bf16: NonNegativeInt = Field(0, description="First layers left in bfloat16 with fp8.")
    num_last_layers_in_bf16: NonNegativeInt = Field(0, description="Last layers left in bfloat16 with fp8.")
    quantization_ignored_layer_kws: NonEmptyStrings = Field(default_factory=list)
    """Parts of names of layers that are left in bfloat16 with fp8, such as o_proj."""
    is_mx: bool = False
    """With fp8: one scale for every 32 weights of a row (MXFP8), for GPUs that multiply such blocks (Blackwell),
    instead of blocks of 128 x 128.
    """
    request_seeds: bool | None = None
    """Draw every response from a seed of its own, so that equal runs draw equal responses in whatever order they
    arrive. null: on CPU slots alone. On GPUs vLLM then draws for one request after the other, which makes every step of
    many requests longer; without it engines draw from seeds of their own.
    """
    enable_vllm_metrics_logger: bool = True
    """Log what engines say of their queues and KV cache as generation_metrics/."""
    vllm_metrics_logger_interval: float = Field(0.5, gt=0, description="Seconds between readings.")
    expose_http_server: bool = False
    """Serve an OpenAI-compatible API over the run's engines, for agents and other clients."""
    http_server: HttpServerConfig = Field(HttpServerConfig(), description="Where that server listens, and its limits.")
    http_server_serving_chat_kwargs: Annotated[dict[str, object], BeforeValidator(lambda given: given or {})] = Field(
        default_factory=dict
    )
    """Arguments of vLLM's OpenAIServingChat, such as enable_auto_tools, tool_parser, reasoning_parser."""
    tool_parser_plugin: str | None = Field(None, description="File that registers a tool parser with vLLM.")
    reasoning_parser_plugin: str | None = Field(None, description="File that registers a reasoning parser with vLLM.")
    enable_prefix_caching: bool | None = None
    """Reuse the KV of shared prefixes; null: on where the device is good at it."""
    skip_tokenizer_init: bool | None = None
    """Start the engine without a tokenizer, which then takes no stop strings or bad words; null is false."""
    load_format: str | None = None
    """How the engine loads weights; null: dummy when training refits it, auto otherwise."""
    cap_max_tokens_to_context: bool = True
    """Cut a request's new tokens to the room left in max_model_len instead of refusing it."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engine's processes."""
    video: Annotated[dict[str, object] | None, NotYet("vision-language and audio models")] = None
    """Video options."""
    reset_encoder_cache_after_weight_update: Annotated[bool, NotYet("vision-language and audio models")] = False
    """Drop the encoder cache after a refit."""
    zmq_refit_server_port: Annotated[int | None, NotYet("sparse refit")] = None
    """Port of the sparse refit server."""
    num_gpu_blocks_override: int | None = Field(None, ge=1)
    """Blocks of the KV cache, instead of as many as its memory holds."""
    asleep_growth_gib: float = Field(1.0, gt=0)
    """How much more than at its first sleep each rank of an engine may keep while it sleeps, in GiB: memory of its GPU,
    or of its process on a CPU slot. An engine beyond that is rebuilt before it serves again, and the record says so
    (engine_outgrown).
    """
    sleep_level: Literal[1, 2] = 2
    """Level at which a shard sleeps: 1 keeps the weights on the host, 2 drops them."""

    @property
    def dtype(self) -> str:
        """Precision that the engine computes in; products of fp8 weights are bfloat16."""
        return "bfloat16" if self.precision == "fp8" else self.precision


class RefitConfig(Section):
    """`policy.generation.refit_cfg`: options of the refit transports that are not the default."""

    nixl: dict[str, object] | None = Field(None, description="Options of the NIXL transport; no effect on the others.")
    sparse: dict[str, object] | None = None
    """Options of the sparse transports; no effect on the others."""


class McoreGenerationConfig(Section):
    """`policy.generation.mcore_generation_config`: options of Megatron's engine; further keys pass through to it."""

    model_config = ConfigDict(extra="allow")

    max_model_len: PositiveInt | None = Field(None, description="Longest sequence, in tokens.")
    buffer_size_gb: float = Field(10, description="KV buffer, in GB.")
    num_cuda_graphs: int = Field(4, description="CUDA graphs to capture.")
    block_size_tokens: PositiveInt = Field(256, description="Tokens per KV block.")
    max_tokens: PositiveInt = Field(16384, description="Tokens per forward pass.")
    enable_chunked_prefill: bool = Field(True, description="Prefill long prompts in chunks.")
    enable_prefix_caching: bool = Field(False, description="Reuse the KV of shared prefixes.")
    kv_cache_management_mode: str = Field("persist", description="What happens to the KV cache between rollouts.")
    refit_backend: str = Field("nccl", description="Transport of its refit.")
    expose_http_server: bool = Field(False, description="Serve an OpenAI-compatible API.")


class GenerationConfig(Section):
    """`policy.generation.*`."""

    backend: Annotated[
        Literal["vllm", "megatron", "sglang", "trtllm", "dynamo"], NotYet("generation backends other than vllm")
    ] = Field("vllm", description="The generation engine.")
    max_new_tokens: Annotated[PositiveInt, DefaultFrom("${policy.max_total_sequence_length}")] = 512
    """Tokens per response and turn, at most."""
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that holds this probability."""
    top_k: TopK = Field(None, description="Sample from the k likeliest tokens; null (or -1) from all.")
    val_temperature: Annotated[float, DefaultFrom("${policy.generation.temperature}")] = Field(1.0, ge=0)
    """Temperature of validation."""
    val_top_p: Annotated[float, DefaultFrom("${policy.generation.top_p}")] = Field(1.0, gt=0, le=1)
    """top_p of validation."""
    val_top_k: Annotated[TopK, DefaultFrom("${policy.generation.top_k}")] = None
    """top_k of validation."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response, and no others; null takes every end-of-sequence id of the tokenizer and of the
    model's generation_config.json and config.json.
    """
    stop_strings: NonEmptyStrings | None = Field(None, description="Strings that end a response; they stay in it.")
    bad_words: NonEmptyStrings | None = Field(None, description="Strings that are never generated.")
    refit_transport: Annotated[str | None, NotYet("refit transports other than the default")] = None
    """null, nccl_reshard, vllm_zmq_sparse, vllm_s3_sparse, nixl, or module:Class."""
    refit_cfg: RefitConfig = Field(RefitConfig(), description="Options of the other refit transports.")
    colocated: ColocatedConfig = ColocatedConfig()
    """Whether training and generation share accelerators."""
    port_range_low: int = Field(3000, ge=1, le=65535)
    """First port to try for the HTTP server (vllm_cfg.expose_http_server)."""
    port_range_high: int = Field(4999, ge=1, le=65535)
    """Last port to try for the HTTP server (vllm_cfg.expose_http_server)."""
    use_async_rollouts: Annotated[bool | None, NotYet("SGLang")] = None
    """Asynchronous rollouts of SGLang."""
    mcore_generation_config: McoreGenerationConfig = McoreGenerationConfig()
    """Options of Megatron's engine; read by backend megatron only."""
    real_quant_export_cpu_offload: Annotated[bool, NotYet("quantisation")] = True
    """Export quantised weights through the host."""
    router: Literal["least_outstanding_tokens", "round_robin"] = "least_outstanding_tokens"
    """How requests are dealt to engines."""
    on_preempt: Literal["continue", "redo_turn"] = "continue"
    """A request whose engine is taken away keeps its tokens, or redoes its turn."""
    vllm_cfg: VllmConfig = Field(VllmConfig(), description="Options of the vLLM engine.")
    vllm_kwargs: dict[str, object] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, passed as they are; what has a key of its own is set there, and what it does
    not know is refused. Without max_num_seqs and max_num_batched_tokens vLLM chooses them for offline inference (1,024
    and 16,384 on an H100).
    """
