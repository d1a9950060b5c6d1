"""Loads a Hugging Face model into its sharded form.

Rank 0 reads the weights on the host; the others build the shapes and receive their shards. Invariants: weights are
float32 whatever the file holds; code from a model's repository runs only if the configuration allows it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import compiles_layers
from nemo_rl.models.dtensor.dtensor_checks import LIGER, check_attention
from nemo_rl.models.dtensor.dtensor_lora import KEY, apply_adapters
from nemo_rl.models.dtensor.experts import apply_expert_parallel
from nemo_rl.models.dtensor.export import PREFIX, remember_disk_names
from nemo_rl.models.dtensor.parallelize import (
    ParallelMesh,
    apply_activation_checkpointing,
    apply_compile,
    apply_fsdp,
    apply_tensor_parallel,
)
from nemo_rl.models.dtensor.replayed_routers import attach_router_replay
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.policy import attention
from nemo_rl.models.policy.lora import start_factors
from nemo_rl.models.policy.model_config import (
    CheckpointMismatchError,
    ModelNotFoundError,
    UnsupportedModelError,
    auto_class,
    compute_dtype,
    empty_model,
    generation_config,
    model_config,
    number_of_experts,
)
from nemo_rl.utils.adapter_files import AdapterInfo, is_adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_scorer(cfg: PolicyConfig, mesh: ParallelMesh, *, weights_path: str | None = None) -> CausalLMScorer:
    """The sharded model with weights.

    Args:
        weights_path: A checkpoint's weights directory to start from instead of `policy.model_name`.

    Raises ModelNotFoundError: the model cannot be loaded; CheckpointMismatchError: the checkpoint is of another model.
    """
    config = model_config(cfg)
    source = weights_path or cfg.model_name
    lora = cfg.dtensor_cfg.lora_cfg
    if not lora.enabled and is_adapter(source):
        raise CheckpointMismatchError(f"{source}: holds an adapter alone; set {KEY}.enabled: true")
    state: dict[str, torch.Tensor] = {}
    if mesh.rank == 0:
        state = _read_weights(cfg.model_name if lora.enabled else source, config, cfg.trust_remote_code)
    kernels: dict[str, object] = {
        "attn_implementation": attention.register(cfg.dtensor_cfg.automodel_kwargs.backend.attn)
    }
    if cfg.dtensor_cfg.automodel_kwargs.backend.experts != "torch" and number_of_experts(config):
        kernels["experts_implementation"] = cfg.dtensor_cfg.automodel_kwargs.backend.experts
    model = empty_model(config, dtype=torch.float32, trust_remote_code=cfg.trust_remote_code, **kernels)
    check_attention(model)
    model.generation_config = generation_config(cfg, config)
    model.tie_weights()
    # Padding never reaches the loss here; where its id was drawn as a token, the token has a gradient like any other.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010
    if cfg.dtensor_cfg.automodel_kwargs.use_liger_kernel:
        apply_liger(model, keep_experts=mesh.ep_mesh is not None)
    remember_disk_names(model)
    if lora.enabled:
        sizes = apply_adapters(model, lora)
        info = AdapterInfo.of(cfg.model_name, lora.dim, lora.alpha, sizes)
        # A checkpoint that does not fit is refused on every rank.
        if weights_path is not None or mesh.rank == 0:
            factors = start_factors(weights_path, info, sizes, lora.lora_A_init, KEY)
            state |= factors if mesh.rank == 0 else {}
    apply_tensor_parallel(model, mesh, cfg.dtensor_cfg)
    if mesh.ep_mesh is not None:
        apply_expert_parallel(model, mesh.ep_mesh)
    replay = attach_router_replay(model, mesh.device) if cfg.router_replay.enabled else None
    if cfg.dtensor_cfg.activation_checkpointing:
        apply_activation_checkpointing(model, keep_routing=cfg.dtensor_cfg.moe_parallelizer.ignore_router_for_ac)
    if compiles_layers(cfg, mesh.sizes, cuda=mesh.device.type == "cuda"):
        apply_compile(model)
    head = cfg.dtensor_cfg.moe_parallelizer.lm_head_precision
    head_dtype = compute_dtype(head) if head is not None else None
    scorer = CausalLMScorer(model, mesh, cfg.logprob_chunk_size, head_dtype=head_dtype, replay=replay)
    apply_fsdp(scorer, model, mesh, cfg.dtensor_cfg, dtype=compute_dtype(cfg.precision))
    _materialise(scorer, mesh, offloaded=cfg.dtensor_cfg.cpu_offload)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(scorer, {PREFIX + name: tensor for name, tensor in state.items()}, options=options)
    return scorer


def _read_weights(source: str, config: PretrainedConfig, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    try:
        model, report = auto_class(config).from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            attn_implementation="eager",
        )
    except (OSError, RuntimeError, ValueError) as error:
        if os.path.isdir(source):
            raise CheckpointMismatchError(f"{source}: weights do not fit the configured model ({error})") from error
        raise ModelNotFoundError(f"policy.model_name={source!r} cannot be loaded: {error}") from error
    missing = [
        name for name in report["missing_keys"] if not (config.tie_word_embeddings and name.startswith("lm_head"))
    ]
    if missing or report.get("mismatched_keys"):
        raise CheckpointMismatchError(
            f"{source}: {len(missing)} weights missing ({missing[:3]}), "
            f"{len(report.get('mismatched_keys', []))} of another shape; it holds another model"
        )
    return model.state_dict()


def _materialise(scorer: CausalLMScorer, mesh: ParallelMesh, *, offloaded: bool) -> None:
    buffers = {name: buffer.clone() for name, buffer in scorer.named_buffers() if not buffer.is_meta}
    device = torch.device("cpu") if offloaded else mesh.device
    scorer.to_empty(device=device)
    for name, buffer in scorer.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    for module in scorer.modules():
        # With offloaded parameters the buffers still belong on the device that computes.
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))


def apply_liger(model: PreTrainedModel, *, keep_experts: bool) -> None:
    """Replaces the model's norms, feed-forwards and rotary embeddings by Liger's, in place.

    Args:
        model: A transformers model, before it is cut.
        keep_experts: Leave feed-forwards alone: Liger's experts compute with all experts of a layer at once.

    Raises UnsupportedModelError: liger has no layers for this kind of model.
    """
    kind = model.config.model_type
    known = _liger_functions()
    if kind not in known:
        raise UnsupportedModelError(
            f"{LIGER}=true, but the installed liger-kernel has no layers for {kind!r} models; set it to false"
        )
    wanted = {"rope": True, "rms_norm": True, "swiglu": not keep_experts, "geglu": not keep_experts}
    # The loss must stay off in either of Liger's forms: it would replace the model's forward or torch's cross entropy.
    wanted |= {"cross_entropy": False, "fused_linear_cross_entropy": False}
    parameters = inspect.signature(known[kind]).parameters
    known[kind](model=model, **{name: value for name, value in wanted.items() if name in parameters})


def _liger_functions() -> dict[str, Callable[..., None]]:
    from liger_kernel.transformers import monkey_patch

    return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
