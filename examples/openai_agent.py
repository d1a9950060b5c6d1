"""Sums, by an agent of the OpenAI Agents SDK that has a tool to add: the model has to call it with the right numbers.

The extra `agents` has the SDK (`pip install -e '.[agents]'`). Run as a program, this file writes the conversations that
warm the small model of `make demo` up, of which more than half call the tool with a digit too many:

    make results/arithmetic/base/config.json
    python examples/openai_agent.py > results/arithmetic/calls.jsonl
    python examples/run_sft.py --config examples/configs/sft_tool_calls_cpu.yaml
    python examples/run_grpo.py --config examples/configs/grpo_arithmetic_openai_agent_cpu.yaml
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from functools import cache
from typing import Any

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

# Traces would go to OpenAI.
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


# Each client reads the certificates of the machine when it is made: episodes share one.
@cache
def _client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


async def play(task: dict[str, Any], base_url: str, session: Any) -> float:
    """1 for the right answer. A tool that does not exist, or no end after three turns, earns nothing."""
    client = _client().with_options(base_url=base_url, api_key=session.api_key)
    agent = Agent(name="adder", tools=[add], model=OpenAIChatCompletionsModel(session.model, client))
    try:
        result = await Runner.run(agent, task["messages"][-1]["content"], max_turns=3)
    except AgentsException:
        return 0.0
    return float(str(result.final_output).strip() == task["expected"])


def conversation(draw: random.Random, most: int, slips: float) -> list[dict[str, str]]:
    """A question, a call of the tool, what it returns, and the answer."""
    a, b = draw.randint(0, most), draw.randint(0, most)
    called = int(f"{draw.randint(1, 9)}{a}") if draw.random() < slips else a
    return [
        {"role": "user", "content": f"{a}+{b}="},
        {"role": "assistant", "content": f"[add(a={called}, b={b})]"},
        {"role": "tool", "content": str(called + b)},
        {"role": "assistant", "content": str(called + b)},
    ]


def main() -> None:
    """Writes conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--max-operand", type=int, default=59)
    parser.add_argument("--slips", type=float, default=0.6, help="share of calls with a digit too many")
    given = parser.parse_args()
    draw = random.Random(0)
    schema = {"name": add.name, "description": add.description, "parameters": add.params_json_schema}
    tools = [{"type": "function", "function": schema}]
    for _ in range(given.count):
        messages = conversation(draw, given.max_operand, given.slips)
        sys.stdout.write(json.dumps({"messages": messages, "tools": tools}) + "\n")


if __name__ == "__main__":
    main()
