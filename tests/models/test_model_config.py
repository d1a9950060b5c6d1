"""Models that cannot be loaded are refused by what was named."""

from __future__ import annotations

import pytest

from nemo_rl.config import PolicyConfig
from nemo_rl.models.policy.model_config import ModelNotFoundError, model_config


@pytest.mark.parametrize("name", ["the model of my colleague", "owner/the model", "name?"])
def test_words_that_name_no_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is neither a directory nor an id on the hub; name the model"):
        model_config(PolicyConfig(model_name=name))
