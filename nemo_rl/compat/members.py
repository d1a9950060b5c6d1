"""What is known by a name without a module: members of NeMo-RL's classes that are not here, and the names that control
planes of several pipelines use, with where each is.

Read by the page for NeMo-RL's users and its test. Invariant: a home, written `module:name.member`, exists.
"""

from __future__ import annotations

_SESSIONS = "weights travel in sync sessions (docs/weight_sync.md)"
_STATS = "VllmGeneration.engine_metrics()"
_FP8 = "fp8 is not built"

# Members of classes that are here without them.
ABSENT_MEMBERS: dict[str, str] = {
    "nemo_rl.distributed.batched_data_dict.BatchedDataDict.get_multimodal_dict": "vision-language and audio models are "
    "not built",
    "nemo_rl.distributed.batched_data_dict.PackedTensor": "vision-language and audio models are not built",
    "nemo_rl.distributed.virtual_cluster.RayVirtualCluster.get_available_addresses_and_ports_batch": "ask "
    "get_master_address_and_port() once for each",
    "nemo_rl.models.policy.interfaces.PolicyInterface.calibrate_qkv_fp8_scales": _FP8,
    "nemo_rl.models.policy.lm_policy.Policy.generate": "vLLM generates: VllmGeneration.generate(data)",
    "nemo_rl.models.policy.lm_policy.Policy.score": "reward models are not built",
    "nemo_rl.models.policy.lm_policy.Policy.init_collective": _SESSIONS,
    "nemo_rl.models.policy.lm_policy.Policy.stream_weights_via_ipc_zmq": _SESSIONS,
    "nemo_rl.models.policy.lm_policy.Policy.stream_weights_via_http": _SESSIONS,
    "nemo_rl.models.policy.lm_policy.Policy.broadcast_weights_for_collective": _SESSIONS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.init_collective": _SESSIONS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.prepare_refit_info": _SESSIONS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.update_weights_via_ipc_zmq": _SESSIONS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.update_weights_from_collective": _SESSIONS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.invalidate_kv_cache": "VllmGeneration has it",
    "nemo_rl.models.generation.interfaces.GenerationInterface.blocks_training": "policy.generation.colocated.enabled",
    "nemo_rl.models.generation.interfaces.GenerationInterface.wake_carries_weight_updates": "never; an engine that "
    "slept at level 2 is synced when it wakes",
    "nemo_rl.models.generation.interfaces.GenerationInterface.get_logger_metrics": _STATS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.clear_logger_metrics": f"{_STATS}, which forgets them",
    "nemo_rl.models.generation.interfaces.GenerationInterface.get_step_metrics": _STATS,
    "nemo_rl.models.generation.interfaces.GenerationInterface.snapshot_step_metrics": f"{_STATS}, which forgets them",
    "nemo_rl.models.generation.interfaces.GenerationInterface.requires_kv_scale_sync": _FP8,
    "nemo_rl.models.generation.vllm.VllmGeneration.generate_text": "generate(data), and the tokenizer",
    "nemo_rl.models.generation.vllm.VllmGeneration.generate_text_async": "generate_async(data), and the tokenizer",
}

_HOOKS = "nemo_rl.experience.hooks:RLixHooksProtocol"
_ENGINES = "nemo_rl.models.generation.vllm.vllm_generation:VllmGeneration"
_ENGINE_ACTOR = "nemo_rl.models.generation.vllm.worker:VllmGenerationWorker"
_RECEIVER = "nemo_rl.models.generation.vllm.receiver_methods:ReceiverMethods"
_POLICY = "nemo_rl.models.policy.lm_policy:Policy"
_POOL = "nemo_rl.time_sharing.agents.actors:Orchestrator"
_CACHE = "`PolicyWeightCache.build(version)` swaps bytes and version together"
_MAPPING = "`Job.topology(pool)` checks the mappings (`nemo_rl.time_sharing.protocol.topology`)"
_JOB = "`python -m nemo_rl.time_sharing submit FILE` reads, checks and registers a file (`read_jobs`)"

# Names of control planes: their home, or in words what there is instead.
CONTROL_PLANE: dict[str, str] = {
    "RLIX_CONTROL_PLANE": "nemo_rl.experience.hooks:CONTROL_PLANE_VARIABLE",
    "DO_TIME_SHARING": "nemo_rl.experience.hooks:time_sharing_enabled",
    "PIPELINE_ID": "no variable; `exp_name` of a job's file names it, and `allocate_pipeline_id` where a driver does",
    "RLixHooksProtocol": _HOOKS,
    "NoOpRLixHooks": "nemo_rl.experience.hooks:NoOpRLixHooks",
    **{
        name: f"{_HOOKS}.{name}"
        for name in (
            "on_trajectory_collector_created",
            "before_training",
            "before_weight_sync",
            "after_training",
            "begin_progress_batch",
            "end_progress_batch",
            "report_progress",
            "clear_progress",
        )
    },
    "async_grpo_train": "nemo_rl.algorithms.grpo:async_grpo_train",
    **{
        name: f"{_ENGINES}.{name}"
        for name in (
            "sleep_partial",
            "wake_up_partial",
            "mark_dp_ranks_inactive",
            "activate_dp_ranks",
            "get_model_update_receiver",
        )
    },
    "ShardPreemptedError": "nemo_rl.models.generation.interfaces:ShardPreemptedError",
    "run_on_dp_shard_leaders": "one actor leads each shard: `VllmGeneration.shards.call(dp_ranks, method, "
    "timeout_s=...)`",
    **{name: f"{_ENGINE_ACTOR}.{name}" for name in ("abort_all_requests", "is_idle", "rlix_model_update_rpc")},
    "VllmInternalWorkerExtension": "nemo_rl.models.generation.vllm.extension:VllmInternalWorkerExtension",
    **{
        name: f"{_RECEIVER}.{name}"
        for name in (
            "setup_collective_group",
            "update_parameter_in_bucket",
            "broadcast_parameter",
            "destroy_collective_group",
            "finalize_weight_update",
            "verify_model",
        )
    },
    "build_cpu_bucket_cache": "nemo_rl.models.policy.worker:PolicyWorker.build_cpu_bucket_cache",
    "offload_training_gpu": f"{_POLICY}.offload_training_gpu",
    "destroy_nccl_groups": f"{_POLICY}.destroy_nccl_groups",
    "destroy_megatron_nccl_groups": "`Policy.destroy_nccl_groups()`, for both backends",
    "selective_sync_active_cache": "`ElasticGeneration.refresh(dp_ranks)`",
    "build_latest": _CACHE,
    "promote": _CACHE,
    "cache_ready_step": "`PolicyWeightCache.version`",
    "bucket record": "`update_parameter_in_bucket` takes `param_names`, `shapes`, `dtypes`, `offsets`, `used_bytes` "
    "and `cpu_uint8_bucket`",
    "sync_selected_workers": "nemo_rl.models.generation.elastic:ElasticGeneration.sync_selected_workers",
    "cuda_ipc": "nemo_rl.weight_sync.transports.cuda_ipc",
    "cpu_serialize": "`model_update_transport` of `update_parameter_in_bucket`; sessions have `host`",
    "NCCL broadcast": "nemo_rl.weight_sync.transports.nccl",
    "create_pipeline_actor": "nemo_rl.time_sharing.pool:PoolActor.create_pipeline_actor",
    "resize_infer": "nemo_rl.models.generation.elastic:ElasticGeneration.resize_infer",
    "sync_base_weights_to_active": "`ElasticGeneration.refresh()`",
    "sync_lora_weights": "`policy.dtensor_cfg.lora_cfg.sync: adapter`: a refit sends the run's one adapter",
    "report_progress_from_scheduler": "an agent reports to the scheduler itself (`Agent.report_progress`)",
    "clear_progress_stream": "`Agent.end_progress()`; adapters have no progress of their own",
    **{
        name: f"{_POOL}.{name}"
        for name in ("allocate_pipeline_id", "register_pipeline", "admit_pipeline", "unregister_pipeline")
    },
    "NemoRLFullFinetunePipeline": "nemo_rl.time_sharing.pipelines.grpo:NemoRLFullFinetunePipeline",
    "NemoRLRLixHooks": "`LentAccelerators` (`nemo_rl.time_sharing.pipelines.lent`), a control plane of the step loop",
    "_expand_workers": "nemo_rl.models.generation.elastic:ElasticGeneration.expand",
    "_shrink_workers": "nemo_rl.models.generation.elastic:ElasticGeneration.shrink",
    "set_weight_version": "nemo_rl.experience.trajectory_collector:TrajectoryCollector.set_weight_version",
    "count_intended_for_step": "nemo_rl.experience.replay_buffer:ReplayBuffer.count_intended_for_step",
    "RLixVirtualClusterAdapter": "nemo_rl.time_sharing.pipelines.shared_cluster:SharedCluster",
    "validate_partial_overlap_topology": _MAPPING,
    "extract_topology_validation_inputs": "`Job.widths()` and `Job.mappings()`",
    "build_cluster_registry_inputs": "`Job.widths()` and `Job.mappings()`",
    "detect_pipeline_type": "nemo_rl.time_sharing.pipelines.job:Job.kind",
    "register_nemo_rl_pipeline": _JOB,
}
