"""What is trained of an endpoint's sessions."""

from __future__ import annotations

from nemo_rl.models.generation.endpoint.session import Branch


def trained_tokens(branch: Branch) -> list[int]:
    """The tokens of a branch that are trained in it."""
    return [token for part in branch.parts if part.trained for token in part.turn.result.token_ids]
