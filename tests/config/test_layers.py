"""Files with parents: inheritance, `_override_`, `???`, interpolation, and where a value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl.config import ConfigError, load_config, load_master_config
from nemo_rl.config.defaults import register_omegaconf_resolvers, resolve
from nemo_rl.config.layers import Layer, _FastLoader, _Loader, merge, read_layers, read_yaml, source_of

leaves = st.none() | st.booleans() | st.integers() | st.text("xyz", max_size=3) | st.lists(st.integers(), max_size=2)
trees = st.recursive(leaves, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)
followers = names.map("${{{}}}".format) | names.map("x${{{}}}".format) | names.map("${{mul:${{{}}},2}}".format)
followers |= st.sampled_from(["${.a}", "${..b}", "${a.${b}}", "${oc.select:a}", "\\\\${a}", "${a[0]}", "${", "???"])
following = st.recursive(
    leaves | followers,
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


def write(folder: Path, name: str, content: dict[str, Any] | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


_WORDS = ["a", "1", "0x1", "1e-6", "no", "017", "1:30", "é", "null", "- ", ": ", ":", "{", "}", "[", "]", ",", "'", '"']
_WORDS += ["#", " #", "\n", "\n  ", "? ", "&a ", "*a", "> ", "%", "!!str ", "<<: *a"]


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="there is one parser")
@given(st.lists(st.sampled_from(_WORDS), max_size=10).map("".join))
def test_both_parsers_read_the_same_values(text: str) -> None:
    try:
        fast = yaml.load(text, Loader=_FastLoader)
    except yaml.YAMLError:
        return
    assert repr(fast) == repr(yaml.load(text, Loader=_Loader)) == repr(read_yaml(text))


def test_what_one_parser_reads_otherwise_is_read_as_omegaconf_reads_it() -> None:
    assert read_yaml("{a:{b:1}}") == {"a": {"b:1": None}}
    for text in ("a: 1\t", "a:\n\tb: 1"):
        with pytest.raises(yaml.YAMLError, match="cannot start any token"):
            read_yaml(text)


def test_a_child_beats_its_parents_and_later_parents_beat_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "base/one.yaml", {"a": 1, "b": {"x": 1, "y": 1}, "c": [1, 2]})
    write(tmp_path, "base/two.yaml", {"defaults": "one.yaml", "b": {"y": 2}, "c": [3]})
    write(tmp_path, "other.yaml", {"b": {"z": 5}, "a": 9})
    child = write(tmp_path, "child.yaml", {"defaults": ["base/two.yaml", "other.yaml"], "b": {"x": 7}})
    assert load_config(child) == {"a": 9, "b": {"x": 7, "y": 2, "z": 5}, "c": [3]}


def test_an_absolute_parent_is_found(tmp_path: Path) -> None:
    parent = write(tmp_path, "far/parent.yaml", {"a": 1})
    assert load_config(write(tmp_path, "child.yaml", {"defaults": str(parent)})) == {"a": 1}


def test_override_marker_replaces_the_inherited_mapping(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", {"a": {"x": 1, "deep": {"p": 1}}, "b": {"x": 1}})
    child = write(
        tmp_path,
        "child.yaml",
        {"defaults": "base.yaml", "a": {"_override_": True, "y": 2}, "b": {"_override_": False, "y": 2}},
    )
    assert load_config(child) == {"a": {"y": 2}, "b": {"x": 1, "y": 2}}


def test_a_mandatory_marker_does_not_mask_the_parent(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", {"a": 1})
    child = write(tmp_path, "child.yaml", {"defaults": "base.yaml", "a": "???", "b": "???"})
    assert OmegaConf.to_container(load_config(child)) == {"a": 1, "b": "???"}


def test_interpolations_are_resolved_after_the_merge(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        {
            "n": 2,
            "twice": "${mul:${n},2}",
            "group": {"half": "${div:${n},2}", "same": "${.half}", "top": "${max:${n},3}"},
        },
    )
    config = load_config(write(tmp_path, "child.yaml", {"defaults": "base.yaml", "n": 8}), ["+extra=${add:${n},1}"])
    resolved = OmegaConf.to_container(config, resolve=True)
    assert resolved == {"n": 8, "twice": 16, "group": {"half": 4, "same": 4, "top": 8}, "extra": 9}


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from("abc"), following, max_size=3))
def test_interpolations_are_resolved_as_omegaconf_resolves_the_whole(raw: dict[str, Any]) -> None:
    register_omegaconf_resolvers()
    try:
        whole = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    except (OmegaConfBaseException, RecursionError, TypeError) as error:
        with pytest.raises((ConfigError, type(error))):
            resolve(raw)
    else:
        assert resolve(raw) == whole


def test_files_that_inherit_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", {"defaults": "b.yaml"})
    write(tmp_path, "b.yaml", {"defaults": "a.yaml"})
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_a_missing_parent_is_named_with_the_file_that_wants_it(tmp_path: Path) -> None:
    child = write(tmp_path, "child.yaml", {"defaults": "gone.yaml"})
    with pytest.raises(ConfigError, match=r"no file .*gone\.yaml \(inherited by .*child\.yaml\)"):
        load_config(child)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text", "a: [1", "a: {b"])
def test_what_is_no_mapping_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(write(tmp_path, "bad.yaml", text))


def test_the_source_of_a_value_is_the_strongest_layer_that_writes_it(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", {"a": {"x": 1, "y": 1, "z": 1}})
    child = write(tmp_path, "child.yaml", {"defaults": "base.yaml", "a": {"y": 2, "z": "???"}})
    layers = [*read_layers(child), Layer("override", {"a": {"w": 1}})]
    assert [source_of(layers, ["a", key]) for key in "xyzwq"] == [str(base), str(child), str(base), "override", None]


@given(mappings, mappings)
def test_merging_keeps_every_value_of_the_upper_layer(below: dict[str, Any], above: dict[str, Any]) -> None:
    def holds(merged: object, wanted: object) -> bool:
        if isinstance(wanted, dict):
            return isinstance(merged, dict) and all(
                key in merged and holds(merged[key], value) for key, value in wanted.items()
            )
        return merged == wanted

    merged = merge([Layer("below", below), Layer("above", above)])
    assert holds(merged, above)
    assert set(merged) == {*below, *above}


@given(mappings, mappings, mappings)
def test_merging_is_associative(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> None:
    def layer(values: dict[str, Any]) -> Layer:
        return Layer("", values)

    left = merge([layer(merge([layer(first), layer(second)])), layer(third)])
    assert left == merge([layer(first), layer(merge([layer(second), layer(third)]))]) or has_scalar_between(
        first, second, third
    )


def has_scalar_between(first: Any, second: Any, third: Any) -> bool:
    """A scalar between two mappings hides the lower one only when the layers are merged from below."""
    if not isinstance(second, dict):
        return isinstance(first, dict) and isinstance(third, dict)
    return (
        any(key in second and has_scalar_between(first[key], second[key], third[key]) for key in first if key in third)
        if isinstance(first, dict) and isinstance(third, dict)
        else False
    )


@pytest.mark.parametrize(
    "key",
    [
        "policy.optimizer.kwargs.amsgrad",
        "policy.generation.vllm_kwargs.enable_lora",
        "policy.hf_config_overrides.use_cache",
        "env.mine.strict",
        "data.train.own",
    ],
)
@pytest.mark.parametrize(("word", "meaning"), [("no", False), ("Off", False), ("yes", True), ("'off'", "off")])
def test_a_word_means_the_same_in_every_section_of_a_file_and_as_an_override(
    tmp_path: Path, key: str, word: str, meaning: object
) -> None:
    file = tmp_path / "recipe.yaml"
    text = word
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    file.write_text(text)
    for loaded in (load_config(file), load_config(write(tmp_path, "empty.yaml", {}), [f"++{key}={word}"])):
        assert OmegaConf.select(loaded, key) == meaning


@pytest.mark.parametrize(
    "key", ["grpo.seed", "policy.max_grad_norm", "checkpointing.keep_top_k", "env.math.num_workers"]
)
def test_a_number_with_a_leading_zero_is_refused_where_a_number_is_wanted(key: str) -> None:
    for text in ("012", "-01", "'007'"):
        with pytest.raises(ConfigError, match=rf"{key}: '.*': a number with a leading zero is octal"):
            load_master_config(None, [f"{key}={text}"])
    assert load_master_config(None, ["policy.model_name=007"]).policy.model_name == "007"
