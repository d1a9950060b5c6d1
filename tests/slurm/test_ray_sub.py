"""`ray.sub` on one machine: what it generates starts two real Ray nodes, a run goes across both, and it ends clean."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.ports import free_ports
from nemo_rl.distributed.ray_runtime import NODE_ENV
from nemo_rl.utils.metrics_file import read_metrics
from tests.forks import forking_environment

ROOT = Path(__file__).parents[2]
BIN = Path(__file__).parent / "bin"

SANDBOX = {
    "SANDBOX_CONTAINER": "none",
    "SANDBOX_COMMAND": "env; exec python3 -m http.server --bind 127.0.0.1 $SANDBOX_PORT",
    "SANDBOX_PORT": str(*free_ports(1)),
    "SANDBOX_ENV_VARS": "KEY_OF_THE_SANDBOX",
}
ONE_NODE = {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "node0",
    "RAY_START_EXTRA": "--object-store-memory=200000000 --include-dashboard=false",
}
# Asks the sandbox of the command's node.
ASK = (
    "python -c 'import os, urllib.request; "
    'urllib.request.urlopen("http://127.0.0.1:" + os.environ["SANDBOX_PORT"]); print("the sandbox answers")\''
)
# As where a worker gives its head up because that answers slowly: the job knows the head by then. The head has no
# dashboard, as in `ONE_NODE`.
_FIRST_START_OF_THE_WORKER_FAILS = (
    "ray() {{ if [[ ${{SLURM_NODEID:-0}} == 1 ]]; then mkdir {folder}/started 2>/dev/null && "
    "{{ until [[ -s {folder}/7-logs/.nodes ]]; do sleep 0.1; done; return 1; }}; "
    'else set -- "$@" --include-dashboard=false; fi; exec ray "$@"; }}'
)
_AS_A_FORK = (
    'python -c "import os, sys; from tests import forks; sys.exit(forks.start(sys.argv[1:], os.environ, 1).wait())"'
)
_UNTIL_TOLD = "trap 'echo told to end; exit 0' TERM; touch {folder}/running; while true; do sleep 0.2; done"
# A cluster of one node whose Ray does nothing, and a head that answers where a test listens.
_NO_RAY = "ray() { exec sleep 600; }; python() { :; }"


class Job:
    """A submitted job: its folder, and how `ray.sub` is started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))},
            "PATH": os.pathsep.join([str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node0,node1",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "BASE_LOG_DIR": str(folder),
            "CONTAINER": "none",
            "GPUS_PER_NODE": "0",
            "CPU_SLOTS_PER_NODE": "1",
            "CPUS_PER_WORKER": "8",
            "PORT": str(*free_ports(1)),
            "DASHBOARD_PORT": str(*free_ports(1)),
            # Outside what `free_ports` draws from.
            "MIN_WORKER_PORT": "17000",
            "MAX_WORKER_PORT": "17299",
            "START_TIMEOUT": "300",
            "RAY_TMPDIR": tempfile.mkdtemp(prefix="nrl", dir="/tmp"),
            "RAY_START_EXTRA": "--object-store-memory=200000000",
            "RAY_enable_open_telemetry": "0",
            "OMP_NUM_THREADS": "3",
            "WANDB_API_KEY": "secret",
            "KEY_OF_THE_SANDBOX": "of-its-own",
        }

    def start(self, **variables: str) -> Any:
        return subprocess.Popen(
            ["bash", "ray.sub"],
            cwd=ROOT,
            env=self.environment | variables,
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self, process: Any, timeout_s: float) -> int:
        """The exit status of the job; where it does not end, a failure that shows its logs."""
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            pytest.fail(f"the job did not end in {timeout_s:.0f} s\n{self.logs()}")

    def reaches(self, process: Any, mark: str, timeout_s: float) -> None:
        """Waits until the command has made a file in the job's folder."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / mark).exists():
            assert process.poll() is None and time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def log(self, name: str) -> str:
        path = self.folder / "7-logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.folder / "7-logs").glob("*.log"))
        )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    shutil.rmtree(made.environment["RAY_TMPDIR"], ignore_errors=True)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_across_two_nodes_whose_ray_ends_with_the_job(job: Job, tiny_model: Path) -> None:
    # Python and Ray come from VENV alone.
    job.environment["PATH"] = os.pathsep.join([str(BIN), os.environ["PATH"]])
    overrides = {
        "policy.model_name": tiny_model,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": 1,
        "grpo.val_at_start": "false",
        "grpo.val_at_end": "false",
        "grpo.val_period": 0,
        "data.train.num_problems": 32,
        "data.train.held_out": 0,
        "data.validation": "null",
        "policy.train_global_batch_size": 16,
        "policy.train_micro_batch_size": 8,
        "policy.logprob_batch_size": 8,
        "cluster.num_nodes": 2,
        "cluster.cpu_slots": 1,
        "checkpointing.enabled": "false",
        "logger.log_dir": job.folder / "logs",
    }
    arguments = " ".join(f"{key}={value}" for key, value in overrides.items())
    run = f"{_AS_A_FORK} examples/run_grpo.py --config examples/configs/grpo_arithmetic_cpu.yaml {arguments}"
    process = job.start(
        COMMAND=f"{run} || exit 1; {_UNTIL_TOLD.format(folder=job.folder)}",
        VENV=str(Path(sys.executable).parents[1]),
        SETUP_COMMAND=_FIRST_START_OF_THE_WORKER_FAILS.format(folder=job.folder),
        **forking_environment(),
    )
    job.reaches(process, "running", 500)
    process.send_signal(signal.SIGTERM)
    assert job.ends(process, 90) == 143, job.logs()
    assert read_metrics(job.folder / "logs").scalars("train/loss")[0] == [1]
    assert "all 2 nodes joined" in job.log("driver") and "told to end" in job.log("driver")
    assert "it is started again" in job.log("worker-1")
    scripts = [path.read_text() for path in (job.folder / "7-logs").glob("*.sh")]
    nodes = [script for script in scripts if "ray start" in script]
    assert all("OMP_NUM_THREADS='3'" in script for script in nodes)
    assert all(f"{name}=${{{name}:-{value}}}" in script for script in nodes for name, value in NODE_ENV.items())
    assert {path.name for path in (job.folder / "7-logs" / "ray").iterdir()} == {"node_0", "node_1"}
    assert os.access(job.folder / "7-attach.sh", os.X_OK)
    assert not listens(job.environment["PORT"])


def test_the_end_of_the_jobs_time_ends_the_command_and_the_sandbox(job: Job) -> None:
    # The environment comes from VENV and SETUP_COMMAND alone.
    job.environment["PATH"] = os.pathsep.join([str(BIN), os.environ["PATH"]])
    with socket.create_server(("127.0.0.1", int(job.environment["PORT"]))):
        process = job.start(
            COMMAND=f"echo running with $OF_SETUP; {ASK}; {_UNTIL_TOLD.format(folder=job.folder)}",
            **ONE_NODE,
            VENV=str(Path(sys.executable).parents[1]),
            SETUP_COMMAND=f"{_NO_RAY}; export OF_SETUP=its-setup; echo vLLM compiles into $VLLM_CACHE_ROOT",
            COMPILE_CACHE_DIR="/compiled",
            **SANDBOX,
        )
        job.reaches(process, "running", 200)
        process.send_signal(signal.SIGTERM)
        assert job.ends(process, 90) == 143, job.logs()
    assert "running with its-setup" in job.log("driver") and "told to end" in job.log("driver")
    assert "the sandbox answers" in job.log("driver")
    assert all("vLLM compiles into /compiled/vllm" in job.log(part) for part in ("head", "driver"))
    assert "KEY_OF_THE_SANDBOX=of-its-own" in job.log("sandbox-0") and "WANDB_API_KEY" not in job.log("sandbox-0")
    assert not listens(SANDBOX["SANDBOX_PORT"])


def listens(port: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 3", 3)])
def test_a_job_ends_as_its_command_does(job: Job, command: str, status: int) -> None:
    with socket.create_server(("127.0.0.1", int(job.environment["PORT"]))):
        process = job.start(COMMAND=command, **ONE_NODE, SETUP_COMMAND=_NO_RAY)
        assert job.ends(process, 60) == status, job.logs()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_fails_when_ray_does_not_start(job: Job) -> None:
    process = job.start(
        COMMAND="true",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_NODELIST="node0",
        RAY_START_EXTRA=f"--ray-client-server-port={job.environment['DASHBOARD_PORT']}",
    )
    assert job.ends(process, 200) == 1
    assert "the cluster ended while it started" in job.log("driver")
    assert "used by other components" in job.log("head") and "before the job did" in job.log("head")


def test_a_job_fails_when_its_sandbox_ends_before_it(job: Job) -> None:
    ends = f"while [[ ! -e {job.folder}/running ]]; do sleep 0.1; done"
    with socket.create_server(("127.0.0.1", int(job.environment["PORT"]))):
        process = job.start(
            COMMAND=_UNTIL_TOLD.format(folder=job.folder),
            **ONE_NODE,
            SETUP_COMMAND=_NO_RAY,
            **SANDBOX | {"SANDBOX_COMMAND": ends, "SANDBOX_PORT": "0"},
        )
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1, job.logs()
    assert "a sandbox ended before the job did" in said
    assert "told to end" in job.log("driver")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CONTAINER": ""}, "CONTAINER is not set; name an image, or CONTAINER=none"),
        ({"CONTAINER": "none", "MOUNTS": "/a:/a"}, "MOUNTS=/a:/a needs a CONTAINER"),
        ({"SANDBOX_CONTAINER": "x"}, "SANDBOX_COMMAND is not set; it starts the sandbox in SANDBOX_CONTAINER=x"),
        ({"SANDBOX_COMMAND": "x"}, "SANDBOX_CONTAINER is not set; name an image, or SANDBOX_CONTAINER=none"),
        ({**SANDBOX, "SANDBOX_MOUNTS": "/a:/a"}, "SANDBOX_MOUNTS=/a:/a needs an image"),
        ({**SANDBOX, "SANDBOX_PORT": "eight"}, "SANDBOX_PORT=eight is not a count"),
        ({**SANDBOX, "SANDBOX_PORT": "70000"}, "SANDBOX_PORT=70000 is no port"),
        ({**SANDBOX, "SANDBOX_COMAND": "x"}, "SANDBOX_COMAND is not known; a sandbox has SANDBOX_CONTAINER, _COMMAND"),
        ({"GPUS_PER_NODE": "eight"}, "GPUS_PER_NODE=eight is not a count"),
        ({"GPUS_PER_NODE": "0", "CPU_SLOTS_PER_NODE": "0"}, "leave nothing to run on"),
        ({"DEDICATED_RAY_HEAD": "1", "SLURM_JOB_NUM_NODES": "1"}, "leaves none of 1 nodes to work"),
        ({"VENV": "/nowhere"}, "VENV=/nowhere holds no bin/ray"),
        ({"DEDICATED_RAY_HEAD": "yes"}, "it is 0 or 1"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "Slurm names 2 hosts for 3 nodes"),
        ({"MIN_WORKER_PORT": "3000", "MAX_WORKER_PORT": "2000"}, "are no range"),
        ({"DASHBOARD_PORT": "17299"}, "DASHBOARD_PORT=17299 lies in the range of worker ports 17000-17299"),
    ],
)
def test_impossible_jobs_are_refused_before_anything_starts(job: Job, variables: dict[str, str], message: str) -> None:
    process = job.start(**variables)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in said
    assert not (job.folder / "7-logs" / "head.log").exists()
