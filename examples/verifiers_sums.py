"""Sums as a taskset of the package `verifiers`, with a tool to add, and a harness that plays it in the agent's process.

Runs in the virtual environment of `verifiers`; `verifiers_agent.py` plays it. The small model is warmed up as
`openai_agent.py` says, by its first three commands; then:

    verifiers-env/bin/python examples/verifiers_agent.py verifiers_sums > sums.jsonl
    PYTHONPATH=examples python examples/run_grpo.py --config examples/configs/grpo_arithmetic_verifiers_cpu.yaml
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, ClassVar

import verifiers.v1 as vf  # pyrefly: ignore[missing-import]
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyrefly: ignore[missing-import]

_MAX_TURNS = 3


class SumsConfig(vf.TasksetConfig):
    """Keys of `env.<name>` for this taskset."""

    count: int = 1200
    max_operand: int = 59


class SumData(vf.TaskData):
    """A sum. `answer`: the right one."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Asks for a sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right answer."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    """A server of one tool, which all episodes share."""

    TOOL_PREFIX: ClassVar[str | None] = None  # the tool is called `add`, without the name of its server

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Random sums, the same in every process."""

    def load(self) -> Iterator[SumTask]:
        """All tasks."""
        draw = random.Random(0)
        for _ in range(self.config.count):
            a, b = draw.randint(0, self.config.max_operand), draw.randint(0, self.config.max_operand)
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        """The tools."""
        return [Adder(vf.SharedToolsetConfig())]


# Each client reads the certificates of the machine when it is made: episodes share them.
@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600)


@cache
def _connected(*urls: tuple[str, str]) -> asyncio.Task[Any]:
    servers = {name: {"url": url} for name, url in urls}
    return asyncio.ensure_future(connect_mcp({"mcpServers": servers}, AsyncExitStack()))


class ChatConfig(vf.HarnessConfig):
    """Has no keys of its own."""


class Chat(vf.Harness[ChatConfig]):
    """Asks the model and calls its tools until it answers. verifiers' own `null` starts a program for each episode."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = True

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
        """Plays over verifiers' own proxy, which records the conversation."""
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        tools, owners, clients = await asyncio.shield(_connected(*mcp_urls.items()))
        model: Any = _client().with_options(base_url=endpoint, api_key=secret)
        for _ in range(_MAX_TURNS):
            response = await model.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
            answer = response.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls or ():
                name, given = call.function.name, call.function.arguments
                known = name in owners
                content = await call_mcp(clients, owners, name, json.loads(given)) if known else f"no tool {name}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if not answer.tool_calls:
                break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Chat", "Sums"]

if __name__ == "__main__":
    Adder.run()
