"""Exact block-diagonal causal attention over a packed row, registered with transformers under a name per kernel.

Tokens attend only to earlier tokens of their own sequence. On GPUs torch's variable-length flash attention does it
without any mask, and flex attention with a mask of blocks; else the sequences are laid side by side in a padded batch,
where the causal mask alone keeps them apart from padding. Sequences that share a prefix see its keys and values, of
which each gets a copy. With context parallelism each rank holds a slice of the row and gathers keys and values.
Invariant: the result for a sequence does not depend on what it was packed with.

Shapes: T tokens, S keys of all segments, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ATTENTION_NAME = "nemo_rl_packed"

Kernel = Literal["auto", "varlen", "sdpa", "eager", "flex"]
# By the values of `policy.dtensor_cfg.automodel_kwargs.backend.attn`.
KERNELS: dict[str | None, Kernel] = {
    None: "auto",
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "varlen",
    "flex": "flex",
    "flex_attention": "flex",
}


@dataclass(frozen=True)
class SharedKeys:
    """Keys of segments of which some share a prefix: the prefix, then the segment's own tokens."""

    token_S: torch.Tensor  # token of the row behind each key, segment after segment
    cu_seqlens: torch.Tensor  # borders of the segments' keys, int32 [segments + 1]


@dataclass(frozen=True)
class Segments:
    """Borders of the sequences that attention must keep apart."""

    cu_seqlens: torch.Tensor  # int32 [segments + 1], over the whole row
    max_seqlen: int  # most keys of a segment
    context_group: dist.ProcessGroup | None = None  # ranks that share the row, or None
    context_start: int = 0  # first token of this rank's slice
    shared: SharedKeys | None = None  # what segments see besides themselves, or None; not with a context group

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Borders of the keys."""
        return self.cu_seqlens if self.shared is None else self.shared.cu_seqlens

    @cached_property
    def places_of_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Segment and position of each token of the row; worked out once for all layers."""
        return _places(self.cu_seqlens, self.cu_seqlens_k)

    @cached_property
    def places_of_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Segment and position of each key."""
        return _places(self.cu_seqlens_k, self.cu_seqlens_k)


def register(attn: str | None = None) -> str:
    """Makes the attention known to transformers. Safe to call twice. `attn`:
    `policy.dtensor_cfg.automodel_kwargs.backend.attn`. Returns the name under which transformers finds it.
    """
    from transformers import AttentionInterface

    kernel = KERNELS[attn]
    name = f"{ATTENTION_NAME}_{kernel}"
    AttentionInterface.register(name, partial(packed_attention, kernel=kernel))
    return name


def kernel_in_use(device: torch.device, dtype: torch.dtype, kernel: str = "auto") -> str:
    """Which kernel attends to packed rows there, in words for logs."""
    if kernel in ("auto", "varlen"):
        half = dtype in (torch.bfloat16, torch.float16)
        return "varlen" if device.type == "cuda" and half else "sdpa"
    return kernel


# Compiled layers break their graph here: borders and lengths change with every row, the kernel is one already.
@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kernel: Kernel = "auto",
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        query: [1, H, T, D]; `key` and `value` [1, K, T, D].
        attention_mask: Unused; `segments` says everything.
        scaling: Factor on the scores; 1/sqrt(D) by default.
        segments: Sequence borders of the row.
        sliding_window: Tokens that a token may look back at; only on GPUs.
        kernel: Which kernel; `auto` takes the variable-length one where it runs, else `sdpa`.

    Returns [1, T, H, D] and None. Raises NotImplementedError: the model does not pass `segments` on to its layers,
    needs soft-capped scores, or a sliding window on CPU, or the kernel does not run on this device or precision.
    """
    if segments is None:
        raise NotImplementedError(
            f"{type(module).__name__} gets no borders of sequences: its model passes no keyword arguments on to its "
            "layers, so that sequences side by side cannot be kept apart; train another model"
        )
    if softcap is not None or getattr(module, "sinks", None) is not None:
        raise NotImplementedError(
            f"{type(module).__name__}: soft-capped scores and attention sinks are not supported by the packed attention"
        )
    query_THD, key_TKD, value_TKD = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    borders_q, borders_k = segments.cu_seqlens, segments.cu_seqlens_k
    if segments.shared is not None:
        key_TKD, value_TKD = (copy_tokens(t, segments.shared.token_S) for t in (key_TKD, value_TKD))
    if segments.context_group is not None:
        key_TKD, value_TKD = (gather_tokens(t, segments.context_group) for t in (key_TKD, value_TKD))
        borders_q, borders_k, first = _slice_borders(segments, query_THD.shape[0])
        key_TKD, value_TKD = (t[first : first + int(borders_k[-1])] for t in (key_TKD, value_TKD))
    half_on_gpu = query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16)
    if kernel == "varlen" and not half_on_gpu:
        raise NotImplementedError(
            "policy.dtensor_cfg.automodel_kwargs.backend.attn=flash_attention_2 needs a GPU and half "
            "precision; set it to sdpa"
        )
    if kernel == "flex":
        out_THD = _flex(query_THD, key_TKD, value_TKD, segments, scaling, sliding_window)
    elif half_on_gpu and kernel in ("auto", "varlen"):
        out_THD = _flash(
            query_THD, key_TKD, value_TKD, borders_q, borders_k, segments.max_seqlen, scaling, sliding_window
        )
    else:
        if sliding_window is not None and segments.max_seqlen > sliding_window:
            raise NotImplementedError(
                f"sequences of {segments.max_seqlen} tokens exceed the model's sliding window "
                f"{sliding_window}, which needs a GPU and half precision"
            )
        out_THD = _side_by_side(query_THD, key_TKD, value_TKD, borders_q, borders_k, scaling, eager=kernel == "eager")
    return out_THD.unsqueeze(0), None


@cache
def _varlen_options() -> tuple[bool, bool]:
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return "window_size" in parameters, "enable_gqa" in parameters


def _flash(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    borders_q: torch.Tensor,
    borders_k: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    windowed, grouped = _varlen_options()
    options: dict[str, Any] = {"scale": scaling}
    if windowed:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    else:
        options["is_causal"] = True
        if sliding_window is not None and longest > sliding_window:
            raise NotImplementedError(
                "this torch has no sliding window in its variable-length attention; use torch >= 2.12"
            )
    if grouped:
        options["enable_gqa"] = query_THD.shape[1] != key_TKD.shape[1]
    elif query_THD.shape[1] != key_TKD.shape[1]:
        key_TKD, value_TKD = (
            t.repeat_interleave(query_THD.shape[1] // t.shape[1], dim=1) for t in (key_TKD, value_TKD)
        )
    attended: Any = varlen_attn(
        query_THD.contiguous(),
        key_TKD.contiguous(),
        value_TKD.contiguous(),
        borders_q,
        borders_k,
        longest,
        longest,
        **options,
    )
    return attended


@cache
def _flex_kernel(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def _flex(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    (segment_T, place_T), (segment_S, place_S) = segments.places_of_queries, segments.places_of_keys

    def visible(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        back = place_T[query] - place_S[key]
        seen = (segment_T[query] == segment_S[key]) & (back >= 0)
        return seen if sliding_window is None else seen & (back < sliding_window)

    mask = create_block_mask(visible, None, None, len(segment_T), len(segment_S), device=query_THD.device)
    query_1HTD, key_1KTD, value_1KTD = (t.transpose(0, 1).unsqueeze(0) for t in (query_THD, key_TKD, value_TKD))
    grouped = query_THD.shape[1] != key_TKD.shape[1]
    out_1HTD = _flex_kernel(query_THD.is_cuda)(
        query_1HTD, key_1KTD, value_1KTD, block_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return out_1HTD.squeeze(0).transpose(0, 1)


def _side_by_side(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    borders_q: torch.Tensor,
    borders_k: torch.Tensor,
    scaling: float | None,
    *,
    eager: bool = False,
) -> torch.Tensor:
    lengths_q, lengths_k = borders_q.diff().long(), borders_k.diff().long()
    rows_q, columns_q = _grid(borders_q, lengths_q)
    rows_k, columns_k = _grid(borders_k, lengths_k)
    segments, width_q, width_k = lengths_q.numel(), int(lengths_q.max()), int(lengths_k.max())

    def padded(tensor: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, width: int) -> torch.Tensor:
        out = tensor.new_zeros((segments, width, *tensor.shape[1:])).index_put((rows, columns), tensor)
        return out.transpose(1, 2)

    query_NHSD = padded(query_THD, rows_q, columns_q, width_q)
    key_NKSD, value_NKSD = (padded(t, rows_k, columns_k, width_k) for t in (key_TKD, value_TKD))
    mask = None
    if eager or not torch.equal(lengths_q, lengths_k):
        # A slice's queries are the last ones of their segment: query i sits at key position i + (keys - queries).
        position_NQ = torch.arange(width_q, device=query_THD.device) + (lengths_k - lengths_q)[:, None]
        mask = (torch.arange(width_k, device=query_THD.device)[None, None, :] <= position_NQ[:, :, None]).unsqueeze(1)
    if eager and mask is not None:
        return _by_hand(query_NHSD, key_NKSD, value_NKSD, mask, scaling).transpose(1, 2)[rows_q, columns_q]
    out_NHSD = F.scaled_dot_product_attention(
        query_NHSD,
        key_NKSD,
        value_NKSD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return out_NHSD.transpose(1, 2)[rows_q, columns_q]


def _by_hand(
    query_NHSD: torch.Tensor,
    key_NKSD: torch.Tensor,
    value_NKSD: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    repeats = query_NHSD.shape[1] // key_NKSD.shape[1]
    key_NHSD, value_NHSD = (t.repeat_interleave(repeats, dim=1) for t in (key_NKSD, value_NKSD))
    scores = query_NHSD @ key_NHSD.transpose(-1, -2) * (query_NHSD.shape[-1] ** -0.5 if scaling is None else scaling)
    # A padded query sees the first key at least, so that no row of the softmax is empty.
    return (
        scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(value_NHSD.dtype) @ value_NHSD
    )


def _grid(borders: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.repeat_interleave(torch.arange(lengths.numel(), device=borders.device), lengths)
    columns = torch.arange(int(borders[-1]), device=borders.device) - borders[:-1].long()[rows]
    return rows, columns


def _places(borders: torch.Tensor, borders_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Segment of each token, and its position: a segment's tokens are the last of its keys."""
    lengths = borders.diff().long()
    segments, columns = _grid(borders, lengths)
    return segments, columns + (borders_k.diff().long() - lengths)[segments]


def _slice_borders(segments: Segments, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Borders of queries and keys for the slice `[start, start + tokens)`, and the first key token needed."""
    start, end = segments.context_start, segments.context_start + tokens
    borders = segments.cu_seqlens.long()
    overlapping = (borders[1:] > start) & (borders[:-1] < end)
    begins, ends = borders[:-1][overlapping], borders[1:][overlapping].clamp(max=end)
    first = int(begins[0])
    zero = borders.new_zeros(1)
    lengths_q = ends - begins.clamp(min=start)
    lengths_k = ends - begins
    return torch.cat([zero, lengths_q.cumsum(0)]).int(), torch.cat([zero, lengths_k.cumsum(0)]).int(), first


class _GatherTokens(torch.autograd.Function):
    """All-gather along dim 0; the backward pass sums every rank's gradient of this rank's slice."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].contiguous(), None


class _CopyTokens(torch.autograd.Function):
    """Tokens by index along dim 0, some of them several times; their gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.save_for_backward(index)
        ctx.tokens, ctx.dtype = tensor.shape[0], tensor.dtype
        return tensor.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = grads[0].new_zeros((ctx.tokens, *grads[0].shape[1:]), dtype=torch.float32)
        return total.index_add_(0, index, grads[0].float()).to(ctx.dtype), None


def copy_tokens(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The tokens of `tensor` [T, ...] at `index` [S], differentiable."""
    return _CopyTokens.apply(tensor, index)


def gather_tokens(local_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole row from equal slices, differentiable."""
    return _GatherTokens.apply(local_T, group)
