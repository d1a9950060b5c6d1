"""One seed for every generator of a process."""

import random

import numpy as np


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, those of every accelerator included."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
