"""Which teacher scores a sample, and which teachers are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.distillation.teachers import LOGPROBS, EngineTeacher, Seat, Teachers, check_teachers, teacher_of
from nemo_rl.algorithms.placement import OwnPlacement
from nemo_rl.config import ConfigError, DistillationMasterConfig, MasterConfig, load_master_config
from nemo_rl.config.teacher_sections import pooled_teacher, teachers_of
from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.policy.model_config import model_config
from nemo_rl.time_sharing.pipelines.pooled_teacher import Served
from nemo_rl.utils.timer import Timer
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


def test_engines_of_several_teachers_score_their_own_rows() -> None:
    """Each scores with a number of its own, and both were awake for their samples only."""
    seen: list[tuple[str, list[int]]] = []

    class Engines(EngineTeacher):
        def __init__(self, name: str, logprob: float) -> None:
            self._name, self._logprob = name, logprob

        def prepare_for_lp_inference(self) -> None:
            seen.append((f"{self._name} wakes", []))

        def offload_to_cpu(self) -> None:
            seen.append((f"{self._name} sleeps", []))

        def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
            seen.append((self._name, batch["input_ids"][:, 0].tolist()))
            return BatchedDataDict(logprobs=torch.full(batch["input_ids"].shape, self._logprob))

    config = _by_task("on_policy_distillation.backend=vllm")
    one, other = teachers_of(config)
    assert (one.backend, one.policy.generation.vllm_cfg.max_model_len) == ("vllm", 513)
    slots: Any = SimpleNamespace(accelerator=CPU)
    teachers = object.__new__(Teachers)
    teachers.__dict__.update(
        _topk=0,
        _by_task=True,
        _in_engines=True,
        _strict=False,
        _cuda=False,
        _lends=False,
        _seats=[Seat(teacher, slots, shares=True) for teacher in (one, other)],
        _models=[Engines("first", -1.0), Engines("second", -2.0)],
    )
    store = InProcessStore(0)
    ids = torch.arange(4)[:, None].expand(4, 3).contiguous()
    handle = store.write(BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([3, 2, 3, 1])))
    scored = store.read(teachers.score(handle, ["b", "c", "a", "c"], store, Timer()), (LOGPROBS,))[LOGPROBS]
    assert scored[:, 0].tolist() == [-1.0, -2.0, -1.0, -2.0]
    assert seen == [
        *(("first wakes", []), ("first", [0, 2]), ("first sleeps", [])),
        *(("second wakes", []), ("second", [1, 3]), ("second sleeps", [])),
    ]


def test_several_teachers_are_jobs_each_of_which_serves_the_one_that_names_it() -> None:
    served = "on_policy_distillation.job_by_agent_name={a: one, b: one, c: other}"
    config = _by_task("on_policy_distillation.backend=vllm", served, "policy.max_total_sequence_length=512")
    assert [(teacher.job, teacher.names) for teacher in teachers_of(config)] == [("one", ("a", "b")), ("other", ("c",))]
    other = pooled_teacher(config, "other")
    assert (other.policy.model_name, other.asked(config)) == ("y", (0, 513))
    assert other.policy.generation.vllm_cfg.max_model_len == 513
    with pytest.raises(ConfigError, match=r"job_by_agent_name\.c is other, and this run is no job of a pool"):
        OwnPlacement().served_teacher(other, config)
    with pytest.raises(ValueError, match="lent to the job 'third'"):
        pooled_teacher(config, "third")


def test_jobs_of_several_teachers_score_side_by_side() -> None:
    """Each waits until the other one has its samples."""
    both = Barrier(2, timeout=30.0)

    class Served:
        def __init__(self, logprob: float) -> None:
            self._logprob = logprob

        def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
            both.wait()
            return BatchedDataDict(logprobs=batch["input_ids"] * self._logprob)

    served = "on_policy_distillation.job_by_agent_name={a: one, b: one, c: other}"
    config = _by_task("on_policy_distillation.backend=vllm", served)
    slots: Any = SimpleNamespace(accelerator=CPU)
    teachers = object.__new__(Teachers)
    teachers.__dict__.update(
        _topk=0,
        _by_task=True,
        _in_engines=True,
        _strict=False,
        _cuda=False,
        _lends=True,
        _seats=[Seat(teacher, slots, shares=False) for teacher in teachers_of(config)],
        _models=[Served(-1.0), Served(-2.0)],
    )
    store = InProcessStore(0)
    ids = torch.arange(1, 5)[:, None].expand(4, 3).contiguous()
    handle = store.write(BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([3, 2, 3, 1])))
    scored = store.read(teachers.score(handle, ["b", "c", "a", "c"], store, Timer()), (LOGPROBS,))[LOGPROBS]
    assert scored[:, 0].tolist() == [-1.0, -4.0, -3.0, -8.0]


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
        "policy.max_total_sequence_length takes 513 tokens of a teacher, and the job served has 512",
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


@pytest.mark.slow
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


def test_engines_that_lack_the_room_for_one_more_token_are_refused(tiny_model: Path) -> None:
    positions = int(model_config(_by_task(f"policy.model_name={tiny_model}").policy).max_position_embeddings)
    config = _by_task(
        f"policy.model_name={tiny_model}",
        "on_policy_distillation.backend=vllm",
        f"on_policy_distillation.teacher_model_by_agent_name={{a: {tiny_model}, b: {tiny_model}, c: {tiny_model}}}",
        f"policy.max_total_sequence_length={positions}",
    )
    with pytest.raises(ConfigError, match=f"policy.max_total_sequence_length to {positions - 1}"):
        check_teachers(config, model_config(config.policy))
