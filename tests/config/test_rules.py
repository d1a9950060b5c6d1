"""Every refusal of a configuration: its key, its reason, and that the same run without the mistake is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.grpo.step_reports import batch_metrics, validation_metrics
from nemo_rl.config import (
    CheckpointingConfig,
    ConfigError,
    DistillationMasterConfig,
    MasterConfig,
    SFTMasterConfig,
    check_config,
    load_master_config,
)
from nemo_rl.config.data_rules import GRPO_TRAINING, GRPO_VALIDATION, SFT_TRAINING
from nemo_rl.config.load import load_layers
from nemo_rl.config.metric_names import MetricName
from nemo_rl.config.teacher_sections import teachers_of
from nemo_rl.config.validate import examine
from nemo_rl.utils.checkpoint_retention import ranking_metric

EXAMPLE = Path(__file__).parents[2] / "examples/configs/grpo_math_1B.yaml"


def problems(*overrides: str, kind: type[MasterConfig | SFTMasterConfig] = MasterConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_master_config(None, list(overrides), kind)
    return caught.value.problems


def test_the_defaults_and_the_exemplar_are_accepted_and_equal() -> None:
    assert load_master_config(EXAMPLE) == load_master_config(None)


NOT_BUILT = [
    "policy.generation.backend=sglang",
    "policy.draft.enabled=true",
    "policy.generation.vllm_cfg.kv_cache_dtype=fp8",
    "policy.quant_cfg=FP8",
    "policy.is_vlm=true",
    "policy.reward_model_cfg.enabled=true",
    "policy.dtensor_cfg.automodel_kwargs.backend.attn=te",
    "policy.dtensor_cfg.automodel_kwargs.backend.linear=te",
    "policy.dtensor_cfg.automodel_kwargs.backend.rms_norm=te",
    "policy.dtensor_cfg.automodel_kwargs.backend.rope_fusion=true",
    "policy.dtensor_cfg.automodel_kwargs.backend.experts=te",
    "policy.dtensor_cfg.automodel_kwargs.backend.fake_balanced_gate=true",
    "policy.dtensor_cfg.moe_parallelizer.wrap_outer_model=false",
    "policy.generation.refit_transport=nixl",
    "data_plane.controller_address=10.0.0.1:5000",
    "async_rl.diagnostics=true",
    "reward_penalties.penalize_empty_final_answer=true",
]


@pytest.mark.slow
@pytest.mark.parametrize("override", NOT_BUILT)
def test_what_is_not_built_yet_is_refused_by_its_dotted_name(override: str) -> None:
    key = override.partition("=")[0]
    # What a section asks for counts where it is enabled.
    assert any(
        line.startswith(f"{key}:") and "not built yet" in line for line in problems("data_plane.enabled=true", override)
    )


def test_a_start_that_is_not_built_is_refused_whether_or_not_checkpoints_are_written() -> None:
    start = "checkpointing.pretrained_checkpoint={path: x}"
    for enabled in ("true", "false"):
        (line,) = problems(f"checkpointing.enabled={enabled}", start)
        assert "'checkpointing.pretrained_checkpoint" in f"'{line}" and "Megatron checkpoints as a start" in line


NEMO_GYM = [
    "policy.generation.vllm_cfg.expose_http_server=true",
    "env.should_use_nemo_gym=true",
    "env.should_log_nemo_gym_responses=true",
    "env.nemo_gym={config_paths: [a.yaml], num_gpu_nodes: 0, thinking_tags: [<think>], use_absolute_ip: true, "
    "code_gen: {resources_servers: {code_gen: {num_processes: 8}}}}",
    *(
        f"data.{split}={{dataset_name: NemoGymDataset, processor: nemo_gym_data_processor, env_name: nemo_gym, "
        "prompt_file: null, data_path: rows.jsonl}"
        for split in ("train", "validation")
    ),
    "checkpointing.metric_name=val:total_reward/mean",
]
ACCEPTED = [
    NEMO_GYM,
    ["policy.router_replay.enabled=true", "policy.sampling_mask_replay=true", "policy.generation.top_p=0.8"],
    [
        "grpo.num_generations_per_prompt=1",
        "policy.train_global_batch_size=32",
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.adv_estimator.minus_baseline=false",
    ],
    ["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs={lr: 5}"],
    # Three components, each at most 1; and rewards of a user's, of any size.
    [
        "grpo.stop_at_validation_metric=accuracy",
        "grpo.stop_at_validation_threshold=2.5",
        "data.default.env_name=math_multi_reward",
    ],
    ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=95", "env.math.function=a.b"],
    ["data.default.env_name=mine", "+env.mine.function=a.b", "+env.mine.partial=0.5"],
    ["policy.generation.val_temperature=0"],
    ["data_plane.enabled=true"],
    ["data_plane.controller_address=10.0.0.1:5000"],
    ["data_plane.enabled=true", "data_plane.backend=mooncake_cpu", "data_plane.global_segment_size=null"],
    ["policy.generation.vllm_cfg.async_engine=false"],
    ["policy.generation.vllm_cfg.logprobs_mode=raw_logprobs"],
    ["policy.generation.vllm_cfg.enable_expert_parallel=true"],
    ["policy.generation.vllm_cfg.distributed_executor_backend=mp"],
    ["policy.generation.vllm_cfg.distributed_executor_backend=ray"],
    ["policy.generation.vllm_cfg.tensor_parallel_size=16", "cluster.gpus_per_node=8", "cluster.num_nodes=4"],
    ["policy.generation.vllm_cfg.pipeline_parallel_size=2", "cluster.num_nodes=2"],
    [
        "policy.generation.vllm_cfg={precision: fp8, num_first_layers_in_bf16: 1, use_deep_gemm: true}",
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws=[q_proj, k_proj, v_proj]",
        "loss_fn.use_importance_sampling_correction=true",
    ],
    ["policy.generation.vllm_cfg.engines_per_gpu=4", "cluster.gpus_per_node=2", "cluster.num_nodes=2"],
    ["policy.generation.vllm_cfg.engines_per_gpu=2", "weight_sync.transport=nccl"],
    [
        "policy.generation.vllm_cfg.engines_per_gpu=2",
        "cluster.gpus_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
    ],
    ["policy.generation.vllm_cfg.env_vars=null", "policy.generation.vllm_cfg.http_server_serving_chat_kwargs=null"],
    ["policy.dtensor_cfg.lora_cfg={enabled: true, dim: 128, alpha: 512, exclude_modules: ['*out_proj*']}"],
    ["data.custom_dataloader=a.b", "data.num_prompts_per_dataloader=16"],
    ["grpo.max_val_samples=8"],
    ["grpo.max_val_samples=null", "grpo.val_batch_size=null"],
    ["policy.dtensor_cfg.automodel_kwargs.freeze_config={freeze_vision_tower: true, freeze_audio_tower: true}"],
    ["policy.dtensor_cfg.automodel_kwargs.backend={experts: torch_mm, rms_norm: torch_fp32}"],
    ["env.nemo_gym={config_paths: [a.yaml]}", "env.reward_model={model_name: x}", "+env.geometry3k.num_workers=8"],
    ["data.default.env_name=dapo", "env.dapo.num_workers=4"],
    ["policy.generation.vllm_cfg.async_engine=true"],
    ["policy.dtensor_cfg._v2=false"],
    ["policy.dtensor_cfg.automodel_kwargs.force_hf=true"],
    ["policy.dtensor_cfg.automodel_kwargs.use_liger_kernel=true"],
    [
        "policy.dtensor_cfg.automodel_kwargs.backend={_target_: some.Class, attn: sdpa, linear: torch, "
        "rms_norm: torch, enable_deepep: false}"
    ],
    ["policy.dtensor_cfg.automodel_kwargs.backend.attn=flash_attention_2"],
    ["policy.dtensor_cfg.automodel_kwargs.backend.attn=flex"],
    [
        "policy.dtensor_cfg.moe_parallelizer={reshard_after_forward: false, ignore_router_for_ac: true, "
        "lm_head_precision: float32, wrap_outer_model: true}"
    ],
    ["policy.dtensor_cfg.expert_parallel_size=2", "cluster.gpus_per_node=4", "policy.dtensor_cfg.dp_replicate_size=2"],
    [
        "policy.dtensor_cfg.expert_parallel_size=4",
        "cluster.gpus_per_node=8",
        "policy.dtensor_cfg.tensor_parallel_size=2",
    ],
    ["policy.megatron_cfg.optimizer.lr=1e-5"],
    ["policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true"],
    [
        "cluster.gpus_per_node=8",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=4",
    ],
    [
        "grpo.use_dynamic_sampling=true",
        "grpo.batch_multiplier=1.5",
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_scaling.enabled=true",
    ],
    ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
    ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=1.0", "loss_fn.ratio_clip_max=5.0"],
    ["grpo.val_period=0", "data.train={dataset_name: gsm8k}"],
    ["data.train={dataset_name: my.module.Rows, colour: red}", "data.validation={dataset_name: gsm8k}"],
    [
        "+env.mine.class=my.module.Env",
        "+env.mine.bonus=2",
        "data.train={dataset_name: gsm8k, env_name: mine, split_validation_size: 8}",
    ],
]


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_what_can_be_honoured_is_accepted(overrides: list[str]) -> None:
    load_master_config(None, overrides)


BROKEN = [
    (["policy.sampling_mask_replay=true"], "policy.generation.top_p is 1 and top_k null"),
    (
        ["policy.sampling_mask_replay=true", "policy.generation.top_k=8", "policy.generation.bad_words=[x]"],
        "sampling masks with policy.generation.bad_words",
    ),
    (
        [
            "policy.router_replay.enabled=true",
            "policy.generation.vllm_cfg.pipeline_parallel_size=2",
            "cluster.gpus_per_node=2",
        ],
        "replay with engines of several pipeline stages",
    ),
    (
        ["policy.router_replay.enabled=true", "+policy.generation.vllm_kwargs.speculative_config={model: ngram}"],
        "replay with speculative decoding",
    ),
    (
        [
            "policy.router_replay.enabled=true",
            "policy.dtensor_cfg.torch_compile=true",
            "policy.dtensor_cfg.activation_checkpointing=true",
        ],
        "compiled layers that are recomputed with policy.router_replay",
    ),
    (["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"], "every advantage would be 0"),
    (
        [
            "grpo.num_generations_per_prompt=1",
            "policy.train_global_batch_size=32",
            "grpo.adv_estimator.name=reinforce_plus_plus",
        ],
        "reinforce_plus_plus with minus_baseline: true compares the samples",
    ),
    (["policy.generation.max_new_tokens=600"], "is 600, above policy.generation.vllm_cfg.max_model_len 512"),
    (["policy.generation.vllm_cfg.max_model_len=256"], "is 512, above policy.generation.vllm_cfg.max_model_len 256"),
    (["policy.optimizer.kwargs.lr=100"], "policy.optimizer.kwargs.lr: 100 would move every weight"),
    (["policy.optimizer.kwargs.lr=-1e-6"], "policy.optimizer.kwargs.lr: -1e-06 is no learning rate"),
    (["policy.optimizer.kwargs.lr=.nan"], "policy.optimizer.kwargs.lr: nan is no learning rate"),
    (
        ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.optimizer.lr=20"],
        "policy.megatron_cfg.optimizer.lr: 20 would move every weight by about that much in each step of adam",
    ),
    (
        [
            *(STOP := ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.9"]),
            "grpo.max_num_steps=5",
        ],
        "the first validation would be after step 10",
    ),
    ([*STOP, "grpo.val_start_at=101", "grpo.max_num_steps=105"], "the first validation would be after step 110"),
    ([*STOP, "grpo.stop_at_validation_threshold=95"], "95 can never be reached: accuracy is at most 1"),
    (
        [
            "grpo.stop_at_validation_metric=pass_k",
            "grpo.stop_at_validation_threshold=1.5",
            "grpo.val_num_generations_per_prompt=2",
        ],
        "1.5 can never be reached: pass_k is at most 1",
    ),
    (
        ["policy.generation.val_temperature=0", "grpo.val_num_generations_per_prompt=4"],
        "is 4, but policy.generation.val_temperature is 0",
    ),
    (
        ["policy.generation.val_top_k=1", "grpo.val_num_generations_per_prompt=2"],
        "is 2, but policy.generation.val_top_k is 1",
    ),
    (["policy.generation.top_k=1"], "policy.generation.top_k is 1: every sample of a group"),
    (["grpo.seq_logprob_error_threshold=0.5"], "is at least 1: every sample would be masked"),
    (
        ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_max=0"],
        "both 0: every reward would be the same",
    ),
    (
        ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=0"],
        "length 0 is empty; it lies",
    ),
    (["env.math.function=a.b", "env.math.class=a.C"], "env.math.class and env.math.function exclude each other"),
    (["policy.dtensor_cfg.enabled=false"], "both false; enable exactly one"),
    (["policy.optimizer=null"], "policy.optimizer: null"),
    (["policy.generation.stop_strings=['</a>','']"], "policy.generation.stop_strings.1: "),
    (["policy.generation.bad_words=['']"], "policy.generation.bad_words.0: "),
    (["env.math.stop_strings=['']"], "env.math.stop_strings.0: "),
    (["policy.dynamic_batching.enabled=true"], "sequence_packing.enabled and policy.dynamic_batching.enabled exclude"),
    (
        ["policy.dtensor_cfg.tensor_parallel_size=3", "cluster.gpus_per_node=8"],
        "is 3, which does not divide the 8 accelerators that train",
    ),
    (
        ["policy.dtensor_cfg.dp_replicate_size=3", "cluster.gpus_per_node=8"],
        "dp_replicate_size is 3, which does not divide the data-parallel size 8",
    ),
    (
        ["policy.dtensor_cfg.expert_parallel_size=3", "cluster.gpus_per_node=8"],
        "expert_parallel_size is 3, which does not divide the 8 ranks",
    ),
    (["policy.dtensor_cfg.expert_parallel_size=8", "cluster.gpus_per_node=4"], "possible: 1, 2, 4"),
    (
        [
            "policy.dtensor_cfg.expert_parallel_size=4",
            "cluster.gpus_per_node=8",
            "policy.dtensor_cfg.dp_replicate_size=4",
        ],
        "which does not divide the 2 ranks that share one copy of the parameters (data-parallel ranks / "
        "dp_replicate_size * context_parallel_size)",
    ),
    (
        [
            "policy.dtensor_cfg.expert_parallel_size=2",
            "cluster.gpus_per_node=2",
            "policy.dtensor_cfg.torch_compile=true",
        ],
        "torch_compile is true: tokens travel",
    ),
    (
        ["policy.dtensor_cfg.automodel_kwargs.backend.attn=flash_attention_2", "policy.precision=float32"],
        "flash_attention_2, which has no float32",
    ),
    (
        ["policy.dtensor_cfg.automodel_kwargs.backend.attn=flex", "cluster.device=cpu"],
        "backend.attn is flex, which needs a GPU",
    ),
    (
        ["policy.dtensor_cfg.automodel_kwargs.use_liger_kernel=true", "cluster.device=cpu"],
        "use_liger_kernel is true, but Liger's kernels run on GPUs only",
    ),
    (
        ["policy.dtensor_cfg.moe_parallelizer={colour: red}"],
        "moe_parallelizer.colour: unknown key. Valid here: reshard_after_forward, ignore_router_for_ac",
    ),
    (
        ["policy.dtensor_cfg.automodel_kwargs.backend={colour: red}"],
        "automodel_kwargs.backend.colour: unknown key. Valid here: _target_, attn, linear",
    ),
    (
        ["policy.dtensor_cfg.automodel_kwargs.backend.attn=fancy"],
        "automodel_kwargs.backend.attn: 'fancy' is not one of",
    ),
    (
        ["policy.generation.vllm_cfg.tensor_parallel_size=3", "cluster.gpus_per_node=8"],
        "is 3, which neither divides the 8 generating accelerators of a node nor is all accelerators of some of the 1 ",
    ),
    (
        [
            "policy.generation.vllm_cfg.expert_parallel_size=3",
            "policy.generation.vllm_cfg.tensor_parallel_size=2",
            "cluster.gpus_per_node=2",
        ],
        "not a multiple of",
    ),
    (
        ["policy.dtensor_cfg.tensor_parallel_size=4", "cluster.gpus_per_node=4", "policy.logprob_batch_size=8"],
        "with tensor parallelism 4 they must be equal",
    ),
    (["cluster.master_port_range_low=2000"], "cluster.master_port_range_low is 2000, above"),
    (["cluster.device=cpu", "cluster.gpus_per_node=4"], "cluster.cpu_slots offers 2"),
    (["policy.generation.colocated.enabled=false"], "colocated.resources.gpus_per_node is null; without colocation"),
    (
        ["policy.generation.colocated.enabled=false", "cluster.num_nodes=2"],
        "colocated.resources.num_nodes is null; without colocation",
    ),
    (
        ["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"],
        "loss_fn.use_cispo and loss_fn.ratio_clip_c exclude each other",
    ),
    (
        ["loss_fn.use_cispo=true", "loss_fn.token_level_loss=false"],
        "loss_fn.use_cispo needs loss_fn.token_level_loss: true",
    ),
    (["loss_fn.sequence_level_importance_ratios=true"], "needs loss_fn.token_level_loss: false"),
    (["loss_fn.truncated_importance_sampling_ratio=2"], "nothing would be truncated"),
    (
        ["loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=2"],
        "needs loss_fn.use_importance_sampling_correction",
    ),
    (
        [
            "loss_fn.truncated_importance_sampling_type=icepop",
            "loss_fn.truncated_importance_sampling_ratio=2",
            "loss_fn.use_importance_sampling_correction=true",
        ],
        "needs loss_fn.truncated_importance_sampling_ratio_min",
    ),
    (["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"], "one optimizer step per RL step"),
    (
        ["grpo.skip_reference_policy_logprobs_calculation=true"],
        "needs loss_fn.reference_policy_kl_penalty: 0, not 0.01",
    ),
    (["loss_fn.use_kl_in_reward=true"], "needs grpo.adv_estimator.name: reinforce_plus_plus"),
    (
        [
            "loss_fn.use_kl_in_reward=true",
            "loss_fn.force_on_policy_ratio=true",
            "grpo.adv_estimator.name=reinforce_plus_plus",
        ],
        "previous log-probabilities",
    ),
    (
        [
            "policy.generation.vllm_cfg.precision=fp8",
            "loss_fn.use_importance_sampling_correction=true",
            "cluster.device=cpu",
        ],
        "policy.generation.vllm_cfg.precision: fp8: engines quantise to fp8 on GPUs alone, and cluster.device is cpu",
    ),
    (
        [
            "policy.generation.vllm_cfg={precision: fp8, is_mx: true, use_deep_gemm: true}",
            "loss_fn.use_importance_sampling_correction=true",
        ],
        "use_deep_gemm: DeepGEMM's kernels multiply blocks of 128 x 128, and is_mx is true",
    ),
    (
        ["policy.generation.vllm_cfg.num_first_layers_in_bf16=2"],
        "num_first_layers_in_bf16 is for policy.generation.vllm_cfg.precision fp8",
    ),
    (
        [
            "policy.generation.vllm_cfg={precision: fp8, quantization_ignored_layer_kws: [q_proj]}",
            "loss_fn.use_importance_sampling_correction=true",
        ],
        "engines keep q_proj, k_proj, v_proj in one layer",
    ),
    (["policy.generation.vllm_cfg.precision=fp8"], "precision: fp8 needs loss_fn.use_importance_sampling_correction"),
    (["grpo.adv_estimator.name=opd"], "the estimator opd and its teachers need each other"),
    (["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"], "grpo.advantage_clip_low 1.0 is above"),
    (["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=1"], "is not below source_max"),
    (["policy.train_global_batch_size=500"], "does not divide the 512 samples of a step"),
    (
        ["policy.train_global_batch_size=512", "cluster.gpus_per_node=3"],
        "which the 3 data-parallel ranks do not divide",
    ),
    (
        ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=3"],
        "policy.train_micro_batch_size is 3, which does not divide the 512 samples of a rank",
    ),
    (["policy.sequence_packing.enabled=false", "policy.logprob_batch_size=3"], "policy.logprob_batch_size is 3"),
    (
        ["policy.sequence_packing.enabled=false", "policy.sequence_packing.share_prompts=true"],
        "rows that share prompts are packed",
    ),
    (
        [
            "cluster.gpus_per_node=2",
            "policy.dtensor_cfg.context_parallel_size=2",
            "policy.sequence_packing.share_prompts=true",
        ],
        "shared prompts with context parallelism",
    ),
    (["grpo.batch_multiplier=2"], "needs grpo.use_dynamic_sampling: true"),
    (
        ["grpo.stop_at_validation_metric=pass_k", "grpo.stop_at_validation_threshold=1"],
        "needs grpo.val_num_generations_per_prompt above 1",
    ),
    (
        ["grpo.stop_at_validation_metric=mean_accuracy", "grpo.stop_at_validation_threshold=1"],
        "mean_accuracy needs grpo.use_best_at_k",
    ),
    (["grpo.stop_at_validation_metric=accuracy"], "set both or neither"),
    (["data.train={dataset_name: gsm8k}"], "data.validation is null"),
    (["data.train=[]", "grpo.val_period=0"], "data.train: an empty list"),
    (["data.use_multiple_dataloader=true"], "needs data.num_prompts_per_dataloader"),
    (
        ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=6"],
        "data.num_prompts_per_dataloader 6 does not divide grpo.num_prompts_per_step 32",
    ),
    (
        [
            "data.use_multiple_dataloader=true",
            "data.num_prompts_per_dataloader=32",
            "grpo.use_dynamic_sampling=true",
            "grpo.batch_multiplier=1.5",
        ],
        "does not divide grpo.num_prompts_per_step 32 * grpo.batch_multiplier 1.5",
    ),
    (["data.default.env_name=mth"], "there is no environment 'mth'. Did you mean 'math'?"),
    (["+env.mth.num_workers=2"], "env.mth: unknown environment, and nothing uses it. Did you mean 'math'?"),
    (["grpo.rollout_record=x", "grpo.rollout_replay=x"], "same directory"),
    (["policy.draft.enabled=true"], "policy.draft.enabled needs policy.megatron_cfg.enabled"),
    (
        ["policy.generation.vllm_cfg.tensor_parallel_size=16", "cluster.gpus_per_node=8", "cluster.num_nodes=3"],
        "is 16, which neither divides the 8 generating accelerators of a node nor is all accelerators of some of the 3",
    ),
    (
        [
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            "policy.dtensor_cfg.tensor_parallel_size=2",
            "cluster.gpus_per_node=2",
        ],
        "not built yet: LoRA with tensor parallelism; set policy.dtensor_cfg.tensor_parallel_size to 1",
    ),
    (
        [
            "policy.generation.vllm_cfg.engines_per_gpu=2",
            "policy.generation.vllm_cfg.pipeline_parallel_size=2",
            "cluster.gpus_per_node=2",
        ],
        "engines_per_gpu is 2, and tensor_parallel_size * pipeline_parallel_size is 2: only engines of one rank",
    ),
    (
        ["policy.generation.vllm_cfg.engines_per_gpu=2", "policy.generation.vllm_cfg.enable_expert_parallel=true"],
        "engines_per_gpu is 2, and the ranks of an engine share experts",
    ),
    (
        [
            "policy.generation.vllm_cfg.engines_per_gpu=2",
            "cluster.gpus_per_node=2",
            "policy.generation.colocated.enabled=false",
            "policy.generation.colocated.resources.gpus_per_node=1",
            "weight_sync.transport=nccl",
        ],
        "weight_sync.transport is nccl: policy.generation.vllm_cfg.engines_per_gpu is 2, and NCCL cannot put two ranks",
    ),
    (
        [
            "policy.generation.vllm_cfg.engines_per_gpu=2",
            "cluster.num_nodes=2",
            "policy.generation.colocated.enabled=false",
            "policy.generation.colocated.resources.num_nodes=1",
        ],
        "colocated.enabled is false and cluster.num_nodes 2, so that weights travel between nodes by NCCL",
    ),
    (["policy.generation.vllm_cfg.engines_per_gpu=0"], "engines_per_gpu: 0: input should be greater than 0"),
    (["policy.generation.vllm_cfg.expert_parallel_size=2"], "not built yet: experts shared among several engines"),
    (
        ["policy.generation.vllm_cfg.distributed_executor_backend=external_launcher"],
        "'external_launcher' is not built yet: engines whose ranks",
    ),
    (["policy.generation.temperature=0"], "nothing to learn from; sample with a temperature above 0"),
    (
        ["policy.generation.vllm_cfg.logprobs_mode=raw_logprobs", "policy.generation.temperature=0.8"],
        "samples with temperature 0.8 and training scores what was sampled; set it to processed_logprobs",
    ),
    (
        ["policy.generation.vllm_cfg.logprobs_mode=raw_logprobs", "policy.generation.top_k=5"],
        "samples with top_k 5",
    ),
    (
        ["policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD"],
        "not built yet: optimizers of Transformer Engine but FusedAdam; take torch.optim.AdamW",
    ),
    (
        ["+policy.optimizer.kwargs.exp_avg_dtype=torch.float16"],
        "exp_avg_dtype: 'torch.float16' is neither torch.float32 nor torch.bfloat16",
    ),
    (
        ["data.default.processor=vlm_hf_data_processor"],
        "data.train.processor: 'vlm_hf_data_processor' is not built yet",
    ),
    (["+data.default.video_target_num_patches=4"], "data.default.video_target_num_patches: 4 is not built yet"),
    (["+grpo.zero_variance_prompt_filtering=true"], "set grpo.use_dynamic_sampling: true"),
    (["+policy.generation.vllm_cfg.http_refit_server_port=5000"], "refit over HTTP; weight_sync.transport chooses"),
    (["policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_language_model=true"], "is not built yet: vision-lang"),
    *(
        ([*NEMO_GYM, *overrides], message)
        for overrides, message in (
            (["data.validation.env_name=math"], "data.validation.env_name: 'math', but env.should_use_nemo_gym: true"),
            (["data.validation.dataset_name=gsm8k"], "data.validation.dataset_name: 'gsm8k' has no rows of NeMo-Gym"),
            (["env.should_use_nemo_gym=false"], "data.train.env_name: 'nemo_gym' plays with env.should_use_nemo_gym"),
            (["env.nemo_gym.agent=null"], "env.nemo_gym.agent: null, and nothing plays the rows"),
            (["env.nemo_gym.config_paths=[]"], "env.should_use_nemo_gym: true needs env.nemo_gym.config_paths"),
            (["policy.generation.vllm_cfg.expose_http_server=false"], "set policy.generation.vllm_cfg.expose_http_"),
            (["env.nemo_gym.num_gpu_nodes=1"], "env.nemo_gym.num_gpu_nodes: 1 is not built yet: nodes of GPUs"),
            (["env.nemo_gym.is_trajectory_collection=true"], "env.nemo_gym.is_trajectory_collection: true is not"),
            (["env.nemo_gym.pad_dynamic_image_shapes=true"], "env.nemo_gym.pad_dynamic_image_shapes: true is not"),
        )
    ),
    (
        ["checkpointing.metric_name=train:rewards"],
        "checkpointing.metric_name: train:rewards: training measures no 'rewards'. Did you mean 'reward'?",
    ),
    (
        ["checkpointing.metric_name=val:val_loss"],
        "validation measures no 'val_loss'; it measures val:accuracy, val:avg_length, val:pass_k",
    ),
    (
        ["grpo.stop_at_validation_metric=acc", "grpo.stop_at_validation_threshold=1"],
        "grpo.stop_at_validation_metric: acc: validation measures no 'acc'",
    ),
    *(
        ([f"grpo.stop_at_validation_metric={name}", "grpo.stop_at_validation_threshold=1"], message)
        for name, message in (
            ("val:pass_k", "pass_k needs grpo.val_num_generations_per_prompt above 1"),
            ("validation/pass_k", "pass_k needs grpo.val_num_generations_per_prompt above 1"),
            ("val:mean_accuracy", "mean_accuracy needs grpo.use_best_at_k"),
            ("val:acuracy", "Did you mean 'accuracy'?"),
            ("train:reward", "a metric of training"),
            ("math/acuracy", "Did you mean 'math/accuracy'?"),
            ("reward/format", "validation measures no 'reward/format'"),
            ("judge/right", "validation measures no 'judge/right'"),
        )
    ),
    (["checkpointing.metric_name=val:pass_k"], "pass_k needs grpo.val_num_generations_per_prompt above 1"),
    (["checkpointing.metric_name=val:mean_accuracy"], "mean_accuracy needs grpo.use_best_at_k"),
    (
        [
            "data.validation=[{dataset_name: AIME2024}, {dataset_name: AIME2025}]",
            "data.train={dataset_name: gsm8k}",
            "checkpointing.metric_name=val:accuracy/AIME2026",
        ],
        "Did you mean 'accuracy/AIME2025'?",
    ),
    (
        ["grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=1", "grpo.val_period=0"],
        "nothing is validated before the run's end",
    ),
    (["policy.generation=null"], "policy.generation: null, but GRPO generates"),
]


MEGATRON = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "cluster.device=cuda"]
PASSED_THROUGH = [
    *(
        ([*MEGATRON, f"+policy.megatron_cfg.model_overrides.{override}"], message)
        for override, message in (
            ("moe_router_load_balancing_type=global_aux_loss", "not built yet: auxiliary losses"),
            ("moe_router_load_balancing_type=aux_loss", "moe_router_load_balancing_type; set it there"),
            ("moe_aux_loss_coeff=0.001", "policy.megatron_cfg.moe_aux_loss_coeff; set it there"),
            ("moe_z_loss_coeff=1e-3", "not built yet: auxiliary losses"),
            ("mtp_num_layers=1", "policy.megatron_cfg.mtp_num_layers; set it there"),
            ("mtp_hybrid_override_pattern=M", "not built yet: further options of multi-token prediction"),
            ("moe_router_bias_update_rate=1e-3", "not built yet: updates of the router's biases"),
            ("moe_token_dropping=true", "not built yet: experts that drop tokens"),
            ("moe_expert_capacity_factor=1.5", "not built yet: experts that drop tokens"),
            ("moe_input_jitter_eps=0.01", "not built yet: noise in the router"),
            ("moe_router_enable_expert_bias=true", "not built yet: expert biases of Megatron's router"),
            ("moe_router_force_load_balancing=true", "not built yet: routing at random"),
            ("moe_router_load_balancing_type=[aux_loss,seq_aux_loss]", "moe_router_load_balancing_type; set it there"),
            ("moe_aux_loss_coeff=[0.1,0.1]", "policy.megatron_cfg.moe_aux_loss_coeff; set it there"),
            ("calculate_per_token_loss=false", "losses are summed, and the step divides once"),
            ("mtp_loss_scaling_factor=0.1", "policy.megatron_cfg.mtp_loss_scaling_factor; set it there"),
            ("moe_apply_probs_on_input=true", "not known to leave the model and its gradients as they are"),
            ("qk_clip=true", "not known to leave the model and its gradients as they are"),
            ("attention_dropout=0.1", "not built yet: dropout"),
            ("moe_enable_deepep=true", "policy.megatron_cfg.moe_enable_deepep; set it there"),
            ("context_parallel_size=2", "this is policy.megatron_cfg.context_parallel_size"),
            ("bf16=false", "this is set by policy.precision"),
            ("fp8_recipe=delayed", "this is set by policy.megatron_cfg.fp8_cfg"),
            ("num_layers=3", "not known to leave the model and its gradients as they are"),
            ("recompute_methd=uniform", "Did you mean 'recompute_method'?"),
        )
    ),
    *(
        ([f"+policy.generation.vllm_kwargs.{override}"], message)
        for override, message in (
            ("kv_cache_dtype=fp8", "not built yet: fp8 KV cache"),
            ("tensor_parallel_size=2", "this is policy.generation.vllm_cfg.tensor_parallel_size"),
            ("logprobs_mode=raw_logits", "this is policy.generation.vllm_cfg.logprobs_mode"),
            ("max_model_len=8", "this is policy.generation.vllm_cfg.max_model_len"),
            ("model=other", "this is policy.model_name"),
            ("dtype=float16", "this is policy.generation.vllm_cfg.precision"),
            ("hf_overrides={num_hidden_layers: 1}", "this is policy.hf_config_overrides"),
            ("rope_theta=1e6", "engines would load another model"),
            ("logits_processors=[a.B]", "another distribution"),
            ("quantization=fp8", "engines so quantised"),
            ("data_parallel_size=2", "every accelerator has an engine of its own"),
            ("data_parallel_size_local=2", "every accelerator has an engine of its own"),
            ("max-model-len=8", "this is policy.generation.vllm_cfg.max_model_len"),
            ("--load-format=auto", "this is policy.generation.vllm_cfg.load_format"),
            ("tp=2", "this is policy.generation.vllm_cfg.tensor_parallel_size"),
            ("enable_prefix_caching=true", "this is policy.generation.vllm_cfg.enable_prefix_caching"),
            ("seed=3", "this is grpo.seed"),
            ("enable_lora=true", "policy.dtensor_cfg.lora_cfg"),
            ("max_lora_rank=8", "policy.dtensor_cfg.lora_cfg"),
            ("model_weights=other", "this is policy.model_name"),
            ("watermark_config={a: 1}", "another distribution"),
            ("override_generation_config={top_k: 3}", "set for refits and sampling"),
            ("enable_sleep_mode=false", "set for refits and sampling"),
            ("kv_transfer_config={kv_role: kv_both}", "would outlive the weights"),
            ("enable_eplb=true", "refits write each expert"),
            ("max_num_seq=8", "vLLM's engine has no such argument. Did you mean 'max_num_seqs'?"),
            ("enable-chunked-prefill=true", "Did you mean 'enable_chunked_prefill'?"),
        )
    ),
    *(
        ([f"++policy.{override}"], message)
        for override, message in (
            ("tokenizer.chat_template_kwargs.chat_template=x", "this is set by policy.tokenizer.chat_template"),
            ("tokenizer.chat_template_kwargs.add_generation_prompt=true", "set by data.add_generation_prompt"),
            ("tokenizer.chat_template_kwargs.tools=[]", "the column tools of the rows"),
            ("tokenizer.chat_template_kwargs.truncation=true", "no variable of a template"),
            ("generation.vllm_cfg.env_vars.CUDA_VISIBLE_DEVICES='1'", "set for each process"),
            ("dtensor_cfg.env_vars.MASTER_PORT='1'", "set for each process"),
            ("megatron_cfg.env_vars.RANK='0'", "set for each process"),
        )
    ),
    (["policy.scheduler={name: a.B, kwargs: {last_epoch: 3}}"], "a resumed run goes on in it"),
    (["policy.scheduler={name: a.B, kwargs: {optimizer: x}}"], "the optimizer is policy.optimizer"),
    (["+logger.wandb.dir=/tmp"], "this is set by logger.log_dir"),
    (["+logger.wandb.config={a: 1}"], "logged whole"),
    (["+logger.swanlab.experiment_name=x"], "this is set by logger.swanlab.name"),
    *(
        ([f"++policy.{override}"], message)
        for override, message in (
            ("optimizer.kwargs.amsgrad='off'", "'off' is neither true nor false"),
            ("optimizer.kwargs.lr=fast", "'fast' is no number; write one such as 1e-6"),
            ("optimizer.kwargs.betas=[high,low]", "['high', 'low'] is no list of numbers"),
            ("optimizer.kwargs.betas=0.9", "0.9 is no list of numbers"),
            ("generation.vllm_kwargs.max_num_seqs=many", "'many' is no number"),
            ("generation.vllm_kwargs.cpu_offload_gb=4GB", "'4GB' is no number"),
            ("hf_config_overrides.rope_theta=large", "'large' is no number"),
            ("optimizer.kwargs.weight_decay=no", "False is no number"),
            ("optimizer.kwargs.maximize=yes", "training minimises the loss"),
            ("hf_config_overrides.router_aux_loss_coef=0.001", "not built yet: auxiliary losses of a router"),
            ("hf_config_overrides.text_config.router_aux_loss_coef=0.1", "not built yet: auxiliary losses"),
            ("hf_config_overrides.attention_dropout=0.1", "not built yet: dropout"),
            ("hf_config_overrides.torch_dtype=float16", "this is set by policy.precision"),
        )
    ),
]


def test_the_arguments_of_schedulers_are_numbers_or_known_texts() -> None:
    def of(name: str, kwargs: str) -> str:
        return f"policy.scheduler={{name: torch.optim.lr_scheduler.{name}, kwargs: {kwargs}}}"

    assert problems(of("LinearLR", "{start_factor: low, total_iters: 5}")) == [
        "policy.scheduler.0.kwargs.start_factor: 'low' is no number; write one such as 0.1 or 50 "
        "(policy.scheduler.0.kwargs.start_factor from override "
        f"{of('LinearLR', '{start_factor: low, total_iters: 5}')!r})"
    ]
    assert "'soon' is no number" in problems(of("MultiStepLR", "{milestones: [soon, 20]}"))[0]
    load_master_config(None, [of("OneCycleLR", "{max_lr: 1e-5, total_steps: 9, anneal_strategy: linear}")])


@pytest.mark.parametrize(("overrides", "message"), PASSED_THROUGH)
def test_what_a_free_mapping_sets_is_held_to_the_rules_of_the_key_itself(overrides: list[str], message: str) -> None:
    key = overrides[-1].lstrip("+").partition("=")[0].partition("={")[0]
    assert any(message in line and key in line for line in problems(*overrides)), problems(*overrides)


def test_free_mappings_take_what_is_safe_and_what_the_key_itself_says() -> None:
    load_master_config(
        None,
        [
            *MEGATRON,
            "policy.megatron_cfg.model_overrides={moe_aux_loss_coeff: 0.0, mtp_num_layers: 0, tp_comm_overlap: false}",
        ],
    )
    safe = "{max_num_seqs: 8, tokenizer: Qwen/Qwen2.5-1.5B, compilation_config: {backend: eager}}"
    config = load_master_config(
        None,
        [f"policy.generation.vllm_kwargs={safe}", "policy.hf_config_overrides={router_aux_loss_coef: 0.0}"],
    )
    assert config.policy.generation.vllm_kwargs["max_num_seqs"] == 8
    # Options of a backend that the run does not use do no harm.
    load_master_config(None, ["policy.megatron_cfg.model_overrides={moe_z_loss_coeff: 0.1}"])


@pytest.mark.parametrize(("overrides", "message"), BROKEN)
def test_what_cannot_be_combined_is_refused_with_its_keys(overrides: list[str], message: str) -> None:
    assert any(message in line for line in problems(*overrides)), problems(*overrides)


SCHEMA = [
    (["++grpo.sed=3"], "grpo.sed: unknown key. Did you mean 'seed'?"),
    (["++loss_fn.tensor_parallel_size=4"], "There is policy.dtensor_cfg.tensor_parallel_size"),
    (
        ["grpo.adv_estimator.name=grop"],
        "grpo.adv_estimator.name: 'grop' is not one of 'grpo', 'gdpo', 'reinforce_plus_plus' or 'opd'. Did "
        "you mean 'grpo'?",
    ),
    (["grpo.seed=many"], "grpo.seed: 'many'"),
    (["policy.train_micro_batch_size=0"], "policy.train_micro_batch_size: 0: input should be greater than 0"),
    (
        ["data.train={dataset_name: gsm8k, promt_file: x}"],
        "data.train: unknown key 'promt_file'. Did you mean 'prompt_file'?",
    ),
    (["data.train=[{dataset_name: gsm8k}, {seed: 1}]"], "data.train.1.dataset_name: required"),
    (["policy.scheduler=[{kwargs: {}}]"], "policy.scheduler.0:"),
    (["grpo.seed=???"], "grpo.seed: mandatory"),
    (["grpo.seed=${nowhere}"], "grpo.seed: Interpolation key 'nowhere' not found"),
    (["cluster=5"], "cluster: 5"),
    (["checkpointing.metric_name=accuracy"], "checkpointing.metric_name: accuracy begins with neither"),
]


@pytest.mark.parametrize(("overrides", "message"), SCHEMA)
def test_what_the_schema_refuses_is_told_in_words(overrides: list[str], message: str) -> None:
    assert any(message in line for line in problems(*overrides)), problems(*overrides)


def test_all_mistakes_are_reported_at_once() -> None:
    lines = problems("++grpo.sed=3", "policy.precision=fp4", "policy.is_vlm=true")
    assert len(lines) == 3


def test_the_accuracy_check_of_wide_tensor_parallelism_can_be_waived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "1")
    load_master_config(
        None, ["policy.dtensor_cfg.tensor_parallel_size=4", "cluster.gpus_per_node=4", "policy.logprob_batch_size=8"]
    )


@pytest.mark.parametrize(
    ("patterns", "steps", "says"),
    [
        ("*policy*", "", "NRL_NSYS_WORKER_PATTERNS=*policy* needs NRL_NSYS_PROFILE_STEP_RANGE too"),
        ("", "3:5", "NRL_NSYS_PROFILE_STEP_RANGE=3:5 needs NRL_NSYS_WORKER_PATTERNS too"),
        *[
            ("*", bad, f"={bad} is no range of steps")
            for bad in ("3", "3:", "a:b", "0:2", "5:3", "4:4", "-1:2", "1:2:3")
        ],
        ("engine*, ,lm", "3:5", r"names no worker of this run; its workers are lm_policy (lm_policy-0, ...), vllm ("),
        (",", "3:5", "names no worker of this run"),
    ],
)
def test_a_profile_that_nobody_could_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, patterns: str, steps: str, says: str
) -> None:
    monkeypatch.setenv("NRL_NSYS_WORKER_PATTERNS", patterns)
    monkeypatch.setenv("NRL_NSYS_PROFILE_STEP_RANGE", steps)
    (line,) = problems()
    assert says in line


def test_a_profile_is_of_the_run_at_hand_and_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_NSYS_WORKER_PATTERNS", "vllm-[01]")
    monkeypatch.setenv("NRL_NSYS_PROFILE_STEP_RANGE", " 3:5 ")
    load_master_config(None)
    (line,) = problems("cluster.device=cpu")
    assert "Nsight Systems profiles GPUs" in line
    with pytest.raises(ConfigError, match="names no worker of this run; its workers are lm_policy"):
        load_master_config(None, [], SFTMasterConfig)


def test_sft_has_its_own_loop_and_its_rules() -> None:
    good = ["data.train={dataset_name: arithmetic}", "data.validation={dataset_name: arithmetic, split: validation}"]
    config = load_master_config(None, [*good, "policy.train_global_batch_size=32"], SFTMasterConfig)
    assert config.sft.max_num_steps == 60 and config.checkpointing.metric_name == "val:val_loss"
    assert any(
        "sft.val_at_start ask for validation" in line
        for line in problems("data.train={dataset_name: arithmetic}", kind=SFTMasterConfig)
    )
    assert any("grpo: unknown key" in line for line in problems(*good, "++grpo.seed=1", kind=SFTMasterConfig))
    several = ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=16"]
    assert any("SFT has one loader" in line for line in problems(*good, *several, kind=SFTMasterConfig))


@pytest.mark.parametrize(
    "name", ["val:accuracy", "val:accuracy/gsm8k", "train:reward", "train:grad_norm", "train:my/own/score", "null"]
)
def test_metrics_that_a_run_may_measure_rank_checkpoints(name: str) -> None:
    load_master_config(None, [f"checkpointing.metric_name={name}"])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("accuracy", []),
        ("val:accuracy", []),
        ("validation/accuracy", []),
        ("val:pass_k", ["grpo.val_num_generations_per_prompt=4"]),
        ("math/accuracy", []),
        ("reward/correctness", ["data.default.env_name=math_multi_reward"]),
        ("judge/right", ["data.default.env_name=judge", "++env.judge.class=letters.Judge"]),
        ("reward/mine", ["data.default.env_name=judge", "++env.judge.class=letters.Judge"]),
    ],
)
def test_a_run_may_end_by_what_its_validation_measures(name: str, overrides: list[str]) -> None:
    stop = [f"grpo.stop_at_validation_metric={name}", "grpo.stop_at_validation_threshold=1"]
    load_master_config(None, [*stop, *overrides])
    prefixed = f"val:{MetricName.read(name).name}"
    load_master_config(None, [f"checkpointing.metric_name={prefixed}", *overrides])
    measured = {MetricName.read(name).name: 0.5}
    assert ranking_metric(CheckpointingConfig(metric_name=prefixed), 1, train={}, val=measured) == {prefixed: 0.5}


def test_every_metric_that_steps_and_validation_report_is_known_by_name() -> None:
    ones = torch.ones(4)
    assert set(validation_metrics(ones, ones, generations_per_prompt=2, best_at_k=True)) == set(GRPO_VALIDATION)
    assert set(batch_metrics(ones, ones, ones, ones)) <= set(GRPO_TRAINING)
    assert set(SFT_TRAINING) - set(GRPO_TRAINING) == {"num_unmasked_tokens"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["env.math.function=a.b", "env.math.num_workers=2"],
            "change nothing here: env.math.num_workers (env.math.fun",
        ),
        (["policy.optimizer.kwargs.lr=0"], "policy.optimizer.kwargs.lr is 0: the optimizer changes no weight"),
        (
            ["policy.generation.vllm_cfg.max_model_len=2048", "policy.generation.max_new_tokens=1024"],
            "responses together end at policy.max_total_sequence_length 512",
        ),
        (
            ["policy.generation.vllm_cfg.max_model_len=256", "policy.generation.max_new_tokens=128"],
            "samples end at 256 tokens",
        ),
        (["grpo.seed=1", "++grpo.seed=2"], "grpo.seed is set twice: 'grpo.seed=1' has no effect, '++grpo.seed=2' wins"),
        (["grpo.seed=1", "~grpo.seed"], "grpo.seed is set twice: 'grpo.seed=1' has no effect, '~grpo.seed' wins"),
        (["grpo.seed=1", "grpo={seed: 2}"], "grpo.seed is set twice: 'grpo.seed=1' has no effect"),
    ],
)
def test_settings_that_change_nothing_or_not_what_was_meant_are_said(
    overrides: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_master_config(None, overrides)
    assert said in caplog.text


def test_the_same_override_given_twice_is_no_contradiction(caplog: pytest.LogCaptureFixture) -> None:
    load_master_config(None, ["grpo.seed=1", "policy.precision=float32", "grpo.seed=1"])
    assert "twice" not in caplog.text


def test_a_configuration_built_in_python_is_checked_too() -> None:
    config = MasterConfig()
    check_config(config)
    config.policy.dynamic_batching.enabled = True
    with pytest.raises(ConfigError, match="exclude each other"):
        check_config(config)


def test_rows_are_padded_to_what_the_ranks_divide() -> None:
    four = ["cluster.gpus_per_node=4", "policy.dtensor_cfg.tensor_parallel_size=2"]
    sequence = ["policy.dtensor_cfg.sequence_parallel=true", "policy.dtensor_cfg.context_parallel_size=2"]
    for given, padded in ((1, 8), (3, 24), (16, 16)):
        key = f"policy.make_sequence_length_divisible_by={given}"
        config = load_master_config(None, [*four, *sequence, key, "policy.max_total_sequence_length=96"])
        assert config.policy.make_sequence_length_divisible_by == padded
    assert load_master_config(None, four).policy.make_sequence_length_divisible_by == 2


TEACHER = ("teacher.model_name=x",)
ENGINE = ("teacher.backend=vllm",)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "teacher: distillation needs a teacher"),
        (
            [*TEACHER, "distillation.use_dynamic_sampling=true"],
            "distillation.use_dynamic_sampling: distillation learns",
        ),
        ([*TEACHER, "loss_fn.ratio_clip_min=0.3"], "loss_fn.ratio_clip_min: distillation learns"),
        ([*TEACHER, "loss_fn.kl_type=backward"], "'backward' is not one of 'forward', 'reverse' or 'mixed'"),
        ([*TEACHER, "distillation.topk_logits_k=0"], "distillation.topk_logits_k: 0"),
        ([*TEACHER, "teacher.max_total_sequence_length=8"], "a teacher scores whole samples"),
        ([*TEACHER, "teacher.colocated.enabled=false"], "teacher.colocated.resources: gpus_per_node is not given"),
        (
            [*TEACHER, "teacher.colocated={enabled: false, resources: {gpus_per_node: 1}}"],
            "teachers take 1 of them, and none is left to train",
        ),
        (
            [*TEACHER, *ENGINE, "distillation.topk_logits_k=30", "teacher.generation.vllm_kwargs.max_logprobs=20"],
            "distillation.topk_logits_k is 30, and teacher.generation.vllm_kwargs.max_logprobs 20",
        ),
        ([*TEACHER, *ENGINE, "teacher.generation.vllm_cfg.max_model_len=8"], "a teacher scores whole samples"),
        (
            [*TEACHER, *ENGINE, "teacher.generation.vllm_cfg.tensor_parallel_size=2"],
            "does not divide the 1 accelerators",
        ),
        (
            [*TEACHER, *ENGINE, "teacher.generation.vllm_kwargs.max_num_sequences=2"],
            "teacher.generation.vllm_kwargs.max_num_sequences: 2: vLLM's engine has no such argument",
        ),
        ([*TEACHER, "teacher.dynamic_batching.enabled=true"], "teacher.sequence_packing.enabled and"),
        ([*TEACHER, "teacher.router_replay.enabled=true"], "teacher.router_replay.enabled: what is recorded"),
        ([*TEACHER, "teacher.sampling_mask_replay=true"], "teacher.sampling_mask_replay: what is recorded"),
        ([*TEACHER, "distillation.async_grpo.enabled=true"], "distillation.async_grpo.enabled needs policy.generation"),
    ],
)
def test_what_a_distillation_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_master_config(None, overrides, DistillationMasterConfig)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss_fn.teacher_kl_penalty=0.1"], "there is no section `teacher`"),
        ([*TEACHER], "loss_fn.teacher_kl_penalty is 0, so that nothing would read it"),
        ([*TEACHER, "loss_fn.teacher_kl_penalty=0.1"], "the KL is taken to the teacher or to the reference policy"),
        (["on_policy_distillation.enabled=true"], "need each other"),
        (
            ["on_policy_distillation.enabled=true", "grpo.adv_estimator.name=opd"],
            "teacher_model_by_agent_name is empty",
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}, default_teacher_alias: b}",
                "grpo.adv_estimator.name=opd",
            ],
            "default_teacher_alias is b, which teacher_model_by_agent_name does not have; it has a",
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}}",
                "grpo.adv_estimator.name=opd",
                "loss_fn.force_on_policy_ratio=true",
            ],
            "opd reads log-probabilities before the step, which loss_fn.force_on_policy_ratio skips",
        ),
        *(
            (
                [
                    f"on_policy_distillation={{enabled: true, teacher_model_by_agent_name: {{a: x, b: y}}, {jobs}}}",
                    "grpo.adv_estimator.name=opd",
                ],
                said,
            )
            for jobs, said in (
                ("job_by_agent_name: {a: one, b: two}", "set on_policy_distillation.backend to vllm and"),
                ("backend: vllm, job_by_agent_name: {a: one}", "names no job for b; name one for every teacher"),
                ("backend: vllm, job_by_agent_name: {a: one, b: one}", "one would serve x and y; a job serves one"),
                ("backend: vllm, job_by_agent_name: {a: one, b: two, c: two}", "job_by_agent_name.c: teacher_model_"),
            )
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}, backend: vllm}",
                "grpo.adv_estimator.name=opd",
                "policy.generation.temperature=0.7",
            ],
            "on_policy_distillation.backend is vllm, which scores at temperature 1, and policy.generation.temperature "
            "is 0.7",
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}, backend: vllm, "
                "non_colocated_teachers: {enabled: true, default_teacher_cfg: {gpus_per_node: 3, "
                "context_parallel_size: 2, tensor_model_parallel_size: 2}}}",
                "grpo.adv_estimator.name=opd",
                "cluster.gpus_per_node=8",
            ],
            "context_parallel_size is 2, and engines have no such ranks",
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}, backend: vllm, "
                "non_colocated_teachers: {enabled: true, default_teacher_cfg: {gpus_per_node: 3, "
                "tensor_model_parallel_size: 2}}}",
                "grpo.adv_estimator.name=opd",
                "cluster.gpus_per_node=8",
            ],
            "is 2, which does not divide the 3 accelerators of the teacher",
        ),
        (
            [
                "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x}, backend: vllm, "
                "non_colocated_teachers: {enabled: true, default_teacher_cfg: {num_nodes: 3, gpus_per_node: 8, "
                "tensor_model_parallel_size: 12}}}",
                "grpo.adv_estimator.name=opd",
                "cluster={num_nodes: 5, gpus_per_node: 8}",
            ],
            "is 12, which does not divide the 24 accelerators of the teacher on 3 nodes",
        ),
    ],
)
def test_teachers_of_grpo_that_nothing_reads_or_that_are_missing_are_refused(overrides: list[str], said: str) -> None:
    assert any(said in line for line in problems(*overrides))


def _teachers(*overrides: str) -> list[tuple[tuple[str, ...], tuple[str, ...] | None, int]]:
    config = load_master_config(
        None,
        [
            "grpo.adv_estimator.name=opd",
            "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {a: x, b: x, c: y}}",
            "cluster.gpus_per_node=8",
            *overrides,
        ],
    )
    return [(teacher.names, teacher.tasks, teacher.slots(config)) for teacher in teachers_of(config)]


def test_teachers_of_one_model_are_one_unless_their_sizes_differ() -> None:
    key = "on_policy_distillation"
    assert _teachers() == [(("a", "b"), ("a", "b"), 0), (("c",), ("c",), 0)]
    assert len(_teachers(f"{key}.deduplicate_shared_teacher_checkpoints=false")) == 3
    assert _teachers(f"{key}.default_teacher_alias=c")[1] == (("c",), None, 0)
    own = (
        f"{key}.non_colocated_teachers={{enabled: true, default_teacher_cfg: {{gpus_per_node: 1}}, teacher_overrides: "
    )
    assert _teachers(own + "{b: {gpus_per_node: 2}}}") == [
        (("a",), ("a",), 1),
        (("b",), ("b",), 2),
        (("c",), ("c",), 1),
    ]


def notes(*overrides: str, kind: type[MasterConfig | SFTMasterConfig] = MasterConfig) -> str:
    """What a start says of settings that are allowed and may not be what was meant."""
    examined = examine(load_layers(None, list(overrides), kind).values, kind)
    assert not examined.problems
    return "\n".join(examined.notes)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "zero_deviation: unnormalized"),
        (["grpo.adv_estimator.zero_deviation=group"], "zero_deviation: group"),
        (["grpo.adv_estimator.name=gdpo"], "zero_deviation: unnormalized"),
        (["grpo.use_leave_one_out_baseline=false"], None),
        (["grpo.normalize_rewards=false"], None),
        (["grpo.adv_estimator.name=reinforce_plus_plus"], None),
    ],
)
def test_a_start_says_which_formula_an_only_success_has(overrides: list[str], said: str | None) -> None:
    told = notes(*overrides)
    assert said in told if said else "zero_deviation" not in told


_MEGATRON = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
_SCHEDULE = "policy.megatron_cfg.scheduler"


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ([f"{_SCHEDULE}.lr_decay_style=cosine", f"{_SCHEDULE}.lr_decay_iters=13"], "lr_decay_iters is 13"),
        (
            [f"{_SCHEDULE}.lr_decay_style=linear", "policy.megatron_cfg.optimizer.min_lr=0.01"],
            "policy.megatron_cfg.optimizer.min_lr is 0.01",
        ),
        ([f"{_SCHEDULE}.lr_warmup_init=0.01"], "lr_warmup_init is 0.01"),
        ([f"{_SCHEDULE}.end_weight_decay=0.001"], "start_weight_decay is 0.01"),
        ([f"{_SCHEDULE}.end_weight_decay=0.1"], "weight_decay_incr_style is constant"),
        ([f"{_SCHEDULE}.lr_decay_style=WSD"], "lr_decay_style: 'WSD'"),
    ],
)
def test_a_schedule_that_megatron_cannot_follow_is_refused(wrong: list[str], key: str) -> None:
    (problem,) = problems(*_MEGATRON, *wrong)
    assert key in problem


def test_what_a_constant_rate_does_not_read_is_not_refused() -> None:
    ignored = [f"{_SCHEDULE}.lr_decay_iters=5", "policy.megatron_cfg.optimizer.min_lr=0.01"]
    notes(*_MEGATRON, *ignored)
    notes(*_MEGATRON, f"{_SCHEDULE}.lr_warmup_iters=0", f"{_SCHEDULE}.lr_warmup_init=0.01")


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (["loss_fn.disable_ppo_ratio=true"], "probs_ratio"),
        (
            ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
            "sampling_importance_ratio",
        ),
    ],
)
def test_a_start_says_which_metrics_are_of_another_formula(overrides: list[str], metric: str) -> None:
    assert metric in notes(*overrides)
    assert metric not in notes()


_SHAPING = "grpo.reward_shaping.enabled=true"
_COEF = "grpo.reward_shaping.stop_properly_penalty_coef"
_SIGNED = ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=-1.0"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([_SHAPING, f"{_COEF}=0.5", *_SIGNED], "a truncated one earns -0.5, which is more"),
        ([_SHAPING, f"{_COEF}=0", *_SIGNED], "a truncated one earns 0, which is more"),
        ([_SHAPING, f"{_COEF}=0.5"], "where an environment gives negative rewards"),
        ([_SHAPING, f"{_COEF}=1.0", *_SIGNED], None),
        ([_SHAPING, f"{_COEF}=0.5", "grpo.reward_scaling.enabled=true"], None),
        ([f"{_COEF}=0.5", *_SIGNED], None),
        ([_SHAPING, "grpo.max_rollout_turns=3"], "counts the first response of a sample"),
        ([_SHAPING], None),
    ],
)
def test_a_start_says_what_shaping_does_to_negative_rewards_and_later_turns(
    overrides: list[str], said: str | None
) -> None:
    told = notes(*overrides)
    assert said in told if said else "reward_shaping" not in told


_OTHER = "other than in NeMo-RL"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "small numbers are compared by their first digits"),
        ([], "equal prompts of two rows are two groups"),
        (["env.math.math_verify_impl=dapo_math_verify"], "answers are read as docs/evaluation.md says"),
        (["grpo.max_rollout_turns=2"], "a last observation that is cut"),
        (["grpo.should_mask_flagged_samples=true"], "rewards of flagged samples are in no baseline"),
        (["grpo.max_num_steps=15"], "keep_top_k ranks the last step too"),
        (["data.default.env_name=code", "data.default.processor=default"], "a cell without a value shows"),
    ],
)
def test_a_start_says_what_is_other_than_in_nemo_rl(overrides: list[str], said: str) -> None:
    (line,) = [line for line in notes(*overrides).splitlines() if _OTHER in line]
    assert said in line


def test_a_run_that_is_as_in_nemo_rl_says_nothing() -> None:
    assert _OTHER not in notes("sft.max_num_steps=20", kind=SFTMasterConfig)
    told = notes("grpo.max_num_steps=20")
    assert "keep_top_k" not in told and "flagged" not in told and "observation" not in told
