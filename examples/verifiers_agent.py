"""Trains on the tasks of a taskset of the package `verifiers` (0.4 and later), which brings its own tools and rewards.

The package has a virtual environment of its own, which plays the agent: `env.<name>.python`. The prompts of the run
are the tasks' numbers, which this file writes when it is run:

    python -m venv verifiers-env && verifiers-env/bin/pip install verifiers uv
    verifiers-env/bin/python examples/verifiers_agent.py TASKSET [KEY=VALUE ...] > tasks.jsonl

    data:
      train: { dataset_name: ResponseDataset, data_path: tasks.jsonl, env_name: taskset }
    env:
      taskset: { agent: verifiers_agent.Verifiers, python: verifiers-env/bin/python, taskset: TASKSET }

with this folder on PYTHONPATH, the taskset's keys (`KEY: VALUE`) in `env.taskset` as well, and `verifiers-env/bin` on
PATH, for the `uv` that starts its chat program.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

_KEY = "NRL_AGENT_API_KEY"


class Verifiers:
    """Plays tasks of a taskset.

    Args:
        taskset: Its id: the name of its module, or of one that verifiers has.
        harness: Id of the program that talks to the model; `null` is verifiers' plain chat loop with tools.
        options: Further keys of the taskset.
    """

    def __init__(self, taskset: str, harness: str = "null", **options: Any) -> None:
        vf: Any = importlib.import_module("verifiers.v1")
        agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": taskset, **options}, "agent": agent, "max_concurrent_agents": None}
        self._vf = vf
        self._env: Any = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(**config))
        self.tasks: list[Any] = list(self._env.taskset)
        self._serving = AsyncExitStack()
        self._starting: asyncio.Task[Any] | None = None

    async def run(self, task: dict[str, Any], base_url: str, session: Any) -> dict[str, float]:
        """Plays the task whose number the row has as its answer; its rewards by name."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._serving.enter_async_context(self._env.serving()))
        await asyncio.shield(self._starting)
        # The clients of verifiers read keys from the environment; all sessions of a run have the same.
        os.environ[_KEY] = session.api_key
        client = self._vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY)
        model = self._vf.ModelContext(session.model, client)
        episode = await self._env.run_episode(self.tasks[int(task["expected"])], model)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        rewards = {name: reward for trace in episode.traces for name, reward in trace.rewards.items()}
        return {name: 0.0 if reward is None else float(reward.value) for name, reward in rewards.items()}


def main() -> None:
    """Writes the prompts of a taskset with their numbers. Arguments: its id, and its keys as KEY=VALUE."""
    taskset, *given = sys.argv[1:]
    keys: dict[str, Any] = dict(each.split("=", 1) for each in given)
    for number, task in enumerate(Verifiers(taskset, **keys).tasks):
        sys.stdout.write(json.dumps({"input": str(task.data.prompt), "output": str(number)}) + "\n")


if __name__ == "__main__":
    main()
