"""The Ray actor around one vLLM engine: one data-parallel shard of generation.

Starts the asynchronous engine, runs requests, and passes sleep, wake and sync calls on to it. Requests arrive in lists
and results are fetched in lists, so that Ray's per-call cost does not grow with the number of samples. It does not
choose shards and knows no training. Invariants: every submitted request yields exactly one result or error to the
client that submitted it; tokens are stamped with the version that produced them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.models.generation.interfaces import GenerationError, GenerationRequest, GenerationResult, VersionSpan
from nemo_rl.models.generation.vllm.engine_args import EngineSpec
from nemo_rl.models.generation.vllm.lifeline import OWNER_VARIABLE, last_errors

logger = logging.getLogger(__name__)


def _with_engine_log(error: BaseException) -> str:
    """The error as text; where it only says that the engine is gone, also what the engine itself said."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ != "EngineDeadError" and "root cause" not in text:
        return text
    said = last_errors()
    return f"{text}\nThe engine's own errors:\n{said}" if said else f"{text} The engine's processes left no message: they were killed from outside."


@dataclass
class _Outbox:
    """Finished results of one client, and the signal that there are some."""

    results: list[GenerationResult | tuple[str, str]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class VllmGenerationWorker:
    """One engine. All methods run on the actor's event loop.

    Args:
        spec: How the engine is started.
        stop_token_ids: Tokens that end a response.
        bad_words: Strings that are never generated.
    """

    def __init__(self, spec: EngineSpec, stop_token_ids: list[int], bad_words: list[str] | None = None) -> None:
        self._spec = spec
        self._shard = int(os.environ.get("RANK", "0"))
        self._stop_token_ids = stop_token_ids
        self._bad_words = bad_words
        self._engine: Any = None
        self._outboxes: dict[str, _Outbox] = {}
        self._tasks: set[asyncio.Task[GenerationResult]] = set()
        self._version = 0
        self._asleep: set[str] = set()

    async def start(self) -> list[dict[str, Any]]:
        """Starts the engine; describes its workers (pid, rank, device).

        Raises:
            GenerationError: The engine could not start; with what its processes said.
        """
        os.environ.update(self._spec.env)
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._spec.engine_kwargs))
        except (RuntimeError, ValueError, OSError) as error:
            raise GenerationError(f"the engine of shard {self._shard} could not start: {_with_engine_log(error)}") from error
        return await self._rpc("nrl_describe")

    async def _rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return await self._engine.collective_rpc(method, timeout=timeout_s, args=args)

    async def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        """Starts requests; their results come by `collect` of the same client."""
        outbox = self._outboxes.setdefault(client, _Outbox())
        for request in requests:
            task = asyncio.create_task(self._generate(request))
            self._tasks.add(task)
            task.add_done_callback(lambda done, request_id=request.request_id: self._deliver(outbox, request_id, done))

    def _deliver(self, outbox: _Outbox, request_id: str, task: asyncio.Task[GenerationResult]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        outbox.results.append(task.result() if error is None else (request_id, _with_engine_log(error)))
        outbox.ready.set()

    async def collect(self, client: str, max_wait_s: float) -> list[GenerationResult | tuple[str, str]]:
        """Finished results, or (request id, error text) of failed ones; waits up to `max_wait_s` for the first."""
        outbox = self._outboxes.setdefault(client, _Outbox())
        try:
            await asyncio.wait_for(outbox.ready.wait(), max_wait_s)
        except TimeoutError:
            return []
        # Results come in bursts, one engine step at a time: a short wait gathers the burst.
        await asyncio.sleep(0.002)
        outbox.ready.clear()
        results = outbox.results
        outbox.results = []
        return results

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        room = self._spec.max_model_len - len(request.prompt_ids)
        if request.max_new_tokens > room > 0 and not self._spec.cuts_to_room:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and max_new_tokens={request.max_new_tokens} exceed vllm_cfg.max_model_len="
                f"{self._spec.max_model_len}; set policy.generation.vllm_cfg.cap_max_tokens_to_context=true to cut responses"
            )
        limit = min(request.max_new_tokens, room)
        if limit <= 0:
            return GenerationResult(request.request_id, [], [], "no_room", (), self._shard)
        version = self._version
        final = None
        async for output in self._engine.generate({"prompt_token_ids": request.prompt_ids}, self._sampling(request, limit), request.request_id):
            final = output
        if final is None:
            raise RuntimeError(f"the engine gave no output for request {request.request_id}")
        completion = final.outputs[0]
        token_ids = list(completion.token_ids)
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs or [], token_ids, strict=True)]
        spans = (VersionSpan(version, 0, len(token_ids), mixed_kv=version != self._version),) if token_ids else ()
        return GenerationResult(request.request_id, token_ids, logprobs, completion.finish_reason or "abort", spans, self._shard)

    def _sampling(self, request: GenerationRequest, limit: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        drawn = request.sampling
        greedy = drawn.temperature == 0
        return SamplingParams(
            temperature=drawn.temperature,
            top_p=1.0 if greedy else drawn.top_p,
            top_k=1 if greedy else (drawn.top_k or -1),
            max_tokens=limit,
            logprobs=0,
            seed=request.seed,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,
            stop=list(request.stop_strings) or None,
            include_stop_str_in_output=True,
            bad_words=self._bad_words,
            detokenize=bool(request.stop_strings),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def abort_all_requests(self) -> None:
        """Ends every running request; each yields what it has."""
        await self._engine.pause_generation(mode="abort", clear_cache=False)
        await self._engine.resume_generation()

    async def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._tasks

    async def sleep(self) -> dict[str, int]:
        """Drops weights and KV cache and gives the memory back; bytes in use before and after, summed over ranks.

        Raises:
            RuntimeError: Requests are still running.
        """
        if self._asleep:
            used = sum(await self._rpc("nrl_memory_in_use"))
            return {"before": used, "after": used}
        if self._tasks:
            raise RuntimeError(f"shard {self._shard} has {len(self._tasks)} running requests; end them before it sleeps")
        before = sum(await self._rpc("nrl_memory_in_use"))
        await self._engine.sleep(level=self._spec.sleep_level)
        if not self._spec.cuda:
            await self._rpc("nrl_release_memory")
        self._asleep = {"weights", "kv_cache"}
        return {"before": before, "after": sum(await self._rpc("nrl_memory_in_use"))}

    async def wake_up(self, tags: list[str]) -> None:
        """Makes memory resident again; the engine serves once both tags are awake."""
        wanted = [tag for tag in ("weights", "kv_cache") if tag in tags and tag in self._asleep]
        if not wanted:
            return
        if self._spec.cuda:
            await self._engine.wake_up(wanted)
        elif "weights" in wanted:
            await self._rpc("nrl_restore_memory")
        self._asleep -= set(wanted)
        if not self._asleep:
            if not self._spec.cuda:
                await self._engine.wake_up(None)
            await self._engine.reset_prefix_cache()

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes, which belong to old weights after a refit."""
        await self._engine.reset_prefix_cache()

    async def model_bytes(self) -> list[dict[str, int]]:
        """Bytes of weights and KV cache per rank."""
        return await self._rpc("nrl_model_bytes")

    async def memory_in_use(self) -> list[int]:
        """Bytes in use per rank."""
        return await self._rpc("nrl_memory_in_use")

    async def begin_sync(self, session: dict[str, Any], first_nccl_rank: int, timeout_s: float) -> None:
        """Opens a sync session on every rank of the engine."""
        await self._rpc("nrl_begin_sync", session, first_nccl_rank, timeout_s=timeout_s)

    async def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        """Loads one window on every rank."""
        await self._rpc("nrl_receive_window", window, timeout_s=timeout_s)

    async def finish_sync(self, version: int, timeout_s: float) -> int:
        """Finalises every rank; from here on tokens carry `version`."""
        await self._rpc("nrl_finish_sync", version, timeout_s=timeout_s)
        self._version = version
        return version

    async def abort_sync(self) -> None:
        """Ends an open session on every rank."""
        await self._rpc("nrl_abort_sync")

    async def shutdown(self) -> None:
        """Ends the engine's processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
