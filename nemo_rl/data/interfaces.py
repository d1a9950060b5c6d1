"""What travels from a dataset to the rollout: messages, one prompt (`DatumSpec`), and how a task is prompted
(`TaskDataSpec`).

Types only; processors fill them, collation batches them. Invariant: `length` is the number of prompt tokens over all
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nemo_rl.data.prompts import load_prompt, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One conversation: dicts with `role`, `content` and `token_ids` (int64 [length]); assistant messages also carry
# `generation_logprobs`, and losses need `token_loss_mask`. A plain dict because environments and processors of users
# add keys of their own.
LLMMessageLogType = list[dict[str, Any]]
# The same before tokenization: `role` and `content` only.
FlatMessagesType = dict[str, object]


class DatumSpec(TypedDict):
    """One prompt, ready for rollout."""

    message_log: LLMMessageLogType
    length: int
    extra_env_info: dict[str, object] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]


@dataclass
class TaskDataSpec:
    """How the rows of one task become prompts.

    Attributes:
        task_name: the task's name in batches, metrics and environments.
        prompt_file: text with one `{}` for the problem; None uses the problem as it is.
        system_prompt_file: text of the system message; None has none.

    Raises:
        DataError: a file is missing, or the prompt does not have exactly one place for the problem.
    """

    task_name: str | None = None
    prompt_file: str | None = None
    system_prompt_file: str | None = None
    prompt: str | None = field(init=False, default=None)
    system_prompt: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt = load_prompt(self.prompt_file)
        self.system_prompt = load_text(self.system_prompt_file, "system_prompt_file")


# (row, how to prompt, tokenizer, longest prompt in tokens, row index) -> prompt
TaskDataProcessFnCallable = Callable[
    [Mapping[str, object], TaskDataSpec, "PreTrainedTokenizerBase", int, int], DatumSpec
]
