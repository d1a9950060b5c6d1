"""Reads requests: their bodies, the session that they name, and what of them decides whether one continues another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import orjson

from nemo_rl.models.generation.endpoint.router_engine import BadRequest

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.requests import Request
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

SESSION_HEADER, SESSION_FIELD = "X-Session-ID", "session"


def named_session(request: Request) -> str | None:
    """The session of a request: by its path, its header, or its body once that is read; None outside of any."""
    named = request.path_params.get("session") or request.headers.get(SESSION_HEADER)
    return named or getattr(request.state, "session", None)


async def read_body(request: Request) -> dict[str, object]:
    """The JSON object of a request. Raises BadRequest: it is none, or asks for what vLLM's classes would pass over."""
    body = orjson.loads(await request.body())
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    # Of clients that cannot choose their address, but pass on what a row adds to its requests.
    named = body.pop(SESSION_FIELD, None)
    if named is not None and not isinstance(named, str):
        raise BadRequest(f"{SESSION_FIELD}: expected the id of a session, got {named!r:.100}")
    request.state.session = named
    if not isinstance(body.get("messages", []), list):
        raise BadRequest(f"messages: expected a list of messages, got {body['messages']!r:.100}")
    # Older names of structured outputs.
    if guided := sorted(name for name in body if name.startswith("guided_") and body[name] is not None):
        raise BadRequest(f"not supported here: {', '.join(guided)} (structured outputs); leave it out")
    if body.get("use_beam_search"):
        raise BadRequest("not supported here: use_beam_search; leave it out")
    if body.get("best_of") not in (None, 1, body.get("n", 1)):
        raise BadRequest("not supported here: best_of; ask for n answers and choose among them")
    return body


def with_free_calls(body: dict[str, object]) -> dict[str, object]:
    """The body without what holds calls of tools to a form: they are drawn freely, as the trainer takes it. Their
    tools' `strict` is left out, which the OpenAI Agents SDK sets by itself. Raises BadRequest: it asks for one call
    at most.
    """
    if body.pop("parallel_tool_calls", None) is False and body.get("tools"):
        raise BadRequest(
            "not supported here: parallel_tool_calls=false: calls are drawn freely, so that a response may have "
            "several; leave it out, and answer each call"
        )
    for tool in body["tools"] if isinstance(body.get("tools"), list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool["function"].pop("strict", None)
    return body


def plain(message: Mapping[str, object] | BaseModel) -> dict[str, object]:
    """A message as the client sent it."""
    return dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)


def setup_of(asked: ChatCompletionRequest) -> object:
    """What a chat template reads besides messages."""
    tools = None if asked.tools is None else [tool.model_dump() for tool in asked.tools]
    return [tools, asked.chat_template_kwargs, asked.chat_template, asked.documents, asked.reasoning_effort]
