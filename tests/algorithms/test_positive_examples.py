"""The positive-example term is one mean per global batch, whatever the split, through the driver's column."""

import torch

from nemo_rl.algorithms.grpo.stages import positive_example_columns
from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import count_valid
from tests.experience.plane_in_process import ApplyInProcess


def test_each_global_batch_takes_the_mean_over_its_own_correct_answers() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(8, 6, generator=generator, dtype=torch.float64)
    padded = torch.nn.functional.pad(logprobs, (1, 0))
    lengths = torch.tensor([1, 2, 3, 4, 5, 6, 2, 3])
    batch: BatchedDataDict = BatchedDataDict(
        {
            "token_mask": ((torch.arange(7) >= 1) & (torch.arange(7) <= lengths[:, None])).double(),
            "sample_mask": torch.tensor([1, 1, 1, 0, 1, 1, 1, 1]).double(),
            "rewards": torch.tensor([1, 0, 1, 1, 0, 1, 1, 0]).double(),
            "advantages": torch.zeros(8, 7),
            "prev_logprobs": padded,
            "generation_logprobs": padded,
        }
    )
    cfg = ClippedPGLossConfig(positive_example_nll_weight=1.0, reference_policy_kl_penalty=0.0)
    batch.update(
        positive_example_columns(
            ApplyInProcess(batch), batch["rewards"], batch["sample_mask"], cfg, torch.arange(len(batch["rewards"])) // 4
        )
    )
    loss_fn = ClippedPGLossFn(cfg)
    for first in (0, 4):
        rows = batch.slice(first, first + 4)
        counts = count_valid(rows)
        parts = [
            loss_fn(rows.slice(i, i + 1), *counts, next_token_logprobs=logprobs[first + i : first + i + 1])[0]
            for i in range(4)
        ]
        positive = (rows["rewards"] * rows["sample_mask"])[:, None] * rows["token_mask"][:, 1:]
        expected = -(logprobs[first : first + 4] * positive).sum() / positive.sum()
        torch.testing.assert_close(sum(parts), expected, rtol=1e-6, atol=1e-9)


def test_without_the_term_there_is_no_column() -> None:
    cfg = ClippedPGLossConfig()
    assert (
        positive_example_columns(ApplyInProcess(BatchedDataDict()), torch.ones(2), torch.ones(2), cfg, torch.zeros(2))
        == {}
    )
