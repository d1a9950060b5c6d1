"""Replay of the generating engine's router decisions in the training engine (https://arxiv.org/abs/2510.11370).

Only the choice of experts is replayed: gate weights come from the live scores, so that the router's gradients flow.
A token without a recorded choice, padding and idle passes are routed naturally. Invariant: a layer that is recomputed
in the backward pass takes the choices of its own microbatch, whatever passes lie between.

Shapes: B rows, S tokens of a padded row, T tokens of a packed row or of this rank's slice, L layers with experts in
model order, K experts of a token.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.data_plane.field_schema import ROUTE_FIELDS

EXPERTS, VALID = ROUTE_FIELDS
VALIDATE = "NRL_ROUTER_REPLAY_VALIDATE"


class RouterReplayError(ValueError):
    """Recorded routes do not fit the model or the batch."""


@dataclass(frozen=True)
class Routes:
    """Recorded routes of a packed row or a slice of it."""

    experts_TLK: torch.Tensor
    valid_T: torch.Tensor  # whether a token's routes are replayed
    read_T: torch.Tensor  # tokens that a trained token of their sequence follows

    def part(self, places: slice) -> Routes:
        """Routes of a slice of the row."""
        return Routes(self.experts_TLK[places], self.valid_T[places], self.read_T[places])


def packed_routes(data: Mapping[str, torch.Tensor], source_T: torch.Tensor, padding: int) -> Routes | None:
    """Routes of a packed row on the host; None for a batch without.

    Args:
        source_T: Flat index into the padded [B, S] batch of the token at each place.
        padding: Places after them that hold none.

    Raises RouterReplayError: one of the two columns is missing, or their shapes differ from the batch's.
    """
    if EXPERTS not in data and VALID not in data:
        return None
    if EXPERTS not in data or VALID not in data:
        raise RouterReplayError(f"a batch with routes needs both columns {EXPERTS} and {VALID}; it has {sorted(data)}")
    experts_BSLK, valid_BS = data[EXPERTS].cpu(), data[VALID].cpu().bool()
    shape = tuple(data["input_ids"].shape)
    if experts_BSLK.dim() != 4 or tuple(experts_BSLK.shape[:2]) != shape or tuple(valid_BS.shape) != shape:
        raise RouterReplayError(
            f"{EXPERTS} {list(experts_BSLK.shape)} and {VALID} {list(valid_BS.shape)}: expected [B, S, L, K] and "
            f"[B, S] with [B, S] = {list(shape)}"
        )
    # No engine forwards the last token of a sequence.
    read_BS = torch.arange(shape[1]) < data["input_lengths"].cpu().long()[:, None] - 1
    valid_BS = valid_BS & read_BS
    if "token_mask" in data:
        trained_BS = (data["token_mask"].cpu() != 0).long()
        read_BS = read_BS & (trained_BS.sum(dim=1, keepdim=True) > trained_BS.cumsum(dim=1))
    # Whole rows of bytes: indexing with [source_T] copies number by number, which takes 10 times as long.
    experts_TLK = experts_BSLK.flatten(2).flatten(0, 1).index_select(0, source_T).unflatten(1, experts_BSLK.shape[2:])
    valid_T, read_T = valid_BS.reshape(-1)[source_T], read_BS.reshape(-1)[source_T]
    if padding:
        experts_TLK = torch.cat([experts_TLK, experts_TLK.new_zeros(padding, *experts_TLK.shape[1:])])
        none = torch.zeros(padding, dtype=torch.bool)
        valid_T, read_T = torch.cat([valid_T, none]), torch.cat([read_T, none])
    return Routes(experts_TLK, valid_T, read_T)


def validates_every_batch() -> bool:
    """Whether `NRL_ROUTER_REPLAY_VALIDATE` asks for checks of every batch; the first one is always checked."""
    return os.environ.get(VALIDATE, "0") not in ("", "0")


def check_routes(
    routes: torch.Tensor, valid: torch.Tensor, layers: Sequence[str], experts: int, experts_per_token: int
) -> None:
    """Whether routes fit a model. Raises RouterReplayError: another number of layers or of experts per token, an expert
    that does not exist, or one twice for a token.

    Args:
        routes: Of a packed row [T, L, K], or of a batch [B, S, L, K].
        valid: Which tokens' are known, [T] or [B, S].
        layers: Names of the model's layers with experts.
    """
    expected = (*valid.shape, len(layers), experts_per_token)
    if tuple(routes.shape) != expected:
        raise RouterReplayError(
            f"{EXPERTS} is {list(routes.shape)}, expected {list(expected)}: the model has {len(layers)} layers with "
            f"experts and {experts_per_token} experts per token; routes and policy are of different models"
        )
    known = routes[valid].long()
    ordered = known.sort(dim=-1).values

    def refuse(bad: torch.Tensor, what: str) -> None:
        if bool(bad.any()):
            token, layer, _ = (int(index) for index in bad.nonzero()[0])
            at = valid.nonzero()[token].tolist()
            place = ", ".join(f"{name} {number}" for name, number in zip(("row", "token")[-len(at) :], at, strict=True))
            raise RouterReplayError(
                f"{EXPERTS} of {place}, {layers[layer]} has the experts {known[token, layer].tolist()}, {what}"
            )

    refuse((known < 0) | (known >= experts), f"but the model's are numbered from 0 to {experts - 1}")
    refuse(ordered[..., 1:] == ordered[..., :-1], "one of them twice: the engine returned no routes for this token")


@dataclass(frozen=True)
class RouterPass:
    """Inputs of all routers in one forward pass, for this rank's slice of the row.

    Attributes:
        routes: Recorded routes, or None to route naturally.
        real_T: Which tokens are not padding; None where no auxiliary loss is computed.
        weight: Factor of this pass's auxiliary loss: its part in the divisor of the gradient.
    """

    routes: Routes | None = None
    real_T: torch.Tensor | None = None
    weight: float = 0.0


class RouterTarget:
    """The inputs of one router. `layer`: its number among the layers with experts."""

    def __init__(self, layer: int, device: torch.device) -> None:
        self.layer = layer
        # Choices that natural routing would have made otherwise, choices replayed, and choices of tokens that
        # training reads.
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)
        self.now = self._next = RouterPass()
        self._recomputes = self._counts = self._again = False
        self._waiting: deque[RouterPass] = deque()

    def aim(self, routed: RouterPass, *, recomputes: bool, counts: bool) -> None:
        """Sets the next pass. `recomputes`: whether a layer that runs without gradients is run again in the backward
        pass. `counts`: whether the choices of the pass are counted.
        """
        self._next, self._recomputes, self._counts = routed, recomputes, counts

    def enter(self) -> None:
        """Finds the pass that the router is about to run in: with gradients the earliest one that ran without."""
        self._again = torch.is_grad_enabled() and bool(self._waiting)
        self.now = self._waiting.popleft() if self._again else self._next
        if self._recomputes and not torch.is_grad_enabled():
            self._waiting.append(self.now)

    def clear(self) -> None:
        """Forgets earlier passes, finished or not."""
        self.now = self._next = RouterPass()
        self._waiting.clear()

    def choose(self, natural_TK: torch.Tensor) -> torch.Tensor:
        """Experts of each token: recorded where they are, else those of natural routing."""
        routes = self.now.routes
        if routes is None:
            return natural_TK
        recorded_TK = routes.experts_TLK[:, self.layer].to(natural_TK.dtype)
        if recorded_TK.shape != natural_TK.shape:
            raise RouterReplayError(
                f"layer {self.layer}: routes {list(recorded_TK.shape)} for router decisions {list(natural_TK.shape)}"
            )
        if self._counts and not self._again:
            # Once: a layer that is run again by torch's own checkpoints has gradients both times.
            self._counts = False
            same_T = (recorded_TK[:, :, None] == natural_TK[:, None, :]).any(dim=-1).all(dim=-1)
            replayed_T = routes.valid_T & routes.read_T
            self.counts += torch.stack([(replayed_T & ~same_T).sum(), replayed_T.sum(), routes.read_T.sum()])
        return torch.where(routes.valid_T[:, None], recorded_TK, natural_TK)


class RouterReplay:
    """The routers of this rank's part of a model.

    Args:
        targets: They, in the order of layers.
        layers: Layers with experts of the whole model.
        experts: Experts of a layer.
        experts_per_token: Experts that a token is routed to.
    """

    def __init__(self, targets: Sequence[RouterTarget], layers: int, experts: int, experts_per_token: int) -> None:
        self.targets = list(targets)
        names = [f"layer {layer} with experts" for layer in range(layers)]
        self._sizes = (names, experts, experts_per_token)
        self._checked = False

    def check(self, routes: Routes | None) -> None:
        """Checks a row's routes on the host: shapes always, values of the first row, and of all rows with
        `NRL_ROUTER_REPLAY_VALIDATE=1`. Raises RouterReplayError.
        """
        if routes is None:
            return
        values = not self._checked or validates_every_batch()
        valid_T = routes.valid_T if values else torch.zeros_like(routes.valid_T)
        check_routes(routes.experts_TLK, valid_T, *self._sizes)
        self._checked = self._checked or bool(routes.valid_T.any())

    def start_counting(self) -> None:
        """Starts a step's counts at zero."""
        for target in self.targets:
            target.counts.zero_()

    def shares(self, device: torch.device) -> dict[str, float]:
        """`router_replay_share`, the share of the router decisions of tokens that training reads that were replayed,
        and `router_replay_changed`, the share of those that natural routing would have made otherwise. Collective over
        all ranks of the policy.
        """
        total = torch.zeros(3, dtype=torch.float64, device=device)
        for target in self.targets:
            total += target.counts
        if dist.is_initialized():
            dist.all_reduce(total)
        changed, replayed, read = total.tolist()
        return {
            "router_replay_share": replayed / max(read, 1.0),
            "router_replay_changed": changed / max(replayed, 1.0),
        }
