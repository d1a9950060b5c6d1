"""Recorded decisions of generation: their selection by the model, columns, and checks on rollouts.

Invariant: what passed the checks can be replayed without looking at it again: every route names distinct experts of
the model, and every mask holds the token that was drawn from it.

Shapes: B rows, S tokens of a padded row, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.errors import UserError
from nemo_rl.data_plane.field_schema import ROUTE_FIELDS, SAMPLING_MASK_FIELDS
from nemo_rl.models.policy.model_config import layers_with_experts, model_config, number_of_experts, text_config
from nemo_rl.models.policy.router_replay import VALIDATE


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


def validates_every_batch() -> bool:
    """Whether `NRL_ROUTER_REPLAY_VALIDATE` asks for checks of every batch; the first one is always checked."""
    return os.environ.get(VALIDATE, "0") not in ("", "0")


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
    if recording.layers:
        check_routes(columns["routed_experts"], columns["routed_experts_valid"], recording, where)
    if recording.masks:
        _check_masks(columns, recording, where)


def check_routes(routes_BSLK: torch.Tensor, valid_BS: torch.Tensor, recording: Recording, where: str) -> None:
    """Checks routes. Raises RecordedDecisionsError: they are of another shape than the model's, name an expert that it
    does not have, or one twice.
    """
    expected = (*valid_BS.shape, len(recording.layers), recording.per_token)
    if tuple(routes_BSLK.shape) != expected:
        raise RecordedDecisionsError(
            f"{where}: routed_experts is {list(routes_BSLK.shape)}, expected [rows, tokens, layers with experts, "
            f"experts per token] = {list(expected)} of policy.model_name; the engine runs another model than the policy"
        )
    known = routes_BSLK[valid_BS].to(torch.int64)
    wrong = (known < 0) | (known >= recording.experts)
    if bool(wrong.any()):
        token, layer, _ = (int(index) for index in wrong.nonzero()[0])
        raise RecordedDecisionsError(
            f"{_place(where, valid_BS, token, recording, layer)} has the experts {known[token, layer].tolist()}, but "
            f"the model's are numbered from 0 to {recording.experts - 1}"
        )
    ordered = known.sort(dim=-1).values
    twice = ordered[..., 1:] == ordered[..., :-1]
    if bool(twice.any()):
        token, layer, _ = (int(index) for index in twice.nonzero()[0])
        raise RecordedDecisionsError(
            f"{_place(where, valid_BS, token, recording, layer)} has an expert twice: {known[token, layer].tolist()}; "
            "the engine returned no routes for this token"
        )


def _place(where: str, valid_BS: torch.Tensor, token: int, recording: Recording, layer: int) -> str:
    row, position = (int(index) for index in valid_BS.nonzero()[token])
    return f"{where}: routed_experts of row {row}, token {position}, decoder layer {recording.layers[layer]}"


def _check_masks(columns: Mapping[str, torch.Tensor], recording: Recording, where: str) -> None:
    counts_BS, trained_BS = columns["sampling_mask_counts"], columns["token_mask"] != 0
    if counts_BS.shape != trained_BS.shape:
        raise RecordedDecisionsError(
            f"{where}: sampling_mask_counts is {list(counts_BS.shape)}, expected {list(trained_BS.shape)}"
        )
    for row, ids in enumerate(columns["sampling_mask_ids"]):
        counts = counts_BS[row]
        if int(counts.min()) < 0 or int(counts.sum()) != len(ids):
            raise RecordedDecisionsError(
                f"{where}: row {row} has {len(ids)} sampling_mask_ids, and sampling_mask_counts of {int(counts.sum())}"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < recording.vocabulary:
            raise RecordedDecisionsError(
                f"{where}: row {row} has sampling_mask_ids from {int(ids.min())} to {int(ids.max())}, but the model's "
                f"token ids are below {recording.vocabulary}"
            )
        positions = counts.nonzero().flatten()
        owner = np.repeat(positions.numpy(), counts[positions].numpy())
        drawn = columns["input_ids"][row].numpy()[owner] == np.asarray(ids)
        held = np.zeros(len(counts), np.bool_)
        held[owner[drawn]] = True
        outside = [int(position) for position in positions if not held[position]]
        if outside:
            raise RecordedDecisionsError(
                f"{where}: row {row}, token {outside[0]}: its sampling mask does not hold the token "
                f"{int(columns['input_ids'][row, outside[0]])} itself, which was drawn from it"
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
