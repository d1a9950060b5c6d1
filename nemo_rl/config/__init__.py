"""Configuration: schemas, loading, overrides and messages."""

from nemo_rl.config.algorithms import (
    AdvEstimatorConfig,
    AsyncGRPOConfig,
    ClippedPGLossConfig,
    GRPOConfig,
    PenaltyTokenIdsConfig,
    RewardPenaltiesConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    SFTConfig,
)
from nemo_rl.config.async_rl import (
    AsyncRLConfig,
    GenerationFleetHealthConfig,
    GenerationRouterConfig,
    GymTimeoutsConfig,
    NativeTimeoutsConfig,
    RolloutFailureConfig,
    SamplerConfig,
    StallWatchdogConfig,
)
from nemo_rl.config.data import DataConfig, DatasetConfig, DatasetDefaults
from nemo_rl.config.defaults import register_omegaconf_resolvers
from nemo_rl.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    OnPolicyDistillationConfig,
    TeacherConfig,
)
from nemo_rl.config.env import (
    CodeEnvConfig,
    CodeJaccardEnvConfig,
    CodeTestsEnvConfig,
    EnvConfig,
    EnvironmentConfig,
    MathEnvConfig,
    ReasoningGymEnvConfig,
    SlidingPuzzleEnvConfig,
    UserEnvironmentConfig,
)
from nemo_rl.config.errors import ConfigError, OverridesError
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.generation import (
    ColocatedConfig,
    ColocatedResourcesConfig,
    GenerationConfig,
    McoreGenerationConfig,
    RefitConfig,
    VllmConfig,
)
from nemo_rl.config.infrastructure import (
    CheckpointingConfig,
    ClusterConfig,
    DataPlaneConfig,
    GpuMonitoringConfig,
    LoggerConfig,
    MlflowConfig,
    ObservabilityConfig,
    SwanlabConfig,
    WandbConfig,
    WeightSyncConfig,
)
from nemo_rl.config.load import load_config, load_master_config
from nemo_rl.config.master import (
    DistillationMasterConfig,
    MasterConfig,
    MultiLoraConfig,
    MultiLoraMasterConfig,
    RootConfig,
    SFTMasterConfig,
)
from nemo_rl.config.megatron import (
    MegatronCheckpointConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronFp8Config,
    MegatronOptimizerConfig,
    MegatronPeftConfig,
    MegatronSchedulerConfig,
)
from nemo_rl.config.overrides import parse_hydra_overrides
from nemo_rl.config.policy import (
    DraftConfig,
    DTensorConfig,
    DynamicBatchingConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardModelConfig,
    RouterReplayConfig,
    SchedulerConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from nemo_rl.config.section import DefaultFrom, NotYet, Section
from nemo_rl.config.validate import check_config
from nemo_rl.config.world_sizes import (
    cluster_world_size,
    data_parallel_size,
    generation_world_size,
    model_parallel_size,
    training_world_size,
)
