"""The HTTP server: an OpenAI-compatible endpoint on a thread of its own in the driver, beside the dispatcher.

Checks the token and the limits, finds the session of a request, has vLLM's classes answer it, and records what was
sampled. Requests wait while shards sleep, are synced, die or are lent; past the deadline the answer is 503 with
Retry-After, or the end of a stream that has begun. Invariant: a response is recorded before the client gets its end,
and not at all if the client is gone before.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.config.errors import UserError
from nemo_rl.config.generation import HttpServerConfig
from nemo_rl.models.generation.endpoint.endpoint_http import (
    EndpointError,
    Slots,
    TooLarge,
    answer_of,
    bound_socket,
    connections,
    error_response,
    event_stream,
    guarded,
    json_response,
    no_such_path,
    root_url,
    unavailable,
    unless_gone,
)
from nemo_rl.models.generation.endpoint.router_engine import (
    BadRequest,
    Call,
    GenerateOne,
    NoRoom,
    check_full,
    check_sampling,
    current_call,
    is_overflow,
)
from nemo_rl.models.generation.endpoint.serving import MODEL, Serving, make_serving
from nemo_rl.models.generation.endpoint.session import Session, SessionPlan, Turn
from nemo_rl.models.generation.endpoint.streamed_answers import StreamedAnswers, chunk_of, event_of, events_of, may_end
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.http_server import BackgroundServer, Bounds

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from transformers import PreTrainedTokenizerBase
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
    """The request's inputs to the chat template besides messages."""
    tools = None if asked.tools is None else [tool.model_dump() for tool in asked.tools]
    return [tools, asked.chat_template_kwargs, asked.chat_template, asked.documents, asked.reasoning_effort]


logger = logging.getLogger(__name__)

Record = Callable[[Sequence[Mapping[str, object]]], list[Turn]]

_KEY = "policy.generation.vllm_cfg.http_server"
_KEEP_ALIVE_S = 3600.0
_REQUEST_S, _BODY_S = 10.0, 60.0
_START_S = 60.0
_END_S = 10.0


class UnknownSession(UserError, LookupError):
    """A session that is not open."""


class Endpoint:
    """A running server.

    Args:
        serving: vLLM's handlers.
        config: Host, limits and deadline.
        ports: First and last port to try.

    Attributes:
        base_url: Address for clients, such as `http://127.0.0.1:3000/v1`.
        model: The name of the model that clients ask for.
        token: Token that clients send as `Authorization: Bearer`; None where none is required.

    Raises EndpointError: no port is free, the address cannot be bound, or the token's variable is not set.
    """

    model = MODEL

    def __init__(self, serving: Serving, config: HttpServerConfig, ports: tuple[int, int]) -> None:
        self._serving = serving
        self._config = config
        self.token = _token(config.token_variable)
        self._sessions: dict[str, Session] = {}
        self._slots = Slots(config.max_requests)
        bound = bound_socket(config.host, ports)
        self._root = root_url(bound)
        self.base_url = f"{self._root}/v1"
        self._server = BackgroundServer(
            guarded(self._app(), self.token, config.max_body_bytes),
            name="generation-endpoint",
            listening=bound,
            bounds=Bounds(
                request_s=_REQUEST_S,
                body_s=_BODY_S,
                # The request's own deadline ends it before; this one ends a client that does not read.
                answer_s=config.deadline_s + _BODY_S,
                # Agents keep their connection while they think: one that is closed as they ask again is an error.
                idle_s=_KEEP_ALIVE_S,
                visitors=connections(),
            ),
            loop="auto",
        )
        try:
            self._server.wait_until_started(_START_S)
        except RuntimeError as error:
            self.close()
            raise EndpointError(f"{_KEY}: {error}") from error
        # Requests make many short-lived objects. A full collection would go through all that the driver has imported
        # each time, while no request is answered.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Ends the server. Safe to call twice."""
        self._server.close(_END_S)
        gc.unfreeze()

    def base_urls(self, engines: int) -> list[str]:
        """As many addresses as there are engines, for clients that spread their requests over a list of them. The
        router chooses the engine at each: one of its own would not outlive its sleep.
        """
        return [f"{self._root}/engine/{number}/v1" for number in range(engines)]

    # -- sessions -----------------------------------------------------------------------------------------------------

    def open(self, session_id: str, plan: SessionPlan) -> str:
        """Begins a session; the `base_url` of its agent. Raises ValueError: a session of this id is open."""
        if session_id in self._sessions:
            raise ValueError(f"session {session_id} is already open; ids are unique within a run")
        self._sessions[session_id] = Session(plan)
        return f"{self._root}/session/{session_id}/v1"

    def finish(self, session_id: str) -> Session:
        """Ends a session and returns it; further requests of it are refused."""
        return self._sessions.pop(session_id)

    # -- routes -------------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "ok"})

        routes = [Route("/health", health)]
        for prefix in ("", "/session/{session}", "/engine/{engine:int}"):
            routes += [
                Route(f"{prefix}/v1/chat/completions", self._answered(self._chat), methods=["POST"]),
                Route(f"{prefix}/v1/completions", self._answered(self._completion), methods=["POST"]),
                Route(f"{prefix}/v1/models", self._answered(self._models)),
                Route(f"{prefix}/tokenize", self._answered(self._tokens), methods=["POST"]),
                Route(f"{prefix}/detokenize", self._answered(self._tokens), methods=["POST"]),
                Route(f"{prefix}/restart", self._answered(self._restart), methods=["POST"]),
            ]
        return Starlette(routes=routes, exception_handlers={404: no_such_path, 405: no_such_path})

    def _answered(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A route that maps failures to statuses, keeps the deadline, and ends with its client."""

        async def answered(request: Request) -> Response:
            try:
                request.state.deadline = asyncio.get_running_loop().time() + self._config.deadline_s
                async with asyncio.timeout_at(request.state.deadline):
                    # Read first, so that only the client's end is left for the watcher to read.
                    await request.body()
                    return await unless_gone(within(request), request)
            except TimeoutError:
                return unavailable(f"no answer within {_KEY}.deadline_s={self._config.deadline_s:g} s")
            except GenerationError as error:
                return unavailable(str(error))
            except TooLarge:
                return error_response(
                    413, f"the body is larger than {_KEY}.max_body_bytes={self._config.max_body_bytes}"
                )
            except NoRoom as error:
                self._overflowed(request)
                return error_response(400, str(error))
            except UnknownSession as error:
                return error_response(404, str(error), "NotFoundError")
            except Exception as error:  # noqa: BLE001 - becomes the response
                return self._failed(error, request)

        async def within(request: Request) -> Response:
            request.state.release = None
            try:
                return await handler(request)
            finally:
                # A stream that has begun keeps its slot to its end.
                if request.state.release is not None:
                    request.state.release()

        return answered

    def _failed(self, error: Exception, request: Request) -> Response:
        from pydantic import ValidationError

        if isinstance(error, ValidationError):
            # A value that may have several forms has an error for each.
            some = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()[:3]]
            return error_response(400, "; ".join(f"{where}: {what}" if where else what for where, what in some))
        if isinstance(error, (BadRequest, json.JSONDecodeError, UnicodeDecodeError)):
            return error_response(400, str(error))
        response = self._serving.chat.create_error_response(error)
        if is_overflow(response.error.message):
            self._overflowed(request)
        if response.error.code >= 500:
            logger.error("endpoint request failed", exc_info=error)
        return json_response(response.model_dump(), response.error.code)

    def _session(self, request: Request) -> Session | None:
        name = named_session(request)
        if name is None:
            return None
        if name not in self._sessions:
            raise UnknownSession(f"session {name} is not open: it has ended, or never began")
        session = self._sessions[name]
        session.last_overflowed = False
        return session

    def _overflowed(self, request: Request) -> None:
        # The session may have ended while its request waited.
        session = self._sessions.get(named_session(request) or "")
        if session is not None:
            session.overflow()

    async def _chat(self, request: Request) -> Response:
        body = with_free_calls(await read_body(request))
        session = self._session(request)
        asked = self._serving.chat_request.model_validate(body)
        call = Call(session, bool(asked.return_token_ids))
        messages, setup = [plain(message) for message in asked.messages], setup_of(asked)
        self._serving.check_shown(asked, messages)
        if session is not None:
            check_sampling(session, asked)
            call.continued = session.continued(messages, setup)
            if call.continued is not None:
                until = await self._serving.until_answer(asked, len(call.continued.messages) + 1)
                call.continued, call.until_answer = (None, ()) if until is None else (call.continued, until)

        def record(answers: Sequence[Mapping[str, object]]) -> list[Turn]:
            if session is None:
                return []
            prompt = call.answered[0]
            return [
                session.add(
                    prompt.prompt_ids,
                    result,
                    template_ids=prompt.template_ids,
                    messages=messages,
                    answer=answer,
                    setup=setup,
                )
                for answer, result in zip(answers, prompt.results, strict=True)
                if result is not None
            ]

        make = self._serving.chat.create_chat_completion
        if not (asked.stream and asked.tools and asked.tool_choice != "none"):
            return await self._made(make, asked, call, request, record)
        # Whether a text is a call of a tool is known at its end: parts of what turned out to be none cannot be taken
        # back. So both ways to ask give the same answer.
        whole = asked.model_copy(update={"stream": False, "stream_options": None})
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        made = await self._made(make, whole, call, request, record)
        if made.status_code != 200:
            return made
        events, release = events_of(orjson.loads(made.body), include_usage=usage), request.state.release
        response, request.state.release = event_stream(_sent(events), release), None
        return response

    async def _completion(self, request: Request) -> Response:
        body = await read_body(request)
        session = self._session(request)
        asked = self._serving.completion_request.model_validate(body)
        if session is not None:
            check_sampling(session, asked)
        call = Call(session, bool(asked.return_token_ids))

        def record(_: Sequence[Mapping[str, object]]) -> list[Turn]:
            if session is None:
                return []
            return [
                session.add(prompt.prompt_ids, result)
                for prompt in call.answered
                for result in prompt.results
                if result is not None
            ]

        return await self._made(self._serving.completion.create_completion, asked, call, request, record)

    async def _made(
        self, create: Callable[..., Awaitable[Any]], asked: object, call: Call, request: Request, record: Record
    ) -> Response:
        """The response with its recorded tokens, or vLLM's refusal. `record`: called with the messages of the choices
        once all of them are complete; returns their turns in the session. Raises BadRequest: the request asks for too
        many responses.
        """
        responses = responses_of(asked)
        if responses > self._config.max_responses:
            raise BadRequest(
                f"the request asks for {responses} responses (prompts times n); at most {_KEY}.max_responses="
                f"{self._config.max_responses} are given: ask in several requests"
            )
        request.state.release = await self._slots.take(responses)
        current_call.set(call)
        try:
            made = await create(asked)
        except Exception as error:
            check_full(str(error), asked)
            raise
        if hasattr(made, "error"):
            check_full(made.error.message, asked)
            if call.session is not None and is_overflow(made.error.message):
                call.session.overflow()
            return json_response(made.model_dump(), made.error.code)
        if isinstance(made, AsyncGenerator):
            # Nothing is sent before the first token, so that a request which cannot be served gets its status.
            first = await anext(made, "")
            if call.error is not None:
                raise call.error
            events = self._events(first, made, call, request.state.deadline, record)
            response, request.state.release = event_stream(events, request.state.release), None
            return response
        answer: dict[str, Any] = made.model_dump()
        turns = record([answer_of(choice) for choice in answer["choices"]])
        for choice in answer["choices"]:
            choice.update(call.details(choice["index"], turns))
        return json_response(answer)

    async def _events(
        self, event: str, more: AsyncGenerator[str], call: Call, deadline: float, record: Record
    ) -> AsyncGenerator[str]:
        """vLLM's stream, recorded when all choices have ended."""
        answers = StreamedAnswers(len(call.results()))
        held: list[dict[str, object]] = []
        ended: list[dict[str, Any]] = []
        try:
            while event:
                # Outside a session only the ends matter, to which details are added.
                chunk = chunk_of(event) if call.session is not None or may_end(event) else None
                ends = answers.add(chunk) if chunk is not None else []
                if chunk is None or not ends:
                    yield event
                else:
                    held.append(chunk)
                    ended += ends
                    # A session records all choices together, and no client gets the end of one before.
                    if answers.complete or call.session is None:
                        turns = record(answers.messages)
                        for choice in ended:
                            choice.update(call.details(choice["index"], turns))
                        for one in held:
                            yield event_of(one)
                        held.clear()
                        ended.clear()
                async with asyncio.timeout_at(deadline):
                    event = await anext(more, "")
        except TimeoutError:
            message = f"no end of the answer within {_KEY}.deadline_s={self._config.deadline_s:g} s"
            yield event_of({"error": {"message": message, "type": "ServiceUnavailableError", "code": 503}})
            yield "data: [DONE]\n\n"
        finally:
            await more.aclose()

    async def _models(self, request: Request) -> Response:
        return json_response((await self._serving.models.show_available_models()).model_dump())

    async def _tokens(self, request: Request) -> Response:
        adapter, create = self._serving.tokens[request.url.path.rpartition("/")[2]]
        made = await create(adapter.validate_python(await read_body(request)), request)
        error = getattr(made, "error", None)
        return json_response(made.model_dump(), 200 if error is None else error.code)

    async def _restart(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            raise UnknownSession("name a session in the path to begin it again")
        session.restart()
        return json_response({"status": "ok"})


def start_endpoint(
    policy: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    generate_one: GenerateOne,
    *,
    stop_token_ids: Sequence[int],
    cuda: bool,
) -> Endpoint:
    """The endpoint of a run, as `policy.generation` asks for it.

    Args:
        generate_one: Continues one prompt; called on the endpoint's loop.
        stop_token_ids: Tokens that end a response.
        cuda: Whether engines run on GPUs.

    Raises ConfigError: vLLM's classes refuse the options; EndpointError: see `Endpoint`.
    """
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A call that cannot be read is text, and nothing unusual of a model that learns.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    seeded = not cuda if vllm.request_seeds is None else vllm.request_seeds
    serving = make_serving(policy, tokenizer, generate_one, stop_token_ids=stop_token_ids, seeded=seeded)
    ports = (generation.port_range_low, generation.port_range_high)
    return Endpoint(serving, vllm.http_server, ports)


async def _sent(events: Iterable[str]) -> AsyncGenerator[str]:
    for event in events:
        yield event


def responses_of(asked: Any) -> int:
    """How many responses a request asks for: its prompts times `n`."""
    prompt = getattr(asked, "prompt", None)
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (asked.n or 1)


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            [f"{_KEY}.token_variable: the environment variable {variable} is not set; export a token for clients in it"]
        )
    return token
