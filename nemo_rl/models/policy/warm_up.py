"""What makes the first step as short as others: passes before it, while engines are still being built, and compiled
kernels that are kept between runs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

WARM_UP_TOKENS = 2048
"""Most tokens of the row. Layers are compiled for rows of any length; a longer one takes memory that engines have."""


def warm_up_rows(config: PolicyConfig, vocabulary: int) -> BatchedDataDict[Any]:
    """Two sequences or more of random tokens, with the columns that the clipped policy-gradient loss reads.
    `vocabulary`: number of token ids of the model.

    Their tokens are a prime number in all: what is compiled for a row that is as long as some dimension of the model is
    compiled for such rows alone.
    """
    width = min(config.max_total_sequence_length, WARM_UP_TOKENS // 2)
    rows = max(2, WARM_UP_TOKENS // width)
    tokens = next(count for count in range(rows * width, 0, -1) if _is_prime(count))
    fewer, some = divmod(rows * width - tokens, rows)
    lengths = torch.tensor([width - fewer - (row < some) for row in range(rows)])
    draw = torch.Generator().manual_seed(0)
    trained_BS = torch.ones(rows, width)
    trained_BS[:, 0] = 0.0
    columns = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return BatchedDataDict(
        input_ids=torch.randint(0, vocabulary, (rows, width), generator=draw),
        input_lengths=lengths,
        token_mask=trained_BS * (torch.arange(width) < lengths[:, None]),
        sample_mask=torch.ones(rows),
        **{name: torch.zeros(rows, width) for name in columns},
    )


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables that say where torch and Triton keep what they compile, and our folder for each."""


def keep_compiled() -> str:
    """Has this process keep compiled kernels in the home directory, as engines keep theirs, unless the variables name
    other places or it cannot be written. Returns the folder, for the log.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_rl"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return "a temporary folder"
    if os.access(home, os.W_OK):
        for name, folder in CACHES.items():
            os.environ.setdefault(name, str(home / folder))
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "a temporary folder")
