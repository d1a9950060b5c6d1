"""What is raised where a function of NeMo-RL's is called as it cannot be here."""

from __future__ import annotations

from nemo_rl.config.errors import UserError


class ShapeChanged(UserError, TypeError):
    """A function of NeMo-RL's is called with arguments that it does not take here."""
