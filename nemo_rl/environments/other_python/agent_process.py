"""Plays agents in another interpreter: a script of the standard library alone, which `other_interpreter` starts.

Reads JSON lines {id, task, base_url, session} or {cancel: id}, and writes {id, result} or {id, error, overflow} as
episodes end; {ready} before the first. Runs from Python 3.9 on and imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TextIO

_LONGEST_LINE = 1 << 28


class Player:
    """Plays episodes, and writes how they ended."""

    def __init__(self, agent: Callable[..., object], calls: int, requests: TextIO, replies: TextIO) -> None:
        self._agent = agent
        self._requests = requests
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="agent")
        self._replies = replies
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Plays until the requests end."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._requests)
        async for line in reader:
            request = json.loads(line)
            if "cancel" in request:
                playing = self._playing.get(request["cancel"])
                if playing is not None:
                    playing.cancel()
                continue
            number = request.pop("id")
            self._playing[number] = loop.create_task(self._play(number, **request))

    async def _play(self, number: int, task: object, base_url: str, session: Mapping[str, object]) -> None:
        try:
            result = await played(self._agent, self._threads, task, base_url, SimpleNamespace(**session))
            reply = {"id": number, "result": result}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the run decides what it means
            reply = {"id": number, "error": repr(error), "overflow": overflow_of(error)}
        finally:
            self._playing.pop(number, None)
        write(self._replies, reply)


async def played(agent: Callable[..., Any], threads: ThreadPoolExecutor, *given: object) -> object:
    """What an agent returns for `task, base_url, session`; one that is no coroutine plays on a thread."""
    if inspect.iscoroutinefunction(agent):
        return await agent(*given)
    result = await asyncio.get_running_loop().run_in_executor(threads, agent, *given)
    return await result if inspect.isawaitable(result) else result


# How the endpoint says that a prompt leaves no room.
_OVERFLOW = ("maximum context length", "leaves no room for a response")


def overflow_of(error: BaseException) -> str | None:
    """How an agent's error tells of a prompt that left no room: `said` where it, or what it was raised from, has the
    endpoint's words; `status` where it is an HTTP error without the text of the answer; None for any other error.
    """
    members = getattr(error, "exceptions", None)
    if isinstance(members, (tuple, list)) and members:
        found = [overflow_of(one) for one in members]
        return None if None in found else "status" if "status" in found else "said"
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    if any(words in f"{one} {_answer_of(one)}" for one in chain for words in _OVERFLOW):
        return "said"
    unread = (not _answer_of(one) and _status_of(one) >= 400 for one in chain)
    return "status" if any(unread) else None


def _answer_of(error: BaseException) -> str:
    """The body of the answer that an HTTP client's error holds: openai's, or that of requests and httpx."""
    body = getattr(error, "body", None)
    if body:
        return str(body)
    try:
        return str(getattr(getattr(error, "response", None), "text", None) or "")
    except Exception:  # noqa: BLE001 - httpx has no text of a stream that was not read
        return ""


def _status_of(error: BaseException) -> int:
    """The status of an HTTP client's error, 0 for any other: openai's, aiohttp's, urllib's, or that of requests and
    httpx.
    """
    response = getattr(error, "response", None)
    names = ((error, "status_code"), (error, "status"), (error, "code"), (response, "status_code"))
    found = [value for one, name in names if isinstance(value := getattr(one, name, None), int)]
    return max(found, default=0)


def write(replies: TextIO, message: Mapping[str, object]) -> None:
    """Writes one message as a line of JSON. Numbers of libraries become plain ones; a result without a form in JSON
    becomes an error.
    """
    try:
        text = json.dumps(message, default=float)
    except (TypeError, ValueError) as error:
        text = json.dumps({"id": message.get("id"), "error": f"its result cannot be passed on: {error}"})
    replies.write(text + "\n")
    replies.flush()


def agent_of(path: str, arguments: dict[str, object]) -> Callable[..., object]:
    """The agent behind a dotted path, built where it is a class."""
    module, _, name = path.rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    if isinstance(found, type):
        agent: Any = found(**arguments)
        return agent.run
    return functools.partial(found, **arguments)


def main() -> None:
    """Builds the agent and serves. The argument is a JSON object: `agent`, `arguments`, `calls` and `path`."""
    # Agents may print, and programs that they start may read standard input: requests and answers have descriptors of
    # their own, which no other program inherits.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    # Agents that come with this package are beside this script.
    sys.path[0:0] = settings["path"]
    # Programs that an agent starts, such as servers of its tools, find its modules as well.
    os.environ["PYTHONPATH"] = os.pathsep.join(settings["path"])
    agent = agent_of(settings["agent"], settings["arguments"])
    write(replies, {"ready": True})
    asyncio.run(Player(agent, settings["calls"], requests, replies).serve())
    # Threads of agents that still play would keep this process.
    os._exit(0)


if __name__ == "__main__":
    main()
