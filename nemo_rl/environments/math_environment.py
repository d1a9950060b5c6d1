"""Judges answers of one turn by a verifier: mathematical and multiple-choice answers (reward 0 or 1), and those to
reasoning-gym problems with the task's own verifier (a score from 0 to 1).

The response is what the assistant said in this rollout (`response_of`); the expected answer is `ground_truth` of its
metadata, or the reference of its problem. Which verifier is meant by the configuration is decided here; verifying is
done by `verifier_pool`, in time. Invariant: every conversation ends with the step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from nemo_rl.config import MathEnvConfig, ReasoningGymEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, response_of
from nemo_rl.environments.verifier_pool import VerifierPool
from nemo_rl.environments.verifiers import Verdict, quick
from nemo_rl.lazy import names_of

_THINK_THEN_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


class MathEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.math`.

    Args:
        cfg: the keys of `env.math`.
    """

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = MathEnvConfig.model_validate(dict(cfg))
        self._is_math = self.cfg.verifier_type == "math"
        verifier = self.cfg.math_verify_impl if self._is_math else self.cfg.verifier_type
        self._reads_plain_integers = verifier == "hf_math_verify"
        self._pool = VerifierPool(verifier, self.cfg.num_workers, self.cfg.verify_timeout_s)

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Verifies B responses."""
        verdicts = self._verify(
            [
                (response_of(log), str(item["ground_truth"]))
                for log, item in zip(message_log_batch, metadata, strict=True)
            ]
        )
        return _finished(
            verdicts, metadata, torch.tensor([verdict.reward for verdict in verdicts]), self.cfg.stop_strings
        )

    @override
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds the share of right answers, and how many were given up at the deadline."""
        metrics = {"verify_timeouts": float(self._pool.timeouts)}
        if "rewards" in batch and len(batch["rewards"]):
            metrics["accuracy"] = float(torch.as_tensor(batch["rewards"]).float().mean())
        return batch, metrics

    @override
    def shutdown(self) -> None:
        """Ends the verifier processes."""
        self._pool.shutdown()

    def _verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        verdicts = [quick(*pair) if self._reads_plain_integers else None for pair in pairs]
        hard = [index for index, verdict in enumerate(verdicts) if verdict is None]
        for index, verdict in zip(hard, self._pool.verify([pairs[index] for index in hard]), strict=True):
            verdicts[index] = verdict
        return [verdict for verdict in verdicts if verdict is not None]


class MathMultiRewardEnvironment(MathEnvironment):
    """`env.math_multi_reward`: three components, for estimators that weigh them, of responses that think first:
    `<think>..</think> <answer>..</answer>`.

    `reward/correctness` is 1 where the verifier finds what stands in the last `<answer>` right; `reward/integer` where
    that is a whole number; `reward/format` where the response is exactly one thought and one answer.
    """

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Verifies B responses."""
        responses = [response_of(log) for log in message_log_batch]
        answers = [answer_in(response) for response in responses]
        verdicts = self._verify(
            [(answer or "", str(item["ground_truth"])) for answer, item in zip(answers, metadata, strict=True)]
        )
        rewards = {
            "reward/correctness": torch.tensor([verdict.reward for verdict in verdicts]),
            "reward/integer": torch.tensor([_holds(r"[+-]?\d+", answer or "") for answer in answers]),
            "reward/format": torch.tensor([_holds(_THINK_THEN_ANSWER, response) for response in responses]),
        }
        return _finished(verdicts, metadata, rewards, self.cfg.stop_strings)


def answer_in(response: str) -> str | None:
    """What stands in the last `<answer>` of a response; None without one. A stop string may have cut its end off."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def _holds(pattern: str | re.Pattern[str], text: str) -> float:
    return float(re.fullmatch(pattern, text) is not None)


def _finished(
    verdicts: Sequence[Verdict],
    metadata: Sequence[dict[str, object]],
    rewards: torch.Tensor | dict[str, torch.Tensor],
    stop_strings: list[str] | None,
) -> EnvironmentReturn[dict[str, object]]:
    size = len(verdicts)
    said = ["Environment: correct" if verdict.reward == 1.0 else "Environment: incorrect" for verdict in verdicts]
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": text} for text in said],
        metadata=list(metadata),
        next_stop_strings=[stop_strings] * size,
        rewards=rewards,
        terminateds=torch.ones(size, dtype=torch.bool),
        answers=[verdict.answer for verdict in verdicts],
    )


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)


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
