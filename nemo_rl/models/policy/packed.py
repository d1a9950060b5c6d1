"""The one form in which sequences go through a model: all real tokens of a microbatch in one row, with their borders.

Padded, dynamic and packed microbatches differ only in which sequences share a row; here each becomes the same packed
row, so that no compute is spent on padding and every mode computes the same numbers. Knows no model. Invariant: what
is scattered back lies where the token lay in the padded batch.

Shapes: B sequences, S padded width, T tokens of the row (padding segment included).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.distributed.devices import to_device


@dataclass(frozen=True)
class PackedBatch:
    """One packed row.

    Attributes:
        input_ids_T: Token ids.
        position_ids_T: Position of each token inside its sequence.
        target_ids_T: The token that follows inside the sequence; 0 at a sequence's last token and on padding.
        cu_seqlens: Borders of the segments, int32 [segments + 1], starting at 0 and ending at T.
        max_seqlen: Longest segment.
        source_N: Flat index into the padded [B, S] batch of each real token, N <= T.
        shape: (B, S) of the padded batch.
        wanted_W: Positions of the row whose next token is trained, ascending; None where every position counts.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    target_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    source_N: torch.Tensor
    shape: tuple[int, int]
    wanted_W: torch.Tensor | None = None

    def unpack(self, values_T: torch.Tensor) -> torch.Tensor:
        """Differentiable scatter of per-token values [T, ...] to [B, S, ...], zero on padding."""
        batch, width = self.shape
        real = values_T[: self.source_N.numel()]
        flat = values_T.new_zeros((batch * width, *values_T.shape[1:])).index_copy(0, self.source_N, real)
        return flat.view(batch, width, *values_T.shape[1:])


def pack(
    data: Mapping[str, torch.Tensor], device: torch.device, *, multiple: int = 1, trained_only: bool = False
) -> PackedBatch:
    """Packs a right-padded microbatch.

    Args:
        data: `input_ids [B, S]` and `input_lengths [B]`.
        device: Where the row is needed.
        multiple: The row is padded to a multiple of this by a segment of its own, which nothing attends to.
        trained_only: Scores are needed only before tokens that `token_mask [B, S]` and `sample_mask [B]` keep: the
            output projection then skips prompts.
    """
    ids_BS, lengths_B = data["input_ids"], data["input_lengths"].to(torch.long).cpu()
    batch, width = ids_BS.shape
    positions_BS = torch.arange(width).expand(batch, width)
    real_BS = positions_BS < lengths_B[:, None]
    source_N = real_BS.reshape(-1).nonzero(as_tuple=True)[0]
    ids_N = ids_BS.cpu().reshape(-1)[source_N]
    next_BS = torch.zeros_like(ids_BS, device="cpu")
    next_BS[:, :-1] = ids_BS[:, 1:].cpu()
    next_BS.masked_fill_(positions_BS + 1 >= lengths_B[:, None], 0)
    lengths = [int(n) for n in lengths_B if n > 0]
    padding = -sum(lengths) % multiple
    borders = torch.tensor([0, *lengths, *([padding] if padding else [])], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    extra = torch.zeros(padding, dtype=torch.long)
    return PackedBatch(
        to_device(torch.cat([ids_N, extra]), device),
        to_device(torch.cat([positions_BS.reshape(-1)[source_N], torch.arange(padding)]), device),
        to_device(torch.cat([next_BS.reshape(-1)[source_N], extra]), device),
        to_device(borders, device),
        max([*lengths, padding], default=0),
        to_device(source_N, device),
        (batch, width),
        to_device(_trained_positions(data, source_N), device) if trained_only and "token_mask" in data else None,
    )


def _trained_positions(data: Mapping[str, torch.Tensor], source_N: torch.Tensor) -> torch.Tensor:
    trained_BS = (data["token_mask"].cpu() != 0) & (data["sample_mask"].cpu() != 0)[:, None]
    before_BS = torch.zeros_like(trained_BS)
    before_BS[:, :-1] = trained_BS[:, 1:]
    wanted = before_BS.reshape(-1)[source_N].nonzero(as_tuple=True)[0]
    # Every rank must run the output projection, whose backward pass is collective, even when it trains on nothing.
    return wanted if wanted.numel() else torch.zeros(1, dtype=torch.long)
