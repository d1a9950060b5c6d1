"""The teachers of a run, from whichever section: their backend, placement, and samples.

Knows keys, not models. Invariant: each sample has at most one teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nemo_rl.config.distillation import TeacherSizesConfig
from nemo_rl.config.generation import ColocatedResourcesConfig
from nemo_rl.config.master import MasterConfig
from nemo_rl.config.policy import PolicyConfig

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OPD = "on_policy_distillation"
MAX_LOGPROBS = "max_logprobs"


@dataclass(frozen=True)
class Teacher:
    """One frozen model.

    Attributes:
        name: For actors and messages.
        key: Dotted key that names its model.
        policy: How it computes; its temperature is that of the policy's samples.
        backend: `policy`, or `vllm` for engines.
        resources: Accelerators of its own, or None if it computes in turn with the policy.
        names: Agents or data sets that name it.
        job: The job of the pool that serves it, or None.
        tasks: Those whose samples alone it scores; None if it scores all that no other teacher has, too.
    """

    name: str
    key: str
    policy: PolicyConfig
    resources: ColocatedResourcesConfig | None = None
    names: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None
    backend: Literal["policy", "vllm"] = "policy"
    job: str | None = None

    @property
    def job_key(self) -> str:
        """Dotted key that names its job."""
        return f"{_OPD}.job_by_agent_name.{self.names[0]}" if self.names else "teacher.job"

    def asked(self, config: MasterConfig) -> tuple[int, int]:
        """A student's demands on it: the number of most likely tokens of each position, 0 where only sampled tokens are
        scored; and the length of the longest sample, in tokens.
        """
        longest = config.policy.max_total_sequence_length
        # An engine draws one token after those that it scores.
        return (0, longest + 1) if self.names else (config.grpo.topk_logits_k, longest)

    def slots(self, config: MasterConfig) -> int:
        """Its own accelerators; 0 if it has none or the keys do not say."""
        if self.resources is None:
            return 0
        if config.cluster.num_nodes == 1:
            return self.resources.gpus_per_node or 0
        return (self.resources.num_nodes or 0) * config.cluster.gpus_per_node


def teachers_of(config: MasterConfig) -> list[Teacher]:
    """Every teacher once."""
    found = list(_by_task(config)) if config.on_policy_distillation.enabled else []
    if config.teacher is not None and config.teacher.model_name:
        colocated = config.teacher.colocated
        policy, own = _scoring(config.teacher.model_copy(deep=True), config), None
        if not colocated.enabled:
            own = colocated.resources
        backend, job = config.teacher.backend, config.teacher.job
        if backend == "vllm":
            _serving(policy, config.grpo.topk_logits_k)
        found.append(Teacher("teacher", "teacher.model_name", policy, own, backend=backend, job=job))
    return found


def pooled_teacher(config: MasterConfig, job: str) -> Teacher:
    """The teacher of a configuration that a job of a pool serves: its section `teacher`, or of several the one that
    names the job. Raises ValueError: it has none in engines.
    """
    for teacher in teachers_of(config):
        if teacher.backend == "vllm" and teacher.resources is None and (not teacher.names or teacher.job == job):
            return teacher
    raise ValueError(f"the configuration has no teacher in engines that are lent to the job {job!r}")


def _by_task(config: MasterConfig) -> Iterator[Teacher]:
    opd = config.on_policy_distillation
    tasks: dict[str, list[str]] = {}
    for task, model in opd.teacher_model_by_agent_name.items():
        # Entries with other sizes are other teachers, whatever their model.
        own = opd.non_colocated_teachers.teacher_overrides.get(task)
        alone = own is not None or not opd.deduplicate_shared_teacher_checkpoints
        served = opd.job_by_agent_name.get(task, "")
        tasks.setdefault(f"{model}\0{served}\0{task if alone else ''}", []).append(task)
    for number, named in enumerate(tasks.values()):
        sizes = sizes_of(config, named[0])
        own = opd.non_colocated_teachers.enabled
        policy = _as_policy(config, opd.teacher_model_by_agent_name[named[0]], sizes if own else TeacherSizesConfig())
        if opd.backend == "vllm":
            _serving(policy, 1)
            vllm = policy.generation.vllm_cfg
            # An engine draws one token after those that it scores.
            vllm.max_model_len = max(vllm.max_model_len, policy.max_total_sequence_length + 1)
            if own:
                vllm.tensor_parallel_size = sizes.tensor_model_parallel_size
                vllm.pipeline_parallel_size = sizes.pipeline_model_parallel_size
                vllm.precision = policy.precision
        yield Teacher(
            f"teacher-{number}",
            f"{_OPD}.teacher_model_by_agent_name.{named[0]}",
            policy,
            ColocatedResourcesConfig(gpus_per_node=sizes.gpus_per_node, num_nodes=sizes.num_nodes or None)
            if own
            else None,
            tuple(named),
            None if opd.default_teacher_alias in named else tuple(named),
            opd.backend,
            opd.job_by_agent_name.get(named[0]),
        )


def sizes_of(config: MasterConfig, task: str) -> TeacherSizesConfig:
    """How the teacher of an agent or data set computes. Raises pydantic.ValidationError: an override is wrong."""
    several = config.on_policy_distillation.non_colocated_teachers
    given = several.default_teacher_cfg.to_dict() | several.teacher_overrides.get(task, {})
    return TeacherSizesConfig.model_validate(given)


def _as_policy(config: MasterConfig, model: str, sizes: TeacherSizesConfig) -> PolicyConfig:
    policy = config.policy.model_copy(deep=True)
    policy.model_name = model
    policy.tokenizer.name = model
    policy.hf_config_overrides = {}
    if sizes.precision is not None:
        policy.precision = _SHORT.get(sizes.precision, sizes.precision)  # pyrefly: ignore[bad-assignment]
    policy.logprob_batch_size = sizes.micro_batch_size
    if config.on_policy_distillation.non_colocated_teachers.enabled:
        if policy.megatron_cfg.enabled:
            policy.megatron_cfg.tensor_model_parallel_size = sizes.tensor_model_parallel_size
            policy.megatron_cfg.pipeline_model_parallel_size = sizes.pipeline_model_parallel_size
            policy.megatron_cfg.context_parallel_size = sizes.context_parallel_size
            policy.megatron_cfg.expert_model_parallel_size = sizes.expert_model_parallel_size
        else:
            policy.dtensor_cfg.tensor_parallel_size = sizes.tensor_model_parallel_size
            policy.dtensor_cfg.context_parallel_size = sizes.context_parallel_size
            policy.dtensor_cfg.expert_parallel_size = sizes.expert_model_parallel_size
    return _scoring(policy, config)


def _scoring(policy: PolicyConfig, config: MasterConfig) -> PolicyConfig:
    """Changes a policy section to that of a model that only scores the policy's samples."""
    policy.optimizer, policy.scheduler = None, None
    policy.dtensor_cfg.lora_cfg.enabled = policy.megatron_cfg.peft.enabled = False
    # What generation recorded are decisions of the policy.
    policy.router_replay.enabled, policy.sampling_mask_replay = False, False
    policy.generation.temperature = config.policy.generation.temperature
    policy.generation.top_p, policy.generation.top_k = 1.0, None
    return policy


def _serving(policy: PolicyConfig, k: int) -> None:
    """Changes a policy section to that of engines that only score prompts, `k` tokens of each position."""
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    generation.vllm_kwargs = {MAX_LOGPROBS: k, **generation.vllm_kwargs}
    # Prompts have no stop strings, and nothing reads statistics.
    vllm.enable_vllm_metrics_logger, generation.stop_strings, generation.bad_words = False, None, None
