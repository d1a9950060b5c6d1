"""Processes of an engine: a fork holds none of its actor's connections, folders for sockets go with the processes that
made them, all end with their owner, and what a dead engine said last is found.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.vllm import engine_processes
from nemo_rl.models.generation.vllm.engine_processes import OWNER_VARIABLE
from tests.models.engines import kill, wait_until_gone

_MAKE = (
    "import sys, time; from nemo_rl.models.generation.vllm.engine_processes import make_socket_folder; "
    "print(make_socket_folder(), flush=True); time.sleep(60)"
)
# An owner starts a core, which starts a worker that follows the owner, as a tensor-parallel engine does.
_WORKER = (
    "import time; from nemo_rl.models.generation.vllm.engine_processes import follow_owner; follow_owner(); "
    "print('up', flush=True); time.sleep(60)"
)
_CORE = (
    f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {_WORKER!r}]); "
    "print(os.getpid(), p.pid, flush=True); p.wait()"
)
_OWNER = (
    f"import os, subprocess, sys; os.environ['{OWNER_VARIABLE}'] = str(os.getpid()); "
    f"subprocess.run([sys.executable, '-c', {_CORE!r}])"
)


@pytest.mark.parametrize(("answer", "may"), [(None, True), (3, True), (0, False), (100, False)])
def test_a_process_that_has_touched_the_gpu_driver_is_not_forked(
    answer: int | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 is the driver's answer in a process that has not; a machine without GPUs may have no driver."""

    def load(name: str) -> SimpleNamespace:
        if answer is None:
            raise OSError(name)
        return SimpleNamespace(cuDeviceGetCount=lambda count: answer)

    monkeypatch.setattr(engine_processes.ctypes, "CDLL", load)
    assert engine_processes.may_fork() is may


@pytest.mark.parametrize("forking", [True, False])
def test_the_fork_of_an_engine_lets_go_of_connections_and_other_forks_keep_them(
    forking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_processes, "_forking", forking)
    ours, peer = socket.socketpair()
    up, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"up")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(up, 2) == b"up"
        ours.close()
        peer.settimeout(0.5)
        if forking:
            assert peer.recv(1) == b""
        else:
            with pytest.raises(TimeoutError):
                peer.recv(1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        peer.close()
        for end in (up, tell):
            os.close(end)


@pytest.mark.slow
def test_a_killed_process_leaves_its_folder_to_the_next_one_and_a_living_one_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(engine_processes.tempfile, "tempdir", None)
    monkeypatch.setattr(engine_processes, "_STALE_AFTER_S", 0.0)
    with (
        subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None and living.stdout is not None
        left, kept = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        (left / "socket").touch()
        killed.kill()
        killed.wait()
        time.sleep(0.05)
        own = engine_processes.make_socket_folder()
        assert own == engine_processes.make_socket_folder() and sorted(tmp_path.iterdir()) == sorted([kept, own])
        engine_processes.remove_socket_folder()
        engine_processes.remove_socket_folder()
        assert list(tmp_path.iterdir()) == [kept]
        living.kill()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_start_inside_put_their_temporary_files_there_and_the_rest_is_as_before(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before, environment = tempfile.gettempdir(), dict(os.environ)
    with engine_processes.temporary_files_in(tmp_path), multiprocessing.get_context(method).Pool(1) as pool:
        seen = pool.apply(tempfile.gettempdir)
        compiled = pool.apply(os.getenv, ("TORCHINDUCTOR_CACHE_DIR",))
    assert seen == str(tmp_path) and compiled is not None and compiled.startswith(f"{before}/torchinductor_")
    assert tempfile.gettempdir() == before and dict(os.environ) == environment


@pytest.mark.slow
def test_a_killed_owner_takes_the_engine_along() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    core, worker = (int(pid) for pid in owner.stdout.readline().split())
    assert owner.stdout.readline() == "up\n"
    kill(owner.pid)
    owner.wait()
    wait_until_gone([core, worker])


@pytest.mark.slow
def test_an_engine_whose_owner_ended_before_it_was_up_ends_itself() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    engine = subprocess.run(
        [sys.executable, "-c", _WORKER], env=os.environ | {OWNER_VARIABLE: str(gone.pid)}, timeout=60, check=False
    )
    assert engine.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_engines_own_errors_are_found_in_the_log(tmp_path: object, stream: str) -> None:
    lines = [
        "(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1512]   File model.py, line 3",
        "(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1512] RuntimeError: head_dim=16 is not supported",
        "(MainProcess pid=5) ERROR 01-31 12:00:00 [async_llm.py:906] EngineDeadError: see above",
        "(EngineCore pid=7) WARNING 01-31 12:00:00 [core.py:1] slow",
    ]
    tell = (
        f"import sys; [print(line, file=sys.{stream}, flush=True) for line in {lines!r}]; from "
        "nemo_rl.models.generation.vllm.engine_processes import last_errors; "
    )
    tell += "open(sys.argv[1], 'w').write(last_errors())"
    answer = f"{tmp_path}/answer"
    with open(f"{tmp_path}/log", "w") as log:
        subprocess.run([sys.executable, "-c", tell, answer], stdout=log, stderr=log, check=True)
    with open(answer) as file:
        # Both streams share one file here, as nothing else does: each line is found once per stream.
        assert list(dict.fromkeys(file.read().splitlines())) == [
            "  File model.py, line 3",
            "RuntimeError: head_dim=16 is not supported",
        ]


_ENDING = """
import gc, sys
from nemo_rl.models.generation.vllm.engine_processes import end_without_last_collection
end_without_last_collection()
class Cycle:
    def __del__(self):
        print("collected", flush=True)
gc.disable()
cycle = Cycle()
cycle.itself = cycle
del cycle
gc.freeze()
print("up", flush=True)
gc.unfreeze()  # as vLLM ends an engine
gc.collect()
raise RuntimeError("the engine failed")
"""


@pytest.mark.slow
def test_an_engine_ends_without_a_last_collection_and_with_its_error_and_exit_code() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "up\n")
    assert ended.stderr.endswith("RuntimeError: the engine failed\n")


@pytest.mark.slow
def test_what_an_engine_has_at_once_is_vllm_s_choice_for_offline_inference(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs 256 requests and 4,096 tokens; for a use that vLLM does not know it would be 128 and 2,048."""
    from vllm.v1.engine.async_llm import AsyncLLM

    def configured(arguments: Any, usage_context: Any, stat_loggers: Any) -> Any:
        assert stat_loggers is None
        return arguments.create_engine_config(usage_context)

    monkeypatch.setattr(AsyncLLM, "from_engine_args", configured)
    arguments = {"model": str(tiny_model), "max_model_len": 64, "enforce_eager": True}
    for config in (engine_processes.start_engine(arguments, None), engine_processes.engine_config(arguments)):
        assert config.scheduler_config.max_num_seqs == 256
        assert config.scheduler_config.max_num_batched_tokens == 4096
