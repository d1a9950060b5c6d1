"""`examples/run_eval.py` on a checkpoint: real engine, real verifier, and what it writes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.algorithms.estimators import consensus_at_k
from nemo_rl.algorithms.launch import evaluate as main
from nemo_rl.config import EvalMasterConfig, load_master_config
from nemo_rl.utils.convert import from_hugging_face
from tests import forks

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "configs" / "eval_arithmetic_cpu.yaml"


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_is_evaluated_and_every_answer_written(
    tiny_model: Path, tmp_path: Path, ray_session: None
) -> None:
    from_hugging_face(tiny_model, tmp_path / "results")
    out = tmp_path / "eval"
    overrides = [
        f"generation.model_name={tmp_path}/results",
        f"eval.save_path={out}",
        "eval.metric=cons@k",
        "eval.num_tests_per_prompt=3",
        "eval.k_value=2",
        "data.max_samples=5",
        "generation.num_prompts_per_step=2",
        "data.env_name=parity",
        "env.parity.class=tests.end_to_end.parity.Parity",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = ["examples/run_eval.py", "--config", str(CONFIG), *overrides]
    done = forks.run(command, environment, timeout_s=380)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "cons@2" in done.stdout
    lines = done.stdout.splitlines()
    assert "model_name='step_0' dataset_name='arithmetic'" in lines
    assert "metric=cons@2 num_tests_per_prompt=3" in lines
    (sampling,) = [line for line in lines if line.startswith("max_new_tokens=32 temperature=")]
    assert sampling.endswith(" top_p=1.0 top_k=-1 seed=42")
    summary = json.loads((out / "summary.json").read_text())
    rows: list[dict[str, Any]] = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["sample"]) for row in rows] == [
        (problem, sample) for problem in range(5) for sample in range(3)
    ]
    of_problem = [[row for row in rows if row["problem"] == problem] for problem in range(5)]
    want = [consensus_at_k([row["answer"] for row in part], [row["reward"] for row in part], 2) for part in of_problem]
    assert summary["value"] == pytest.approx(sum(want) / 5)
    assert f"score={sum(want) / 5:.4f} ({summary['total']}/5)" in lines and summary["total"] == pytest.approx(sum(want))
    config = json.loads((out / "config.json").read_text())
    assert (config["metric"], config["k_value"], config["num_tests_per_prompt"]) == ("cons@k", 2, 3)
    theirs = json.loads((out / "evaluation_data.json").read_text())["evaluation_data"]
    assert [row["reward"] for row in theirs] == [row["reward"] for row in rows]
    assert [row["sample_index"] for row in theirs] == list(range(15))
    assert all(row["prompt"] and isinstance(row["message_log"], str) for row in theirs)
    assert summary["mean_reward"] == pytest.approx(sum(row["reward"] for row in rows) / 15)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_of_nemo_rl_evaluates_its_own_problems(
    tiny_model: Path, tmp_path: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.datasets import AllTaskProcessedDataset, load_eval_dataset
    from nemo_rl.data.datasets.eval_datasets import _is_multimodal_dataset
    from nemo_rl.environments.utils import create_env
    from nemo_rl.evals.eval import MasterConfig, run_env_eval, setup
    from nemo_rl.models.generation import configure_generation_config

    (tmp_path / "sums.jsonl").write_text("".join(f'{{"q": "{n}+1=", "a": "{n + 1}"}}\n' for n in range(3)))
    overrides = [
        f"generation.model_name={tiny_model}",
        f"eval.save_path={tmp_path}/out",
        "eval.num_tests_per_prompt=2",
        "eval.k_value=1",
    ]
    values = load_master_config(CONFIG, overrides, EvalMasterConfig).to_dict()
    values["data"] = {
        "dataset_name": f"{tmp_path}/sums.jsonl",
        "problem_key": "q",
        "solution_key": "a",
        "file_format": "json",
        "split": None,
        "prompt_file": None,
        "system_prompt_file": None,
    }
    values["env"] = {"math": {"num_workers": 1}}
    assert not _is_multimodal_dataset(values["data"]["dataset_name"])
    base = load_eval_dataset(values["data"])
    config = MasterConfig(
        **values | {"data": {"dataset_name": "ResponseDataset", "data_path": "x", "prompt_file": None}}
    )
    tokenizer = get_tokenizer(config.tokenizer, get_processor=False)
    config.generation = configure_generation_config(config.generation, tokenizer, is_eval=True)
    dataset = AllTaskProcessedDataset(
        dataset=base.rekeyed_ds,
        tokenizer=tokenizer,
        default_task_data_spec=base.task_spec,
        task_data_processors=base.processor,
        max_seq_length=config.data["max_input_seq_length"],
    )
    env = create_env(env_name="math", env_config=config.env["math"])
    generation, loader, config = setup(config, tokenizer, dataset)
    assert next(iter(loader))["extra_env_info"][1] == {"ground_truth": "2"}
    score = run_env_eval(generation, loader, env, config)
    assert (score.problems, score.answers_per_problem) == (3, 2)
    assert f"score={score.value:.4f} ({score.total}/3)" in capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "out" / "evaluation_data.json").read_text())["evaluation_data"]
    assert len(rows) == 6
    with pytest.raises(TypeError, match="here it is setup"):
        run_env_eval(generation, loader, env, config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.k_value=9", "eval.k_value is 9, but eval.num_tests_per_prompt draws 4"),
        ("generation.temperature=0", "generation.temperature 0 gives the same answer every time"),
        ("eval.metric=pass", "eval.metric: 'pass' is not one of"),
        ("cluster.gpus_per_node=3", "cluster.gpus_per_node is 3, but cluster.cpu_slots offers 1"),
        ("generation.max_new_tokens=64", "above generation.vllm_cfg.max_model_len 32"),
        (
            "generation.vllm_cfg={engines_per_gpu: 2, enable_expert_parallel: true}",
            "engines_per_gpu is 2, and the ranks",
        ),
        ("generation.model_name=/nowhere", "/nowhere"),
        ("env.math.num_worker=3", "Did you mean 'num_workers'"),
        ("data.env_name=maths", "there is no environment 'maths'"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    override: str, message: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--config",
        str(CONFIG),
        f"generation.model_name={tiny_model}",
        f"eval.save_path={tmp_path}/eval",
        override,
    ]
    assert main(arguments, default_config=CONFIG) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [True, False])
def test_a_command_without_a_configuration_says_which_values_are_our_own(
    given: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    default = ROOT / "examples" / "configs" / "evals" / "eval.yaml"
    arguments = [*(["--config", str(default)] if given else []), "eval.metric=nothing"]
    assert main(arguments, default_config=default) != 0
    told = "eval.yaml: its prompt is examples/prompts/step_by_step.txt, because NeMo-RL's prompts are not shipped"
    assert (told in capsys.readouterr().err) != given
