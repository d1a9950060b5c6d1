"""What happens to logits before a token is drawn: the model's own scaling, the temperature, and generation's filters.

Training does to its logits exactly what generation did. Invariant: the most likely token is never excluded.

Shapes: C tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemo_rl.models.policy.model_config import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LogitTransform:
    """What turns raw logits into the distribution that generation drew from."""

    temperature: float = 1.0
    top_p: float = 1.0  # nucleus mass; 1 keeps all
    top_k: int | None = None  # keeps the k largest; None keeps all
    softcap: float | None = None  # the model's own tanh cap on final logits, or None
    scale: float = 1.0  # the model's own factor on final logits

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded."""
        return self.top_p < 1.0 or self.top_k is not None

    def unfiltered(self) -> LogitTransform:
        """The same without the filters."""
        return LogitTransform(self.temperature, softcap=self.softcap, scale=self.scale)

    def model_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits as the model defines them, divided by the temperature."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def raw_gradient(self, raw: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the raw logits from the one of `model_logits(raw)`."""
        if self.temperature != 1.0:
            gradient = gradient / self.temperature
        if self.softcap is not None:
            gradient = gradient * (1 - torch.tanh(raw.float() * self.scale / self.softcap).square())
        return gradient * self.scale if self.scale != 1.0 else gradient


def filter_logits(logits_CV: torch.Tensor, *, top_p: float, top_k: int | None) -> torch.Tensor:
    """Sets the logits of excluded tokens to -inf: first top-k, then top-p of the rest, as vLLM does. The most likely
    token is always kept.
    """
    ordered, indices = logits_CV.sort(dim=-1, descending=False)
    if top_k is not None and top_k < logits_CV.shape[-1]:
        threshold = ordered[:, logits_CV.shape[-1] - top_k].unsqueeze(-1)
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if top_p < 1.0:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        excluded = mass <= 1.0 - top_p
        excluded[:, -1] = False
        ordered = ordered.masked_fill(excluded, float("-inf"))
    return torch.empty_like(logits_CV).scatter(-1, indices, ordered)


def logit_transform(
    temperature: float | None, top_p: float, top_k: int | None, model: PretrainedConfig
) -> LogitTransform:
    """What generation does to logits, and what the model itself does before. `temperature`: of generation; None or 0 is
    1. `model`: the model's Hugging Face configuration.
    """
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(temperature or 1.0, top_p, top_k, softcap, _factor(config))


# Cohere; Falcon-H1; Muse Glimmer.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
# `logits_scaling` is a divisor in Granite's and MiniCPM's families, and a factor in this one.
_SCALED_UP = ("hyperclovax",)


def _factor(model: PretrainedConfig) -> float:
    """The model's own factor on final logits."""
    factor = next((value for name in _FACTORS if (value := getattr(model, name, None))), 1.0)
    scaling = getattr(model, "logits_scaling", None) or 1.0
    return factor * scaling if model.model_type in _SCALED_UP else factor / scaling
