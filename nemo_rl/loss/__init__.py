"""Loss functions."""

from nemo_rl.loss.clipped_pg import ClippedPGLossFn as ClippedPGLossFn
from nemo_rl.loss.distillation_loss import DistillationLossFn as DistillationLossFn
from nemo_rl.loss.interfaces import LossFunction as LossFunction
from nemo_rl.loss.interfaces import LossInputType as LossInputType
from nemo_rl.loss.interfaces import LossType as LossType
from nemo_rl.loss.interfaces import MetricNormalizer as MetricNormalizer
from nemo_rl.loss.interfaces import SequencePackingLossWrapper as SequencePackingLossWrapper
from nemo_rl.loss.nll import NLLLossFn as NLLLossFn
