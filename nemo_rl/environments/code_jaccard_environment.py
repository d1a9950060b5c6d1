"""Judges a response by its overlap with a reference: the Jaccard index of their words.

Cheap and deterministic; one turn, reward between 0 and 1. Knows no language's grammar. Invariant: equal texts earn 1,
disjoint ones 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from nemo_rl.config import CodeJaccardEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math_environment import response_of

_FENCED = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s]")


class CodeJaccardEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.code_jaccard`.

    Args:
        cfg: the keys of `env.code_jaccard`.
    """

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeJaccardEnvConfig.model_validate(dict(cfg))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Compares B responses with their references."""
        answers = [code_of(response_of(log)) for log in message_log_batch]
        rewards = [
            jaccard(answer, code_of(str(item["ground_truth"]))) for answer, item in zip(answers, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: overlap {reward:.3f}"} for reward in rewards
            ],
            metadata=list(metadata),
            next_stop_strings=[self.cfg.stop_strings] * len(rewards),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=answers,
        )


def jaccard(left: str, right: str) -> float:
    """Words in common over words in either; two texts without words are equal."""
    left_words, right_words = set(_WORD.findall(left)), set(_WORD.findall(right))
    either = left_words | right_words
    return len(left_words & right_words) / len(either) if either else 1.0


def code_of(text: str) -> str:
    """The fenced code blocks of a text, joined; the text itself without any."""
    blocks = _FENCED.findall(text)
    return "\n".join(blocks) if blocks else text
