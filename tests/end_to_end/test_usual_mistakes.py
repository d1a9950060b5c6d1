"""Usual mistakes of an engineer who brings a model, data and a judge of their own: each is answered with what is wrong,
where, and what to do, before anything starts; and `config check` finds the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms import launch
from nemo_rl.algorithms.launch import EXIT_FAILED, EXIT_USAGE
from nemo_rl.config.__main__ import main as config_command
from nemo_rl.distributed import ray_runtime
from nemo_rl.utils.hub import OFFLINE

pytestmark = pytest.mark.slow
CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
HERE = __name__


def judge(response: str, expected: str) -> float:
    return float(response == expected)


def judges(response: str, expected: str) -> list[float]:
    return [judge(response, expected)]


def judge_of_trl(completions: list[str], answer: list[str], **_: object) -> float:
    return float(completions == answer)


def _without(model: Path, folder: Path, *names: str) -> str:
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns(*names))
    return f"policy.model_name={folder / 'model'}"


def _rows(folder: Path, row: dict[str, object]) -> list[str]:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return ["data.train.dataset_name=ResponseDataset", f"data.train.data_path={folder / 'rows.jsonl'}"]


def _git_lfs_pointer(model: Path, folder: Path) -> list[str]:
    named = _without(model, folder)
    (folder / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    return [named]


def _one_of_two_files(model: Path, folder: Path) -> list[str]:
    named = _without(model, folder, "model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(model / "model.safetensors", folder / "model" / "model-00001-of-00002.safetensors")
    return [named]


def _gguf(model: Path, folder: Path) -> list[str]:
    named = _without(model, folder, "model.safetensors")
    (folder / "model" / "weights.Q4_K_M.gguf").write_bytes(b"GGUF")
    return [named]


def _quantised(model: Path, folder: Path) -> list[str]:
    named = _without(model, folder)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return [named]


def _adapter(folder: Path) -> list[str]:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return [f"policy.model_name={folder / 'adapter'}"]


def _rows_inside(folder: Path) -> list[str]:
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    return _rows(folder, {"data": [row]})


MISTAKES: dict[str, tuple[Callable[[Path, Path], list[str]], list[str]]] = {
    "no tokenizer files": (
        lambda model, folder: [_without(model, folder, "tokenizer*")],
        ["policy.tokenizer.name", "holds no tokenizer", "save_pretrained"],
    ),
    "no weights": (
        lambda model, folder: [_without(model, folder, "*.safetensors")],
        ["policy.model_name", "no weights", "model.safetensors", "copy the model's weights"],
    ),
    "half a download": (
        _one_of_two_files,
        ["policy.model_name", "model-00002-of-00002.safetensors is missing", "download the model again"],
    ),
    "weights in GGUF": (
        _gguf,
        ["policy.model_name", "GGUF files hold quantised weights", "gguf_file='weights.Q4_K_M.gguf'", "AutoTokenizer"],
    ),
    "a file in GGUF": (
        lambda model, folder: [f"policy.model_name={_gguf(model, folder) and folder}/model/weights.Q4_K_M.gguf"],
        ["policy.model_name", "gguf_file='weights.Q4_K_M.gguf'", "save_pretrained"],
    ),
    "quantised weights": (
        _quantised,
        ["policy.model_name", "quantised (gptq)", "name a checkpoint that is not quantised"],
    ),
    "a clone without git-lfs": (_git_lfs_pointer, ["model.safetensors is a pointer of git-lfs", "git lfs pull"]),
    "no chat template": (
        lambda model, folder: [_without(model, folder, "chat_template*"), "policy.tokenizer.chat_template=default"],
        ["has no chat template", "policy.tokenizer.chat_template", "or to null"],
    ),
    "longer than the model": (
        lambda model, folder: ["policy.max_total_sequence_length=4096"],
        ["policy.max_total_sequence_length=4096", "takes 2048 tokens at most", "lower"],
    ),
    "no such data": (
        lambda model, folder: [*_rows(folder, {})[:1], f"data.train.data_path={folder}/gone.jsonl"],
        ["data.train.data_path", "there is nothing at", "gone.jsonl"],
    ),
    "columns of one's own": (
        lambda model, folder: _rows(folder, {"ask": "1+1", "gold": 2}),
        ["data.train", "ask, gold", "input_key and output_key"],
    ),
    "a judge that is not found": (
        lambda model, folder: ["env.mine.function=my_judges.exact", "data.train.env_name=mine"],
        ["env.mine.function", "'my_judges.exact' cannot be imported", "PYTHONPATH=."],
    ),
    "a judge with a misspelled name": (
        lambda model, folder: [f"env.mine.function={HERE}.jugde", "data.train.env_name=mine"],
        ["env.mine.function", "has no 'jugde'", "Did you mean 'judge'"],
    ),
    "a judge without an expected answer": (
        lambda model, folder: [
            f"env.mine.function={HERE}.judge",
            "data.train={dataset_name: reasoning_gym, task: propositional_logic, env_name: mine, num_problems: 70, "
            "held_out: 0}",
            "data.max_input_seq_length=4096",
            "policy.max_total_sequence_length=2048",
        ],
        ["env.mine.function", "wants expected", "expected: str | None = None"],
    ),
    "a judge of other data": (
        lambda model, folder: ["data.train.env_name=reasoning_gym"],
        ["data.*.env_name", "reasoning_gym judges by task", "rows of arithmetic do not give"],
    ),
    "an argument of another optimizer": (
        lambda model, folder: ["policy.optimizer.kwargs.learning_rate=1e-6"],
        ["policy.optimizer", "unexpected keyword argument 'learning_rate'", "torch.optim.AdamW(lr="],
    ),
    "a judge of many responses": (
        lambda model, folder: [f"env.mine.function={HERE}.judges", "data.train.env_name=mine"],
        ["env.mine.function", "returns list", "a call judges one response"],
    ),
    "a judge of TRL": (
        lambda model, folder: [f"env.mine.function={HERE}.judge_of_trl", "data.train.env_name=mine"],
        ["env.mine.function", "wants completions, answer", "def reward(response: str, expected: str, **row) -> float"],
    ),
    "a judge by its file": (
        lambda model, folder: ["env.mine.function=./own/judges.py:exact", "data.train.env_name=mine"],
        ["env.mine.function", "'./own/judges.py:exact' is a file", "write own.judges.exact", "PYTHONPATH=."],
    ),
    "a judge that no data name": (
        lambda model, folder: [f"env.mine.function={HERE}.judge"],
        ["env.mine: nothing uses it", "data name math", "data.train.env_name=mine and data.validation.env_name=mine"],
    ),
    "a key of TRL": (
        lambda model, folder: ["loss_fn.beta=0.04"],
        ["no key loss_fn.beta", "is loss_fn.reference_policy_kl_penalty here", "docs/coming_from.md"],
    ),
    "a key of verl": (
        lambda model, folder: ["data.max_response_length=64"],
        ["no key data.max_response_length", "is policy.generation.max_new_tokens here"],
    ),
    "a key of PEFT": (
        lambda model, folder: ["policy.dtensor_cfg.lora_cfg.r=8"],
        ["no key policy.dtensor_cfg.lora_cfg.r", "is policy.dtensor_cfg.lora_cfg.dim here"],
    ),
    "a model that is an adapter": (
        lambda model, folder: _adapter(folder),
        ["policy.model_name", "holds an adapter", "nemo_rl.utils.convert to-hf"],
    ),
    "the output directory of a trainer": (
        lambda model, folder: [
            f"policy.model_name={Path(shutil.copytree(model, folder / 'out' / 'checkpoint-500')).parent}"
        ],
        ["policy.model_name", "has no config.json", "out/checkpoint-500 has one"],
    ),
    "data named by their file": (
        lambda model, folder: [f"data.train.dataset_name={folder}/rows.jsonl"],
        ["data.train.dataset_name", "ResponseDataset", "data.train.data_path="],
    ),
    "rows inside an object": (
        lambda model, folder: _rows_inside(folder),
        ["data.train", "the rows are inside the column 'data'", "the whole file"],
    ),
    "one entry in the place of a list": (
        lambda model, folder: ["policy.generation.stop_strings=</answer>"],
        ["policy.generation.stop_strings", "'</answer>' is no list", "written [...]"],
    ),
    "checkpoints in the place of a file": (
        lambda model, folder: [f"checkpointing.checkpoint_dir={folder}/file{(folder / 'file').write_text('') or ''}"],
        ["checkpointing.checkpoint_dir=", "/file", "directory that can be written"],
    ),
    "a prompt that is not there": (
        lambda model, folder: [f"data.train.prompt_file={folder}/gone.txt"],
        ["prompt_file", "gone.txt"],
    ),
    "a prompt without a place": (
        lambda model, folder: [
            f"data.train.prompt_file={(folder / 'prompt.txt')}{(folder / 'prompt.txt').write_text('Solve it.') and ''}"
        ],
        ["prompt.txt", "{}"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_answered_before_anything_starts(
    mistake: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make, says = MISTAKES[mistake]
    overrides = [
        f"policy.model_name={tiny_model}",
        f"logger.log_dir={tmp_path}/logs",
        f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
        *make(tiny_model, tmp_path),
    ]
    refused(CONFIG, launch.grpo, overrides, says, capfd, monkeypatch)


def refused(
    config: Path,
    run: Callable[..., int],
    overrides: list[str],
    says: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a run and `config check` refuse overrides with these words, before Ray."""

    def no_ray(**_: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray_runtime, "init_ray", no_ray)
    monkeypatch.setenv(OFFLINE, "1")
    code = run(["--config", str(config), *overrides], default_config=config)
    said = capfd.readouterr().err
    assert code in (EXIT_FAILED, EXIT_USAGE) and "Traceback" not in said
    assert all(part in said for part in says), said

    assert config_command(["check", str(config), *overrides]) == EXIT_USAGE
    checked = capfd.readouterr().out
    assert checked.startswith(f"{config}: refused")
    assert all(part in checked for part in says), checked


MISTAKES_OF_EVALUATIONS: dict[str, tuple[Callable[[Path, Path], list[str]], list[str]]] = {
    "no such model": (
        lambda model, folder: [f"generation.model_name={folder}/gone"],
        ["generation.model_name=", "there is no such directory"],
    ),
    "the output directory of a trainer": (
        lambda model, folder: [
            f"generation.model_name={Path(shutil.copytree(model, folder / 'out' / 'checkpoint-500')).parent}"
        ],
        ["generation.model_name=", "has no config.json", "out/checkpoint-500 has one"],
    ),
    "a judge that the data do not name": (
        lambda model, folder: [f"env.mine.function={HERE}.judge"],
        ["env.mine: nothing uses it", "data.env_name=mine"],
    ),
    "answers in the place of a file": (
        lambda model, folder: [f"eval.save_path={folder}/file{(folder / 'file').write_text('') or ''}"],
        ["eval.save_path", "/file"],
    ),
    "a key of TRL": (
        lambda model, folder: ["generation.max_completion_length=16"],
        ["generation.max_completion_length", "is generation.max_new_tokens here"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_EVALUATIONS)
def test_a_usual_mistake_of_an_evaluation_is_answered_before_anything_starts(
    mistake: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG.with_name("eval_arithmetic_cpu.yaml")
    make, says = MISTAKES_OF_EVALUATIONS[mistake]
    refused(
        config,
        launch.evaluate,
        [f"generation.model_name={tiny_model}", *make(tiny_model, tmp_path)],
        says,
        capfd,
        monkeypatch,
    )


def test_check_says_that_a_run_without_a_mistake_runs_and_what_it_did_not_look_at(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OFFLINE, "1")
    assert config_command(["check", str(CONFIG), f"policy.model_name={tiny_model}"]) == 0
    assert capsys.readouterr().out.startswith(f"{CONFIG}: runs here")
    assert config_command(["check", str(CONFIG), "policy.model_name=someone/model"]) == 0
    assert "someone/model is not on this machine, so model and tokenizer were not look" in capsys.readouterr().out
    hub = [
        "data.train={dataset_name: gsm8k}",
        "data.validation=null",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]
    hub = [*hub, "grpo.val_period=0", f"policy.model_name={tiny_model}"]
    assert config_command(["check", str(CONFIG), *hub]) == 0
    assert "rows of data.train come from the hub and were not looked at" in capsys.readouterr().out
    slots = ["cluster.gpus_per_node=8", "cluster.device=auto"]
    assert config_command(["check", str(CONFIG), f"policy.model_name={tiny_model}", *slots]) == 0
    assert "on this machine a start is refused: cluster.gpus_per_node=8" in capsys.readouterr().out
    assert config_command(["check", str(CONFIG), "grpo.max_num_step=3"]) == EXIT_USAGE
    assert "Did you mean 'max_num_steps'" in capsys.readouterr().out


def test_check_looks_at_fine_tuning_and_evaluation_as_their_starts_do(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OFFLINE, "1")
    sft, evaluation = (CONFIG.parent / f"{name}_arithmetic_cpu.yaml" for name in ("sft", "eval"))
    assert config_command(["check", str(sft), f"policy.model_name={tiny_model}"]) == 0, capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1+1"}]}) + "\n")
    rows = ["data.train.dataset_name=ResponseDataset", f"data.train.data_path={tmp_path}/rows.jsonl"]
    assert config_command(["check", str(sft), f"policy.model_name={tiny_model}", *rows]) == EXIT_USAGE
    assert "SFT trains on answers" in capsys.readouterr().out
    assert config_command(["check", str(evaluation), f"generation.model_name={tiny_model}"]) == 0
    long = [f"generation.model_name={tiny_model}", "generation.vllm_cfg.max_model_len=4096"]
    assert config_command(["check", str(evaluation), *long]) == EXIT_USAGE
    assert "generation.vllm_cfg.max_model_len=4096" in capsys.readouterr().out.replace("\n", " ")
