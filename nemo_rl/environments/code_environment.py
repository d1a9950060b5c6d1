"""Runs the Python that a response contains and answers with what it printed.

Code is what stands between `<code>` and `</code>`, or in fenced blocks. It runs in a fresh interpreter in an empty directory with limits on
time and memory; that keeps accidents small, but it is no sandbox: run untrusted models in a container. Invariant: no run outlives its deadline.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from nemo_rl.config import CodeEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

MEMORY_LIMIT_BYTES = 2 * 1024**3
OUTPUT_LIMIT_CHARS = 4000
_TAGGED = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Run:
    """What running a piece of code gave: its output (both streams, cut), and whether it ended by itself without an error."""

    output: str
    succeeded: bool


class CodeEnvironment(EnvironmentInterface[dict[str, Any]]):
    """`env.code`.

    The reward is 1 when the code runs and, if the metadata has `tests` (Python that runs after it), those pass, or if it has
    `ground_truth`, the output equals it; without either it is 0 and only the output is of use.

    Args:
        cfg: the keys of `env.code`.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg = CodeEnvConfig.model_validate(dict(cfg))
        self._threads = ThreadPoolExecutor(self.cfg.num_workers, thread_name_prefix="code")

    @override
    def step(self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, Any]]) -> EnvironmentReturn[dict[str, Any]]:
        """Runs the code of B responses; a response without code ends its conversation."""
        codes = [code_in(str(log[-1]["content"])) for log in message_log_batch]
        runs = list(self._threads.map(self._run, codes, metadata))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "" if run is None else f"\n<result>\n{run.output}\n</result>\n"} for run in runs],
            metadata=list(metadata),
            next_stop_strings=[["</code>"]] * len(runs),
            rewards=torch.tensor([_reward(run, item) for run, item in zip(runs, metadata, strict=True)]),
            terminateds=torch.tensor([run is None or self.cfg.terminate_on_evaluation for run in runs], dtype=torch.bool),
            answers=[None if run is None else run.output for run in runs],
        )

    @override
    def shutdown(self) -> None:
        """Waits for running code, which its deadline bounds."""
        self._threads.shutdown()

    def _run(self, code: str | None, metadata: Mapping[str, Any]) -> Run | None:
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
            text=True,
            errors="replace",
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        try:
            output, _ = process.communicate(code, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Run(f"{_cut(output)}\n[ended after {timeout_s:g} s]".lstrip(), False)
    return Run(_cut(output), process.returncode == 0)


def _cut(output: str) -> str:
    text = output.strip()
    return text if len(text) <= OUTPUT_LIMIT_CHARS else f"{text[: OUTPUT_LIMIT_CHARS // 2]}\n[...]\n{text[-OUTPUT_LIMIT_CHARS // 2 :]}"


def _reward(run: Run | None, metadata: Mapping[str, Any]) -> float:
    if run is None or not run.succeeded:
        return 0.0
    if metadata.get("tests"):
        return 1.0
    return float(run.output == str(metadata["ground_truth"]).strip()) if metadata.get("ground_truth") is not None else 0.0
