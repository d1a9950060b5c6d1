"""Keys by which NeMo-RL steers NeMo-Automodel, and their meaning here: kernels of the layers, and how experts are cut
and recomputed.

Models are transformers' own classes; a value that names an engine which is not there is refused by its dotted name.
Which combinations are possible is decided in `training_rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.section import NotYet, Section

_TE = "kernels of Transformer Engine"


class BackendConfig(Section):
    """`policy.dtensor_cfg.automodel_kwargs.backend`: the implementation of each kind of layer."""

    target: str | None = Field(None, alias="_target_")
    """Accepted for NeMo-RL's recipes, which name a class; it is not imported."""
    attn: Annotated[
        Literal["sdpa", "eager", "flash_attention_2", "flex", "flex_attention", "te"] | None, NotYet(_TE, ("te",))
    ] = None
    """Kernel of the block-diagonal attention: sdpa and eager lay sequences side by side; flash_attention_2 (half
    precision) and flex read the packed row, on GPUs only. null takes flash_attention_2 where it runs, else sdpa.
    """
    linear: Annotated[Literal["torch", "te"], NotYet(_TE, ("te",))] = Field("torch", description="Linear layers.")
    rms_norm: Annotated[Literal["torch", "torch_fp32", "te"], NotYet(_TE, ("te",))] = "torch"
    """RMS norms; torch and torch_fp32 are the model's own class, which norms in float32."""
    rope_fusion: Annotated[bool, NotYet(_TE, (True,))] = Field(False, description="Fused rotary embedding.")
    experts: Annotated[
        Literal["torch", "eager", "batched_mm", "grouped_mm", "gmm", "te"],
        BeforeValidator(lambda name: "torch" if name == "torch_mm" else name),
        NotYet("kernels of grouped_gemm and of Transformer Engine", ("gmm", "te")),
    ] = "torch"
    """Products of experts, by transformers' name; torch (or torch_mm) takes the fastest that torch has: grouped_mm,
    else eager.
    """
    dispatcher: Literal["torch", "deepep"] = "torch"
    """Accepted for NeMo-RL's recipes; tokens reach experts by all-to-all, with the same result."""
    enable_deepep: bool = False
    """Accepted for NeMo-RL's recipes; tokens reach experts by all-to-all, with the same result."""
    fake_balanced_gate: Annotated[
        bool, NotYet("routing by turns, which is for speed tests and trains another model", (True,))
    ] = Field(False, description="Route tokens evenly whatever the router says.")
    enable_hf_state_dict_adapter: bool = True
    """Accepted for NeMo-RL's recipes: checkpoints are Hugging Face's with both values."""
    enable_fsdp_optimizations: bool = False
    """Accepted for NeMo-RL's recipes: FSDP2 runs the same with both values."""


class FreezeConfig(Section):
    """`policy.dtensor_cfg.automodel_kwargs.freeze_config`: which towers keep their weights. Text models, which are the
    ones that train here, have a language model and nothing else.
    """

    freeze_vision_tower: bool = Field(True, description="Accepted for NeMo-RL's recipes: a text model has none.")
    freeze_audio_tower: bool = Field(True, description="Accepted for NeMo-RL's recipes: a text model has none.")
    freeze_language_model: Annotated[
        bool, NotYet("vision-language and audio models, in which something else would be trained", (True,))
    ] = Field(False, description="Keep the language model's weights.")


class AutomodelConfig(Section):
    """`policy.dtensor_cfg.automodel_kwargs`."""

    force_hf: bool = False
    """Accepted for NeMo-RL's recipes: models are transformers' own classes with both values."""
    use_liger_kernel: bool = False
    """Replace norms, feed-forwards and rotary embeddings by those of the package liger-kernel; needs GPUs."""
    backend: BackendConfig = Field(BackendConfig(), description="Implementation of each kind of layer.")
    freeze_config: FreezeConfig = Field(FreezeConfig(), description="Parts of a multimodal model that are not trained.")


class MoEParallelizerConfig(Section):
    """`policy.dtensor_cfg.moe_parallelizer`: how layers with experts are sharded and recomputed."""

    reshard_after_forward: bool = True
    """Drop gathered experts after the forward pass and gather them again for the backward pass; false keeps them:
    faster, more memory.
    """
    ignore_router_for_ac: bool = False
    """With activation_checkpointing, keep the router's scores instead of computing them a second time."""
    lm_head_precision: Literal["float32", "float16", "bfloat16"] | None = None
    """Precision of the output projection's product; null takes policy.precision. Weights arrive in policy.precision
    either way.
    """
    wrap_outer_model: Annotated[
        bool,
        NotYet("leaving the outer model out of FSDP, which must gather the output projection for the scores", (False,)),
    ] = Field(True, description="Shard what lies outside the layers too.")
