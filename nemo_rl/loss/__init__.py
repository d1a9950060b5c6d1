"""Loss functions. Names are loaded when they are first used."""

from typing import TYPE_CHECKING

from nemo_rl.lazy import names_in

if TYPE_CHECKING:
    from nemo_rl.loss.clipped_pg import ClippedPGLossFn as ClippedPGLossFn
    from nemo_rl.loss.distillation_loss import DistillationLossFn as DistillationLossFn
    from nemo_rl.loss.interfaces import LossFunction as LossFunction
    from nemo_rl.loss.interfaces import LossInputType as LossInputType
    from nemo_rl.loss.interfaces import LossType as LossType
    from nemo_rl.loss.interfaces import MetricNormalizer as MetricNormalizer
    from nemo_rl.loss.interfaces import SequencePackingLossWrapper as SequencePackingLossWrapper
    from nemo_rl.loss.nll import NLLLossFn as NLLLossFn

_HOMES = {
    "ClippedPGLossFn": "nemo_rl.loss.clipped_pg",
    "DistillationLossFn": "nemo_rl.loss.distillation_loss",
    "LossFunction": "nemo_rl.loss.interfaces",
    "LossInputType": "nemo_rl.loss.interfaces",
    "LossType": "nemo_rl.loss.interfaces",
    "MetricNormalizer": "nemo_rl.loss.interfaces",
    "NLLLossFn": "nemo_rl.loss.nll",
    "SequencePackingLossWrapper": "nemo_rl.loss.interfaces",
}
__all__ = list(_HOMES)

__getattr__ = names_in(__name__, _HOMES)
