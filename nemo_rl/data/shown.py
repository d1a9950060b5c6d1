"""What the start of a run shows of its data: one row as the model will see it, with the trained text marked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from nemo_rl.data.interfaces import DataError, LLMMessageLogType
from nemo_rl.data.llm_message_utils import get_formatted_message_log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.model_tokens import StopTokens
    from nemo_rl.data.processors import AllTaskProcessedDataset

# Puts `token_loss_mask` on every message of a log.
Mask = Callable[[LLMMessageLogType], None]
OPEN, CLOSE = "⟦", "⟧"
_HEAD, _TAIL, _GOLD = 800, 400, 120
_ROWS_TRIED = 16


def example(dataset: AllTaskProcessedDataset, mask: Mask | None) -> str:
    """A row as it is rendered.

    Args:
        dataset: processed rows, at least one.
        mask: marks what is trained of a conversation; None for prompts, whose responses are trained.

    Returns text in which `OPEN` and `CLOSE` are around what is trained.
    """
    rows = range(min(len(dataset), _ROWS_TRIED))
    row = next((number for number in rows if dataset[number]["loss_multiplier"]), 0)
    datum = dataset[row]
    log = [dict(message) for message in datum["message_log"]]
    if mask is not None:
        mask(log)
    text = _marked(log, dataset.tokenizer)
    said = f"row {row + 1} as it is rendered, trained text in {OPEN} {CLOSE}:\n{_shortened(text)}"
    if mask is None:
        said += f"{OPEN}response{CLOSE}"
        gold = (datum.get("extra_env_info") or {}).get("ground_truth")
        said += "" if gold is None else f"\njudged by: {str(gold)[:_GOLD]}"
    return said


def unstopped_turn(tokenizer: PreTrainedTokenizerBase, stops: StopTokens) -> str | None:
    """A line for the person where the chat template ends an assistant's turn with what does not end a response."""
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        log = get_formatted_message_log(
            conversation,
            tokenizer,
            add_bos_token=False,
            add_eos_token=False,
            add_generation_prompt=True,
            stop_texts=stops.texts,
        )
    except DataError:
        return None
    end = log[-1]["content"].rpartition("y")[2].strip()
    if not end or not stops.ids or end.startswith(stops.texts):
        return None
    return (
        f"the chat template ends an assistant's turn with {end!r}, which is none of the stop tokens: a model that "
        "learned this template would not stop; policy.generation.stop_token_ids names further ones"
    )


def _marked(log: LLMMessageLogType, tokenizer: PreTrainedTokenizerBase) -> str:
    tokens: list[tuple[int, bool]] = []
    for message in log:
        ids = message["token_ids"].tolist()
        trained = message["token_loss_mask"].tolist() if "token_loss_mask" in message else [0] * len(ids)
        tokens += [(token, bool(one)) for token, one in zip(ids, trained, strict=True)]
    decode: Callable[..., object] = tokenizer.decode
    parts = [
        (is_trained, str(decode([token for token, _ in run], skip_special_tokens=False)))
        for is_trained, run in groupby(tokens, key=lambda pair: pair[1])
    ]
    return "".join(f"{OPEN}{text}{CLOSE}" if is_trained else text for is_trained, text in parts)


def _shortened(text: str) -> str:
    left = len(text) - _HEAD - _TAIL
    return text if left <= 0 else f"{text[:_HEAD]} [... {left} characters ...] {text[-_TAIL:]}"
