"""Makes a small Qwen3- or Llama-shaped language model and its tokenizer from nothing.

Byte-level tokenizer (every text can be encoded, no merges), random weights drawn from a fixed seed, saved as an
ordinary Hugging Face directory: the same arguments give the same bytes. It exists so that the whole loop can be run
and tested where nothing can be downloaded.

    python examples/make_tiny_model.py OUT_DIR [--layers 2] [--hidden 128] [--heads 4] [--kv-heads 2] [--experts 0]
    [--family qwen3] [--seed 0]

With `--experts N` every feed-forward is a mixture of N experts, of which a token takes two.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 256 byte symbols and three special tokens; end of text is `<|im_end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def make_model(
    vocab_size: int,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    seed: int,
    eos: int,
    pad: int,
    experts: int = 0,
    family: str = "qwen3",
) -> PreTrainedModel:
    """Random float32 weights of a causal language model with tied embeddings, drawn from `seed`. `family`: `qwen3`
    (with experts: Qwen3-MoE) or `llama`.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        # One over the square root of the width: so narrow a model hardly learns from the usual 0.02.
        "initializer_range": hidden**-0.5,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).float()
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).float()
    routed = Qwen3MoeConfig(
        **sizes, moe_intermediate_size=2 * hidden, num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True
    )
    return Qwen3MoeForCausalLM(routed).float()


def save_tiny_model(
    out_dir: Path,
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    experts: int = 0,
    family: str = "qwen3",
) -> PreTrainedModel:
    """Writes model and tokenizer to `out_dir` and returns the model."""
    tokenizer = make_tokenizer()
    eos, pad = (tokenizer.get_vocab()[token] for token in ("<|im_end|>", "<|endoftext|>"))
    # Rounded up so that the vocabulary divides over any small tensor-parallel size.
    vocab_size = (len(tokenizer) + 63) // 64 * 64
    model = make_model(
        vocab_size,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        seed=seed,
        eos=eos,
        pad=pad,
        experts=experts,
        family=family,
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return model


def main() -> None:
    """Writes the model directory and says where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--family", choices=("qwen3", "llama"), default="qwen3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.experts and args.family != "qwen3":
        parser.error(f"--experts {args.experts}: only --family qwen3 has experts here")
    sizes = {name: value for name, value in vars(args).items() if name != "out_dir"}
    model = save_tiny_model(args.out_dir, **sizes)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.out_dir}: {parameters / 1e6:.2f} M parameters, vocabulary {model.config.vocab_size}")


if __name__ == "__main__":
    main()
