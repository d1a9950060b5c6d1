"""Advantage estimators by the names and signatures NeMo-RL's users call, for code outside the training loop.

The arithmetic is `nemo_rl.algorithms.grpo.advantages`, which the drivers use directly; these classes hold none of their
own. Invariant: called on a whole batch, they give what the drivers' stages give on its parts.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from nemo_rl.algorithms.grpo import advantages
from nemo_rl.algorithms.grpo.advantages import COMPONENT_PREFIX, group_ids
from nemo_rl.config import AdvEstimatorConfig, ClippedPGLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages [B, S]."""

    def compute_advantage(
        self, prompt_ids: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, **inputs: object
    ) -> torch.Tensor:
        """Advantages of every token.

        Args:
            prompt_ids: [B, L] padded prompt tokens (or [B] ids); rows with equal prompts form a group.
            rewards: [B] rewards.
            mask: [B, S], 1 on trained tokens.
        """
        ...


def get_gdpo_reward_component_keys(batch: Mapping[str, object]) -> list[str]:
    """Names of the `reward/<name>` columns of a batch, sorted."""
    return sorted(name for name in batch if name.startswith(COMPONENT_PREFIX))


class _Estimator:
    def __init__(
        self,
        estimator_config: AdvEstimatorConfig | Mapping[str, object],
        loss_config: ClippedPGLossConfig | Mapping[str, object],
    ) -> None:
        self.estimator_config = AdvEstimatorConfig.read(estimator_config)
        self.loss_config = ClippedPGLossConfig.read(loss_config)
        self.last_metrics: dict[str, float] = {}  # of the last call, by the names of a run's metrics

    def _per_row(
        self, prompt_ids: torch.Tensor, rewards: torch.Tensor, components: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        groups = group_ids(prompt_ids).cpu()
        on_cpu = {name: column.cpu() for name, column in components.items() if isinstance(column, torch.Tensor)}
        valid = torch.ones(len(groups))
        return advantages.row_advantages(self.estimator_config, rewards.cpu(), on_cpu, groups, valid).to(rewards.device)


def _columns(mask: torch.Tensor, **columns: torch.Tensor) -> BatchedDataDict:
    return BatchedDataDict({"token_mask": mask, "sample_mask": mask.new_ones(len(mask)), **columns})


class GRPOAdvantageEstimator(_Estimator):
    """Reward minus the group's baseline, over its deviation (https://arxiv.org/abs/2402.03300)."""

    def compute_advantage(
        self, prompt_ids: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, **_: object
    ) -> torch.Tensor:
        rows = self._per_row(prompt_ids, rewards, {})
        return advantages.broadcast_advantages(_columns(mask, row_advantages=rows)).columns["advantages"]


class GDPOAdvantageEstimator(_Estimator):
    """GRPO per reward component, summed and standardised over the batch. Needs `repeated_batch` with at least two
    `reward/<name>` columns.
    """

    def compute_advantage(
        self,
        prompt_ids: torch.Tensor,
        rewards: torch.Tensor,
        mask: torch.Tensor,
        *,
        repeated_batch: Mapping[str, Any],
        **_: object,
    ) -> torch.Tensor:
        rows = self._per_row(prompt_ids, rewards, repeated_batch)
        return advantages.broadcast_advantages(_columns(mask, row_advantages=rows)).columns["advantages"]


class ReinforcePlusPlusAdvantageEstimator(_Estimator):
    """Reward minus the group mean, whitened over all tokens of the batch (https://arxiv.org/abs/2501.03262).

    With `loss_fn.use_kl_in_reward` it needs `logprobs_policy` and `logprobs_reference` [B, S].
    """

    def compute_advantage(
        self,
        prompt_ids: torch.Tensor,
        rewards: torch.Tensor,
        mask: torch.Tensor,
        *,
        logprobs_policy: torch.Tensor | None = None,
        logprobs_reference: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """See `AdvantageEstimator`. Raises KeyError: the KL is in the reward and log-probabilities are missing."""
        columns = _columns(mask, row_advantages=self._per_row(prompt_ids, rewards, {}))
        if logprobs_policy is not None and logprobs_reference is not None:
            columns.update(prev_logprobs=logprobs_policy, reference_policy_logprobs=logprobs_reference)
        output = advantages.penalized_advantages_stage(self.loss_config)(columns)
        mean, variance = advantages.whitening_statistics(output.rows)
        columns.update(output.columns)
        return advantages.whitened_advantages(columns, mean=mean, variance=variance).columns["advantages"]


class OPDAdvantageEstimator(_Estimator):
    """On-policy distillation: teacher minus student log-probability. Needs `teacher_logprobs` and `prev_logprobs` [B,
    S].
    """

    def compute_advantage(
        self,
        prompt_ids: torch.Tensor,
        rewards: torch.Tensor,
        mask: torch.Tensor,
        *,
        teacher_logprobs: torch.Tensor,
        prev_logprobs: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        output = advantages.distillation_advantages(
            _columns(mask, teacher_logprobs=teacher_logprobs, prev_logprobs=prev_logprobs)
        )
        self.last_metrics = advantages.distillation_metrics(output.rows)
        return output.columns["advantages"]


ADVANTAGE_ESTIMATORS: dict[str, type[_Estimator]] = {
    "grpo": GRPOAdvantageEstimator,
    "gdpo": GDPOAdvantageEstimator,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantageEstimator,
    "opd": OPDAdvantageEstimator,
}

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvEstimatorConfig",
    "AdvantageEstimator",
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "OPDAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
