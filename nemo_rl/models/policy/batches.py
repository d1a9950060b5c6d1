"""Batches of a policy: validation, and cutting over its ranks.

Refuses what the forward pass would silently leave out, and turns the configuration into the arguments of sharding.
Invariants: batches of this process and rows of the data plane are cut by the same arguments; a chunk of a step may have
any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane.field_schema import (
    PROMPT,
    PROMPT_TOKENS,
    ROUTE_FIELDS,
    SAMPLING_MASK_FIELDS,
    TAG,
    model_inputs,
    replayed_fields,
)
from nemo_rl.distributed.batch_sharding import SharedPrefixes
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl.models.policy.interfaces import Scores

RECORDED = (*ROUTE_FIELDS, *SAMPLING_MASK_FIELDS)
"""Columns of what generation decided."""
REPLAYS_ROUTES = ("get_logprobs", "get_policy_and_reference_logprobs")
"""Scoring calls whose pass is routed as generation was."""


class UnsupportedColumnsError(ValueError):
    """A batch has columns that the policy's backend cannot take."""


class NothingRecordedError(ValueError):
    """A batch lacks the recorded decisions that the configuration replays."""


def refuse_model_inputs(columns: Iterable[str]) -> None:
    """Refuses batches with model inputs that the forward pass would ignore. Raises UnsupportedColumnsError."""
    refused = model_inputs(columns)
    if refused:
        raise UnsupportedColumnsError(
            f"the batch has the model inputs {refused}, but the policy's forward takes token ids "
            "only; leave these columns out of the rollout"
        )


def shares_prompts(config: PolicyConfig, *, cuda: bool) -> bool:
    """Whether packed rows hold the tokens that a prompt's samples begin with once. `cuda`: whether training runs on
    GPUs.
    """
    packing = config.sequence_packing
    if not packing.enabled or config.megatron_cfg.enabled or config.dtensor_cfg.context_parallel_size > 1:
        return False
    if config.router_replay.enabled:
        # Samples of a prompt were routed one by one, and each of its tokens would have to be computed for each.
        return False
    return cuda if packing.share_prompts is None else packing.share_prompts


def prefixes_of(tags: Mapping[str, Sequence[int]]) -> SharedPrefixes | None:
    """The prompts of rows, from their tags; None without tags."""
    if PROMPT not in tags or PROMPT_TOKENS not in tags:
        return None
    return SharedPrefixes(tags[PROMPT], tags[PROMPT_TOKENS])


def tags_of(data: BatchedDataDict) -> list[str]:
    """Columns of a batch that are tags of its rows."""
    return [name for name in data if name.startswith(TAG)]


def shard_batch(
    data: BatchedDataDict,
    config: PolicyConfig,
    ranks: int,
    batch_size: int | None,
    *,
    training: bool,
    share: bool = False,
) -> tuple[list[SlicedDataDict], list[int] | None]:
    """Shards a batch over data-parallel ranks: plainly, by dynamic batching or by packing.

    Args:
        data: `input_ids`, `input_lengths` and other columns.
        batch_size: Samples of a global batch, each sharded separately; None takes all.
        training: Whether the token budgets of training or of log-probability passes apply.
        share: Whether samples of a prompt go into the same packed row as far as they fit.

    Returns one shard per rank, without tags, and the permutation that restores the caller's order (None: none needed).
    """
    tags = tags_of(data)
    prefixes = prefixes_of({name.removeprefix(TAG): data[name].tolist() for name in tags}) if share else None
    data = BatchedDataDict({name: column for name, column in data.items() if name not in tags})
    arguments = microbatch_arguments(config, training=training, prefixes=prefixes)
    if arguments:
        return data.shard_by_batch_size(ranks, batch_size=batch_size, **arguments)
    return data.shard_by_batch_size(ranks, batch_size=batch_size), None


def microbatch_arguments(
    config: PolicyConfig, *, training: bool, prefixes: SharedPrefixes | None = None
) -> dict[str, Any]:
    """How microbatches are formed, as the keyword argument of sharding; empty for equal ones.

    Args:
        training: Whether the token budgets of training apply, or those of log-probability passes.
        prefixes: Common prefixes of rows, which packed rows hold once.
    """
    packing, dynamic = config.sequence_packing, config.dynamic_batching
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    if dynamic.enabled:
        tokens = dynamic.train_mb_tokens if training else dynamic.logprob_mb_tokens
        return {
            "dynamic_batching_args": {
                "max_tokens_per_microbatch": tokens,
                "sequence_length_round": dynamic.sequence_length_round,
                **keys,
            }
        }
    if packing.enabled:
        arguments = {
            "max_tokens_per_microbatch": packing.train_mb_tokens if training else packing.logprob_mb_tokens,
            "algorithm": packing.algorithm,
            "microbatch_order": packing.microbatch_order,
            "sequence_length_pad_multiple": config.make_sequence_length_divisible_by,
            "prefixes": prefixes,
        }
        return {"sequence_packing_args": arguments | keys}
    return {}


def chunk_rows(lengths: Sequence[int], ranks: int) -> list[list[int]] | None:
    """Which rows of a chunk go to which rank, where they do not divide: each to the rank with the fewest tokens so far,
    longest first. Ranks may stay without rows. Returns ascending rows of each rank; None for a chunk that divides,
    which is cut as a whole batch is.
    """
    if lengths and len(lengths) % ranks == 0:
        return None
    rows: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        rank = tokens.index(min(tokens))
        rows[rank].append(row)
        tokens[rank] += lengths[row]
    return [sorted(own) for own in rows]


def shard_rows(
    data: BatchedDataDict, config: PolicyConfig, ranks: int, *, training: bool, share: bool = False
) -> tuple[list[SlicedDataDict], list[int] | None]:
    """Shards rows of any number, a chunk of a step or rows to score, over data-parallel ranks; a rank's may be empty.
    See `shard_batch`.
    """
    rows = chunk_rows([int(length) for length in data["input_lengths"]], ranks)
    if rows is None:
        return shard_batch(data, config, ranks, None, training=training, share=share)
    shards: list[SlicedDataDict] = []
    order: list[int] = []
    for own in rows:
        if not own:
            shards.append(SlicedDataDict())
            continue
        part = data.select_indices(own)
        (shard,), inside = shard_batch(part, config, 1, None, training=training, share=share)
        shards.append(shard)
        order += [own[place] for place in (inside if inside is not None else range(len(own)))]
    return shards, order


class CutToScore(NamedTuple):
    """Inputs of a scoring call for each rank, and the function that joins the ranks' results."""

    shards: Sequence[object]
    arguments: Mapping[str, object]  # the same for every rank
    scores: Callable[[list[Any]], Scores]


class Rows(Protocol):
    """A batch of either kind, as the policy's calls take it, validated for the backend.

    Attributes:
        suffix: Of the workers' methods for these rows.
        argument: Under which those take them.
        labels: Of the times that training and scoring take to cut them.
    """

    suffix: str
    argument: str
    labels: tuple[str, str]

    @property
    def size(self) -> int: ...

    def cut(self, batch_size: int) -> Sequence[object]:
        """Global batches of so many rows, cut over the ranks."""
        ...

    def cut_chunk(self) -> Sequence[object]:
        """A chunk of a step, cut over the ranks."""
        ...

    def cut_to_score(self, method: str) -> CutToScore: ...


class InProcessRows:
    """Rows of this process: they travel with a call, and its results with the answer."""

    suffix, argument = "", "data"
    labels: tuple[str, str] = ("sharding_data", "shard_data")

    def __init__(self, batch: BatchedDataDict, config: PolicyConfig, ranks: int, *, share: bool) -> None:
        refuse_model_inputs(batch)
        self._batch, self._config, self._ranks, self._share = batch, config, ranks, share

    @property
    def size(self) -> int:
        return self._batch.size

    def cut(self, batch_size: int) -> Sequence[object]:
        return shard_batch(self._batch, self._config, self._ranks, batch_size, training=True, share=self._share)[0]

    def cut_chunk(self) -> Sequence[object]:
        return shard_rows(self._batch, self._config, self._ranks, training=True, share=self._share)[0]

    def cut_to_score(self, method: str) -> CutToScore:
        replayed = replayed_fields(self._batch, routes=method in REPLAYS_ROUTES)
        scored = ("input_ids", "input_lengths", *replayed, *tags_of(self._batch))
        columns = BatchedDataDict({key: self._batch[key] for key in scored})
        shards, order = shard_rows(columns, self._config, self._ranks, training=False, share=self._share)

        def joined(results: list[Any]) -> Scores:
            merged = BatchedDataDict.from_batches(results)
            return merged if order is None else merged.reorder_data(order)

        return CutToScore(shards, {}, joined)


def microbatches(
    data: BatchedDataDict, config: PolicyConfig, size: int, *, replayed: Sequence[str] = RECORDED
) -> list[BatchedDataDict]:
    """One rank's rows as the microbatches that they were planned as, or in parts of `size` rows, the last one short.
    `replayed`: columns of `RECORDED` that the pass replays where the configuration says so; they are left out
    otherwise. Raises NothingRecordedError: the batch has none.
    """
    if not data.size:
        return []
    off = () if config.router_replay.enabled else ROUTE_FIELDS
    off += () if config.sampling_mask_replay else SAMPLING_MASK_FIELDS
    wanted = [name for name in replayed if name not in off]
    if missing := [name for name in wanted if name not in data]:
        key = "router_replay.enabled" if missing[0] in ROUTE_FIELDS else "sampling_mask_replay"
        raise NothingRecordedError(
            f"policy.{key}=true, but the batch has no column {missing[0]}: the engine recorded nothing"
        )
    if config.dynamic_batching.enabled:
        parts = list(data.make_microbatch_iterator_with_dynamic_shapes())
    elif config.sequence_packing.enabled:
        parts = list(data.make_microbatch_iterator_for_packable_sequences())
    else:
        parts = [data.slice(start, min(start + size, data.size)) for start in range(0, data.size, size)]
    return [_without(part, [name for name in RECORDED if name not in wanted]) for part in parts]


def without_routes(part: BatchedDataDict) -> BatchedDataDict:
    """A microbatch that is routed naturally."""
    return _without(part, ROUTE_FIELDS)


def _without(part: BatchedDataDict, names: Sequence[str]) -> BatchedDataDict:
    return BatchedDataDict({name: column for name, column in part.items() if name not in names})
