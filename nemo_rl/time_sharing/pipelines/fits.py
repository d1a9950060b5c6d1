"""Whether what a job computes fits the GPUs that a pool lends it: training, teachers in turn, and served teachers."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config import ConfigError, MasterConfig, RootConfig
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.generation import VllmConfig
from nemo_rl.config.teacher_sections import pooled_teacher, teachers_of
from nemo_rl.config.world_sizes import ParallelSizesError, parallel_sizes


def engines_of(config: object, teacher: str | None) -> VllmConfig | None:
    """The options of a job's engines; None where it has none. `teacher`: its name where it serves one."""
    if teacher is not None and isinstance(config, MasterConfig):
        return pooled_teacher(config, teacher).policy.generation.vllm_cfg
    if isinstance(config, EvalMasterConfig):
        return config.generation.vllm_cfg
    return config.policy.generation.vllm_cfg if isinstance(config, MasterConfig) else None


def engines_are_too_wide(name: str, engines: VllmConfig | None, gpus: int) -> str | None:
    """Why an engine does not fit a node of so many GPUs; None where it does."""
    width = engines.tensor_parallel_size * engines.pipeline_parallel_size if engines is not None else 1
    if width <= gpus:
        return None
    return (
        f"{name}: an engine has {width} ranks (vllm_cfg.tensor_parallel_size * pipeline_parallel_size), the pool's "
        f"nodes have {gpus} GPUs; engines over several nodes are not built for a pool, which ends the processes of an "
        "engine on its first node alone"
    )


def as_teacher(config: MasterConfig, name: str) -> None:
    """Checks the configuration of a student whose teacher a job serves to others. Raises ConfigError: it has none that
    engines can be.
    """
    teacher, jobs = config.teacher, config.on_policy_distillation.job_by_agent_name.values()
    if teacher is None and jobs and not config.on_policy_distillation.enabled:
        raise ConfigError(
            [f"{name}: on_policy_distillation.enabled is false, so that the file has no teachers; set it to true"]
        )
    if teacher is None and jobs:
        if name not in jobs:
            raise ConfigError(
                [
                    f"{name}: on_policy_distillation.job_by_agent_name names the jobs {', '.join(sorted(set(jobs)))}; "
                    "give this one the exp_name of the teacher that it serves"
                ]
            )
        return
    if teacher is None:
        raise ConfigError(
            [
                f"{name}: pipeline_cls is TeacherPipeline, and the file has no section `teacher` and no "
                "on_policy_distillation.job_by_agent_name"
            ]
        )
    if teacher.backend != "vllm" or not teacher.colocated.enabled:
        raise ConfigError(
            [
                f"{name}: a job that serves a teacher has engines on GPUs that it is lent; set teacher.backend to vllm "
                "and teacher.colocated.enabled to true"
            ]
        )


def teachers_fit(name: str, config: MasterConfig, world: int) -> Iterator[str]:
    """What keeps teachers from computing in turn with the policy on its training GPUs."""
    for teacher in teachers_of(config):
        if teacher.job is not None:
            if teacher.job == name:
                yield f"{name}: {teacher.job_key} names this job; give the job that serves the teacher another exp_name"
            continue
        if teacher.backend == "vllm":
            section = "teacher" if teacher.name == "teacher" else "on_policy_distillation"
            yield (
                f"{name}: {section}.backend is vllm, and engines beside training would need GPUs that the pool lends; "
                + (
                    "serve it by a job of its own (pipeline_cls: TeacherPipeline) and name that in teacher.job"
                    if section == "teacher"
                    else "serve each by a job of its own and name those in on_policy_distillation.job_by_agent_name, "
                    "or set it to policy: these teachers compute in turn with training"
                )
            )
            continue
        if teacher.resources is not None:
            yield (
                f"{name}: {teacher.key} has accelerators of its own, and a job has only those that it is lent; let it "
                "compute in turn with the policy (teacher.colocated.enabled: true, or non_colocated_teachers.enabled: "
                "false)"
            )
            continue
        try:
            parallel_sizes(teacher.policy, world)
        except ParallelSizesError as error:
            yield f"{name}: {teacher.key}: {error}"


def divides(name: str, config: RootConfig, world: int) -> list[str]:
    """What is wrong with training this configuration on `world` GPUs."""
    try:
        sizes = parallel_sizes(config.policy, world)
    except ParallelSizesError as error:
        return [f"{name}: {error}"]
    problems = []
    if world // sizes.pp % sizes.ep:
        problems.append(f"{name}: expert parallel size {sizes.ep} does not divide the {world} GPUs that train")
    batch = config.policy.train_global_batch_size
    if batch % sizes.dp:
        what = f"policy.train_global_batch_size {batch} does not divide over {sizes.dp} data-parallel ranks"
        problems.append(f"{name}: {what} ({world} training GPUs)")
    return problems
