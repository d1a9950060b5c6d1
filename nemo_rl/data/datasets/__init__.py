"""Datasets. Names are loaded when they are first used."""

from typing import TYPE_CHECKING

from nemo_rl.lazy import names_in

if TYPE_CHECKING:
    from nemo_rl.data.datasets.raw import RawDataset as RawDataset
    from nemo_rl.data.datasets.registry import load_response_dataset as load_response_dataset
    from nemo_rl.data.processors import AllTaskProcessedDataset as AllTaskProcessedDataset

_HOMES = {
    "AllTaskProcessedDataset": "nemo_rl.data.processors",
    "RawDataset": "nemo_rl.data.datasets.raw",
    "load_eval_dataset": "nemo_rl.compat.evaluator",
    "load_response_dataset": "nemo_rl.data.datasets.registry",
}
__all__ = list(_HOMES)

__getattr__ = names_in(__name__, _HOMES)
