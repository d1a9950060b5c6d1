"""Shards a Hugging Face causal language model over the mesh: tensor and sequence parallel by DTensor, then FSDP2.

Invariants: tied embeddings stay one parameter; gradients are sums over all data-parallel ranks, never means, so that
the step divides once by the global count.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from nemo_rl.config import DTensorConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.communicators import RankGroups
from nemo_rl.distributed.devices import total_memory
from nemo_rl.distributed.worker_groups import resolve_fqn
from nemo_rl.models.dtensor.experts import count_experts, expert_modules
from nemo_rl.models.policy.memory_estimate import KEPT_SHARE
from nemo_rl.models.policy.model_config import UnsupportedModelError, decoder_of


class ParallelMesh(RankGroups):
    """Process groups of this rank; made once per process. `dp_replicate`: whole copies of the parameters among the
    data-parallel ranks (HSDP). Copies and experts divide the ranks, as the rules of the configuration ask.
    """

    def __init__(self, sizes: ParallelSizes, accelerator: Accelerator, *, dp_replicate: int = 1) -> None:
        super().__init__(sizes, accelerator)
        self.dp_replicate = dp_replicate
        shape = (dp_replicate, sizes.dp // dp_replicate, sizes.cp, sizes.tp)
        self.mesh = init_device_mesh(accelerator.kind, shape, mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
        self.shard_mesh = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        self.data_mesh = self.mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.gradient_mesh = self.mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
        self._experts: DeviceMesh | None = None
        if sizes.ep > 1:
            shape = (dp_replicate, sizes.dp // dp_replicate * sizes.cp // sizes.ep, sizes.ep, sizes.tp)
            self._experts = init_device_mesh(
                accelerator.kind, shape, mesh_dim_names=("expert_replicate", "expert_shard", "ep", "expert_tp")
            )
        self._coordinates = {
            "data_parallel": self.data_mesh.get_local_rank(),
            "context_parallel": self.mesh.get_local_rank("cp"),
            "tensor_parallel": self.mesh.get_local_rank("tp"),
            "pipeline_parallel": 0,
        }

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.data_mesh.get_group()

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which parameters are sharded: one axis, or two with replicas (HSDP)."""
        return self.mesh["dp_replicate", "dp_shard_cp"] if self.dp_replicate > 1 else self.shard_mesh

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """Ranks among which each layer's experts are shared out, neighbours in rank; None where every rank has all
        experts.
        """
        return None if self._experts is None else self._experts["ep"]

    @property
    def experts_fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which the parameters of this rank's experts are sharded."""
        if self._experts is None:
            return self.fsdp_mesh
        return (
            self._experts["expert_replicate", "expert_shard"]
            if self.dp_replicate > 1
            else self._experts["expert_shard"]
        )

    @property
    def tp_mesh(self) -> DeviceMesh:
        """Tensor-parallel mesh."""
        return self.mesh["tp"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Tensor-parallel group, None when there is one rank."""
        return self.mesh.get_group("tp") if self.sizes.tp > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Context-parallel group, None when there is one rank."""
        return self.mesh.get_group("cp") if self.sizes.cp > 1 else None

    @property
    def cp_rank(self) -> int:
        """Coordinate along cp."""
        return self._coordinates["context_parallel"]


# Norms inside attention work on this rank's heads only, so their gradients are parts of a sum over tensor-parallel
# ranks.
HEADWISE_NORMS = (".q_norm.", ".k_norm.")


def tensor_parallel_plan(model: Any, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Plan of a Llama-shaped model: heads and feed-forward columns are split, embeddings by vocabulary.

    A layer with experts keeps its feed-forward whole: tensor-parallel ranks compute it alike, expert parallelism is
    what cuts it.

    Raises UnsupportedModelError: the model has other modules than the plan names.
    """
    layers = decoder_of(model).layers
    routed = [str(index) for index, layer in enumerate(layers) if expert_modules(layer)]
    dense = [str(index) for index in range(len(layers)) if str(index) not in routed]
    names = {name for layer in layers for name, _ in layer.named_modules()}
    needed = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    needed |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} if dense else set()
    if not needed <= names:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {sorted(needed - names)}; "
            "give a plan of your own in policy.dtensor_cfg.custom_parallel_plan or set tensor_parallel_size=1"
        )
    row_output = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=row_output)
    }
    for projection in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"layers.*.{projection}"] = ColwiseParallel()
    plan["layers.*.self_attn.o_proj"] = RowwiseParallel(output_layouts=row_output)
    for index in dense:
        plan |= {f"layers.{index}.mlp.{projection}": ColwiseParallel() for projection in ("gate_proj", "up_proj")}
        plan[f"layers.{index}.mlp.down_proj"] = RowwiseParallel(output_layouts=row_output)
    if sequence_parallel:
        plan |= {
            "norm": SequenceParallel(),
            "layers.*.input_layernorm": SequenceParallel(),
            "layers.*.post_attention_layernorm": SequenceParallel(),
            "layers.*.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            **{
                f"layers.{index}.mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
                for index in dense
            },
            **{f"layers.{index}.mlp": _whole_feed_forward() for index in routed},
        }
    return plan


def _whole_feed_forward() -> ParallelStyle:
    return PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(),),
        desired_output_layouts=(Shard(1),),
    )


def apply_tensor_parallel(model: Any, mesh: ParallelMesh, cfg: DTensorConfig) -> None:
    """Cuts the model over the tensor-parallel mesh, in place."""
    if mesh.sizes.tp == 1:
        return
    tied = model.config.tie_word_embeddings
    parallelize_module(decoder_of(model), mesh.tp_mesh, _plan(model, cfg))
    if tied:
        model.lm_head.weight = decoder_of(model).embed_tokens.weight
    else:
        parallelize_module(model, mesh.tp_mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})


def _plan(model: object, cfg: DTensorConfig) -> dict[str, ParallelStyle]:
    if cfg.custom_parallel_plan is None:
        return tensor_parallel_plan(model, sequence_parallel=cfg.sequence_parallel)
    plan = resolve_fqn(cfg.custom_parallel_plan)
    plan = plan(model) if callable(plan) else plan
    if not isinstance(plan, Mapping):
        raise UnsupportedModelError(
            f"policy.dtensor_cfg.custom_parallel_plan={cfg.custom_parallel_plan} is a {type(plan).__name__}, "
            "expected a mapping of module to ParallelStyle"
        )
    return dict(plan)


def apply_activation_checkpointing(model: Any, *, keep_routing: bool = False) -> None:
    """Recomputes each decoder layer in the backward pass; with `keep_routing` all of it but the router's logits, so
    that every choice is the same.
    """
    layers = decoder_of(model).layers
    for index, layer in enumerate(layers):
        widths = {count_experts(module) for module in expert_modules(layer)} if keep_routing else set()
        context = partial(create_selective_checkpoint_contexts, _keep_routing(widths)) if widths else None
        layers[index] = (
            checkpoint_wrapper(layer, context_fn=context) if context is not None else checkpoint_wrapper(layer)
        )


def _keep_routing(widths: set[int]) -> Callable[..., CheckpointPolicy]:
    """Keeps the output of layers whose width is the number of experts: routers."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(_: object, op: object, *args: Any, **__: object) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if op in products and args[-1].shape[-1] in widths
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return policy


def apply_compile(model: Any) -> None:
    """Compiles each decoder layer for rows of any length."""
    for layer in decoder_of(model).layers:
        layer.compile(dynamic=True)


def is_compiled(model: Any) -> bool:
    """Whether decoder layers are compiled."""
    return any(layer._compiled_call_impl is not None for layer in decoder_of(model).layers)


@contextmanager
def one_layer_of_each_kind(model: Any) -> Generator[None]:
    """The model has only the first layer of each kind inside the block, so that a long row takes little memory."""
    decoder = decoder_of(model)
    layers = decoder.layers
    kinds: dict[object, nn.Module] = {}
    for layer in layers:
        kinds.setdefault((type(getattr(layer, "mlp", None)), getattr(layer, "attention_type", None)), layer)
    decoder.layers = nn.ModuleList(kinds.values())
    try:
        yield
    finally:
        decoder.layers = layers


def apply_fsdp(scorer: nn.Module, model: Any, mesh: ParallelMesh, cfg: DTensorConfig, *, dtype: torch.dtype) -> None:
    """Shards every decoder layer and then the whole with FSDP2: float32 weights, `dtype` compute, float32 gradient
    sums. Weights that are small compared with the device's memory stay gathered between passes, until `drop_gathered`.

    Experts sharded over expert-parallel ranks are a module of their own: fewer ranks share each.
    """
    keep = not cfg.cpu_offload and _are_small(model, mesh.device, dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cfg.cpu_offload and mesh.device.type == "cuda" else OffloadPolicy()
    keep_experts = not cfg.moe_parallelizer.reshard_after_forward
    for layer in decoder_of(model).layers:
        experts = expert_modules(layer)
        if mesh.ep_mesh is not None:
            for module in experts:
                fully_shard(
                    module,
                    mesh=mesh.experts_fsdp_mesh,
                    mp_policy=precision,
                    offload_policy=offload,
                    reshard_after_forward=not (keep or keep_experts),
                    shard_placement_fn=partial(_expert_placement, mesh.experts_fsdp_mesh.size(-1)),
                )
        reshard = not keep and (mesh.ep_mesh is not None or not (experts and keep_experts))
        fully_shard(
            layer, mesh=mesh.fsdp_mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard
        )
    fully_shard(scorer, mesh=mesh.fsdp_mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_reshard_after_backward(not keep, recurse=False)
            # Plain sums everywhere: a pre-divided reduction would round differently for every world size.
            module.set_force_sum_reduction_for_comms(True)


def _are_small(model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    numbers = sum(local_tensor(parameter).numel() for parameter in model.parameters())
    return numbers * dtype.itemsize < KEPT_SHARE * total_memory(device)


def _expert_placement(ranks: int, parameter: nn.Parameter) -> Shard:
    # Experts are shared out along the first dimension already; a second cut of it would leave ranks without any once
    # experts are fewer than ranks.
    return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % ranks == 0 else Shard(0)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_tensor_parallel(tensor: torch.Tensor) -> bool:
    """Whether a parameter is cut over the tensor-parallel axis."""
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    axis = (tensor.device_mesh.mesh_dim_names or ()).index("tp")
    return not tensor.placements[axis].is_replicate()
