"""Models of well-known shapes with random weights, and prompts of an exact length: what benchmarks run on.

Nothing is downloaded; throughput does not depend on what weights say. The tokenizer reads byte by byte, so a prompt of
N ASCII characters has exactly N tokens, and knows every id of the model's vocabulary, so that responses are text of the
usual length: a trainer that decodes them does the work that it does with a real tokenizer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import string
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from make_tiny_model import make_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    # Qwen3-30B-A3B with 8 of its 48 layers.
    "moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}


def _config(shape: str) -> Any:
    from transformers import Qwen2Config, Qwen3MoeConfig

    vocabulary = 512 if shape.startswith("tiny") else 151936
    kind = Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen2Config
    return kind(
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        rope_theta=1e6,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        **SHAPES[shape],
    )


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a made-up word of five characters for every id above those of bytes and specials."""
    tokenizer = make_tokenizer()
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    known = len(tokenizer)
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = ("\u0120" + "".join(word) for word in letters)  # "\u0120" is a space to a byte-level tokenizer
    description["model"]["vocab"] |= dict(zip(words, range(known, vocabulary), strict=False))
    whole = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        model_max_length=tokenizer.model_max_length,
    )
    if len(whole) != vocabulary:
        raise AssertionError(f"the tokenizer knows {len(whole)} ids of {vocabulary}")
    return whole


def make_config(shape: str, directory: Path) -> Path:
    """Writes configuration and tokenizer of a shape without weights, for engines that start with dummy ones."""
    path = directory / f"{shape}-config"
    config = _config(shape)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(path)
    _tokenizer(config.vocab_size).save_pretrained(path)
    return path


def make_model(shape: str, directory: Path, *, seed: int = 0) -> Path:
    """Writes a Qwen2- or Qwen3-MoE-shaped model with random bfloat16 weights; done once per directory."""
    from transformers import AutoModelForCausalLM

    path = directory / shape
    if (path / "config.json").exists():
        return path
    config = _config(shape)
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)
    _tokenizer(config.vocab_size).save_pretrained(path)
    return path


def make_prompts(count: int, length: int, path: Path, *, answer: int = 0, seed: int = 0) -> Path:
    """Writes `count` prompts of exactly `length` tokens as JSON lines (`input`, `output`, and `prompt` for others).
    `answer`: tokens of the output, for fine-tuning on it.
    """
    generator = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(generator.choices(string.ascii_lowercase, k=length))
            output = "".join(generator.choices(string.ascii_lowercase, k=answer)) or "0"
            file.write(json.dumps({"input": text, "output": output, "prompt": text}) + "\n")
    return path


def prompts_section(prompts: Path, longest: int) -> dict[str, Any]:
    """The `data` section for a file of `make_prompts`; rewarded by `env.parity`. `longest`: tokens of a prompt."""
    return {
        "num_workers": 0,
        "max_input_seq_length": longest,
        "default": {"prompt_file": None, "env_name": "parity"},
        "train": {
            "dataset_name": "ResponseDataset",
            "data_path": str(prompts),
            "input_key": "input",
            "output_key": "output",
        },
    }


def host_speed_s() -> float:
    """Seconds of 20 million additions in Python. Hosts differ by a factor of two in what their processors feed to the
    accelerators, so figures of two hosts are compared with this beside them.
    """
    began, total = time.perf_counter(), 0
    for number in range(20_000_000):
        total += number
    return time.perf_counter() - began


def visible_gpus(count: int) -> list[str]:
    """The GPUs of this benchmark: those of `CUDA_VISIBLE_DEVICES`, or the machine's first."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else [str(gpu) for gpu in range(count)])[:count]
