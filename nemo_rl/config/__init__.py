"""Configuration: schemas, loading, overrides and messages. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.config.async_rl import AsyncRLConfig as AsyncRLConfig
    from nemo_rl.config.async_rl import GenerationFleetHealthConfig as GenerationFleetHealthConfig
    from nemo_rl.config.async_rl import GenerationRouterConfig as GenerationRouterConfig
    from nemo_rl.config.async_rl import GymTimeoutsConfig as GymTimeoutsConfig
    from nemo_rl.config.async_rl import NativeTimeoutsConfig as NativeTimeoutsConfig
    from nemo_rl.config.async_rl import OnPolicyDistillationConfig as OnPolicyDistillationConfig
    from nemo_rl.config.async_rl import RolloutFailureConfig as RolloutFailureConfig
    from nemo_rl.config.async_rl import SamplerConfig as SamplerConfig
    from nemo_rl.config.async_rl import StallWatchdogConfig as StallWatchdogConfig
    from nemo_rl.config.checkpointing import CheckpointingConfig as CheckpointingConfig
    from nemo_rl.config.cluster import ClusterConfig as ClusterConfig
    from nemo_rl.config.data import DataConfig as DataConfig
    from nemo_rl.config.data import DatasetConfig as DatasetConfig
    from nemo_rl.config.data import DatasetDefaults as DatasetDefaults
    from nemo_rl.config.data_plane import DataPlaneConfig as DataPlaneConfig
    from nemo_rl.config.data_plane import ObservabilityConfig as ObservabilityConfig
    from nemo_rl.config.env import CodeEnvConfig as CodeEnvConfig
    from nemo_rl.config.env import CodeJaccardEnvConfig as CodeJaccardEnvConfig
    from nemo_rl.config.env import EnvConfig as EnvConfig
    from nemo_rl.config.env import EnvironmentConfig as EnvironmentConfig
    from nemo_rl.config.env import MathEnvConfig as MathEnvConfig
    from nemo_rl.config.env import ReasoningGymEnvConfig as ReasoningGymEnvConfig
    from nemo_rl.config.env import SlidingPuzzleEnvConfig as SlidingPuzzleEnvConfig
    from nemo_rl.config.env import UserEnvironmentConfig as UserEnvironmentConfig
    from nemo_rl.config.errors import ConfigError as ConfigError
    from nemo_rl.config.errors import OverridesError as OverridesError
    from nemo_rl.config.evaluation import EvalMasterConfig as EvalMasterConfig
    from nemo_rl.config.generation import ColocatedConfig as ColocatedConfig
    from nemo_rl.config.generation import ColocatedResourcesConfig as ColocatedResourcesConfig
    from nemo_rl.config.generation import GenerationConfig as GenerationConfig
    from nemo_rl.config.generation import McoreGenerationConfig as McoreGenerationConfig
    from nemo_rl.config.generation import RefitConfig as RefitConfig
    from nemo_rl.config.generation import VllmConfig as VllmConfig
    from nemo_rl.config.grpo import AdvEstimatorConfig as AdvEstimatorConfig
    from nemo_rl.config.grpo import AsyncGRPOConfig as AsyncGRPOConfig
    from nemo_rl.config.grpo import GRPOConfig as GRPOConfig
    from nemo_rl.config.grpo import PenaltyTokenIdsConfig as PenaltyTokenIdsConfig
    from nemo_rl.config.grpo import RewardPenaltiesConfig as RewardPenaltiesConfig
    from nemo_rl.config.grpo import RewardScalingConfig as RewardScalingConfig
    from nemo_rl.config.grpo import RewardShapingConfig as RewardShapingConfig
    from nemo_rl.config.load import load_config as load_config
    from nemo_rl.config.load import load_master_config as load_master_config
    from nemo_rl.config.logger import GpuMonitoringConfig as GpuMonitoringConfig
    from nemo_rl.config.logger import LoggerConfig as LoggerConfig
    from nemo_rl.config.logger import MlflowConfig as MlflowConfig
    from nemo_rl.config.logger import SwanlabConfig as SwanlabConfig
    from nemo_rl.config.logger import WandbConfig as WandbConfig
    from nemo_rl.config.loss import ClippedPGLossConfig as ClippedPGLossConfig
    from nemo_rl.config.master import MasterConfig as MasterConfig
    from nemo_rl.config.master import RootConfig as RootConfig
    from nemo_rl.config.master import SFTMasterConfig as SFTMasterConfig
    from nemo_rl.config.megatron import MegatronCheckpointConfig as MegatronCheckpointConfig
    from nemo_rl.config.megatron import MegatronConfig as MegatronConfig
    from nemo_rl.config.megatron import MegatronDDPConfig as MegatronDDPConfig
    from nemo_rl.config.megatron import MegatronFp8Config as MegatronFp8Config
    from nemo_rl.config.megatron import MegatronOptimizerConfig as MegatronOptimizerConfig
    from nemo_rl.config.megatron import MegatronPeftConfig as MegatronPeftConfig
    from nemo_rl.config.megatron import MegatronSchedulerConfig as MegatronSchedulerConfig
    from nemo_rl.config.overrides import parse_hydra_overrides as parse_hydra_overrides
    from nemo_rl.config.placement import cluster_world_size as cluster_world_size
    from nemo_rl.config.placement import data_parallel_size as data_parallel_size
    from nemo_rl.config.placement import generation_world_size as generation_world_size
    from nemo_rl.config.placement import model_parallel_size as model_parallel_size
    from nemo_rl.config.placement import training_world_size as training_world_size
    from nemo_rl.config.policy import DraftConfig as DraftConfig
    from nemo_rl.config.policy import DTensorConfig as DTensorConfig
    from nemo_rl.config.policy import DynamicBatchingConfig as DynamicBatchingConfig
    from nemo_rl.config.policy import LoraConfig as LoraConfig
    from nemo_rl.config.policy import OptimizerConfig as OptimizerConfig
    from nemo_rl.config.policy import PolicyConfig as PolicyConfig
    from nemo_rl.config.policy import RewardModelConfig as RewardModelConfig
    from nemo_rl.config.policy import RouterReplayConfig as RouterReplayConfig
    from nemo_rl.config.policy import SchedulerConfig as SchedulerConfig
    from nemo_rl.config.policy import SequencePackingConfig as SequencePackingConfig
    from nemo_rl.config.policy import TokenizerConfig as TokenizerConfig
    from nemo_rl.config.resolvers import register_omegaconf_resolvers as register_omegaconf_resolvers
    from nemo_rl.config.section import DefaultFrom as DefaultFrom
    from nemo_rl.config.section import NotYet as NotYet
    from nemo_rl.config.section import Section as Section
    from nemo_rl.config.sft import SFTConfig as SFTConfig
    from nemo_rl.config.validate import check_config as check_config
    from nemo_rl.config.validate import validate as validate
    from nemo_rl.config.weight_sync import WeightSyncConfig as WeightSyncConfig

_NAMES = {
    "nemo_rl.config.async_rl": (
        "AsyncRLConfig",
        "GenerationFleetHealthConfig",
        "GenerationRouterConfig",
        "GymTimeoutsConfig",
        "NativeTimeoutsConfig",
        "OnPolicyDistillationConfig",
        "RolloutFailureConfig",
        "SamplerConfig",
        "StallWatchdogConfig",
    ),
    "nemo_rl.config.checkpointing": ("CheckpointingConfig",),
    "nemo_rl.config.cluster": ("ClusterConfig",),
    "nemo_rl.config.data": (
        "DataConfig",
        "DatasetConfig",
        "DatasetDefaults",
    ),
    "nemo_rl.config.data_plane": (
        "DataPlaneConfig",
        "ObservabilityConfig",
    ),
    "nemo_rl.config.env": (
        "CodeEnvConfig",
        "CodeJaccardEnvConfig",
        "EnvConfig",
        "EnvironmentConfig",
        "MathEnvConfig",
        "ReasoningGymEnvConfig",
        "SlidingPuzzleEnvConfig",
        "UserEnvironmentConfig",
    ),
    "nemo_rl.config.errors": (
        "ConfigError",
        "OverridesError",
    ),
    "nemo_rl.config.evaluation": ("EvalMasterConfig",),
    "nemo_rl.config.generation": (
        "ColocatedConfig",
        "ColocatedResourcesConfig",
        "GenerationConfig",
        "McoreGenerationConfig",
        "RefitConfig",
        "VllmConfig",
    ),
    "nemo_rl.config.grpo": (
        "AdvEstimatorConfig",
        "AsyncGRPOConfig",
        "GRPOConfig",
        "PenaltyTokenIdsConfig",
        "RewardPenaltiesConfig",
        "RewardScalingConfig",
        "RewardShapingConfig",
    ),
    "nemo_rl.config.load": (
        "load_config",
        "load_master_config",
    ),
    "nemo_rl.config.logger": (
        "GpuMonitoringConfig",
        "LoggerConfig",
        "MlflowConfig",
        "SwanlabConfig",
        "WandbConfig",
    ),
    "nemo_rl.config.loss": ("ClippedPGLossConfig",),
    "nemo_rl.config.master": (
        "MasterConfig",
        "RootConfig",
        "SFTMasterConfig",
    ),
    "nemo_rl.config.megatron": (
        "MegatronCheckpointConfig",
        "MegatronConfig",
        "MegatronDDPConfig",
        "MegatronFp8Config",
        "MegatronOptimizerConfig",
        "MegatronPeftConfig",
        "MegatronSchedulerConfig",
    ),
    "nemo_rl.config.overrides": ("parse_hydra_overrides",),
    "nemo_rl.config.placement": (
        "cluster_world_size",
        "data_parallel_size",
        "generation_world_size",
        "model_parallel_size",
        "training_world_size",
    ),
    "nemo_rl.config.policy": (
        "DTensorConfig",
        "DraftConfig",
        "DynamicBatchingConfig",
        "LoraConfig",
        "OptimizerConfig",
        "PolicyConfig",
        "RewardModelConfig",
        "RouterReplayConfig",
        "SchedulerConfig",
        "SequencePackingConfig",
        "TokenizerConfig",
    ),
    "nemo_rl.config.resolvers": ("register_omegaconf_resolvers",),
    "nemo_rl.config.section": (
        "DefaultFrom",
        "NotYet",
        "Section",
    ),
    "nemo_rl.config.sft": ("SFTConfig",),
    "nemo_rl.config.validate": (
        "check_config",
        "validate",
    ),
    "nemo_rl.config.weight_sync": ("WeightSyncConfig",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
