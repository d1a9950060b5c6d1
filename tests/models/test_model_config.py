"""Models that cannot be loaded are refused by what was named."""

from __future__ import annotations

import importlib.util

import pytest
from transformers import CONFIG_MAPPING

from nemo_rl.config import PolicyConfig
from nemo_rl.models.policy.model_config import ModelNotFoundError, UnsupportedModelError, check_vision, model_config


@pytest.mark.parametrize("name", ["the model of my colleague", "owner/the model", "name?"])
def test_words_that_name_no_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is neither a directory nor an id on the hub; name the model"):
        model_config(PolicyConfig(model_name=name))


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3", "qwen2_5_vl"])
def test_engines_need_torchvision_for_models_with_a_vision_tower(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG_MAPPING[kind]()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=f"run a {kind} model.* needs torchvision"):
        check_vision(config, "some/model")
    check_vision(CONFIG_MAPPING["gemma3_text"](), "some/model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_vision(config, "some/model")
