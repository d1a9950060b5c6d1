"""`python -m nemo_rl.config`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl.config import ConfigError, MasterConfig, load_master_config
from nemo_rl.config.__main__ import main
from tests.conftest import run_script

ROOT = Path(__file__).parents[2]


def test_show_prints_a_file_that_loads_as_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "grpo.seed=9", "policy.max_total_sequence_length=64"]) == 0
    config = MasterConfig(**yaml.safe_load(capsys.readouterr().out))
    assert config.grpo.seed == 9 and config.policy.generation.vllm_cfg.max_model_len == 64


@pytest.mark.parametrize(
    ("text", "overrides", "mistake", "key", "value"),
    [
        ("grpo: {seed: 7, val_period: often}", [], "grpo.val_period: 'often'", "val_period", "often"),
        ("grpo: {seed: 7, num_prompts: 3}", [], "grpo.num_prompts: unknown key", "num_prompts", 3),
        ("grpo: {seed: 7, num_generations_per_prompt: 1}", [], "would be 0", "num_generations_per_prompt", 1),
        ("grpo: {seed: 7, val_period: '${grpo.no}'}", [], "grpo.no", "val_period", "${grpo.no}"),
        ("grpo: {seed: 7, val_period: 5}", ["grpo.sed=1"], "no key grpo.sed", "val_period", 5),
        ("defaults: gone.yaml\ngrpo: {seed: 7, val_period: 5}", [], "there is no file", "val_period", 5),
        ("grpo: {seed: 7, val_period: 5}\npolicy: small", [], "policy: 'small'", "val_period", 5),
    ],
)
def test_show_prints_what_can_be_read_of_a_file_with_a_mistake(
    text: str,
    overrides: list[str],
    mistake: str,
    key: str,
    value: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["show", str(tmp_path / "run.yaml"), *overrides]) == 2
    printed = capsys.readouterr()
    shown = yaml.safe_load(printed.out)
    assert shown["grpo"]["seed"] == 7 and shown["grpo"][key] == value and shown["cluster"]["cpu_slots"] == 2
    assert mistake in printed.err


@pytest.mark.parametrize("text", ["grpo: {seed: 7", "grpo:\n  seed: 7\n  val_period: 3\n  seed: 8\n"])
def test_show_of_a_file_that_is_no_yaml_names_the_mistake(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["show", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err
    assert "run.yaml has a mistake" in message
    assert ("val_period" in text and "line 4: the key seed is given twice" in message) or "not readable" in message


def test_a_mistake_says_which_file_of_the_chain_its_values_came_from(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {num_prompts_per_step: 4, sed: 3}\npolicy: {precision: half}\n")
    (tmp_path / "more.yaml").write_text("data_plane: {enabled: true, controller_address: 'a:1'}\n")
    (tmp_path / "run.yaml").write_text("defaults: [base.yaml, more.yaml]\ncluster: {num_nodes: none}\n")
    with pytest.raises(ConfigError) as caught:
        load_master_config(tmp_path / "run.yaml", ["grpo.seed=soon"])
    said = {line.partition(":")[0]: line for line in caught.value.problems}
    assert said["grpo.sed"].endswith(f"(grpo.sed from {tmp_path}/base.yaml)")
    assert f"(policy.precision from {tmp_path}/base.yaml)" in said["policy.precision"]
    assert said["grpo.seed"].endswith("(grpo.seed from override 'grpo.seed=soon')")
    # The head of the message names this file already.
    assert " from " not in said["cluster.num_nodes"]
    [waits] = caught.value.not_built
    assert str(waits).endswith(f"(data_plane.controller_address from {tmp_path}/more.yaml)")


def test_a_conflict_between_inherited_values_names_the_file_of_each(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {num_prompts_per_step: 6}\n")
    (tmp_path / "more.yaml").write_text("policy: {train_global_batch_size: 64}\n")
    (tmp_path / "run.yaml").write_text("defaults: [base.yaml, more.yaml]\ngrpo: {num_generations_per_prompt: 8}\n")
    with pytest.raises(ConfigError) as caught:
        load_master_config(tmp_path / "run.yaml")
    [line] = caught.value.problems
    assert f"policy.train_global_batch_size from {tmp_path}/more.yaml" in line
    assert f"grpo.num_prompts_per_step from {tmp_path}/base.yaml" in line and "per_prompt from" not in line


def test_diff_prints_what_differs_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("grpo: {seed: 7}\n")
    assert main(["diff", str(tmp_path / "a.yaml"), "loss_fn.ratio_clip_c=3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["loss_fn.ratio_clip_c: null -> 3.0", "grpo.seed: 42 -> 7"]


def test_explain_names_the_file_or_override_a_value_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {seed: 7, val_period: 0}\n")
    (tmp_path / "child.yaml").write_text("defaults: base.yaml\ngrpo: {val_period: 5}\n")
    main(["explain", "grpo.seed", str(tmp_path / "child.yaml")])
    assert f"from:    {tmp_path / 'base.yaml'}" in capsys.readouterr().out
    main(["explain", "grpo.val_period", str(tmp_path / "child.yaml"), "grpo.val_period=6"])
    out = capsys.readouterr().out
    assert "value:   6" in out and "from:    override 'grpo.val_period=6'" in out
    main(["explain", "policy.generation.max_new_tokens", str(tmp_path / "child.yaml")])
    out = capsys.readouterr().out
    assert "default: ${policy.max_total_sequence_length}" in out and "from:    the default" in out


def test_explain_finds_the_mapping_that_takes_a_name_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("policy: {optimizer: {kwargs: {lr: 0.5}}}\n")
    assert main(["explain", "policy.optimizer.kwargs.lr", str(tmp_path / "run.yaml")]) == 0
    said = capsys.readouterr().out
    assert "lr is an entry of policy.optimizer.kwargs" in said and "value:   0.5" in said and "run.yaml" in said
    assert main(["explain", "policy.optimizer.rate"]) == 2
    assert main(["explain", "lr"]) == 2
    assert "There is policy.optimizer.kwargs.lr, " in capsys.readouterr().err


def test_explain_tells_what_is_not_built_yet(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "policy.draft.loss_weight"])
    assert "not yet (draft models)" in capsys.readouterr().out


def test_mistakes_go_to_stderr_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "grpo.sed=1"]) == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err
    assert main(["explain", "grpo.sead"]) == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err


def recipe(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"defaults: {ROOT}/examples/configs/grpo_math_1B.yaml\n{text}\n")
    return file


def test_check_says_what_runs_what_waits_and_what_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECIPE_DATA", raising=False)
    runs = recipe(tmp_path, "a_runs.yaml", "data: {train: {data_path: '${oc.env:RECIPE_DATA}/rows.jsonl'}}")
    waits = recipe(tmp_path, "b_waits.yaml", "policy: {reward_model_cfg: {enabled: true}, is_vlm: true}")
    refused = recipe(tmp_path, "c_refused.yaml", "grpo: {sed: 4}\npolicy: {is_vlm: true}")
    assert main(["check", str(runs)]) == 0
    out = capsys.readouterr().out
    first, needs, other, formula = sorted(out.splitlines(), key=lambda line: ("note" in line, "zero_dev" in line))
    assert other.startswith("  note: other than in NeMo-RL (docs/from_nemo_rl.md): ")
    assert [first, needs] == [f"{runs}: runs here", "  needs RECIPE_DATA in the environment"]
    assert formula.startswith("  note: grpo.adv_estimator.zero_deviation: unnormalized")
    assert main(["check", str(runs), str(waits)]) == 1
    assert main(["check", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "policy.reward_model_cfg.enabled: true is not built yet: reward models" in out
    assert "grpo.sed: unknown key. Did you mean 'seed'?" in out
    assert main(["check", "--quiet", str(tmp_path)]) == 2
    counts, header, *table = [line for line in capsys.readouterr().out.splitlines() if line]
    assert counts == "3 files: 1 runs here, 1 would run once its parts are built, 1 refused"
    assert header.split() == ["reason", "files", "for", "this", "alone"]
    assert [line.split()[-2:] for line in table] == [["2", "0"], ["1", "0"], ["1", "0"]]
    assert table[0].startswith("not built: vision-language and audio models") and str(refused) not in table[0]


def test_the_table_names_what_is_no_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("rollout: {n: 4}\ncritic: {}\n")
    (tmp_path / "torn.yaml").write_text("grpo: [\n")
    recipe(tmp_path, "rule.yaml", "cluster: {master_port_range_low: 9, master_port_range_high: 5}")
    recipe(tmp_path, "type.yaml", "grpo: {max_num_epochs: many}")
    assert main(["check", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert sum("not readable as YAML: while parsing" in line and "line 2" in line for line in out.splitlines()) == 1
    assert [" ".join(line.split()[:-2]) for line in out.splitlines()[-4:]] == [
        "mistake: a configuration of another framework",
        "mistake: cluster.master_port_range_low",
        "mistake: grpo.max_num_epochs",
        "mistake: not readable as YAML",
    ]


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("openai/gpt-oss-20b", "attention sinks"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "multi-latent attention"),
        ("deepseek-ai/DeepSeek-R1-0528", "multi-latent attention"),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", "layers of Mamba"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "layers of Mamba"),
        ("Qwen/Qwen3.5-35B-A3B", "linear attention"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "linear attention"),
        ("google/gemma-3-1b-it", "attention that differs"),
        ("Qwen/Qwen3-30B-A3B", None),
        ("Qwen/Qwen2.5-1.5B", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", None),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", None),
        ("agentica-org/DeepScaleR-1.5B-Preview", None),
        ("gpt2-directory", "multi-latent attention"),
        ("llama-gpt-oss-directory", None),
    ],
)
def test_check_knows_families_that_megatron_lacks(
    model: str, part: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, kind in (("gpt2-directory", "deepseek_v3"), ("llama-gpt-oss-directory", "llama")):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(f'{{"model_type": "{kind}"}}')
    megatron = "dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true}, optimizer: null, scheduler: null"
    base = f"defaults: {ROOT}/examples/configs/grpo_math_1B.yaml"
    for folder, keys in (("megatron", f"model_name: {model}, {megatron}"), ("dtensor", f"model_name: {model}")):
        Path(folder).mkdir()
        Path(folder, "run.yaml").write_text(f"{base}\npolicy: {{{keys}}}\n")
    assert main(["check", "megatron"]) == (0 if part is None else 1)
    assert part is None or f"not built yet: {part}" in capsys.readouterr().out
    assert main(["check", "dtensor"]) == 0


def test_check_names_prompt_files_that_are_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = f"defaults: {ROOT}/examples/configs"
    (tmp_path / "mine.txt").write_text("{}")
    for name, text in {
        "theirs": f"{base}/grpo_math_1B.yaml\ndata: {{default: {{prompt_file: examples/prompts/cot.txt}}}}",
        "gpqa": f"{base}/evals/eval.yaml\ndata: {{prompt_file: examples/prompts/gpqa.txt}}",
        "ours": f"{base}/grpo_math_1B.yaml\ndata: {{default: {{prompt_file: examples/prompts/step_by_step.txt}}}}",
        "mine": f"{base}/grpo_math_1B.yaml\ndata: {{default: {{prompt_file: {tmp_path}/mine.txt}}}}",
        "variable": f"{base}/grpo_math_1B.yaml\ndata: {{default: {{prompt_file: '${{oc.env:NOT_SET}}/a.txt'}}}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    assert main(["check", str(tmp_path)]) == 0
    needs = [line for line in capsys.readouterr().out.splitlines() if "needs the file" in line]
    assert [line.split()[3] for line in needs] == ["examples/prompts/gpqa.txt", "examples/prompts/cot.txt"]
    assert all("not shipped" in line for line in needs)


def test_a_cap_below_the_longest_sequence_is_allowed_and_said(tmp_path: Path) -> None:
    from nemo_rl.config.check import check_file

    file = tmp_path / "run.yaml"
    for batching, off in (("sequence_packing", "dynamic_batching"), ("dynamic_batching", "sequence_packing")):
        file.write_text(
            f"defaults: {ROOT}/examples/configs/grpo_math_1B.yaml\npolicy: {{max_total_sequence_length: 1024, "
            f"{off}: {{enabled: false}}, {batching}: {{enabled: true, train_mb_tokens: 1000}}}}\n"
        )
        checked = check_file(file)
        assert checked.problems == []
        assert any(f"policy.{batching}.train_mb_tokens is 1000, below" in note for note in checked.notes)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("megatron_cfg: {enabled: true, moe_token_dispatcher_type: flex, moe_enable_deepep: true}", True),
        ("megatron_cfg: {enabled: true, moe_token_dispatcher_type: allgather}", True),
        ("megatron_cfg: {enabled: true, moe_flex_dispatcher_backend: hybridep, moe_hybridep_num_sms: 32}", False),
        ("megatron_cfg: {enabled: true}", False),
        ("dtensor_cfg: {automodel_kwargs: {backend: {dispatcher: deepep}}}", True),
        ("dtensor_cfg: {automodel_kwargs: {backend: {enable_deepep: true}}}", True),
        ("dtensor_cfg: {automodel_kwargs: {backend: {dispatcher: torch}}}", False),
    ],
)
def test_every_exchange_of_tokens_is_all_to_all_and_said(keys: str, said: bool, tmp_path: Path) -> None:
    from nemo_rl.config.check import check_file

    megatron = ", dtensor_cfg: {enabled: false}, optimizer: null, scheduler: null" if "megatron_cfg" in keys else ""
    file = tmp_path / "run.yaml"
    file.write_text(f"defaults: {ROOT}/examples/configs/grpo_math_1B.yaml\npolicy: {{{keys}{megatron}}}\n")
    checked = check_file(file)
    assert checked.problems == []
    assert any("all-to-all, with the same result" in note for note in checked.notes) == said


def test_check_of_nothing_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", str(tmp_path / "gone.yaml")]) == 2
    assert "no such file, or a folder without YAML files" in capsys.readouterr().err


@pytest.mark.slow
def test_every_example_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--quiet", str(ROOT / "examples" / "configs")]) == 0, capsys.readouterr().out


def test_the_file_tool_expands_minimizes_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text("a: 1\nb: {x: 1, y: [1, 2]}\n")
    (tmp_path / "child.yaml").write_text("defaults: base.yaml\na: 1\nb: {x: 2, y: [1, 2]}\nc: new\n")
    monkeypatch.chdir(tmp_path)

    def tool(*arguments: str) -> tuple[int, str, str]:
        return (run_script(ROOT / "tools/config_cli.py", *arguments), *capsys.readouterr())

    assert yaml.safe_load(tool("expand", "child.yaml")[1]) == {"a": 1, "b": {"x": 2, "y": [1, 2]}, "c": "new"}
    assert tool("compare", "base.yaml", "child.yaml")[1].splitlines() == ["b.x: 1 -> 2", "c: (absent) -> new"]
    code, _, said = tool("minimize-check", "base.yaml", "child.yaml")
    assert code == 1 and "child.yaml: repeats keys of base.yaml" in said
    assert tool("minimize", "--in-place", "base.yaml", "child.yaml")[0] == 0
    assert yaml.safe_load((tmp_path / "child.yaml").read_text()) == {"defaults": "base.yaml", "b": {"x": 2}, "c": "new"}
    assert tool("minimize-check", "base.yaml", "child.yaml")[0] == 0
    assert tool("expand", "gone.yaml")[0] == 2


@pytest.mark.parametrize(
    ("section", "key"), [("env.math", "env.math.num_workers"), ("env.code", "env.code.sandbox"), ("grpo", "grpo.seed")]
)
def test_explain_lists_the_keys_of_a_section(capsys: pytest.CaptureFixture[str], section: str, key: str) -> None:
    assert main(["explain", section]) == 0
    assert f"\n  {key}: " in capsys.readouterr().out


def test_a_limit_on_prompts_above_that_of_sequences_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nemo_rl.config.check import check_file

    base = f"defaults: {ROOT}/examples/configs/grpo_math_1B.yaml\n"
    for limit, said in ((700, True), (512, False), ("null", False)):
        (tmp_path / "run.yaml").write_text(
            f"{base}policy: {{max_total_sequence_length: 512}}\ndata: {{max_input_seq_length: {limit}}}\n"
        )
        notes = "\n".join(check_file(tmp_path / "run.yaml").notes)
        assert ("data.max_input_seq_length is 700, above policy.max_total_sequence_length 512" in notes) is said


def test_a_model_that_a_recipe_leaves_to_its_user_is_said_to_be_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"a": "deepseek-ai/DeepSeek-V3", "b": "/data/models/v3", "c": "gpt2", "d": "checkpoints/v3/step_5"}
    for file, name in {**named, "z": "BF16 weights of DeepSeek-V3, see the guide"}.items():
        recipe(tmp_path, f"{file}.yaml", f"policy: {{model_name: '{name}'}}")
    assert main(["check", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "unknown" in line or "once a model" in line]
    assert told == [
        f"{tmp_path}/z.yaml: runs here, once a model is named",
        "  needs a model; this one is unknown: policy.model_name: 'BF16 weights of DeepSeek-V3, see the guide' is "
        "neither a directory nor an id on the hub",
    ]


def test_prompt_files_are_found_beside_a_recipe_and_around_it(tmp_path: Path) -> None:
    for place in ("examples/prompts", "examples/configs/recipes/own"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "examples/prompts/far.txt").write_text("Around {}")
    (tmp_path / "examples/configs/recipes/own/near.txt").write_text("Beside {}")
    (tmp_path / "examples/configs/base.yaml").write_text("data: {default: {prompt_file: examples/prompts/far.txt}}")
    file = tmp_path / "examples/configs/recipes/mine.yaml"
    file.write_text(
        "grpo: {val_period: 0}\ndefaults: ../base.yaml\ndata: {train: {dataset_name: gsm8k, prompt_file: own/near.txt}}"
    )
    data = load_master_config(file).data
    assert data.train[0].prompt_file == str(tmp_path / "examples/configs/recipes/own/near.txt")
    assert data.default.prompt_file == str(tmp_path / "examples/prompts/far.txt")
    # What is found from here stays as it is written, and what is nowhere too.
    data = load_master_config(file, ["data.train.prompt_file=examples/prompts/step_by_step.txt"]).data
    assert data.train[0].prompt_file == "examples/prompts/step_by_step.txt"
    assert load_master_config(file, ["data.train.prompt_file=gone.txt"]).data.train[0].prompt_file == "gone.txt"
