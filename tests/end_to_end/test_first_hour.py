"""The first hour of a new user, walked as the pages say: the demo, a run of one's own that is interrupted and goes on,
changes, a second run in the same place, and one's own task. Every ending is a sentence.

The demo's commands are shortened here. `NRL_FIRST_HOUR=whole` leaves them as they are and writes what was printed into
docs/index.md; otherwise the lines there are compared with what is printed, numbers aside.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.algorithms.launch import grpo as run_grpo
from nemo_rl.algorithms.launch import sft as run_sft
from nemo_rl.utils.metrics_file import read_metrics
from tests import forks
from tests.glossary import undocumented
from tests.test_documentation import ROOT, blocks

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

WHOLE = os.environ.get("NRL_FIRST_HOUR") == "whole"
PAGE = ROOT / "docs" / "index.md"
TRANSCRIPT = "The first hour"
_SHORT_GRPO = (
    "grpo.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=16",
)
SHORT = {
    "run_sft.py": ("sft.max_num_steps=4", "sft.val_global_batch_size=64", "data.validation.held_out=64"),
    "run_grpo.py": (*_SHORT_GRPO, "grpo.max_num_steps=2"),
}
# What a person may change about a run that goes on, by the name under which it is allowed.
CHANGES = {
    "data": ("data.train.max_operand=40", "data.train.num_problems=900", "data.train.held_out=256"),
    "environment": ("env.math.math_verify_impl=dapo_math_verify",),
    "loss": ("loss_fn.ratio_clip_max=0.3",),
    "model": ("policy.model_name=results/arithmetic/base",),
    "optimizer": ("policy.optimizer.name=torch.optim.Adam",),
    "seed": ("grpo.seed=7",),
    "batch": ("grpo.num_prompts_per_step=2",),
}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
_DURATION = re.compile(r"\b\d+(s|m \d+s|h \d+m)\b")
_HOST = re.compile(r" on \S+ since ")
_SCORE = re.compile(r"\b(accuracy|(val_)?reward)=-?")
# Said by the machine's load, or by the luck of an untrained model.
_BESIDE = re.compile(r"^\d{4}-\d\d-\d\d |s so far$|^memory without GPUs|^step [\d/]+: |% of the samples were cut off")


@dataclass
class Hour:
    """A checkout, and what was typed and read there."""

    folder: Path
    address: str
    said: list[tuple[str, str]] = field(default_factory=list)

    def starts(self, command: str, *shortened: str, real: bool = False) -> Any:
        """The process of a command: a real one, whose Ray cluster is its own and forks nothing, or a fork that has
        imported everything.
        """
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.folder)]),
            "RAY_ADDRESS": "local" if real else self.address,
            "NRL_OBJECT_STORE_BYTES": str(256 << 20),
        }
        line = [*words[1:], *shortened]
        if not real:
            return forks.start(line, environment, subprocess.PIPE, folder=self.folder)
        return subprocess.Popen(
            [sys.executable, *line],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self, command: str, process: Any, code: int, read: str = "") -> str:
        """Waits for the end of a process and keeps what it said; `read` is what has been read of it."""
        said = read + process.communicate(timeout=600)[0]
        assert process.returncode == code, said
        self.said.append((command, said))
        return said

    def types(self, command: str, *shortened: str, real: bool = False) -> str:
        """Carries a command out to its good end; what it said."""
        return self.ended(command, self.starts(command, *shortened, real=real), 0)


def reads_until(process: Any, sign: str) -> str:
    """What a process says up to the line that begins with a sign."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith(sign):
            return said
    raise AssertionError(f"it ended before it said {sign!r}:\n{said}")


def page_commands(page: str, mark: str) -> list[str]:
    """The commands of a page's blocks that contain a mark, each in one line."""
    lines = [line for _, text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    return [re.sub(r" +", " ", line.split("  #")[0]).strip() for line in lines if mark in line]


@pytest.fixture(scope="module")
def hour(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Hour]:
    """The folder after the demo."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "docs", "nemo_rl", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "results" / "arithmetic").mkdir(parents=True)
    (folder / "results" / "arithmetic" / "base").symlink_to(tiny_model, target_is_directory=True)
    for title, text in [*blocks("docs/extending.md", "python"), *blocks("docs/extending.md", "yaml")]:
        if title:
            (folder / title).parent.mkdir(exist_ok=True)
            (folder / title).write_text(text)
    walked = Hour(folder, ray.get_runtime_context().gcs_address)
    for line in demo():
        script = Path(line.split()[1]).name
        # The last command starts every process as a user's machine does: it imports what the first one does, and more.
        walked.types(line, *(() if WHOLE else SHORT[script]), real=WHOLE or script == "run_grpo.py")
    walked.said.clear()
    yield walked


def demo() -> list[str]:
    """The runs of `make demo`."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0].splitlines()[1:]
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe]


@dataclass
class Typed:
    """Carries commands out in this process, which has imported everything; they must end before Ray starts."""

    hour: Hour
    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def __call__(self, command: str, *shortened: str, shown: bool = True) -> tuple[int, str]:
        words = [*shlex.split(command)[1:], *shortened]
        main = run_sft if Path(words[0]).name == "run_sft.py" else run_grpo
        self.monkeypatch.chdir(self.hour.folder)
        self.capfd.readouterr()
        code = main(words[1:], default_config=ROOT / "examples" / "configs" / "grpo_math_1B.yaml")
        said = self.capfd.readouterr().err
        if shown:
            self.hour.said.append((command, said))
        return code, said


@pytest.fixture
def typed(hour: Hour, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    monkeypatch.syspath_prepend(str(hour.folder))
    return Typed(hour, monkeypatch, capfd)


def shortened(name: str) -> tuple[str, ...]:
    return () if WHOLE else SHORT[name]


def last_line(said: str) -> str:
    return said.strip().splitlines()[-1]


def mine() -> str:
    """README's second command, a run of one's own."""
    (command,) = {*page_commands("README.md", "run_grpo.py"), *page_commands("docs/index.md", "lr=1e-3")}
    return command


def test_a_demo_that_is_over_has_nothing_to_do(typed: Typed) -> None:
    for command in demo():
        code, said = typed(command, *shortened(Path(command.split()[1]).name))
        assert code == 0
        assert re.fullmatch(r"already at step (\d+) of \1; nothing to do: .*", last_line(said)), said


def test_a_run_of_ones_own_is_interrupted_saved_and_goes_on(hour: Hour, typed: Typed) -> None:
    command, small = mine(), () if WHOLE else _SHORT_GRPO
    saving = f"{command} checkpointing.save_on_signal=true"
    process = hour.starts(saving, *small)
    said = reads_until(process, "logs: ")

    # Meanwhile a second run is started in the same place, and one that shares only the checkpoints.
    code, refused = typed(command, *small)
    assert code == 1
    assert "DirectoryInUse: logger.log_dir=logs/mine: another run writes there (process" in refused, refused
    code, refused = typed(f"{command} logger.log_dir=logs/other", *small, shown=False)
    assert code == 1
    assert f"checkpointing.checkpoint_dir=results/mine: another run writes there (process {process.pid} on" in refused

    said += reads_until(process, "step 1/5")
    process.send_signal(signal.SIGINT)
    said = hour.ended(saving, process, 130, said)
    assert "interrupted: the step is finished and saved first; once more ends at once" in said
    match = re.search(r"interrupted after step (\d): all of it is in results/mine/step_\1; the same command", said)
    assert match is not None, said

    said = hour.types(command, *small)
    assert f"resuming from step {match[1]} of results/mine/step_{match[1]}\n" in said
    assert "  from here on checkpointing.save_on_signal: True -> False\n" in said
    assert re.search(r"^logs: logs/mine/exp_\d+$", said, re.MULTILINE)
    assert last_line(said).startswith("report: logs/mine/exp_")
    series = read_metrics(hour.folder / "logs" / "mine").series
    assert list(series["train/loss"]) == [1, 2, 3, 4, 5] and undocumented(series) == []
    code, said = typed(command, *small)
    assert code == 0 and "already at step 5 of 5; nothing to do: results/mine/step_5" in last_line(said)


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_that_makes_another_run_is_refused_by_name_and_can_be_allowed(name: str, typed: Typed) -> None:
    command = f"{demo()[1]} {' '.join(CHANGES[name])}"
    shown = name == "loss"
    small = (*shortened("run_grpo.py"), "policy.train_global_batch_size=16")
    code, said = typed(demo()[1], *small, *CHANGES[name], shown=False)
    if shown:
        typed.hour.said.append((command, said))
    assert code == 1
    assert "ResumeError: the run in results/arithmetic/grpo is another one" in said
    for change in CHANGES[name]:
        key = change.split("=")[0].replace("data.train.", "data.train.0.")
        assert f"  - {name}: {key}: " in said, said
    assert f"To go on from this checkpoint all the same: checkpointing.resume=[{name}]" in said
    code, said = typed(demo()[1], *small, *CHANGES[name], f"checkpointing.resume=[{name}]", shown=False)
    assert code == 0 and "nothing to do" in last_line(said), said


def test_a_run_that_is_interrupted_without_saving_says_what_is_lost(hour: Hour) -> None:
    command = f"{demo()[1]} grpo.max_num_steps=100 grpo.val_period=0 policy.optimizer.kwargs.lr=1e-4"
    process = hour.starts(command, *shortened("run_grpo.py"), "grpo.max_num_steps=100")
    said = reads_until(process, "step ")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said = hour.ended(command, process, 130, said)
    assert time.monotonic() - began < 60
    assert "  from here on policy.optimizer.kwargs.lr: 0.0003 -> 0.0001\n" in said
    assert "interrupted: ending workers" in said and "already ending" in said
    lost = r"the newest checkpoint is results/arithmetic/grpo/step_\d+, (1 step is|\d+ steps are) lost; "
    assert re.search(rf"interrupted after step \d+: {lost}checkpointing\.save_on_signal=true would save first", said)
    assert "Traceback" not in said


def test_ones_own_task_trains(hour: Hour) -> None:
    (command,) = page_commands("docs/extending.md", "letters.yaml")
    said = hour.types(command)
    assert "resuming" not in said and last_line(said).startswith("report: logs/letters/exp_000")
    series = read_metrics(hour.folder / "logs" / "letters").series
    assert list(series["train/loss"]) == [1, 2]
    assert 0 <= series["validation/judge/right"][2] <= 1 and series["validation/judge/repeated"][2] >= 0


def test_the_pages_transcript_is_what_was_printed(hour: Hour) -> None:
    if WHOLE:
        write_transcript(hour)
    ((_, text),) = [block for block in blocks("docs/index.md", "text") if block[0] == TRANSCRIPT]
    shown = [part.split("\n", 1) for part in text.replace("\\\n", " ").split("$ ")[1:]]
    assert [re.sub(r" +", " ", command) for command, _ in shown] == [command for command, _ in hour.said]
    for (command, printed), (_, said) in zip(shown, hour.said, strict=True):
        assert masked(printed) == masked(said), command


def masked(said: str) -> list[str]:
    """The lines, without what depends on the machine: numbers, and how often a line comes again."""
    return list(dict.fromkeys(_masked(line) for line in told(said)))


def _masked(line: str) -> str:
    alike = _HOST.sub(" on # since ", _SCORE.sub("score=", line)).replace(" steps are lost", " step is lost")
    return _NUMBER.sub("#", _DURATION.sub("#", alike)).replace("score= ", "score=# ")


def told(said: str) -> list[str]:
    """The lines that belong to the walk."""
    return [line.rstrip() for line in said.splitlines() if line.strip() and not _BESIDE.search(line)]


def write_transcript(hour: Hour) -> None:
    """Puts what was printed into the page."""
    parts = []
    for command, said in hour.said:
        typed_in = " \\\n    ".join(textwrap.wrap(command, 108, break_long_words=False, break_on_hyphens=False))
        parts.append("\n".join([f"$ {typed_in}", *told(said)]) + "\n")
    page = PAGE.read_text()
    block = f'```text title="{TRANSCRIPT}"\n' + "\n".join(parts) + "```"
    PAGE.write_text(re.sub(rf'```text title="{TRANSCRIPT}"\n.*?```', lambda _: block, page, flags=re.DOTALL))
