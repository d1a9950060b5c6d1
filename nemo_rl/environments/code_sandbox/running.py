"""Runs a response's code by `judge.py`: in a process of its own, in a sandbox, with limits on time, memory, output and
file size.

Invariants: no process outlives the run's deadline; tests and verdict are out of the response's reach; what the response
itself wrote is read and never unpickled here.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import secrets
import select
import selectors
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_rl.config import ConfigError
from nemo_rl.distributed.processes import kill_and_wait
from nemo_rl.environments.interfaces import EnvironmentFailure

OUTPUT_LIMIT_CHARS = 4000
# Ending a response's processes takes the judge milliseconds; after this it is ended itself.
_GRACE_S = 5.0
_JUDGE = Path(__file__).parent / "judge.py"
SANDBOXES = {
    "bubblewrap": "the system read-only, no network, no other process",
    "nsjail": "the system read-only, no network, no other process",
    "namespaces": "no network, no other process; files as the run's user",
    "limits": "memory, time and files are limited; use a container for models that you do not trust",
}
# At most four bytes a character, so that what is kept of either end holds a whole answer.
_KEPT_BYTES = 4 * OUTPUT_LIMIT_CHARS
_CHUNK_BYTES = 64 * 1024
_ANSWER_LIMIT_BYTES = 128 * 1024**2
FOLDER_LIMIT_BYTES = 256 * 1024**2
FOLDER_LIMIT_FILES = 10_000
_LOOK_S = 0.25
_LATE = "late"
STATE = "_state"
"""The entry of a notebook's context with everything that is no plain value, as bytes that only its sandbox reads."""


@dataclass(frozen=True)
class CodeRun:
    """Result of running a piece of code: its output (both streams, cut), whether it ended by itself without an error
    and passed its tests, and whether it was ended at its deadline.
    """

    output: str
    succeeded: bool
    late: bool


def run_python(code: str, timeout_s: float, tests: str = "", sandbox: str | None = None) -> CodeRun:
    """Runs code in a fresh interpreter, in an empty directory.

    Args:
        timeout_s: seconds after which it is ended, with everything it started.
        tests: Python source that uses the names of the code and raises where these are wrong.
        sandbox: one of `usable_sandbox`; None: the best that this machine has.
    """
    with tempfile.TemporaryDirectory(prefix="nemo_rl_code_") as folder:
        return _judged({"code": code, "tests": tests}, timeout_s, sandbox or usable_sandbox("auto"), folder)


@dataclass(frozen=True)
class Cell:
    """Result of one notebook cell: text of its last expression or of its exception, or else its printed output; the
    names for the next one; whether it ended by itself without an error; whether its last expression had a value; and
    whether it was ended at its deadline.
    """

    result: str
    context: dict[str, object]
    succeeded: bool
    has_value: bool
    late: bool


def run_cell(
    code: str,
    context: Mapping[str, object],
    working_dir: str,
    timeout_s: float,
    packages: Sequence[str] = (),
    sandbox: str | None = None,
) -> Cell:
    """Runs one cell of a notebook.

    Args:
        context: names and their values before the cell, as an earlier cell returned them or plain values.
        working_dir: an absolute path; the cell starts there, and opens files only there.
        timeout_s: seconds after which it is ended, with everything it started; its names are then as before.
        packages: packages that may be imported besides the standard library and modules in `working_dir`.
        sandbox: one of `usable_sandbox`; None: the best that this machine has.
    """
    import cloudpickle

    given = {name: value for name, value in context.items() if name != STATE}
    state = context.get(STATE, b"")
    if not isinstance(state, bytes):
        raise EnvironmentFailure(f"context[{STATE!r}] is {type(state).__name__}, not what the last cell returned")
    with tempfile.TemporaryDirectory(prefix="nemo_rl_code_") as folder:
        answer = Path(folder) / "answer.json"
        cell = {
            "state": base64.b64encode(state).decode(),
            "given": base64.b64encode(cloudpickle.dumps(given)).decode(),
            "packages": list(packages),
            "working_dir": working_dir,
            "answer": str(answer),
        }
        request = {"code": code, "tests": "", "cell": cell}
        run = _judged(request, timeout_s, sandbox or usable_sandbox("auto"), folder, working_dir)
        value, kept = _answered(answer)
    result, names = run.output if value is None else _cut(value), dict(context) if kept is None else kept
    return Cell(result, names, run.succeeded, run.succeeded and value is not None, run.late)


def _answered(file: Path) -> tuple[str | None, dict[str, object] | None]:
    """Value and names that a cell wrote; None for each that it did not write."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None, None
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None, None
        try:
            answer = json.loads(opened.read(_ANSWER_LIMIT_BYTES))
            value = answer["value"]
            if "state" not in answer:
                return (None if value is None else str(value)), None
            kept = {str(name): json.loads(text) for name, text in answer["plain"].items()}
            return (None if value is None else str(value)), {**kept, STATE: base64.b64decode(answer["state"])}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # The response can write anything there.
            return None, None


def _judged(request: Mapping[str, object], timeout_s: float, sandbox: str, folder: str, *more_folders: str) -> CodeRun:
    """Runs the judge in `folder`; the sandbox lets the response write there and in `more_folders`."""
    secret = secrets.token_hex(16)
    verdict, verdict_end = os.pipe()
    with open(verdict, "rb") as report:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_JUDGE), "judge", str(verdict_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # No token or key of the run is in the environment of processes that run code.
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            pass_fds=(verdict_end,),
            bufsize=0,
        )
        os.close(verdict_end)
        whole = {
            "cell": None,
            **request,
            "code": str(request["code"]).encode(errors="replace").decode(),
            "sandbox": sandbox,
            "command": _COMMANDS[sandbox](folder, *more_folders) if sandbox in _COMMANDS else [],
            "secret": secret,
        }
        deadline = time.monotonic() + timeout_s
        output, why = _converse(process, json.dumps(whole).encode() + b"\n", deadline, (folder, *more_folders))
        _wait_for_end(process, folder)
        passed = not why and report.read() == f"{secret} passed".encode()
    late = why == _LATE
    why = f"ended after {timeout_s:g} s" if late else why
    return CodeRun(f"{_cut(output)}\n[{why}]".lstrip() if why else _cut(output), passed, late)


def _wait_for_end(judge: subprocess.Popen[bytes], folder: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        if judge.wait(_GRACE_S) == 0:
            return
    judge.kill()
    judge.wait()
    # Without namespaces a response can end or stop its judge; its processes are known by their directory.
    strays = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd().startswith(folder) or process.environ().get("HOME") == folder:
                strays.append(process)
    kill_and_wait(strays, _GRACE_S)


def usable_sandbox(wanted: str) -> str:
    """The sandbox of this machine: bubblewrap, namespaces of the kernel, or limits alone. Raises ConfigError: the
    requested sandbox does not work here.
    """
    problems = []
    for sandbox in SANDBOXES if wanted == "auto" else (wanted,):
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
    """Directories that are hidden from a response, and those inside them that it needs."""
    hidden = ["/tmp", str(Path.home())]
    needed = (path for path in (sys.base_prefix, sys.prefix, str(_JUDGE.parent)) if path.startswith(tuple(hidden)))
    return hidden, list(dict.fromkeys(needed))


def _bubblewrap(folder: str, *more_folders: str) -> list[str]:
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
        *(argument for path in (folder, *more_folders) for argument in ("--bind", path, path)),
        *("--chdir", folder),
    ]


def _nsjail(folder: str, *more_folders: str) -> list[str]:
    """The same with nsjail, which mounts in the order of its options and shuts files that are not named."""
    hidden, needed = _hidden()
    mounts = [argument for path in hidden for argument in ("--tmpfsmount", path)]
    mounts += [argument for path in needed for argument in ("--bindmount_ro", path)]
    own_limits = [argument for name in ("as", "cpu", "fsize", "nofile") for argument in (f"--rlimit_{name}", "def")]
    return [
        *("nsjail", "--mode", "o", "--quiet", "--time_limit", "0", "--keep_env", "--chroot", "/"),
        *own_limits,
        *mounts,
        *(argument for path in (folder, *more_folders) for argument in ("--bindmount", path)),
        *("--cwd", folder),
        *("--pass_fd", "{0}", "--pass_fd", "{1}", "--"),
    ]


_COMMANDS = {"bubblewrap": _bubblewrap, "nsjail": _nsjail}
_PROGRAMS = {
    "bubblewrap": ("bwrap", "Debian package bubblewrap"),
    "nsjail": ("nsjail", "https://github.com/google/nsjail"),
}


def _converse(
    process: subprocess.Popen[bytes], code: bytes, deadline: float, folders: Sequence[str]
) -> tuple[str, str]:
    """Feeds the code in and reads what it prints, of which only the beginning and the end are ever held; and why the
    process has to be ended, empty if it ended by itself. `folders`: where it may write, within limits.
    """
    head, tail, dropped, unsent = bytearray(), bytearray(), False, memoryview(code)
    if process.stdin is None or process.stdout is None:
        raise EnvironmentFailure("a process for a response's code has no standard input and output")
    with process.stdin, process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        open_ended, why, look = True, "", time.monotonic() + _LOOK_S
        before = [_written(folder) for folder in folders]
        while open_ended and not why:
            if (now := time.monotonic()) >= deadline:
                why = _LATE
            elif now >= look:
                why, look = _too_much(folders, before), time.monotonic() + _LOOK_S
            for key, _ in selector.select(max(0.0, min(deadline, look) - now)) if not why else ():
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
    return _text(head, tail, dropped), why


def _too_much(folders: Sequence[str], before: Sequence[tuple[int, int]]) -> str:
    """Why a response has written more than it may; empty if it has not."""
    for folder, (old_bytes, old_files) in zip(folders, before, strict=True):
        size, files = _written(folder)
        if size - old_bytes > FOLDER_LIMIT_BYTES or files - old_files > FOLDER_LIMIT_FILES:
            limits = f"{FOLDER_LIMIT_BYTES >> 20} MiB or {FOLDER_LIMIT_FILES} files"
            return f"ended: it wrote more than {limits} into its folder"
    return ""


def _written(folder: str) -> tuple[int, int]:
    """Bytes on the disk and files below a folder, counted up to the limit of files."""
    size, files, folders = 0, 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if files > 4 * FOLDER_LIMIT_FILES:
                    return size, files
    return size, files


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
