"""Which tokens end a response, and whether the model has a row for each of the tokenizer's."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, Qwen3Config

from nemo_rl.algorithms import evaluation
from nemo_rl.algorithms.grpo import assembly
from nemo_rl.algorithms.placement import OwnPlacement
from nemo_rl.algorithms.startup import check_tokens, hold_to_vocabulary
from nemo_rl.compat.calls import configure_generation_config
from nemo_rl.config import EvalMasterConfig, PolicyConfig
from nemo_rl.data.datasets.raw import conversation
from nemo_rl.data.interfaces import DataError, TaskDataSpec
from nemo_rl.data.model_tokens import check_vocabulary, stop_tokens
from nemo_rl.data.processors import AllTaskProcessedDataset, get_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.models.policy.model_config import generation_config, model_config

EOS, TURN, MORE = 1, 4, 0


def model(folder: Path, generation: object = None, config: object = None) -> str:
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            (folder / name).write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, None, [EOS]),
        ({"eos_token_id": [EOS, TURN]}, None, [EOS, TURN]),  # Gemma 3, Phi 3.5, Llama 3
        ({"eos_token_id": TURN}, {"eos_token_id": EOS}, [EOS, TURN]),
        ({"eos_token_id": None}, {"eos_token_id": [TURN, EOS]}, [EOS, TURN]),
        ({}, {"text_config": {"eos_token_id": TURN}}, [EOS, TURN]),  # models that also see
        ({"eos_token_id": [TURN]}, {"eos_token_id": MORE}, [EOS, TURN, MORE]),
        ({"eos_token_id": [TURN, 9999]}, None, [EOS, TURN]),  # can never be drawn
    ],
)
def test_every_id_that_the_files_list_ends_a_response(
    generation: object, config: object, ids: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    found = stop_tokens(tokenizer, model(tmp_path, generation, config), vocabulary=300)
    assert list(found.ids) == ids
    assert all(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" in found.line() for token in ids)


def test_stop_ids_of_tokenizers_that_mark_spaces_are_found_and_named(spaced: Any, tmp_path: Path) -> None:
    turn = spaced.convert_tokens_to_ids("<|im_end|>")
    found = stop_tokens(spaced, model(tmp_path, {"eos_token_id": turn}), vocabulary=len(spaced))
    assert found.ids == (spaced.eos_token_id, turn) and found.texts == ("<eos>", "<|im_end|>")
    assert check_vocabulary(spaced, Qwen3Config(vocab_size=len(spaced)), "m") is None
    with pytest.raises(DataError, match="tokens beyond the 9 rows"):
        check_vocabulary(spaced, Qwen3Config(vocab_size=9), "m")


def test_ids_of_the_configuration_are_taken_as_written(tokenizer: Any, tmp_path: Path) -> None:
    name = model(tmp_path, {"eos_token_id": [EOS, TURN]})
    mine = stop_tokens(tokenizer, name, setting=[TURN], vocabulary=300)
    assert mine.ids == (TURN,) and "also list <eos> (1), which stop_token_ids leaves out" in mine.line()
    none = stop_tokens(tokenizer, name, setting=[])
    assert none.ids == () and none.line().startswith("no token ends a response")
    for wrong in ([300], [-1], [EOS, 10**6]):
        with pytest.raises(DataError, match=r"stop_token_ids: .* are no tokens of .*vocabulary has 300"):
            stop_tokens(tokenizer, name, setting=wrong, vocabulary=300)
    overridden = stop_tokens(tokenizer, model(tmp_path, None, {"eos_token_id": 2}), overrides={"eos_token_id": TURN})
    assert TURN in overridden.ids and 2 not in overridden.ids


@pytest.mark.parametrize("wrong", ["</s>", [EOS, "</s>"], True, -1, 1.5, {"id": 1}])
def test_what_is_no_id_is_named_with_its_file(wrong: object, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"generation_config\.json: eos_token_id .* neither a token id nor a list"):
        stop_tokens(tokenizer, model(tmp_path, {"eos_token_id": wrong}))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_file_is_named(text: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"generation_config\.json: "):
        stop_tokens(tokenizer, str(tmp_path))


def test_checkpoints_carry_the_stop_tokens_of_the_model(tmp_path: Path, tokenizer: Any) -> None:
    published = {"eos_token_id": [EOS, TURN], "temperature": 0.6, "do_sample": False}
    cfg = PolicyConfig(model_name=model(tmp_path, published))
    assert generation_config(cfg, Qwen3Config(eos_token_id=EOS)).eos_token_id == [EOS, TURN]
    bare = PolicyConfig(model_name=str(tmp_path / "nowhere"))
    assert generation_config(bare, Qwen3Config(eos_token_id=TURN)).eos_token_id == TURN
    generation_config(cfg, Qwen3Config()).to_json_file(tmp_path / "written.json")
    assert GenerationConfig.from_pretrained(tmp_path, "written.json").eos_token_id == [EOS, TURN]


def test_the_call_of_other_scripts_fills_in_the_same_tokens(tmp_path: Path, tokenizer: Any) -> None:
    filled = configure_generation_config(
        {"model_name": model(tmp_path, {"eos_token_id": [EOS, TURN]}), "stop_token_ids": None}, tokenizer
    )
    assert filled["stop_token_ids"] == [EOS, TURN]
    assert configure_generation_config({"stop_token_ids": []}, tokenizer)["stop_token_ids"] == []


def grown(tokenizer: Any, **more: Any) -> Any:
    changed = copy.deepcopy(tokenizer)
    for name, value in more.items():
        getattr(changed, name)(value)
    return changed


def test_tokens_beyond_the_embedding_are_refused(tokenizer: Any) -> None:
    rows = len(tokenizer)
    small = Qwen3Config(vocab_size=rows)
    assert check_vocabulary(tokenizer, small, "m") is None
    added = grown(tokenizer, add_tokens=["<think>", "<answer>"])
    padded = grown(tokenizer, add_special_tokens={"pad_token": "<new pad>"})
    turn = grown(tokenizer, add_special_tokens={"additional_special_tokens": ["<turn>"]})
    turn.chat_template = "{% for message in messages %}<turn>{{ message['content'] }}{% endfor %}"
    for wrong, says in ((added, r"2 tokens .*<think> \(\d+\), <answer>"), (padded, "<new pad>"), (turn, "<turn>")):
        with pytest.raises(DataError, match=rf"beyond the {rows} rows of the embedding of m: |{says}") as caught:
            check_vocabulary(wrong, small, "m")
        assert "resize" in str(caught.value)
        assert check_vocabulary(wrong, Qwen3Config(vocab_size=rows + 2), "m") is None
    with pytest.raises(DataError, match="beyond the 200 rows"):
        check_vocabulary(tokenizer, Qwen3Config(vocab_size=200), "m")


def test_special_tokens_that_no_template_uses_are_said(tokenizer: Any) -> None:
    image = grown(tokenizer, add_special_tokens={"additional_special_tokens": ["<image>"]})
    small = Qwen3Config(vocab_size=len(tokenizer))
    line = check_vocabulary(image, small, "m")
    assert line is not None and "<image>" in line
    rows = [{"messages": conversation(text, "2"), "task_name": "sums"} for text in ("1+1", "<image> 1+1")]
    processor = get_processor("math_hf_data_processor")
    dataset = AllTaskProcessedDataset(rows, image, TaskDataSpec("sums"), processor, 99)
    hold_to_vocabulary([dataset, None], image, small)
    assert dataset[0]["loss_multiplier"] == 1.0
    with pytest.raises(DataError, match=r"row 2 of sums: spells '<image>' \(token 261\), .* 261 rows has none"):
        dataset[1]


def test_every_run_hands_the_listed_tokens_to_its_engines(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    model(folder, {"eos_token_id": [258, 257]})
    policy, said = PolicyConfig(model_name=str(folder)), list[str]()
    own = get_tokenizer({"name": str(folder)})
    ends = check_tokens(policy, model_config(policy), own, said.append)
    assert ends.ids == (258, 257) and said == ["stop tokens: <|im_end|> (258), <|im_start|> (257)"]
    given: list[list[int]] = []
    for module in (assembly, evaluation):
        monkeypatch.setattr(module, "VllmGeneration", lambda *_, stop_token_ids, **__: given.append(stop_token_ids))
    monkeypatch.setattr(evaluation, "start_engine_actors", lambda *_, **__: None)
    assembly.start_generation(object(), own, ends, None)  # type: ignore[arg-type]
    placement, config = OwnPlacement(), EvalMasterConfig()
    slots: Any = SimpleNamespace(training=None)
    evaluation.start_engines(config, policy, slots, own, ends.ids, placement)  # type: ignore[arg-type]
    assert given == [[258, 257]] * 2
    policy.generation.stop_token_ids = [9999]
    with pytest.raises(DataError, match=r"stop_token_ids: \[9999\] are no tokens"):
        check_tokens(policy, model_config(policy), own, said.append)
