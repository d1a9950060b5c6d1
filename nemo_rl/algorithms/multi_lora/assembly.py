"""Builds what the adapters of a job share: slots of accelerators, the frozen base model, and engines.

Training and engines keep their memory side by side on shared accelerators: adapters train while others generate.
Invariant: if a step fails, everything built before is shut down.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.algorithms.grpo.assembly import check_model
from nemo_rl.algorithms.grpo.step_reports import DeviceCount
from nemo_rl.algorithms.multi_lora.adapter_run import Shared
from nemo_rl.algorithms.multi_lora.engines import AdapterEngines
from nemo_rl.algorithms.multi_lora.passes import SharedPasses
from nemo_rl.algorithms.placement import OwnPlacement, check_device, check_policy
from nemo_rl.algorithms.profiling import profile_of_run
from nemo_rl.algorithms.startup import check_tokens, import_transformers
from nemo_rl.config.errors import UserError
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.multi_lora import AdapterConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora import memory
from nemo_rl.models.multi_lora.engine import LAYERS as ENGINE_LAYERS
from nemo_rl.models.multi_lora.engine import WORKER as ENGINE_WORKER
from nemo_rl.models.multi_lora.multi_lora_policy import WORKER as POLICY_WORKER
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.models.policy.lm_policy import start_policy_actors
from nemo_rl.models.policy.model_config import UnsupportedModelError, number_of_experts
from nemo_rl.utils.progress import StartPhases

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.config.nsight_variables import Profile
    from nemo_rl.data.model_tokens import StopTokens
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster


_GIB = 1 << 30


def check_base(config: MultiLoraMasterConfig) -> PretrainedConfig:
    """Checks the base without loading weights; returns the model's configuration. Raises UnsupportedModelError: a layer
    that is named does not exist, the rank is larger than engines take, or the model is a mixture of experts; for others
    see `grpo.assembly.check_model`.
    """
    model = check_model(config)
    rank = config.policy.dtensor_cfg.lora_cfg.dim
    if rank > memory.ENGINE_RANKS[-1]:
        raise UnsupportedModelError(
            f"policy.dtensor_cfg.lora_cfg.dim is {rank}, and vLLM takes adapters up to rank {memory.ENGINE_RANKS[-1]}"
        )
    if number_of_experts(model):
        raise UnsupportedModelError(
            f"{config.policy.model_name} is a mixture of experts: which tokens reach an expert is not known from the "
            "row, so that its layers cannot tell adapters apart; train each adapter as a run of its own"
        )
    return model


def check_layers(adapter: AdapterConfig) -> None:
    """Checks an adapter against the model; loads no weights. Raises UnsupportedModelError: it names layers that do not
    exist; for others see `placement.check_policy`.
    """
    try:
        check_policy(adapter.config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{adapter.source}: {error}") from error


def with_adapters(config: MultiLoraMasterConfig) -> MultiLoraMasterConfig:
    """The base's configuration with engines that take adapters; what the user put into `vllm_kwargs` wins."""
    config = config.model_copy(deep=True)
    generation, slots = config.policy.generation, config.multi_lora.slots
    rank = config.policy.dtensor_cfg.lora_cfg.dim
    generation.vllm_kwargs = {
        "enable_lora": True,
        "max_loras": slots,
        # Requests of the version before may still run when a new one comes.
        "max_cpu_loras": 2 * slots,
        "max_lora_rank": memory.engine_rank(rank),
        **generation.vllm_kwargs,
    }
    # The base's weights are the files'; nothing would send them again after a deeper sleep.
    generation.vllm_cfg.sleep_level = 1
    return config


class DeviceBytes(NamedTuple):
    """Device memory on each GPU, bytes."""

    engines: int
    trainer: int


class NoRoomForAdapters(UserError, RuntimeError):
    """Training has no room for as many adapters as there are slots."""


def _check_room(config: MultiLoraMasterConfig, free: int) -> None:
    """Whether every slot can be filled, so that one that joins later does not end the others."""
    needed, slots = memory.trainer_bytes(config), config.multi_lora.slots
    if needed > free:
        raise NoRoomForAdapters(
            f"multi_lora.slots={slots}: training of so many adapters takes {needed / _GIB:.1f} GiB, and beside engines "
            f"and base {free / _GIB:.1f} GiB of a GPU are free; lower "
            "policy.generation.vllm_cfg.gpu_memory_utilization, or slots"
        )


@contextmanager
def shared_parts(
    config: MultiLoraMasterConfig,
    start: StartPhases,
    adapters: Sequence[AdapterConfig] = (),
    device_bytes: DeviceBytes | None = None,
) -> Generator[Shared]:
    """Context manager with the parts that adapters share, up and running.

    Args:
        adapters: Those that will join first; they are checked before anything starts.
        device_bytes: Memory of each GPU that they may take, where other jobs use it too; None for all.

    For errors see `check_base`; WorkerError: the policy or an engine did not start; NoRoomForAdapters: the GPUs cannot
    hold as many adapters as there are slots.
    """
    config, placement = with_adapters(config), OwnPlacement()
    with ExitStack() as stack:
        with start.phase("base model and tokenizer"):
            tokenizer, ends = _checked_base(config, adapters, start)
        with start.phase("Ray"):
            stack.callback(placement.disconnect)
            accelerator = placement.connect(config)
            check_device(config, accelerator)
            clusters = placement.reserve(config, accelerator)
            for cluster in clusters.distinct():
                stack.callback(cluster.shutdown)
        stack.callback(collect_actor_logs, Path(config.logger.log_dir) / "actors")
        if clusters.generation is None:
            raise RuntimeError("adapters need engines")
        if device_bytes is not None:
            clusters.generation.slot_bytes = device_bytes.engines - memory.engine_bytes(config)
        profile = profile_of_run()
        with start.phase("engines"):
            generation = _start_engines(config, clusters.generation, tokenizer, ends, profile)
            stack.callback(generation.shutdown)
            if accelerator.is_cuda:
                # An engine takes its share of the memory that is free; training takes its own afterwards.
                generation.wait_until_started()
        with start.phase("policy"):
            if device_bytes is not None:
                clusters.training.slot_bytes = device_bytes.trainer
            workers = start_policy_actors(
                clusters.training,
                config.policy,
                init_reference_model=False,
                worker_extension_cls_fqn=POLICY_WORKER,
                profile=profile,
            )
            policy = MultiLoraPolicy(clusters.training, config.policy, tokenizer, actors=workers)
            stack.callback(policy.shutdown)
            policy.wait_until_started()
            generation.wait_until_started()
            if accelerator.is_cuda:
                _check_room(config, policy.free_bytes())
        engines = AdapterEngines(generation, policy)
        stack.callback(engines.close)
        passes = SharedPasses(policy, config.multi_lora)
        stack.callback(passes.close)
        slots = [cluster.world_size() for cluster in clusters.distinct()]
        yield Shared(
            policy,
            engines,
            passes,
            accelerator,
            clusters.distinct(),
            DeviceCount(sum(slots), clusters.training.world_size(), clusters.generation.world_size()),
        )


def _checked_base(
    config: MultiLoraMasterConfig, adapters: Sequence[AdapterConfig], start: StartPhases
) -> tuple[PreTrainedTokenizerBase, StopTokens]:
    """Checks the base and the first adapters, without their weights; returns the tokenizer and what ends a response."""
    import_transformers()
    model = check_base(config)
    for adapter in adapters:
        check_layers(adapter)
    # Engines compute nothing for layers that no adapter has, such as the output layer.
    config.policy.generation.vllm_kwargs.setdefault(ENGINE_LAYERS, memory.layer_kinds(config.policy))
    tokenizer = get_tokenizer(config.policy.tokenizer, trust_remote_code=config.policy.trust_remote_code)
    return tokenizer, check_tokens(config.policy, model, tokenizer, start.say)


def _start_engines(
    config: MultiLoraMasterConfig,
    cluster: RayVirtualCluster,
    tokenizer: PreTrainedTokenizerBase,
    ends: StopTokens,
    profile: Profile | None,
) -> VllmGeneration:
    """Starts the engines that all adapters share; does not wait for them."""
    actors = start_engine_actors(
        cluster,
        config.policy,
        config.cluster,
        seed=config.grpo.seed,
        colocated=False,
        refits=False,
        profile=profile,
        worker=ENGINE_WORKER,
    )
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=list(ends.ids),
        request_timeout_s=request_timeout_s(),
    )
