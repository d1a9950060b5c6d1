"""The run record's shared events, and the registry of their names on disk.

An event is a frozen dataclass of plain values, made and registered by `@event_kind`. A field added later needs a
default; a changed meaning needs a new `SCHEMA_VERSION`. Packages above add kinds of their own.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TypeVar

SCHEMA_VERSION = 1

Decoder = Callable[[object], object]
EventClass = TypeVar("EventClass", bound=type)
Value = TypeVar("Value")

_KINDS: dict[str, type] = {}
_SHAPES: dict[type, EventShape] = {}


class EventDefinitionError(TypeError):
    """An event class cannot be registered: its kind is taken, or one of its fields has a type that JSON lines cannot
    carry.
    """


@dataclass(frozen=True)
class EventShape:
    """How one event class is written: its kind, its field names in order and one decoder per field."""

    kind: str
    names: tuple[str, ...]
    required: frozenset[str]
    decoders: Mapping[str, Decoder]


@typing.dataclass_transform(frozen_default=True)
def event_kind(kind: str) -> Callable[[EventClass], EventClass]:
    """Makes a class a frozen dataclass and registers it as the event `kind`.

    Fields may be str, int, float, bool, enums of those, NamedTuples, other dataclasses, `tuple[X, ...]`, `set[X]`, `X |
    None` and `Mapping[K, X]` with K a str, int or enum. Raises EventDefinitionError when the kind is taken by another
    class or a field cannot be carried.
    """

    def register(cls: EventClass) -> EventClass:
        taken = _KINDS.get(kind)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise EventDefinitionError(
                f"event kind {kind!r} is already {taken.__module__}.{taken.__qualname__}; give "
                f"{cls.__qualname__} another kind"
            )
        event = typing.cast(EventClass, dataclass(frozen=True, slots=True)(cls))
        _KINDS[kind] = event
        return event

    return register


def event_class(kind: str) -> type | None:
    """The class registered as `kind`, or None."""
    return _KINDS.get(kind)


def shape_of(cls: type) -> EventShape:
    """The written shape of an event class. Raises EventDefinitionError for a class that is not a registered event."""
    shape = _SHAPES.get(cls)
    if shape is None:
        shape = _SHAPES[cls] = _build_shape(cls)
    return shape


def _build_shape(cls: type) -> EventShape:
    kind = next((name for name, known in _KINDS.items() if known is cls), None)
    if kind is None:
        raise EventDefinitionError(
            f"{cls.__module__}.{cls.__qualname__} is not an event; decorate it with @event_kind('...')"
        )
    hints = typing.get_type_hints(cls)
    members = fields(cls)
    decoders = {member.name: _decoder(hints[member.name], f"{cls.__qualname__}.{member.name}") for member in members}
    required = frozenset(m.name for m in members if m.default is MISSING and m.default_factory is MISSING)
    return EventShape(kind, tuple(m.name for m in members), required, decoders)


def _decoder(hint: object, where: str) -> Decoder:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        if len(inner) != 1:
            raise EventDefinitionError(f"{where}: a union of several types is ambiguous on disk; allowed is `X | None`")
        decode = _decoder(inner[0], where)
        return lambda value: None if value is None else decode(value)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        element = _decoder(arguments[0], where)
        return lambda value: tuple(element(v) for v in _as(list, value))
    if origin is set:
        element = _decoder(arguments[0], where)
        return lambda value: {element(v) for v in _as(list, value)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, member = _key_decoder(arguments[0], where), _decoder(arguments[1], where)
        return lambda value: {key(k): member(v) for k, v in _as(dict, value).items()}
    if isinstance(hint, type):
        return _plain_decoder(hint, where)
    raise EventDefinitionError(f"{where}: type {hint} cannot be written to a run record")


def _plain_decoder(hint: type, where: str) -> Decoder:
    if hint is float:
        return lambda value: float(_as((int, float), value))
    if hint in (str, bool):
        return lambda value: _as(hint, value)
    if hint is int:
        return _as_int
    if issubclass(hint, Enum):
        return hint
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        members = [_decoder(hints[name], f"{where}.{name}") for name in hint._fields]
        build: Callable[..., object] = hint
        return lambda value: build(*(decode(v) for decode, v in zip(members, _as(list, value), strict=True)))
    if is_dataclass(hint):
        return _dataclass_decoder(hint, where)
    raise EventDefinitionError(f"{where}: type {hint.__name__} cannot be written to a run record")


def _dataclass_decoder(hint: type, where: str) -> Decoder:
    hints = typing.get_type_hints(hint)
    members = {member.name: _decoder(hints[member.name], f"{where}.{member.name}") for member in fields(hint)}
    return lambda value: hint(**{name: members[name](inner) for name, inner in _as(dict, value).items()})


def _key_decoder(hint: object, where: str) -> Callable[[str], object]:
    """JSON writes every key as a text."""
    if hint is str:
        return str
    if hint is int:
        return int
    if isinstance(hint, type) and issubclass(hint, Enum):
        named = {str(member.value): member for member in hint}
        return lambda key: named[key]
    raise EventDefinitionError(f"{where}: keys of type {hint} cannot be written to a run record")


def plain(value: object) -> object:
    """The JSON form of a value that JSON does not know. Raises TypeError for one that a line cannot carry."""
    if is_dataclass(value) and not isinstance(value, type):
        return {member.name: getattr(value, member.name) for member in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written to a run record")


def _as_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected int, found {value!r}")
    return value


def _as(expected: type[Value] | tuple[type[Value], ...], value: object) -> Value:
    if not isinstance(value, expected):
        raise TypeError(f"expected {expected}, found {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """A line whose kind is not registered in this process (its module is not imported)."""

    kind: str
    fields: Mapping[str, object]


def adapter_pipeline(job: str, adapter: str) -> str:
    """How an adapter's entries name their pipeline: `<job>:<adapter>` in a pool, where jobs may have adapters of equal
    names; without a job the adapter's own name.
    """
    return f"{job}:{adapter}" if job else adapter


def job_of_adapter(pipeline: str) -> str | None:
    """The job of the pool that a pipeline is an adapter of; None for any other pipeline."""
    job, _, adapter = pipeline.partition(":")
    return job if adapter else None


@event_kind("record_opened")
class RecordOpened:
    """A writer took the file: the first line, and one more after each resume."""

    source: str
    resumed: bool = False


@event_kind("policy_started")
class PolicyStarted:
    """Every training worker has its model: by which backend, and by which implementation of its layers."""

    backend: str
    kernels: str
    ranks: int = 1


@event_kind("group_admitted")
class GroupAdmitted:
    """A prompt group entered the run: from here it must end up trained or dropped, exactly once."""

    group_id: str
    prompt_id: str
    samples: int
    target_step: int | None = None
    adapter: str = ""  # for which it is drawn, where several share a base


@event_kind("group_committed")
class GroupCommitted:
    """All samples of a group are written and scored, with the newest weight version among their tokens; `restored`
    where that was before a restart, and an earlier record has its tokens.
    """

    group_id: str
    version: int
    tokens: int = 0
    restored: bool = False


@event_kind("group_trained")
class GroupTrained:
    """A group was part of the optimizer step `step` (the step that makes version `step + 1`), of `adapter` where
    several share a base.
    """

    group_id: str
    step: int
    adapter: str = ""


@event_kind("group_dropped")
class GroupDropped:
    """A group left the run untrained; `reason` is a short stable word such as `zero_variance`, `stale`, `overlong` or
    `end_of_run`.
    """

    group_id: str
    reason: str


class RecordedSpan(typing.NamedTuple):
    """Tokens [start, end) of a sample, counted over prompt and completion, came from weight version `version`."""

    version: int
    start: int
    end: int


@event_kind("tokens_generated")
class TokensGenerated:
    """Which weights produced each generated token of a sample; `mixed_kv` when later tokens attended to KV entries of
    older weights. `adapter`: whose versions they are, as the engines say; several names are joined by commas.
    """

    sample_id: str
    group_id: str
    spans: tuple[RecordedSpan, ...]
    mixed_kv: bool = False
    adapter: str = ""


@event_kind("version_published")
class VersionPublished:
    """Weight version `version` is what new tokens of these shards carry from now on; no shards named means
    all that are awake.
    """

    version: int
    shards: tuple[int, ...] = ()


@event_kind("engine_built")
class EngineBuilt:
    """A shard's engine was built or rebuilt within `seconds`; asleep it keeps `left_bytes` on each of its devices."""

    shard: int
    seconds: float
    left_bytes: tuple[int, ...] = ()


@event_kind("engine_outgrown")
class EngineOutgrown:
    """A sleeping engine keeps `kept_bytes` on a device, and kept `first_bytes` at its first sleep: more than it may, so
    that it is rebuilt before it wakes.
    """

    shard: int
    kept_bytes: int
    first_bytes: int


@event_kind("shard_slept")
class ShardSlept:
    """A generation shard gave its memory back; `freed_bytes` as measured, `level` as the engine counts it."""

    shard: int
    level: int = 2
    freed_bytes: int = 0


@event_kind("shard_woken")
class ShardWoken:
    """A shard has its memory again. It may not be routed before its weights are synced and published."""

    shard: int


@event_kind("shard_routed")
class ShardRouted:
    """A shard takes requests from now on; `generation` is the router's number of the active set, `version` the weights
    it serves.
    """

    shard: int
    generation: int
    version: int = 0


@event_kind("shard_unrouted")
class ShardUnrouted:
    """A shard takes no new request from now on."""

    shard: int
    generation: int


@event_kind("request_submitted")
class RequestSubmitted:
    """A generation request was handed to a shard, to be drawn with `adapter` where several share a base."""

    request_id: str
    shard: int
    sample_id: str = ""
    adapter: str = ""


@event_kind("request_finished")
class RequestFinished:
    """A request left its shard; `outcome` is `done`, `preempted`, `aborted` or `failed`."""

    request_id: str
    shard: int
    outcome: str = "done"
    tokens: int = 0


@event_kind("wait_begun")
class WaitBegun:
    """A wait for `what` began, until at most `deadline` (seconds on the record's clock)."""

    wait_id: str
    what: str
    deadline: float


@event_kind("wait_ended")
class WaitEnded:
    """A wait is over; `outcome` is `done`, `expired` (its handler ran) or `cancelled`."""

    wait_id: str
    outcome: str = "done"


@event_kind("step_begun")
class StepBegun:
    """Optimizer step `step` (from 0) begins; it starts from weight version `step`, of `adapter` where several share a
    base.
    """

    step: int
    adapter: str = ""


@event_kind("step_span")
class StepSpan:
    """The driver was busy with `what` for step `step`, from `begun` to `ended` in seconds on the record's clock."""

    step: int
    what: str
    begun: float
    ended: float


@event_kind("step_finished")
class StepFinished:
    """Optimizer step `step` is done and made weight version `version`, of `adapter` where several share a base."""

    step: int
    version: int
    groups: int = 0
    adapter: str = ""


@event_kind("validated")
class Validated:
    """Weight version `version` was validated with so many samples; its requests were open for `seconds`."""

    version: int
    samples: int
    seconds: float


@event_kind("sync_started")
class SyncStarted:
    """A weight sync of `version` to the shards `targets` begins; with `recompute_kv` their running requests recompute
    keys and values. `adapter`: which of several is sent; running requests keep the version of it that they began with.
    """

    sync_id: str
    version: int
    targets: tuple[int, ...]
    transport: str = ""
    recompute_kv: bool = False
    adapter: str = ""


@event_kind("sync_finished")
class SyncFinished:
    """A weight sync ended; `checksums` by target if verified, `outcome` is `done`, `failed` or `expired`."""

    sync_id: str
    version: int
    outcome: str = "done"
    bytes_sent: int = 0
    checksums: Mapping[str, str] = field(default_factory=dict)
