"""Types between datasets and rollouts: messages, one prompt (`DatumSpec`), and the prompting of a task
(`TaskDataSpec`), with the prompt files it reads; `DataError` is the error that users see.

Processors fill these types, collation batches them. Invariant: `length` is the number of prompt tokens over all
messages.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nemo_rl.config.data import prompt_places
from nemo_rl.config.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A row of a dataset: JSON values by column.
Row = Mapping[str, Any]
# One message of a conversation, of whose keys the reader knows the types.
Message = dict[str, Any]
# One conversation: dicts with `role`, `content` and `token_ids` (int64 [length]); assistant messages also carry
# `generation_logprobs`, and losses need `token_loss_mask`. A plain dict because environments and processors of users
# add keys of their own.
LLMMessageLogType = list[Message]
_ROOT = Path(__file__).parents[2]
_COMMAND_OF_LATEX = re.compile(r"(\\[A-Za-z]{2,}\*?)\{0?\}")


class DataError(UserError, ValueError):
    """A dataset, column, prompt file, tokenizer or processor cannot be used as configured."""


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
        prompt_stands_before: whether a prompt without a `{}` is put before the problem, as of questions with choices.

    Raises DataError: a file is missing, or the prompt does not have exactly one place for the problem.
    """

    task_name: str | None = None  # the task's name in batches, metrics and environments
    prompt_file: str | None = None  # text with one `{}` for the problem; None uses the problem as it is
    system_prompt_file: str | None = None  # text of the system message; None has none
    prompt_stands_before: bool = False
    prompt: str | None = field(init=False, default=None)
    system_prompt: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt = load_prompt(self.prompt_file, self.prompt_stands_before)
        self.system_prompt = load_text(self.system_prompt_file, "system_prompt_file")

    def ask(self, problem: str) -> str:
        """The problem in, or after, the prompt."""
        return problem if self.prompt is None else self.prompt.format(problem)


# (row, how to prompt, tokenizer, longest prompt in tokens, row index) -> prompt
TaskDataProcessFnCallable = Callable[
    [Mapping[str, object], TaskDataSpec, "PreTrainedTokenizerBase", int, int], DatumSpec
]


def load_prompt(path: str | None, stands_before: bool = False) -> str | None:
    """The prompt text of a file, with a place for the problem; None for None. `stands_before`: take a text without such
    a place as it is, braces included, for what stands before the problem and an empty line.

    Raises DataError: the file is missing, or does not have exactly one place for the problem (`{}`, `{0}`); literal
    braces are written twice.
    """
    text = load_text(path, "prompt_file")
    if text is None:
        return None
    if stands_before and not re.search(r"\{0?\}", text.replace("{{", "").replace("}}", "")):
        return text.replace("{", "{{").replace("}", "}}") + "\n\n{}"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise DataError(f"prompt_file {path}: {error}; literal braces are written twice, as {{{{ and }}}}") from error
    if fields not in ([""], ["0"]):
        found = "none" if not fields else ", ".join(f"{{{name}}}" for name in fields)
        raise DataError(
            f"prompt_file {path}: needs exactly one {{}} where the problem goes, and has {found}; literal "
            "braces are written twice"
        )
    try:
        text.format("1")
    except ValueError as error:
        raise DataError(
            f"prompt_file {path}: the problem is text, and its place is for something else ({error}); write {{}}"
        ) from error
    command = _COMMAND_OF_LATEX.search(text)
    if command is not None:
        raise DataError(
            f"prompt_file {path}: the only {{}} is the argument of {command.group(1)}, so that the problem would stand "
            f"inside it; write {command.group(1)}{{{{}}}} for its braces, and {{}} where the problem goes"
        )
    return text


def _of_theirs(path: str) -> str:
    """Advice where a recipe of NeMo-RL's names a prompt of its examples."""
    if not Path(path).as_posix().startswith("examples/prompts/"):
        return ""
    ours = ", ".join(sorted(file.name for file in (_ROOT / "examples/prompts").glob("*.txt")))
    return f"; prompts of NeMo-RL's examples are not shipped here: copy the file there, or take one of {ours}"


def load_text(path: str | None, key: str) -> str | None:
    """The text of a file, looked for from the working directory and then from the package's checkout; None for None.
    Raises DataError: there is no such file, or it is not text.
    """
    if path is None:
        return None
    candidates = prompt_places(path)
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise DataError(
            f"{key} {path}: there is no such file (looked for "
            f"{' and '.join(str(candidate.absolute()) for candidate in candidates)})" + _of_theirs(path)
        )
    try:
        # Without the mark that editors of Windows put in front, which would stand in every prompt.
        return found.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{key} {found}: not UTF-8 text ({error})") from error
