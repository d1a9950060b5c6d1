"""The schemas as a reader sees them: complete, strict, and with one default per key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import nemo_rl
from nemo_rl.config import AdvEstimatorConfig, GRPOConfig, MasterConfig, Section, SFTMasterConfig
from nemo_rl.config.defaults import section_type
from nemo_rl.config.schema import keys_of


@pytest.mark.parametrize("schema", [MasterConfig, SFTMasterConfig])
def test_every_key_has_a_description(schema: type[Section]) -> None:
    assert [entry.name for entry in keys_of(schema) if not entry.meaning] == []


def test_sections_built_on_their_own_have_the_values_that_a_whole_configuration_gives_them() -> None:
    whole = MasterConfig()
    for name, field in MasterConfig.model_fields.items():
        nested = section_type(field)
        if nested is not None and name not in ("async_rl", "data", "teacher"):
            assert getattr(whole, name) == nested(), name


def test_defaults_that_follow_other_keys_hold_when_the_yaml_omits_them() -> None:
    config = MasterConfig(
        policy={"max_total_sequence_length": 1024, "train_micro_batch_size": 2, "model_name": "x"},
        grpo={"normalize_rewards": False},
    )
    assert config.policy.tokenizer.name == "x"
    assert config.policy.logprob_batch_size == 2
    assert config.policy.generation.max_new_tokens == config.policy.generation.vllm_cfg.max_model_len == 1024
    assert config.policy.sequence_packing.train_mb_tokens == config.policy.dynamic_batching.logprob_mb_tokens == 2048
    assert config.grpo.reward_shaping.max_response_length == 1024
    assert config.grpo.adv_estimator.normalize_rewards is False


def test_a_given_value_wins_over_one_that_would_follow() -> None:
    config = MasterConfig(policy={"max_total_sequence_length": 1024, "generation": {"max_new_tokens": 8}})
    assert config.policy.generation.max_new_tokens == 8
    assert config.policy.generation.vllm_cfg.max_model_len == 1024


def test_a_complete_configuration_read_again_is_itself() -> None:
    config = MasterConfig(env={"mine": {"class": "a.B", "bonus": 1}}, data={"train": {"dataset_name": "gsm8k"}})
    assert MasterConfig(**config.to_dict()) == config


def test_null_for_a_section_means_its_defaults() -> None:
    assert MasterConfig(data_plane=None, grpo={"async_grpo": None}) == MasterConfig()


def test_sections_share_no_state() -> None:
    first, second = GRPOConfig(), GRPOConfig()
    first.reward_shaping.enabled = True
    assert not second.reward_shaping.enabled and not GRPOConfig().reward_shaping.enabled


def test_items_read_like_attributes() -> None:
    config = MasterConfig()
    assert config["policy"]["dtensor_cfg"]["_v2"] is config.policy.dtensor_cfg.v2 is True
    config["grpo"]["seed"] = 7
    assert config.grpo.seed == 7
    with pytest.raises(KeyError):
        config["grpo"]["sed"]


def test_unknown_keys_and_wrong_types_are_refused() -> None:
    with pytest.raises(ValidationError):
        AdvEstimatorConfig.model_validate({"nam": "grpo"})
    with pytest.raises(ValidationError):
        GRPOConfig()["seed"] = "many"


def test_dataset_entries_take_omitted_keys_from_the_default_entry() -> None:
    config = MasterConfig(
        data={
            "default": {"env_name": "code", "prompt_file": None},
            "train": [{"dataset_name": "squad"}, {"dataset_name": "a.B", "x": 1, "env_name": "m"}],
        }
    )
    assert [entry.env_name for entry in config.data.train] == ["code", "m"]
    assert config.data.train[0].prompt_file is None and config.data.train[0].processor == "math_hf_data_processor"
    assert config.data.train[1]["x"] == 1


def test_a_users_environment_keeps_its_own_keys() -> None:
    config = MasterConfig(env={"mine": {"class": "my.module.Env", "bonus": 2}})
    section = config.env.of("mine")
    assert section is not None and section.env_class == "my.module.Env" and section["bonus"] == 2
    assert config.env.of("absent") is None


# Handed on whole, to be read by others.
PASSED_ON = (
    "logger.wandb.",
    "logger.swanlab.",
    "policy.generation.mcore_generation_config.",
    "teacher.generation.mcore_generation_config.",
)


@pytest.mark.parametrize("schema", [MasterConfig, SFTMasterConfig])
def test_every_key_is_read_somewhere_or_says_that_it_has_no_effect(schema: type[Section]) -> None:
    package = Path(nemo_rl.__file__).parent
    code = "\n".join(
        path.read_text()
        for path in package.rglob("*.py")
        if path.parent.name != "config" or path.name in ("world_sizes.py", "teacher_sections.py")
    )
    read = set(re.findall(r"[.\"'](\w+)\b", code))
    silent = [
        entry.name
        for entry in keys_of(schema)
        if entry.has_value
        and entry.not_yet is None
        and not entry.name.startswith(PASSED_ON)
        and not {entry.name.rpartition(".")[2], entry.name.rpartition(".")[2].lstrip("_")} & read
        and not any(said in entry.meaning for said in ("no effect", "not built, and refused", "; refused where"))
        and not entry.meaning.startswith("Accepted ")
        # A second name, which a rule compares with the first.
        and not entry.meaning.endswith("which it must equal.")
    ]
    assert silent == []
