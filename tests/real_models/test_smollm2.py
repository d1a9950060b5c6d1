"""SmolLM2-135M-Instruct through every entry point: it agrees with its engine, learns, answers, is fine-tuned, adapted,
served and shared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_rl.utils.metrics_file import read_metrics
from tests.ranks import run_ranks
from tests.real_models.conftest import JUDGED, ROOT, SUMS, settings, start

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1200)]
Run = Callable[[str, dict[str, Any]], str]


@pytest.fixture(scope="module")
def grpo(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of three steps of GRPO with its own chat template."""
    folder = tmp_path_factory.mktemp("grpo")
    start(["run_grpo.py"], folder, settings(smollm2, folder, 12, grpo={"max_num_steps": 3}))
    return folder / "logs" / "exp_000"


def test_three_steps_train_what_its_engine_generated(grpo: Path) -> None:
    metrics = read_metrics(grpo)
    rewards = metrics.scalars("train/reward")[1]
    assert len(rewards) == 3 and 0.0 < sum(rewards) / 3 < 1.0
    assert max(metrics.scalars("train/token_mult_prob_error")[1]) < 1.001
    assert all(0.0 < norm < 1e3 for norm in metrics.scalars("train/grad_norm")[1])
    sample = json.loads((grpo / "samples" / "train_data_step1.jsonl").read_text().splitlines()[0])
    assert "helpful AI assistant named SmolLM" in json.dumps(sample["content"])


KINDS_OF_BATCHES = {
    "padded": ["policy.sequence_packing.enabled=false", "policy.logprob_batch_size=4"],
    "packed": ["policy.sequence_packing.enabled=true", "policy.sequence_packing.logprob_mb_tokens=512"],
    "shared prompts": [
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.logprob_mb_tokens=512",
        "policy.sequence_packing.share_prompts=true",
    ],
}


def scored(model: str, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean of exp(|difference to the engine's log-probability|) of each row's trained tokens, by kind of batch."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from tests.models.policy_ranks import make_worker, run_config, shard_of

    width = max(len(row["token_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row["token_ids"])] = torch.tensor(row["token_ids"])
    lengths = torch.tensor([row["input_lengths"] for row in rows])
    batch = BatchedDataDict(input_ids=ids, input_lengths=lengths, sample_index=torch.arange(len(rows)))
    errors: dict[str, list[float]] = {}
    for kind, keys in KINDS_OF_BATCHES.items():
        config = run_config(model, 1, "policy.max_total_sequence_length=96", "data.max_input_seq_length=64", *keys)
        worker = make_worker(config, init_optimizer=False)
        shard = shard_of(worker, batch, training=False)
        found = worker.get_logprobs(shard)["logprobs"]
        errors[kind] = []
        for place, number in enumerate(shard["sample_index"].tolist()):
            row = rows[number]
            parts = row["generation_logprobs"], row["token_loss_mask"]
            errors[kind].append(_error(found[place].tolist(), *parts, int(lengths[number])))
    return errors


def _error(mine: list[float], engine: list[float], mask: list[float], length: int) -> float:
    parts = [math.exp(abs(mine[at] - engine[at])) for at in range(length) if mask[at]]
    return sum(parts) / max(len(parts), 1)


def test_engine_and_trainer_agree_on_its_own_answers(smollm2: Path, grpo: Path) -> None:
    lines = (grpo / "samples" / "train_data_step1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:8]
    (errors,) = run_ranks(scored, 1, str(smollm2), rows)
    assert list(errors) == list(KINDS_OF_BATCHES)
    for kind, values in errors.items():
        assert len(values) == 8 and max(values) < 1.001, (kind, values)


def test_an_evaluation_says_how_often_it_is_right(smollm2: Path, run_script: Run, tmp_path: Path) -> None:
    own = settings(smollm2, tmp_path, 4)
    config = {
        "defaults": str(ROOT / "examples" / "configs" / "eval_arithmetic_cpu.yaml"),
        "eval": {"metric": "pass@k", "num_tests_per_prompt": 1, "k_value": 1, "save_path": str(tmp_path / "result")},
        "generation": {
            "model_name": str(smollm2),
            "temperature": 0.0,
            "max_new_tokens": 24,
            "vllm_cfg": {"max_model_len": 96},
        },
        "tokenizer": own["policy"]["tokenizer"],
        "data": SUMS | {"split": "validation", "prompt_file": None, "max_input_seq_length": 64, "env_name": "sums"},
        "env": dict(JUDGED),
    }
    said = run_script("run_eval.py", config)
    score = re.search(r"score=([0-9.]+)", said)
    assert score is not None, said[-2000:]
    assert 0.1 < float(score[1]) < 1.0 and "64" in said


def test_chat_rows_fine_tune_it(smollm2: Path, run_script: Run, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
        for word in ("yes", "no", "maybe", "never", "always", "often", "rarely", "soon")
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = settings(smollm2, tmp_path, 4)
    policy = {key: own["policy"][key] for key in ("model_name", "tokenizer", "max_total_sequence_length", "optimizer")}
    config = {
        "defaults": str(ROOT / "examples" / "configs" / "sft_arithmetic_cpu.yaml"),
        "sft": {"max_num_steps": 3, "max_num_epochs": 3, "val_period": 0, "val_at_start": False, "val_at_end": False},
        "policy": policy | {"train_global_batch_size": 8, "train_micro_batch_size": 4},
        "data": {
            "max_input_seq_length": 96,
            "train": {"dataset_name": "openai_format", "data_path": str(tmp_path / "chat.jsonl"), "split": None},
            "validation": None,
        },
        **{name: own[name] for name in ("cluster", "logger", "checkpointing")},
    }
    run_script("run_sft.py", config)
    losses = read_metrics(tmp_path / "logs").scalars("train/loss")[1]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_adapters_learn_and_reach_the_engine(smollm2: Path, run_script: Run, tmp_path: Path) -> None:
    lora = {"lora_cfg": {"enabled": True, "dim": 8, "alpha": 16, "sync": "adapter"}}
    policy = {"dtensor_cfg": lora, "optimizer": {"kwargs": {"lr": 1.0e-3}}}
    run_script("run_grpo.py", settings(smollm2, tmp_path, 4, grpo={"max_num_steps": 2}, policy=policy))
    metrics = read_metrics(tmp_path / "logs")
    # The second step's samples come from adapted weights.
    assert max(metrics.scalars("train/token_mult_prob_error")[1]) < 1.001
    assert max(metrics.scalars("refit/gib")[1]) < 0.02


AGENT = """
from openai import OpenAI


def play(task, base_url, session):
    client = OpenAI(base_url=base_url, api_key=session.api_key)
    answer = client.chat.completions.create(model=session.model, messages=list(task["messages"]))
    return float(task["expected"] in (answer.choices[0].message.content or ""))
"""


def test_an_agent_with_the_openai_client_plays_it(smollm2: Path, run_script: Run, tmp_path: Path) -> None:
    (tmp_path / "playing.py").write_text(AGENT)
    sections: dict[str, dict[str, Any]] = {
        "policy": {"generation": {"vllm_cfg": {"expose_http_server": True}}},
        "data": {"train": {"env_name": "played"}},
        "env": {"played": {"agent": "playing.play"}},
    }
    run_script("run_grpo.py", settings(smollm2, tmp_path, 4, **sections))
    metrics = read_metrics(tmp_path / "logs")
    assert max(metrics.scalars("train/token_mult_prob_error")[1]) < 1.001
    assert metrics.scalars("train/mean_gen_tokens_per_sample")[1][0] > 1


def test_two_jobs_of_it_share_two_slots(smollm2: Path, tmp_path: Path) -> None:
    files = []
    for name in ("first", "second"):
        loss = {"use_importance_sampling_correction": True}
        config = settings(smollm2, tmp_path, 4, grpo={"async_grpo": {"enabled": True}}, loss_fn=loss)
        config["logger"]["log_dir"] = str(tmp_path / name)
        config["cluster"] = {"gpus_per_node": 2, "cpu_slots": 2}
        config["policy"]["generation"]["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 1}}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(config))
    pool = ["run_time_sharing.py", "--gpus", "2", "--device", "cpu", "--port", "0", "--pipelines"]
    assert "record kept every invariant" in start([*pool, *map(str, files)], tmp_path)
    for name in ("first", "second"):
        assert len(read_metrics(tmp_path / name).scalars("train/reward")[1]) == 1
