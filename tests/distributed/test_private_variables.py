"""Secrets reach a job's processes and no place that other users of the machine can read."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import worker

from nemo_rl.distributed.private_variables import KEYS, is_private, of_a_command, without_private
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.time_sharing.pool_jobs import variables_of
from nemo_rl.utils.files import NotPrivate, users_directory
from tests.time_sharing.test_jobs import GRPO, only


@ray.remote(num_cpus=0)
class Parent:
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def variables_of_child(self, env: dict[str, str], *names: str) -> list[str | None]:
        child: Any = Parent.options(runtime_env={"env_vars": without_private(env)}).remote()
        return [ray.get(child.variable.remote(name)) for name in names]


class Told:
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def session() -> Path:
    node: Any = worker._global_node
    return Path(node.get_session_dir_path())


@contextmanager
def command_lines(secret: str) -> Iterator[list[bytes]]:
    """Command lines with the secret in them that were seen inside the block: any user can read them."""
    seen: list[bytes] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    line = path.read_bytes()
                    if secret.encode() in line:
                        seen.append(line)
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def files_with(secret: str) -> list[str]:
    found = []
    for path in session().rglob("*"):
        with suppress(OSError):
            if path.is_file() and secret.encode() in path.read_bytes():
                found.append(str(path))
    return found


@pytest.mark.ray
def test_a_jobs_variables_reach_its_workers_and_no_log_and_no_command_line(ray_session: None) -> None:
    secret, other = f"hf_{secrets.token_hex(16)}", f"key_{secrets.token_hex(16)}"
    job = replace(only(GRPO), env={"HF_TOKEN": secret, "MODE": "fast", "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    with command_lines(secret) as lines, command_lines(other) as other_lines:
        given = without_private(variables_of(job))
        parent: Any = Parent.options(runtime_env={"env_vars": given}).remote()
        assert (
            ray.get(parent.variable.remote("HF_TOKEN")) == secret and ray.get(parent.variable.remote("MODE")) == "fast"
        )
        # A worker of the job has variables of its own and those of the job.
        own = {"WANDB_API_KEY": other, "RANK": "1"}
        told = ray.get(parent.variables_of_child.remote(own, "HF_TOKEN", "WANDB_API_KEY"))
        assert told == [secret, other]
    ray.kill(parent)
    assert lines == [] and other_lines == []
    assert files_with(secret) == [] and files_with(other) == []
    assert KEYS in given and secret not in str(given)
    # A command of the job may start a Ray cluster of its own, whose workers would ask that for them.
    assert KEYS not in (of_command := of_a_command({**given, "HF_TOKEN": secret})) and of_command["HF_TOKEN"] == secret


@pytest.mark.ray
def test_variables_that_a_configuration_gives_workers_are_private_too(ray_session: None) -> None:
    secret = f"key_{secrets.token_hex(16)}"
    cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=1, name="told")
    with command_lines(secret) as lines:
        builder = RayWorkerBuilder(f"{__name__}.Told")
        group = RayWorkerGroup(cluster, builder, env_vars={"SERVICE_KEY": secret, "OMP_NUM_THREADS": "3"})
        read = [group.run("variable", name=name)[0] for name in ("SERVICE_KEY", "OMP_NUM_THREADS")]
        assert read == [secret, "3"]
    group.shutdown()
    cluster.shutdown()
    assert lines == [] and files_with(secret) == []


@pytest.mark.ray
def test_no_other_user_reaches_the_folder_of_a_cluster_of_ours(ray_session: None) -> None:
    """It has logs, sockets and the workers' code, which Ray lets everybody write."""
    assert any(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in session().parents)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    mine = users_directory(str(tmp_path))
    assert users_directory(str(tmp_path)) == mine and stat.S_IMODE(mine.stat().st_mode) == 0o700
    mine.chmod(0o755)
    with pytest.raises(NotPrivate, match="mode 0700"):
        users_directory(str(tmp_path))
    mine.rmdir()
    mine.symlink_to(tmp_path)
    with pytest.raises(NotPrivate, match="mode 0700"):
        users_directory(str(tmp_path))


def test_what_a_process_reads_at_its_start_is_there_at_its_start() -> None:
    at_start = "PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NCCL_DEBUG RAY_DEDUP_LOGS"
    assert [name for name in at_start.split() if is_private(name)] == []
    secret = "HF_TOKEN WANDB_API_KEY RAY_AUTH_TOKEN VLLM_API_KEY MY_PASSWORD AWS_SECRET_ACCESS_KEY ANYTHING"
    assert [name for name in secret.split() if not is_private(name)] == []
