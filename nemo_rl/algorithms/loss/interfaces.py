"""NeMo-RL's import path for the loss interface, which lives in `nemo_rl.loss.interfaces`.

Holds nothing of its own.
"""

from nemo_rl.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer

__all__ = ["LossFunction", "LossInputType", "LossType", "MetricNormalizer"]
