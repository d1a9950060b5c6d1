"""The tokenizer as the configuration asks for it: padding, chat template and its arguments.

Decides what `policy.tokenizer.*` means; the rest is Hugging Face's. Invariant: the tokenizer has a padding token.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config import TokenizerConfig
from nemo_rl.config.errors import did_you_mean, first_line
from nemo_rl.data.interfaces import DataError, load_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chat template null: contents follow each other as they are.
PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_PROBE = "The answer is 7."
# Files that hold a vocabulary, each of another kind of tokenizer.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken")


def get_tokenizer(
    config: TokenizerConfig | Mapping[str, object], get_processor: bool = False, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer.

    Args:
        config: `policy.tokenizer`, as a section or a plain mapping.
        get_processor: NeMo-RL's switch for the processor of a vision-language model; only false is built.
        trust_remote_code: `policy.trust_remote_code`; off, a repository's own Python code is never run.

    Returns a Hugging Face tokenizer whose padding token is its end-of-sequence token where it has none. Raises
    DataError: there is no such tokenizer, it needs code that is not trusted, or a template file is missing.
    """
    from transformers import AutoTokenizer

    if get_processor:
        raise DataError(
            "get_tokenizer(get_processor=True) is not built yet: vision-language and audio models; leave it out (a "
            "repository's own code is run with trust_remote_code=True, by its name)"
        )
    config = TokenizerConfig.read(config)
    try:
        with _fast_backend() if config.use_fastokens else nullcontext():
            tokenizer: Any = AutoTokenizer.from_pretrained(config.name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = _without_files(config.name) or (
            f"cannot be loaded as a tokenizer, neither as a directory nor from the hub: {first_line(error)}"
        )
        raise DataError(f"policy.tokenizer.name {config.name}: {reason}") from error
    if not _reads_text(tokenizer):
        reason = _without_files(config.name) or (
            f"maps {_PROBE!r} to no token that it knows, so that every prompt would be empty; are its files those of "
            "another model, or cut off?"
        )
        raise DataError(f"policy.tokenizer.name {config.name}: {reason}")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError(
                f"policy.tokenizer.name {config.name}: has neither a padding nor an end-of-sequence token, "
                "so rows cannot be padded and responses have no end; tokenizer_config.json says which they are: save "
                "it beside the vocabulary"
            )
        tokenizer.pad_token = tokenizer.eos_token
    template = chat_template(config.chat_template)
    if template is not None:
        tokenizer.chat_template = template
    if config.chat_template_kwargs:
        _check_template_reads(tokenizer, config.chat_template_kwargs)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **config.chat_template_kwargs)
    return tokenizer


def _reads_text(tokenizer: Any) -> bool:
    """Whether ordinary text is more to a tokenizer than nothing. Of a model without tokenizer files, transformers makes
    tokenizers with their special tokens alone.
    """
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return any(token != tokenizer.unk_token_id for token in ids)


def _without_files(name: str) -> str | None:
    """Advice about a directory that holds no tokenizer; None for everything else."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        return None
    return (
        f"the directory holds no tokenizer (none of {', '.join(_VOCABULARIES)}); save the model's own there, in Python "
        f"AutoTokenizer.from_pretrained(NAME).save_pretrained({name!r}), or set policy.tokenizer.name to the model "
        "that it belongs to"
    )


def _check_template_reads(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, object]) -> None:
    """Whether the chat template has a use for its arguments. Raises DataError: it never reads one of them."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    templates = tokenizer.chat_template
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read: set[str] = set()
    for template in templates.values() if isinstance(templates, dict) else [templates or ""]:
        try:
            # A block marker of transformers' own, which has no variables.
            parsed = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))
        except TemplateSyntaxError:
            return
        # A template may give a variable its default, which makes it a declared one.
        read |= meta.find_undeclared_variables(parsed) | {one.name for one in parsed.find_all(nodes.Name)}
    for name in given:
        if name not in read:
            raise DataError(
                f"policy.tokenizer.chat_template_kwargs.{name}: the chat template of {tokenizer.name_or_path} reads no "
                f"such variable, so that it would change nothing.{did_you_mean(name, read)} Leave it out"
            )


@contextmanager
def _fast_backend() -> Generator[None]:
    """Tokenizers loaded meanwhile encode with the fastokens package (https://pypi.org/project/fastokens), which gives
    the same ids. Raises DataError: it is not installed.
    """
    try:
        import fastokens
    except ImportError as error:
        raise DataError(
            f"policy.tokenizer.use_fastokens=true needs the package fastokens ({error}); pip install "
            "fastokens, or set it to false"
        ) from error
    fastokens.patch_transformers()
    try:
        yield
    finally:
        fastokens.unpatch_transformers()


def chat_template(setting: str | None) -> str | None:
    """The template that `policy.tokenizer.chat_template` stands for; None keeps the model's own. Raises DataError: a
    `.jinja` file is missing.
    """
    if setting is None:
        return PASSTHROUGH_TEMPLATE
    if setting == "default":
        return None
    if "\n" not in setting and Path(setting).suffix == ".jinja":
        return load_text(setting, "policy.tokenizer.chat_template")
    return setting
