"""Cuts a Hugging Face causal language model over the mesh: tensor and sequence parallel by DTensor, then FSDP2.

Holds the tensor-parallel plan of the Llama-shaped families and the way FSDP2 is applied. Knows nothing of batches or
losses. Invariants: tied embeddings stay one parameter; gradients come out as sums over all data-parallel ranks, never as
means, so that the step's one division by the global count is the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemo_rl.config import DTensorConfig
from nemo_rl.distributed.worker_groups import resolve_fqn
from nemo_rl.models.dtensor.mesh import ParallelMesh
from nemo_rl.models.dtensor.model_config import UnsupportedModelError, check_divisible

# Norms inside attention work on this rank's heads only, so their gradients are parts of a sum over tensor-parallel ranks.
HEADWISE_NORMS = (".q_norm.", ".k_norm.")


def tensor_parallel_plan(model: Any, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Plan of a Llama-shaped model: heads and feed-forward columns are split, embeddings by vocabulary.

    Raises:
        UnsupportedModelError: The model has other modules than the plan names.
    """
    layer = model.base_model.layers[0]
    names = {name for name, _ in layer.named_modules()}
    needed = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    if not needed <= names:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {sorted(needed - names)}; "
            "give a plan of your own in policy.dtensor_cfg.custom_parallel_plan or set tensor_parallel_size=1"
        )
    row_output = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=row_output)}
    for projection in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{projection}"] = ColwiseParallel()
    for projection in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"layers.*.{projection}"] = RowwiseParallel(output_layouts=row_output)
    if sequence_parallel:
        plan |= {
            "norm": SequenceParallel(),
            "layers.*.input_layernorm": SequenceParallel(),
            "layers.*.post_attention_layernorm": SequenceParallel(),
            "layers.*.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            ),
            "layers.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    return plan


def apply_tensor_parallel(model: Any, mesh: ParallelMesh, cfg: DTensorConfig) -> None:
    """Cuts the model over the tensor-parallel mesh, in place."""
    if mesh.sizes.tp == 1:
        return
    check_divisible(model.config, mesh.sizes.tp)
    tied = model.config.tie_word_embeddings
    parallelize_module(model.base_model, mesh.tp_mesh, _plan(model, cfg))
    if tied:
        model.lm_head.weight = model.base_model.embed_tokens.weight
    else:
        parallelize_module(model, mesh.tp_mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})


def _plan(model: Any, cfg: DTensorConfig) -> dict[str, ParallelStyle]:
    if cfg.custom_parallel_plan is None:
        return tensor_parallel_plan(model, sequence_parallel=cfg.sequence_parallel)
    plan = resolve_fqn(cfg.custom_parallel_plan)
    plan = plan(model) if callable(plan) else plan
    if not isinstance(plan, Mapping):
        raise UnsupportedModelError(
            f"policy.dtensor_cfg.custom_parallel_plan={cfg.custom_parallel_plan} is a {type(plan).__name__}, expected a mapping of module to ParallelStyle"
        )
    return dict(plan)


def apply_activation_checkpointing(model: Any) -> None:
    """Recomputes each decoder layer in the backward pass."""
    layers = model.base_model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)


def apply_compile(model: Any) -> None:
    """Compiles each decoder layer for rows of any length."""
    for layer in model.base_model.layers:
        layer.compile(dynamic=True)


def apply_fsdp(scorer: nn.Module, model: Any, mesh: ParallelMesh, *, dtype: torch.dtype, cpu_offload: bool) -> None:
    """Shards every decoder layer and then the whole with FSDP2: float32 weights, `dtype` compute, float32 gradient sums."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload and mesh.device.type == "cuda" else OffloadPolicy()
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh.fsdp_mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=True)
    fully_shard(scorer, mesh=mesh.fsdp_mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums everywhere: a pre-divided reduction would round differently for every world size.
            module.set_force_sum_reduction_for_comms(True)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_tensor_parallel(tensor: torch.Tensor) -> bool:
    """Whether a parameter is cut over the tensor-parallel axis."""
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    axis = (tensor.device_mesh.mesh_dim_names or ()).index("tp")
    return not tensor.placements[axis].is_replicate()
