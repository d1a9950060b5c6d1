"""Every key that NeMo-RL's GRPO recipes set is known: honoured, of no effect, or refused as a part that is not built.

`recipe_keys.tsv` lists these keys with the value of the default recipe and the values seen most often. A rule between
keys may be broken where one of them changes alone, which is no matter of names; so rules are left out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.grpo.validation import batch_size, batches_to_run
from nemo_rl.config import ConfigError, DistillationMasterConfig, EvalMasterConfig, MasterConfig
from nemo_rl.config.dotted import put
from nemo_rl.config.errors import NotBuilt
from nemo_rl.config.layers import Layer, merge
from nemo_rl.config.load import load_master_config
from nemo_rl.config.validate import examine, validate


@dataclass(frozen=True)
class Row:
    """A key of the table."""

    key: str
    default: str
    seen: list[Any]


def rows() -> list[Row]:
    """The table; values that it cuts short are left out."""
    lines = (Path(__file__).parent / "recipe_keys.tsv").read_text().splitlines()
    cells = [line.split("\t") for line in lines if not line.startswith(("#", "key\t"))]
    return [Row(key, default, [*_values(seen)]) for key, _, default, seen in cells]


def _values(text: str) -> Iterator[Any]:
    for value in text.split(" | "):
        try:
            yield json.loads(value)
        except json.JSONDecodeError:
            continue


TABLE = rows()


def default_recipe() -> dict[str, Any]:
    """The recipe that all others inherit from, as far as the table gives its values."""
    recipe: dict[str, Any] = {}
    for row in TABLE:
        for value in _values(row.default if row.default != "-" else ""):
            put(recipe, row.key.split("."), value)
    return recipe


def test_the_default_recipe_runs_here(caplog: pytest.LogCaptureFixture) -> None:
    recipe = default_recipe()
    for key in (
        "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
        "grpo.stop_at_validation_threshold",
        "policy.generation.vllm_cfg.http_refit_api_key_env_var",
        "policy.generation.vllm_cfg.http_refit_server_port",
    ):
        node: Any = recipe
        for part in key.split("."):
            node = node[part]
    config = validate(recipe, MasterConfig)
    assert config.policy.model_name == "Qwen/Qwen2.5-1.5B"
    note, *others = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl")]
    assert sorted("zero_deviation" in other for other in others) == [False, True]
    assert "keys that change nothing here" in note and "http_refit_server_port" in note


SECTIONS = {row.key.rpartition(".")[0] for row in TABLE}


def recipes() -> Iterator[dict[str, Any]]:
    """Recipes that together hold every value of the table's keys that are no sections: the first ones seen of all keys,
    the second ones, and so on.
    """
    plain = [row for row in TABLE if row.key not in SECTIONS]
    for turn in range(max(len(row.seen) for row in TABLE)):
        recipe = default_recipe()
        for row in plain:
            if row.seen:
                put(recipe, row.key.split("."), row.seen[turn % len(row.seen)])
        yield recipe


def switched_on(recipe: Any) -> Any:
    """The recipe with every part switched on."""
    if isinstance(recipe, dict):
        return {key: True if key == "enabled" else switched_on(value) for key, value in recipe.items()}
    return recipe


def mistakes(recipe: dict[str, Any]) -> list[str]:
    """What is wrong with a recipe besides parts that are not built."""
    examined = examine(merge([Layer("recipe", recipe)]), MasterConfig)
    return [str(problem) for problem in examined.problems if not isinstance(problem, NotBuilt)]


@pytest.mark.slow
def test_every_key_of_the_table_is_known_with_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/tmp")
    monkeypatch.setattr("nemo_rl.config.validate.broken_rules", lambda config: [])
    assert len(TABLE) > 700
    for recipe in recipes():
        assert mistakes(recipe) == []
        assert mistakes(switched_on(recipe)) == []
    for row in TABLE:
        for value in row.seen if row.key in SECTIONS else []:
            recipe = default_recipe()
            put(recipe, row.key.split("."), value)
            assert mistakes(recipe) == [], row.key


def test_a_misspelt_key_is_found_beside_null_ones() -> None:
    recipe = default_recipe()
    put(recipe, ["policy", "generation", "vllm_cfg", "http_refit_server_port"], None)
    put(recipe, ["policy", "generation", "vllm_cfg", "tensor_paralel_size"], None)
    put(recipe, ["policy", "megatron_cfg", "optimizer", "lrr"], 1)
    assert sorted(mistakes(recipe)) == [
        "policy.generation.vllm_cfg.tensor_paralel_size: unknown key. Did you mean 'tensor_parallel_size'?",
        "policy.megatron_cfg.optimizer.lrr: unknown key. Did you mean 'lr'?",
    ]


def test_a_recipe_of_another_framework_is_told_from_a_misspelt_one() -> None:
    (line,) = mistakes({"actor_rollout_ref": {"model": {"path": "x"}}, "algorithm": {}, "trainer": {"nnodes": 1}})
    assert "configuration of another framework" in line and "grpo" in line
    shared = {"data": {"train_files": "a"}, "actor_rollout_ref": {"hybrid": "???"}, "algorithm": {}, "trainer": {}}
    (line,) = mistakes(shared)
    assert line.startswith("actor_rollout_ref, algorithm, trainer: no sections of a NeMo-RL recipe")
    assert mistakes({"grpoo": {"seed": 1}, "policy": {}}) == ["grpoo: unknown key. Did you mean 'grpo'?"]


def test_the_layout_of_older_releases_is_read() -> None:
    old = {"data": {"dataset_name": "DAPOMath17K", "prompt_file": None, "max_input_seq_length": 256}}
    old["policy"] = {"activation_checkpointing_enabled": True}
    old["grpo"] = {"num_val_generations_per_prompt": 4}
    examined = examine(old, MasterConfig)
    config = examined.config
    assert config is not None and examined.problems == []
    assert [(entry.dataset_name, entry.prompt_file) for entry in config.data.train] == [("DAPOMath17K", None)]
    assert config.data.validation is not None and config.data.validation[0].dataset_name == "DAPOMathAIME2024"
    assert config.policy.dtensor_cfg.activation_checkpointing and config.grpo.val_num_generations_per_prompt == 4
    assert any("layout of releases before 0.5" in note for note in examined.notes)


def test_the_puzzle_game_makes_its_own_puzzles() -> None:
    game = {"sliding_puzzle_game": {"cfg": {"game_config": {"size": 4, "shuffle_moves": 6}, "max_moves": 30}}}
    examined = examine({"env": game}, MasterConfig)
    config = examined.config
    assert config is not None and config.env.sliding_puzzle is not None and config.env.sliding_puzzle.max_moves == 30
    assert config.data.train[0].task_config == {"size": 4, "shuffle_moves": 6}
    assert config.data.train[0].env_name == "sliding_puzzle" and config.data.train[0].prompt_file is None


def test_null_and_minus_one_mean_no_limit() -> None:
    recipe: dict[str, Any] = {
        "grpo": {"max_val_samples": None, "val_batch_size": None},
        "data": {"max_input_seq_length": None},
        "policy": {"generation": {"top_k": -1, "val_top_k": -1}},
    }
    config = validate(recipe, MasterConfig)
    assert batch_size(config.grpo, 70) == 70 and batches_to_run(config.grpo, 1) == 1
    assert config.data.max_input_seq_length == config.policy.max_total_sequence_length
    assert config.policy.generation.top_k is config.policy.generation.val_top_k is None


def test_a_validation_smaller_than_its_batch_is_one_batch() -> None:
    grpo = validate({"grpo": {"max_val_samples": 64, "val_batch_size": 256}}, MasterConfig).grpo
    assert batch_size(grpo, 1000) == 64 and batches_to_run(grpo, 16) == 1
    grpo = validate({"grpo": {"max_val_samples": 70, "val_batch_size": 32}}, MasterConfig).grpo
    assert batch_size(grpo, 1000) == 32 and batches_to_run(grpo, 32) == 2


def test_entries_take_every_key_from_the_default_entry() -> None:
    recipe = {"data": {"default": {"dataset_name": "gsm8k", "repeat": 2}, "train": {}, "validation": {"split": "test"}}}
    config = validate(recipe, MasterConfig)
    assert [(entry.dataset_name, entry.repeat) for entry in config.data.train] == [("gsm8k", 2)]
    assert config.data.validation is not None and config.data.validation[0].dataset_name == "gsm8k"


def test_what_is_wrong_in_a_section_that_is_not_enabled_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    recipe: dict[str, Any] = {"policy": {"megatron_cfg": {"enabled": False, "pipeline_model_parallel_size": None}}}
    assert validate(recipe, MasterConfig).policy.megatron_cfg.pipeline_model_parallel_size == 1
    assert "policy.megatron_cfg.pipeline_model_parallel_size" in caplog.text
    recipe["policy"]["megatron_cfg"] |= {"enabled": True}
    assert any("pipeline_model_parallel_size: None" in line for line in mistakes(recipe))


def test_a_part_that_is_not_built_says_what_to_do() -> None:
    recipe: dict[str, Any] = {
        "policy": {"generation": {"backend": "sglang", "sglang_cfg": {"tp_size": 2}}},
        "data": {"default": {"env_name": "vlm", "processor": "vlm_hf_data_processor"}},
    }
    problems = examine(recipe, MasterConfig).problems
    assert [problem.part for problem in problems if isinstance(problem, NotBuilt)] == [
        "generation backends other than vllm",
        "vision-language and audio models",
        "vision-language and audio models",
    ]
    assert [problem for problem in problems if not isinstance(problem, NotBuilt)] == []


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        ({"dpo": {"sft_loss_weight": 0.1, "val_batches": 8}}, "preference training (DPO)"),
        ({"rm": {"max_num_steps": 100}}, "training of reward models"),
        ({"ppo": {"gamma": 1.0}, "value": {"model_name": "x"}}, "PPO with a value model"),
    ],
)
def test_a_recipe_of_another_algorithm_waits_whatever_else_it_sets(sections: dict[str, Any], part: str) -> None:
    recipe = {
        "policy": {"model_name": "x", "generation": None},
        "data": {"train": {"dataset_name": "HelpSteer3", "chosen_key": "a"}, "validation": [{"rejected_key": "b"}]},
        "checkpointing": {"metric_name": "val:validation-default_loss"},
        "loss_fn": {"kl_type": "mixed"},
    }
    problems = examine(recipe | sections, MasterConfig).problems
    assert {problem.part for problem in problems if isinstance(problem, NotBuilt)} == {part}
    assert [str(problem) for problem in problems if not isinstance(problem, NotBuilt)] == []
    assert mistakes({"dpo": None, "grpoo": {}}) == ["grpoo: unknown key. Did you mean 'grpo'?"]


def test_an_evaluation_in_their_layout_is_read() -> None:
    recipe: dict[str, Any] = {
        "eval": {"metric": "pass@k", "num_tests_per_prompt": 1, "seed": 42, "k_value": 1, "save_path": None},
        "generation": {
            "backend": "vllm",
            "top_k": -1,
            "val_top_k": -1,
            "num_prompts_per_step": -1,
            "stop_token_ids": None,
            "vllm_cfg": {"limit_mm_per_prompt": {"image": 0, "audio": 0}, "enforce_monotonicity": True},
        },
        "data": {
            "dataset_name": "local",
            "problem_key": "Question",
            "solution_key": "Answer",
            "split": "test",
            "data_path": "https://example.com/problems.csv",
            "file_format": "csv",
        },
    }
    config = validate(recipe, EvalMasterConfig)
    assert (config.generation.top_k, config.generation.val_top_k) == (None, None)
    assert (config.data.input_key, config.data.output_key, config.data.file_format) == ("Question", "Answer", "csv")
    recipe["generation"]["vllm_cfg"]["limit_mm_per_prompt"]["audio"] = 1
    recipe["data"] |= {"env_name": "vlm", "processor": "vlm_hf_data_processor"}
    problems = examine(recipe, EvalMasterConfig).problems
    assert problems and all(isinstance(problem, NotBuilt) for problem in problems)
    recipe["data"] |= {"env_name": "maths", "processor": "default"}
    recipe["generation"]["vllm_cfg"]["limit_mm_per_prompt"] = None
    with pytest.raises(ConfigError, match="data.env_name: there is no environment 'maths'"):
        validate(recipe, EvalMasterConfig)


@pytest.mark.parametrize(
    ("key", "idle", "asked", "part"),
    [
        ("grpo.penalize_invalid_tool_call", False, True, "flags of assistant messages come from NeMo-Gym"),
        ("grpo.penalize_malformed_thinking", False, True, "flags of assistant messages come from NeMo-Gym"),
        ("policy.megatron_cfg.train_iters", 1000, None, ""),
        ("policy.generation.vllm_cfg.enforce_monotonicity", True, None, ""),
        ("policy.generation.vllm_cfg.enable_thinking", None, True, "variables of a chat template"),
        ("policy.dequantize_base_checkpoint", False, True, "quantisation"),
        ("policy.megatron_cfg.optimizer.muon_momentum", 0.95, None, ""),
        ("policy.megatron_cfg.optimizer.optimizer", "adam", "dist_muon", "Megatron's Muon optimizer"),
    ],
)
def test_keys_of_other_recipes_are_known(key: str, idle: object, asked: object, part: str) -> None:
    recipe: dict[str, Any] = {"policy": {"megatron_cfg": {"enabled": True}}}
    put(recipe, key.split("."), idle)
    problems = examine(recipe, MasterConfig).problems
    assert not [problem for problem in problems if key in str(problem)]
    if asked is not None:
        put(recipe, key.split("."), asked)
        (problem,) = [problem for problem in examine(recipe, MasterConfig).problems if key in str(problem)]
        assert isinstance(problem, NotBuilt) and part in problem.part


def test_flagged_samples_are_masked_by_the_key_of_the_environment_too() -> None:
    assert validate({"env": {"should_mask_flagged_samples": True}}, MasterConfig).grpo.should_mask_flagged_samples


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"dataset_name": "gpqa", "prompt_file": None}, True),
        ({"dataset_name": "mmlu_pro", "prompt_file": None}, True),
        ({"dataset_name": "mmlu", "prompt_file": "examples/prompts/multiple_choice.txt"}, False),
        ({"dataset_name": "AIME2024", "prompt_file": None}, False),
    ],
)
def test_a_question_with_choices_and_no_prompt_is_said_to_differ(data: dict[str, Any], said: bool) -> None:
    notes = examine({"data": data}, EvalMasterConfig).notes
    assert any("asked with their choices" in note for note in notes) == said


TEACHERS_KEYS: dict[str, dict[str, Any]] = {
    "megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d": {"optimizer": {"overlap_cpu_optimizer_d2h_h2d": True}},
    "megatron_cfg.attention_backend": {"attention_backend": "flash"},
    "megatron_cfg.train_iters": {"train_iters": 1000},
}


@pytest.mark.parametrize("key", TEACHERS_KEYS)
def test_a_key_of_a_policy_is_known_in_its_teacher(key: str) -> None:
    model = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True, **TEACHERS_KEYS[key]}}
    policy = {**model, "model_name": "student", "train_global_batch_size": 128}
    recipe = {"policy": policy, "teacher": {**model, "model_name": "teacher"}}
    examined = examine(recipe, DistillationMasterConfig)
    assert examined.problems == []
    assert any(f"policy.{key}" in note and f"teacher.{key}" in note for note in examined.notes)


def test_an_earlier_name_of_a_policys_key_is_read_in_its_teacher() -> None:
    teacher = {"model_name": "teacher", "activation_checkpointing_enabled": True}
    recipe = {"policy": {"train_global_batch_size": 128}, "teacher": teacher}
    examined = examine(recipe, DistillationMasterConfig)
    assert examined.config is not None
    assert examined.config.teacher.dtensor_cfg.activation_checkpointing


@pytest.mark.parametrize(
    ("kinds", "weights", "said"),
    [
        ("aux_loss", 0.0, None),
        ("seq_aux_loss", 0.0, None),
        ("global_aux_loss", 0, None),
        (["seq_aux_loss", "global_aux_loss"], [0.0, 0.0], None),
        (["aux_loss", "seq_aux_loss"], [0.0, 0.0], None),
        (["seq_aux_loss"], 0.0, None),
        ("seq_aux_loss", 0.01, "not built yet: auxiliary losses"),
        (["aux_loss", "global_aux_loss"], [0.0, 0.01], "not built yet: auxiliary losses"),
        (["aux_loss", "aux_loss"], [0.01], "2 kinds of loss"),
        ("sinkhorn", 0.0, "not built yet: routing by Sinkhorn"),
        ("none", 0.01, "moe_aux_loss_coeff is 0.01"),
    ],
)
def test_a_load_balancing_loss_without_a_weight_is_none(kinds: object, weights: object, said: str | None) -> None:
    megatron = {"enabled": True, "freeze_moe_router": False}
    megatron |= {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": weights}
    examined = examine({"policy": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron}}, MasterConfig)
    if said is None:
        assert examined.problems == [] and examined.config is not None
        assert examined.config.policy.megatron_cfg.load_balancing_weight == 0
    else:
        (problem,) = examined.problems
        assert said in str(problem)


def test_the_one_kind_of_load_balancing_with_a_weight_is_trained() -> None:
    megatron = {
        "enabled": True,
        "freeze_moe_router": False,
        "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
        "moe_aux_loss_coeff": [0.0, 0.02],
    }
    policy = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": megatron}
    assert validate({"policy": policy}, MasterConfig).policy.megatron_cfg.load_balancing_weight == 0.02


def test_what_belongs_to_quantisation_asks_for_nothing_without_it() -> None:
    policy: dict[str, Any] = {"quant_cfg": None, "quant_calib_data": "x", "quant_calib_size": 16, "quant_batch_size": 1}
    examined = examine({"policy": policy}, MasterConfig)
    assert examined.problems == [] and any("policy.quant_calib_size" in note for note in examined.notes)
    policy["quant_cfg"] = "FP8"
    assert {
        problem.key for problem in examine({"policy": policy}, MasterConfig).problems if isinstance(problem, NotBuilt)
    } >= {
        "policy.quant_cfg",
        "policy.quant_calib_size",
    }


@pytest.mark.parametrize(
    "more",
    [
        {"distillation": {"x_token": {"enabled": True, "k": 3}}, "teachers": [{"name": "a"}]},
        {"loss_fn": {"cross_tokenizer": True, "alpha": 0.5}},
        {"xtoken_distillation": {"k": 1}, "distillation": {"mapping": "x"}},
    ],
)
def test_distillation_across_tokenizers_waits_as_one_part(more: dict[str, Any]) -> None:
    (problem,) = examine({"policy": {"train_global_batch_size": 128}} | more, DistillationMasterConfig).problems
    assert isinstance(problem, NotBuilt) and problem.part == "distillation across tokenizers"


def test_an_evaluation_takes_a_file_for_its_problems_and_the_first_environment() -> None:
    for name in ("/data/rows.csv", "rows.jsonl", "https://example.com/rows.json", "./rows.parquet"):
        data = {"dataset_name": name, "problem_key": "q", "solution_key": "a", "split": None, "prompt_file": None}
        config = validate({"data": data, "env": {"math": {"num_workers": 1}}}, EvalMasterConfig)
        assert (config.data.dataset_name, config.data.data_path) == ("ResponseDataset", name)
        assert (config.data.input_key, config.data.env_name) == ("q", "math")
    config = validate({"data": {"dataset_name": "AIME2024"}, "env": {"code_jaccard": {}}}, EvalMasterConfig)
    assert config.data.env_name == "code_jaccard"
    assert validate({"data": {"dataset_name": "my.module.Rows"}}, EvalMasterConfig).data.data_path is None


def test_an_evaluation_adds_keys_without_a_sign_and_refuses_what_its_tree_does_not_have() -> None:
    given = ["tokenizer.chat_template_kwargs.enable_thinking=true", "generation.vllm_kwargs.max_num_seqs=8"]
    config = load_master_config(None, given, EvalMasterConfig)
    assert config.tokenizer.chat_template_kwargs == {"enable_thinking": True}
    assert config.generation.vllm_kwargs == {"max_num_seqs": 8}
    with pytest.raises(ConfigError, match="eval.sed: unknown key. Did you mean 'seed'"):
        load_master_config(None, ["eval.sed=3"], EvalMasterConfig)
    with pytest.raises(ConfigError, match=r"there is no key grpo\.sed\.x\.$"):
        load_master_config(None, ["grpo.sed.x=3"], MasterConfig)


def test_small_keys_of_nemo_rl_ask_for_nothing() -> None:
    recipe = {
        "policy": {
            "generation": {"vllm_cfg": {"disable_log_stats": True}},
            "dtensor_cfg": {"enabled": False},
            "megatron_cfg": {"enabled": True, "checkpoint": {"fully_parallel_save": True}},
        },
        "data": {"use_preserving_dataset": True},
    }
    assert examine(recipe, MasterConfig).problems == []
