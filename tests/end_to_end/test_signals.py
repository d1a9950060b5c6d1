"""SIGTERM to the whole process group of a run, as schedulers and `timeout` send it, in each phase of the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.test_runs import Command
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

# Ray needs a minute to notice by itself that its processes have ended.
_WITHIN_S = 50.0


def wait_for_line(command: Command, process: Any, line: str) -> None:
    deadline = time.monotonic() + 300
    while line not in command.output():
        assert process.poll() is None, command.output()
        assert time.monotonic() < deadline, command.output()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("when", "overrides", "says"),
    [
        ("start: directories", (), "interrupted while starting"),
        ("start: environments", (), "interrupted while starting"),
        ("step 1/", ("data.num_workers=1",), "interrupted after step "),
        ("step 1/", ("data.num_workers=1", "checkpointing.save_on_signal=true"), "all of it is in "),
    ],
)
def test_a_signal_to_the_group_ends_a_run_as_documented(
    when: str, overrides: tuple[str, ...], says: str, tiny_model: Path, tmp_path: Path
) -> None:
    command = Command(tiny_model, tmp_path)
    process = command.start(*overrides, "checkpointing.save_period=100", "grpo.max_num_steps=100")
    wait_for_line(command, process, when)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=_WITHIN_S) == 130, command.output()
    output = command.output()
    assert says in output and "GCS" not in output and "***" not in output and "Traceback" not in output
    wait_until_gone(command.left())


def test_a_signal_to_the_group_of_a_pool_ends_its_jobs_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    pool = ("--gpus", "1", "--device", "cpu", "--port", "0", "--log-dir", f"{tmp_path}/pool")
    command = Command(tiny_model, tmp_path, script=("examples/run_time_sharing.py", *pool, "--pipelines"))
    process = command.start("checkpointing.save_period=100", "grpo.max_num_steps=100")
    wait_for_line(command, process, ": step ")
    command.processes.update(command.left())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=_WITHIN_S) == 130, command.output()
    output = command.output()
    assert "every pipeline was ended" in output and "***" not in output and "Traceback" not in output
    wait_until_gone(command.left())
    assert command.processes and command.shared_memory() == []


def test_a_signal_to_every_process_ends_a_run_before_ray_gives_up(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path)
    process = command.start("checkpointing.save_period=100", "grpo.max_num_steps=100", "data.num_workers=1")
    wait_for_line(command, process, "step 1/")
    for pid in command.left():
        psutil.Process(pid).send_signal(signal.SIGTERM)
    assert process.wait(timeout=_WITHIN_S) == 130, command.output()
    assert "interrupted after step " in command.output() and "Traceback" not in command.output()
    wait_until_gone(command.left())
