"""The text of models of images too: scored as transformers scores it, and trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING

from nemo_rl.models.policy.model_config import auto_class
from tests.models.tower_ranks import scored_and_trained
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 384,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", GEMMA, {}),
    "gemma4": (
        "gemma4",
        {**GEMMA, "vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 16},
        {"num_key_value_heads": 2},
    ),
    "mistral3": ("mistral3", {"model_type": "mistral"}, {}),
    "ministral3": ("mistral3", {"model_type": "ministral3"}, {}),
}


@pytest.mark.parametrize(("name", "world"), [*((name, 1) for name in KINDS), ("gemma4", 2), ("mistral3", 2)])
def test_a_text_tower_is_scored_as_by_transformers_and_trained_alone(name: str, world: int, tmp_path: Path) -> None:
    kind, text, vision = KINDS[name]
    config = CONFIG_MAPPING[kind](text_config=TEXT | text, vision_config=VISION | vision)
    torch.manual_seed(0)
    auto_class(config).from_config(config).save_pretrained(tmp_path)
    ranks = run_ranks(scored_and_trained, world, str(tmp_path))
    rows = [torch.tensor(row) for seen in ranks for row in seen["found"]]
    wanted = torch.tensor(ranks[0]["wanted"])
    assert min(float((wanted - row[: len(wanted)]).abs().max()) for row in rows) < 1e-4
    for seen in ranks:
        assert seen["grad_norm"] > 0
        changed = set(seen["changed"])
        assert changed and all("language_model" in one or "lm_head" in one for one in changed)
        assert any("layers.1.mlp.down_proj" in one for one in changed)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert set(seen["sent"]) <= set(file.keys())
