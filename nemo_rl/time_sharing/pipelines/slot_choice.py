"""How many slots the GPUs of a pool are divided into, where its jobs are known: one for each job that has work for a
GPU, as long as all fit.

Computed from configurations; measures nothing. A need is what the job takes at least, so a job may still meet its limit
(`keep_to_slot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.config import EvalMasterConfig, MasterConfig, RootConfig
from nemo_rl.config.multi_lora import load_base
from nemo_rl.config.teacher_sections import pooled_teacher, teachers_of
from nemo_rl.config.world_sizes import replica_sizes, training_backend, training_world_size, trains_adapters
from nemo_rl.time_sharing.pipelines.adapters import AdaptersConfig
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.residents import SlotBytes, SlotTooSmall, in_gib, slot_bytes
from nemo_rl.time_sharing.protocol.topology import Pool

if TYPE_CHECKING:
    from nemo_rl.config import PolicyConfig

STATE_BYTES = 16  # of a trained parameter: float32 weight, gradient and two moments
FROZEN_BYTES = 4  # of a parameter that is not trained
LAYER_BYTES = 34  # of a token in a layer, times the hidden size: what its backward pass reads
LOGITS_BYTES = 6 << 30  # of a chunk of logits, in several precisions
MOST_SLOTS = 4
"""Trainers take turns on a GPU; with more jobs they wait for each other longer than generation takes."""


class Choice(NamedTuple):
    """How many slots, and why not more."""

    slots: int
    why: str


class Needs(NamedTuple):
    """Device memory that a job takes at least on each of its GPUs, bytes, as estimated; 0 for what it does not do.
    `beside`: whether both are in its slot at once, without the training turn. `weights`: of an engine, which is no
    estimate.
    """

    job: str
    engines: int
    trainer: int
    beside: bool = False
    weights: int = 0

    def lacks(self, sizes: SlotBytes) -> str | None:
        """What does not fit; None where all does."""
        if self.beside:
            need, has = self.engines + self.trainer, sizes.engines
            if need <= has:
                return None
            return f"engine and trainer of {self.job} need about {in_gib(need)} and would have {in_gib(has)}"
        for part, need, has in (("engine", self.engines, sizes.engines), ("trainer", self.trainer, sizes.trainer)):
            if need > has:
                return f"the {part} of {self.job} needs about {in_gib(need)} and would have {in_gib(has)}"
        return None

    def divided(self, slot: int) -> tuple[int, int]:
        """What of a slot's bytes engines and trainer get when both are in it: what they need and half of the rest."""
        rest = (slot - self.engines - self.trainer) // 2
        return self.engines + rest, self.trainer + rest


def choose_slots(jobs: Sequence[Job], pool: Pool, device_bytes: int | None) -> Choice:
    """The slots of each GPU.

    Args:
        jobs: All jobs of the pool.
        device_bytes: Memory of the smallest GPU; None on CPU slots, whose memory is not divided.
    """
    sharing = [job for job in jobs if job.column is not None]
    may_use = [range(pool.gpus) if job.anywhere else (*job.infer, *job.train) for job in sharing]
    most = max(sum(gpu in gpus for gpus in may_use) for gpu in range(pool.gpus))
    wanted = min(most, MOST_SLOTS)
    if wanted <= 1:
        return Choice(1, "no GPU has work for several jobs")
    why = f"{most} jobs have work for the same GPU" + (f", and {MOST_SLOTS} slots are the most" * (most > MOST_SLOTS))
    if device_bytes is None:
        return Choice(wanted, why)
    needs = [needs_of(job) for job in sharing]
    for slots in range(wanted, 1, -1):
        try:
            sizes = slot_bytes(device_bytes, slots)
        except SlotTooSmall as error:
            why = str(error)
            continue
        lacking = next((lack for need in needs if sizes is not None and (lack := need.lacks(sizes))), None)
        if lacking is None:
            return Choice(slots, why)
        why = f"with {slots}, {lacking}"
    return Choice(1, why)


def needs_of(job: Job) -> Needs:
    """Computed from the job's configuration and that of its model."""
    config = job.config
    if isinstance(config, EvalMasterConfig):
        from nemo_rl.algorithms.evaluation import evaluated_policy

        return _with_engines(Needs(job.name, 0, 0), evaluated_policy(config))
    if isinstance(config, MasterConfig) and job.teaches:
        return _with_engines(Needs(job.name, 0, 0), pooled_teacher(config, job.name).policy)
    if isinstance(config, AdaptersConfig):
        return _needs_of_adapters(job.name, config)
    if not isinstance(config, RootConfig):
        return Needs(job.name, 0, 0)
    trainer = _trainer_bytes(config.policy, len(job.train))
    if not isinstance(config, MasterConfig):
        return Needs(job.name, 0, trainer)
    for teacher in teachers_of(config):
        if teacher.job is None:
            trainer += _parameters(teacher.policy) * 2 // len(job.train)
    return _with_engines(Needs(job.name, 0, trainer), config.policy)


def _needs_of_adapters(job: str, config: AdaptersConfig) -> Needs:
    """With all slots of the base filled: adapters come while the job runs."""
    from nemo_rl.models.generation.vllm.engine_actors import least_slot_bytes
    from nemo_rl.models.multi_lora import memory

    base, _ = load_base(config.base, config.overrides)
    trainer = _trainer_bytes(base.policy, training_world_size(base)) + memory.trainer_bytes(base)
    return Needs(job, least_slot_bytes(base.policy) + memory.engine_bytes(base), trainer, beside=True)


def _with_engines(needs: Needs, policy: PolicyConfig) -> Needs:
    from nemo_rl.models.generation.vllm.engine_actors import least_slot_bytes, weight_bytes

    vllm = policy.generation.vllm_cfg
    weights = weight_bytes(policy) // (vllm.tensor_parallel_size * vllm.pipeline_parallel_size)
    return needs._replace(engines=least_slot_bytes(policy), weights=weights)


def _trainer_bytes(policy: PolicyConfig, gpus: int) -> int:
    from nemo_rl.models.policy.model_config import model_config
    from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture

    parameters = _parameters(policy)
    state = (FROZEN_BYTES if trains_adapters(policy) else STATE_BYTES) * parameters // gpus
    try:
        shape = TransformerShape.from_hf_config(model_config(policy))
    except UnknownArchitecture:
        return state
    packing = policy.sequence_packing
    tokens = (
        packing.train_mb_tokens if packing.enabled else policy.train_micro_batch_size * policy.max_total_sequence_length
    )
    layers = 1 if training_backend(policy).activation_checkpointing else shape.layers
    sizes = replica_sizes(policy)
    activations = LAYER_BYTES * tokens * shape.hidden * layers // (sizes.cp * sizes.tp)
    return state + activations + LOGITS_BYTES


def _parameters(policy: PolicyConfig) -> int:
    from nemo_rl.models.generation.vllm.engine_actors import parameters_of

    return parameters_of(policy)
