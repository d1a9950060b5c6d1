"""Engine client behind vLLM's OpenAI server classes that sends prompts to the run's router.

Written against vLLM 0.26 and 0.32, whose outputs have the same form here. Invariants: a parameter that the router
cannot honour is refused; what is sent of a response as it is drawn is the beginning of the whole.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import UserError
from nemo_rl.models.generation.endpoint.endpoint_http import decisions_of
from nemo_rl.models.generation.endpoint.session import Session, Turn, exact_prompt, text_of
from nemo_rl.models.generation.endpoint.streamed_answers import TextStream
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    OnTokens,
    request_seed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.config import ModelConfig, VllmConfig
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

# Parameters that the router honours. All others must have vLLM's default.
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
    "routed_experts_prompt_start",
    # vLLM derives them from `stop` and `prompt_logprobs`.
    "output_text_buffer_length",
    "skip_reading_prefix_cache",
}

GenerateOne = Callable[[GenerationRequest, OnTokens | None], Awaitable[GenerationResult]]


class BadRequest(UserError, ValueError):
    """The client's mistake; the message is for it."""


class NoRoom(BadRequest):
    """A prompt that leaves no room for a response."""


def check_full(message: str, asked: Any) -> None:
    """Raises NoRoom: vLLM refused a request because its prompt is exactly as long as the context, which it says of the
    tokens that are left for the response.
    """
    if "max_tokens must be at least 1, got 0" not in message:
        return
    if 0 not in (asked.max_tokens, getattr(asked, "max_completion_tokens", None)):
        raise NoRoom(
            "the prompt fills the context, and leaves no room for a response (policy.max_total_sequence_length, "
            "policy.generation.vllm_cfg.max_model_len)"
        )


def is_overflow(message: str) -> bool:
    """Whether vLLM refused a prompt because of its length."""
    return "maximum context length" in message


@dataclass
class Answered:
    """One prompt and its responses, as far as there are any."""

    prompt_ids: list[int]  # as sent
    template_ids: list[int]  # as the template gave it
    results: list[GenerationResult | None]


@dataclass
class Call:
    """One HTTP request on its way through vLLM's classes."""

    session: Session | None = None
    shows_tokens: bool = False  # whether the client asks for token ids, and so for the tokens' records
    routes_from: int = 0  # the first position whose routes it asks for
    continued: Turn | None = None  # the turn whose tokens the prompt begins with
    until_answer: Sequence[int] = ()  # the template's tokens up to that turn's answer
    answered: list[Answered] = field(default_factory=list)
    error: Exception | None = None  # why there is no response; vLLM makes a chunk of it where the answer is streamed

    def results(self) -> list[GenerationResult | None]:
        """The result of each choice, in their order; None for one that is still being drawn."""
        return [result for prompt in self.answered for result in prompt.results]

    def details(self, index: int, turns: Sequence[Turn]) -> dict[str, object]:
        """Fields of choice `index`: the weight versions of its tokens and, where the client asks for tokens, their
        recorded decisions. `turns`: the choices' turns in the session; empty outside of a session.
        """
        result = self.results()[index]
        if result is None:
            return {"weight_versions": []}
        spans = [{"version": span.version, "start": span.start, "end": span.end} for span in result.spans]
        fields: dict[str, object] = {"weight_versions": spans}
        if self.shows_tokens:
            routes = result.routes
            if self.session is not None and turns:
                # A turn's own request brings the routes that its session did not know yet.
                routes = self.session.routes_of(turns[index]).since(0, len(turns[index].token_ids))
            fields |= decisions_of(routes, result.masks, self.routes_from)
        return fields


current_call: ContextVar[Call] = ContextVar("current_call")


class RouterEngine:
    """The part of an engine client that vLLM's server classes use.

    Args:
        generate_one: Continues one prompt.
        vllm_config: Of the model; starts no engine.
        renderer: vLLM's own, which templates and tokenizes.
        stop_token_ids: Tokens that end a response.
        stop_strings: Strings that end every response, besides those of a request.
        seeded: Whether engines draw each request from its own seed.
        records: Whether engines record routes or sampling masks where a request asks for them.
    """

    errored = False
    input_processor: object = None

    def __init__(
        self,
        generate_one: GenerateOne,
        vllm_config: VllmConfig,
        renderer: object,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        seeded: bool = True,
        records: bool = False,
    ) -> None:
        self._generate_one = generate_one
        self.vllm_config = vllm_config
        self.model_config: ModelConfig = vllm_config.model_config
        self._vocabulary: int = self.model_config.get_vocab_size()
        self.renderer = renderer
        self._tokenizer: Any = tokenizer  # transformers types what `decode` returns for a list of texts too
        self._stop_token_ids = set(stop_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._seeded = seeded
        self._records = records

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Takes every request: it waits for a shard as long as its deadline allows."""

    async def is_tracing_enabled(self) -> bool:
        """Traces are not passed on."""
        return False

    async def generate(
        self,
        prompt: Mapping[str, Sequence[int]],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **_: object,
    ) -> AsyncIterator[RequestOutput]:
        """One `RequestOutput` with all complete responses, or the new tokens of each as they are drawn.

        Raises BadRequest: parameters that the router cannot honour, or a prompt that leaves no room; GenerationError:
        see `Dispatcher.run`.
        """
        from vllm.outputs import RequestOutput
        from vllm.sampling_params import RequestOutputKind

        call = current_call.get()
        template_ids: list[int] = list(prompt["prompt_token_ids"])
        prompt_ids = self._exact(call, template_ids) or template_ids
        try:
            if priority:
                raise BadRequest("not supported here: priority; leave it out")
            requests = self._requests(call, prompt_ids, params)
            answered = Answered(prompt_ids, template_ids, [None] * len(requests))
            call.answered.append(answered)
            if params.output_kind == RequestOutputKind.DELTA:
                async for output in self._deltas(answered, requests, params):
                    finished = None not in answered.results
                    yield RequestOutput(request_id, None, prompt_ids, None, [output], finished, num_cached_tokens=0)
                return
            answered.results[:] = await asyncio.gather(*(self._generate_one(request, None) for request in requests))
        except Exception as error:
            call.error = error
            raise
        outputs = [self._output(index, result, params) for index, result in enumerate(answered.results) if result]
        yield RequestOutput(request_id, None, prompt_ids, None, outputs, True, num_cached_tokens=0)

    async def _deltas(
        self, answered: Answered, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> AsyncIterator[CompletionOutput]:
        """New tokens of any of the responses, as they are drawn."""
        from vllm.outputs import CompletionOutput

        # Which responses have something new; what came meanwhile goes out in one chunk.
        ready: asyncio.Queue[int] = asyncio.Queue()
        drawn: list[list[tuple[int, float]]] = [[] for _ in requests]

        def sink(index: int) -> OnTokens:
            def add(ids: list[int], logprobs: list[float]) -> None:
                if not drawn[index]:
                    ready.put_nowait(index)
                drawn[index] += zip(ids, logprobs, strict=True)

            return add

        tasks = [
            asyncio.ensure_future(self._generate_one(request, sink(index))) for index, request in enumerate(requests)
        ]
        for index, task in enumerate(tasks):
            # Tokens are passed on before the result that has them.
            task.add_done_callback(lambda _, index=index: ready.put_nowait(index))
        stops = (*_strings(params.stop), *self._stop_strings)
        decode = partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        texts, counts = [TextStream(decode, stops) for _ in requests], [0] * len(requests)
        try:
            while None in answered.results:
                index = await ready.get()
                if drawn[index]:
                    ids, logprobs = (list(column) for column in zip(*drawn[index], strict=True))
                    drawn[index] = []
                    counts[index] += len(ids)
                    # The token that ends a response has no text, whatever parsers want to see of special tokens.
                    visible = ids if params.include_stop_str_in_output else self._without_stop_token(ids)
                    text, shown = texts[index].add(visible), self._logprobs(ids, logprobs, params)
                    yield CompletionOutput(index, text, ids, None, shown)
                    continue
                answered.results[index] = result = tasks[index].result()
                last = self._output(index, result, params)
                last.text = texts[index].end(last.text)
                last.token_ids = result.token_ids[counts[index] :]
                last.logprobs = None if last.logprobs is None else last.logprobs[counts[index] :]
                yield last
        finally:
            for task in tasks:
                task.cancel()

    def _exact(self, call: Call, template_ids: list[int]) -> list[int] | None:
        if call.continued is None or call.continued.answer is None:
            return None
        shown = self._tokenizer.decode(call.until_answer, skip_special_tokens=False)
        text = text_of(call.continued.answer)
        closes = not (text and shown.endswith(text))
        return exact_prompt(call.continued, template_ids, call.until_answer, self._stop_token_ids, closes=closes)

    def _requests(self, call: Call, prompt_ids: list[int], params: SamplingParams) -> list[GenerationRequest]:
        _check_params(params)
        session = call.session
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
                record_from = session.routes_of(session.parent_of(prompt_ids)).known_until()
        elif self._records and call.shows_tokens and sampling.temperature > 0:
            record_from = 0
        if not prompt_ids:
            raise BadRequest("prompt: it has no tokens; a response needs at least one to continue")
        if max(prompt_ids) >= self._vocabulary:
            raise BadRequest(f"prompt: token {max(prompt_ids)} is none of the model's {self._vocabulary}")
        call.routes_from = getattr(params, "routed_experts_prompt_start", 0)
        if call.routes_from > len(prompt_ids):
            raise BadRequest(
                f"routed_experts_prompt_start={call.routes_from} is beyond the {len(prompt_ids)} tokens of the prompt"
            )
        room = longest - len(prompt_ids)
        if room <= 0:
            raise NoRoom(
                f"the prompt has {len(prompt_ids)} tokens and leaves no room for a response; the maximum context "
                f"length is {longest} (policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len)"
            )
        if seed is not None and session is not None and session.plan.own_seed is not None:
            # Agents write one seed for all episodes, and samples of a group must differ.
            seed = request_seed(session.plan.own_seed, 0, seed, 0)
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

    def _without_stop_token(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids[-1] in self._stop_token_ids else ids

    def _output(self, index: int, result: GenerationResult, params: SamplingParams) -> CompletionOutput:
        from vllm.outputs import CompletionOutput

        ids = result.token_ids
        ended = result.finish_reason == "stop" and bool(ids) and ids[-1] in self._stop_token_ids
        shown = self._without_stop_token(ids) if ended and not params.include_stop_str_in_output else ids
        text = self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        matched = None
        if result.finish_reason == "stop" and not ended:
            text, matched = _cut(text, (*_strings(params.stop), *self._stop_strings), params.include_stop_str_in_output)
        logprobs = self._logprobs(ids, result.logprobs, params)
        reason = "length" if result.finish_reason == "no_room" else result.finish_reason
        total = sum(result.logprobs)
        return CompletionOutput(index, text, ids, total, logprobs, finish_reason=reason, stop_reason=matched)

    def _logprobs(
        self, ids: list[int], logprobs: list[float], params: SamplingParams
    ) -> list[dict[int, Logprob]] | None:
        from vllm.logprobs import Logprob

        if params.logprobs is None:
            return None
        return [
            {token: Logprob(logprob, None, self._tokenizer.decode([token]))}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _cut(text: str, stops: Sequence[str], included: bool) -> tuple[str, str | None]:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[: place + (len(stop) if included else 0)], stop


@cache
def _usual_params() -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams()


def _check_params(params: SamplingParams) -> None:
    """Raises BadRequest: a parameter is set that the router does not pass on."""
    usual = _usual_params()
    names = [name for name in getattr(type(params), "__struct_fields__", ()) if not name.startswith("_")]
    refused = [
        name
        for name in names
        if name not in _HONOURED and getattr(params, name) and getattr(params, name) != getattr(usual, name, None)
    ]
    if params.logprobs:
        refused.append("top_logprobs of a chat, or logprobs of a completion, above 0")
    if params.prompt_logprobs == 0:
        refused.append("prompt_logprobs (echo of a chat asks for them)")
    if refused:
        structured = "structured_outputs" in refused
        raise BadRequest(
            f"not supported here: {', '.join(refused)}; leave {'it' if len(refused) == 1 else 'them'} out"
            + (" (response_format, and tool_choice other than auto and none, need structured outputs)" * structured)
        )


def check_sampling(session: Session, request: object) -> None:
    """Whether a request of a session asks for the sampling that its tokens are trained with. Raises BadRequest: it does
    not.
    """
    drawn = session.plan.sampling
    key, why = "policy.generation.", "the session's tokens are trained with"
    if session.plan.validates:
        key, why = f"{key}val_", "validation draws with"
    known = {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k or -1}
    for name, value in known.items():
        asked = getattr(request, name, None)
        asked = -1 if name == "top_k" and asked == 0 else asked
        if asked is not None and asked != value:
            raise BadRequest(
                f"{name}={asked:g} differs from {key}{name}={value:g}, which {why}; leave {name} out, or set the key"
            )
