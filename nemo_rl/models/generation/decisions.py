"""Decisions of generation besides tokens, which training replays: the experts of every token, and the tokens that
filters left to draw from.

Values and how pieces of them join; their selection by the model, columns, and checks on rollouts. Invariants: a
position has the routes of the computation that its next token was drawn with, however often it is computed again; what
is not known is marked and 0; columns that passed the checks can be replayed without further checks.

Shapes: S positions, L layers with experts, K experts of a token, R sampled tokens; B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.config import PolicyConfig
from nemo_rl.config.errors import UserError
from nemo_rl.data_plane.field_schema import ROUTE_FIELDS, SAMPLING_MASK_FIELDS
from nemo_rl.models.policy.model_config import layers_with_experts, model_config, number_of_experts, text_config
from nemo_rl.models.policy.router_replay import RouterReplayError, check_routes
from nemo_rl.models.policy.scoring import SamplingMaskError, checked_mask_ids

Array = NDArray[Any]


def route_dtype(experts: int) -> np.dtype[Any]:
    """The narrowest type of routes that torch can index with: uint8 up to 256 experts, else int16."""
    return np.dtype(np.uint8 if experts <= 256 else np.int16)


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """Experts of the positions `[start, start + S)` of a sequence."""

    start: int
    experts: Array  # [S, L, K]; 0 where unknown
    valid: NDArray[np.bool_]  # [S], whether they are known

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.valid)

    def until(self, end: int) -> TokenRoutes:
        """The same without positions from `end` on."""
        count = max(0, end - self.start)
        return replace(self, experts=self.experts[:count], valid=self.valid[:count])


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """Of which tokens each of R sampled tokens was drawn."""

    counts: NDArray[np.int32]  # [R]; 0 where nothing was cut off
    ids: NDArray[np.int32]  # [sum of counts], ascending in each position

    @staticmethod
    def of(kept: Sequence[Array | None]) -> SamplingMasks:
        """From the ids of each position; None where nothing was cut off."""
        some = [ids for ids in kept if ids is not None]
        return SamplingMasks(
            np.array([0 if ids is None else len(ids) for ids in kept], dtype=np.int32),
            np.concatenate(some).astype(np.int32) if some else np.zeros(0, np.int32),
        )

    def first(self, count: int) -> SamplingMasks:
        """Masks of the first `count` tokens."""
        counts = self.counts[:count]
        return SamplingMasks(counts, self.ids[: int(counts.sum())])

    def then(self, later: SamplingMasks) -> SamplingMasks:
        """These, and those of the tokens that follow."""
        return SamplingMasks(np.concatenate([self.counts, later.counts]), np.concatenate([self.ids, later.ids]))


NO_MASKS = SamplingMasks(np.zeros(0, np.int32), np.zeros(0, np.int32))


class RouteRecord:
    """Routes of one sequence as they become known, from position 0 on."""

    def __init__(self) -> None:
        self._experts: Array | None = None
        self._valid: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._end = 0

    def known_until(self, start: int = 0) -> int:
        """The first position from `start` on whose routes are not known."""
        unknown = np.flatnonzero(~self._valid[start : self._end])
        return start + int(unknown[0]) if len(unknown) else max(start, self._end)

    def add(self, routes: TokenRoutes) -> None:
        """Takes the routes of positions that were not known. Raises ValueError: they are of another number of layers or
        of experts per token than those before.
        """
        if not len(routes.valid):
            return
        held = self._held(routes)
        span = slice(routes.start, routes.end)
        new = routes.valid & ~self._valid[span]
        held[span][new] = routes.experts[new]
        self._valid[span] |= new
        self._end = max(self._end, routes.end)

    def correct(self, position: int, routes: TokenRoutes) -> None:
        """Takes the routes of a position also where others were known: its next token was drawn once more."""
        at = position - routes.start
        if self._experts is not None and routes.valid[at]:
            self._experts[position] = routes.experts[at]

    def _held(self, routes: TokenRoutes) -> Array:
        """The array, large enough for further routes."""
        shape = routes.experts.shape[1:]
        held = self._experts if self._experts is not None else np.zeros((0, *shape), routes.experts.dtype)
        if held.shape[1:] != shape:
            raise ValueError(
                f"positions {routes.start} to {routes.end} have routes of {shape[0]} layers x {shape[1]} experts, the "
                f"positions before {held.shape[1]} x {held.shape[2]}"
            )
        if len(held) < routes.end:
            room = max(routes.end, 2 * len(held), 16) - len(held)
            held = np.concatenate([held, np.zeros((room, *shape), held.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, np.bool_)])
        self._experts = held
        return held

    def since(self, start: int, end: int | None = None) -> TokenRoutes | None:
        """The routes of the positions from `start` on, up to the last one that was added, or to `end`, unknown where
        they were not. None before anything was added.
        """
        if self._experts is None:
            return None
        end = self._end if end is None else end
        missing = max(0, end - len(self._valid))
        experts, valid = self._experts[start:end], self._valid[start:end]
        if missing:
            experts = np.concatenate([experts, np.zeros((missing, *experts.shape[1:]), experts.dtype)])
            valid = np.concatenate([valid, np.zeros(missing, np.bool_)])
        return TokenRoutes(start, experts.copy(), valid.copy())


class RecordedDecisionsError(UserError, ValueError):
    """Routes or sampling masks are missing, or are of another model than the one that is trained."""


@dataclass(frozen=True)
class Recording:
    """Decisions that are recorded of every training rollout.

    Attributes:
        layers: Decoder layers with experts whose routes are recorded; empty if none are.
        experts: Experts of a layer.
        per_token: Experts that a token takes in a layer.
        masks: Whether it is recorded of which tokens every token was drawn.
        vocabulary: Token ids of the model.
    """

    layers: tuple[int, ...] = ()
    experts: int = 0
    per_token: int = 0
    masks: bool = False
    vocabulary: int = 0


def replays(cfg: PolicyConfig) -> bool:
    """Whether training decides anything as generation did."""
    return cfg.router_replay.enabled or cfg.sampling_mask_replay


def recording_of(cfg: PolicyConfig) -> Recording | None:
    """The run's recording, by its model's Hugging Face configuration; None if it replays nothing."""
    if not replays(cfg):
        return None
    model, routes = model_config(cfg), cfg.router_replay.enabled
    decoder = text_config(model)
    return Recording(
        layers_with_experts(model) if routes else (),
        number_of_experts(decoder) if routes else 0,
        decoder.num_experts_per_tok if routes else 0,
        cfg.sampling_mask_replay,
        decoder.vocab_size,
    )


def columns_of(recording: Recording | None) -> tuple[str, ...]:
    """Columns of the recorded decisions."""
    if recording is None:
        return ()
    return (ROUTE_FIELDS if recording.layers else ()) + (SAMPLING_MASK_FIELDS if recording.masks else ())


def check_columns(columns: Mapping[str, torch.Tensor], recording: Recording, where: str) -> None:
    """Checks the recorded columns of a batch.

    Args:
        columns: `input_ids`, `input_lengths`, `token_mask`, and what is recorded.
        where: Name of the batch, for the message.

    Raises RecordedDecisionsError: a column is missing or of a wrong shape; a route names an expert that the model does
    not have, or one twice; a mask does not hold the token that was drawn from it.
    """
    if missing := [name for name in columns_of(recording) if name not in columns]:
        raise RecordedDecisionsError(
            f"{where}: the columns {missing} are missing, which policy.router_replay.enabled and "
            f"policy.sampling_mask_replay need; there are {sorted(columns)}"
        )
    try:
        if recording.layers:
            routes, valid = (columns[name] for name in ROUTE_FIELDS)
            layers = [f"decoder layer {layer}" for layer in recording.layers]
            check_routes(routes, valid, layers, recording.experts, recording.per_token)
        ids_M = checked_mask_ids(columns) if recording.masks else torch.zeros(0)
    except (RouterReplayError, SamplingMaskError) as error:
        raise RecordedDecisionsError(f"{where}: {error}") from error
    if len(ids_M) and not 0 <= int(ids_M.min()) <= int(ids_M.max()) < recording.vocabulary:
        raise RecordedDecisionsError(
            f"{where}: sampling_mask_ids are from {int(ids_M.min())} to {int(ids_M.max())}, but the model's token ids "
            f"are below {recording.vocabulary}"
        )


def decision_metrics(columns: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Of a rollout's recorded columns: the share of tokens with routes, of those that a sample's trained tokens follow;
    and how many token ids are kept for a token that was drawn from a part of the vocabulary.
    """
    metrics: dict[str, float] = {}
    if "routed_experts_valid" in columns:
        # A trained token's probability depends on every token before it: all before the last trained one.
        read_BS = columns["token_mask"].flip(1).cumsum(1).flip(1)[:, 1:] > 0
        known_BS = columns["routed_experts_valid"][:, :-1] & read_BS
        metrics["routed_tokens_share"] = int(known_BS.sum()) / max(1, int(read_BS.sum()))
    if "sampling_mask_counts" in columns:
        counts = columns["sampling_mask_counts"]
        metrics["sampling_mask_size"] = int(counts.sum()) / max(1, int((counts > 0).sum()))
    return metrics
