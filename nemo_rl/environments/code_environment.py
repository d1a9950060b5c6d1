"""Judges code: runs a response's Python against tests or compares its output, or scores word overlap with a reference
(Jaccard index).

Code is the text between `<code>` and `</code>`, or in fenced blocks. `code_sandbox/judge.py` runs it in an empty
directory with limits on time, memory, output and file size. Invariants: no process outlives the run's deadline; tests
and verdict are out of the response's reach.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import select
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from typing_extensions import override

from nemo_rl.config import CodeEnvConfig, CodeJaccardEnvConfig, ConfigError
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.processes import hide_process, kill_and_wait
from nemo_rl.environments.interfaces import EnvironmentFailure, EnvironmentInterface, EnvironmentReturn, response_of

OUTPUT_LIMIT_CHARS = 4000
# Ending what a response started takes the judge milliseconds; after this it is ended itself.
_GRACE_S = 5.0
_JUDGE = Path(__file__).parent / "code_sandbox" / "judge.py"
_SANDBOXES = {
    "bubblewrap": "the system read-only, no network, no other process",
    "nsjail": "the system read-only, no network, no other process",
    "namespaces": "no network, no other process; files as the run's user",
    "limits": "memory, time and files are limited; use a container for models that you do not trust",
}
# At most four bytes a character, so that what is kept of either end holds a whole answer.
_KEPT_BYTES = 4 * OUTPUT_LIMIT_CHARS
_CHUNK_BYTES = 64 * 1024
_TAGGED = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_FENCED_TEXT = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Run:
    """What running a piece of code gave: its output (both streams, cut), and whether it ended by itself without an
    error and passed its tests.
    """

    output: str
    succeeded: bool


class CodeEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.code`.

    The reward is 1 when the code runs and, if the metadata has `tests` (Python that uses its names), those pass, or if
    it has `ground_truth`, the output equals it; without either it is 0 and only the output is of use.

    Args:
        cfg: the keys of `env.code`.
    """

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeEnvConfig.model_validate(dict(cfg))
        self.sandbox = usable_sandbox(self.cfg.sandbox)
        if self.sandbox == "limits":
            # Nothing else keeps a response from reading the tokens in this process's environment.
            hide_process()
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="code")

    @classmethod
    def start_line(cls, cfg: Mapping[str, object]) -> str:
        """What the environment prints at a run's start."""
        sandbox = usable_sandbox(CodeEnvConfig.model_validate(dict(cfg)).sandbox)
        return f"env.code: code of responses runs in the sandbox {sandbox} ({_SANDBOXES[sandbox]})"

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Runs the code of B responses; a response without code ends its conversation."""
        codes = [code_in(str(log[-1]["content"])) for log in message_log_batch]
        runs = list(self._threads.map(self._run, codes, metadata))
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": "" if run is None else f"\n<result>\n{run.output}\n</result>\n"}
                for run in runs
            ],
            metadata=list(metadata),
            next_stop_strings=[["</code>"]] * len(runs),
            rewards=torch.tensor([_reward(run, item) for run, item in zip(runs, metadata, strict=True)]),
            terminateds=torch.tensor(
                [run is None or self.cfg.terminate_on_evaluation for run in runs], dtype=torch.bool
            ),
            answers=[None if run is None else run.output for run in runs],
        )

    @override
    def shutdown(self) -> None:
        """Waits for running code, which its deadline bounds."""
        self._threads.shutdown()

    def _run(self, code: str | None, metadata: Mapping[str, object]) -> Run | None:
        if code is None:
            return None
        return run_python(code, self.cfg.run_timeout_s, str(metadata.get("tests") or ""), self.sandbox)


def code_in(response: str) -> str | None:
    """The code of a response; None without any."""
    # A stop string may have cut the closing tag off.
    closed = response + "</code>" if response.count("<code>") > response.count("</code>") else response
    blocks = _TAGGED.findall(closed) or _FENCED.findall(closed)
    return "\n".join(blocks) if blocks else None


def run_python(code: str, timeout_s: float, tests: str = "", sandbox: str | None = None) -> Run:
    """Runs code in a fresh interpreter.

    Args:
        timeout_s: seconds after which it is ended, with everything it started.
        tests: Python source that uses the names of the code and raises where these are wrong.
        sandbox: one of `usable_sandbox`; None: the best that this machine has.
    """
    sandbox = sandbox or usable_sandbox("auto")
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="nemo_rl_code_") as folder:
        verdict, verdict_end = os.pipe()
        with open(verdict, "rb") as report:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_JUDGE), "judge", str(verdict_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                # No token or key of the run is in the environment of what runs code.
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                pass_fds=(verdict_end,),
                bufsize=0,
            )
            os.close(verdict_end)
            request = {
                "code": code.encode(errors="replace").decode(),
                "tests": tests,
                "sandbox": sandbox,
                "command": _COMMANDS[sandbox](folder) if sandbox in _COMMANDS else [],
                "secret": secret,
            }
            output, ended = _converse(process, json.dumps(request).encode() + b"\n", time.monotonic() + timeout_s)
            _wait_for_end(process, folder)
            passed = ended and report.read() == f"{secret} passed".encode()
    return Run(_cut(output) if ended else f"{_cut(output)}\n[ended after {timeout_s:g} s]".lstrip(), passed)


def _wait_for_end(judge: subprocess.Popen[bytes], folder: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        if judge.wait(_GRACE_S) == 0:
            return
    judge.kill()
    judge.wait()
    # Without namespaces a response can end or stop its judge; what it left is known by its directory.
    strays = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd().startswith(folder) or process.environ().get("HOME") == folder:
                strays.append(process)
    kill_and_wait(strays, _GRACE_S)


def usable_sandbox(wanted: str) -> str:
    """The sandbox of this machine: bubblewrap, namespaces of the kernel, or limits alone. Raises ConfigError: what was
    asked for by name does not work here.
    """
    problems = []
    for sandbox in _SANDBOXES if wanted == "auto" else (wanted,):
        problem = problem_with(sandbox)
        if problem is None:
            return sandbox
        problems.append(f"env.code.sandbox: {sandbox} does not work on this machine: {problem}")
    raise ConfigError(problems)


@functools.cache
def problem_with(sandbox: str) -> str | None:
    """Why a sandbox does not work on this machine; None where it does."""
    if sandbox in _PROGRAMS and shutil.which(_PROGRAMS[sandbox][0]) is None:
        program, source = _PROGRAMS[sandbox]
        return f"{program} is not installed ({source})"
    run = run_python("print('ready')", 30.0, "print('tested')", sandbox)
    return None if run.succeeded else (run.output[-300:] or "it gave no answer")


def _hidden() -> tuple[list[str], list[str]]:
    """Directories that a response does not see, and what it needs of them."""
    hidden = ["/tmp", str(Path.home())]
    needed = (path for path in (sys.base_prefix, sys.prefix, str(_JUDGE.parent)) if path.startswith(tuple(hidden)))
    return hidden, list(dict.fromkeys(needed))


def _bubblewrap(folder: str) -> list[str]:
    """The system read-only, without the user's home and the temporary files of others, without a network."""
    hidden, needed = _hidden()
    mounts = [argument for path in hidden for argument in ("--tmpfs", path)]
    mounts += [argument for path in needed for argument in ("--ro-bind", path, path)]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        *("--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *mounts,
        *("--bind", folder, folder, "--chdir", folder),
    ]


def _nsjail(folder: str) -> list[str]:
    """The same with nsjail, which mounts in the order of its options and shuts files that are not named."""
    hidden, needed = _hidden()
    mounts = [argument for path in hidden for argument in ("--tmpfsmount", path)]
    mounts += [argument for path in needed for argument in ("--bindmount_ro", path)]
    own_limits = [argument for name in ("as", "cpu", "fsize", "nofile") for argument in (f"--rlimit_{name}", "def")]
    return [
        *("nsjail", "--mode", "o", "--quiet", "--time_limit", "0", "--keep_env", "--chroot", "/"),
        *own_limits,
        *mounts,
        *("--bindmount", folder, "--cwd", folder),
        *("--pass_fd", "{0}", "--pass_fd", "{1}", "--"),
    ]


_COMMANDS = {"bubblewrap": _bubblewrap, "nsjail": _nsjail}
_PROGRAMS = {
    "bubblewrap": ("bwrap", "Debian package bubblewrap"),
    "nsjail": ("nsjail", "https://github.com/google/nsjail"),
}


def _converse(process: subprocess.Popen[bytes], code: bytes, deadline: float) -> tuple[str, bool]:
    """Feeds the code in and reads what it prints, of which only the beginning and the end are ever held; and whether
    the process ended in time.
    """
    head, tail, dropped, unsent = bytearray(), bytearray(), False, memoryview(code)
    if process.stdin is None or process.stdout is None:
        raise EnvironmentFailure("a process for a response's code has no standard input and output")
    with process.stdin, process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        open_ended = True
        while open_ended and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    unsent = _fed(key.fd, unsent)
                    if not unsent:
                        # It stays open: the judge ends, and with it everything else, when it is closed.
                        selector.unregister(process.stdin)
                    continue
                chunk = os.read(key.fd, _CHUNK_BYTES)
                open_ended = bool(chunk)
                room = max(0, _KEPT_BYTES - len(head))
                head += chunk[:room]
                tail += chunk[room:]
                dropped = dropped or len(tail) > _KEPT_BYTES
                del tail[:-_KEPT_BYTES]
    return _text(head, tail, dropped), not open_ended


def _fed(fd: int, unsent: memoryview) -> memoryview:
    try:
        # A pipe that can be written takes this much without making the writer wait.
        return unsent[os.write(fd, unsent[: select.PIPE_BUF]) :]
    except BrokenPipeError:
        return unsent[:0]


def _text(head: bytearray, tail: bytearray, dropped: bool) -> str:
    parts = (
        [bytes(part).decode(errors="replace") for part in (head, tail)]
        if dropped
        else [bytes(head + tail).decode(errors="replace")]
    )
    return "\n[...]\n".join(parts).replace("\r\n", "\n")


def _cut(output: str) -> str:
    text = output.strip()
    return (
        text
        if len(text) <= OUTPUT_LIMIT_CHARS
        else f"{text[: OUTPUT_LIMIT_CHARS // 2]}\n[...]\n{text[-OUTPUT_LIMIT_CHARS // 2 :]}"
    )


def _reward(run: Run | None, metadata: Mapping[str, object]) -> float:
    if run is None or not run.succeeded:
        return 0.0
    if metadata.get("tests"):
        return 1.0
    return (
        float(run.output == str(metadata["ground_truth"]).strip()) if metadata.get("ground_truth") is not None else 0.0
    )


class CodeJaccardEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.code_jaccard`. `cfg`: the keys of `env.code_jaccard`."""

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeJaccardEnvConfig.model_validate(dict(cfg))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Compares B responses with their references."""
        answers = [code_of(response_of(log)) for log in message_log_batch]
        rewards = [
            jaccard(answer, code_of(str(item["ground_truth"]))) for answer, item in zip(answers, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"Environment: overlap {reward:.3f}"} for reward in rewards
            ],
            metadata=list(metadata),
            next_stop_strings=[self.cfg.stop_strings] * len(rewards),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards), dtype=torch.bool),
            answers=answers,
        )


def jaccard(left: str, right: str) -> float:
    """Words in common over words in either; two texts without words are equal."""
    left_words, right_words = set(_WORD.findall(left)), set(_WORD.findall(right))
    either = left_words | right_words
    return len(left_words & right_words) / len(either) if either else 1.0


def code_of(text: str) -> str:
    """The fenced code blocks of a text, joined; the text itself without any."""
    blocks = _FENCED_TEXT.findall(text)
    return "\n".join(blocks) if blocks else text
