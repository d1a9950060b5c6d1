"""Rules of many adapters on one base: settings that adapters cannot share, and options that are not built for them."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.errors import Problem
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.rules import rule
from nemo_rl.config.world_sizes import generation_slots_per_node

_LORA = "policy.dtensor_cfg.lora_cfg"
_ALONE = "run it as a run of its own with examples/run_grpo.py"


@rule
def many_adapters_are_adapters(config: MultiLoraMasterConfig) -> Iterator[Problem]:
    policy, lora = config.policy, config.policy.dtensor_cfg.lora_cfg
    if policy.megatron_cfg.enabled:
        yield (
            "policy.megatron_cfg.enabled: many adapters are built for dtensor_cfg. A layer of Megatron-Core has one "
            "adapter, and its distributed optimizer steps all trained weights at once; set "
            "policy.dtensor_cfg.enabled=true, or train each adapter by megatron_cfg.peft as a run of its own "
            "(examples/run_grpo.py), which share GPUs on a pool"
        )
    if not lora.enabled:
        yield f"{_LORA}.enabled is false, and adapters are all that this run trains; set it to true"
    if lora.dropout:
        yield (
            f"{_LORA}.dropout is {lora.dropout:g}: an adapter's dropout would depend on what it shares its rows with, "
            "so that it would not train as it would alone; set it to 0"
        )


@rule
def many_adapters_share_plain_data_parallelism(config: MultiLoraMasterConfig) -> Iterator[Problem]:
    cfg = config.policy.dtensor_cfg
    for key, value, needed in (
        ("tensor_parallel_size", cfg.tensor_parallel_size, 1),
        ("context_parallel_size", cfg.context_parallel_size, 1),
        ("expert_parallel_size", cfg.expert_parallel_size, 1),
        ("cpu_offload", cfg.cpu_offload, False),
    ):
        if value != needed:
            yield (
                f"policy.dtensor_cfg.{key} is {value}: adapters lie whole on every rank beside a base that is sharded "
                f"by data parallelism alone; set it to {str(needed).lower()}"
            )
    if cfg.torch_compile:
        yield (
            "policy.dtensor_cfg.torch_compile is true: which tokens an adapter has changes from row to row, and every "
            "pattern would be compiled again; leave it out"
        )


@rule
def many_adapters_roll_out_in_turns(config: MultiLoraMasterConfig) -> Iterator[Problem]:
    grpo, policy = config.grpo, config.policy
    for key, on, instead in (
        ("grpo.async_grpo.enabled", grpo.async_grpo.enabled, "others generate while one trains; set it to false"),
        ("async_rl", config.async_rl is not None, "others generate while one trains; leave it out"),
        ("data_plane.enabled", config.data_plane.enabled, "set it to false"),
        ("teacher", config.teacher is not None, _ALONE),
        ("on_policy_distillation.enabled", config.on_policy_distillation.enabled, _ALONE),
        ("policy.router_replay.enabled", policy.router_replay.enabled, _ALONE),
        ("policy.sampling_mask_replay", policy.sampling_mask_replay, _ALONE),
        ("grpo.rollout_replay", grpo.rollout_replay is not None, _ALONE),
        (
            "policy.generation.vllm_cfg.expose_http_server",
            policy.generation.vllm_cfg.expose_http_server,
            "its requests would name no adapter, set it to false",
        ),
    ):
        if on:
            yield f"{key}: not built for many adapters; {instead}"
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if policy.train_global_batch_size != samples:
        yield (
            f"policy.train_global_batch_size is {policy.train_global_batch_size}, and a step of an adapter has "
            f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt = {samples} samples, which make one step of "
            "its optimizer; set it to that"
        )


@rule
def engines_and_training_have_slots(config: MultiLoraMasterConfig) -> Iterator[Problem]:
    vllm = config.policy.generation.vllm_cfg
    if vllm.engines_per_gpu > 1:
        yield "policy.generation.vllm_cfg.engines_per_gpu: not built for many adapters; set it to 1"
    width, slots = vllm.tensor_parallel_size * vllm.pipeline_parallel_size, generation_slots_per_node(config)
    if width > slots > 0:
        yield (
            f"policy.generation.vllm_cfg: an engine has {width} ranks, a node {slots} generating accelerators, and "
            "engines over several nodes are not built for many adapters, whose files are on one node; lower "
            "tensor_parallel_size or pipeline_parallel_size"
        )
