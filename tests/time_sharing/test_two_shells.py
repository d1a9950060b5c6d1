"""The commands of docs/time_sharing.md as a user types them in two shells, on a machine where nothing is prepared.

`NRL_TRANSCRIPT=FILE` keeps what was typed and what came of it; docs/time_sharing_transcript.md is such a file.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.time_sharing.open_pools import OpenPool
from tests import forks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "time_sharing.md").read_text()

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def documented(start: str) -> str:
    """The one command of the page's shell blocks that begins so, without its comment."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    found = {line.partition(" #")[0].strip() for line in blocks.splitlines() if line.startswith(start)}
    (line,) = found & {start} or found
    return line


@dataclass
class Shell:
    """A shell in the user's folder; what is typed there is kept."""

    folder: Path
    environment: dict[str, str]
    transcript: list[str] = field(default_factory=list)

    def start(self, command: str, *, real: bool = False) -> Any:
        """The process of a command: a real one, or a fork that has imported everything."""
        words = shlex.split(command, comments=True)
        words = [str(part) for word in words for part in (sorted(self.folder.glob(word)) or [word])]
        assert words[0] == "python"
        if not real:
            return forks.start(words[1:], self.environment, subprocess.PIPE, folder=self.folder)
        # A shell that starts pytest in the background makes its children ignore Ctrl-C; a user's terminal does not.
        listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            [sys.executable, *words[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=listen,  # noqa: PLW1509 - one thread
        )

    def ended(self, command: str, process: Any, timeout_s: float = 300) -> tuple[int, str]:
        said = process.communicate(timeout=timeout_s)[0]
        self.transcript.append(f"$ {command}\n{said}")
        return process.returncode, said

    def run(self, command: str, code: int = 0, *, real: bool = False) -> str:
        """What a command says; it must end with this exit code."""
        ended, said = self.ended(command, self.start(command, real=real))
        assert ended == code, f"{command}: {said}"
        return said


@pytest.fixture
def shell(tiny_model: Path, tmp_path: Path) -> Iterator[Shell]:
    """A user's folder with the files that the page names: a.yaml trains with a module that lies beside it, b.yaml is a
    command.
    """
    # Paths of sockets must be short.
    temporary = Path(tempfile.mkdtemp(prefix="p", dir="/tmp"))
    examples = ROOT / "examples"
    (tmp_path / "examples").symlink_to(examples)
    shutil.copy(ROOT / "tests" / "end_to_end" / "parity.py", tmp_path / "my_parity.py")
    for name, driver in (("a", "grpo"), ("sft", "sft")):
        content: dict[str, Any] = {
            "defaults": str(examples / "configs" / f"{driver}_arithmetic_cpu.yaml"),
            "policy": {"model_name": str(tiny_model), "train_global_batch_size": 16, "train_micro_batch_size": 8},
            "logger": {"log_dir": f"logs/{name}"},
            "checkpointing": {"checkpoint_dir": f"results/{name}", "save_period": 1, "metric_name": None},
        }
        if driver == "grpo":
            content["grpo"] = {"max_num_steps": 500, "num_prompts_per_step": 4, "num_generations_per_prompt": 4}
            content["grpo"] |= {"val_at_start": False, "val_period": 0, "val_at_end": False}
            content["data"] = {"validation": None, "train": {"env_name": "parity"}}
            content["env"] = {"parity": {"class": "my_parity.Parity"}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    # Works until it is ended, however often it is started, until `finish` is there.
    work = "touch begun; test -e finish || sleep 600"
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"external": {"command": ["bash", "-c", work]}}))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "NRL_P", "XDG_"))}
    environment |= {"TMPDIR": str(temporary), "HOME": str(temporary), "NRL_OBJECT_STORE_BYTES": str(256 << 20)}
    environment |= forks.forking_environment()
    # vLLM knows its model classes, as on a machine that has started an engine before.
    environment |= {"VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))}
    yield Shell(tmp_path, environment)
    shutil.rmtree(temporary, ignore_errors=True)


def until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


def test_every_command_of_the_page_works_in_two_shells_of_a_clean_machine(shell: Shell) -> None:
    assert "no pool of yours is open" in shell.run("python -m nemo_rl.time_sharing status", code=2, real=True)
    serve = documented("python -m nemo_rl.time_sharing serve").replace("--gpus 8", "--gpus 2 --device cpu --port 0")
    serving = shell.start(serve, real=True)
    try:
        _use_pool(shell)
    finally:
        serving.send_signal(signal.SIGINT)
        code, said = shell.ended(serve, serving)
    assert code == 130 and "page: http" in said and "submit with python -m nemo_rl.time_sharing submit" in said
    for noise in ("Token authentication", "OOM", "SIGTERM received", "Traceback", "core_worker", "raylet"):
        assert noise not in said
    assert not list(Path(shell.environment["TMPDIR"]).glob("nemo_rl_*/pool_*"))

    _look_back(shell)

    (shell.folder / "finish").touch()
    together = documented("python examples/run_time_sharing.py --gpus 8").replace("--gpus 8", "--gpus 2 --device cpu")
    together = together.replace("max_num_steps=200", "max_num_steps=1 sft.max_num_steps=1 --port 0")
    said = shell.run(together)
    assert "record kept every invariant" in said
    if kept := os.environ.get("NRL_TRANSCRIPT"):
        what = "The commands as a test types them, on two CPU slots: a.yaml trains, b.yaml is a command."
        head = f"# Sharing GPUs: a transcript\n\n{what}\n\n"
        text = "\n".join(shell.transcript).replace(str(shell.folder), "~").replace(str(ROOT), "nemo_rl")
        shown = re.sub(r"token=\S+", "token=...", text)
        Path(kept).write_text(f"{head}```\n{shown}```\n")


def _use_pool(shell: Shell) -> None:
    status = documented("python -m nemo_rl.time_sharing status")
    files = Path(shell.environment["TMPDIR"])
    until(lambda: list(files.glob("nemo_rl_*/pool_*.json")), 120, "the address of the pool")
    (address,) = files.glob("nemo_rl_*/pool_*.json")
    assert address.stat().st_mode & 0o777 == 0o600 and address.parent.stat().st_mode & 0o777 == 0o700
    pool = OpenPool(**json.loads(address.read_text()))
    assert "no pipelines" in shell.run(status)

    # Code that is not there is found before anything starts.
    wrong = {"defaults": "a.yaml", "env": {"parity": {"class": "my_parrity.Parity"}}}
    (shell.folder / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    said = shell.run("python -m nemo_rl.time_sharing submit wrong.yaml", code=2)
    assert "env.parity.class" in said and "my_parrity" in said and "PYTHONPATH" in said

    submit = documented("python -m nemo_rl.time_sharing submit")
    waiting = shell.start(submit)
    until(lambda: list(shell.folder.glob("results/a/step_*")), 300, "the first step")
    assert (shell.folder / "begun").exists()
    said = shell.run(status)
    assert "generation CPU slots" in said and "reward" in said
    state = json.loads(shell.run("python -m nemo_rl.time_sharing status --json"))
    assert [pipeline["name"] for pipeline in state["pipelines"]] == ["a", "b"]
    assert urllib.request.urlopen(pool.page, timeout=30).status == 200

    assert "CPU slot 0:" in shell.run(documented("python -m nemo_rl.time_sharing explain"))
    said = shell.run(documented("python -m nemo_rl.time_sharing drain"))
    assert "a: draining" in said and "a: drained after step" in said and "saved" in said
    said = shell.run(documented("python -m nemo_rl.time_sharing cancel"))
    assert "b: cancelled" in said
    code, said = shell.ended(submit, waiting)
    assert code == 1 and "a: drained" in said and "b: cancelled" in said and "reward=" in said
    assert list((shell.folder / "results" / "a").glob("step_*"))


def _look_back(shell: Shell) -> None:
    checked = shell.run(documented("python -m nemo_rl.time_sharing check"))
    assert "keep all" in checked
    for command, made in (("report", "scheduler.html"), ("trace", "scheduler.trace.json"), ("fit", "mine.yaml")):
        line = documented(f"python -m nemo_rl.time_sharing {command}")
        said = shell.run(line)
        assert any(shell.folder.rglob(f"*{Path(made).suffix}")), said
    assert "CPU slot 1: free" in shell.run(documented("python -m nemo_rl.time_sharing explain --log-dir"))
    page = documented("python -m nemo_rl.time_sharing page")
    showing = shell.start(f"{page} --port 0")
    assert showing.stdout is not None
    address = showing.stdout.readline().strip()
    assert urllib.request.urlopen(address, timeout=30).status == 200
    showing.send_signal(signal.SIGINT)
    assert shell.ended(page, showing)[0] == 0
