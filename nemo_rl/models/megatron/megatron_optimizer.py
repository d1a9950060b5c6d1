"""Megatron's data parallelism, optimizer and schedule as the policy section configures them.

Gradients are always accumulated and reduced in float32, whatever `grad_reduce_in_fp32` says: a step adds up sums over
thousands of tokens, which half precision would lose. They are reduced once, when the step is finished, so there is
nothing to overlap. Invariant: no gradient is divided here; the step divides once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.config.megatron import MegatronOptimizerConfig, MegatronSchedulerConfig
from nemo_rl.models.megatron import cpu
from nemo_rl.models.megatron.model import BuiltModel
from nemo_rl.models.policy.model_config import compute_dtype
from nemo_rl.models.policy.optimizer import OptimizerConfigError

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def with_gradients(model: BuiltModel, cfg: PolicyConfig) -> list[DistributedDataParallel]:
    """The model's chunks in Megatron's data-parallel wrapper, which holds the gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        use_distributed_optimizer=cfg.megatron_cfg.optimizer.use_distributed_optimizer,
        average_in_collective=False,
    )
    wrapped = [
        DistributedDataParallel(config=model.config, ddp_config=ddp, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    cpu.install()
    return wrapped


def build_optimizer(chunks: list[DistributedDataParallel], cfg: PolicyConfig) -> MegatronOptimizer:
    """Megatron's optimizer over wrapped chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    cpu.install()
    keys: MegatronOptimizerConfig = cfg.megatron_cfg.optimizer
    dtype = compute_dtype(cfg.precision)
    config = OptimizerConfig(
        optimizer=keys.optimizer,
        lr=keys.lr,
        min_lr=keys.min_lr,
        weight_decay=keys.weight_decay,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        adam_beta1=keys.adam_beta1,
        adam_beta2=keys.adam_beta2,
        adam_eps=keys.adam_eps,
        sgd_momentum=keys.sgd_momentum,
        use_distributed_optimizer=keys.use_distributed_optimizer,
        optimizer_cpu_offload=keys.optimizer_cpu_offload,
        optimizer_offload_fraction=keys.optimizer_offload_fraction,
        # The step clips, with the norm that it measured and reported.
        clip_grad=0.0,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def build_schedule(
    optimizer: MegatronOptimizer, cfg: PolicyConfig, last_step: int | None = None
) -> OptimizerParamScheduler:
    """Megatron's schedule of learning rate and weight decay, in RL steps.

    Args:
        last_step: Step of the run at which a decay without `lr_decay_iters` ends.

    Raises OptimizerConfigError: rates decay, and neither says until when.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    keys: MegatronSchedulerConfig = cfg.megatron_cfg.scheduler
    rates = cfg.megatron_cfg.optimizer
    until = keys.lr_decay_iters or last_step
    if until is None and not (keys.lr_decay_style == keys.weight_decay_incr_style == "constant"):
        raise OptimizerConfigError(
            "policy.megatron_cfg.scheduler.lr_decay_iters: null means the run's steps, and this policy was built "
            "without a run; write a number of steps"
        )
    # Megatron wants a decay behind the warm-up even where no rate decays, and of runs that end within the warm-up.
    decay = max(until or 0, keys.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=keys.lr_warmup_init if keys.lr_warmup_iters else 0.0,
        max_lr=rates.lr,
        min_lr=rates.min_lr if keys.lr_decay_style != "constant" else 0.0,
        lr_warmup_steps=keys.lr_warmup_iters,
        lr_decay_steps=decay,
        lr_decay_style=keys.lr_decay_style,
        start_wd=keys.start_weight_decay,
        end_wd=keys.end_weight_decay,
        wd_incr_steps=decay,
        wd_incr_style=keys.weight_decay_incr_style,
        # A checkpoint says how far the run is; rates and lengths are the configuration's, which may have changed.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def inner_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The parts of a chained optimizer: dense parameters and experts have one each."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
