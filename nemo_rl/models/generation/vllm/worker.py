"""The Ray actor around one vLLM engine, one data-parallel shard of generation, and the memory of its engine.

Starts the asynchronous engine, runs requests, puts weights and KV cache to sleep and wakes them, and passes sync calls
on to it. Requests and results travel in lists, so that Ray's per-call cost does not grow with the number of samples.
Engines of one device take turns where one reads how much memory is free or in use, and another would change it. A turn
is an abstract Unix socket, which one process of a machine holds at a time and which the system takes back when that
process ends, however it ends. Invariants: every request yields exactly one result or failure to its client; a leaving
shard takes no request; no forward pass runs while weights are partly new; of the engines of one device at most one
starts, sleeps or wakes; slept memory is verified to be free, or an error is raised; an engine that could not wake stays
asleep.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl.distributed.devices import MemoryUse, host_bytes
from nemo_rl.models.generation.interfaces import (
    GenerationError,
    GenerationRequest,
    GenerationResult,
    MemoryNotFreedError,
    NewTokens,
    ShardStateError,
    StaleVersionError,
    WakeError,
)
from nemo_rl.models.generation.vllm.engine_actors import FurtherRanks, Rendezvous
from nemo_rl.models.generation.vllm.engine_processes import (
    EngineSpec,
    forked_engine,
    import_engine,
    remove_socket_folder,
    set_environment,
    start_engine,
    temporary_files_in,
)
from nemo_rl.models.generation.vllm.engine_stats import EngineSample, EngineStats
from nemo_rl.models.generation.vllm.request_state import (
    DecisionReader,
    FinalTokens,
    RequestFailure,
    ResultBuffer,
    VersionTracker,
    failure_of,
    keeping_arrays,
    result_of,
    sampling_params,
    scored,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# Several engines that compile for the first time are minutes apart.
_WAIT_S = 1800.0
_TURN_POLL_S = 0.01


@asynccontextmanager
async def device_turn(device: str | None, *, timeout_s: float = _WAIT_S) -> AsyncGenerator[None]:
    """Waits for the others of a device, and has them wait until the block ends.

    Args:
        device: Its name, which no other device of the machine has; None where there are no others.
        timeout_s: How long to wait, in seconds.

    Raises GenerationError: the others did not end in time.
    """
    if device is None:
        yield
        return
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while not _taken(turn, device):
            if time.monotonic() > deadline:
                raise GenerationError(
                    f"the other engines of this device (policy.generation.vllm_cfg.engines_per_gpu) did not end to "
                    f"start, sleep or wake within {timeout_s:.0f} s"
                )
            await asyncio.sleep(_TURN_POLL_S)
        yield


def _taken(turn: socket.socket, device: str) -> bool:
    try:
        turn.bind(f"\0nemo_rl_device_{device}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


_ALLOCATED = ("nrl_memory", "allocated_bytes")
_FREED_SHARE = 0.9
_FREED_WITHIN_S = 10.0


class EngineMemory:
    """Memory of one engine.

    Args:
        rpc: A method's answer of every rank.
        alive: Awaits a call of the engine's process, or raises if that died.
        cuda: Whether vLLM itself frees memory; on CPU slots the worker extension does.
        sleep_level: 2 drops the weights, 1 keeps them on the host.
        device: Name of a device shared with other engines; None for one of its own.
        has_neighbours: Whether other jobs use the device; free memory then cannot be verified by measuring.

    Attributes:
        asleep: Which of `weights` and `kv_cache` are not resident.
        holds_group: Whether ranks may hold a sync session's group, which they drop before they sleep.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        rpc: Callable[..., Awaitable[list[Any]]],
        alive: Callable[[Coroutine[object, object, object]], Awaitable[object]],
        *,
        shard: int,
        cuda: bool,
        sleep_level: int,
        device: str | None = None,
        has_neighbours: bool = False,
    ) -> None:
        self._has_neighbours = has_neighbours
        self._engine, self._rpc, self._alive, self._shard = engine, rpc, alive, shard
        self._cuda, self._sleep_level, self._device = cuda, sleep_level, device
        self.asleep: set[str] = set()
        self.holds_group = False

    async def sleep(self, level: int) -> dict[str, int]:
        """Drops weights and KV cache (level 1: keeps the weights on the host). Returns bytes in use before and after,
        over ranks, and `kept`: the most that a rank holds while it sleeps. Raises MemoryNotFreedError: the memory was
        not freed.
        """
        async with device_turn(self._device):
            return await self._sleep(level)

    async def _sleep(self, level: int) -> dict[str, int]:
        await self._drop_group()
        if self.asleep and self._cuda:
            # vLLM 0.26 does not put an engine to sleep a part of which sleeps.
            await self._alive(self._engine.wake_up(["kv_cache"]))
        resident = await self._rpc("nrl_model_bytes")
        before = await self.allocated()
        await self._alive(self._engine.sleep(level=level))
        if not self._cuda:
            await self._rpc("nrl_release_memory", level)
        # The host copy of level 1 counts as resident memory on a CPU slot.
        expected = sum(rank["kv_cache"] + (rank["weights"] if level == 2 or self._cuda else 0) for rank in resident)
        self.asleep = {"weights", "kv_cache"}
        after = await self._freed(before, expected)
        # On a CPU slot that is all of its process.
        kept = await self._rpc(*(("nrl_kept_bytes",) if self._cuda else _ALLOCATED))
        return {"before": before, "after": after, "kept": max(kept)}

    async def _drop_group(self) -> None:
        if self.holds_group:
            await self._rpc("nrl_receiver", "drop_group")
            self.holds_group = False

    async def allocated(self) -> int:
        """Bytes over ranks (`allocated_bytes`)."""
        return sum(await self._rpc(*_ALLOCATED))

    async def _freed(self, before: int, expected: int) -> int:
        deadline = time.monotonic() + _FREED_WITHIN_S
        while True:
            after = await self.allocated()
            if self._has_neighbours or before - after >= _FREED_SHARE * expected:
                return after
            if time.monotonic() > deadline:
                raise MemoryNotFreedError(
                    f"shard {self._shard} slept, but only {(before - after) >> 20} of {expected >> 20} MiB "
                    f"came back within {_FREED_WITHIN_S:.0f} s; "
                    "its memory must not be given to anybody"
                )
            await asyncio.sleep(0.05)
            if not self._cuda:
                # What the last requests held may be freed only now, and the system gets it only when that is asked for.
                await self._rpc("nrl_release_memory", self._sleep_level)

    async def wake(self, tags: list[str]) -> None:
        """Makes memory resident again. Raises WakeError: the memory is not there; the engine sleeps as before."""
        async with device_turn(self._device):
            await self._wake([tag for tag in ("weights", "kv_cache") if tag in tags and tag in self.asleep])

    async def _wake(self, wanted: list[str]) -> None:
        if not wanted:
            return
        try:
            if self._cuda:
                await self._alive(self._engine.wake_up(wanted))
            elif "weights" in wanted:
                await self._rpc("nrl_restore_memory")
        # vLLM passes errors of its engine process on as plain Exception.
        except Exception as error:
            await self._back_to_sleep()
            raise WakeError(
                f"shard {self._shard} could not wake {' and '.join(wanted)}: {error}; it sleeps again"
            ) from error
        self.asleep -= set(wanted)
        if not self.asleep:
            if not self._cuda:
                await self._alive(self._engine.wake_up(None))
            await self._alive(self._engine.reset_prefix_cache())

    async def _back_to_sleep(self) -> None:
        await self._drop_group()
        resident = (
            0 if "weights" in self.asleep else sum(rank["weights"] for rank in await self._rpc("nrl_model_bytes"))
        )
        before = await self.allocated()
        self.asleep = {"weights", "kv_cache"}
        if self._cuda:
            await self._engine.sleep(level=self._sleep_level)
        else:
            await self._rpc("nrl_release_memory", self._sleep_level)
        await self._freed(before, resident)


T = TypeVar("T")

_POLL_S = 0.5
_ABORT_AGAIN_S = 0.02
_RECEIVES = ("update_parameter_in_bucket", "broadcast_parameter")


class VllmGenerationWorker:
    """One engine. All methods run on the actor's event loop. `spec`: how the engine is started. `bad_words`: strings
    that are never generated.
    """

    def __init__(self, spec: EngineSpec, bad_words: list[str] | None = None) -> None:
        self._spec = spec
        self._shard = int(os.environ.get("RANK", "0"))
        self._stop_token_ids: list[int] = []
        self._bad_words = bad_words
        self._importing: asyncio.Future[object] | None = None
        self._engine: AsyncLLM = None  # until `start`
        self._versions: VersionTracker
        self._stats = None if spec.stats_interval_s is None else EngineStats(spec.stats_interval_s)
        self._result_buffers: dict[str, ResultBuffer] = {}
        self._tasks: dict[str, asyncio.Task[GenerationResult]] = {}
        self._tokens = FinalTokens(bad_words)
        self._leaving = False
        self._paused_at: float | None = None
        self._session: dict[str, Any] = {}
        self._decisions: DecisionReader | None = None
        self._memory: EngineMemory
        self._weights_lost = self._receiving = False
        self._further: FurtherRanks | None = None  # ranks on further nodes, where the engine has some

    async def prepare(self) -> None:
        """Imports what the engine needs and touches no accelerator, so that `start` is short once it may be called."""
        set_environment(self._spec.env)
        if self._importing is None:
            self._importing = asyncio.ensure_future(asyncio.to_thread(import_engine, self._spec.kwargs_of(self._shard)))
        await self._importing

    async def start(self, stop_token_ids: list[int], rendezvous: Rendezvous | None = None) -> list[dict[str, object]]:
        """Starts the engine; describes its workers (pid, rank, device). `stop_token_ids`: tokens that end a response.
        `rendezvous`: where the ranks of an engine on several nodes meet. Raises GenerationError: the engine could not
        start; with what its processes said.
        """
        self._stop_token_ids = stop_token_ids
        await self.prepare()
        spec, device = self._spec, self._spec.shared_device(self._shard)
        kwargs = spec.kwargs_on_device(self._shard)
        # vLLM reads how much memory is free before and after it takes its own, unless the KV cache has a set size.
        async with device_turn(None if "kv_cache_memory_bytes" in kwargs else device):
            self._engine = keeping_arrays(self._new_engine(kwargs, rendezvous))
        self._memory = EngineMemory(
            self._engine,
            self._rpc,
            self._alive,
            shard=self._shard,
            cuda=spec.cuda,
            sleep_level=spec.sleep_level,
            device=device,
            has_neighbours=spec.has_neighbours,
        )
        self._versions = VersionTracker(self._engine)
        await self._versions.publish(0, kv_recomputed=True)
        if spec.recording is not None:
            self._decisions = DecisionReader(self._rpc, spec.recording, by_engine=spec.engine_records_routes)
            await self._decisions.start()
        self._weights_lost = self._spec.engine_kwargs.get("load_format") == "dummy"
        return await self._rpc("nrl_describe")

    def _new_engine(self, kwargs: dict[str, object], rendezvous: Rendezvous | None) -> AsyncLLM:
        if rendezvous is not None:
            kwargs |= rendezvous.arguments(0)
            self._further = FurtherRanks(rendezvous, self._shard)
        try:
            with temporary_files_in(os.environ["VLLM_RPC_BASE_PATH"]), forked_engine():
                return start_engine(kwargs, [self._stats] if self._stats else None)
        except (RuntimeError, ValueError, OSError) as error:
            said = (self._further and self._further.lost) or failure_of("", error).message
            raise GenerationError(f"the engine of shard {self._shard} could not start: {said}") from error

    async def _rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        return await self._alive(self._engine.collective_rpc(method, timeout=timeout_s, args=args))

    async def _alive(self, call: Coroutine[object, object, T]) -> T:
        """The answer of the engine's process, or vLLM's EngineDeadError: vLLM leaves calls that were under way when the
        process died without one.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_POLL_S)
                if not answer.done() and self._engine.errored:
                    raise self._engine.dead_error
            return answer.result()
        finally:
            answer.cancel()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, client: str, requests: list[GenerationRequest]) -> None:
        """Starts requests; their results come by `collect` of the same client. A shard that leaves sends them back at
        once.
        """
        result_buffer = self._result_buffers.setdefault(client, ResultBuffer())
        for request in requests:
            if self._leaving:
                result_buffer.put(GenerationResult(request.request_id, [], [], "abort", (), self._shard))
                continue
            task = asyncio.create_task(self._generate(request, result_buffer))
            self._tasks[request.request_id] = task
            task.add_done_callback(
                lambda done, request_id=request.request_id: self._deliver(result_buffer, request_id, done)
            )

    def _deliver(self, result_buffer: ResultBuffer, request_id: str, task: asyncio.Task[GenerationResult]) -> None:
        self._tasks.pop(request_id, None)
        self._tokens.restarted.discard(request_id)
        self._versions.end(request_id)
        if task.cancelled():
            if self._decisions is not None:
                self._decisions.forget(request_id)
            return
        error = task.exception()
        result_buffer.put(task.result() if error is None else failure_of(request_id, error))

    async def collect(self, client: str, max_wait_s: float) -> list[GenerationResult | NewTokens | RequestFailure]:
        """Finished results, failures and new tokens; waits up to `max_wait_s` for the first."""
        result_buffer = self._result_buffers.setdefault(client, ResultBuffer())
        try:
            await asyncio.wait_for(result_buffer.ready.wait(), max_wait_s)
        except TimeoutError:
            return []
        # Results come in bursts, one engine step at a time: a short wait gathers the burst.
        await asyncio.sleep(0.002)
        return result_buffer.take()

    async def _generate(self, request: GenerationRequest, result_buffer: ResultBuffer) -> GenerationResult:
        room = self._spec.max_model_len - len(request.prompt_ids)
        if request.max_new_tokens > room > 0 and not self._spec.cuts_to_room:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and max_new_tokens={request.max_new_tokens} exceed "
                f"vllm_cfg.max_model_len={self._spec.max_model_len}; set "
                "policy.generation.vllm_cfg.cap_max_tokens_to_context=true to cut responses"
            )
        limit = min(request.max_new_tokens, room)
        if limit <= 0:
            return GenerationResult(request.request_id, [], [], "no_room", (), self._shard)
        self._versions.begin(request.request_id)
        # The salt keeps prefixes of other versions out: an in-flight refit cannot clear the cache below running
        # requests.
        prompt = {"prompt_token_ids": request.prompt_ids, "cache_salt": f"version {self._versions.version}"}
        final, passed_on = None, 0
        sampling = sampling_params(
            request,
            limit,
            seeded=self._spec.seeds_requests,
            stop_token_ids=self._stop_token_ids,
            bad_words=self._bad_words,
            extra_args=self._decisions.arguments(request) if self._decisions is not None else None,
        )
        async for output in self._engine.generate(prompt, sampling, request.request_id):
            final = output
            if not request.streams:
                continue
            new = self._tokens.new(request, output.outputs[0], passed_on, self._engine, self._versions)
            if new is not None:
                result_buffer.put(new)
                passed_on += len(new.token_ids)
        if final is None:
            raise RuntimeError(f"the engine gave no output for request {request.request_id}")
        completion = final.outputs[0]
        spans = self._versions.end(request.request_id, completion)
        result = result_of(request.request_id, completion, spans, self._shard, self._stop_token_ids)
        if request.top_tokens is not None:
            return scored(result, final, request.top_tokens)
        if self._decisions is not None:
            result = await self._decisions.complete(request, result, completion)
        if result.finish_reason != "abort":
            return result
        return self._tokens.kept(request, result, passed_on, self._engine)

    async def cancel(self, request_ids: list[str]) -> None:
        """Ends abandoned requests, without a result."""
        for request_id in request_ids:
            if request_id in self._tasks:
                self._tasks[request_id].cancel()

    async def release(self, request_ids: list[str]) -> None:
        """Ends these requests, each with its tokens so far, so that another shard continues them. A request whose draws
        have a seed moves only while it has no token: the rest would be drawn by another seed than if it had stayed.
        """
        chosen = [request_id for request_id in request_ids if request_id in self._tasks]
        if self._spec.seeds_requests:
            drawn = self._versions.drawn()
            chosen = [request_id for request_id in chosen if not drawn.get(request_id)]
            self._tokens.restarted.update(chosen)
        if chosen:
            await self._engine.abort(chosen)

    async def abort_all_requests(self) -> None:
        """Ends every running request; each returns its tokens so far."""
        if self._tasks:
            await self._engine.abort(list(self._tasks))

    async def is_idle(self) -> bool:
        """Whether no request runs."""
        return not self._tasks

    async def leave(self, timeout_s: float) -> int:
        """Refuses new requests and ends the running ones, each with its tokens so far; returns their number. Raises
        ShardStateError: requests still run after `timeout_s`.
        """
        self._leaving = True
        ended, deadline = len(self._tasks), time.monotonic() + timeout_s
        while self._tasks:
            if time.monotonic() > deadline:
                left = len(self._tasks)
                raise ShardStateError(f"shard {self._shard}: {left} aborted requests run after {timeout_s:.0f} s")
            # A request may be on its way into the engine, where an abort does not find it yet.
            await self.abort_all_requests()
            await asyncio.wait(list(self._tasks.values()), timeout=_ABORT_AGAIN_S)
        return ended

    async def accept(self) -> int:
        """Takes requests again; the version that it serves. Raises ShardStateError: the shard sleeps, or has no
        weights.
        """
        if self._memory.asleep:
            raise ShardStateError(
                f"shard {self._shard} sleeps ({', '.join(sorted(self._memory.asleep))}); "
                "wake it before it takes requests"
            )
        if self._weights_lost:
            raise ShardStateError(f"shard {self._shard} slept at level 2 and has had no weights since; sync it first")
        self._leaving = False
        return self._versions.version

    async def take_stats(self) -> EngineSample:
        """The engine's samples since the last call."""
        return self._stats.take() if self._stats else EngineSample()

    async def check_engine(self, timeout_s: float) -> None:
        """Returns once the engine's workers have answered. Raises TimeoutError: they did not within `timeout_s`."""
        await asyncio.wait_for(self._rpc("nrl_memory", "memory_in_use"), timeout_s)

    # -- memory -------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int | None = None) -> dict[str, int]:
        """Drops weights and KV cache (level 1: keeps the weights on the host) and gives the memory back; see
        `EngineMemory.sleep`, without `kept` where it slept already. Raises ShardStateError: requests are still running;
        MemoryNotFreedError: the memory did not come back.
        """
        if "weights" in self._memory.asleep:
            used = await self._memory.allocated()
            return {"before": used, "after": used}
        if self._tasks:
            raise ShardStateError(
                f"shard {self._shard} has {len(self._tasks)} running requests; end them before it sleeps"
            )
        level = level or self._spec.sleep_level
        self._weights_lost |= level == 2
        return await self._memory.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        """Makes memory resident again; the engine serves once both tags are awake. Raises WakeError: the memory is not
        there; the shard sleeps as before.
        """
        await self._memory.wake(tags)

    async def reset_prefix_cache(self) -> None:
        """Drops cached prefixes, which belong to old weights after a refit."""
        await self._alive(self._engine.reset_prefix_cache())

    async def model_bytes(self) -> list[dict[str, int]]:
        """Bytes of weights and KV cache per rank."""
        return await self._rpc("nrl_model_bytes")

    # -- new weights --------------------------------------------------------------------------------------------------

    async def begin_sync(self, session: dict[str, Any], routes: list[dict[str, object]], timeout_s: float) -> None:
        """Opens a sync session on every rank, by its route. A serving engine is paused here or, with weights staged
        beside the live ones, in `finish_sync`. Raises ShardStateError: the weights sleep; StaleVersionError: the
        session's version is older than the shard's.
        """
        if "weights" in self._memory.asleep:
            raise ShardStateError(f"shard {self._shard} sleeps: wake its weights before session {session['id']}")
        if session.get("version", self._versions.version) < self._versions.version:
            raise StaleVersionError(
                f"session {session['id']} brings version {session['version']} to shard {self._shard}, which "
                f"has {self._versions.version}"
            )
        self._memory.holds_group |= any(route.get("group") for route in routes)
        before, self._session = self._session, {**session, "untouched": True}
        # A layer-wise reload takes the layers apart when it begins.
        if not session.get("staged"):
            await self._pause()
        try:
            await self._rpc("nrl_begin_sync", session, routes, timeout_s=timeout_s)
        except Exception:
            self._session = before or self._session
            raise

    async def receive_window(self, window: dict[str, object], timeout_s: float) -> None:
        """Takes one window on every rank."""
        self._session["untouched"] = False
        await self._rpc("nrl_receiver", "receive", window, timeout_s=timeout_s)

    async def finish_sync(self, version: int, timeout_s: float) -> float:
        """Finalises every rank; from here on tokens carry `version`. Seconds for which requests stood still."""
        await self._pause()
        # From here on a failure leaves weights that may be half new, wherever the windows were staged.
        self._session |= {"staged": False, "untouched": False}
        await self._rpc("nrl_receiver", "finish", version, timeout_s=timeout_s)
        await self._versions.publish(version, kv_recomputed=self._session.get("recompute_kv", True))
        self._weights_lost = False
        return await self._resume()

    async def abort_sync(self, session_id: str) -> None:
        """Ends this session on every rank; an engine whose weights may be partly new stays paused until a session
        succeeds.
        """
        await self._rpc("nrl_receiver", "abort", session_id)
        if self._session.get("id") == session_id:
            self._weights_lost |= not (self._session.get("staged") or self._session["untouched"])
            self._session = {}
            if not self._weights_lost:
                await self._resume()

    async def _pause(self) -> None:
        # A sleeping engine is paused already, and resumes when it is wholly awake.
        if self._paused_at is None and not self._memory.asleep:
            self._paused_at = time.monotonic()
            recompute_kv = self._session.get("recompute_kv", True)
            await self._alive(self._engine.pause_generation(mode="keep", clear_cache=recompute_kv))

    async def _resume(self) -> float:
        self._session = {}
        if self._paused_at is None:
            return 0.0
        await self._alive(self._engine.resume_generation())
        seconds = time.monotonic() - self._paused_at
        self._paused_at = None
        return seconds

    async def count_versions(self, own: bool) -> None:
        """Counts which version draws which token here (`own`), or believes the engine's labels where it has them; for
        an idle shard.
        """
        version = self._versions.version
        self._versions = VersionTracker(self._engine, own=own)
        await self._versions.publish(version, kv_recomputed=True)

    async def rlix_model_update_rpc(
        self, name: str, *args: object, timeout_s: float = 150.0, version: int | None = None
    ) -> list[object]:
        """Calls one of the receiver's methods on every rank, for sync services that drive them one by one.

        Requests pause from the first weights until `finalize_weight_update`, after which tokens carry `version` (by
        default one more than before). Without it the shard takes no requests. Raises ShardStateError: weights are sent
        while the shard's weights sleep.
        """
        if name in _RECEIVES:
            if "weights" in self._memory.asleep:
                raise ShardStateError(f"shard {self._shard} sleeps: wake its weights before {name}")
            await self._pause()
            self._receiving = self._weights_lost = True
        answers = await self._rpc(name, *args, timeout_s=timeout_s)
        if name == "finalize_weight_update" and self._receiving:
            await self._versions.publish(self._versions.version + 1 if version is None else version, kv_recomputed=True)
            self._receiving = self._weights_lost = False
            await self._resume()
        return answers

    async def kept_groups(self, timeout_s: float) -> list[str | None]:
        """Id of the group that each rank holds from a sync session before, if it does."""
        return await self._rpc("nrl_receiver", "kept_group", timeout_s=timeout_s)

    async def memory_in_use(self) -> list[int]:
        """Bytes in use on the device of each rank (resident memory of its process on a CPU slot)."""
        return await self._rpc("nrl_memory", "memory_in_use")

    async def memory_use(self) -> MemoryUse:
        """Host memory of this process with those below it, and what the fullest rank keeps on its GPU while it sleeps
        (`device` and `peak`; None on CPU slots and before the start).
        """
        host = await asyncio.to_thread(host_bytes)
        kept = await self._rpc("nrl_kept_bytes") if self._engine is not None else []
        on_gpu = [rank for rank in kept if rank is not None]
        return MemoryUse(host, max(on_gpu), max(on_gpu)) if on_gpu else MemoryUse(host)

    async def free_memory(self) -> list[int]:
        """Bytes that each rank could still allocate."""
        return await self._rpc("nrl_memory", "free_memory")

    async def profile(self, on: bool) -> None:
        """Begins or ends what Nsight Systems records of every rank; nothing to do before the engine stands."""
        if self._engine is not None:
            await self._rpc("nrl_profile", on)

    async def shutdown(self) -> None:
        """Ends the engine's processes."""
        if self._further is not None:
            self._further.close()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        remove_socket_folder()
