"""Adapters in vLLM on a CPU: one product per adapter of a batch.

vLLM's own operation for CPUs copies the factors of its adapter for every token, which takes most of an engine's time.
On GPUs vLLM's kernels are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_BLOCK = 16  # tokens


def use_grouped_products() -> None:
    """Replaces vLLM's operation in this process and those that are forked from it. Safe to call twice."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    PunicaWrapperCPU.add_lora_linear = _add_lora_linear  # type: ignore[method-assign]


def _add_lora_linear(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: object,
) -> None:
    add_products(y, x, lora_a_stacked, lora_b_stacked, output_slices, self.token_lora_indices, scale)


def add_products(
    out_TO: torch.Tensor,
    in_TI: torch.Tensor,
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    widths: Sequence[int],
    adapter_T: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Adds every token's input times the two factors of its adapter to its output, in place; nothing for tokens without
    one.

    Computed in blocks of equal size, so that the bits of a token's product depend on no other token.

    Args:
        downs: A factor for each part of the output, [adapters, rank, I], or with a dimension of 1 behind the first.
        ups: Likewise, [adapters, O of the part, rank].
        widths: Columns of each part.
        adapter_T: Index of each token's adapter; negative for none.
    """
    # All layers of a pass have the same tokens.
    blocks = _blocks(adapter_T.to(torch.int64).numpy().tobytes())
    if not blocks.runs:
        return
    tokens, inputs = len(in_TI), in_TI.float()
    if blocks.place_T is None:
        own = F.pad(inputs, (0, 0, 0, blocks.padding)).view(-1, _BLOCK, inputs.shape[1])
    else:
        own = inputs[blocks.token_S].view(-1, _BLOCK, inputs.shape[1])
    start = 0
    for down, up, width in zip(downs, ups, widths, strict=True):
        inner = _times(own, down.float(), blocks)
        inner = (inner if scale == 1.0 else inner * scale).to(out_TO.dtype)
        found = _times(inner, up.to(out_TO.dtype), blocks).view(-1, up.shape[-2])
        found = found[:tokens] if blocks.place_T is None else found[blocks.place_T]
        if blocks.without_T is not None:
            found.masked_fill_(blocks.without_T, 0.0)
        # Engines may pad the output or the factor.
        kept = min(width, found.shape[1], out_TO.shape[1] - start)
        out_TO[:, start : start + kept] += found[:, :kept]
        start += width


def _times(inputs: torch.Tensor, factors: torch.Tensor, blocks: _Blocks) -> torch.Tensor:
    """Every block's input times the factor of its adapter."""
    factors_AOI = factors.squeeze(1) if factors.dim() == 4 else factors
    if len(blocks.runs) == 1:
        return torch.bmm(inputs, factors_AOI[blocks.runs[0].adapter].T.expand(len(inputs), -1, -1))
    found = inputs.new_empty((len(inputs), _BLOCK, factors_AOI.shape[1]))
    for adapter, start, end in blocks.runs:
        torch.bmm(inputs[start:end], factors_AOI[adapter].T.expand(end - start, -1, -1), out=found[start:end])
    return found


class _Run(NamedTuple):
    """An adapter, and the blocks `[start, end)` that it has."""

    adapter: int
    start: int
    end: int


class _Blocks(NamedTuple):
    """Tokens in blocks of one adapter each. S places, whole blocks of them; a place that no token needs repeats the
    first token.
    """

    runs: list[_Run]
    padding: int  # places behind the tokens, where they stay where they are
    token_S: torch.Tensor
    place_T: torch.Tensor | None  # of tokens without an adapter any; None where tokens stay where they are
    without_T: torch.Tensor | None  # [T, 1] tokens without an adapter, where there are some


@lru_cache(maxsize=8)
def _blocks(adapters: bytes) -> _Blocks:
    adapter_T = np.frombuffer(adapters, dtype=np.int64)
    present = np.unique(adapter_T[adapter_T >= 0])
    without = adapter_T < 0
    place_T = np.zeros(len(adapter_T), dtype=np.int64)
    runs: list[_Run] = []
    token_S, blocks = [np.zeros(0, dtype=np.int64)], 0
    for adapter in present.tolist():
        own = np.flatnonzero(adapter_T == adapter)
        count = -(-len(own) // _BLOCK)
        place_T[own] = np.arange(len(own)) + _BLOCK * blocks
        token_S += [own, np.zeros(count * _BLOCK - len(own), dtype=np.int64)]
        runs.append(_Run(adapter, blocks, blocks + count))
        blocks += count
    stays = len(present) == 1 and not without.any()
    return _Blocks(
        runs,
        -len(adapter_T) % _BLOCK,
        torch.from_numpy(np.concatenate(token_S)),
        None if stays else torch.from_numpy(place_T),
        torch.from_numpy(without)[:, None] if without.any() else None,
    )
