"""Runs one response's code and its tests, each in an interpreter of its own. A script that imports nothing of nemo_rl.

The judge confines the response's process and runs the tests, whose calls of the response go over `remote_calls.py`. It
writes the verdict to a pipe that the response never has, and kills what the response started. Invariant: the response's
code runs only in its own process, which never sees the tests or the secret.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import types

# The script's folder is no place for the response, nor for the tests, to import from.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cell import run_cell  # pyrefly: ignore[missing-import]
from remote_calls import Channel, Response, serve  # pyrefly: ignore[missing-import]

sys.path.pop(0)

MEMORY_LIMIT_BYTES = 2 * 1024**3
FILE_LIMIT_BYTES = 64 * 1024**2
PROCESS_LIMIT = 256
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_CAPABILITIES, _CAPABILITY_VERSION = 64, 0x20080522
# CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
_NAMESPACES = 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_ALIASES = {"np": "numpy", "pd": "pandas"}
_LIBC = ctypes.CDLL(None, use_errno=True)


def judge() -> None:
    """Reads {code, tests, sandbox, command, secret, cell} from standard input and judges."""
    # Neither the memory nor the environment of this process is open to the response's, which has the same user.
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = json.loads(sys.stdin.buffer.readline())
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - for as long as the process
    ours, theirs = socket.socketpair()
    status, status_end = os.pipe()
    descriptors = (str(theirs.fileno()), str(status_end))
    # Programs that pass on named descriptors alone have places for them.
    places = dict(zip(("{0}", "{1}"), descriptors, strict=True))
    command = [places.get(part, part) for part in request["command"]]
    subprocess.Popen(
        [*command, sys.executable, "-I", __file__, "play", *descriptors, request["sandbox"]],
        pass_fds=(theirs.fileno(), status_end),
        start_new_session=True,
        preexec_fn=_confine,  # noqa: PLW1509 - the other thread only waits for a pipe
    )
    theirs.close()
    os.close(status_end)
    channel = Channel(ours)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send({"code": request["code"], "tests": bool(request["tests"]), "cell": request["cell"]})
    if request["tests"]:
        passed = _passes(Response(channel), request["tests"])
        ours.shutdown(socket.SHUT_RDWR)
    else:
        passed = os.read(status, 16) == b"0"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.write(report, f"{request['secret']} {'passed' if passed else 'failed'}".encode())
    os.close(report)
    # The environment reads the output to its end; what the response left running may still be writing.
    _keep_no_output(ours)
    while True:
        signal.pause()


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _end_with(lifeline: int) -> None:
    """Ends all that the response started, then this process, when the environment closes its end."""
    with contextlib.suppress(OSError):
        while os.read(lifeline, 4096):
            pass
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            # Children of a killed process are reparented to this one, its reaper.
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            os._exit(0)
        time.sleep(0.001)


def _children() -> list[int]:
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as listed:
            found += [int(child) for child in listed.read().split()]
    return found


def _passes(response: Response, tests: str) -> bool:
    """Whether the tests run to their end without an error, on plain values alone."""
    passed = _ends_well(response, tests)
    if passed and response.refusals:
        sys.stderr.write(f"the tests do not count: {response.refusals[0]}\n")
    return passed and not response.refusals


def _ends_well(response: Response, tests: str) -> bool:
    module = types.ModuleType("__main__")
    names = vars(module)
    names["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [""]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    try:
        tree = ast.parse(tests, "<tests>")
        hidden, modules = names_kept(tree)
        for name in modules:
            with contextlib.suppress(ImportError):
                names[name] = importlib.import_module(_ALIASES.get(name, name))
        wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - hidden
        bound: dict[str, object] = {}
        for statement in tree.body:
            # Plain globals of the response may have changed with every call.
            for name, value in response.names(wanted).items():
                if name not in hidden and (name not in names or (name in bound and names[name] is bound[name])):
                    names[name] = bound[name] = value
            exec(compile(ast.Module([statement], []), "<tests>", "exec", dont_inherit=True), names)
    except SystemExit as ended:
        # `unittest.main()` ends so; the response's own is no verdict.
        return not any(ended is failure for failure in response.failures) and ended.code in (None, 0, False)
    except BaseException as error:  # noqa: BLE001 - a test may end in anything
        if isinstance(error, NameError) and error.name in response.left_out:
            error.add_note(f"{error.name} is a {response.left_out[error.name]} in the response, no plain value")
        if not isinstance(error, EOFError):
            _show(error, "<tests>")
        return False
    return True


def names_kept(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names that tests never take from the response, and of these the modules that they use without importing them.

    A name of a built-in is the response's only where tests use no other name of it: otherwise `abs` in the tests is
    Python's, whatever the response calls `abs`.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    through = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
    modules = {name for name in through - own if name in sys.stdlib_module_names or name in _ALIASES}
    python = set(dir(builtins))
    return (python | modules if used - own - modules - python else modules), modules


def _show(error: BaseException, source: str) -> None:
    """Prints an error as Python does, without frames of the sandbox."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if frame.filename == source])
    with contextlib.suppress(Exception):  # the response may have put anything there
        sys.stderr.write("".join(shown.format()))
        sys.stderr.flush()


def _enter_namespaces() -> None:
    if _LIBC.unshare(_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "this process may not have namespaces of its own")
    # In a user namespace of its own the limit counts the response's processes alone.
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESS_LIMIT, PROCESS_LIMIT))
    with contextlib.suppress(OSError), socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _give_up_capabilities() -> None:
    """Without them even root's process cannot read the memory and environment of the run's processes."""
    for capability in range(_CAPABILITIES):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if _LIBC.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def _keep_no_output(channel: socket.socket) -> None:
    channel.close()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def play() -> None:
    """Runs the response's code, then serves its names to the tests until they are done."""
    channel, status = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    if sys.argv[4] == "namespaces":
        _enter_namespaces()
        if (first := os.fork()) != 0:
            _keep_no_output(channel)
            os.close(status)
            os.waitpid(first, 0)
            os._exit(0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # This process waits for all that the response starts, as the first of a namespace must; the response is its child.
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child:
        _keep_no_output(channel)
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, how = os.wait()
                if ended == child:
                    os.write(status, b"%d" % how)
        os._exit(0)
    _give_up_capabilities()
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.close(status)
    channel.set_inheritable(False)
    messages = Channel(channel)
    task = messages.receive()
    sys.argv = ["-"]
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if task["cell"]:
        sys.exit(0 if run_cell({"code": task["code"], **task["cell"]}) else 1)
    try:
        exec(compile(task["code"], "<stdin>", "exec", dont_inherit=True), vars(module))
    except SystemExit as ended:
        # A script may end so on purpose; its tests still run.
        if not task["tests"] or ended.code not in (None, 0):
            raise
    except BaseException as error:  # noqa: BLE001 - of the response
        _show(error, "<stdin>")
        sys.exit(1)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if task["tests"]:
        serve(messages, module)


if __name__ == "__main__":
    {"judge": judge, "play": play}[sys.argv[1]]()
