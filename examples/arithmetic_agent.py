"""An agent for the smallest example: it asks the model for a sum, checks the answer with a tool of its own, and asks
once more where it is wrong. Any program that talks to an OpenAI-compatible server can stand in its place.

    python examples/run_grpo.py --config examples/configs/grpo_arithmetic_agent_cpu.yaml
"""

from __future__ import annotations

from typing import Any

import requests


def right(expected: str, answer: str) -> bool:
    """The tool: whether an answer is right."""
    return answer.strip() == expected


def play(task: dict[str, Any], base_url: str, session: Any, attempts: int = 2) -> float:
    """Full reward for the right answer at once, half of it for one at the next attempt."""
    messages: list[dict[str, str]] = list(task["messages"])
    for attempt in range(attempts):
        response = requests.post(
            f"{base_url}/chat/completions",
            headers={"Authorization": f"Bearer {session.api_key}"},
            json={"model": session.model, "messages": messages},
            timeout=600,
        )
        response.raise_for_status()
        answer = response.json()["choices"][0]["message"]
        if right(task["expected"], answer["content"]):
            return 0.5**attempt
        messages += [answer, {"role": "user", "content": task["messages"][-1]["content"]}]
    return 0.0
