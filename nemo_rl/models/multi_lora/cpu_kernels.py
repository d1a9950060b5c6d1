"""Adapters in vLLM on a CPU: one product per adapter of a batch.

vLLM's own operations for CPUs copy the factors of its adapter for every token, which takes most of an engine's time.
On GPUs vLLM's kernels are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_BLOCK = 16  # tokens


def use_grouped_products() -> None:
    """Replaces vLLM's operations in this process and those that are forked from it. Safe to call twice."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    modules: tuple[Any, ...] = (lora_ops, punica_cpu)
    for module in modules:
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = shrink, expand, expand_slice


def products(inputs_TI: torch.Tensor, factors: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor:
    """Every token's input times the factor of its adapter, [T, O]; zeros for tokens without one.

    Args:
        factors: [adapters, O, I], or with a dimension of 1 behind the first.
        adapter_T: Index of each token's adapter; negative for none.
    """
    factors_AOI = factors.squeeze(1) if factors.dim() == 4 else factors
    present = adapter_T.unique().tolist()
    if len(present) == 1 and present[0] >= 0:
        return _product(inputs_TI, factors_AOI[present[0]])
    out_TO = inputs_TI.new_zeros((len(inputs_TI), factors_AOI.shape[1]))
    for adapter in present:
        if adapter >= 0:
            rows = (adapter_T == adapter).nonzero().flatten()
            out_TO.index_copy_(0, rows, _product(inputs_TI[rows], factors_AOI[adapter]))
    return out_TO


def _product(inputs_TI: torch.Tensor, factor_OI: torch.Tensor) -> torch.Tensor:
    """`inputs @ factor.T` in blocks of equal size, so that the bits of a token's product depend on no other token."""
    tokens, blocks = len(inputs_TI), -(-len(inputs_TI) // _BLOCK)
    padded = F.pad(inputs_TI, (0, 0, 0, blocks * _BLOCK - tokens)).view(blocks, _BLOCK, -1)
    return torch.bmm(padded, factor_OI.T.expand(blocks, -1, -1)).view(blocks * _BLOCK, -1)[:tokens]


def shrink(
    inputs: torch.Tensor, factors: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, scaling: float = 1.0
) -> None:
    """vLLM's `bgmv_shrink`: writes scaled products into the first columns of `output`."""
    found = products(inputs.to(output.dtype), factors.to(output.dtype), adapters)
    output[:, : found.shape[1]] = scaling * found


def expand(
    inputs: torch.Tensor,
    factors: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """vLLM's `bgmv_expand`: adds products to `output`, or writes them there; either may have columns of padding."""
    found = products(inputs.to(output.dtype), factors.to(output.dtype), adapters)
    width = min(found.shape[1], output.shape[1])
    _put(output[:, :width], found[: len(output), :width], add=add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    factors: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """vLLM's `bgmv_expand_slice`: as `expand`, for some columns of `output`."""
    found = products(inputs.to(output.dtype), factors.to(output.dtype), adapters)
    _put(output[:, slice_offset : slice_offset + slice_size], found, add=add_inputs)


def _put(output: torch.Tensor, found: torch.Tensor, *, add: bool) -> None:
    if add:
        output += found
    else:
        output.copy_(found)
