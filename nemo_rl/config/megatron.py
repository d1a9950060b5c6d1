"""Keys of `policy.megatron_cfg.*`: the Megatron-Core backend, under the names of its own options.

Inert unless `enabled`: what the backend does not honour is refused by name only then. Names and defaults are those a
NeMo-RL recipe carries, so that every recipe loads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from nemo_rl.config.section import DefaultFrom, NotYet, Section


class MegatronOptimizerConfig(Section):
    """`policy.megatron_cfg.optimizer`."""

    optimizer: Annotated[
        Literal["adam", "sgd", "muon", "dist_muon"],
        NotYet("Megatron's Muon optimizer", ("muon", "dist_muon"), "choose adam or sgd"),
    ] = Field("adam", description="Kind of optimizer.")
    lr: float = Field(5.0e-6, description="Learning rate.")
    min_lr: float = Field(5.0e-7, description="Lowest learning rate of the decay.")
    weight_decay: float = Field(0.01, description="Weight decay.")
    bf16: bool = Field(True, description="Accepted for recipes; parameters follow policy.precision.")
    fp16: bool = Field(False, description="Accepted for recipes; parameters follow policy.precision.")
    params_dtype: str = Field("float32", description="Accepted for recipes; master parameters are float32.")
    adam_beta1: float = Field(0.9, description="First moment's decay.")
    adam_beta2: float = Field(0.999, description="Second moment's decay.")
    adam_eps: float = Field(1.0e-8, description="Adam's epsilon.")
    sgd_momentum: float = Field(0.9, description="Momentum of sgd.")
    use_distributed_optimizer: bool = Field(True, description="Shard the optimizer state over data-parallel ranks.")
    use_precision_aware_optimizer: bool = Field(True, description="Accepted for recipes; optimizer state is float32.")
    clip_grad: Annotated[float | None, DefaultFrom("${policy.max_grad_norm}")] = 1.0
    """Accepted for recipes; policy.max_grad_norm is what clips."""
    optimizer_cpu_offload: bool = Field(False, description="Keep optimizer state on the host.")
    optimizer_offload_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the optimizer state kept on the host."""


class MegatronSchedulerConfig(Section):
    """`policy.megatron_cfg.scheduler`."""

    start_weight_decay: Annotated[float, DefaultFrom("${policy.megatron_cfg.optimizer.weight_decay}")] = 0.01
    """Weight decay at first."""
    end_weight_decay: Annotated[float, DefaultFrom("${policy.megatron_cfg.optimizer.weight_decay}")] = 0.01
    """Weight decay at last."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay changes, over lr_decay_iters steps."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """How the learning rate decays after the warm-up, from lr to min_lr."""
    lr_decay_iters: PositiveInt | None = 1000
    """RL step at which the learning rate is min_lr; null: the run's last step."""
    lr_warmup_iters: NonNegativeInt = Field(13, description="RL steps of the warm-up.")
    lr_warmup_init: float = Field(5.0e-7, description="Learning rate at the start of the warm-up.")


class MegatronDDPConfig(Section):
    """`policy.megatron_cfg.distributed_data_parallel_config`."""

    grad_reduce_in_fp32: bool = False
    """Accepted for recipes; gradients are always accumulated and reduced in float32."""
    overlap_grad_reduce: bool = True
    """Accepted for recipes; gradients are reduced once, when the step is finished."""
    overlap_param_gather: bool = True
    """Accepted for recipes; parameters are gathered by the step, for the refit that follows."""
    use_custom_fsdp: Annotated[bool, NotYet("Megatron's own FSDP")] = False
    """Use Megatron's own FSDP."""
    data_parallel_sharding_strategy: str = "optim_grads_params"
    """Accepted for recipes; use_distributed_optimizer says what is sharded."""


class MegatronFp8Config(Section):
    """`policy.megatron_cfg.fp8_cfg`."""

    enabled: bool = Field(False, description="Train in fp8.")
    fp8: str = Field("e4m3", description="fp8 format.")
    fp8_recipe: str = Field("blockwise", description="Scaling recipe.")
    fp8_param: bool = Field(False, description="Keep parameters in fp8.")


class MegatronPeftConfig(Section):
    """`policy.megatron_cfg.peft`."""

    enabled: bool = Field(False, description="Train low-rank adapters instead of the weights.")
    target_modules: list[str] = Field(default_factory=list)
    """Megatron's linear layers that get an adapter (linear_qkv, linear_proj, linear_fc1, linear_fc2): last parts, whole
    names or patterns; empty for all of them.
    """
    exclude_modules: list[str] = Field(default_factory=list, description="Layers that get none, named the same way.")
    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="Scale times rank: the product of the factors counts alpha / dim.")
    dropout: Annotated[float, NotYet("dropout of adapters on Megatron-Core", instead="set it to 0")] = Field(
        0.0, ge=0, le=1
    )
    """Dropout probability."""
    dropout_position: Literal["pre", "post"] = Field("post", description="Accepted for recipes; belongs to dropout.")
    lora_A_init_method: Literal["xavier", "kaiming", "uniform"] = "xavier"
    """Initialisation of the first factor. kaiming and uniform are the same."""
    lora_B_init_method: Literal["zero"] = "zero"
    """Accepted for recipes; the second factor is 0 at the start."""
    lora_dtype: Annotated[
        Literal["None", "float32", "bfloat16", "float16"] | None,
        NotYet("a precision of their own for adapters", ("float32", "bfloat16", "float16"), "leave it null"),
    ] = Field(None, description="Precision of the factors; null: policy.precision, with float32 in the optimizer.")
    a2a_experimental: Annotated[bool, NotYet("exchanging adapters' activations by all-to-all")] = False
    """Exchange adapters' activations by all-to-all."""
    sync: Literal["merged", "adapter"] = "merged"
    """What a refit sends, as policy.dtensor_cfg.lora_cfg.sync says."""


class MegatronCheckpointConfig(Section):
    """`policy.megatron_cfg.checkpoint`."""

    async_save: bool = Field(True, description="Accepted for recipes; weights are always written in the background.")
    ckpt_assume_constant_structure: bool = True
    """Accepted for recipes; the plan of a checkpoint is made again each time."""


_Balancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]


class MegatronConfig(Section):
    """`policy.megatron_cfg`."""

    enabled: bool = False
    """Train with this backend; exactly one of dtensor_cfg and megatron_cfg is enabled."""
    tensor_model_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer.")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="Pipeline stages.")
    context_parallel_size: PositiveInt = Field(1, description="Ranks that share each sequence.")
    expert_model_parallel_size: PositiveInt = Field(1, description="Ranks that share the experts.")
    expert_tensor_parallel_size: PositiveInt = Field(1, description="Ranks that share each expert.")
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage; null divides evenly."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage; null divides evenly."""
    sequence_parallel: bool = Field(False, description="Shard activations along the sequence.")
    pipeline_dtype: Annotated[str, DefaultFrom("${policy.precision}")] = "bfloat16"
    """Accepted for recipes; stages exchange activations in policy.precision."""
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    recompute_granularity: Literal["full", "selective"] = Field("full", description="What is recomputed.")
    recompute_modules: list[str] | None = Field(None, description="Modules recomputed selectively.")
    empty_unused_memory_level: Literal[0, 1, 2] = Field(1, description="How often the accelerator's cache is emptied.")
    force_reconvert_from_hf: bool = False
    """Accepted for recipes; Hugging Face weights are read directly and nothing is converted."""
    model_overrides: dict[str, Any] = Field(default_factory=dict)
    """Further options of Megatron's TransformerConfig that leave the model and its gradients as they are."""
    use_fused_linear_logprobs: bool = False
    """Accepted for recipes; tokens are always scored chunk by chunk from hidden states."""
    fused_linear_logprobs_chunk_size: PositiveInt = 256
    """Accepted for recipes; policy.logprob_chunk_size is what counts."""
    defer_fp32_logits: bool = False
    """Accepted for recipes; the logits of a row never exist at once, and are float32 where scored."""
    cuda_graph_impl: Annotated[str, NotYet("CUDA graphs in training")] = "none"
    """CUDA graphs in training."""
    cuda_graph_modules: list[str] = Field(default_factory=list)
    """Accepted for recipes; belongs to cuda_graph_impl."""
    cuda_graph_warmup_steps: NonNegativeInt = Field(3, description="Accepted for recipes; belongs to cuda_graph_impl.")
    fine_grained_activation_offloading: Annotated[bool, NotYet("offloading of activations by module")] = False
    """Offload activations by module."""
    offload_modules: list[str] | None = None
    """Accepted for recipes; belongs to fine_grained_activation_offloading."""
    freeze_moe_router: bool = Field(True, description="Do not train the router.")
    moe_router_dtype: str | None = Field("fp64", description="Precision of the router.")
    # Others are of whole sequences or steps, where a packed row is one sequence to Megatron and steps come in parts.
    moe_router_load_balancing_type: Annotated[
        _Balancing | list[_Balancing],
        NotYet(
            "auxiliary losses of Megatron's router other than of a microbatch",
            values=("seq_aux_loss", "global_aux_loss"),
            instead="set it to aux_loss or none, or moe_aux_loss_coeff to 0",
            unless="moe_aux_loss_coeff",
        ),
    ] = "none"
    """Load balancing of the router: `none`, or `aux_loss` of each microbatch; a list has a weight for each. A loss
    whose weight is 0 is none.
    """
    moe_aux_loss_coeff: NonNegativeFloat | list[NonNegativeFloat] = 0.0
    """Weight of the load-balancing loss; as many as it has kinds."""
    moe_router_bias_update_rate: Annotated[float, NotYet("updates of the router's biases")] = 0.0
    """Update rate of the router's bias."""
    moe_permute_fusion: bool = Field(True, description="Fuse token permutation.")
    moe_enable_deepep: bool = False
    """Accepted for recipes; tokens reach experts by all-to-all, with the same result."""
    # Rows of a step differ in length, for which the others are not made.
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Accepted for recipes; tokens reach experts by all-to-all, with the same result."""
    moe_shared_expert_overlap: bool = False
    """Accepted for recipes; only the speed of experts that every token takes."""
    moe_per_layer_logging: bool = False
    """Accepted for recipes; metrics of the router are not measured."""
    apply_rope_fusion: bool = Field(True, description="Fuse rotary embeddings.")
    bias_activation_fusion: bool = Field(True, description="Fuse bias and activation.")
    mtp_num_layers: NonNegativeInt = 0
    """Layers of multi-token prediction, each of which predicts one token further on."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.0
    """Weight of the loss of multi-token prediction, which is the mean over its layers."""
    mtp_use_repeated_layer: bool = False
    """One layer for every depth; refused where mtp_num_layers is above 0."""
    mtp_detach_heads: bool = False
    """Whether the layers leave the model as it is; refused where mtp_num_layers is above 0."""
    use_gloo_process_groups: bool = False
    """Accepted for recipes; host-side groups are made where they are needed."""
    gradient_accumulation_fusion: bool = Field(False, description="Accumulate weight gradients in the matrix product.")
    use_fused_weighted_squared_relu: bool = False
    """Accepted for recipes; only the speed of one activation function."""
    env_vars: dict[str, str] | None = Field(None, description="Environment variables of the workers.")
    checkpoint: MegatronCheckpointConfig = Field(MegatronCheckpointConfig(), description="Checkpoint options.")
    peft: MegatronPeftConfig = MegatronPeftConfig()
    """Low-rank adapters; the other weights stay as they are."""
    optimizer: MegatronOptimizerConfig = Field(MegatronOptimizerConfig(), description="Optimizer.")
    scheduler: MegatronSchedulerConfig = Field(MegatronSchedulerConfig(), description="Scheduler.")
    distributed_data_parallel_config: MegatronDDPConfig = Field(MegatronDDPConfig(), description="Data parallelism.")
    fp8_cfg: MegatronFp8Config = Field(MegatronFp8Config(), description="fp8 training.")

    @property
    def load_balancing_kinds(self) -> list[str]:
        """Each kind of load balancing of the router."""
        kinds = self.moe_router_load_balancing_type
        return list(kinds) if isinstance(kinds, list) else [kinds]

    @property
    def load_balancing_weights(self) -> list[float]:
        """The weight of each kind of load balancing."""
        weights = self.moe_aux_loss_coeff
        return list(weights) if isinstance(weights, list) else [weights]

    @property
    def load_balancing_weight(self) -> float:
        """The weight of the load-balancing loss of a microbatch, the one kind that is trained; 0 is none."""
        return sum(self.load_balancing_weights)
