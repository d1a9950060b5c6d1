"""Sums as a taskset of the package `verifiers`, and a harness that asks the model once, without a process of its own.

Runs in the virtual environment of `verifiers`; `verifiers_agent.py` plays it:

    verifiers-env/bin/python examples/verifiers_agent.py verifiers_sums > sums.jsonl
    PYTHONPATH=examples python examples/run_grpo.py --config examples/configs/grpo_arithmetic_verifiers_cpu.yaml
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import verifiers.v1 as vf  # pyrefly: ignore[missing-import]

_TASKS, _MOST = 1200, 59


class SumData(vf.TaskData):
    """A sum. `answer`: what is right."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Asks for a sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right answer."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    """Random sums, the same in every process."""

    def load(self) -> Iterator[SumTask]:
        """All tasks."""
        draw = random.Random(0)
        for _ in range(_TASKS):
            a, b = draw.randint(0, _MOST), draw.randint(0, _MOST)
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


class AskOnceConfig(vf.HarnessConfig):
    """Has no keys of its own."""


class AskOnce(vf.Harness[AskOnceConfig]):
    """Sends the prompt and ends with the answer. verifiers' own `null` starts a program for each episode, which plays
    tools as well.
    """

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One request over verifiers' own proxy, which records it."""
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=600) as client:
            response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        failed = response.status_code != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=response.text if failed else "")


__all__ = ["AskOnce", "Sums"]
