"""A request's state on both sides: the tokens that it keeps when its shard is taken away, and at its worker which
weights drew which tokens, which tokens are final, and results until they are fetched.

A request that moves goes on with the rest of its prompt: results of pieces in, the next piece out. Engines that label
tokens themselves (vLLM 0.32 and later) are used as they are; for others the tokens so far are counted while the engine
is paused for new weights. Invariants: the joined pieces are the response, with each token's log-probability, version,
routes and mask; no random draw of one piece is repeated in the next; a response's spans cover its tokens in order; a
span is marked if its tokens attended to keys and values of older weights; a buffered result is fetched once; tokens
that were passed on are never taken back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nemo_rl.models.generation.decisions import (
    RecordedDecisionsError,
    Recording,
    RouteRecord,
    SamplingMasks,
    TokenRoutes,
    route_dtype,
)
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, LikelyNext, NewTokens, VersionSpan
from nemo_rl.models.generation.vllm.engine_processes import last_errors
from nemo_rl.models.generation.vllm.recorder import REQUEST, Taken, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.outputs import LogprobsTensors


def sampling_params(
    request: GenerationRequest,
    limit: int,
    *,
    seeded: bool,
    stop_token_ids: list[int],
    bad_words: list[str] | None,
    extra_args: dict[str, str] | None = None,
) -> SamplingParams:
    """vLLM's parameters.

    Args:
        limit: Tokens of the response, at most.
        seeded: Whether it is drawn from the request's own seed, rather than the engine's.
        stop_token_ids: Tokens that end a response.
        bad_words: Strings that are never generated.
        extra_args: Arguments that vLLM keeps with the request and does not read itself.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    drawn = request.sampling
    greedy = drawn.temperature == 0
    params = SamplingParams(
        temperature=drawn.temperature,
        top_p=1.0 if greedy else drawn.top_p,
        top_k=1 if greedy else (drawn.top_k or -1),
        max_tokens=limit,
        logprobs=request.top_tokens or 0,
        prompt_logprobs=request.top_tokens,
        flat_logprobs=True,  # one list per request, not an object per token: half the cost of a token here
        seed=request.seed if seeded else None,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        stop=list(request.stop_strings) or None,
        include_stop_str_in_output=True,
        bad_words=bad_words,
        extra_args=extra_args,
        detokenize=bool(request.stop_strings),
        output_kind=RequestOutputKind.CUMULATIVE if request.streams else RequestOutputKind.FINAL_ONLY,
    )
    if hasattr(params, "skip_clone"):
        # Made for this request alone: vLLM's deep copy is most of the cost of adding one.
        params.skip_clone = True
    return params


class PromptScores:
    """Scores of a prompt as its engine sent them, under the names of vLLM's `FlatLogprobs`."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []

    def add(self, part: LogprobsTensors) -> None:
        """Takes the next positions."""
        self._ids.append(part.logprob_token_ids.numpy().astype(np.int32, copy=False).ravel())
        self._logprobs.append(part.logprobs.numpy().astype(np.float32, copy=False).ravel())

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Of all positions, one after the other."""
        return np.concatenate([np.empty(0, np.int32), *self._ids])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """One for each of `token_ids`."""
        return np.concatenate([np.empty(0, np.float32), *self._logprobs])


def keeping_arrays(engine: AsyncLLM) -> AsyncLLM:
    """The engine, whose scores of prompts stay arrays. vLLM makes lists of them, number by number, which takes 100 ms
    and more for a prompt of 1,024 tokens with 64 scores each; the process that reads outputs does nothing else
    meanwhile.
    """
    processor = engine.output_processor
    add_request: Callable[..., None] = processor.add_request

    def add(request: EngineCoreRequest, *arguments: object, **options: object) -> None:
        add_request(request, *arguments, **options)
        asked = request.sampling_params
        if asked is not None and asked.prompt_logprobs is not None:
            scores, state = PromptScores(), processor.request_states[request.request_id]
            state.logprobs_processor.prompt_logprobs = scores
            state.logprobs_processor._update_prompt_logprobs = scores.add

    processor.add_request = add
    return engine


def scored(result: GenerationResult, output: RequestOutput, k: int) -> GenerationResult:
    """The result with the k most likely tokens after every position of its prompt; an aborted one keeps nothing, so
    that the prompt is scored again elsewhere.
    """
    if result.finish_reason == "abort":
        return result.first(0)
    # vLLM has no entry for the first token, and puts the token that is there before the k most likely ones.
    parts = [part for part in (output.prompt_logprobs, output.outputs[0].logprobs) if part is not None]
    ids = np.concatenate([np.asarray(part.token_ids, np.int32) for part in parts])
    logprobs = np.concatenate([np.asarray(part.logprobs, np.float32) for part in parts])
    ids, logprobs = ids.reshape(-1, k + 1), logprobs.reshape(-1, k + 1)
    return replace(result, likely=LikelyNext(ids[:, 1:], logprobs[:, 1:], logprobs[:, 0]))


Rpc = Callable[..., Awaitable[list[Any]]]
_Ended = tuple[str, int, int, int]


class DecisionReader:
    """Of one engine.

    Args:
        rpc: Calls a method of the engine's workers.
        by_engine: Whether vLLM records the routes itself.
    """

    def __init__(self, rpc: Rpc, recording: Recording, *, by_engine: bool) -> None:
        self._rpc = rpc
        self._recording = recording
        self._own_routes = bool(recording.layers) and not by_engine
        self._by_engine = bool(recording.layers) and by_engine
        self._ended: list[tuple[_Ended, asyncio.Future[Taken]]] = []
        self._forgotten: list[str] = []
        self._reading: asyncio.Task[None] | None = None

    @property
    def _reads(self) -> bool:
        return self._own_routes or self._recording.masks

    async def start(self) -> None:
        """Begins to record."""
        if self._reads:
            await self._rpc("nrl_record_decisions", self._own_routes, self._recording.masks)

    def arguments(self, request: GenerationRequest) -> dict[str, str] | None:
        """Extra arguments of a request's sampling parameters, by which its records are found."""
        return {REQUEST: request.request_id} if request.record_from is not None and self._reads else None

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        if self._reads:
            self._forgotten.append(request_id)

    async def complete(
        self, request: GenerationRequest, result: GenerationResult, completion: CompletionOutput
    ) -> GenerationResult:
        """The result with its recorded decisions. `completion`: the engine's own. Raises RecordedDecisionsError: the
        engine recorded nothing.
        """
        if request.record_from is None:
            return result
        prompt, tokens = len(request.prompt_ids), len(result.token_ids)
        routes, masks = None, None
        if self._reads:
            routes, masks = unpacked(await self._take((request.request_id, request.record_from, prompt, tokens)))
        if self._by_engine:
            routes = self._engines_own(completion, request.record_from, prompt + tokens)
        if tokens and self._recording.layers and routes is None:
            raise RecordedDecisionsError(
                f"the engine returned no routes for the {tokens} tokens of request {request.request_id}; "
                "policy.router_replay.enabled needs an engine that records them"
            )
        if tokens and self._recording.masks and masks is None:
            raise RecordedDecisionsError(
                f"the engine recorded no sampling masks for the {tokens} tokens of request {request.request_id}; "
                "policy.sampling_mask_replay needs samples that are drawn, not greedy ones"
            )
        return replace(result, routes=routes, masks=masks)

    def _engines_own(self, completion: CompletionOutput, start: int, end: int) -> TokenRoutes | None:
        """vLLM's routes [tokens, decoder layers, K], of prompt and response; the last token has none."""
        given = getattr(completion, "routed_experts", None)
        if given is None:
            return None
        given = np.asarray(given)
        layers = list(self._recording.layers)
        if given.ndim != 3 or given.shape[1] <= max(layers) or len(given) > end:
            raise RecordedDecisionsError(
                f"the engine returned routes {list(given.shape)} for {end} tokens; expected [tokens - 1, decoder "
                "layers, experts per token]"
            )
        experts = np.zeros((end - start, len(layers), given.shape[2]), route_dtype(self._recording.experts))
        computed = given[start : end - 1, layers]
        experts[: len(computed)] = computed
        valid = np.zeros(end - start, np.bool_)
        valid[: len(computed)] = True
        return TokenRoutes(start, experts, valid)

    async def _take(self, ended: _Ended) -> Taken:
        # Requests end in bursts, one engine step at a time: one call takes all that ended while the last one ran.
        taken: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._ended.append((ended, taken))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await taken

    async def _read(self) -> None:
        await asyncio.sleep(0)
        while self._ended:
            ended, forgotten = list(self._ended), list(self._forgotten)
            self._ended.clear()
            self._forgotten.clear()
            try:
                answers = await self._rpc("nrl_take_decisions", [list(request) for request, _ in ended], forgotten)
            except Exception as error:  # noqa: BLE001 - each of the requests raises it
                for _, waiting in ended:
                    if not waiting.done():
                        waiting.set_exception(error)
                continue
            for (_, waiting), taken in zip(ended, answers[0], strict=True):
                if not waiting.done():
                    waiting.set_result(taken)


OnPreempt = Literal["continue", "redo_turn"]


class ResumableRequest:
    """A request that may be served in pieces. `on_preempt`: `continue` keeps the tokens of an interrupted piece;
    `redo_turn` drops them.
    """

    def __init__(self, request: GenerationRequest, on_preempt: OnPreempt = "continue") -> None:
        self._request = request
        self._keeps = on_preempt == "continue"
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._routes = RouteRecord()
        self._masks: SamplingMasks | None = None
        self._cuts = 0
        self._drawn: GenerationResult | None = None  # tokens so far of the running piece

    @property
    def kept(self) -> int:
        """Tokens of earlier pieces."""
        return len(self._token_ids)

    def next_request(self) -> GenerationRequest:
        """The piece that is still to be served."""
        if not self._cuts:
            return self._request
        request, kept = self._request, self.kept
        return replace(
            request,
            request_id=f"{request.request_id}+{self._cuts}",
            prompt_ids=[*request.prompt_ids, *self._token_ids],
            max_new_tokens=request.max_new_tokens - kept,
            seed=request.seed if request.seed is None or not kept else _further_seed(request.seed, kept),
            # The position that the next token is drawn from counts as that piece computes it.
            record_from=None
            if request.record_from is None
            else min(self._routes.known_until(request.record_from), len(request.prompt_ids) + kept - 1),
        )

    def extend(self, new: NewTokens) -> None:
        """The piece that runs has drawn some tokens. They were passed on, so that they stay part of the response even
        if nothing comes back from their shard.
        """
        before = self._drawn or GenerationResult(new.request_id, [], [], "abort")
        before.token_ids.extend(new.token_ids)
        before.logprobs.extend(new.logprobs)
        self._drawn = replace(before, spans=new.spans)

    def cut(self, piece: GenerationResult | None) -> None:
        """A piece ended because its shard left; None when nothing came back from it."""
        self._cuts += 1
        piece = piece or self._drawn
        self._drawn = None
        if piece is not None and self._keeps:
            self._append(piece)

    def finish(self, piece: GenerationResult) -> GenerationResult:
        """The whole response, once its last piece is complete."""
        if not self._cuts:
            return piece
        # A response that fills the context between two pieces ended by its length, although the last piece found no
        # room.
        reason = "length" if piece.finish_reason == "no_room" and self._token_ids else piece.finish_reason
        self._append(piece)
        return replace(
            piece,
            request_id=self._request.request_id,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            spans=tuple(self._spans),
            finish_reason=reason,
            routes=self._routes.since(self._request.record_from or 0, len(self._request.prompt_ids) + self.kept),
            masks=self._masks,
        )

    @property
    def complete(self) -> bool:
        """Whether as many tokens are kept as the request allows."""
        return self.kept >= self._request.max_new_tokens

    def as_it_is(self, shard: int) -> GenerationResult:
        """The kept tokens as a response that ended by its length."""
        return self.finish(GenerationResult(self._request.request_id, [], [], "length", (), shard))

    def _append(self, piece: GenerationResult) -> None:
        start = self.kept
        self._token_ids = [*self._token_ids, *piece.token_ids]
        self._logprobs = [*self._logprobs, *piece.logprobs]
        if piece.routes is not None:
            self._routes.add(piece.routes)
            if piece.token_ids:
                self._routes.correct(len(self._request.prompt_ids) + start - 1, piece.routes)
        if piece.masks is not None:
            self._masks = piece.masks if self._masks is None else self._masks.then(piece.masks)
        moved = (replace(span, start=span.start + start, end=span.end + start) for span in piece.spans)
        self._spans = _joined([*self._spans, *moved])


def _further_seed(seed: int, kept: int) -> int:
    # A restarted generator would draw the first piece's numbers again.
    return int.from_bytes(hashlib.blake2b(f"{seed}+{kept}".encode(), digest_size=8).digest(), "little") & 0x7FFFFFFF


def safe_cut(token_ids: Sequence[int], texts: Sequence[str], decode: Callable[[list[int]], str]) -> int:
    """Number of tokens to keep so that none of `texts` (stop strings, bad words) is incomplete at their end: the engine
    searches only its own new text, and would miss one that straddles two pieces.
    """
    count = len(token_ids)
    while count and texts:
        said = decode(list(token_ids[:count]))
        # Half of a character decodes to a replacement character, so its text is not known yet.
        if not said.endswith("\ufffd") and not any(
            said.endswith(text[:length]) for text in texts for length in range(1, len(text))
        ):
            break
        count -= 1
    return count


_SETTLE_S = 0.005


@dataclass
class _Running:
    """A request: where each version's tokens start, and the versions that went on over older keys and values."""

    starts: list[tuple[int, int]] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)


class VersionTracker:
    """Tracks the versions of one engine's tokens. `own`: count here even where the engine labels tokens itself."""

    def __init__(self, engine: AsyncLLM, *, own: bool = False) -> None:
        self._engine = engine
        self.labelled_by_engine = not own and hasattr(engine, "update_weight_version")
        self._running: dict[str, _Running] = {}
        self.version = 0

    def begin(self, request_id: str) -> None:
        """A request starts."""
        self._running[request_id] = _Running([(self.version, 0)])

    async def publish(self, version: int, *, kv_recomputed: bool) -> None:
        """Labels further tokens with `version`; the engine must be paused. `kv_recomputed`: whether running requests
        recompute keys and values.
        """
        # Requests that begin while this waits belong to the new version, whose weights are loaded.
        self.version, before = version, dict(self._running)
        drawn = {} if self.labelled_by_engine else await self._all_drawn()
        for request_id, running in before.items():
            running.starts.append((version, drawn.get(request_id, 0)))
            # Part of the prompt may be computed although no token is drawn yet.
            if not kv_recomputed:
                running.mixed.add(version)
        if self.labelled_by_engine:
            await self._engine.update_weight_version(str(version))

    def drawn(self) -> dict[str, int]:
        """Tokens so far of each running request; those of the last steps may still be on their way."""
        return {
            getattr(state, "external_req_id", None) or state.request_id: len(state.detokenizer.output_token_ids)
            for state in self._engine.output_processor.request_states.values()
        }

    async def _all_drawn(self) -> dict[str, int]:
        # Outputs of the last step before the pause may still be on their way through the output handler.
        before: dict[str, int] = {}
        while True:
            now = self.drawn()
            if now == before and self._engine.engine_core.outputs_queue.empty():
                return now
            before = now
            await asyncio.sleep(_SETTLE_S)

    def end(self, request_id: str, completion: CompletionOutput | None = None) -> tuple[VersionSpan, ...]:
        """A request is over; the spans of its response (none without a completion)."""
        spans = self.spans(request_id, completion)
        self._running.pop(request_id, None)
        return spans

    def spans(self, request_id: str, completion: CompletionOutput | None = None) -> tuple[VersionSpan, ...]:
        """The spans of a response as far as it is drawn."""
        running = self._running.get(request_id, _Running())
        tokens = len(completion.token_ids) if completion is not None else 0
        if not tokens:
            return ()
        labels = getattr(completion, "weight_versions", None) if self.labelled_by_engine else None
        starts = [(int(label.version), label.start) for label in labels] if labels else running.starts
        ends = [start for _, start in starts[1:]] + [tokens]
        spans = [
            VersionSpan(version, start, min(end, tokens), version in running.mixed)
            for (version, start), end in zip(starts, ends, strict=True)
            if start < min(end, tokens)
        ]
        return tuple(_joined(spans))


def _joined(spans: list[VersionSpan]) -> list[VersionSpan]:
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1] == replace(span, start=joined[-1].start, end=span.start):
            joined[-1] = replace(span, start=joined[-1].start)
        else:
            joined.append(span)
    return joined


def result_of(
    request_id: str,
    completion: CompletionOutput,
    spans: tuple[VersionSpan, ...],
    shard: int,
    stop_token_ids: Collection[int] = (),
) -> GenerationResult:
    """A response, or what is drawn of it (`abort`), as the engine gives it. Raises RuntimeError: tokens lack their
    log-probabilities.
    """
    token_ids = list(completion.token_ids)
    # The sampled token is the first of its position.
    flat = completion.logprobs
    logprobs = [flat.logprobs[first] for first in flat.start_indices] if flat is not None else []
    if len(logprobs) != len(token_ids):
        raise RuntimeError(
            f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens of request {request_id}"
        )
    reason = completion.finish_reason or "abort"
    if reason == "length" and token_ids and token_ids[-1] in stop_token_ids:
        # Engines differ in which of the two they look at first; a response that has ended was not cut.
        reason = "stop"
    return GenerationResult(request_id, token_ids, logprobs, reason, spans, shard)


def new_tokens(
    request_id: str, completion: CompletionOutput, spans: tuple[VersionSpan, ...], start: int, count: int
) -> NewTokens | None:
    """Tokens from `start` to `count` of a response that is being drawn; None where there are none. Takes no longer for
    a long response than for a short one. `spans`: over all tokens so far.
    """
    if count <= start:
        return None
    flat = completion.logprobs
    logprobs = [flat.logprobs[first] for first in flat.start_indices[start:count]]
    until = tuple(replace(span, end=min(span.end, count)) for span in spans if span.start < count)
    return NewTokens(request_id, list(completion.token_ids[start:count]), logprobs, until)


@dataclass(frozen=True)
class RequestFailure:
    """A request that ended without a result; `engine_dead` when no other request can be served either."""

    request_id: str
    message: str
    engine_dead: bool = False


def is_engine_death(error: BaseException | None) -> bool:
    """Whether an error means that the engine's process is gone."""
    return error is not None and (type(error).__name__ == "EngineDeadError" or "root cause" in str(error))


def failure_of(request_id: str, error: BaseException) -> RequestFailure:
    """The error as text, with the engine's own last output if the engine died."""
    text = f"{type(error).__name__}: {error}"
    if not is_engine_death(error):
        return RequestFailure(request_id, text)
    said = last_errors()
    more = (
        f"\nThe engine's own errors:\n{said}"
        if said
        else " The engine's processes left no message: they were killed from outside."
    )
    return RequestFailure(request_id, text + more, engine_dead=True)


@dataclass
class ResultBuffer:
    """Finished results of one client, and the signal that there are some."""

    results: list[GenerationResult | NewTokens | RequestFailure] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, result: GenerationResult | NewTokens | RequestFailure) -> None:
        """Adds a result and wakes waiting polls."""
        self.results.append(result)
        self.ready.set()

    def take(self) -> list[GenerationResult | NewTokens | RequestFailure]:
        """Gives up all results."""
        self.ready.clear()
        results = self.results
        self.results = []
        return results


_CONTEXT = 8  # tokens before a text that may belong to its first character


class FinalTokens:
    """The final tokens of one engine's requests. `bad_words`: strings that are never generated.

    Attributes:
        restarted: Requests that go on elsewhere from their first token.
    """

    def __init__(self, bad_words: Sequence[str] | None) -> None:
        self._bad_words = tuple(bad_words or ())
        self.restarted: set[str] = set()

    def kept(
        self, request: GenerationRequest, result: GenerationResult, passed_on: int, engine: AsyncLLM
    ) -> GenerationResult:
        """The kept part of a cut request, from which another shard goes on. `passed_on`: tokens that `new` gave before.
        `engine`: vLLM's, whose tokenizer decodes the text that is searched for stop strings.
        """
        # One that was ending when it was released may have passed tokens on, and those are never taken back.
        restarts = request.request_id in self.restarted and not passed_on
        return result.first(0 if restarts else self._safe(request, result.token_ids, engine))

    def new(
        self,
        request: GenerationRequest,
        completion: CompletionOutput,
        start: int,
        engine: AsyncLLM,
        versions: VersionTracker,
    ) -> NewTokens | None:
        """Tokens after the first `start` of a running request that are final; None where there are none. `versions`:
        which weights drew which token.
        """
        if completion.finish_reason is not None or request.request_id in self.restarted:
            return None
        # No stop string begins in the tokens passed on, so only later ones are searched.
        context = max(0, start - _CONTEXT)
        count = context + self._safe(request, list(completion.token_ids[context:]), engine)
        return new_tokens(request.request_id, completion, versions.spans(request.request_id, completion), start, count)

    def _safe(self, request: GenerationRequest, token_ids: list[int], engine: AsyncLLM) -> int:
        looked_for = (*request.stop_strings, *self._bad_words)
        decode = engine.output_processor.tokenizer.decode if looked_for else str
        return safe_cut(token_ids, looked_for, decode)
