"""Keys of `policy.*` but for generation and Megatron: the model, its batches, optimizer and DTensor (FSDP2)
parallelism.

Lengths and token budgets are in tokens. Which combinations are possible is decided in `training_rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from nemo_rl.config.automodel import AutomodelConfig, MoEParallelizerConfig
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.section import AbsentIsDefault, DefaultFrom, NotYet, Section

_TRAIN_TOKENS = "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
_LOGPROB_TOKENS = "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"

# With its owner or without.
_ID_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


def can_name_a_model(name: str) -> bool:
    """Whether a text can be a directory or an id on the hub: some recipes have words there that say what to fill in."""
    a_path = " " not in name and (name.startswith(("/", ".", "~")) or name.count("/") > 1)
    return bool(_ID_ON_THE_HUB.fullmatch(name)) or a_path or Path(name).expanduser().exists()


class TokenizerConfig(Section):
    """`policy.tokenizer`."""

    name: Annotated[str, DefaultFrom("${policy.model_name}")] = "Qwen/Qwen2.5-1.5B"
    """Hugging Face id or path of the tokenizer."""
    chat_template: Annotated[str | None, AbsentIsDefault()] = "default"
    """`default`: the model's own; null: contents are concatenated; a path ending in .jinja: that file; anything else:
    the template.
    """
    chat_template_kwargs: dict[str, object] | None = None
    """Variables for the chat template, e.g. enable_thinking; one that it does not read is refused."""
    use_fastokens: bool = Field(False, description="Tokenize with the fastokens package.")
    audio: Annotated[dict[str, object] | None, NotYet("vision-language and audio models")] = None
    """Audio processor options."""
    video: Annotated[dict[str, object] | None, NotYet("vision-language and audio models")] = None
    """Video processor options."""


class LoraConfig(Section):
    """`policy.dtensor_cfg.lora_cfg`."""

    enabled: bool = Field(False, description="Train low-rank adapters instead of the weights.")
    target_modules: list[str] = Field(default_factory=list)
    """Linear layers that get an adapter: whole names, last parts or patterns; read with match_all_linear: false."""
    exclude_modules: list[str] = Field(default_factory=list, description="Layers that get none, named the same way.")
    match_all_linear: bool = Field(True, description="Adapt every linear layer but the output projection.")
    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="Scale times rank: the product of the factors counts alpha / dim.")
    dropout: float = Field(0.0, ge=0, le=1, description="Dropout probability.")
    dropout_position: Literal["pre", "post"] = Field("post", description="Dropout before or after the adapter.")
    lora_A_init: Literal["xavier", "kaiming", "uniform"] = "xavier"
    """Initialisation of the first factor; the second is 0. kaiming and uniform are the same."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a refit sends: whole weights with adapters added, or the adapters alone, which the engines add to the
    weights of their own model files.
    """
    use_triton: bool = Field(True, description="Accepted for NeMo-RL's recipes: both values are torch's products here.")


class DTensorConfig(Section):
    """`policy.dtensor_cfg`: FSDP2 with DTensor parallelism; data parallel size is world / (tensor * context)."""

    enabled: bool = True
    """Train with this backend; exactly one of dtensor_cfg and megatron_cfg is enabled."""
    v2: bool = Field(True, alias="_v2")
    """Accepted for NeMo-RL's two workers; both values are the same worker here."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host between uses."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between tensor-parallel regions."""
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    tensor_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer.")
    context_parallel_size: PositiveInt = Field(1, description="Ranks that share each sequence.")
    custom_parallel_plan: str | None = None
    """Dotted path of a tensor-parallel plan (mapping, or function that returns one)."""
    torch_compile: bool | None = None
    """Compile decoder layers with torch.compile: a slower first step, faster ones after it. null compiles on GPUs whose
    ranks hold whole layers (no tensor, context or expert parallelism), without Liger. With router replay routers stay
    out, and null compiles nothing where layers are recomputed.
    """
    automodel_kwargs: AutomodelConfig = AutomodelConfig()
    """Options that NeMo-RL hands to NeMo-Automodel."""
    expert_parallel_size: PositiveInt = 1
    """Ranks among which each layer's experts are shared out; divides the ranks that share one copy of the parameters.
    """
    dp_replicate_size: PositiveInt = 1
    """HSDP: replicas of the sharded model within the data-parallel ranks."""
    defer_fsdp_grad_sync: bool = False
    """Reduce gradients once per optimizer step instead of per microbatch."""
    moe_parallelizer: MoEParallelizerConfig = MoEParallelizerConfig()
    """How layers with experts are sharded and recomputed."""
    env_vars: dict[str, str] = Field(default_factory=dict, description="Environment variables of the workers.")
    clear_cache_every_n_steps: PositiveInt | None = None
    """Empty the accelerator's cache every so many microbatches; null never."""
    lora_cfg: LoraConfig = Field(LoraConfig(), description="Low-rank adapters; the other weights stay as they are.")


OPTIMIZER_AMOUNTS = ("lr", "weight_decay", "eps", "momentum", "dampening", "alpha", "rho", "lr_decay")


class OptimizerConfig(Section):
    """`policy.optimizer`: a torch optimizer by dotted name."""

    name: str = Field("torch.optim.AdamW", description="Dotted name of the class.")
    kwargs: dict[str, Any] = Field({"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8})
    """Its keyword arguments besides the parameters."""

    @field_validator("kwargs")
    @classmethod
    def _amounts_are_numbers(cls, kwargs: dict[str, Any]) -> dict[str, object]:
        """Readers of YAML 1.1 that do not know `1e-8` for a number hand it on as text."""
        for name in OPTIMIZER_AMOUNTS:
            if isinstance(kwargs.get(name), str):
                with suppress(ValueError):
                    kwargs = kwargs | {name: float(kwargs[name])}
        return kwargs


class SchedulerConfig(Section):
    """One entry of `policy.scheduler`: a torch scheduler by dotted name, or the milestones at which the entries follow
    each other.
    """

    name: str | None = Field(None, description="Dotted name of the scheduler class.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments besides the optimizer.")
    milestones: list[NonNegativeInt] | None = None
    """RL steps at which the next scheduler takes over (SequentialLR)."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> SchedulerConfig:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("an entry is either {name, kwargs} or {milestones: [...]}")
        return self


def _as_list(value: object) -> object:
    return [value] if isinstance(value, (Mapping, SchedulerConfig)) else value


_DEFAULT_SCHEDULER = [
    SchedulerConfig(
        name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}
    ),
    SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 10_000_000_000}),
    SchedulerConfig(milestones=[50]),
]


class DynamicBatchingConfig(Section):
    """`policy.dynamic_batching`: microbatches of similar lengths under a token budget; excludes packing."""

    enabled: bool = Field(False, description="Form microbatches by token budget.")
    train_mb_tokens: Annotated[PositiveInt, DefaultFrom(_TRAIN_TOKENS)] = 2048
    """Padded tokens per training microbatch, at most."""
    logprob_mb_tokens: Annotated[PositiveInt, DefaultFrom(_LOGPROB_TOKENS)] = 2048
    """Padded tokens per log-probability microbatch."""
    sequence_length_round: PositiveInt = Field(64, description="Lengths are rounded up to a multiple of this.")


class SequencePackingConfig(Section):
    """`policy.sequence_packing`: several sequences in one row, with block-diagonal attention; excludes dynamic
    batching.
    """

    enabled: bool = Field(True, description="Pack sequences.")
    train_mb_tokens: Annotated[PositiveInt, DefaultFrom(_TRAIN_TOKENS)] = 2048
    """Tokens per packed training row, at most."""
    logprob_mb_tokens: Annotated[PositiveInt, DefaultFrom(_LOGPROB_TOKENS)] = 2048
    """Tokens per packed log-probability row."""
    algorithm: Annotated[
        Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"],
        BeforeValidator(lambda name: "modified_first_fit_decreasing" if name == "modified_ffd" else name),
    ] = "modified_first_fit_decreasing"
    """Bin-packing algorithm; modified_ffd is the default's short name."""
    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Order of the packed rows within a step."""
    sequence_length_round: PositiveInt = Field(64, description="On GPUs packed rows are padded to a multiple of this.")
    share_prompts: bool | None = None
    """Compute what the samples of a prompt begin with once per packed row instead of once per sample, in scoring and
    training; scores and gradients are the same up to rounding. null: on GPUs under DTensor without context parallelism.
    """


class DraftConfig(Section):
    """`policy.draft`: a draft model trained along (Eagle 3)."""

    enabled: bool = Field(False, description="Train a draft model beside the policy.")
    model_name: str | None = Field(None, description="Hugging Face id or path of the draft model.")
    loss_weight: float = Field(0.1, description="Weight of the draft loss.")
    num_layers: PositiveInt | None = Field(None, description="Layers of a new draft model.")
    aux_layer_indices: list[int] | None = None
    """Policy layers whose hidden states the draft model reads."""


class RewardModelConfig(Section):
    """`policy.reward_model_cfg`."""

    enabled: bool = Field(False, description="Give the model a reward head.")
    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """Kind of reward head."""


class RouterReplayConfig(Section):
    """`policy.router_replay`."""

    enabled: bool = False
    """Record which experts generation chose for every token, and choose the same ones when the policy scores and trains
    it; the reference chooses for itself.
    """
    compare_period: NonNegativeInt = 0
    """Every how many steps a further forward pass measures what `gen_kl_error` would be without replay; 0: never."""


class PolicyConfig(Section):
    """`policy.*`."""

    model_name: str = Field("Qwen/Qwen2.5-1.5B", description="Hugging Face id or path of the model.")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="The tokenizer.")
    train_global_batch_size: PositiveInt = Field(512, description="Samples per optimizer step.")
    train_micro_batch_size: PositiveInt = Field(4, description="Samples per microbatch and data-parallel rank.")
    logprob_batch_size: Annotated[PositiveInt, DefaultFrom("${policy.train_micro_batch_size}")] = 4
    """Samples per log-probability microbatch and data-parallel rank."""
    generation_batch_size: PositiveInt = Field(32, description="Accepted from older recipes; vLLM batches on its own.")
    max_total_sequence_length: PositiveInt = Field(512, description="Prompt and response together, in tokens, at most.")
    precision: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """Compute precision; weights and gradients are kept in float32."""
    logprob_chunk_size: PositiveInt | None = None
    """Tokens whose logits become log-probabilities at a time; null takes all."""
    offload_optimizer_for_logprob: bool = False
    """Move the optimizer state to the host during log-probability passes."""
    make_sequence_length_divisible_by: Annotated[
        PositiveInt, DefaultFrom("${policy.dtensor_cfg.tensor_parallel_size}")
    ] = 1
    """Rows are padded on the right to a multiple of this, and of what sequence and context parallelism need:
    tensor_parallel_size with sequence_parallel, 2 * context_parallel_size above 1.
    """
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm is clipped to this; null only measures it."""
    hf_config_overrides: dict[str, object] = Field(default_factory=dict)
    """Changes to the model's Hugging Face config, for training and generation alike."""
    trust_remote_code: bool = False
    """Let the model's or tokenizer's repository run its own Python code."""
    optimizer: OptimizerConfig | None = OptimizerConfig()
    """The optimizer; null with megatron_cfg, which has its own."""
    scheduler: Annotated[list[SchedulerConfig], BeforeValidator(_as_list)] | None = _DEFAULT_SCHEDULER
    """Learning-rate schedulers, stepped once per RL step; null keeps the rate constant."""
    refit_buffer_size_gb: float | None = Field(None, gt=0)
    """Staging memory of a refit, in GB; null takes weight_sync.bucket_bytes."""
    reward_model_cfg: Annotated[RewardModelConfig, NotYet("reward models")] = RewardModelConfig()
    """Reward model head."""
    quant_cfg: Annotated[str | dict[str, object] | None, NotYet("quantisation")] = None
    """Quantisation recipe (ModelOpt)."""
    quant_calib_data: Annotated[str | None, NotYet("quantisation", unless="quant_cfg")] = None
    """Calibration data of the quantisation."""
    quant_calib_size: Annotated[PositiveInt | None, NotYet("quantisation", unless="quant_cfg")] = None
    """Samples of calibration data."""
    quant_batch_size: Annotated[PositiveInt | None, NotYet("quantisation", unless="quant_cfg")] = None
    """Calibration batch size."""
    quant_sequence_length: Annotated[PositiveInt | None, NotYet("quantisation", unless="quant_cfg")] = None
    """Calibration sequence length."""
    is_vlm: Annotated[bool, NotYet("vision-language and audio models")] = False
    """The model reads images."""
    router_replay: RouterReplayConfig = Field(RouterReplayConfig(), description="Replay of expert routing (R3).")
    sampling_mask_replay: bool = False
    """Record which tokens top_p and top_k left to draw from at every position, and normalise the policy's probabilities
    over the same ones, rather than over those that its own logits would leave.
    """
    pretrained_checkpoint: Annotated[dict[str, object] | None, NotYet("Megatron checkpoints as a start")] = None
    """Megatron weights to start from."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Microbatches by token budget."""
    sequence_packing: SequencePackingConfig = Field(SequencePackingConfig(), description="Packed sequences.")
    draft: Annotated[DraftConfig, NotYet("draft models")] = Field(DraftConfig(), description="Draft model training.")
    dtensor_cfg: DTensorConfig = Field(DTensorConfig(), description="The FSDP2 and DTensor backend.")
    megatron_cfg: MegatronConfig = Field(MegatronConfig(), description="The Megatron-Core backend.")
    generation: GenerationConfig = Field(GenerationConfig(), description="How responses are generated.")
