"""Where each name that scripts import from NeMo-RL lives here, which are called differently, and which are missing.

`find` is what the modules at NeMo-RL's paths ask. Invariant: every home exists, and a name is in one table only.
"""

from __future__ import annotations

import importlib
from typing import Any

_LOSSES = {
    "ClippedPGLossConfig": "nemo_rl.config",
    **dict.fromkeys(("ClippedPGLossFn", "NLLLossFn", "SequencePackingLossWrapper"), "nemo_rl.loss"),
}
_LOSS_INTERFACES = dict.fromkeys(("LossFunction", "LossInputType", "LossType", "MetricNormalizer"), "nemo_rl.loss")
_PACKERS = dict.fromkeys(
    (
        "BinPackingError",
        "ConcatenativePacker",
        "FirstFitDecreasingPacker",
        "FirstFitShufflePacker",
        "ModifiedFirstFitDecreasingPacker",
        "PackingAlgorithm",
        "SequencePacker",
        "get_packer",
    ),
    "nemo_rl.distributed.bin_packing",
)

# module -> name -> home, as module:attribute; a home without an attribute has the name itself.
NAMES: dict[str, dict[str, str]] = {
    "nemo_rl.algorithms.grpo": {
        "AsyncGRPOConfig": "nemo_rl.config",
        "GRPOConfig": "nemo_rl.config",
        "GRPOLoggerConfig": "nemo_rl.config:LoggerConfig",
        "GRPOSaveState": "nemo_rl.algorithms.grpo.run:GRPOState",
        "MasterConfig": "nemo_rl.config",
        "NoOpRLixHooks": "nemo_rl.experience.hooks",
        "RLixHooksProtocol": "nemo_rl.experience.hooks",
        "RewardScalingConfig": "nemo_rl.config",
        "async_grpo_train": "nemo_rl.compat.loops",
        "grpo_train": "nemo_rl.compat.loops",
        "refit_policy_generation": "nemo_rl.compat.loops",
        "scale_rewards": "nemo_rl.algorithms.grpo.rewards",
        "setup": "nemo_rl.compat.loops:grpo_setup",
        "validate": "nemo_rl.compat.loops:grpo_validate",
    },
    "nemo_rl.algorithms.sft": {
        "MasterConfig": "nemo_rl.config:SFTMasterConfig",
        "SFTConfig": "nemo_rl.config",
        "SFTSaveState": "nemo_rl.algorithms.sft.driver:SFTState",
        "setup": "nemo_rl.compat.loops:sft_setup",
        "sft_train": "nemo_rl.compat.loops",
        "validate": "nemo_rl.compat.loops:sft_validate",
    },
    "nemo_rl.algorithms.advantage_estimator": {
        "AdvEstimatorConfig": "nemo_rl.config",
        "AdvantageEstimator": "nemo_rl.compat.advantage_estimator",
        "ADVANTAGE_ESTIMATORS": "nemo_rl.compat.advantage_estimator",
        "GDPOAdvantageEstimator": "nemo_rl.compat.advantage_estimator",
        "GRPOAdvantageEstimator": "nemo_rl.compat.advantage_estimator",
        "OPDAdvantageEstimator": "nemo_rl.compat.advantage_estimator",
        "ReinforcePlusPlusAdvantageEstimator": "nemo_rl.compat.advantage_estimator",
    },
    "nemo_rl.algorithms.interfaces": {"LossFunction": "nemo_rl.loss", "LossType": "nemo_rl.loss"},
    "nemo_rl.algorithms.loss": _LOSSES | _LOSS_INTERFACES,
    "nemo_rl.algorithms.loss.interfaces": _LOSS_INTERFACES,
    "nemo_rl.algorithms.loss.loss_functions": _LOSSES,
    "nemo_rl.algorithms.loss_functions": _LOSSES | {"NLLLoss": "nemo_rl.loss:NLLLossFn"},
    "nemo_rl.algorithms.reward_functions": {
        "RewardShapingConfig": "nemo_rl.config",
        "apply_reward_shaping": "nemo_rl.algorithms.grpo.rewards:shape_rewards",
    },
    "nemo_rl.algorithms.utils": {
        "calculate_baseline_and_std_per_prompt": "nemo_rl.algorithms.grpo.advantages",
        "calculate_kl": "nemo_rl.loss.policy_ratios",
        "get_tokenizer": "nemo_rl.data.tokenizer",
        "masked_mean": "nemo_rl.loss.normalization",
        "set_seed": "nemo_rl.algorithms.startup",
    },
    "nemo_rl.data": {"DataConfig": "nemo_rl.config", "ResponseDatasetConfig": "nemo_rl.config:DatasetConfig"},
    "nemo_rl.data.packing": _PACKERS,
    "nemo_rl.data.packing.algorithms": _PACKERS,
    "nemo_rl.data.utils": {"setup_response_data": "nemo_rl.environments.registry"},
    "nemo_rl.distributed.ray_actor_environment_registry": {
        "ACTOR_ENVIRONMENT_REGISTRY": "nemo_rl.compat.interpreters",
        "get_actor_python_env": "nemo_rl.compat.interpreters",
    },
    "nemo_rl.distributed.virtual_cluster": {
        "ClusterConfig": "nemo_rl.config",
        "PY_EXECUTABLES": "nemo_rl.compat.interpreters",
        "init_ray": "nemo_rl.compat.interpreters",
    },
    "nemo_rl.environments.games.sliding_puzzle": {
        "SlidingPuzzleEnv": "nemo_rl.environments.sliding_puzzle_environment:SlidingPuzzleEnvironment",
    },
    "nemo_rl.environments.math_environment": {"MathEnvConfig": "nemo_rl.config"},
    "nemo_rl.environments.utils": {
        "chunk_list_to_workers": "nemo_rl.compat.rollouts",
        "create_env": "nemo_rl.environments.registry",
        "register_env": "nemo_rl.environments.registry",
    },
    "nemo_rl.evals.eval": {
        "EvalConfig": "nemo_rl.config.evaluation",
        "MasterConfig": "nemo_rl.config:EvalMasterConfig",
        "run_env_eval": "nemo_rl.compat.loops",
        "setup": "nemo_rl.compat.loops:eval_setup",
    },
    "nemo_rl.experience.rollouts": {
        "calculate_rewards": "nemo_rl.compat.rollouts",
        "run_async_multi_turn_rollout": "nemo_rl.compat.rollouts",
        "run_multi_turn_rollout": "nemo_rl.compat.rollouts",
    },
    "nemo_rl.models.generation": {
        "GenerationConfig": "nemo_rl.config",
        "configure_generation_config": "nemo_rl.compat.rollouts",
    },
    "nemo_rl.models.generation.errors": {"ShardPreemptedError": "nemo_rl.models.generation.interfaces"},
    "nemo_rl.models.generation.interfaces": {
        "GenerationConfig": "nemo_rl.config",
        "GenerationDatumSpec": "nemo_rl.compat.rollouts",
        "GenerationOutputSpec": "nemo_rl.compat.rollouts",
        "should_use_async_rollouts": "nemo_rl.compat.rollouts",
    },
    "nemo_rl.models.generation.vllm": {
        "VllmConfig": "nemo_rl.config",
        "VllmGeneration": "nemo_rl.models.generation.vllm.vllm_generation",
    },
    "nemo_rl.models.policy": {
        "DTensorConfig": "nemo_rl.config",
        "DynamicBatchingConfig": "nemo_rl.config",
        "LoRAConfig": "nemo_rl.config:LoraConfig",
        "MegatronConfig": "nemo_rl.config",
        "PolicyConfig": "nemo_rl.config",
        "SequencePackingConfig": "nemo_rl.config",
        "TokenizerConfig": "nemo_rl.config",
    },
    "nemo_rl.utils.checkpoint": {"CheckpointingConfig": "nemo_rl.config"},
    "nemo_rl.utils.config": {
        "OverridesError": "nemo_rl.config",
        "load_config": "nemo_rl.config",
        "load_master_config": "nemo_rl.config",
        "parse_hydra_overrides": "nemo_rl.config",
        "register_omegaconf_resolvers": "nemo_rl.config",
    },
    "nemo_rl.utils.logger": {"LoggerConfig": "nemo_rl.config", "LoggerInterface": "nemo_rl.utils.log_backends"},
}

# Names that are defined where NeMo-RL defines them; listed for the page and its test.
AT_HOME: dict[str, tuple[str, ...]] = {
    "nemo_rl.data.collate_fn": ("rl_collate_fn",),
    "nemo_rl.data.datasets": ("AllTaskProcessedDataset", "RawDataset", "load_response_dataset"),
    "nemo_rl.data.interfaces": ("DatumSpec", "LLMMessageLogType", "TaskDataProcessFnCallable", "TaskDataSpec"),
    "nemo_rl.data.llm_message_utils": (
        "add_loss_mask_to_message_log",
        "batched_message_log_to_flat_message",
        "get_formatted_message_log",
        "get_keys_from_message_log",
        "message_log_to_flat_messages",
    ),
    "nemo_rl.data.processors": ("math_data_processor", "math_hf_data_processor", "register_processor", "sft_processor"),
    "nemo_rl.data_plane": ("DataPlaneClient", "KVBatchMeta", "build_data_plane_client", "materialize"),
    "nemo_rl.distributed.batched_data_dict": ("BatchedDataDict",),
    "nemo_rl.distributed.named_sharding": ("NamedSharding",),
    "nemo_rl.distributed.virtual_cluster": ("RayVirtualCluster", "ResourceInsufficientError"),
    "nemo_rl.distributed.worker_groups": ("MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup"),
    "nemo_rl.environments.code_environment": ("CodeEnvironment",),
    "nemo_rl.environments.interfaces": ("EnvironmentInterface", "EnvironmentReturn"),
    "nemo_rl.environments.math_environment": ("MathEnvironment",),
    "nemo_rl.models.generation.interfaces": (
        "GenerationInterface",
        "GenerationSamplingParams",
        "verify_right_padding",
    ),
    "nemo_rl.models.policy.interfaces": ("PolicyInterface",),
    "nemo_rl.models.policy.lm_policy": ("Policy",),
    "nemo_rl.utils.checkpoint": ("CheckpointManager",),
    "nemo_rl.utils.logger": ("Logger", "flatten_dict", "get_next_experiment_dir", "print_message_log_samples"),
    "nemo_rl.utils.timer": ("TimeoutChecker", "Timer"),
}

# Names that are here and are called in another way.
CHANGED: dict[str, str] = {
    "nemo_rl.algorithms.grpo.setup": "setup(master_config) returns one run; data and environments come from the "
    "configuration (data.train.dataset_name and env.<name>.class take classes of yours)",
    "nemo_rl.algorithms.grpo.grpo_train": "grpo_train(run) with the run that setup gave",
    "nemo_rl.algorithms.grpo.async_grpo_train": "async_grpo_train(run, rlix_hooks=None)",
    "nemo_rl.algorithms.grpo.validate": "validate(run, step)",
    "nemo_rl.algorithms.grpo.refit_policy_generation": "refit_policy_generation(run) serves the policy's weights",
    "nemo_rl.algorithms.sft.setup": "setup(master_config) returns one run",
    "nemo_rl.algorithms.sft.sft_train": "sft_train(run)",
    "nemo_rl.algorithms.sft.validate": "validate(run)",
    "nemo_rl.algorithms.reward_functions.apply_reward_shaping": "shape_rewards(rewards, lengths, truncated, cfg)",
    "nemo_rl.evals.eval.setup": "setup(master_config) checks and returns the configuration",
    "nemo_rl.evals.eval.run_env_eval": "run_env_eval(master_config) evaluates and returns the score",
    "nemo_rl.environments.games.sliding_puzzle.SlidingPuzzleEnv": "takes {max_moves}; the puzzles are a dataset",
    "nemo_rl.distributed.virtual_cluster.PY_EXECUTABLES": "every entry is this interpreter; there is one environment",
}

# What scripts import and is not here, with what to use.
ABSENT: dict[str, str] = {
    "nemo_rl.algorithms.dpo": "preference training is not built",
    "nemo_rl.algorithms.rm": "training of reward models is not built",
    "nemo_rl.algorithms.ppo": "PPO with a value model is not built",
    "nemo_rl.algorithms.distillation": "distillation is not built",
    "nemo_rl.algorithms.loss.loss_functions.DPOLossFn": "preference training is not built",
    "nemo_rl.algorithms.loss.loss_functions.PreferenceLossFn": "preference training is not built",
    "nemo_rl.algorithms.loss.loss_functions.DistillationLossFn": "distillation is not built",
    "nemo_rl.algorithms.loss.loss_functions.MseValueLossFn": "PPO with a value model is not built",
    "nemo_rl.algorithms.loss.loss_functions.DraftCrossEntropyLossFn": "draft models are not built",
    "nemo_rl.algorithms.loss.loss_functions.SequencePackingFusionLossWrapper": "a packed row's loss is always taken in "
    "one go; SequencePackingLossWrapper",
    "nemo_rl.environments.nemo_gym": "NeMo-Gym is not built",
    "nemo_rl.environments.vlm_environment": "vision-language and audio models are not built",
    "nemo_rl.experience.interfaces": "nemo_rl.experience.rollouts.Trajectory, and experience.columns for a batch",
    "nemo_rl.experience.rollouts.generate_responses": "run_multi_turn_rollout with max_rollout_turns=1",
    "nemo_rl.experience.rollouts.generate_responses_async": "run_async_multi_turn_rollout with max_rollout_turns=1",
    "nemo_rl.models.generation.megatron": "vLLM is the one engine",
    "nemo_rl.models.generation.sglang": "vLLM is the one engine",
    "nemo_rl.models.policy.interfaces.ColocatablePolicyInterface": "runs move weights themselves (docs/weight_sync.md)",
    "nemo_rl.utils.logger.RayGpuMonitorLogger": "logger.monitor_gpus, whose readings the run collects itself",
    "nemo_rl.weight_sync.interfaces.WeightSynchronizer": "runs move weights themselves (docs/weight_sync.md)",
    "nemo_rl.weight_sync.interfaces.create_weight_synchronizer": "runs move weights themselves (docs/weight_sync.md)",
}


def find(module: str, name: str) -> Any:
    """What a module at one of NeMo-RL's paths has under a name.

    Raises:
        AttributeError: it has no such name, or NeMo-RL's is not here; the message says what to use.
    """
    home = NAMES.get(module, {}).get(name)
    if home is None:
        instead = ABSENT.get(f"{module}.{name}")
        hint = f"; {instead}" if instead else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    path, _, attribute = home.partition(":")
    return getattr(importlib.import_module(path), attribute or name)
