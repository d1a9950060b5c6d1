"""Python in responses: a notebook whose state goes on from turn to turn (`env.code`), judged by tests or by its output
(`env.code_tests`), or compared with a reference by its words (`env.code_jaccard`).

Code is the text between `<code>` and `</code>`, or in fenced blocks; `code_sandbox/running.py` runs it. Invariant: what
belongs to a conversation is in its metadata and its working directory, not in the environment.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from typing_extensions import override

from nemo_rl.config import CodeEnvConfig, CodeJaccardEnvConfig, CodeTestsEnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.processes import hide_process
from nemo_rl.environments.code_sandbox.cell import BLOCKED_IMPORTS
from nemo_rl.environments.code_sandbox.running import SANDBOXES, Cell, CodeRun, run_cell, run_python, usable_sandbox
from nemo_rl.environments.interfaces import (
    EnvironmentFailure,
    EnvironmentInterface,
    EnvironmentReturn,
    judged,
    response_of,
)

_TAGGED = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_STOP = ["</code>"]


class _CodeRunner(EnvironmentInterface[dict[str, object]]):
    """Common part of environments that run code: the sandbox, the threads, and the count of runs that did not end in
    time.
    """

    key = "env.code"

    def __init__(self, cfg: CodeTestsEnvConfig) -> None:
        self.sandbox = usable_sandbox(cfg.sandbox)
        if self.sandbox == "limits":
            # Nothing else keeps a response from reading the tokens in this process's environment.
            hide_process()
        self._threads = ThreadPoolExecutor(cfg.num_workers, thread_name_prefix="code")
        self._timeouts = 0

    @classmethod
    def start_line(cls, cfg: Mapping[str, object]) -> str:
        """Line that the environment prints at a run's start."""
        sandbox = usable_sandbox(str(cfg.get("sandbox", "auto")))
        return f"{cls.key}: code of responses runs in the sandbox {sandbox} ({SANDBOXES[sandbox]})"

    @override
    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds how many runs were ended at the deadline."""
        return batch, {"verify_timeouts": float(self._timeouts)}

    @override
    def shutdown(self) -> None:
        """Waits for running code, which its deadline bounds."""
        self._threads.shutdown()


class CodeEnvironment(_CodeRunner):
    """`env.code`: a notebook. The value of the last expression comes back in `<result>`, or the repr of what the cell
    raised; where it has neither, what the cell printed.

    Names go on in `metadata["context"]`, files in `metadata["working_dir"]`, which is made where a conversation has
    none. The reward is 1 when the result equals `ground_truth` of the metadata, else 0. With `terminate_on_evaluation`
    a value ends the episode, and a right answer that was printed; statements and errors do not. `cfg`: the keys of
    `env.code`.
    """

    @classmethod
    @override
    def start_line(cls, cfg: Mapping[str, object]) -> str:
        packages = ", ".join(CodeEnvConfig.model_validate(dict(cfg)).packages)
        return (
            f"{super().start_line(cfg)}; cells import the standard library without "
            f"{', '.join(BLOCKED_IMPORTS)}, modules of their folder, and env.code.packages ({packages or 'none'})"
        )

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeEnvConfig.model_validate(dict(cfg))
        super().__init__(self.cfg)
        self._root = Path(tempfile.mkdtemp(prefix="nemo_rl_notebooks_"))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Runs the cells of B responses; a response without code goes on as it is. Raises EnvironmentFailure: the
        metadata has `tests`, or a `context` or `working_dir` of a wrong type.
        """
        for item in metadata:
            _check_notebook(item)
        codes = [code_in(str(log[-1]["content"])) for log in message_log_batch]
        folders = [str(item.get("working_dir") or "") for item in metadata]
        for row, code in enumerate(codes):
            if code is not None:
                folders[row] = folders[row] or tempfile.mkdtemp(dir=self._root)
                Path(folders[row]).mkdir(parents=True, exist_ok=True)
        cells = list(self._threads.map(self._run, codes, metadata, folders))
        self._timeouts += sum(cell is not None and cell.late for cell in cells)
        rewards = [
            _equals(cell.result, item) if cell is not None and cell.succeeded else 0.0
            for cell, item in zip(cells, metadata, strict=True)
        ]
        ended = [
            self.cfg.terminate_on_evaluation and cell is not None and (cell.has_value or reward > 0)
            for cell, reward in zip(cells, rewards, strict=True)
        ]
        for folder, over in zip(folders, ended, strict=True):
            if over and Path(folder).parent == self._root:
                shutil.rmtree(folder, ignore_errors=True)
        return EnvironmentReturn(
            observations=[_in_notebook(cell.result if cell else "") for cell in cells],
            metadata=[
                dict(item)
                if cell is None
                else judged({**item, "context": cell.context, "working_dir": folder}, in_time=not cell.late)
                for item, cell, folder in zip(metadata, cells, folders, strict=True)
            ],
            next_stop_strings=[_STOP] * len(cells),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ended, dtype=torch.bool),
            answers=[None if cell is None else cell.result for cell in cells],
        )

    @override
    def shutdown(self) -> None:
        """Waits for running code, which its deadline bounds, and removes the directories it made."""
        super().shutdown()
        shutil.rmtree(self._root, ignore_errors=True)

    def _run(self, code: str | None, metadata: Mapping[str, object], folder: str) -> Cell | None:
        if code is None:
            return None
        context = metadata.get("context")
        known = context if isinstance(context, Mapping) else {}
        return run_cell(
            code, known, str(Path(folder).resolve()), self.cfg.run_timeout_s, self.cfg.packages, self.sandbox
        )


def _check_notebook(metadata: Mapping[str, object]) -> None:
    if metadata.get("tests"):
        raise EnvironmentFailure("env.code: a row has tests, by which env.code_tests judges; set env_name: code_tests")
    for name, kind in (("context", Mapping), ("working_dir", str)):
        value = metadata.get(name)
        if value is not None and not isinstance(value, kind):
            raise EnvironmentFailure(
                f"env.code: metadata[{name!r}] is {type(value).__name__}; expected "
                f"{'a mapping of names to values' if name == 'context' else 'a path'}"
            )


def _in_notebook(result: str) -> dict[str, str]:
    """A result on the line of its cell, or on lines of its own where it has several."""
    content = f"<result>{result}</result>" if "\n" not in result else f"\n<result>\n{result}\n</result>\n"
    return {"role": "environment", "content": content if result else ""}


def _shown(result: str | None) -> dict[str, str]:
    return {"role": "environment", "content": "" if result is None else f"\n<result>\n{result}\n</result>\n"}


def _equals(result: str, metadata: Mapping[str, object]) -> float:
    expected = metadata.get("ground_truth")
    return float(expected is not None and result == str(expected).strip())


class CodeTestsEnvironment(_CodeRunner):
    """`env.code_tests`: a fresh interpreter for every response.

    The reward is 1 when the code runs and, if the metadata has `tests` (Python that uses its names), those pass, or if
    it has `ground_truth`, the output equals it; without either it is 0 and only the output is of use. `cfg`: the keys
    of `env.code_tests`.
    """

    key = "env.code_tests"

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeTestsEnvConfig.model_validate(dict(cfg))
        super().__init__(self.cfg)

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        """Runs the code of B responses; a response without code ends its conversation."""
        codes = [code_in(str(log[-1]["content"])) for log in message_log_batch]
        runs = list(self._threads.map(self._run, codes, metadata))
        self._timeouts += sum(run is not None and run.late for run in runs)
        return EnvironmentReturn(
            observations=[_shown(None if run is None else run.output) for run in runs],
            metadata=[
                item if run is None else judged(item, in_time=not run.late)
                for run, item in zip(runs, metadata, strict=True)
            ],
            next_stop_strings=[_STOP] * len(runs),
            rewards=torch.tensor([_reward(run, item) for run, item in zip(runs, metadata, strict=True)]),
            terminateds=torch.tensor(
                [run is None or self.cfg.terminate_on_evaluation for run in runs], dtype=torch.bool
            ),
            answers=[None if run is None else run.output for run in runs],
        )

    def _run(self, code: str | None, metadata: Mapping[str, object]) -> CodeRun | None:
        if code is None:
            return None
        return run_python(code, self.cfg.run_timeout_s, str(metadata.get("tests") or ""), self.sandbox)


def _reward(run: CodeRun | None, metadata: Mapping[str, object]) -> float:
    if run is None or not run.succeeded:
        return 0.0
    if metadata.get("tests"):
        return 1.0
    return _equals(run.output, metadata)


def code_in(response: str) -> str | None:
    """The code of a response; None without any."""
    # A stop string may have cut the closing tag off.
    closed = response + "</code>" if response.count("<code>") > response.count("</code>") else response
    blocks = _TAGGED.findall(closed) or _FENCED.findall(closed)
    return "\n".join(blocks) if blocks else None


class CodeJaccardEnvironment(EnvironmentInterface[dict[str, object]]):
    """`env.code_jaccard`. `cfg`: the keys of `env.code_jaccard`."""

    needs = ("ground_truth",)

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self.cfg = CodeJaccardEnvConfig.model_validate(dict(cfg))

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[dict[str, object]]
    ) -> EnvironmentReturn[dict[str, object]]:
        answers = [response_of(log) for log in message_log_batch]
        rewards = [jaccard(answer, str(item["ground_truth"])) for answer, item in zip(answers, metadata, strict=True)]
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
    """Words in common over words in either, times the shorter text's length over the longer's; words are lower-cased
    and separated by white space. Two texts without words are equal.
    """
    left, right = left.strip().lower(), right.strip().lower()
    left_words, right_words = set(left.split()), set(right.split())
    either = left_words | right_words
    if not either:
        return 1.0
    return len(left_words & right_words) / len(either) * min(len(left), len(right)) / max(len(left), len(right))
