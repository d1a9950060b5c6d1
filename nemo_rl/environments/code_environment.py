"""Judges code: by running the Python that a response contains and answering with what it printed, or by its overlap
with a reference (the Jaccard index of their words: equal texts earn 1, disjoint ones 0).

Code is what stands between `<code>` and `</code>`, or in fenced blocks. It runs in a fresh interpreter in an empty
directory with limits on time, memory, output and the size of a file; that keeps accidents small, but it is no sandbox:
run untrusted models in a container. Invariant: no run outlives its deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from typing_extensions import override

from nemo_rl.config import CodeEnvConfig, CodeJaccardEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentFailure, EnvironmentInterface, EnvironmentReturn, response_of

MEMORY_LIMIT_BYTES = 2 * 1024**3
FILE_LIMIT_BYTES = 64 * 1024**2
OUTPUT_LIMIT_CHARS = 4000
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
    error.
    """

    output: str
    succeeded: bool


class CodeEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.code`.

    The reward is 1 when the code runs and, if the metadata has `tests` (Python that runs after it), those pass, or if
    it has `ground_truth`, the output equals it; without either it is 0 and only the output is of use.

    Args:
        cfg: the keys of `env.code`.
    """

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeEnvConfig.model_validate(dict(cfg))
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="code")

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
        return run_python(f"{code}\n{metadata.get('tests') or ''}", self.cfg.run_timeout_s)


def code_in(response: str) -> str | None:
    """The code of a response; None without any."""
    # A stop string may have cut the closing tag off.
    closed = response + "</code>" if response.count("<code>") > response.count("</code>") else response
    blocks = _TAGGED.findall(closed) or _FENCED.findall(closed)
    return "\n".join(blocks) if blocks else None


def run_python(code: str, timeout_s: float) -> Run:
    """Runs code in a fresh interpreter.

    Args:
        code: Python source.
        timeout_s: seconds after which it is ended, with everything it started.
    """
    with tempfile.TemporaryDirectory(prefix="nemo_rl_code_") as folder:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))
        output, ended = _converse(process, code.encode(errors="replace"), time.monotonic() + timeout_s)
        if not ended:
            # The process itself may have ended, with something that it started still printing.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Run(f"{_cut(output)}\n[ended after {timeout_s:g} s]".lstrip(), False)
    return Run(_cut(output), process.returncode == 0)


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
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK_BYTES)
                open_ended = bool(chunk)
                room = max(0, _KEPT_BYTES - len(head))
                head += chunk[:room]
                tail += chunk[room:]
                dropped = dropped or len(tail) > _KEPT_BYTES
                del tail[:-_KEPT_BYTES]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    return _text(head, tail, dropped), process.returncode is not None and not open_ended


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
    """`env.code_jaccard`.

    Args:
        cfg: the keys of `env.code_jaccard`.
    """

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
