"""Tokens as a model's files list them: which end a response, and whether the model has a row for each of the
tokenizer's.

`stop_tokens` is the one place that says where a response ends, for training, validation, evaluation and SFT. Invariant:
without `stop_token_ids` in the configuration, every end-of-sequence id of the tokenizer, `generation_config.json` and
`config.json` ends a response.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.data.interfaces import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_FILES = ("generation_config.json", "config.json")
_NAMED = 5


@dataclass(frozen=True)
class StopTokens:
    """Token ids that end a response."""

    ids: tuple[int, ...]  # the ids, the tokenizer's end of sequence first
    named: Mapping[int, str] = field(default_factory=dict)  # token of each id, as the tokenizer spells it
    left_out: tuple[int, ...] = ()  # tokens that the model's files list, and the configuration does not

    @property
    def texts(self) -> tuple[str, ...]:
        """The tokens, as they stand in a rendered conversation."""
        return tuple(self.named[token] for token in self.ids if token in self.named)

    def line(self) -> str:
        """The line of a run's start that names them."""
        if not self.ids:
            said = "no token ends a response (stop_token_ids is []): only stop strings and max_new_tokens do"
        else:
            said = f"stop tokens: {self._list(self.ids)}"
        if self.left_out:
            said += f"; the model's files also list {self._list(self.left_out)}, which stop_token_ids leaves out"
        return said

    def _list(self, ids: Iterable[int]) -> str:
        return ", ".join(f"{self.named.get(token, '?')} ({token})" for token in ids)


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase,
    model_name: str | None = None,
    *,
    setting: Sequence[int] | None = None,
    overrides: Mapping[str, object] | None = None,
    vocabulary: int | None = None,
    key: str = "policy.generation.stop_token_ids",
) -> StopTokens:
    """The tokens that end a response.

    Args:
        model_name: directory or hub name of the model; None takes the tokenizer's.
        setting: `stop_token_ids`; a list is taken as it is, also an empty one, and None takes what the files list.
        overrides: `policy.hf_config_overrides`, which go before `config.json`.
        vocabulary: rows of the model's embedding; None does not check against it.
        key: dotted key of the setting, for messages.

    Raises DataError: a file lists something else than ids, or the setting an id that the model does not have.
    """
    listed = listed_stop_ids(tokenizer, model_name, overrides)
    known = [token for token in listed if vocabulary is None or token < vocabulary]
    if setting is not None and vocabulary is not None:
        beyond = [token for token in setting if not 0 <= token < vocabulary]
        if beyond:
            raise DataError(
                f"{key}: {beyond} are no tokens of {model_name}, whose vocabulary has {vocabulary}; leave the key out "
                "to take those that the model's files list"
            )
    ids = known if setting is None else list(dict.fromkeys(setting))
    left_out = tuple(token for token in known if token not in ids)
    texts = {token: _text(tokenizer, token) for token in (*ids, *left_out)}
    return StopTokens(tuple(ids), {token: text for token, text in texts.items() if text is not None}, left_out)


def listed_stop_ids(
    tokenizer: PreTrainedTokenizerBase, model_name: str | None = None, overrides: Mapping[str, object] | None = None
) -> list[int]:
    """The end-of-sequence ids of the tokenizer and the model's files; arguments and errors as of `stop_tokens`."""
    name = model_name or getattr(tokenizer, "name_or_path", "")
    listed = dict.fromkeys([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
    for file in _FILES if name else ():
        values = dict(_read(name, file))
        if file == "config.json":
            values |= overrides or {}
        for section in (values, values.get("text_config")):
            if isinstance(section, Mapping):
                listed |= dict.fromkeys(_ids(section.get("eos_token_id"), f"{name}/{file}"))
    return list(listed)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, name: str) -> str | None:
    """Compares the tokenizer with the model's embedding. `model`: the model's Hugging Face configuration. Returns a
    line about special tokens that the model lacks and only a text that spells them would use; None without. Raises
    DataError: a token that any text, the chat template or padding may use has no row.
    """
    rows = vocabulary_size(model)
    beyond = {text: token for text, token in tokenizer.get_vocab().items() if rows is not None and token >= rows}
    if not beyond:
        return None
    special = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
    named = {str(text) for text in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) if text}
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False) if tokenizer.chat_template else ""
    used = {text: token for text, token in beyond.items() if text not in special or text in named or text in template}
    if used:
        raise DataError(
            f"policy.tokenizer.name {tokenizer.name_or_path}: has {len(used)} tokens beyond the {rows} rows of the "
            f"embedding of {name}: {_shown(used)}; name the model's own tokenizer, or resize the model's embedding "
            "(transformers: model.resize_token_embeddings) and save it before training"
        )
    return (
        f"the tokenizer has special tokens beyond the {rows} rows of the model's embedding, so that no row of the data "
        f"may spell them: {_shown(beyond)}"
    )


def vocabulary_size(model: PretrainedConfig) -> int | None:
    """Rows of the model's embedding; None where its configuration does not say."""
    size = getattr(model, "vocab_size", None) or getattr(model.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _shown(tokens: Mapping[str, int]) -> str:
    first = sorted(tokens.items(), key=lambda item: item[1])[:_NAMED]
    return ", ".join(f"{text} ({token})" for text, token in first) + (", ..." if len(tokens) > _NAMED else "")


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> str | None:
    text = tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(tokenizer) else None
    return text if isinstance(text, str) else None


def _read(model_name: str, file: str) -> Mapping[str, object]:
    """A model's JSON file; empty where the model has none."""
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        path = folder / file
    elif (found := _from_hub(model_name, file)) is not None:
        path = Path(found)
    else:
        return {}
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: holds no JSON object; download it again")
    return values


def _from_hub(model_name: str, file: str) -> str | None:
    from transformers.utils import cached_file

    try:
        return cached_file(model_name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        logger.warning("%s of %s cannot be read, so its stop tokens are not known: %s", file, model_name, reason)
        return None


def _ids(value: object, where: str) -> list[int]:
    listed: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [one for one in listed if not isinstance(one, int) or isinstance(one, bool) or one < 0]
    if wrong:
        raise DataError(f"{where}: eos_token_id {value!r} is neither a token id nor a list of them")
    return listed
