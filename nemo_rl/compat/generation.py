"""NeMo-RL's types and functions around a generation batch and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar

import torch

from nemo_rl.config import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Config = TypeVar("Config", GenerationConfig, dict[str, object])


class GenerationDatumSpec(TypedDict):
    """What `generate` takes: `input_ids` int64 [B, S] padded on the right, `input_lengths` int64 [B]."""

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]


class GenerationOutputSpec(TypedDict):
    """What `generate` gives: `output_ids` int64 [B, S] prompt and response padded on the right, `logprobs` float32
    [B, S] (0 on prompt and padding), `generation_lengths`, `unpadded_sequence_lengths` int64 [B], `truncated` bool [B].
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]


def configure_generation_config(config: Config, tokenizer: PreTrainedTokenizerBase, is_eval: bool = False) -> Config:
    """Fills in what follows from the tokenizer, in place, and returns the configuration.

    Args:
        config: `policy.generation`, as a section or a plain mapping.
        tokenizer: a Hugging Face tokenizer.
        is_eval: load real weights; otherwise training sends them.
    """
    if config.get("stop_token_ids") is None if isinstance(config, dict) else config.stop_token_ids is None:
        config["stop_token_ids"] = [tokenizer.eos_token_id]
    vllm = config.setdefault("vllm_cfg", {}) if isinstance(config, dict) else config.vllm_cfg
    vllm["load_format"] = "auto" if is_eval else "dummy"
    if isinstance(config, dict):
        config["_pad_token_id"] = tokenizer.pad_token_id
    return config


def should_use_async_rollouts(generation_config: GenerationConfig | Mapping[str, object] | None) -> bool:
    """Whether each sample goes through its turns by itself: always, because every engine streams."""
    return generation_config is not None
