"""Adapters in vLLM on a CPU: one product per adapter of a batch.

vLLM's own operations for CPUs copy the factors of its adapter for every token, which takes most of an engine's time.
On GPUs vLLM's kernels are used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
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

    Computed in blocks of equal size, so that the bits of a token's product depend on no other token.

    Args:
        factors: [adapters, O, I], or with a dimension of 1 behind the first.
        adapter_T: Index of each token's adapter; negative for none.
    """
    factors_AOI = factors.squeeze(1) if factors.dim() == 4 else factors
    # All layers of a pass have the same tokens.
    blocks = _blocks(adapter_T.to(torch.int64).numpy().tobytes())
    if not blocks.runs:
        return inputs_TI.new_zeros((len(inputs_TI), factors_AOI.shape[1]))
    if blocks.only is not None:
        padded = F.pad(inputs_TI, (0, 0, 0, blocks.padding)).view(-1, _BLOCK, inputs_TI.shape[1])
        found = torch.bmm(padded, factors_AOI[blocks.only].T.expand(len(padded), -1, -1))
        return found.view(-1, found.shape[-1])[: len(inputs_TI)]
    gathered = inputs_TI[blocks.token_S].view(-1, _BLOCK, inputs_TI.shape[1])
    found = inputs_TI.new_zeros((len(gathered), _BLOCK, factors_AOI.shape[1]))
    for adapter, start, end in blocks.runs:
        own = gathered[start:end]
        torch.bmm(own, factors_AOI[adapter].T.expand(len(own), -1, -1), out=found[start:end])
    out_TO = found.view(-1, found.shape[-1])[blocks.place_T]
    return out_TO if blocks.without_T is None else out_TO.masked_fill_(blocks.without_T, 0.0)


class _Blocks(NamedTuple):
    """Tokens in blocks of one adapter each. S places, whole blocks of them; a place that no token needs repeats the
    first token.
    """

    only: int | None  # the adapter of all tokens, which then stay where they are, with `padding` places behind them
    padding: int
    token_S: torch.Tensor
    runs: list[tuple[int, int, int]]  # an adapter, and the blocks [start, end) that it has
    place_T: torch.Tensor  # of tokens without an adapter any
    without_T: torch.Tensor | None  # [T, 1] tokens without an adapter, where there are some


@lru_cache(maxsize=8)
def _blocks(adapters: bytes) -> _Blocks:
    adapter_T = np.frombuffer(adapters, dtype=np.int64)
    present = np.unique(adapter_T[adapter_T >= 0])
    without = adapter_T < 0
    place_T = np.zeros(len(adapter_T), dtype=np.int64)
    runs: list[tuple[int, int, int]] = []
    token_S, blocks = [np.zeros(0, dtype=np.int64)], 0
    for adapter in present.tolist():
        own = np.flatnonzero(adapter_T == adapter)
        count = -(-len(own) // _BLOCK)
        place_T[own] = np.arange(len(own)) + _BLOCK * blocks
        token_S += [own, np.zeros(count * _BLOCK - len(own), dtype=np.int64)]
        runs.append((adapter, blocks, blocks + count))
        blocks += count
    only = int(present[0]) if len(present) == 1 and not without.any() else None
    return _Blocks(
        only,
        -len(adapter_T) % _BLOCK,
        torch.from_numpy(np.concatenate(token_S)),
        runs,
        torch.from_numpy(place_T),
        torch.from_numpy(without)[:, None] if without.any() else None,
    )


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
