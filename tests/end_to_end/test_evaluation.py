"""`examples/run_eval.py` on a checkpoint: real engine, real verifier, and what it writes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.algorithms.commands import evaluate as main
from nemo_rl.algorithms.evaluation import consensus_at_k
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
    summary = json.loads((out / "summary.json").read_text())
    rows: list[dict[str, Any]] = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["sample"]) for row in rows] == [
        (problem, sample) for problem in range(5) for sample in range(3)
    ]
    of_problem = [[row for row in rows if row["problem"] == problem] for problem in range(5)]
    want = [
        consensus_at_k([row["answer"] for row in part], [row["reward"] >= 1 for row in part], 2) for part in of_problem
    ]
    assert summary["value"] == pytest.approx(sum(want) / 5)
    assert summary["mean_reward"] == pytest.approx(sum(row["reward"] for row in rows) / 15)


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
