"""Which teacher scores a sample, and which teachers are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.algorithms.distillation.teachers import check_teachers, teacher_of
from nemo_rl.algorithms.grpo.placement import OwnPlacement
from nemo_rl.config import ConfigError, DistillationMasterConfig, MasterConfig, load_master_config
from nemo_rl.config.teachers import teachers_of
from nemo_rl.models.policy.model_config import model_config
from nemo_rl.time_sharing.pipelines.pooled_teacher import Served
from tests.conftest import example


def _by_task(*overrides: str) -> MasterConfig:
    return load_master_config(
        None,
        [
            "grpo.adv_estimator.name=opd",
            "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x, b: x, c: y}}",
            *overrides,
        ],
    )


def test_a_sample_is_scored_by_the_teacher_that_names_its_data_set() -> None:
    teachers = teachers_of(_by_task())
    assert [teacher_of(teachers, task, strict=False) for task in "abc"] == [0, 0, 1]
    with pytest.raises(ConfigError, match="the data set 'd' has no teacher, and there is no default; it names a, b, c"):
        teacher_of(teachers, "d", strict=False)


def test_the_default_teacher_scores_the_rest_unless_names_must_match() -> None:
    teachers = teachers_of(_by_task("on_policy_distillation.default_teacher_alias=c"))
    assert [teacher_of(teachers, task, strict=False) for task in ("a", "c", "d")] == [0, 1, 1]
    with pytest.raises(ConfigError, match="the data set 'd' has no teacher and strict_agent_name_match is true"):
        teacher_of(teachers, "d", strict=True)


def test_a_run_of_its_own_has_no_job_for_a_teacher() -> None:
    overrides = ["teacher.model_name=x", "teacher.backend=vllm", "teacher.job=served"]
    batch = "policy.train_global_batch_size=128"
    config = load_master_config(None, [*overrides, batch], DistillationMasterConfig)
    with pytest.raises(ConfigError, match="teacher.job is served, and this run is no job of a pool"):
        OwnPlacement().served_teacher(teachers_of(config)[0], config)


def test_a_student_that_needs_more_than_a_job_serves_is_refused_by_every_difference() -> None:
    served = Served("x", 64, 512)
    assert not list(served.differences(Served("x", 8, 512), "served"))
    assert list(served.differences(Served("y", 65, 513), "served")) == [
        "teacher.model_name is y, and the job served serves x",
        "topk_logits_k is 65, and the job served gives 64 tokens of a position at most",
        "policy.max_total_sequence_length is 513, and the job served scores 512 tokens at most",
    ]


def _refusal(student: Path, teacher: Path | str, *overrides: str) -> str:
    config = load_master_config(
        None,
        [
            f"policy.model_name={student}",
            f"teacher.model_name={teacher}",
            "policy.train_global_batch_size=128",
            *overrides,
        ],
        DistillationMasterConfig,
    )
    with pytest.raises(ConfigError) as caught:
        check_teachers(config, model_config(config.policy))
    return str(caught.value)


def test_teachers_that_speak_other_tokens_or_do_not_exist_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    other, sizes = tmp_path / "other", tmp_path / "sizes"
    example("make_tiny_model").save_tiny_model(other, layers=1, hidden=32)
    example("make_tiny_model").save_tiny_model(sizes, layers=1, hidden=32)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", "<|turn|>"))
    assert "tokens differ, such as '<|im_start|>', '<|turn|>'" in _refusal(tiny_model, other)
    config = (sizes / "config.json").read_text()
    (sizes / "config.json").write_text(config.replace('"vocab_size": 320', '"vocab_size": 384'))
    assert "has vocab_size 384" in _refusal(tiny_model, sizes)
    assert "teacher.model_name" in _refusal(tiny_model, tmp_path / "nowhere")
    said = _refusal(tiny_model, tiny_model, "distillation.topk_logits_k=321")
    assert "distillation.topk_logits_k is 321, and the vocabulary has 320 tokens" in said
