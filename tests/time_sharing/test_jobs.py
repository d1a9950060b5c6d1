"""What is submitted to a pool: files of every kind, wrappers around them, and what is refused before Ray starts."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.placement import Clusters
from nemo_rl.config import ConfigError, MasterConfig, SFTMasterConfig
from nemo_rl.config.teacher_sections import pooled_teacher
from nemo_rl.distributed.accelerator_slots import CUDA
from nemo_rl.distributed.processes import WORKING_DIRECTORY
from nemo_rl.time_sharing import pool_commands
from nemo_rl.time_sharing.__main__ import main as command_line
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace
from nemo_rl.time_sharing.arguments import ForeignVariable, check_variables, refused_variables
from nemo_rl.time_sharing.launcher import launcher_parser, limits_of, run_together
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress, Standing
from nemo_rl.time_sharing.opening import LIVE_LIMITS
from nemo_rl.time_sharing.pipelines.job import Job, Kind, read_jobs
from nemo_rl.time_sharing.pipelines.lent import LentPlacement, TurnRules
from nemo_rl.time_sharing.pipelines.residents import SlotMemory
from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot
from nemo_rl.time_sharing.pool_commands import run_under_control_plane, submitters_env
from nemo_rl.time_sharing.pool_jobs import Expectation, PoolError, variables_of
from nemo_rl.time_sharing.protocol.topology import Pool, RegistrationError
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    KILLED_S,
    LONGEST_STOP_S,
    Demand,
    Priority,
    Verb,
    Want,
)
from nemo_rl.time_sharing.shipped_scenarios import fitted, shipped_scenarios
from nemo_rl.time_sharing.viewing.standings_table import StandingsTable, print_scenarios, result_of
from nemo_rl.time_sharing.viewing.timeline import Timeline
from tests.time_sharing.bench import Bench

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GRPO, SFT, EVALUATION = (CONFIGS / f"{name}_arithmetic_cpu.yaml" for name in ("grpo", "sft", "eval"))
POOL = Pool(1, 2)


def file(folder: Path, name: str, **content: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def only(path: Path, *overrides: str) -> Job:
    return read_jobs([path], POOL, overrides)[0]


def test_the_kind_of_a_job_is_read_from_its_file(tmp_path: Path) -> None:
    command = file(tmp_path, "probe", external={"command": ["true"], "gpus": 2})
    jobs = read_jobs([GRPO, SFT, EVALUATION, command], POOL)
    assert [job.kind for job in jobs] == [Kind.GRPO, Kind.SFT, Kind.EVALUATION, Kind.EXTERNAL]
    assert [job.train for job in jobs] == [(0,), (1,), (), ()], "neighbours train on different GPUs"
    assert [job.infer for job in jobs] == [(0, 1), (1,), (0, 1), (0, 1)]
    assert [len(job.topology(POOL).ranks) for job in jobs] == [2, 1, 2, 1]
    assert [sorted(job.mappings(POOL)) for job in jobs[2:]] == [[ACTOR_INFER], [ACTOR_INFER]]


def test_an_engine_of_a_job_lies_inside_one_node() -> None:
    wide = ["policy.generation.vllm_cfg.tensor_parallel_size=2", "cluster.num_nodes=2", "cluster.gpus_per_node=1"]
    assert len(read_jobs([GRPO], Pool(2, 2), wide)[0].topology(Pool(2, 2)).ranks) == 2
    with pytest.raises(ConfigError, match="an engine has 2 ranks .* nodes have 1 GPUs; engines over several"):
        read_jobs([GRPO], Pool(2, 1), wide)


def test_a_distillation_is_a_job_whose_teacher_takes_turns_with_its_student() -> None:
    job = only(CONFIGS / "distillation_arithmetic_cpu.yaml")
    assert (job.kind, job.train, job.infer) == (Kind.GRPO, (0,), (0, 1))
    own = ["cluster.gpus_per_node=2", "teacher.colocated={enabled: false, resources: {gpus_per_node: 1}}"]
    with pytest.raises(ConfigError, match="teacher.model_name has accelerators of its own, and a job has only those"):
        only(CONFIGS / "distillation_arithmetic_cpu.yaml", *own)


def test_a_teacher_is_a_job_that_serves_the_teacher_of_a_file_to_the_jobs_that_name_it(tmp_path: Path) -> None:
    student = CONFIGS / "distillation_arithmetic_cpu.yaml"
    engines = ["teacher.backend=vllm", "teacher.generation.vllm_cfg.tensor_parallel_size=2"]
    wrapped = file(tmp_path, "served", nemo_config_path=str(student), pipeline_cls="x.TeacherPipeline")
    first, second = read_jobs([wrapped, student], POOL, [*engines, "teacher.job=served"])
    assert (first.kind, first.train, first.infer, first.rank_width) == (Kind.TEACHER, (), (0, 1), 2)
    assert sorted(first.mappings(POOL)) == [ACTOR_INFER]
    assert (second.kind, second.train, second.rank_width) == (Kind.GRPO, (0,), 1)
    assert (first.teachers, second.teachers) == (("served",), ("served",))


SEVERAL = {
    "defaults": str(GRPO),
    "grpo": {"adv_estimator": {"name": "opd"}},
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "on_policy_distillation": {
        "enabled": True,
        "backend": "vllm",
        "teacher_model_by_agent_name": {"sums": "x", "words": "y"},
        "job_by_agent_name": {"sums": "adds", "words": "reads"},
    },
}


def test_of_several_teachers_a_job_serves_the_one_that_names_it(tmp_path: Path) -> None:
    student = file(tmp_path, "student", **SEVERAL)
    lent = {"nemo_config_path": str(student), "pipeline_cls": "TeacherPipeline"}
    adds, reads, learns = read_jobs(
        [file(tmp_path, "adds", **lent), file(tmp_path, "w", **lent, exp_name="reads"), student], POOL
    )
    assert (adds.kind, reads.kind, learns.kind) == (Kind.TEACHER, Kind.TEACHER, Kind.GRPO)
    assert (adds.teachers, learns.teachers) == (("adds",), ("adds", "reads"))
    assert isinstance(reads.config, MasterConfig)
    assert pooled_teacher(reads.config, reads.name).policy.model_name == "y"
    with pytest.raises(ConfigError, match="job_by_agent_name names the jobs adds, reads; give this one the exp_name"):
        only(file(tmp_path, "third", **lent))
    with pytest.raises(ConfigError, match="enabled is false, so that the file has no teachers"):
        only(file(tmp_path, "adds", **lent), "on_policy_distillation.enabled=false", "grpo.adv_estimator.name=grpo")
    with pytest.raises(ConfigError, match="name those in on_policy_distillation.job_by_agent_name"):
        only(student, "~on_policy_distillation.job_by_agent_name")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["teacher.backend=vllm"], "serve it by a job of its own"),
        (["teacher.job=served"], "set teacher.backend to vllm"),
        (["teacher.backend=vllm", "teacher.job=distillation_arithmetic_cpu"], "teacher.job names this job"),
    ],
)
def test_teachers_that_a_pool_cannot_serve_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        only(CONFIGS / "distillation_arithmetic_cpu.yaml", *overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "overrides", "staleness"),
    [
        ("", [], 0),
        ("_async", ["grpo.async_grpo.max_trajectory_age_steps=3"], 3),
        ("_streaming", ["async_rl.sampler.max_lookahead_versions=0"], 0),
        ("_streaming", ["async_rl.sampler.name=windowed", "async_rl.sampler.max_staleness_versions=1"], 1),
        ("_streaming", ["async_rl.sampler.name=ready_first"], None),
    ],
)
def test_a_job_is_registered_with_how_old_its_samples_may_be(
    config: str, overrides: list[str], staleness: int | None
) -> None:
    job = only(CONFIGS / f"grpo_arithmetic{config}_cpu.yaml", *overrides)
    assert job.topology(POOL).spec.staleness == staleness


def test_an_override_goes_to_the_jobs_that_have_its_key() -> None:
    overrides = ["grpo.max_num_steps=7", "sft.max_num_steps=9", "policy.train_micro_batch_size=8"]
    grpo, sft, _ = read_jobs([GRPO, SFT, EVALUATION], POOL, overrides)
    assert isinstance(grpo.config, MasterConfig) and isinstance(sft.config, SFTMasterConfig)
    assert grpo.config.grpo.max_num_steps == 7 and sft.config.sft.max_num_steps == 9
    assert grpo.config.policy.train_micro_batch_size == sft.config.policy.train_micro_batch_size == 8
    with pytest.raises(ConfigError, match="max_num_stepz"):
        read_jobs([GRPO, SFT], POOL, ["grpo.max_num_stepz=7"])


def test_a_wrapper_chooses_gpus_share_and_slice(tmp_path: Path) -> None:
    wrapped = {"nemo_config_path": str(SFT), "exp_name": "warm start", "train_device_mapping": [1], "slice_s": 5}
    job = only(
        file(tmp_path, "a", pipeline_cls="nemo_rl.time_sharing.pipelines.sft.SFTPipeline", weight=2.0, **wrapped)
    )
    assert (job.name, job.train, job.infer, job.slice_s) == ("warm_start", (1,), (1,), 5.0)
    assert job.options["weight"] == 2.0


def test_the_wrappers_of_the_seeds_are_read(tmp_path: Path) -> None:
    stub = {"offload_nccl": True, "strategy_args": {"strategy_name": "vllm", "strategy_config": {"sleep_level": 1}}}
    wrapper = {
        "pipeline_cls": "nemo_rl.time_sharing.pipelines.grpo.NemoRLFullFinetunePipeline",
        "nemo_config_path": str(GRPO),
        "nemo_config_overrides": [
            "grpo.max_num_steps=6",
            "policy.generation.vllm_cfg.num_gpu_blocks_override=64",
        ],
        "nemo_increment_log_dir": True,
        "verify_model_after_sync": False,
        "num_gpus_per_node": 2,
        "rlix_max_colocated_worker_groups": 4,
        "actor_train": {"device_mapping": [1], "strategy_args": {"strategy_name": "fsdp2_train"}},
        "actor_infer": {"device_mapping": [0, 1], **stub},
    }
    job = only(file(tmp_path, "seed", **wrapper))
    assert (job.train, job.infer) == ((1,), (0, 1)) and isinstance(job.config, MasterConfig)
    assert job.config.grpo.max_num_steps == 6 and not job.config.weight_sync.verify
    engines = job.config.policy.generation.vllm_cfg
    assert engines.sleep_level == 1 and engines.num_gpu_blocks_override == 64


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"nemo_config_path": str(SFT), "pipeline_cls": "x.NemoRLFullFinetunePipeline"}, "run by SFTPipeline"),
        ({"nemo_config_path": str(GRPO), "pipeline_cls": "TeacherPipeline"}, "has no section `teacher`"),
        ({"nemo_config_path": str(GRPO), "gpus": 2}, "gpus: unknown key. A wrapper has pipeline_cls"),
        ({"nemo_config_path": str(GRPO), "actor_train": {"device_maping": [0]}}, "device_maping: .* 'device_mapping'"),
        (
            {"nemo_config_path": str(GRPO), "actor_infer": {"strategy_args": {"strategy_config": {"sleep_levle": 1}}}},
            "actor_infer.strategy_args.strategy_config.sleep_levle: unknown key. Did you mean 'sleep_level'",
        ),
        (
            {"nemo_config_path": str(GRPO), "actor_infer": {"strategy_arg": {"strategy_name": "vllm"}}},
            "actor_infer.strategy_arg: unknown key. Did you mean 'strategy_args'",
        ),
        (
            {"nemo_config_path": str(GRPO), "actor_train": {"strategy_args": {"strategy_config": {"tp": 2}}}},
            "actor_train.strategy_args.strategy_config.tp: unknown key. .* has no keys here",
        ),
        ({"nemo_config_path": str(GRPO), "actor_train": [0]}, r"actor_train: \[0\] is no mapping of keys"),
        ({"nemo_config_pth": str(GRPO), "exp_name": "a"}, "nemo_config_path: required beside exp_name"),
        (
            {
                "nemo_config_path": str(GRPO),
                "nemo_config_overrides": [
                    "policy.generation.vllm_cfg.tensor_parallel_size=2",
                    "cluster.gpus_per_node=2",
                ],
                "train_device_mapping": [1],
                "infer_device_mapping": [1],
            },
            "1 GPUs cannot be divided into ranks of tp=2",
        ),
        ({"nemo_config_path": str(GRPO), "actor_train": {"offload_nccl": False}}, "offload_nccl: false"),
        ({"nemo_config_path": str(GRPO), "actor_infer": {"strategy_config": {"sleep_level": 3}}}, "sleep_level 3"),
        ({"nemo_config_path": str(GRPO), "num_gpus_per_node": 8}, "the pool's nodes have 2"),
        (
            {
                "nemo_config_path": str(GRPO),
                "train_device_mapping": [0],
                "actor_train": {"device_mapping": [1]},
            },
            r"train_device_mapping: \[0\], but actor_train.device_mapping: \[1\]",
        ),
        (
            {"nemo_config_path": str(GRPO), "actor_infer": {"device_mapping": "list(range(0, 2))"}},
            "is not a list of GPU numbers",
        ),
        ({"nemo_config_path": str(GRPO), "infer_device_mapping": []}, "infer_device_mapping is empty"),
        ({"nemo_config_path": str(GRPO), "nemo_increment_log_dir": False}, "writes into a numbered folder"),
        ({"nemo_config_path": str(GRPO), "rlix_max_colocated_worker_groups": 1}, "are two groups on a GPU"),
        (
            {"nemo_config_path": str(GRPO), "actor_train": {"strategy_args": {"strategy_name": "deepspeed_train"}}},
            "'deepspeed_train'; there is megatron_train, fsdp2_train here",
        ),
        (
            {"nemo_config_path": str(GRPO), "actor_infer": {"strategy_args": {"strategy_name": "sglang"}}},
            "'sglang'; there is vllm here",
        ),
        (
            {"nemo_config_path": str(GRPO), "actor_train": {"strategy_args": {"strategy_name": "megatron_train"}}},
            "policy.dtensor_cfg.enabled is true",
        ),
        (
            {"nemo_config_path": str(GRPO), "nemo_config_overrides": ["policy.dtensor_cfg.tensor_parallel_size=2"]},
            "is 2, which does not divide the 1 accelerators that train",
        ),
        (
            {
                "nemo_config_path": str(GRPO),
                "nemo_config_overrides": [
                    "grpo.num_prompts_per_step=1",
                    "grpo.num_generations_per_prompt=5",
                    "policy.train_global_batch_size=5",
                    "policy.train_micro_batch_size=1",
                ],
                "train_device_mapping": [0, 1],
            },
            "5 does not divide over 2 data-parallel ranks",
        ),
        (
            {
                "nemo_config_path": str(GRPO),
                "nemo_config_overrides": ["policy.generation.vllm_cfg.engines_per_gpu=2"],
            },
            "engines_per_gpu is 2, but a scheduler lends GPUs to one engine each",
        ),
        ({"external": {"command": []}}, "external.command"),
        ({"external": {"command": ["true"], "gpu": 1}}, "external.gpu"),
        ({"external": {"command": ["true"]}, "grpo": {}}, "has no other; found grpo"),
        ({"external": {"command": ["true"], "gpus": 3}}, "more GPUs than the pool has"),
        ({"nemo_config_path": str(GRPO), "train_device_mapping": [1], "infer_device_mapping": [0]}, "not among"),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_its_mistake(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, RegistrationError), match=said):
        only(file(tmp_path, "bad", **content))


@pytest.mark.parametrize(
    ("names", "trains"),
    [("a", [(0, 1)]), ("b_0 b_1", [(0, 1), (2, 3)]), ("e", [(0, 1)]), ("f_0 f_1", [(0, 1), (2, 3)])],
)
def test_the_scenarios_of_the_seeds_can_be_submitted(names: str, trains: list[tuple[int, ...]]) -> None:
    folder = CONFIGS.parent / "time_sharing" / "pipelines"
    jobs = read_jobs([folder / f"scenario_{name}.yaml" for name in names.split()], Pool(1, 4))
    assert [job.train for job in jobs] == trains
    assert {job.infer for job in jobs} == {(0, 1, 2, 3)}
    assert len({job.config.checkpointing.checkpoint_dir for job in jobs if job.config}) == len(jobs)  # type: ignore[union-attr]


@pytest.mark.parametrize(("delay_s", "asked"), [(0.0, [0, 0]), (60.0, [4, 1]), (0.05, None)])
def test_jobs_are_admitted_in_turn(monkeypatch: pytest.MonkeyPatch, delay_s: float, asked: list[int] | None) -> None:
    """The first makes its first step when it is asked the fourth time, the second ends at once."""
    submitted: list[str] = []
    questions: list[str] = []

    def standings(actor: Any, names: list[str]) -> list[Any]:
        questions.extend(names)
        step = int(questions.count("a") > 3) if asked is not None else 0
        done = Outcome("done", "") if names == ["b"] and asked is not None else None
        return [Standing(names[0], (0,), (0,), 0.0, progress=Progress("training", step, 9, ""), outcome=done)]

    monkeypatch.setattr(pool_commands, "_POLL_S", 0.01)
    monkeypatch.setattr(pool_commands, "check_code", lambda jobs: None)
    monkeypatch.setattr(pool_commands, "_standings", standings)
    monkeypatch.setattr(pool_commands, "ask", lambda answer: answer)
    monkeypatch.setattr(pool_commands, "replace", lambda job, **_: job)
    actor: Any = SimpleNamespace(submit=SimpleNamespace(remote=lambda job, token: submitted.append(job) or job))
    jobs: Any = ["a", "b", "c"]
    assert pool_commands.submit_all(actor, jobs, {}, admit_delay_s=delay_s) == submitted == ["a", "b", "c"]
    found = [questions.count("a"), questions.count("b")]
    assert found == asked if asked is not None else min(found) > 0


@pytest.mark.parametrize(
    ("when", "cancelled", "says"),
    [
        ("status", [], "interrupted; the pool and its jobs go on\n"),
        ("submit", [], "interrupted; the pool and its jobs go on\n"),
        ("follow: about", [], "interrupted; the pool and its jobs go on\n"),
        ("follow: submit b", ["a", "b"], "interrupted: a is being cancelled; b is being cancelled\n"),
        ("follow: submit c", ["a", "b"], "interrupted: a is being cancelled; b is being cancelled\n"),
        ("follow: expect a", ["a", "b"], "interrupted: a is being cancelled; b is being cancelled\n"),
        ("follow: watch", ["a", "b"], "interrupted: a is being cancelled; b is being cancelled\n"),
    ],
)
def test_an_interrupt_ends_and_names_what_the_command_would_have_followed(
    when: str, cancelled: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`submit c` is one that the pool refuses, interrupted before the answer is there."""
    ended, due = list[str](), [when.partition(": ")[2]]

    def answers(what: str, answer: Callable[[str], object]) -> Any:
        return SimpleNamespace(remote=lambda name="", *_: (f"{what} {name}".strip(), partial(answer, name)))

    def ask(asked: Any) -> Any:
        if asked[0] in due:
            due.remove(asked[0])
            raise KeyboardInterrupt
        return asked[1]()

    def submit(name: str) -> str:
        if name == "c":
            raise PoolError("c runs already")
        return name

    def cancel(name: str) -> str:
        ended.append(name)
        return "is being cancelled"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    jobs: Any = [SimpleNamespace(name=name) for name in ("abc" if when.endswith("c") else "ab")]
    actor: Any = SimpleNamespace(
        about=answers("about", lambda _: SimpleNamespace(memory=None, unit="GPU", team="")),
        submit=answers("submit", submit),
        expected_start=answers("expect", lambda _: Expectation((), (0,), 0.0, "")),
        cancel=answers("cancel", cancel),
    )
    monkeypatch.setattr(pool_commands, "ask", ask)
    monkeypatch.setattr(pool_commands, "check_code", lambda jobs: None)
    monkeypatch.setattr(pool_commands, "replace", lambda job, **_: job.name)
    monkeypatch.setattr(pool_commands, "estimated_needs", lambda *_: None)
    monkeypatch.setattr(pool_commands, "doubt", lambda *_: "")
    monkeypatch.setattr(pool_commands, "what_it_takes", lambda *_: "")
    monkeypatch.setattr(pool_commands, "_join", (lambda _: (actor, Pool(1, 2))) if ":" in when else interrupted)
    monkeypatch.setattr(pool_commands, "read_jobs", lambda *_: jobs)
    monkeypatch.setattr(pool_commands, "watch", interrupted)
    words = ["status"] if when == "status" else ["submit", "a.yaml", *(["--wait"] if ":" in when else [])]
    assert command_line(words) == 130
    assert ended == cancelled and capsys.readouterr().err.endswith(says)


def test_no_delay_may_be_said() -> None:
    line = ["--gpus", "2", "--pipelines", "a.yaml"]
    assert launcher_parser().parse_args([*line, "--admit-delay-s", "0"]).admit_delay_s == 0
    assert launcher_parser().parse_args([*line, "--admit-delay-s", "1.5"]).admit_delay_s == 1.5
    with pytest.raises(SystemExit):
        launcher_parser().parse_args([*line, "--admit-delay-s", "-1"])


def test_a_scenario_is_chosen_by_its_letter(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(*arguments: str) -> str:
        return str(launcher_parser().parse_args(["--gpus", "4", *arguments]).scenario)

    assert [chosen("--scenario", text) for text in ("A", "b", "All")] == ["A", "B", "all"]
    assert [file.stem for file in shipped_scenarios()["B"]] == ["scenario_b_0", "scenario_b_1"]
    for wrong in (["--scenario", "Z"], ["--scenario", "A", "--pipelines", "a.yaml"], []):
        with pytest.raises(SystemExit):
            chosen(*wrong)
    assert "Z: no such scenario; there are A, B, " in capsys.readouterr().err


def test_a_scenario_on_too_few_gpus_says_how_many_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_together(["--gpus", "2", "--scenario", "A"]) == 2
    assert "needs 4 GPUs" in (said := capsys.readouterr().err) and "give --gpus 4, or --scale" in said
    assert run_together(["--gpus", "3", "--scenario", "D", "--scale"]) == 2
    assert "these files are for 4 GPUs, of which 3 are no whole part or multiple" in capsys.readouterr().err
    wrapper = file(tmp_path, "wide", nemo_config_path=str(GRPO), actor_infer={"device_mapping": [0, 1, 2, 3]})
    with pytest.raises(ConfigError, match="wide.yaml: needs 4 GPUs"):
        fitted([wrapper], POOL, tmp_path)
    (scaled,) = read_jobs(fitted([wrapper], POOL, tmp_path / "scaled", scale=True), POOL)
    assert scaled.infer == (0, 1)
    assert fitted([GRPO, wrapper], Pool(1, 4), tmp_path / "other") == [GRPO, wrapper], "they fit as they are"


def test_files_are_named_as_the_other_control_plane_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--gpus", "2", "--config_path", str(tmp_path), "--config_name"]
    file(tmp_path, "one", nemo_config_path=str(GRPO), weigth=2)
    file(tmp_path, "two", nemo_config_path=str(GRPO))
    assert run_together([*line, "one,two"]) == 2
    assert "weigth: unknown key. Did you mean 'weight'?" in capsys.readouterr().err
    assert run_together([*line, "two,tow"]) == 2
    assert "--config_name tow: there is no" in (said := capsys.readouterr().err) and "Did you mean 'two'?" in said
    assert run_together(["--gpus", "2", "--config_path", str(tmp_path), "--pipelines", str(GRPO)]) == 2
    assert "give --config_name" in capsys.readouterr().err


ONE_EACH = ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=64"]


def test_a_wrapper_may_draw_one_sample_per_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="every advantage would be 0; draw at least 2 samples"):
        only(GRPO, *ONE_EACH)
    wrapped: dict[str, Any] = {"nemo_config_path": str(GRPO)}
    config = only(file(tmp_path, "smoke", **wrapped, nemo_config_overrides=ONE_EACH)).config
    assert isinstance(config, MasterConfig) and config.grpo.num_generations_per_prompt == 1
    assert "every advantage is 0, and the rewards teach nothing" in caplog.text
    caplog.clear()
    estimator = ["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"]
    assert only(GRPO, *ONE_EACH, *estimator).kind is Kind.GRPO and "every advantage" not in caplog.text


def test_a_scenarios_row_says_why_it_did_not_pass() -> None:
    done = Standing("a", (0,), (0,), 10.0, ended_at=40.0, outcome=Outcome("done", steps=2, waited_s=1.5))
    lost = Standing("b", (0,), (0,), 11.0, ended_at=30.0, outcome=Outcome("failed", "DataError: no rows"))
    passed, failed = result_of("A", [done], Timeline(), []), result_of("B", [done, lost], Timeline(), ["a gap"])
    assert (passed.seconds, passed.waited_s, passed.why) == (30.0, 1.5, "")
    assert failed.why == "b: failed DataError: no rows; a gap"
    shown = io.StringIO()
    print_scenarios([passed, failed], "GPU", shown)
    assert [line.split()[-1] for line in shown.getvalue().splitlines()] == ["result", "PASS", "gap"]


def test_jobs_that_may_start_at_the_same_time_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--gpus", "2", "--pipelines", "a.yaml"]
    assert limits_of(launcher_parser().parse_args(line)) == LIVE_LIMITS
    chosen = launcher_parser().parse_args([*line, "--max-initialising", "1", "--quarantine", "2"])
    assert limits_of(chosen) == replace(LIVE_LIMITS, max_initialising=1, quarantine_s=2.0)
    with pytest.raises(SystemExit):
        launcher_parser().parse_args([*line, "--max-initialising", "-1"])
    assert "expected a whole number from 0" in capsys.readouterr().err


def test_variables_of_other_control_planes_are_refused_with_what_to_set_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not list(refused_variables({"RLIX_CONTROL_PLANE": "rlix", "PATH": "/bin", "RLIX_TRACE_OUTPUT_DIR": ""}))
    monkeypatch.setenv("RLIX_BUCKET_SIZE_BYTES", "4096")
    monkeypatch.setenv("RLIX_NOTIFY_READY_TIMEOUT_S", "5")
    assert run_together(["--gpus", "2", "--pipelines", str(GRPO)]) == 2
    said = capsys.readouterr().err
    assert "RLIX_BUCKET_SIZE_BYTES=4096 is not read here: set weight_sync.bucket_bytes; unset it" in said
    assert "RLIX_NOTIFY_READY_TIMEOUT_S=5 is no variable of this package; unset it" in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ROLL_ROLLOUT_GET_BATCH_TIMEOUT_S", "9", "is no variable of this package"),
        ("RLIX_CONTROL_PLANE", "rlx", "set it to rlix or unset it"),
        ("ROLL_RAY_NAMESPACE", "pipeline_other_NS", "pipelines get namespaces of their own"),
    ],
)
def test_each_way_into_a_pool_refuses_the_same_variables(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    entries = {
        "launcher": lambda: run_together(["--gpus", "2", "--pipelines", str(GRPO)]),
        "gate": lambda: run_under_control_plane([], default_config=GRPO),
        "serve": lambda: command_line(["serve", "--gpus", "2"]),
        "submit": lambda: command_line(["submit", str(GRPO)]),
    }
    for entry, run in entries.items():
        assert run() == 2, entry
        assert f"{name}={value}" in (error := capsys.readouterr().err) and said in error, entry


def test_a_job_may_submit_to_its_pool_and_gets_no_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    job = only(GRPO)
    own = variables_of(replace(job, env={"PIPELINE_ID": "another"}))
    assert own["PIPELINE_ID"] == job.name and own["ROLL_RAY_NAMESPACE"] == agent_namespace(job.name)
    check_variables(own)
    monkeypatch.setenv("RLIX_CONTROL_PLANE", "rlix")
    assert "SEED" in submitters_env(["SEED=1"])
    for named in ("PIPELINE_ID=mine", "RLIX_BUCKET_SIZE_BYTES=4096"):
        with pytest.raises(ForeignVariable, match=named):
            submitters_env([named])


def test_threads_of_a_jobs_processes_are_capped_unless_its_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = [f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")]
    for name in (*capped, "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.delenv(name, raising=False)
    job = replace(only(GRPO), env={"MKL_NUM_THREADS": "4"})
    given = variables_of(job)
    assert [given[name] for name in capped] == ["1", "1", "4", "1"]
    assert given["TORCH_NCCL_ENABLE_MONITORING"] == "0" and given[WORKING_DIRECTORY] == job.folder
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    assert variables_of(job)["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert set(variables_of(only(file(tmp_path, "probe", external={"command": ["true"]})))) == {
        WORKING_DIRECTORY,
        "NRL_POOL_TOKEN",
        "PIPELINE_ID",
        "ROLL_RAY_NAMESPACE",
    }


class Runtime:
    """Grants at once and notes what was asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def acquire(self, cluster: str, priority: Priority, step: int, timeout_s: float) -> None:
        self.said.append(f"{priority.tag} {step}")

    def release(self, cluster: str, **next_demand: int) -> None:
        assert cluster == ACTOR_TRAIN and not any(next_demand[key] for key in ("target", "done"))
        self.said.append("release")


@pytest.mark.parametrize(
    ("wanted", "slice_s", "longest_s", "said"),
    [
        (False, 0.0, 60.0, ["INIT -1", "TRN 0"]),
        (True, 60.0, 60.0, ["INIT -1", "TRN 0"]),
        (True, 0.0, 60.0, ["INIT -1", "TRN 0", "release", "TRN 1", "release"]),
        # Held longer than the scheduler lets anybody hold, the run would be cut off.
        (False, 0.0, 0.0, ["INIT -1", "TRN 0", "release", "TRN 1", "release"]),
    ],
)
def test_a_fine_tuning_run_gives_its_gpus_back_between_steps(
    wanted: bool, slice_s: float, longest_s: float, said: list[str]
) -> None:
    runtime: Any = Runtime()
    where: list[str] = []
    entered: list[Any] = []

    def memory(what: str) -> list[int]:
        used = 9 if where[-1:] == ["device"] or not where else 2
        return [used if what == "memory_in_use" else 16 - used]

    policy = SimpleNamespace(
        prepare_for_training=lambda: where.append("device"),
        offload_to_cpu=lambda: where.append("host"),
        destroy_nccl_groups=lambda: None,
        worker_group=SimpleNamespace(run=memory),
    )
    progress = SimpleNamespace(phase=lambda text: None)
    timer = SimpleNamespace(time=lambda name: nullcontext())
    run: Any = SimpleNamespace(policy=policy, generation=None, timer=timer, progress=progress)
    placement = LentPlacement(
        "tuning",
        Clusters(None, None),  # type: ignore[arg-type]
        CUDA,
        runtime,
        EngineSlot(lambda rank, slept: None),
        TurnRules(1.0, wanted=lambda: wanted, slice_s=slice_s, longest_s=longest_s),
        report_memory=lambda *resident: entered.append(resident),
    )
    with placement.building():
        lent = placement.accelerators(run)
    for step in range(2):
        lent.lend_training(step)
        assert where[-1] == "device"
        lent.yield_training(step)
    assert runtime.said == said
    assert where.count("host") == said.count("release") + 1
    # What stays of 16 bytes while it is away, and what it needs besides to train.
    assert entered == [([SlotMemory(2, 16)], [7])]


def test_gpus_are_wanted_by_who_waits_to_train_on_them_or_has_nothing_to_generate_on() -> None:
    bench = Bench(2)
    for name, gpu in (("holds", 0), ("other", 1)):
        bench.register(name, [gpu], [0, 1])
    bench.status("holds", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.settle(2.0)
    assert not bench.scheduler.wanted("holds")
    # It generates on the other GPU and has enough.
    bench.status("other", demand=Demand(4, 0, 1, 1))
    bench.settle(20.0)
    assert bench.phases("other") == {1: "serving"} and not bench.scheduler.wanted("holds")
    bench.register("late", [0], [0, 1])
    bench.status("late", wants=(Want(ACTOR_TRAIN, Priority.INITIALIZATION, 1, -1),))
    bench.settle(2.0)
    assert bench.scheduler.wanted("holds")
    assert not bench.scheduler.wanted("other"), "it holds nothing that anybody trains on"


def test_the_pool_waits_for_as_long_as_a_command_may_take_to_stop(tmp_path: Path) -> None:
    job = file(tmp_path, "probe", external={"command": ["true"], "stop_s": LONGEST_STOP_S + 1.0})
    with pytest.raises(ConfigError, match="external.stop_s: Input should be less than or equal to 1800"):
        read_jobs([str(job)], POOL)
    longest = file(tmp_path, "longest", external={"command": ["true"], "stop_s": LONGEST_STOP_S})
    (registered,) = read_jobs([str(longest)], POOL)
    drain_s = registered.topology(POOL).spec.drain_s
    assert LIVE_LIMITS.deadline_of(Verb.VACATE, drain_s) == LONGEST_STOP_S + KILLED_S + LIVE_LIMITS.sleep_s
    assert LIVE_LIMITS.deadline_of(Verb.VACATE) == LIVE_LIMITS.drain_s + LIVE_LIMITS.sleep_s


def test_the_table_says_what_an_evaluation_found_and_why_others_ended() -> None:
    shown = io.StringIO()
    ended = {
        "maths": Outcome("done", "pass@1 0.5000 on 8 problems", steps=8),
        "run": Outcome("done", steps=4),
        "broken": Outcome("failed", "DataError: no rows"),
    }
    StandingsTable("GPU", file=shown).print(
        [Standing(name, (), (0,), 0.0, ended_at=9.0, outcome=outcome) for name, outcome in ended.items()]
    )
    below = shown.getvalue().splitlines()[4:]
    assert below == ["maths: done pass@1 0.5000 on 8 problems", "broken: failed DataError: no rows"]
