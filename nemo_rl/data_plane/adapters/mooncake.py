"""Mooncake as TransferQueue's storage: its libraries, each process's environment, and a master of the run's own.

Invariants: no other job's master is touched; ours ends with the process that started it, even when that is killed.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane.adapters.guard import LOOPBACK
from nemo_rl.data_plane.interfaces import DataPlaneError, MooncakeUnavailableError
from nemo_rl.distributed.ports import free_ports
from nemo_rl.distributed.processes import OutputTail

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0
# In the order in which they need each other.
_NATIVE = ("libnl-3.so.200", "libnl-route-3.so.200", "libnuma.so.1", "libibverbs.so.1", "librdmacm.so.1")
# The launcher asks the kernel to end it with the process that started it, and then becomes the master.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or "
    "os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
_HINT = (
    "install the Debian packages libibverbs1, librdmacm1 and libnuma1, or let `make mooncake-libs` unpack "
    "them beside the environment; "
    "data_plane.backend=simple needs neither"
)


def native_folder() -> Path:
    """Folder into which `make mooncake-libs` unpacks shared libraries that the system lacks."""
    return Path(os.environ.get("NRL_NATIVE_LIBS", str(Path(sys.prefix) / "native")))


def check_mooncake() -> None:
    """Checks that Mooncake and its master can be loaded. Raises MooncakeUnavailableError: a part is missing."""
    load_mooncake()
    _master_binary()


def load_mooncake() -> None:
    """Loads Mooncake's engine into this process. Raises MooncakeUnavailableError: the package or a shared library is
    missing.
    """
    load_native_libraries()
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        what = (
            "the package mooncake-transfer-engine"
            if isinstance(error, ModuleNotFoundError)
            else "a shared library that it needs"
        )
        raise MooncakeUnavailableError(
            f"data_plane.backend=mooncake_cpu: {what} is missing: {error}; {_HINT}"
        ) from error
    # TransferQueue looks for Mooncake once, when it is imported, which may have been before the libraries were loaded.
    client = sys.modules.get("transfer_queue.storage.clients.mooncake_client")
    if client is not None and not client.MOONCAKE_STORE_IMPORTED:
        importlib.reload(client)


def load_native_libraries() -> None:
    """Loads the shared libraries that Mooncake needs from where they are unpacked."""
    # Read when the engine's library is loaded, and it tells of every step of its start.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    for name in _NATIVE:
        unpacked = native_folder() / name
        if unpacked.exists():
            try:
                ctypes.CDLL(str(unpacked), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                logger.warning("library=%s not_loaded=%s", unpacked, error)


def prepare_process(config: DictConfig) -> None:
    """Sets this process's environment for Mooncake's engine and loads it; must run before the engine starts. Raises
    MooncakeUnavailableError: Mooncake cannot be loaded.
    """
    import ray

    # Forced: actors inherit the driver's environment, and with it the address of another machine.
    one_host = str(config.backend.MooncakeStore.master_server_address).startswith(f"{LOOPBACK}:")
    os.environ["MC_TCP_BIND_ADDRESS"] = LOOPBACK if one_host else announced_address(ray.util.get_node_ip_address())
    # The shortcut for local peers reads other processes' pointers.
    os.environ.setdefault("MC_STORE_MEMCPY", "0")
    # TransferQueue builds jagged tensors, at the first of which torch warns about a function of its own.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    if config.backend.MooncakeStore.protocol == "rdma":
        os.environ.setdefault("MC_GID_INDEX", "3")
    load_mooncake()


def announced_address(address: str) -> str:
    """The address by which peers reach this process; empty for addresses that are valid on this host only."""
    address = address.strip("[]")
    local = address.startswith(("169.254.", "127.", "fe80:")) or address in ("::1", "localhost", "0.0.0.0")
    return "" if local else address


def segment_sizes(cfg: DataPlaneConfig, host_bytes: int) -> tuple[int, int]:
    """Bytes of each process's shared segment and of its buffer: as configured, else a 32nd and a 128th of the host's
    memory, in whole MiB.
    """
    segment = cfg.global_segment_size or max(host_bytes // 32 // _MIB, 256) * _MIB
    buffer = cfg.local_buffer_size or max(host_bytes // 128 // _MIB, 64) * _MIB
    return segment, buffer


def start_master(cfg: DataPlaneConfig, undo: ExitStack, *, one_host: bool) -> dict[str, object]:
    """Starts a master on free ports of this host.

    Args:
        one_host: Whether every process is on this host, and reaches the master on the loopback address.

    Returns what the system's configuration says about Mooncake. Raises MooncakeUnavailableError: Mooncake cannot be
    loaded, or its master cannot be executed; DataPlaneError: the master does not serve.
    """
    import ray

    load_mooncake()
    host = LOOPBACK if one_host else ray.util.get_node_ip_address().strip("[]")
    rpc, metadata, admin = free_ports(3)
    binary = _master_binary()
    command = [
        str(binary),
        f"--rpc_address={host}",
        f"--rpc_port={rpc}",
        f"--metrics_port={admin}",
        f"--metrics_host={host}",
    ]
    command += [
        "--enable_http_metadata_server=true",
        f"--http_metadata_server_host={host}",
        f"--http_metadata_server_port={metadata}",
    ]
    # Rows stay until they are cleared: nothing is evicted, and a lease outlives any step.
    command += [
        "--client_ttl=30",
        "--default_kv_lease_ttl=999999",
        "--default_kv_soft_pin_ttl=999999",
        "--allow_evict_soft_pinned_objects=false",
    ]
    command += ["--eviction_high_watermark_ratio=1.0", "--eviction_ratio=0.0", "--logtostderr=true", "--minloglevel=1"]
    environment = dict(os.environ)
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(
        part for part in (str(native_folder()), environment.get("LD_LIBRARY_PATH", "")) if part
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _LAUNCH, str(os.getpid()), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    undo.callback(_end, process)
    output_tail = OutputTail(process, lambda line: logger.debug("mooncake_master: %s", line))
    _wait_until_serving(process, output_tail, host, (rpc, metadata))
    segment, buffer = segment_sizes(cfg, psutil.virtual_memory().total)
    logger.info(
        "mooncake=started pid=%d rpc=%s:%d segment_bytes=%d buffer_bytes=%d per process",
        process.pid,
        host,
        rpc,
        segment,
        buffer,
    )
    protocol = os.environ.get("MC_MOONCAKE_PROTOCOL", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise DataPlaneError(f"MC_MOONCAKE_PROTOCOL={protocol!r}: choose tcp or rdma")
    return {
        "auto_init": False,
        "metadata_server": f"{host}:{metadata}",
        "master_server_address": f"{host}:{rpc}",
        "local_hostname": "",
        "protocol": protocol,
        "device_name": os.environ.get("MC_MOONCAKE_DEVICE", _first_rdma_device() if protocol == "rdma" else ""),
        "global_segment_size": segment,
        "local_buffer_size": buffer,
        "client_name": "MooncakeStoreClient",
    }


def _master_binary() -> Path:
    package = importlib.import_module("mooncake").__file__
    beside = Path(package).parent / "mooncake_master" if package else Path("mooncake_master")
    found = (
        beside
        if beside.exists()
        else Path(
            shutil.which("mooncake_master", path=sysconfig.get_path("scripts")) or shutil.which("mooncake_master") or ""
        )
    )
    if not found.is_file():
        raise MooncakeUnavailableError(
            f"data_plane.backend=mooncake_cpu: mooncake_master is neither beside the package ({beside}) nor "
            "on PATH; reinstall it"
        )
    if not os.access(found, os.X_OK):
        try:
            found.chmod(found.stat().st_mode | stat.S_IXUSR)
        except OSError as error:
            raise MooncakeUnavailableError(
                f"{found} is not executable and cannot be made so: {error}; run chmod +x on it"
            ) from error
    return found


def _wait_until_serving(
    process: subprocess.Popen[bytes], output_tail: OutputTail, host: str, ports: tuple[int, ...]
) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    for port in ports:
        while True:
            if process.poll() is not None:
                raise MooncakeUnavailableError(f"mooncake_master ended at once {output_tail.of_ended()}\n{_HINT}")
            try:
                with socket.create_connection((host, port), timeout=1.0):
                    break
            except OSError:
                if time.monotonic() > deadline:
                    raise DataPlaneError(
                        f"mooncake_master (pid {process.pid}) does not serve {host}:{port} after "
                        f"{_START_TIMEOUT_S:.0f} s"
                    ) from None
                time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first_rdma_device() -> str:
    """The first Mellanox device with an Ethernet port, as in `MC_MOONCAKE_DEVICE`; empty lets Mooncake choose."""
    for device in sorted(Path("/sys/class/infiniband").glob("mlx5_*")):
        link = device / "ports" / "1" / "link_layer"
        if link.exists() and link.read_text().strip() == "Ethernet":
            return device.name
    return ""
