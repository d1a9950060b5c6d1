"""Which rank means which GPUs: the pool, the registration rules, and the one rank -> GPUs table that scheduler and
pipeline share.

What is leased is a slot: a whole GPU, or a part of it in a pool with several slots on each GPU. There, each GPU has a
training turn besides, which every cluster that trains leases with its slots, so that one trainer runs on a GPU at a
time beside the engines of others. Everything below calls what is leased a GPU.

A pipeline that passes `register` can always be scheduled: its mappings lie in the pool, every rank is whole and inside
its node, and some inference rank survives training. A mapping that is not sorted is refused, because the two sides
would disagree about what a rank is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    CLUSTER_NAMES,
    JOB_PRIORITIES,
    MAX_COUNT,
    ClusterSpec,
    PipelineOptions,
    PipelineSpec,
    is_whole,
    shown,
)

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1000.0
"""A pipeline that counts more than a thousand others is alone on the pool for all practical purposes; within these,
weighted work stays finite."""
MAX_SECONDS = 3600.0
"""The longest slice, and the longest drain, of a registration."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_ID = 256
_LONGEST_NAME = 64


class RegistrationError(UserError, ValueError):
    """A pipeline cannot be registered as asked. `cluster`: which one the mistake is in, None where it is in none."""

    def __init__(self, message: str, *, pipeline: str, cluster: str | None = None) -> None:
        where = f"pipeline {pipeline!r}" + (f", cluster {cluster!r}" if cluster else "")
        super().__init__(f"{where}: {message}")
        self.pipeline, self.cluster = pipeline, cluster
        self._message = message

    def __reduce__(self) -> tuple[Callable[..., RegistrationError], tuple[object, ...]]:
        # Actors raise these across processes, and an exception with keyword arguments does not pickle by itself.
        return partial(type(self), pipeline=self.pipeline, cluster=self.cluster), (self._message,)


class UnknownCluster(RegistrationError):
    """The cluster name is not one that the scheduler knows."""


class DuplicateGpu(RegistrationError):
    """A mapping names a GPU twice."""


class UnsortedMapping(RegistrationError):
    """A mapping is not in ascending order."""


class GpuOutsidePool(RegistrationError):
    """A mapping names a GPU that the pool does not have."""


class BadRankSize(RegistrationError):
    """tp is not positive, does not divide the mapping, or a rank would not lie as it must inside its node."""


class NoSurvivingRank(RegistrationError):
    """Training touches every inference rank, so generation could never go on beside it."""


class TrainingOutsideInference(RegistrationError):
    """A training GPU is not an inference GPU."""


class BadShare(RegistrationError):
    """A weight, share, staleness or batch size is out of its range."""


class StillRegistered(RegistrationError):
    """An earlier incarnation of the pipeline is still being taken down; try again shortly."""


class IncarnationUsed(RegistrationError):
    """The pipeline has been registered under this incarnation, or a larger one, before; the message names the next free
    one.
    """


@dataclass(frozen=True, slots=True)
class Pool:
    """The GPUs of the cluster: `nodes` equal nodes; GPU g is local GPU g % gpus_per_node of node g // gpus_per_node.

    With several slots on each GPU, slot s lies on GPU s // slots_per_gpu, and the training turns of the GPUs are
    numbered after the slots.
    """

    nodes: int
    gpus_per_node: int
    slots_per_gpu: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "slots_per_gpu"):
            if getattr(self, name) < 1:
                raise ValueError(f"pool: {name}={getattr(self, name)} must be at least 1")

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def slots(self) -> int:
        """Number of slots that engines and trainers are placed on."""
        return self.gpus * self.slots_per_gpu

    @property
    def size(self) -> int:
        """Number of leasable units: slots and, where GPUs have several, training turns."""
        return self.slots + (self.gpus if self.slots_per_gpu > 1 else 0)

    def gpu_of(self, slot: int) -> int:
        """The GPU on which a slot, or whose training turn it is."""
        return slot - self.slots if slot >= self.slots else slot // self.slots_per_gpu

    def node_of(self, slot: int) -> int:
        """The node of a slot."""
        return self.gpu_of(slot) // self.gpus_per_node

    def units_of(self, nodes: Iterable[int]) -> set[int]:
        """All slots and training turns of some nodes."""
        wanted = set(nodes)
        return {unit for unit in range(self.size) if self.node_of(unit) in wanted} if wanted else set()

    def local_gpus(self, slots: Iterable[int]) -> list[int]:
        """The GPUs that some slots lie on, by their numbers on their node, ascending."""
        return sorted({self.gpu_of(slot) % self.gpus_per_node for slot in slots})

    def slots_on(self, gpus: Iterable[int], column: int | None = 0) -> list[int]:
        """The slots number `column` of some GPUs, or all of their slots for None; ascending where the GPUs are."""
        columns = range(self.slots_per_gpu) if column is None else (column,)
        return [gpu * self.slots_per_gpu + number for gpu in gpus for number in columns]

    def turns_of(self, slots: Iterable[int]) -> list[int]:
        """The training turns of the GPUs that some slots lie on, ascending; none where a slot is a whole GPU."""
        return sorted({self.slots + self.gpu_of(slot) for slot in slots}) if self.slots_per_gpu > 1 else []

    def gpus_in(self, slots: Iterable[int]) -> float:
        """How many GPUs some slots make up: each is its part of one, and a training turn is none."""
        return sum(slot < self.slots for slot in slots) / self.slots_per_gpu

    def name_of(self, slot: int) -> str:
        """How people read it: `3` for a whole GPU, `3.0` for its first slot, `3's training turn` for that."""
        if self.slots_per_gpu == 1:
            return str(slot)
        if slot >= self.slots:
            return f"{self.gpu_of(slot)}'s training turn"
        return f"{self.gpu_of(slot)}.{slot % self.slots_per_gpu}"


class Topology:
    """A registered pipeline with its tables worked out. Compare and log the `spec`; the rest follows from it."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.clusters: dict[str, ClusterSpec] = {cluster.name: cluster for cluster in spec.clusters}
        infer = self.clusters[ACTOR_INFER]
        self.tp = infer.tp_size
        self.ranks: tuple[tuple[int, ...], ...] = tuple(
            infer.gpus[i : i + self.tp] for i in range(0, len(infer.gpus), self.tp)
        )

    @property
    def pipeline(self) -> str:
        return self.spec.pipeline

    @cached_property
    def first_gpus(self) -> list[int]:
        """Each rank's first GPU."""
        return [rank[0] for rank in self.ranks]

    @cached_property
    def at_first_gpus(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Picks from a sequence with an item for each GPU of the pool those of each rank's first GPU, in one call."""
        firsts = self.first_gpus
        return itemgetter(*firsts) if len(firsts) > 1 else lambda items: (items[firsts[0]],)

    @cached_property
    def training_gpus(self) -> frozenset[int]:
        return frozenset(self.clusters[ACTOR_TRAIN].gpus) if ACTOR_TRAIN in self.clusters else frozenset()

    @cached_property
    def mapped_gpus(self) -> frozenset[int]:
        return frozenset(g for cluster in self.spec.clusters for g in cluster.gpus)


def register(
    pool: Pool,
    pipeline: str,
    namespace: str,
    cluster_tp_configs: Mapping[str, int],
    cluster_device_mappings: Mapping[str, Sequence[int]],
    *,
    full_overlap: bool = False,
    **options: Any,
) -> Topology:
    """Checks everything a pipeline registers and returns its topology.

    Args:
        cluster_tp_configs: GPUs per rank by cluster name.
        cluster_device_mappings: Global GPU ids by cluster name, ascending.
        full_overlap: Admits pipelines whose training covers every inference rank (colocated turns, no generation
            beside training).
        options: Of `PipelineOptions`.

    Raises RegistrationError: what is wrong, with the pipeline and the cluster.
    """

    def refuse(mistakes: Iterator[_Mistake]) -> None:
        for kind, cluster, message in mistakes:
            raise kind(message, pipeline=pipeline if isinstance(pipeline, str) else shown(pipeline), cluster=cluster)

    refuse(_in_names(pipeline, namespace, cluster_tp_configs, cluster_device_mappings))
    refuse(_in_options(PipelineOptions(**options)))
    clusters = []
    for name in CLUSTER_NAMES:
        if name not in cluster_device_mappings:
            continue
        tp, given = cluster_tp_configs[name], cluster_device_mappings[name]
        refuse(_in_mapping(pool, name, tp, given))
        mapping = tuple(given)
        if name == ACTOR_TRAIN:
            mapping += tuple(pool.turns_of(mapping))
        clusters.append(ClusterSpec(name, tp, mapping))
    topology = Topology(PipelineSpec(pipeline, namespace, tuple(clusters), **options))
    refuse(_in_training(pool, topology, full_overlap))
    return topology


_Mistake = tuple[type[RegistrationError], str | None, str]
"""The error, the cluster that it is about and the message; each function below rests on the ones before it."""


def _in_names(
    pipeline: object, namespace: object, tps: Mapping[str, int], mappings: Mapping[str, Sequence[int]]
) -> Iterator[_Mistake]:
    if not isinstance(pipeline, str):
        yield RegistrationError, None, f"id must be text, found {shown(pipeline)}"
        return
    longest = len(pipeline) + 1 + max(len(n) for n in CLUSTER_NAMES)
    if not _ID.fullmatch(pipeline) or longest > _MAX_ID:
        what = f"id must match {_ID.pattern} and leave its cluster ids within {_MAX_ID} characters (now {longest})"
        yield RegistrationError, None, what
    if not isinstance(namespace, str) or not namespace:
        what = "namespace is empty" if namespace == "" else f"namespace={shown(namespace)} must be text"
        yield RegistrationError, None, what
    for what, given in (("cluster_tp_configs", tps), ("cluster_device_mappings", mappings)):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            yield RegistrationError, None, f"{what} must map cluster names to values, found {shown(given)}"
    if tps.keys() != mappings.keys():
        both = "cluster_tp_configs and cluster_device_mappings must name the same clusters"
        odd = ", ".join(sorted(tps.keys() ^ mappings.keys()))
        yield RegistrationError, None, f"{both}; only one of them has {odd}"
    for name in mappings:
        if name not in CLUSTER_NAMES:
            yield UnknownCluster, name, f"unknown; the clusters are {', '.join(CLUSTER_NAMES)}"
    if ACTOR_INFER not in mappings:
        yield RegistrationError, ACTOR_INFER, "is missing; it is the cluster that shares its GPUs"


def _in_options(options: PipelineOptions) -> Iterator[_Mistake]:
    for name, text in (("user", options.user), ("group", options.group)):
        if not isinstance(text, str) or len(text) > _LONGEST_NAME or not text.isprintable():
            what = f"{name}={shown(text)} must be text of at most {_LONGEST_NAME} characters"
            yield RegistrationError, None, what
    if options.priority not in JOB_PRIORITIES:
        known = f"{', '.join(JOB_PRIORITIES[:-1])} or {JOB_PRIORITIES[-1]}"
        yield RegistrationError, None, f"priority={shown(options.priority)} must be {known}"
    weight, min_share, max_share = options.weight, options.min_share, options.max_share
    seconds = (("slice_s", options.slice_s), ("drain_s", options.drain_s))
    for name, value in (("weight", weight), ("min_share", min_share), ("max_share", max_share), *seconds):
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield BadShare, None, f"{name}={shown(value)} must be a number"
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        bounds = f"must be positive, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        yield BadShare, None, f"weight={shown(weight)} {bounds}; it counts relative to the weights of others"
    if not 0 <= min_share <= max_share <= 1 or max_share == 0:
        shares = f"min_share={shown(min_share)} and max_share={shown(max_share)}"
        yield BadShare, None, f"{shares} must satisfy 0 <= min_share <= max_share <= 1 and 0 < max_share"
    for name, value in seconds:
        if not 0 <= value <= MAX_SECONDS:
            yield BadShare, None, f"{name}={shown(value)} must be from 0 to {MAX_SECONDS:g} seconds"
    bound = 0 if options.staleness is None else options.staleness
    for name, count, least in (("staleness", bound, 0), ("rank_batch", options.rank_batch, 1)):
        if not is_whole(count, least):
            what = f"must be at least {least}, and a whole number of at most {MAX_COUNT:.0e}"
            yield BadShare, None, f"{name}={shown(count)} {what}"


def _in_mapping(pool: Pool, name: str, tp: int, given: Sequence[int]) -> Iterator[_Mistake]:
    try:
        mapping = tuple(given)
    except TypeError:
        yield RegistrationError, name, f"its device mapping is {shown(given)}; expected a list of GPU ids"
        return
    if not mapping:
        yield RegistrationError, name, "its device mapping is empty"
    for gpu in mapping:
        if isinstance(gpu, bool) or not isinstance(gpu, int):
            yield RegistrationError, name, f"device mapping holds {shown(gpu)}; GPU ids are integers"
        if not 0 <= gpu < pool.slots:
            whole = f"the pool of {pool.slots} {'GPUs' if pool.slots_per_gpu == 1 else 'slots'}"
            yield GpuOutsidePool, name, f"GPU {gpu} is outside {whole} (0..{pool.slots - 1})"
    seen: set[int] = set()
    for before, gpu in zip((-1, *mapping), mapping, strict=False):
        if gpu in seen:
            yield DuplicateGpu, name, f"GPU {gpu} is named twice"
        seen.add(gpu)
        if gpu < before:
            ascending = f"give the mapping in ascending order: {sorted(mapping)}"
            yield UnsortedMapping, name, f"GPU {gpu} comes after {before}; {ascending}"
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        yield BadRankSize, name, f"tp={shown(tp)} must be an integer of at least 1"
    if len(mapping) % tp:
        yield BadRankSize, name, f"{len(mapping)} GPUs cannot be divided into ranks of tp={tp}"
    if tp > 1:
        yield from _in_ranks(pool, name, tp, mapping)
    if name == ACTOR_TRAIN:
        # Training ranks exchange gradients, and NCCL has one rank on a GPU; whole GPUs are leased slot by slot.
        gpus = [pool.gpu_of(slot) for slot in mapping]
        if len(set(gpus)) not in (len(gpus), len(gpus) / pool.slots_per_gpu):
            twice = next(gpu for gpu in gpus if gpus.count(gpu) > 1)
            what = f"slots {mapping} put two training ranks on GPU {twice}; name slots of different GPUs"
            yield DuplicateGpu, name, what


def _in_ranks(pool: Pool, name: str, tp: int, mapping: tuple[int, ...]) -> Iterator[_Mistake]:
    per_node = pool.gpus_per_node
    if pool.slots_per_gpu == 1 and tp not in (1, 2, 4, 8) and tp % per_node:
        yield BadRankSize, name, f"tp={tp} must be 1, 2, 4, 8 or whole nodes of {per_node} GPUs"
    for start in range(0, len(mapping), tp):
        rank = mapping[start : start + tp]
        which, gpus = f"rank {start // tp} on GPUs {rank}", sorted({pool.gpu_of(slot) for slot in rank})
        if gpus[-1] - gpus[0] != len(gpus) - 1 or (len(gpus) != tp and len(gpus) * pool.slots_per_gpu != tp):
            yield BadRankSize, name, f"{which} is not contiguous"
        spans_nodes = pool.node_of(rank[0]) != pool.node_of(rank[-1])
        if spans_nodes and (len(gpus) % per_node or gpus[0] % per_node):
            yield BadRankSize, name, f"{which} crosses a node border of {per_node} GPUs"


def _in_training(pool: Pool, topology: Topology, full_overlap: bool) -> Iterator[_Mistake]:
    infer = frozenset(topology.clusters[ACTOR_INFER].gpus)
    train = topology.clusters.get(ACTOR_TRAIN)
    if train is None:
        return
    if topology.spec.scavenges:
        yield (
            RegistrationError,
            None,
            "priority=scavenger is for jobs that do not train (evaluation, generation, commands): training cannot give "
            "its GPUs back at any time; leave the priority out, or lower the weight",
        )
    outside = sorted(gpu for gpu in set(train.gpus) - infer if gpu < pool.slots)
    if outside:
        what = f"GPU {outside[0]} is not in {ACTOR_INFER}; training shares the inference GPUs"
        yield TrainingOutsideInference, ACTOR_TRAIN, what
    if not full_overlap and all(set(rank) & set(train.gpus) for rank in topology.ranks):
        lent = "GPUs" if pool.slots_per_gpu == 1 else "slots"
        trained = tuple(slot for slot in train.gpus if slot < pool.slots)
        yield (
            NoSurvivingRank,
            ACTOR_TRAIN,
            f"training on {lent} {trained} touches each of the {len(topology.ranks)} inference ranks of "
            f"tp={topology.tp}; "
            f"at least one whole rank must stay awake: add inference {lent}, or train on fewer",
        )
