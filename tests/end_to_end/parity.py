"""An environment that a random model solves half of the time, so that every step has something to learn; and ones that
fail.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class Parity(EnvironmentInterface):
    """Rewards responses whose characters add up to an even number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        rewards = torch.tensor([1.0 - sum(map(ord, log[-1]["content"])) % 2 for log in message_log_batch])
        observations = [{"role": "environment", "content": "judged"} for _ in message_log_batch]
        return EnvironmentReturn(
            observations, list(metadata), [None] * len(observations), rewards, torch.ones(len(observations)), None
        )


class Raises(Parity):
    """Raises on every call."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        raise LookupError("planted")


class Hangs(Parity):
    """Never answers."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        time.sleep(3600)


class Short(Parity):
    """Returns one reward too few."""

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        answer = super().step(message_log_batch, metadata)
        return answer._replace(rewards=answer.rewards[:-1])
