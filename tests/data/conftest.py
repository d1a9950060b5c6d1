"""Tokenizers made from nothing: one token per character with a ChatML template, and models of SentencePiece's kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPTSw3Tokenizer, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<no>{% endif %}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate([*specials, *alphabet])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=specials[3:],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


SENTENCES = [
    f"user\nWhat is {n}?\nassistant\nanswer {n}. USER: {n} ASSISTANT: {n} [INST] {n} [/INST] Be brief."
    for n in range(99)
]


def _sentencepiece(folder: Path) -> GPTSw3Tokenizer:
    """A tokenizer of a SentencePiece model, which only the package sentencepiece reads: it knows no offsets."""
    import sentencepiece

    with (folder / "spiece.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_writer=file,
            model_type="bpe",
            vocab_size=420,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            pad_id=3,
            **{f"{name}_piece": f"<{name}>" for name in ("unk", "bos", "eos", "pad")},
            minloglevel=2,
        )
    return GPTSw3Tokenizer(vocab_file=str(folder / "spiece.model"), **NAMED)


def _llama(folder: Path) -> PreTrainedTokenizerFast:
    """The same model in Llama's fast form: spaces are marks, and the first word gets one."""
    pieces = _sentencepiece(folder).sp_model
    vocab = {pieces.id_to_piece(token): token for token in range(pieces.get_piece_size())}
    pairs = [(one[:at], one[at:]) for one in vocab for at in range(1, len(one))]
    merges = sorted(
        (pair for pair in pairs if pair[0] in vocab and pair[1] in vocab), key=lambda pair: vocab["".join(pair)]
    )
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)


def _unigram(_: Path) -> PreTrainedTokenizerFast:
    """A Unigram model that normalises what it reads, so that tokens and text differ in length."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", *ENDS]
    letters = [*map(chr, range(10, 127)), "é"]
    trainer = trainers.UnigramTrainer(
        vocab_size=420, special_tokens=specials, initial_alphabet=letters, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)


ENDS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]
NAMED: dict[str, Any] = {
    **{f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad")},
    "additional_special_tokens": ENDS,
}


@pytest.fixture(scope="session", params=[_sentencepiece, _llama, _unigram], ids=["sentencepiece", "llama", "unigram"])
def spaced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokenizers that mark spaces, and put one before the first word."""
    return request.param(tmp_path_factory.mktemp("spaced"))
