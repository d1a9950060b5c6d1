"""Loss functions. Names are loaded when they are first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.loss.clipped_pg import ClippedPGLossFn as ClippedPGLossFn
    from nemo_rl.loss.interfaces import LossFunction as LossFunction
    from nemo_rl.loss.interfaces import LossInputType as LossInputType
    from nemo_rl.loss.interfaces import LossType as LossType
    from nemo_rl.loss.interfaces import MetricNormalizer as MetricNormalizer
    from nemo_rl.loss.nll import NLLLossFn as NLLLossFn
    from nemo_rl.loss.packing import SequencePackingLossWrapper as SequencePackingLossWrapper

_HOMES = {
    "ClippedPGLossFn": "clipped_pg",
    "LossFunction": "interfaces",
    "LossInputType": "interfaces",
    "LossType": "interfaces",
    "MetricNormalizer": "interfaces",
    "NLLLossFn": "nll",
    "SequencePackingLossWrapper": "packing",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
