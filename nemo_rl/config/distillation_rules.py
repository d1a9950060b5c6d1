"""Rules of teachers: their source, their readers, and their accelerators."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from nemo_rl.config.errors import NotBuilt, Problem
from nemo_rl.config.master import DistillationMasterConfig, MasterConfig, RootConfig
from nemo_rl.config.pass_through import engine_arguments_are_safe
from nemo_rl.config.rules import broken_rules, rule
from nemo_rl.config.section import DefaultFrom, Section, annotation_of, not_built
from nemo_rl.config.teacher_sections import MAX_LOGPROBS, Teacher, sizes_of, teachers_of
from nemo_rl.config.world_sizes import cluster_world_size, engine_fits, generation_world_size, training_world_size

_OPD = "on_policy_distillation"


@rule
def distillation_keeps_to_its_keys(config: DistillationMasterConfig) -> Iterator[str]:
    for prefix, section in (("distillation", config.grpo), ("loss_fn", config.loss_fn)):
        default: Section = type(section)()
        for name in sorted(section.without):
            if not _is_default(getattr(section, name), getattr(default, name)):
                key = type(section).model_fields[name].alias or name
                yield (
                    f"{prefix}.{key}: distillation learns from a teacher alone, without rewards, advantages or a "
                    "reference policy; leave the key out, or run examples/run_grpo.py with a section `teacher`"
                )
    if config.on_policy_distillation.enabled:
        yield f"{_OPD}.enabled: advantages from several teachers are made by examples/run_grpo.py"


def _is_default(value: object, default: object) -> bool:
    """Whether a value is the schema's, but for keys that follow others."""
    if not isinstance(value, Section) or not isinstance(default, Section):
        return value == default
    own = (name for name, field in type(value).model_fields.items() if annotation_of(field, DefaultFrom) is None)
    return all(_is_default(getattr(value, name), getattr(default, name)) for name in own)


@rule
def a_teacher_is_named_and_read(config: MasterConfig) -> Iterator[str]:
    teacher, loss = config.teacher, config.loss_fn
    if teacher is None:
        if config.distils:
            yield "teacher: distillation needs a teacher; set teacher.model_name"
        elif loss.teacher_kl_penalty:
            yield f"loss_fn.teacher_kl_penalty is {loss.teacher_kl_penalty:g}, and there is no section `teacher`"
        return
    if not teacher.model_name:
        yield "teacher.model_name: not given; name the model to learn from"
    for key, on in (
        ("router_replay.enabled", teacher.router_replay.enabled),
        ("sampling_mask_replay", teacher.sampling_mask_replay),
    ):
        if on:
            yield f"teacher.{key}: what is recorded are the policy's decisions, not a teacher's; leave it out"
    if teacher.job is not None and (teacher.backend != "vllm" or not teacher.colocated.enabled):
        yield (
            f"teacher.job is {teacher.job}: a job of the pool serves engines on GPUs that it is lent; set "
            "teacher.backend to vllm and teacher.colocated.enabled to true"
        )
    if config.distils:
        return
    if loss.teacher_kl_penalty == 0:
        yield (
            "teacher is given, and loss_fn.teacher_kl_penalty is 0, so that nothing would read it; set the penalty, or "
            "run examples/run_distillation.py to learn from the teacher alone"
        )
    elif loss.reference_policy_kl_penalty != 0:
        yield (
            f"loss_fn.teacher_kl_penalty is {loss.teacher_kl_penalty:g} and loss_fn.reference_policy_kl_penalty "
            f"{loss.reference_policy_kl_penalty:g}: the KL is taken to the teacher or to the reference policy; set one "
            "of them to 0"
        )
    if loss.loss_class is not None and loss.teacher_kl_penalty:
        yield "loss_fn.class and loss_fn.teacher_kl_penalty exclude each other: a loss of your own has its own terms"


@rule
def teachers_see_whole_samples(config: MasterConfig) -> Iterator[str]:
    teacher, longest = config.teacher, config.policy.max_total_sequence_length
    if teacher is not None and teacher.max_total_sequence_length < longest:
        yield (
            f"teacher.max_total_sequence_length is {teacher.max_total_sequence_length}, less than "
            f"policy.max_total_sequence_length {longest}; a teacher scores whole samples"
        )
    for one in teachers_of(config) if _sizes_are_valid(config) else ():
        if one.backend == "policy":
            problems = _view_problems(config, one)
        else:
            problems = _engine_problems(config, one) if one.name == "teacher" else _scoring_problems(config, one)
        yield from map(str, problems)


def _engine_problems(config: MasterConfig, teacher: Teacher) -> Iterator[Problem]:
    """Settings that keep engines from being a teacher."""
    vllm, k = teacher.policy.generation.vllm_cfg, config.grpo.topk_logits_k
    allowed = teacher.policy.generation.vllm_kwargs[MAX_LOGPROBS]
    if not isinstance(allowed, int):
        yield f"teacher.generation.vllm_kwargs.{MAX_LOGPROBS}: {allowed!r} is no number of tokens"
    elif allowed != -1 and allowed < k:
        yield (
            f"grpo.topk_logits_k is {k}, and teacher.generation.vllm_kwargs.{MAX_LOGPROBS} {allowed}: the engine gives "
            f"{allowed} tokens of each position at most; leave that key out, and it is started with {k}"
        )
    view = config.model_copy(update={"policy": teacher.policy})
    for problem in engine_arguments_are_safe(view):
        yield str(problem).replace("policy.generation", "teacher.generation")
    longest = config.policy.max_total_sequence_length
    if vllm.max_model_len < longest:
        yield (
            f"teacher.generation.vllm_cfg.max_model_len is {vllm.max_model_len}, less than "
            f"policy.max_total_sequence_length {longest}; a teacher scores whole samples"
        )
    yield from _engines_do_not_divide(config, teacher, "teacher.generation.vllm_cfg")


def _engines_do_not_divide(config: MasterConfig, teacher: Teacher, where: str) -> Iterator[Problem]:
    vllm = teacher.policy.generation.vllm_cfg
    width = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    world = teacher.slots(config) or training_world_size(config)
    nodes = 1 if config.cluster.num_nodes == 1 else max(world // config.cluster.gpus_per_node, 1)
    if teacher.job is None and world > 0 and not engine_fits(width, world // nodes, nodes):
        on = f" on {nodes} nodes" if nodes > 1 else ""
        yield (
            f"{where}: tensor_parallel_size * pipeline_parallel_size is {width}, which does not divide the {world} "
            f"accelerators of the teacher{on} into equal engines"
        )


def _scoring_problems(config: MasterConfig, teacher: Teacher) -> Iterator[Problem]:
    """Settings that keep engines from giving the log-probabilities of sampled tokens."""
    temperature, several = config.policy.generation.temperature, config.on_policy_distillation.non_colocated_teachers
    if temperature != 1:
        yield (
            f"{_OPD}.backend is vllm, which scores at temperature 1, and policy.generation.temperature is "
            f"{temperature:g}; set {_OPD}.backend to policy"
        )
    sizes = sizes_of(config, teacher.names[0])
    for key in ("context_parallel_size", "expert_model_parallel_size"):
        if several.enabled and getattr(sizes, key) > 1:
            yield f"{teacher.key}: {key} is {getattr(sizes, key)}, and engines have no such ranks; leave it out"
    yield from _engines_do_not_divide(config, teacher, f"{teacher.key}: generation.vllm_cfg")


def _view_problems(config: MasterConfig, teacher: Teacher) -> Iterator[Problem]:
    """Mistakes in a teacher's own keys, by the rules of every policy on its accelerators."""
    world = teacher.slots(config) or training_world_size(config)
    if world < 1:
        return
    policy = teacher.policy.model_copy(deep=True)
    # It trains nothing: what training asks of batches and optimizers is not asked of it.
    policy.train_global_batch_size = world * policy.train_micro_batch_size
    policy.optimizer = config.policy.optimizer
    view = RootConfig.model_construct(
        policy=policy,
        data=config.data,
        logger=config.logger,
        cluster=config.cluster.model_copy(update={"gpus_per_node": world, "num_nodes": 1, "cpu_slots": world}),
        checkpointing=config.checkpointing,
    )
    prefix = "teacher." if teacher.name == "teacher" else f"{teacher.key}: "
    for problem in broken_rules(view):
        if not isinstance(problem, NotBuilt) and "policy." in problem and "optimizer" not in problem:
            yield problem.replace("policy.", prefix)


def _sizes_are_valid(config: MasterConfig) -> bool:
    try:
        for task in config.on_policy_distillation.teacher_model_by_agent_name:
            sizes_of(config, task)
    except ValidationError:
        return False
    return True


@rule
def teachers_have_accelerators(config: MasterConfig) -> Iterator[Problem]:
    if not _sizes_are_valid(config):
        return
    own = [teacher for teacher in teachers_of(config) if teacher.resources is not None]
    for teacher in own:
        where = "teacher.colocated.resources" if teacher.name == "teacher" else f"{_OPD}.non_colocated_teachers"
        if not teacher.slots(config):
            key = "gpus_per_node" if config.cluster.num_nodes == 1 else "num_nodes"
            yield f"{where}: {key} is not given; a teacher that is not colocated takes accelerators of its own"
    if own and training_world_size(config) < 1:
        taken = sum(teacher.slots(config) for teacher in own)
        yield (
            f"cluster.gpus_per_node * cluster.num_nodes is {cluster_world_size(config)}: teachers take {taken} of them"
            + ("" if config.policy.generation.colocated.enabled else f", generation {generation_world_size(config)}")
            + ", and none is left to train"
        )


@rule
def advantages_come_from_teachers(config: MasterConfig) -> Iterator[Problem]:
    opd, name = config.on_policy_distillation, config.grpo.adv_estimator.name
    if (name == "opd") != opd.enabled:
        yield (
            f"grpo.adv_estimator.name is {name} and {_OPD}.enabled {str(opd.enabled).lower()}; the estimator opd "
            "and its teachers need each other"
        )
    if not opd.enabled:
        return
    models, loss = opd.teacher_model_by_agent_name, config.loss_fn
    if not models:
        yield f"{_OPD}.teacher_model_by_agent_name is empty; name a model for each agent or data set"
    if opd.default_teacher_alias is not None and opd.default_teacher_alias not in models:
        yield (
            f"{_OPD}.default_teacher_alias is {opd.default_teacher_alias}, which teacher_model_by_agent_name does not "
            f"have; it has {', '.join(models) or 'nothing'}"
        )
    yield from _jobs_of_teachers(config)
    if loss.force_on_policy_ratio and config.grpo.seq_logprob_error_threshold is None:
        yield (
            "grpo.adv_estimator.name opd reads log-probabilities before the step, which loss_fn.force_on_policy_ratio "
            "skips; set it to false, or set grpo.seq_logprob_error_threshold"
        )
    if config.teacher is not None:
        yield f"teacher and {_OPD}.enabled exclude each other: the advantages come from the teachers already"
    several = opd.non_colocated_teachers
    for task in several.teacher_overrides:
        if task not in models:
            key = f"{_OPD}.non_colocated_teachers.teacher_overrides.{task}"
            yield f"{key}: teacher_model_by_agent_name has no such entry"
    for task in models:
        try:
            sizes = sizes_of(config, task)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            yield f"{_OPD}.non_colocated_teachers.teacher_overrides.{task}.{where}: {first['msg']}"
            continue
        trains_alike = opd.backend == "policy" and not config.policy.megatron_cfg.enabled
        if sizes.pipeline_model_parallel_size > 1 and several.enabled and trains_alike:
            yield not_built(
                f"{_OPD}.non_colocated_teachers.default_teacher_cfg.pipeline_model_parallel_size",
                sizes.pipeline_model_parallel_size,
                "pipeline stages with DTensor",
                "set it to 1, or train with policy.megatron_cfg",
            )


def _jobs_of_teachers(config: MasterConfig) -> Iterator[str]:
    """Settings that keep jobs of a pool from serving several teachers."""
    opd, key = config.on_policy_distillation, f"{_OPD}.job_by_agent_name"
    jobs, models = opd.job_by_agent_name, opd.teacher_model_by_agent_name
    if not jobs:
        return
    if opd.backend != "vllm" or opd.non_colocated_teachers.enabled:
        yield (
            f"{key}: a job of the pool serves engines on GPUs that it is lent; set {_OPD}.backend to vllm and "
            "non_colocated_teachers.enabled to false"
        )
    for task in jobs:
        if task not in models:
            yield f"{key}.{task}: teacher_model_by_agent_name has no such entry"
    if missing := [task for task in models if task not in jobs]:
        yield f"{key}: names no job for {', '.join(missing)}; name one for every teacher, or for none"
    for job in sorted(set(jobs.values())):
        served = sorted({models[task] for task, name in jobs.items() if name == job and task in models})
        if len(served) > 1:
            yield f"{key}: {job} would serve {' and '.join(served)}; a job serves one model, name a job for each"
