"""The grammar of command-line overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_rl.config import (
    ConfigError,
    MasterConfig,
    OverridesError,
    SFTMasterConfig,
    load_master_config,
    parse_hydra_overrides,
)
from nemo_rl.config.foreign import OTHER_TRAINERS
from nemo_rl.config.overrides import Action, parse_override
from nemo_rl.config.schema import is_known
from nemo_rl.config.validate import validate

names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
keys = st.lists(names, min_size=1, max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text("abcXYZ _/", max_size=8)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)


def applied(start: dict[str, Any], *overrides: str) -> Any:
    return OmegaConf.to_container(parse_hydra_overrides(OmegaConf.create(start), list(overrides)))


@pytest.mark.slow
@given(st.sampled_from([Action.SET, Action.ADD, Action.FORCE]), keys, values)
def test_what_is_written_as_json_is_read_back(action: Action, key: list[str], value: Any) -> None:
    parsed = parse_override(f"{action.value}{'.'.join(key)}={json.dumps(value)}")
    assert (parsed.action, parsed.key, parsed.value) == (action, tuple(key), value)


@given(keys, values)
def test_an_added_value_is_there_and_a_deleted_one_is_gone(key: list[str], value: Any) -> None:
    dotted = ".".join(key)
    node = applied({}, f"+{dotted}={json.dumps(value)}")
    for part in key:
        node = node[part]
    assert node == value
    assert applied(applied({}, f"+{dotted}=1"), f"~{dotted}", f"+{dotted}=2") == applied({}, f"++{dotted}=2")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=5e-6", 5e-6),
        ("a=true", True),
        ("a=null", None),
        ("a=", ""),
        ("a='1'", "1"),
        ("a=[1,x]", [1, "x"]),
        ("a={b:1,c:{d:x}}", {"b": 1, "c": {"d": "x"}}),
        ("a={b: 1}", {"b": 1}),
        ("a=http://host:80/x=y", "http://host:80/x=y"),
        ("a=%d: x", "%d: x"),
        ("a=${b.c}", "${b.c}"),
        ("a=Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("a=1:0:0:0", "1:0:0:0"),
        ("a=1:2", "1:2"),
        ("a=[on,yes,1:30,1:30.5]", [True, True, "1:30", "1:30.5"]),
        ("a=no", False),
        ("a=Off", False),
        ("a='off'", "off"),
        ("a={no: no}", {"no": False}),
        ("a=y", "y"),
        ("a=017", "017"),
        ("a=0o17", "0o17"),
        ("a=0x10", 16),
        ("a=0b11", 3),
        ("a=1_000", 1000),
        ("a=1E-6", 1e-6),
        ("a=-.inf", float("-inf")),
        ("a=2024-01-01", "2024-01-01"),
        ("a=-3", -3),
        ("a=True", True),
    ],
)
def test_values_are_read_as_yaml(text: str, value: Any) -> None:
    assert parse_override(text).value == value


@pytest.mark.parametrize(
    "text", ["", "a", "=1", "+a", "a..b=1", ".a=1", "a b=1", "a=[1", "a={b", "+++a=1", "~", "a='x"]
)
def test_what_is_no_override_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(OverridesError) as caught:
        parse_override(text)
    assert repr(text) in str(caught.value)


def test_a_mapping_merges_and_a_list_replaces() -> None:
    assert applied({"a": {"x": 1, "l": [1, 2]}}, "a={y: 2, l: [3]}") == {"a": {"x": 1, "y": 2, "l": [3]}}


def test_list_entries_are_reached_by_index() -> None:
    assert applied({"a": [{"x": 1}, {"x": 2}]}, "a.1.x=5") == {"a": [{"x": 1}, {"x": 5}]}
    with pytest.raises(OverridesError, match="a.2"):
        applied({"a": [{"x": 1}]}, "++a.2.x=5")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", r"no key sed\. Did you mean 'seed'\? Write \+sed=\.\.\. to add it"),
        ("lr=1", r"no key lr\. There is deep\.lr\.$"),
        ("deep.lrr=1", r"no key deep\.lrr\. Did you mean 'lr'\?"),
        ("+seed=1", r"seed is there already; write seed=\.\.\. to change it"),
        ("~gone", r"no key gone"),
        ("~seed=4", r"seed is 3"),
        ("++seed.x=1", r"seed is 3, not a mapping"),
    ],
)
def test_an_override_that_does_not_apply_says_why(override: str, message: str) -> None:
    with pytest.raises(OverridesError, match=message):
        applied({"seed": 3, "deep": {"lr": 1}}, override)


def test_keys_the_schema_knows_may_be_set_though_no_file_writes_them() -> None:
    config = load_master_config(
        None,
        [
            "grpo.seed=7",
            "+policy.generation.vllm_cfg.enforce_eager=true",
            "policy.generation.vllm_kwargs.max_num_seqs=8",
        ],
    )
    assert config.grpo.seed == 7
    assert config.policy.generation.vllm_cfg.enforce_eager
    assert config.policy.generation.vllm_kwargs == {"max_num_seqs": 8}


def test_a_null_key_may_be_added_and_a_mapping_merges_into_what_is_there() -> None:
    assert applied({"a": None}, "+a=3") == {"a": 3}
    assert applied({"a": {"x": 1}}, "+a={y: 2}") == {"a": {"x": 1, "y": 2}}
    assert applied({"a": [1]}, "+a=[2]") == {"a": [2]}


def test_a_run_time_and_words_for_yes_reach_their_keys() -> None:
    config = load_master_config(None, ["checkpointing.checkpoint_must_save_by=1:0:0:0", "grpo.val_at_end=on"])
    assert config.checkpointing.checkpoint_must_save_by == "1:0:0:0" and config.grpo.val_at_end is True


def test_a_deleted_chat_template_is_the_models_own() -> None:
    template = load_master_config(None, ["policy.tokenizer.chat_template=x", "~policy.tokenizer.chat_template"])
    assert template.policy.tokenizer.chat_template == "default"


def test_every_bad_override_is_reported_at_once() -> None:
    with pytest.raises(OverridesError) as caught:
        load_master_config(None, ["grpo.sed=1", "loss_fn.ratio_clip_mx=1", "grpo.seed=2"])
    assert len(caught.value.problems) == 2


def test_a_deleted_key_is_null_where_null_is_allowed_and_its_default_otherwise() -> None:
    config = load_master_config(None, ["~policy.scheduler", "grpo.seed=3", "~grpo.seed"])
    assert config.policy.scheduler is None
    assert config.grpo.seed == 42


def test_names_of_other_trainers_lead_to_keys_that_are_here_and_to_the_page_about_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    for name, key in OTHER_TRAINERS.items():
        assert is_known(MasterConfig, key.split(".")), key
        assert key.rpartition(".")[2] in page, key
        assert not is_known(MasterConfig, [key.partition(".")[0], name]) or key.startswith("env."), name


def test_a_name_of_another_trainer_is_translated_wherever_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"num_train_epochs is sft\.max_num_epochs here"):
        load_master_config(None, ["sft.num_train_epochs=3"], SFTMasterConfig)
    with pytest.raises(
        ConfigError, match=r"policy\.learning_rate: unknown key.* is policy\.optimizer\.kwargs\.lr here"
    ):
        validate({"policy": {"model_name": "m", "learning_rate": 1e-5}}, MasterConfig)
