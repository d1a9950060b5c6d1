"""A checksum of weight bytes that costs one pass and is the same on every device.

Two 64-bit sums over the bytes as 32-bit words: a plain one and one weighted by position, so that swapped blocks are
seen as well as changed words. Not cryptographic: it guards against lost, stale and misplaced bytes.
"""

from __future__ import annotations

import torch

_CHUNK_WORDS = 4 << 20
_PERIOD = 8191


def checksum(buffer_B: torch.Tensor, nbytes: int) -> str:
    """Checksum of the first `nbytes` bytes of a uint8 tensor, as text."""
    whole = nbytes // 4 * 4
    words = buffer_B[:whole].view(torch.int32)
    weights = torch.arange(1, _PERIOD + 1, device=buffer_B.device, dtype=torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=buffer_B.device)
    weighted = torch.zeros((), dtype=torch.int64, device=buffer_B.device)
    step = _CHUNK_WORDS // _PERIOD * _PERIOD
    for start in range(0, words.numel(), step):
        chunk = words[start : start + step].to(torch.int64)
        plain += chunk.sum()
        full = chunk.numel() // _PERIOD * _PERIOD
        columns = chunk[:full].view(-1, _PERIOD)
        rows = torch.arange(columns.shape[0], device=buffer_B.device, dtype=torch.int64) + start // _PERIOD
        # A word's weight is its position, row * period + column: unlike row * column, no two words share one.
        weighted += (columns * weights).sum() + _PERIOD * (columns.sum(dim=1) * rows).sum()
        tail = chunk[full:]
        weighted += (tail * (weights[: tail.numel()] + full + start)).sum()
    rest = int(buffer_B[whole:nbytes].to(torch.int64).sum()) if nbytes > whole else 0
    return f"{nbytes}:{int(plain) & 0xFFFFFFFFFFFFFFFF:016x}:{int(weighted) & 0xFFFFFFFFFFFFFFFF:016x}:{rest}"
