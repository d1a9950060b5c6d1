"""Messages between driver and workers of a model with adapter slots; the driver imports no backend for them."""

from __future__ import annotations

from dataclasses import dataclass

SLOT = "adapter_slot"
"""Column [B]: the slot whose adapter a row is computed with."""


@dataclass(frozen=True)
class StepRefused:
    """Why an adapter's step was refused; its weights are unchanged."""

    reason: str
