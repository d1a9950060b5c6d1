"""Starts and stops one run's TransferQueue: controller, storage, and Mooncake's master if that is the storage.

Actor names contain the run's id, so runs on one Ray cluster do not collide. Invariant: no process of the system
survives `close` or the death of the process that started it.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane.adapters.guard import Guard
from nemo_rl.data_plane.adapters.mooncake import load_native_libraries, start_master
from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueAddress
from nemo_rl.data_plane.interfaces import DataPlaneError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 120.0


def start_transfer_queue(cfg: DataPlaneConfig) -> tuple[TransferQueueAddress, ExitStack]:
    """Starts a system on this job's Ray cluster.

    Args:
        cfg: The section; `enabled` is not looked at.

    Returns how processes of the run attach, and what ends every process of the system when it is closed. Raises
    DataPlaneError: TransferQueue is not installed, or did not start; MooncakeUnavailableError: the backend is
    mooncake_cpu and Mooncake cannot be loaded.
    """
    import ray

    load_native_libraries()
    try:
        from transfer_queue.controller import TransferQueueController
    except ImportError as error:
        raise DataPlaneError(
            f"data_plane.impl=transfer_queue needs the package transferqueue ({error}), which comes with the "
            "extras cpu and vllm of nemo-rl"
        ) from error
    name = f"nemo_rl.data_plane-{uuid.uuid4().hex[:12]}"
    mooncake = cfg.backend == "mooncake_cpu"
    with ExitStack() as undo:
        guard = Guard.of_cluster()
        overlay = start_master(cfg, undo, one_host=guard.one_host) if mooncake else {}
        actor_class = guard.actor(TransferQueueController)
        from transfer_queue.sampler.sequential_sampler import SequentialSampler

        controller = actor_class.options(name=name, num_cpus=0).remote(
            guard, sampler=SequentialSampler, polling_mode=True
        )
        undo.callback(_kill, controller)
        try:
            config = _configuration(cfg, overlay)
            # All processes start at the same time.
            units: dict[str, ActorHandle[object]] = {} if mooncake else _start_units(cfg, config, name, guard, undo)
            config.controller.zmq_info = ray.get(controller.get_zmq_server_info.remote(), timeout=_START_TIMEOUT_S)
            if units:
                infos = ray.get(
                    [unit.get_zmq_server_info.remote() for unit in units.values()], timeout=_START_TIMEOUT_S
                )
                config.backend.SimpleStorage.zmq_info = dict(zip(units, infos, strict=True))
            endpoint = _start_metrics(cfg, controller, config) if cfg.observability.enabled else ""
            ray.get(controller.store_config.remote(config), timeout=_START_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise DataPlaneError(f"data_plane: TransferQueue did not start: {error}") from error
        timeout_s = DEFAULT_TIMEOUT_S if cfg.ack_timeout_ms is None else cfg.ack_timeout_ms / 1000
        logger.info(
            "data_plane=started backend=%s controller=%s guard=%s metrics=%s",
            cfg.backend,
            name,
            guard,
            endpoint or "off",
        )
        return TransferQueueAddress(name, timeout_s, guard, mooncake), undo.pop_all()


def _configuration(cfg: DataPlaneConfig, overlay: dict[str, object]) -> DictConfig:
    from importlib import resources

    from omegaconf import OmegaConf

    with resources.as_file(resources.files("transfer_queue") / "config.yaml") as path:
        defaults: object = OmegaConf.load(path)
    config: Any = OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults)
    config.controller.polling_mode = True
    config.backend.storage_backend = "MooncakeStore" if cfg.backend == "mooncake_cpu" else "SimpleStorage"
    config.backend.SimpleStorage.total_storage_size = cfg.storage_capacity
    config.backend.SimpleStorage.num_data_storage_units = cfg.num_storage_units
    for key, value in overlay.items():
        config.backend.MooncakeStore[key] = value
    return config


def _start_units(
    cfg: DataPlaneConfig, config: DictConfig, name: str, guard: Guard, undo: ExitStack
) -> dict[str, ActorHandle[object]]:
    """Storage actors by name, spread over the nodes."""
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

    plain = dict(config.backend.SimpleStorage)
    unit_class = guard.actor(SimpleStorageUnit)
    units: dict[str, ActorHandle[object]] = {}
    for rank, strategy in enumerate(get_node_round_robin_scheduling_strategies(cfg.num_storage_units)):
        actor = unit_class.options(name=f"{name}-unit-{rank}", num_cpus=0, scheduling_strategy=strategy).remote(
            guard, config=plain
        )
        undo.callback(_kill, actor)
        units[f"storage unit {rank}"] = actor
    return units


def _start_metrics(cfg: DataPlaneConfig, controller: Any, config: DictConfig) -> str:
    import ray

    endpoint = ray.get(controller.start_metrics.remote(port=0), timeout=_START_TIMEOUT_S)
    if cfg.backend == "simple":
        ray.get(
            controller.register_storage_units_for_metrics.remote(dict(config.backend.SimpleStorage.zmq_info)),
            timeout=_START_TIMEOUT_S,
        )
    return str(endpoint)


def _kill(actor: ActorHandle[object]) -> None:
    import ray

    if ray.is_initialized():
        ray.kill(actor)
