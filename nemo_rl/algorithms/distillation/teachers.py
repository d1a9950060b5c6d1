"""The teachers of a run: frozen models, policies or engines, that score the policy's samples.

A teacher shares the accelerators of training, on which it is only while it scores, or has its own. What it says of a
sample stays with the sample's rows: its most likely tokens of each position, or its log-probability of each token that
was sampled. Samples go to a teacher in engines as requests, which are dealt out, and go on elsewhere, like those of
generation; a shard that dies is rebuilt, with the same weights from disk, while its samples wait. Invariant: each
sample is scored by one teacher, or the call fails.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nemo_rl.config import ClusterConfig, ConfigError, MasterConfig
from nemo_rl.config.errors import UserError
from nemo_rl.config.teacher_sections import Teacher, teachers_of
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.data_plane.field_schema import TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerGroup, WorkerError
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    LikelyNext,
    WakeError,
    request_timeout_s,
)
from nemo_rl.models.generation.vllm.engine_actors import EngineActors, start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.backend import backend_spec
from nemo_rl.models.policy.interfaces import BatchHandle, Scores
from nemo_rl.models.policy.lm_policy import Policy, start_policy_actors
from nemo_rl.models.policy.model_config import check_divisible, model_config
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.experience.store import ExperienceStore
    from nemo_rl.utils.progress import StartPhases
    from nemo_rl.utils.timer import Timer

_POLL_S = 0.5
_KEEP_WEIGHTS = 1
# vLLM computes the logits of all prompt tokens of a forward pass at once, beside a KV cache that leaves little room.
_BATCHED_TOKENS = 2048


def start_scoring_actors(
    cluster: RayVirtualCluster, teacher: Teacher, cluster_cfg: ClusterConfig, *, shares: bool, lent: bool = False
) -> EngineActors:
    """Starts the actors of a teacher's engines, which import what they need. `shares`: whether training is on the same
    slots. `lent`: whether a scheduler lends them.
    """
    policy = teacher.policy
    if cluster.accelerator.is_cuda:
        policy.generation.vllm_kwargs.setdefault("max_num_batched_tokens", _BATCHED_TOKENS)
    return start_engine_actors(
        cluster,
        policy,
        cluster_cfg,
        seed=0,
        colocated=shares,
        refits=False,
        lent=lent,
        name_prefix=teacher.name,
    )


def scoring_engines(
    actors: EngineActors, tokenizer: PreTrainedTokenizerBase, record: Record | None = None
) -> VllmGeneration:
    """The engines of a teacher."""
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=[],
        request_timeout_s=request_timeout_s(),
        record=record,
    )


class ServedTeacher(Protocol):
    """A teacher of another job, which this run asks while it holds no accelerators for training."""

    def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `scores_of_prompts`."""
        ...

    def kernels(self) -> str:
        """What computes it, in words."""
        ...

    def shutdown(self) -> None:
        """Lets go of it."""
        ...


class EngineTeacher:
    """A teacher whose engines are this run's. `shares`: whether they sleep while they do not score."""

    def __init__(self, actors: EngineActors, tokenizer: PreTrainedTokenizerBase, *, shares: bool) -> None:
        self._generation = scoring_engines(actors, tokenizer)
        self._fleet, self._shares = self._generation.fleet, shares
        self._fleet.enable_rebuilds()

    def wait_until_started(self) -> None:
        """Waits for the engines. Raises WorkerError: one did not start."""
        self._generation.wait_until_started()
        self._fleet.await_rebuild(True)

    def memory_in_use(self) -> int:
        """Bytes in use on the fullest device."""
        return max(max(devices) for devices in self._fleet.call(self._fleet.healthy(), "memory_in_use"))

    def prepare_for_lp_inference(self) -> None:
        """Wakes the engines; one that dies meanwhile is rebuilt when it is used."""
        if self._shares:
            self._move(self._generation.wake_up_partial)

    def offload_to_cpu(self) -> None:
        """Puts the engines to sleep, with their weights on the host."""
        if self._shares:
            self._move(lambda shards: self._fleet.sleep(shards, _KEEP_WEIGHTS))

    def _move(self, move: Callable[[Sequence[int]], object]) -> None:
        for shard in self._fleet.healthy():
            try:
                move([shard])
            except WorkerError as error:
                if isinstance(error.__cause__, WakeError) or shard in self._fleet.healthy():
                    raise

    def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `scores_of_prompts`; lost shards are rebuilt meanwhile."""
        return scores_of_prompts(
            self._generation,
            batch,
            k,
            while_waiting=lambda: self._fleet.rebuild_in_background(self._fleet.activate),
        )

    def kernels(self) -> str:
        """What computes it, in words."""
        count = self._generation.dp_size
        return f"vLLM, {count} engine{'s' if count > 1 else ''}"

    def shutdown(self) -> None:
        """Ends the engines. Safe to call twice."""
        self._fleet.close()
        self._generation.shutdown()


def scores_of_prompts(
    generation: VllmGeneration,
    batch: BatchedDataDict,
    k: int,
    *,
    while_waiting: Callable[[], object],
    finished: Callable[[], object] = lambda: None,
) -> BatchedDataDict:
    """Scores samples by the model that engines serve, at temperature 1.

    Args:
        batch: `input_ids` [B, S] and `input_lengths` [B].
        k: How many of the most likely tokens to find for each position; 0 for the tokens of the samples themselves.
        while_waiting: Called about twice a second meanwhile.
        finished: Called for every sample that is scored, on a thread that must not wait.

    Returns `topk_indices` and `topk_logits` [B, S, k] of the tokens after each position, as `Policy.get_topk_logits`
    gives them; zeros from the last token of a row on, after which no token is trained. For k = 0 the `logprobs` [B, S]
    of each token after those before it; zero for the first of a row and in its padding. Engines then need room for one
    token more than the longest sample has. Raises GenerationError: no shard is left, or none answered in time.
    """
    ids_BS, lengths = batch["input_ids"], batch["input_lengths"].tolist()
    # The last token is only a target of the most likely ones: without it a sample as long as the context leaves room
    # for the token that an engine has to draw.
    prompts = {row: ids_BS[row, : length - (k > 0)].tolist() for row, length in enumerate(lengths) if length > 1}
    found = _scored(generation, prompts, k, while_waiting, finished)
    if k == 0:
        logprobs_BS = torch.zeros(ids_BS.shape)
        for row, likely in found.items():
            # What Ray hands over cannot be written to, which torch warns about.
            logprobs_BS.numpy()[row, 1 : lengths[row]] = likely.given[:-1]
        return BatchedDataDict(logprobs=logprobs_BS)
    indices_BSk = torch.zeros((*ids_BS.shape, k), dtype=torch.int32)
    logprobs_BSk = torch.zeros((*ids_BS.shape, k), dtype=torch.float32)
    for row, likely in found.items():
        indices_BSk.numpy()[row, : len(likely.ids)] = likely.ids
        logprobs_BSk.numpy()[row, : len(likely.ids)] = likely.logprobs
    return BatchedDataDict({"topk_logits": logprobs_BSk, "topk_indices": indices_BSk})


def _scored(
    generation: VllmGeneration,
    prompts: Mapping[int, list[int]],
    k: int,
    while_waiting: Callable[[], object],
    finished: Callable[[], object],
) -> dict[int, LikelyNext]:
    """The scores of prompts by row."""
    name = uuid.uuid4().hex[:12]
    requests = {
        row: GenerationRequest(f"{name}-{row}", ids, 1, GenerationSamplingParams(), top_tokens=k)
        for row, ids in prompts.items()
    }

    async def one(request: GenerationRequest) -> GenerationResult:
        result = await generation.generate_one(request)
        finished()
        return result

    async def all_of_them() -> list[GenerationResult]:
        return list(await asyncio.gather(*map(one, requests.values())))

    found: dict[int, LikelyNext] = {}
    for row, result in zip(requests, _watched(generation, all_of_them(), while_waiting), strict=True):
        scored = 0 if result.likely is None else len(result.likely.ids)
        if result.likely is None or scored != len(prompts[row]):
            raise RuntimeError(f"sample {row} was sent {len(prompts[row])} tokens long, and the engine scored {scored}")
        found[row] = result.likely
    return found


def _watched(
    generation: VllmGeneration,
    work: Coroutine[object, object, list[GenerationResult]],
    while_waiting: Callable[[], object],
) -> list[GenerationResult]:
    future: Future[list[GenerationResult]] = generation.start_on_dispatch_loop(work)
    try:
        while not future.done():
            wait([future], timeout=_POLL_S)
            while_waiting()
        return future.result()
    finally:
        future.cancel()


LOGPROBS = "teacher_logprobs"
_ROOM_FOR_ACTIVATIONS = 2 << 30
_NAMED = 3

Model = Policy | EngineTeacher | ServedTeacher


def check_teachers(config: MasterConfig, student: PretrainedConfig) -> None:
    """Checks before anything starts that every teacher can be built and speaks the policy's tokens. `student`: the
    policy's Hugging Face configuration. Raises ConfigError: a teacher does not exist, cannot be divided over its
    ranks, has another vocabulary, or fewer tokens than are asked of it.
    """
    teachers = teachers_of(config)
    if not teachers:
        return
    own = get_tokenizer(config.policy.tokenizer, trust_remote_code=config.policy.trust_remote_code).get_vocab()
    problems: list[str] = []
    for teacher in teachers:
        try:
            model = model_config(teacher.policy)
            if teacher.backend == "vllm":
                tp = teacher.policy.generation.vllm_cfg.tensor_parallel_size
                check_divisible(model, tp, "generation.vllm_cfg.tensor_parallel_size", ("num_attention_heads",))
                problems += _too_short(teacher, model)
            else:
                backend_spec(teacher.policy).check(teacher.policy, model)
            tokenizer = get_tokenizer(teacher.policy.tokenizer, trust_remote_code=teacher.policy.trust_remote_code)
        except UserError as error:
            problems.append(f"{teacher.key}: {str(error).replace('policy.', '')}")
            continue
        problems += [
            f"{teacher.key}: {teacher.policy.model_name} {difference}; a teacher and its student need the same "
            "vocabulary (distillation across tokenizers is not built)"
            for difference in _differences(config, own, tokenizer.get_vocab(), student, model)
        ]
    if config.loss_fn.compares_with_teacher and not problems:
        k, size = config.grpo.topk_logits_k, int(student.vocab_size)
        if k > size:
            problems.append(f"{config.section()}.topk_logits_k is {k}, and the vocabulary has {size} tokens")
    if problems:
        raise ConfigError(problems)


def _too_short(teacher: Teacher, model: PretrainedConfig) -> Iterator[str]:
    longest = getattr(model, "max_position_embeddings", None)
    if longest is not None and teacher.policy.generation.vllm_cfg.max_model_len == longest + 1:
        yield (
            f"{teacher.key}: {teacher.policy.model_name} has {longest} positions, and engines need one more than "
            f"the longest sample has tokens; lower policy.max_total_sequence_length to {longest - 1}"
        )


def _differences(
    config: MasterConfig,
    own: Mapping[str, int],
    other: Mapping[str, int],
    student: PretrainedConfig,
    teacher: PretrainedConfig,
) -> Iterator[str]:
    if own != other:
        tokens = sorted(token for token in {*own, *other} if own.get(token) != other.get(token))
        named = ", ".join(map(repr, tokens[:_NAMED]))
        yield (
            f"has another tokenizer than policy.tokenizer.name {config.policy.tokenizer.name}: {len(tokens)} tokens "
            f"differ, such as {named}"
        )
    elif student.vocab_size != teacher.vocab_size:
        yield f"has vocab_size {teacher.vocab_size}, policy.model_name {config.policy.model_name} {student.vocab_size}"


@dataclass(frozen=True)
class Seat:
    """A teacher and its slots. `shares`: whether they are those of training."""

    teacher: Teacher
    cluster: RayVirtualCluster
    shares: bool


@dataclass(frozen=True)
class TeacherActors:
    """The actors of a teacher, which have imported what they need and loaded nothing."""

    seat: Seat
    actors: RayWorkerGroup | EngineActors | ServedTeacher

    def shutdown(self) -> None:
        """Ends them. Safe to call twice."""
        self.actors.shutdown()


def start_teacher_actors(
    config: MasterConfig,
    training: RayVirtualCluster,
    own: Mapping[str, RayVirtualCluster],
    served: Callable[[Teacher], ServedTeacher],
) -> list[TeacherActors]:
    """Starts the actors of every teacher.

    Args:
        own: Slots of teachers that have their own, by name.
        served: Finds a teacher that is a job of its own.
    """
    with ExitStack() as undo:
        started = []
        for teacher in teachers_of(config):
            shares = teacher.resources is None and teacher.job is None
            seat = Seat(teacher, own.get(teacher.name, training), shares=shares)
            if teacher.job is not None:
                one = TeacherActors(seat, served(teacher))
            elif teacher.backend == "vllm":
                one = TeacherActors(
                    seat, start_scoring_actors(seat.cluster, teacher, config.cluster, shares=seat.shares)
                )
            else:
                one = TeacherActors(
                    seat,
                    start_policy_actors(
                        seat.cluster, teacher.policy, teacher.name, init_optimizer=False, init_reference_model=False
                    ),
                )
            undo.callback(one.shutdown)
            started.append(one)
        undo.pop_all()
    return started


class Teachers:
    """The teachers of a run.

    Args:
        student: The policy, built; it is asked for room where a teacher shares its accelerators.
        lends: Whether accelerators are lent, so that nothing may stay on them.
    """

    def __init__(
        self,
        actors: Sequence[TeacherActors],
        config: MasterConfig,
        student: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lends: bool,
    ) -> None:
        self._student, self._lends = student, lends
        self._topk = config.grpo.topk_logits_k if config.loss_fn.compares_with_teacher else 0
        self._by_task = config.on_policy_distillation.enabled
        self._in_engines = config.on_policy_distillation.backend == "vllm"
        self._strict = config.on_policy_distillation.strict_agent_name_match
        self._cuda = any(one.seat.cluster.accelerator.is_cuda for one in actors)
        self._seats = [one.seat for one in actors]
        self._temperature = config.policy.generation.temperature
        self._models: list[Model] = []
        self._bytes: list[int] = []
        if self._cuda and any(seat.shares for seat in self._seats):
            student.offload_to_cpu()
        for one in actors:
            model = _model(one, student, tokenizer)
            self._models.append(model)
            if isinstance(model, (Policy, EngineTeacher)):
                model.wait_until_started()
            self._bytes.append(_memory_in_use(model) if self._cuda else 0)
            self._leave(one.seat, model)

    def workers(self) -> list[ActorHandle[Any]]:
        """The actors of teachers that are models of this run's own, beside the policy."""
        return [worker for model in self._models if isinstance(model, Policy) for worker in model.worker_group.workers]

    def score(self, handle: BatchHandle, tasks: Sequence[str], store: ExperienceStore, timer: Timer) -> BatchHandle:
        """Adds the columns of the teachers. `tasks`: agent or data set of each row.

        Raises WorkerError, WorkerTimeoutError: a teacher failed or does not answer.
        """
        if self._topk:
            index = next(i for i, seat in enumerate(self._seats) if seat.teacher.tasks is None)
            with self._seated(index) as model:
                if isinstance(model, Policy):
                    result = model.get_topk_logits(handle, self._topk, timer=timer)
                    names = {TOPK_IDS: "topk_indices", TOPK_LOGPROBS: "topk_logits"}
                    handle = store.commit(handle, result, **names)
                else:
                    handle = self._score_by_engines(model, handle, store)
        if self._by_task and self._in_engines:
            handle = self._logprobs_by_engines(handle, tasks, store)
        elif self._by_task:
            handle = store.commit(handle, self._logprobs(handle, tasks, store, timer), **{LOGPROBS: "logprobs"})
        return handle

    def _score_by_engines(
        self, model: EngineTeacher | ServedTeacher, handle: BatchHandle, store: ExperienceStore
    ) -> BatchHandle:
        found = model.score(store.read(handle, ("input_ids", "input_lengths")), self._topk)
        # At another temperature the k log-probabilities are those up to a constant, which the loss does not see.
        logprobs_BSk = found["topk_logits"] / (self._temperature or 1.0)
        return store.update(handle, {TOPK_IDS: found["topk_indices"], TOPK_LOGPROBS: logprobs_BSk})

    def _rows_of(self, tasks: Sequence[str]) -> dict[int, list[int]]:
        rows_of: dict[int, list[int]] = {}
        for row, task in enumerate(tasks):
            rows_of.setdefault(self.teacher_of(task), []).append(row)
        return rows_of

    def _logprobs_by_engines(self, handle: BatchHandle, tasks: Sequence[str], store: ExperienceStore) -> BatchHandle:
        batch = store.read(handle, ("input_ids", "input_lengths"))
        whole_BS = torch.zeros(batch["input_ids"].shape)

        def score(index: int, rows: list[int]) -> None:
            part = BatchedDataDict({name: batch[name][rows] for name in ("input_ids", "input_lengths")})
            with self._seated(index) as model:
                if isinstance(model, Policy):
                    raise TypeError(f"{self._seats[index].teacher.name} has no engines")
                whole_BS[rows] = model.score(part, 0)["logprobs"]

        rows_of = self._rows_of(tasks)
        # Teachers of this run take turns on its accelerators; other jobs score side by side.
        with ThreadPoolExecutor(len(rows_of) if self.served else 1) as threads:
            for _ in threads.map(score, *zip(*rows_of.items(), strict=True)):
                pass
        return store.update(handle, {LOGPROBS: whole_BS})

    def _logprobs(self, handle: BatchHandle, tasks: Sequence[str], store: ExperienceStore, timer: Timer) -> Scores:
        results: list[tuple[list[int], Scores]] = []
        for index, rows in self._rows_of(tasks).items():
            part = handle if len(rows) == len(tasks) else store.select(handle, rows)
            with self._seated(index) as model:
                if not isinstance(model, Policy):
                    raise TypeError(f"{self._seats[index].teacher.name} is no policy")
                results.append((rows, model.get_logprobs(part, timer=timer)))
        first = results[0][1]
        if len(results) == 1 or not isinstance(first, BatchedDataDict) or not isinstance(handle, BatchedDataDict):
            return first
        whole_BS = torch.zeros(handle["input_ids"].shape)
        for rows, result in results:
            if isinstance(result, BatchedDataDict):
                whole_BS[rows, : result["logprobs"].shape[1]] = result["logprobs"]
        return BatchedDataDict(logprobs=whole_BS)

    @property
    def served(self) -> bool:
        """Whether another job scores, so that this one needs no accelerators for it."""
        return any(seat.teacher.job is not None for seat in self._seats)

    def teacher_of(self, task: str) -> int:
        """Number of the teacher that scores samples of an agent or data set. Raises ConfigError: there is none."""
        return teacher_of([seat.teacher for seat in self._seats], task, strict=self._strict)

    @contextmanager
    def _seated(self, index: int) -> Generator[Model]:
        """The teacher's model is on its accelerators inside the block."""
        seat, model = self._seats[index], self._models[index]
        if self._cuda and seat.shares:
            self._make_room(self._bytes[index] + _ROOM_FOR_ACTIVATIONS)
        if isinstance(model, (Policy, EngineTeacher)):
            model.prepare_for_lp_inference()
        yield model
        self._leave(seat, model)

    def _make_room(self, needed: int) -> None:
        # Most of what a step leaves is cached by the allocator: to give that back costs far less than to move weights.
        if self._student.get_free_memory_bytes() < needed:
            self._student.finish_training()
        if self._student.get_free_memory_bytes() < needed:
            self._student.offload_to_cpu()

    def _leave(self, seat: Seat, model: Model) -> None:
        if isinstance(model, EngineTeacher):
            model.offload_to_cpu()
        elif isinstance(model, Policy) and self._cuda and seat.shares:
            model.offload_to_cpu()
            if self._lends:
                model.destroy_nccl_groups()

    def kernels(self) -> Iterator[str]:
        """What computes each teacher, for the start's lines."""
        for seat, model in zip(self._seats, self._models, strict=True):
            where = "in turn with the policy" if seat.shares else f"on {seat.cluster.world_size()} slots of its own"
            where = "elsewhere" if seat.teacher.job is not None else where
            said = (model.started and model.started.kernels) if isinstance(model, Policy) else model.kernels()
            yield f"{seat.teacher.name}: {seat.teacher.policy.model_name}, {where}; {said or ''}"

    def shutdown(self) -> None:
        """Ends the workers. Safe to call twice."""
        for model in self._models:
            model.shutdown()


def start_teachers(
    actors: Sequence[TeacherActors],
    config: MasterConfig,
    student: Policy,
    tokenizer: PreTrainedTokenizerBase,
    start: StartPhases,
    undo: ExitStack,
    *,
    lends: bool,
) -> Teachers | None:
    """Builds the teachers, or None without any; see `Teachers`. `undo`: has them shut down if the start fails."""
    if not actors:
        return None
    with start.phase("teacher" if len(actors) == 1 else "teachers"):
        teachers = Teachers(actors, config, student, tokenizer, lends=lends)
        undo.callback(teachers.shutdown)
    for line in teachers.kernels():
        start.say(line)
    return teachers


def teacher_of(teachers: Sequence[Teacher], task: str, *, strict: bool) -> int:
    """Number of the teacher of an agent or data set: the one that names it, or else the default. Raises ConfigError:
    there is none. `strict`: whether the default stands in for no one.
    """
    key = "on_policy_distillation.teacher_model_by_agent_name"
    named = sorted(name for teacher in teachers for name in teacher.names)
    for index, teacher in enumerate(teachers):
        if task in teacher.names:
            return index
    default = next((index for index, teacher in enumerate(teachers) if teacher.tasks is None), None)
    if default is None or strict:
        reason = " and strict_agent_name_match is true" if default is not None else ", and there is no default"
        raise ConfigError([f"{key}: the data set {task!r} has no teacher{reason}; it names {', '.join(named)}"])
    return default


def _memory_in_use(model: Model) -> int:
    if isinstance(model, Policy):
        return max(model.worker_group.run("memory_in_use"))
    return model.memory_in_use() if isinstance(model, EngineTeacher) else 0


def _model(one: TeacherActors, student: Policy, tokenizer: PreTrainedTokenizerBase) -> Model:
    seat = one.seat
    if isinstance(one.actors, EngineActors):
        return EngineTeacher(one.actors, tokenizer, shares=seat.shares)
    if not isinstance(one.actors, RayWorkerGroup):
        return one.actors
    if isinstance(student, TQPolicy):
        return TQPolicy(
            seat.cluster,
            seat.teacher.policy,
            tokenizer,
            dp_cfg=student.dp_cfg,
            client=student.dp_client,
            logprobs_column=LOGPROBS,
            actors=one.actors,
        )
    return Policy(seat.cluster, seat.teacher.policy, tokenizer, actors=one.actors)
