"""The counters of a run that a checkpoint carries, whatever the algorithm.

Each algorithm names them in checkpoints as NeMo-RL does. Invariant: `step` is the number of completed steps and thereby
the version of the policy's weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass
class RunState:
    """Counters of a run.

    Attributes:
        step: Completed steps.
        epoch: Completed passes over the data.
        step_in_epoch: Steps since the epoch began.
        consumed_samples: Prompts, or conversations, trained on.
        total_valid_tokens: Tokens trained on.
        val_metrics: Metrics of the last validation.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    val_metrics: dict[str, float] = field(default_factory=dict)

    def totals(self) -> dict[str, object]:
        """The counters that every algorithm's checkpoint has under the same name."""
        return {
            "total_steps": self.step,
            "consumed_samples": self.consumed_samples,
            "total_valid_tokens": self.total_valid_tokens,
        }

    @classmethod
    def resumed(cls, info: dict[str, Any], *, epoch: int, step_in_epoch: int, val_metrics: dict[str, float]) -> Self:
        """The counters behind a checkpoint's `totals` and what an algorithm names itself."""
        totals = (info["consumed_samples"], info["total_valid_tokens"])
        return cls(info["total_steps"], epoch, step_in_epoch, *totals, val_metrics)

    def copy(self) -> Self:
        """An independent copy."""
        return type(self)(**asdict(self))
