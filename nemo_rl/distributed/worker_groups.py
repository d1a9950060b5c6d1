"""Groups of Ray actors on the slots of a virtual cluster, called together; and waiting for many workers at once.

`RayWorkerGroup` places one actor per slot (or one leader per tied group of slots), sets its rank environment, and
dispatches calls: the same data to all, different data to each, or sharded along named axes. A collective in which one
worker died never returns on the others, so waiting in rank order could hang on a healthy worker: `wait_for_workers`
watches all of them and raises on the first failure, with who failed and where. Invariants: every wait has a deadline; a
failing worker surfaces as a `WorkerError` within seconds; a failure handler runs once, before the caller gets the
error; what a single actor raised is raised here as it was, with its own type.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.errors import UserError, first_line
from nemo_rl.config.nsight_variables import Profile
from nemo_rl.distributed import nsight
from nemo_rl.distributed.accelerator_slots import SLOT_BYTES_VARIABLE
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.private_variables import without_private
from nemo_rl.distributed.virtual_cluster import AcceleratorSlot, RayVirtualCluster, cores_per_slot

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

Actor = TypeVar("Actor")
Answer = TypeVar("Answer")

TIMEOUT_VARIABLE = "NRL_WORKER_TIMEOUT_SECONDS"
_ROOT_CAUSE_WAIT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


class WorkerError(UserError, RuntimeError):
    """A worker raised or died. The message names worker, rank and node, and holds the remote traceback unless a
    `UserError` was raised.
    """


class WorkerDiedError(WorkerError):
    """The worker's process is gone."""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer within the deadline."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Name and place of a worker, for error messages."""

    name: str
    rank: int
    node_ip: str

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, node {self.node_ip})"


def worker_timeout_s() -> float:
    """Seconds that workers may take for one call (a training step, a start with its download):
    `NRL_WORKER_TIMEOUT_SECONDS`, by default half an hour.
    """
    return float(os.environ.get(TIMEOUT_VARIABLE, "1800"))


def wait_for_workers(
    refs: Sequence[ray.ObjectRef[object]],
    identities: Sequence[WorkerIdentity],
    *,
    what: str,
    timeout_s: float | None = None,
) -> list[object]:
    """Results in the order of `refs`.

    Args:
        identities: The called workers, aligned with `refs`.
        what: Name of the call, for messages.
        timeout_s: Deadline for all of them together, in seconds; `worker_timeout_s` by default.

    Raises WorkerError: a worker raised; as soon as the first one did; WorkerDiedError: a worker's process ended;
    WorkerTimeoutError: the deadline passed.
    """
    who = dict(zip(refs, identities, strict=True))
    limit_s = worker_timeout_s() if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False
        )
        if not ready:
            missing = ", ".join(str(who[ref]) for ref in pending)
            hint = f"; where calls take longer, set {TIMEOUT_VARIABLE}" if timeout_s is None else ""
            raise WorkerTimeoutError(f"{what}: no answer within {limit_s:.0f} s from {missing}{hint}")
        for ref in ready:
            failure = worker_failure(ref, who[ref], what)
            if failure is not None:
                raise _root_failure(failure, [(other, who[other]) for other in pending], what) from failure.__cause__
    return ray.get(list(refs), timeout=max(1.0, deadline - time.monotonic()))


def _root_failure(
    first: WorkerError, others: Sequence[tuple[ray.ObjectRef[object], WorkerIdentity]], what: str
) -> WorkerError:
    """The failure to report: a worker whose peer died often raises just before the death is known."""
    if isinstance(first, WorkerDiedError) or not others:
        return first
    ready, _ = ray.wait(
        [ref for ref, _ in others], num_returns=len(others), timeout=_ROOT_CAUSE_WAIT_S, fetch_local=False
    )
    failures = [worker_failure(ref, identity, what) for ref, identity in others if ref in ready]
    return next((failure for failure in failures if isinstance(failure, WorkerDiedError)), first)


def worker_failure(ref: ray.ObjectRef[object], identity: WorkerIdentity, what: str) -> WorkerError | None:
    """The failure behind a finished call, None if it succeeded."""
    try:
        ray.get(ref, timeout=60.0)
    except RayActorError as error:
        text = _plain(error)
        if error.actor_init_failed:
            return _caused(WorkerError(f"{what}: {identity} could not start: {_last_line(text)}\n{text}"), error)
        return _caused(WorkerDiedError(f"{what}: {identity} died: {text}"), error)
    except RayTaskError as error:
        # A UserError says what to do; its place in the code does not help.
        trace = "" if isinstance(error.cause, UserError) else f"\n{_plain(error)}"
        return _caused(
            WorkerError(f"{what}: {identity} raised {type(error.cause).__name__}: {error.cause}{trace}"), error.cause
        )
    except RayError as error:
        return _caused(WorkerError(f"{what}: {identity} failed: {_plain(error)}"), error)
    return None


def _caused(failure: WorkerError, cause: BaseException | None) -> WorkerError:
    failure.__cause__ = cause
    return failure


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def how_it_ended(error: BaseException) -> str:
    """Ray's message about an actor that is gone, on one line: its first sentence, its process, how that or its node
    ended, and why where its first steps failed.
    """
    text = _plain(error)
    process = re.search(r"^\s*pid: \d+$", text, re.MULTILINE)
    # Ray's guesses at the causes follow.
    end = re.search(r"Worker exit type: .*?(?= Some common causes|$)", text, re.MULTILINE)
    node = re.search(r"because its node has died.*(?:\n.*the actor's node was.*)?", text)
    failed = re.search(r"^nemo_rl[\w.]*Error: .*$", text, re.MULTILINE)
    return " ".join(
        [first_line(error), *(" ".join(found[0].split()) for found in (process, end, node, failed) if found)]
    )


def _last_line(traceback: str) -> str:
    """The exception behind a formatted traceback: what follows its last indented line."""
    tail: list[str] = []
    for line in reversed(traceback.strip().splitlines()):
        if line.startswith("  "):
            break
        tail.insert(0, line)
    return "\n".join(tail) or traceback


def start_actor(kind: type, *args: object) -> Any:
    """An actor on this node that needs no accelerator."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = ray.remote(kind)
    # It waits for others most of the time; spinning threads would take their cores.
    env = without_private({"PYTHONPATH": _import_path(), "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""})
    return actor_class.options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": env}).remote(*args)


def call(ref: ObjectRef[Answer], *, what: str, timeout_s: float) -> Answer:
    """The answer of an actor. Raises WorkerDiedError: its process ended; WorkerTimeoutError: no answer within the
    deadline.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from error
    except GetTimeoutError as error:
        raise WorkerTimeoutError(f"{what}: no answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerDiedError(f"{what}: its process died: {error}") from error


def stop_actor(actor: ActorHandle[Actor] | None) -> None:
    """Calls an actor's `close`, and ends it. Does nothing for None."""
    if actor is None or not ray.is_initialized():
        return
    ray.wait([actor.close.remote()], timeout=_CLOSE_TIMEOUT_S)
    ray.kill(actor)


logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NAME_FREE_S = 30.0


def resolve_fqn(fqn: str) -> Any:
    """Imports the object of a dotted name such as `package.module.Class`. Raises ImportError: it does not exist."""
    module_name, _, attribute = fqn.rpartition(".")
    if not module_name:
        raise ImportError(f"{fqn!r} is not a dotted name (expected package.module.Name)")
    module = import_module(module_name)
    if not hasattr(module, attribute):
        raise ImportError(f"module {module_name} has no {attribute!r}")
    return getattr(module, attribute)


class RayWorkerBuilder:
    """Worker to build on every slot: a class by its dotted name, and its constructor arguments."""

    def __init__(self, fqn: str, *args: object, **kwargs: object) -> None:
        self.fqn = fqn
        self.args = args
        self.kwargs = kwargs


@dataclass(eq=False)
class MultiWorkerFuture(list["ray.ObjectRef[object]"]):
    """Calls under way on several workers; the list of their references, which `ray.get` takes. `return_from`: positions
    in `futures` whose results are kept, so that replicated outputs are not repeated.
    """

    futures: list[ray.ObjectRef[object]]  # one reference per called worker
    called_workers: list[int]  # index of each called worker
    return_from: list[int] = field(default_factory=list)
    what: str = ""

    def __post_init__(self) -> None:
        super().__init__(self.futures)


# Positional and named ones of one call.
_Arguments = tuple[Sequence[object], dict[str, object]]


class RayWorkerGroup:
    """One actor per slot, or per tied group of slots.

    Args:
        cluster: Where to place the actors.
        workers_per_node: Limits the slots used on each node; all by default.
        name_prefix: Start of the actors' names in messages.
        bundle_indices_list: Tied groups `(node_rank, [bundle, ...])`; the group's actor sits on its first slot and sees
            all devices. Actors on one slot share it in equal parts.
        sharding_annotations: Rank grid with named axes for sharded calls; a plain data-parallel grid by default.
        max_concurrency: Calls an actor may run at once (asynchronous actors).
        profile: Which of them start under Nsight Systems; none by default.

    Attributes:
        workers: The actors by rank. A restarted actor replaces its entry.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | None = None,
        name_prefix: str = "",
        bundle_indices_list: Sequence[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: dict[str, str] | None = None,
        max_concurrency: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix or remote_worker_builder.fqn.rpartition(".")[2]
        self._slots = _group_slots(cluster, bundle_indices_list, workers_per_node)
        self.sharding_annotations = sharding_annotations or NamedSharding([*range(len(self._slots))], ["data_parallel"])
        if self.sharding_annotations.size != len(self._slots):
            raise ValueError(
                f"{self.name_prefix}: sharding grid has {self.sharding_annotations.size} ranks, there are "
                f"{len(self._slots)} workers"
            )
        self.identities = [
            WorkerIdentity(self.name_prefix, rank, slots[0].node_ip) for rank, slots in enumerate(self._slots)
        ]
        self.profiled = [
            rank for rank in range(len(self._slots)) if profile is not None and profile.wants(self.name_prefix, rank)
        ]
        if self.profiled:
            nsight.check_gpus(cuda=cluster.accelerator.is_cuda)
        self._builder = remote_worker_builder
        self._actor_class = ray.remote(resolve_fqn(remote_worker_builder.fqn))
        self._rendezvous = cluster.get_master_address_and_port()
        self._env_vars, self._max_concurrency = env_vars or {}, max_concurrency
        self.workers: list[Any] = [None] * len(self._slots)
        for rank in range(len(self._slots)):
            self.start_worker(rank)

    def start_worker(self, rank: int) -> None:
        """Starts or restarts the actor of a rank. Raises WorkerError: the old actor's name did not become free."""
        if self.workers[rank] is not None:
            ray.kill(self.workers[rank])
            self._slots[rank] = [self.cluster.current(slot) for slot in self._slots[rank]]
        slots = self._slots[rank]
        given = {"PYTHONPATH": _import_path(), **self._env_vars}
        env = self._environment(rank, *self._rendezvous) | without_private(given)
        runtime_env = nsight.runtime_env(env, f"{self.name_prefix}-{rank}" if rank in self.profiled else None)
        options = self._options(slots, runtime_env, self._max_concurrency)
        options |= self.cluster.actor_name(self.name_prefix, rank)
        deadline = time.monotonic() + _NAME_FREE_S
        while True:
            try:
                actor = self._actor_class.options(**options).remote(*self._builder.args, **self._builder.kwargs)
            except ValueError as error:
                # Ray keeps the name of an actor for a moment after its end.
                if "name" not in options or time.monotonic() > deadline:
                    raise WorkerError(f"{self.identities[rank]}: could not be started: {error}") from error
                time.sleep(0.05)
                continue
            self.workers[rank] = actor
            return

    def _environment(self, rank: int, address: str, port: int) -> dict[str, str]:
        slots = self._slots[rank]
        first = slots[0]
        on_node = [number for number, group in enumerate(self._slots) if group[0].node_rank == first.node_rank]
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(on_node.index(rank)),
            "WORLD_SIZE": str(len(self._slots)),
            "NODE_RANK": str(first.node_rank),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        if self.cluster.accelerator.is_cuda:
            # The slot's device is fixed by its bundle; two actors of one slot must see the same device, and a leader
            # all of its group.
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot.device_index) for slot in slots)
            if self.cluster.slot_bytes is not None:
                env[SLOT_BYTES_VARIABLE] = str(self.cluster.slot_bytes)
        else:
            env["OMP_NUM_THREADS"] = str(cores_per_slot(sum(len(self._slots[number]) for number in on_node)))
            # Threads that wait by spinning take cores from the threads they wait for when the machine has other work
            # too.
            env["OMP_WAIT_POLICY"] = "PASSIVE"
            env["CUDA_VISIBLE_DEVICES"] = ""
            # oneDNN keeps compiled code for 1,024 shapes, and requests come in ever new ones: half a gigabyte for a
            # small model. With 64 a batch takes no longer.
            env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
        return env | self.cluster.worker_env

    def _options(
        self, slots: list[AcceleratorSlot], runtime_env: dict[str, object], max_concurrency: int | None
    ) -> dict[str, object]:
        first = slots[0]
        share = slot_share(self.cluster.max_colocated_worker_groups * sum(each[0] == first for each in self._slots))
        options: dict[str, object] = {
            "num_cpus": 0,
            "scheduling_strategy": self.cluster.strategy_for(first.node_rank, first.bundle_index),
            "runtime_env": runtime_env,
        }
        if self.cluster.accelerator.is_cuda:
            options["num_gpus"] = share
        else:
            options["resources"] = {self.cluster.accelerator.ray_resource: share}
        if max_concurrency is not None:
            options["max_concurrency"] = max_concurrency
        return options

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def dp_size(self) -> int:
        """Size of the data-parallel axis."""
        return self.sharding_annotations.get_axis_size("data_parallel")

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Index of the first worker of a data-parallel shard."""
        return self.sharding_annotations.get_ranks_by_coord(data_parallel=dp_shard_idx)[0]

    def _call(self, worker_idx: int, method: str, call: _Arguments) -> ray.ObjectRef[object]:
        args, kwargs = call
        return getattr(self.workers[worker_idx], method).remote(*args, **kwargs)

    def run_single_worker_single_data(
        self, method: str, worker_idx: int, *args: object, **kwargs: object
    ) -> ray.ObjectRef[object]:
        """Calls one worker; the reference of its answer."""
        return self._call(worker_idx, method, (args, kwargs))

    def run_all_workers_single_data(
        self, method: str, *args: object, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: object
    ) -> MultiWorkerFuture:
        """Calls every worker (or those at coordinate 0 of the given axes) with the same arguments."""
        called = [rank for rank in range(self.world_size) if self._is_zero_on(rank, run_rank_0_only_axes or ())]
        return self._future(method, called, [(args, kwargs)] * len(called))

    def run_all_workers_multiple_data(
        self,
        method: str,
        *args: Sequence[object],
        common_kwargs: dict[str, object] | None = None,
        **per_worker: Sequence[object],
    ) -> MultiWorkerFuture:
        """Calls worker i with the i-th entry of every list. Raises ValueError: a list has another length."""
        for key, values in [*enumerate(args), *per_worker.items()]:
            if len(values) != self.world_size:
                raise ValueError(
                    f"{self.name_prefix}.{method}: {key} has {len(values)} entries for {self.world_size} workers"
                )
        calls: list[_Arguments] = [
            (
                tuple(values[rank] for values in args),
                {key: values[rank] for key, values in per_worker.items()} | (common_kwargs or {}),
            )
            for rank in range(self.world_size)
        ]
        return self._future(method, list(range(self.world_size)), calls)

    def run_all_workers_sharded_data(
        self,
        method: str,
        *args: object,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        common_kwargs: dict[str, object] | None = None,
        **sharded: object,
    ) -> MultiWorkerFuture:
        """Calls workers with their shard of each argument.

        Args:
            in_sharded_axes: Axes along which the arguments are nested lists, outermost first.
            replicate_on_axes: Axes whose workers all get the same shard; on an axis named nowhere only coordinate 0 is
                called.
            output_is_replicated: Axes along which only coordinate 0's answer is kept.
            common_kwargs: Arguments that are the same for all.
            *args, **sharded: Arguments, nested along `in_sharded_axes`.
        """
        named = {*in_sharded_axes, *replicate_on_axes}
        free = [axis for axis in self.sharding_annotations.names if axis not in named]
        called = [rank for rank in range(self.world_size) if self._is_zero_on(rank, free)]
        # One copy in the object store per shard, however many replicas read it.
        stored = {key: _put_leaves(value, len(in_sharded_axes)) for key, value in sharded.items()}
        placed = [_put_leaves(value, len(in_sharded_axes)) for value in args]
        calls: list[_Arguments] = []
        for rank in called:
            coordinates = self.sharding_annotations.get_worker_coords(rank)

            def shard_of(nested: Any, at: Mapping[str, int] = coordinates) -> Any:
                for axis in in_sharded_axes:
                    nested = nested[at[axis]]
                return nested

            kwargs = dict(common_kwargs or {}) | {key: shard_of(shards) for key, shards in stored.items()}
            calls.append((tuple(map(shard_of, placed)), kwargs))
        future = self._future(method, called, calls)
        future.return_from = [
            position for position, rank in enumerate(called) if self._is_zero_on(rank, output_is_replicated)
        ]
        return future

    def get_all_worker_results(self, future: MultiWorkerFuture, *, timeout_s: float | None = None) -> list[Any]:
        """Waits for all workers and returns the kept results in rank order. Raises WorkerError once one failed."""
        identities = [self.identities[rank] for rank in future.called_workers]
        results = wait_for_workers(future.futures, identities, what=future.what, timeout_s=timeout_s)
        return [results[position] for position in future.return_from]

    def run(self, method: str, *, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls every worker with the same arguments and waits."""
        return self.get_all_worker_results(self.run_all_workers_single_data(method, **kwargs), timeout_s=timeout_s)

    def _is_zero_on(self, rank: int, axes: Sequence[str]) -> bool:
        coordinates = self.sharding_annotations.get_worker_coords(rank)
        return all(coordinates.get(axis, 0) == 0 for axis in axes)

    def _future(self, method: str, called: list[int], calls: Sequence[_Arguments]) -> MultiWorkerFuture:
        refs = [self._call(rank, method, call) for rank, call in zip(called, calls, strict=True)]
        return MultiWorkerFuture(refs, called, list(range(len(called))), f"{self.name_prefix}.{method}")

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """Ends the workers, after `cleanup_method` if given; whether all cleanups succeeded. Safe to call twice."""
        clean = True
        if cleanup_method and not force and self.workers and ray.is_initialized():
            refs = [getattr(worker, cleanup_method).remote() for worker in self.workers]
            _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout)
            clean = not late
            if late:
                logger.warning(
                    "workers=%s cleanup=%s late=%d timeout_s=%.0f", self.name_prefix, cleanup_method, len(late), timeout
                )
        if ray.is_initialized():
            for worker in self.workers:
                ray.kill(worker)
        self.workers = []
        return clean


def _group_slots(
    cluster: RayVirtualCluster, tied: Sequence[tuple[int, list[int]]] | None, workers_per_node: int | None
) -> list[list[AcceleratorSlot]]:
    slots = cluster.slots()
    if tied is None:
        return [[slot] for slot in slots if workers_per_node is None or slot.bundle_index < workers_per_node]
    at = {(slot.node_rank, slot.bundle_index): slot for slot in slots}
    return [[at[node, bundle] for bundle in bundles] for node, bundles in tied]


def slot_share(actors: int) -> float:
    """Each of `actors` actors' share of a slot in Ray: slightly less than an equal part, so that probes still fit."""
    # Ray counts in parts of 1/10000.
    return 9000 // actors / 10000


def _put_leaves(value: Any, depth: int) -> Any:
    return ray.put(value) if depth == 0 else [_put_leaves(item, depth - 1) for item in value]


def _import_path() -> str:
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    existing = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([package_root, *existing]))


class PendingCall(Generic[Result]):
    """One call. `combine`: makes the result of the kept answers, in rank order. `on_error`: called once on failure."""

    def __init__(
        self,
        group: RayWorkerGroup,
        future: MultiWorkerFuture,
        combine: Callable[[list[Any]], Result],
        *,
        on_error: Callable[[], None],
    ) -> None:
        self._group = group
        self._future = future
        self._combine = combine
        self._on_error: Callable[[], None] | None = on_error

    def done(self) -> bool:
        """Whether every worker has answered, with or without an error."""
        refs = self._future.futures
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(ready) == len(refs)

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the answer, at most `timeout_s` seconds (default: the workers' deadline). Raises WorkerError: a
        worker failed; WorkerTimeoutError: no answer in time.
        """
        try:
            return self._combine(self._group.get_all_worker_results(self._future, timeout_s=timeout_s))
        except WorkerError:
            on_error, self._on_error = self._on_error, None
            if on_error is not None:
                on_error()
            raise

    def __await__(self) -> Generator[object, None, Result]:
        """The result, awaited without blocking the event loop."""
        return asyncio.to_thread(self.result).__await__()
