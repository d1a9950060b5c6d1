"""vLLM's own OpenAI server classes over the run's router, in place of an engine.

vLLM parses requests, applies the chat template, reads tool calls and reasoning, and makes responses; tokens come from
`generate_one`. The only file of the endpoint that knows vLLM; written against 0.26 and 0.32, whose classes have the
same names and signatures here. Invariant: a parameter that the router cannot honour is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.config.errors import UserError, did_you_mean
from nemo_rl.data.tokenizer import chat_template
from nemo_rl.models.generation.decisions import RouteRecord
from nemo_rl.models.generation.endpoint.session import Session, Turn, exact_prompt, text_of
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, GenerationSamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import ModelConfig, VllmConfig

_CHAT_KWARGS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
# What a request may ask of the router. Everything else must have vLLM's default.
_HONOURED = {
    "n",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logprobs",
    "output_kind",
    "detokenize",
    "skip_clone",
    "flat_logprobs",
}
# Keys of `vllm_kwargs` that say how a prompt is read.
_READING = ("tokenizer_mode", "revision", "tokenizer_revision", "code_revision", "hf_config_path")

# The name of the model under training, beside its path.
MODEL = "policy"

GenerateOne = Callable[[GenerationRequest], Awaitable[GenerationResult]]


class BadRequest(UserError, ValueError):
    """The client's mistake; the message is for it."""


class NoRoom(BadRequest):
    """A prompt that leaves no room for a response."""


def is_overflow(message: str) -> bool:
    """Whether vLLM refused a prompt because of its length."""
    return "maximum context length" in message


@dataclass
class Call:
    """One HTTP request on its way through vLLM's classes."""

    session: Session | None = None
    continued: Turn | None = None  # the turn whose tokens the prompt begins with
    until_answer: Sequence[int] = ()  # the template's tokens up to that turn's answer
    prompts: list[tuple[list[int], list[int]]] = field(default_factory=list)  # as sent, and as the template gave it
    results: list[list[GenerationResult]] = field(default_factory=list)  # of each prompt


current_call: ContextVar[Call] = ContextVar("current_call")


class RouterEngine:
    """What vLLM's server classes need of an engine client.

    Args:
        generate_one: Continues one prompt.
        vllm_config: Of the model; starts no engine.
        renderer: vLLM's own, which templates and tokenizes.
        stop_token_ids: Tokens that end a response.
        stop_strings: Strings that end every response, besides those of a request.
        seeded: Whether engines draw each request from its own seed.
    """

    errored = False
    input_processor: object = None

    def __init__(
        self,
        generate_one: GenerateOne,
        vllm_config: VllmConfig,
        renderer: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        seeded: bool = True,
    ) -> None:
        self._generate_one = generate_one
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self.renderer = renderer
        self._tokenizer: Any = tokenizer
        self._stop_token_ids = set(stop_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._seeded = seeded

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Takes every request: it waits for a shard as long as its deadline allows."""

    async def is_tracing_enabled(self) -> bool:
        """Traces are not passed on."""
        return False

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: object) -> AsyncIterator[Any]:
        """One `RequestOutput` with all responses, once they are complete.

        Raises BadRequest: parameters that the router cannot honour, or a prompt that leaves no room; GenerationError:
        see `Dispatcher.run`.
        """
        from vllm.outputs import RequestOutput

        call = current_call.get()
        template_ids: list[int] = list(prompt["prompt_token_ids"])
        prompt_ids = self._exact(call, template_ids) or template_ids
        requests = self._requests(call.session, prompt_ids, params)
        results = list(await asyncio.gather(*(self._generate_one(request) for request in requests)))
        call.prompts.append((prompt_ids, template_ids))
        call.results.append(results)
        outputs = [self._output(index, result, params) for index, result in enumerate(results)]
        yield RequestOutput(request_id, None, prompt_ids, None, outputs, True, num_cached_tokens=0)

    def _exact(self, call: Call, template_ids: list[int]) -> list[int] | None:
        if call.continued is None or call.continued.answer is None:
            return None
        shown = self._tokenizer.decode(call.until_answer, skip_special_tokens=False)
        text = text_of(call.continued.answer)
        closes = not (text and shown.endswith(text))
        return exact_prompt(call.continued, template_ids, call.until_answer, self._stop_token_ids, closes=closes)

    def _requests(self, session: Session | None, prompt_ids: list[int], params: Any) -> list[GenerationRequest]:
        _check_params(params)
        count, limit, longest = params.n, params.max_tokens, self.model_config.max_model_len
        sampling = GenerationSamplingParams(
            params.temperature, params.top_p, params.top_k if params.top_k > 0 else None
        )
        stops = _strings(params.stop)
        seed, sample_id, first, record_from = params.seed, "", 0, None
        name = f"http-{uuid.uuid4().hex}"
        if seed is not None and not self._seeded:
            raise BadRequest(
                "seed: the engines draw from seeds of their own; set policy.generation.vllm_cfg.request_seeds=true"
            )
        if session is not None:
            plan = session.plan
            sampling, limit = plan.sampling, min(limit, plan.max_new_tokens)
            longest = min(longest, plan.max_total_tokens)
            stops = (*plan.stop_strings, *stops)
            first, sample_id = session.begin(count), plan.sample_id
            name = f"{plan.sample_id}-{first}"
            if plan.records:
                record_from = _recorded_until(session, prompt_ids)
        room = longest - len(prompt_ids)
        if room <= 0:
            raise NoRoom(
                f"the prompt has {len(prompt_ids)} tokens and leaves no room for a response in {longest} tokens "
                "(policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len)"
            )
        seeds: list[int | None] = [
            seed + index if seed is not None else (session.plan.seed_of(first + index) if session is not None else None)
            for index in range(count)
        ]
        return [
            GenerationRequest(
                name if count == 1 else f"{name}.{index}",
                prompt_ids,
                min(limit, room),
                sampling,
                seeds[index],
                tuple(dict.fromkeys([*self._stop_strings, *stops])),
                sample_id,
                record_from,
            )
            for index in range(count)
        ]

    def _output(self, index: int, result: GenerationResult, params: Any) -> Any:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput

        ids = result.token_ids
        ended = result.finish_reason == "stop" and bool(ids) and ids[-1] in self._stop_token_ids
        shown = ids[:-1] if ended and not params.include_stop_str_in_output else ids
        text = self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        matched = None
        if result.finish_reason == "stop" and not ended:
            text, matched = _cut(text, (*_strings(params.stop), *self._stop_strings), params.include_stop_str_in_output)
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                {token: Logprob(logprob, None, self._tokenizer.decode([token]))}
                for token, logprob in zip(ids, result.logprobs, strict=True)
            ]
        reason = "length" if result.finish_reason == "no_room" else result.finish_reason
        total = sum(result.logprobs)
        return CompletionOutput(index, text, ids, total, logprobs, finish_reason=reason, stop_reason=matched)


def _recorded_until(session: Session, prompt_ids: list[int]) -> int:
    """The first position whose routes the session does not know yet."""
    routes = RouteRecord()
    for turn in session.ancestors(session.parent_of(prompt_ids)):
        if turn.result.routes is not None:
            routes.add(turn.result.routes)
    return routes.known_until()


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _cut(text: str, stops: Sequence[str], included: bool) -> tuple[str, str | None]:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[: place + (len(stop) if included else 0)], stop


def _check_params(params: Any) -> None:
    """Raises BadRequest: a parameter is set that the router does not pass on."""
    from vllm import SamplingParams

    usual = SamplingParams()
    names = [name for name in getattr(type(params), "__struct_fields__", ()) if not name.startswith("_")]
    refused = [
        name
        for name in names
        if name not in _HONOURED and getattr(params, name) and getattr(params, name) != getattr(usual, name, None)
    ]
    if params.logprobs:
        refused.append("top_logprobs above 0")
    if refused:
        structured = "structured_outputs" in refused
        raise BadRequest(
            f"not supported here: {', '.join(refused)}; leave {'it' if len(refused) == 1 else 'them'} out"
            + (" (response_format, and tool_choice other than auto and none, need structured outputs)" * structured)
        )


def check_sampling(session: Session, request: Any) -> None:
    """Whether a request of a session asks for the sampling that its tokens are trained with. Raises BadRequest: it does
    not.
    """
    drawn = session.plan.sampling
    known = {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k or -1}
    for name, value in known.items():
        asked = getattr(request, name, None)
        asked = -1 if name == "top_k" and asked == 0 else asked
        if asked is not None and asked != value:
            raise BadRequest(
                f"{name}={asked:g} differs from policy.generation.{name}={value:g}, which the session's tokens are "
                f"trained with; leave {name} out, or set the key"
            )


@dataclass
class Serving:
    """vLLM's handlers."""

    engine: RouterEngine
    models: Any
    chat: Any
    completion: Any
    tokenization: Any
    chat_request: Any  # the request classes
    completion_request: Any
    tokenize_request: Any  # adapters that validate
    detokenize_request: Any

    async def until_answer(self, request: Any, count: int) -> list[int] | None:
        """The first `count` messages of a chat as the template gives them, with nothing after them; None where it
        cannot show them alone.
        """
        alone = request.model_copy(
            update={"messages": request.messages[:count], "add_generation_prompt": False, "stream": False}
        )
        try:
            rendered = await self.chat.render_chat_request(alone)
        except Exception:  # noqa: BLE001 - templates raise whatever they like where an answer comes last
            return None
        return list(rendered[1][0]["prompt_token_ids"]) if isinstance(rendered, tuple) else None


def make_serving(
    policy: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    generate_one: GenerateOne,
    *,
    stop_token_ids: Sequence[int],
    seeded: bool,
) -> Serving:
    """vLLM's handlers over `generate_one`; starts no engine and touches no accelerator.

    Raises ConfigError: `http_server_serving_chat_kwargs` has a key that vLLM's class does not know, a parser that it
    does not have, or vLLM is missing or of a version without these classes.
    """
    try:
        from pydantic import TypeAdapter
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
        from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer
    except ImportError as error:
        raise ConfigError(
            [
                "policy.generation.vllm_cfg.expose_http_server: the endpoint is built from the server classes of vLLM "
                f"0.26 to 0.32, and {error}"
            ]
        ) from error
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    vllm_config = VllmConfig(model_config=AsyncEngineArgs(**_model_arguments(policy)).create_model_config())
    renderer = renderer_from_config(vllm_config)
    engine = RouterEngine(
        generate_one,
        vllm_config,
        renderer,
        tokenizer,
        stop_token_ids=stop_token_ids,
        stop_strings=generation.stop_strings or (),
        seeded=seeded,
    )
    _load_plugins(vllm.tool_parser_plugin, vllm.reasoning_parser_plugin)
    common = _chat_arguments(policy, tokenizer, OpenAIServingChat)
    try:
        online = OnlineRenderer(vllm_config.model_config, renderer, **_taken(OnlineRenderer, common))
        names = [BaseModelPath(name, policy.model_name) for name in (MODEL, policy.model_name)]
        models = OpenAIServingModels(engine, names)
        chat = OpenAIServingChat(
            engine,
            models,
            "assistant",
            online_renderer=online,
            **_taken(OpenAIServingChat, common),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError([f"{_CHAT_KWARGS}: {error}"]) from error
    return Serving(
        engine,
        models,
        chat,
        OpenAIServingCompletion(engine, models, online_renderer=online, request_logger=None),
        ServingTokenization(models, online, **_taken(ServingTokenization, common)),
        ChatCompletionRequest,
        CompletionRequest,
        TypeAdapter(TokenizeRequest),
        TypeAdapter(DetokenizeRequest),
    )


def _model_arguments(policy: PolicyConfig) -> dict[str, Any]:
    """What vLLM needs to know of the model to read requests for it."""
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    return {
        "model": policy.model_name,
        "tokenizer": policy.tokenizer.name,
        "trust_remote_code": policy.trust_remote_code,
        "dtype": vllm.precision,
        "max_model_len": vllm.max_model_len,
        "hf_overrides": dict(policy.hf_config_overrides),
        "generation_config": "vllm",
        "override_generation_config": {
            "max_new_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or 0,
        },
        **{name: generation.vllm_kwargs[name] for name in _READING if name in generation.vllm_kwargs},
    }


def _chat_arguments(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, constructor: type) -> dict[str, Any]:
    """Arguments of vLLM's chat class. Raises ConfigError: the configuration has one that the class does not know."""
    given = policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    options = {name: value for name, value in given.items() if value is not None}
    known = inspect.signature(constructor.__init__).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            [f"{_CHAT_KWARGS}: vLLM's {constructor.__name__} takes no {unknown[0]}.{did_you_mean(unknown[0], known)}"]
        )
    if isinstance(options.get("chat_template"), str):
        # A key of recipes: the run's own template, a file, or the template itself.
        options["chat_template"] = chat_template(options["chat_template"])
    arguments: dict[str, Any] = {
        "request_logger": None,
        "chat_template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        "chat_template_content_format": "auto",
        "default_chat_template_kwargs": dict(policy.tokenizer.chat_template_kwargs or {}),
    }
    return arguments | {name: value for name, value in options.items() if value is not None}


def _taken(constructor: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a class knows."""
    known = inspect.signature(constructor.__init__).parameters
    return {name: value for name, value in given.items() if name in known}


def _load_plugins(tools: str | None, reasoning: str | None) -> None:
    """Registers the parsers of users' files."""
    if tools is not None:
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(tools)
    if reasoning is not None:
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(reasoning)
