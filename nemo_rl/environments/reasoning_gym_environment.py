"""Judges answers to reasoning-gym problems with the task's own verifier: one turn, a score from 0 to 1.

The metadata of a conversation is the reference of its problem. Which part of the response is the answer is decided by
`env.reasoning_gym.answer_tag`; verifying is done by `verifier_pool`, in time. Invariant: every conversation ends with
the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from nemo_rl.config import ReasoningGymEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math_environment import response_of
from nemo_rl.environments.verifier_pool import VerifierPool


class ReasoningGymEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.reasoning_gym`.

    Args:
        cfg: the keys of `env.reasoning_gym`.
    """

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = ReasoningGymEnvConfig.model_validate(dict(cfg))
        self._pool = VerifierPool("reasoning_gym", self.cfg.num_workers, self.cfg.verify_timeout_s)

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Verifies B responses."""
        tag = {"tag": self.cfg.answer_tag}
        verdicts = self._pool.verify(
            [(response_of(log), json.dumps(item | tag)) for log, item in zip(message_log_batch, metadata, strict=True)]
        )
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: score {verdict.reward:g}"} for verdict in verdicts
            ],
            metadata=list(metadata),
            next_stop_strings=None,
            rewards=torch.tensor([verdict.reward for verdict in verdicts]),
            terminateds=torch.ones(len(verdicts), dtype=torch.bool),
            answers=[verdict.answer for verdict in verdicts],
        )

    @override
    def shutdown(self) -> None:
        """Ends the verifier processes."""
        self._pool.shutdown()
