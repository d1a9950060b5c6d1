"""What samples are worth that several weight versions made, or an older one than the step starts from.

`importance` leaves them to the loss's correction by the generation log-probabilities, `mask` takes no loss from tokens
older than the sample's newest, `drop` takes none from the whole sample. Rewards always stay in their group's baseline.
Knows no buffer. Invariant: a sample of one version keeps all of its tokens under every rule.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.stage import StageOutput, TokenStage
from nemo_rl.experience.store import ExperienceStore

Rule = Literal["importance", "mask", "drop"]


def newest_tokens_only(columns: BatchedDataDict[Any]) -> StageOutput:
    """Masks tokens of versions older than their row's newest; `masked_tokens` per row."""
    mask_BS, versions_BS = columns["token_mask"], columns["token_versions"]
    trained_BS = mask_BS != 0
    newest_B = torch.where(trained_BS, versions_BS, -1).amax(dim=1)
    kept_BS = trained_BS & (versions_BS == newest_B[:, None])
    return StageOutput({"token_mask": mask_BS * kept_BS.to(mask_BS.dtype)}, {"masked_tokens": (trained_BS & ~kept_BS).sum(dim=1)})


def judge_versions(experience: Experience[Any], store: ExperienceStore[Any], rule: Rule, step: int) -> None:
    """Applies the rule to a step's batch, in place, and adds its metrics.

    Args:
        experience: With `weight_version`, `newest_version` and `mixed_kv` rows.
        store: Holds its token columns.
        rule: `grpo.async_grpo.mixed_versions`.
        step: Version of the weights that the step starts from.
    """
    rows = experience.rows
    oldest_B, newest_B = rows["weight_version"], rows["newest_version"]
    mixed_B = oldest_B != newest_B
    lag_B = (step - oldest_B)[oldest_B >= 0].double()
    experience.metrics |= {
        "lag/mean": float(lag_B.mean()) if len(lag_B) else 0.0,
        "lag/max": float(lag_B.max()) if len(lag_B) else 0.0,
        "mixed_share": float(mixed_B.double().mean()),
        "mixed_kv_share": float(rows["mixed_kv"].double().mean()),
        "dropped_share": 0.0,
    }
    if rule == "drop":
        rows["sample_mask"] = rows["sample_mask"] * (~mixed_B).to(rows["sample_mask"].dtype)
        experience.metrics["dropped_share"] = float(mixed_B.double().mean())
    elif rule == "mask" and bool(mixed_B.any()):
        masked_B = store.apply(experience.handle, TokenStage(newest_tokens_only, ("token_mask", "token_versions"), ("token_mask",)))["masked_tokens"]
        experience.metrics["dropped_share"] = float(masked_B.sum() / rows["generated_lengths"].sum().clamp(min=1))
