"""Engine processes end with their owner, and what a dead engine said last is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nemo_rl.models.generation.vllm.parent_watchdog import OWNER_VARIABLE
from tests.models.engines import kill, wait_until_gone

# An owner starts a core, which starts a worker that follows the owner, as a tensor-parallel engine does.
_WORKER = (
    "import time; from nemo_rl.models.generation.vllm.parent_watchdog import follow_owner; follow_owner(); "
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


def test_a_killed_owner_takes_the_engine_along() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    core, worker = (int(pid) for pid in owner.stdout.readline().split())
    assert owner.stdout.readline() == "up\n"
    kill(owner.pid)
    owner.wait()
    wait_until_gone([core, worker])


def test_an_engine_whose_owner_ended_before_it_was_up_ends_itself() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    engine = subprocess.run(
        [sys.executable, "-c", _WORKER], env=os.environ | {OWNER_VARIABLE: str(gone.pid)}, timeout=60, check=False
    )
    assert engine.returncode == 1


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
        "nemo_rl.models.generation.vllm.parent_watchdog import last_errors; "
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
from nemo_rl.models.generation.vllm.parent_watchdog import end_without_last_collection
end_without_last_collection()
class Cycle:
    def __del__(self):
        print("collected", flush=True)
gc.disable()
cycle = Cycle()
cycle.itself = cycle
del cycle
print("up", flush=True)
raise RuntimeError("the engine failed")
"""


def test_an_engine_ends_without_a_last_collection_and_with_its_error_and_exit_code() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "up\n")
    assert ended.stderr.endswith("RuntimeError: the engine failed\n")
