"""NeMo-RL's import path for the small functions its users call: tokenizer, seed, KL, masked mean, baselines.

Only `set_seed` lives here; the others are loaded from their rooms when first used.
"""

import importlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.baselines import calculate_baseline_and_std_per_prompt
    from nemo_rl.loss.kl import calculate_kl
    from nemo_rl.loss.normalization import masked_mean

__all__ = ["calculate_baseline_and_std_per_prompt", "calculate_kl", "masked_mean", "set_seed"]

_HOMES = {
    "calculate_baseline_and_std_per_prompt": "nemo_rl.algorithms.grpo.baselines",
    "calculate_kl": "nemo_rl.loss.kl",
    "get_tokenizer": "nemo_rl.data.tokenizer",
    "masked_mean": "nemo_rl.loss.normalization",
}


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, those of every accelerator included."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
