"""Builds the client of a `data_plane` section; the only place that lists implementations and backends.

The driver starts the system, other processes attach. Invariant: no configuration gives a client that stores nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.observability import MetricsDataPlaneClient, log_event

if TYPE_CHECKING:
    from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueAddress

logger = logging.getLogger(__name__)

_IMPLEMENTATIONS = ("transfer_queue",)
_BACKENDS = ("simple", "mooncake_cpu")


def check_data_plane(cfg: DataPlaneConfig) -> None:
    """Checks the storage's requirements on this host before anything is started. Raises MooncakeUnavailableError."""
    if cfg.enabled and cfg.backend == "mooncake_cpu":
        from nemo_rl.data_plane.adapters.mooncake import check_mooncake

        check_mooncake()


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, object] | None,
    *,
    bootstrap: bool = True,
    address: TransferQueueAddress | None = None,
) -> DataPlaneClient:
    """A client of the data plane.

    Args:
        cfg: The `data_plane` section, or a plain mapping.
        bootstrap: Start the system: once per run, on the driver. The client then owns it and ends it when closed;
            pickled copies attach to it and own nothing.
        address: Where to attach when not bootstrapping.

    Raises ValueError: the section is absent, disabled, or names something unknown; or there is nothing to attach to;
    DataPlaneError: the system did not start.
    """
    cfg = None if cfg is None else DataPlaneConfig.read(cfg)
    if cfg is None or not cfg.enabled:
        raise ValueError(
            "data_plane is disabled: set data_plane.enabled=true, or run GRPO with rollouts in the driver, "
            "which needs no data plane"
        )
    if cfg.impl not in _IMPLEMENTATIONS:
        raise ValueError(f"unknown data_plane.impl={cfg.impl!r}; there are {', '.join(_IMPLEMENTATIONS)}")
    if cfg.backend not in _BACKENDS:
        raise ValueError(f"unknown data_plane.backend={cfg.backend!r}; there are {', '.join(_BACKENDS)}")
    on_close = None
    if bootstrap:
        from nemo_rl.data_plane.adapters.system import start_transfer_queue

        address, undo = start_transfer_queue(cfg)
        on_close = undo.close
    if address is None:
        raise ValueError(
            "attaching to a data plane (bootstrap=False) needs the address of the client that started it; or "
            "pass that client on, it pickles"
        )
    client = StoredClient(
        address.connect, poll_s=cfg.claim_meta_poll_interval_s, full_wait_s=cfg.full_wait_s, on_close=on_close
    )
    if not cfg.observability.enabled:
        return client
    counted = MetricsDataPlaneClient(client, on_event=log_event)
    if bootstrap:
        served = counted.serve_metrics(host=cfg.observability.host, token=cfg.observability.token)
        logger.info("data_plane=metrics driver=http://%s/metrics", served)
    return counted
