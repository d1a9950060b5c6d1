"""Agents of another interpreter: they play, fail, are cancelled and end with their process, each by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.config import ConfigError, EnvConfig, load_master_config
from nemo_rl.environments.environment_registry import environment_class
from nemo_rl.environments.interfaces import AgentSession
from nemo_rl.environments.other_interpreter import AgentError, OtherInterpreter

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_agent_cpu.yaml"
SESSION = AgentSession("s", "http://x/v1", "policy", "key", 7)
AGENTS = """
import asyncio, fractions, os, subprocess, sys, threading, time

class Parts:
    def __init__(self, factor):
        self.factor = factor

    def run(self, task, base_url, session):
        print("agents may print")
        assert "nemo_rl" not in sys.modules
        if task["what"] == "end":
            os.kill(os.getpid(), 9)
        if task["what"] == "fail":
            raise KeyError("oops")
        if task["what"] == "read":
            return [len(sys.stdin.read()), subprocess.run(["cat"], capture_output=True).returncode]
        if task["what"] == "full":
            raise RuntimeError("the model failed") from ValueError("the prompt leaves no room for a response")
        if task["what"] == "odd":
            return {"x": object()}
        if task["what"] == "program":
            return subprocess.run([sys.executable, "-c", "import far_agents"]).returncode
        return {"x": fractions.Fraction(1, 2) * self.factor, "seed": session.seed, "url": len(base_url)}

async def waits(task, base_url, session):
    if "s" not in task:
        return len(asyncio.all_tasks())
    try:
        if "began" in task:
            open(task["began"], "w").close()
        await asyncio.sleep(task["s"])
    except asyncio.CancelledError:
        open(task["told"], "w").close()
        raise
    return 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "far_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


def test_an_agent_plays_fails_and_ends_with_its_process_by_name(folder: Path) -> None:
    far = OtherInterpreter(sys.executable, "far_agents.Parts", {"factor": 3}, calls=2, key="env.mine")

    async def story() -> None:
        async def play(what: str) -> object:
            return await far.run({"what": what}, "http://x/v1", SESSION)

        assert await asyncio.gather(play("a"), play("b")) == [{"x": 1.5, "seed": 7, "url": 11}] * 2
        # A program that it starts finds its modules.
        assert await play("program") == 0
        with pytest.raises(AgentError, match="KeyError\\('oops'\\)"):
            await play("fail")
        with pytest.raises(AgentError, match="cannot be passed on"):
            await play("odd")
        with pytest.raises(AgentError, match="env.mine.python ended with exit code -9"):
            await play("end")
        # The next episode has a new process.
        assert await play("a") == {"x": 1.5, "seed": 7, "url": 11}

    asyncio.run(story())
    far.close()


def test_programs_that_read_standard_input_take_nothing_of_other_episodes(folder: Path) -> None:
    far = OtherInterpreter(sys.executable, "far_agents.Parts", {"factor": 3}, calls=32, key="env.mine")

    async def story() -> None:
        async with asyncio.timeout(60):
            what = ["read" if number % 3 == 0 else "a" for number in range(32)]
            got = await asyncio.gather(*(far.run({"what": one}, "http://x/v1", SESSION) for one in what))
        whole = {"x": 1.5, "seed": 7, "url": 11}
        assert got == [[0, 0] if one == "read" else whole for one in what]

    asyncio.run(story())
    far.close()


@pytest.mark.parametrize(("what", "overflow"), [("full", "said"), ("fail", None)])
def test_an_agents_error_says_whether_its_prompt_left_no_room(what: str, overflow: str | None, folder: Path) -> None:
    far = OtherInterpreter(sys.executable, "far_agents.Parts", {"factor": 3}, calls=1, key="env.mine")
    with pytest.raises(AgentError) as caught:
        asyncio.run(far.run({"what": what}, "http://x/v1", SESSION))
    assert caught.value.overflow == overflow
    far.close()


def test_an_episode_that_is_given_up_is_cancelled_there(folder: Path) -> None:
    far = OtherInterpreter(sys.executable, "far_agents.waits", {}, calls=1, key="env.mine")
    began, told = folder / "began", folder / "told"

    async def story() -> None:
        playing = asyncio.ensure_future(far.run({"s": 600, "began": str(began), "told": str(told)}, "u", SESSION))
        async with asyncio.timeout(60):
            while not began.exists():
                await asyncio.sleep(0.01)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            while not told.exists():
                await asyncio.sleep(0.01)

    asyncio.run(story())
    os.kill(far._running.process.pid, signal.SIGTERM)
    far.close()


def test_an_episode_that_is_given_up_before_it_is_sent_is_not_played_on(folder: Path) -> None:
    far = OtherInterpreter(sys.executable, "far_agents.waits", {}, calls=1, key="env.mine")

    async def story() -> None:
        with far._lock:
            playing = asyncio.ensure_future(far.run({"s": 600, "told": str(folder / "told")}, "u", SESSION))
            await asyncio.sleep(0.2)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        async with asyncio.timeout(60):
            # What is left there: the one that serves, and this episode.
            while await far.run({}, "u", SESSION) != 2:
                await asyncio.sleep(0.05)

    asyncio.run(story())
    far.close()


@pytest.mark.parametrize(
    ("python", "agent", "says"),
    [
        ("/nowhere/python", "far_agents.waits", "env.mine.python: /nowhere/python cannot be run"),
        (sys.executable, "far_agents.missing", "far_agents.missing cannot be built by env.mine.python"),
        ("/bin/true", "far_agents.waits", "it ended with exit code 0"),
    ],
)
def test_what_cannot_play_is_refused_before_anything_is_asked(folder: Path, python: str, agent: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OtherInterpreter(python, agent, {}, calls=1, key="env.mine")
    if says.startswith("env"):
        section = EnvConfig.read({"mine": {"agent": agent, "python": python}}).of("mine")
        with pytest.raises(ConfigError, match=says):
            environment_class("mine", section)


def test_an_interpreter_without_an_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="python is the interpreter of an agent"):
        load_master_config(
            CONFIG,
            [
                "env.sums.agent=null",
                "env.sums.function=builtins.len",
                "env.sums.python=/usr/bin/python3",
            ],
        )
