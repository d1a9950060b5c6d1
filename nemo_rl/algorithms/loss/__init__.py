"""NeMo-RL's import path for the losses, which live in `nemo_rl.loss`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.config import ClippedPGLossConfig as ClippedPGLossConfig
    from nemo_rl.loss import ClippedPGLossFn as ClippedPGLossFn
    from nemo_rl.loss import LossFunction as LossFunction
    from nemo_rl.loss import LossInputType as LossInputType
    from nemo_rl.loss import LossType as LossType
    from nemo_rl.loss import MetricNormalizer as MetricNormalizer
    from nemo_rl.loss import NLLLossFn as NLLLossFn
    from nemo_rl.loss import SequencePackingLossWrapper as SequencePackingLossWrapper

_HOMES = {
    "ClippedPGLossConfig": "nemo_rl.config",
    "ClippedPGLossFn": "nemo_rl.loss",
    "LossFunction": "nemo_rl.loss",
    "LossInputType": "nemo_rl.loss",
    "LossType": "nemo_rl.loss",
    "MetricNormalizer": "nemo_rl.loss",
    "NLLLossFn": "nemo_rl.loss",
    "SequencePackingLossWrapper": "nemo_rl.loss",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
