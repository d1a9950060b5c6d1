"""Which ranks of a pipeline could wake, whether their GPUs are kept for somebody else, and for how long one serves at
least.

Looks at a plan in the making and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.planning.plan import Expand, Plan, Reason
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, PlanState
from nemo_rl.time_sharing.protocol.types import Limits, Priority

_WORTH_HANDOVERS = 4.0
"""How many times the hand-over a time slice lasts, so that at most a fifth of a GPU's time goes into moving it."""
_LONGEST_SLICE = 4.0
"""How many times the time slice of a pipeline of weight 1 that of a heavy one lasts at most, whatever its weight, since
others wait for its end."""


def slice_seconds(plan_state: PlanState, name: str) -> float:
    """Seconds that a rank serves before another pipeline may take it: a multiple of its hand-over time, at most
    `max_slice_s` (`min_hold_s` before the first hand-over), scaled by the pipeline's weight, and at least its own
    `slice_s`.

    At most `max_slice_s` x `_LONGEST_SLICE` or its own `slice_s`: the longest that others wait for it.
    """
    known = plan_state.time_slices.get(name)
    if known is None:
        pipeline, hold = plan_state.pipelines[name], plan_state.limits.min_hold_s
        if pipeline.handover_s is not None:
            hold = min(_WORTH_HANDOVERS * pipeline.handover_s, plan_state.limits.max_slice_s)
        hold *= min(max(pipeline.spec.weight, 0.1), _LONGEST_SLICE)
        known = plan_state.time_slices[name] = max(hold, pipeline.spec.slice_s)
    return known


def guaranteed_seconds(pipeline: PipelineState, limits: Limits) -> float:
    """For how long a guaranteed rank of a pipeline serves at least, even if a request waits for its GPUs."""
    return max(limits.min_hold_s, pipeline.spec.slice_s)


def guaranteed_from(pipeline: PipelineState, limits: Limits) -> float:
    """Time from which a pipeline without a rank is guaranteed one; infinity if it does not wait for one.

    One whose slices are long has no use for the short ones that others get meanwhile: it waits for one slice at most.
    """
    since, slice_s = pipeline.unscheduled_since, pipeline.spec.slice_s
    if since is None:
        return math.inf
    longest = limits.aging_s * Priority.GENERATION
    return since + (min(slice_s, longest) if slice_s else longest)


def trained_on_within(
    plan_state: PlanState, gpus: tuple[int, ...], seconds: float | None, but: str | None = None
) -> bool:
    """Whether a pipeline other than `but` may ask for these GPUs to train on within so many seconds (None:
    unknown), by its past steps.
    """
    for name, pipeline in plan_state.pipelines.items():
        if pipeline.fenced or name == but or pipeline.topology.training_gpus.isdisjoint(gpus):
            continue
        usual = pipeline.generation_s
        if seconds is None or usual is None or pipeline.demand.remaining == 0:
            return True
        if plan_state.now + seconds > pipeline.batch_since + usual:
            return True
    return False


def rank_state(plan_state: PlanState, gpus: tuple[int, ...], name: str, rank: int) -> int:
    """The worst of a rank's GPUs; one that is reserved against the rank counts as blocked."""
    kind = plan_state.kind
    worst = kind[gpus[0]] if len(gpus) == 1 else max(kind[gpu] for gpu in gpus)
    if worst != BLOCKED and reserved_against(plan_state, gpus, name, rank):
        return BLOCKED
    return worst


def reserved_against(plan_state: PlanState, gpus: tuple[int, ...], name: str, rank: int) -> bool:
    """Whether one of the GPUs is reserved for another pipeline's first rank, or for a request that will start before
    this rank could have had a slice.
    """
    first_start, kept_for = plan_state.first_start, plan_state.kept_for
    if not first_start and not kept_for:
        return False
    for gpu in gpus:
        if gpu in first_start and first_start[gpu] <= _slice_ends(plan_state, name, rank):
            return True
        if kept_for.get(gpu, name) != name:
            return True
    return False


def _slice_ends(plan_state: PlanState, name: str, rank: int) -> float:
    """End of the first slice of a rank that is woken now."""
    return plan_state.now + plan_state.rise_s(name, rank) + slice_seconds(plan_state, name)


def candidates(plan_state: PlanState, pipeline: PipelineState) -> Sequence[int]:
    """Ranks that could wake: asleep, not claimed, not cooling off after a failure, and likely to serve for as long as
    is of use; those first whose engine has been built before.
    """
    name = pipeline.topology.pipeline
    asleep = plan_state.asleep.get(name)
    if asleep is None:
        asleep = plan_state.asleep[name] = _of_use(plan_state, pipeline, _asleep(plan_state, pipeline))
    building = plan_state.building.get(name, 0)
    if building and 0 < plan_state.useful[name] <= plan_state.counts[name] + building:
        # Those stand sooner than any whose engine were begun now.
        return [rank for rank in asleep if rank in pipeline.warm]
    return asleep


def _of_use(plan_state: PlanState, pipeline: PipelineState, asleep: Sequence[int]) -> Sequence[int]:
    """Ranks on whose GPUs no training is expected before their slice has ended; all once one is guaranteed."""
    slice_s, name, ranks = pipeline.spec.slice_s, pipeline.topology.pipeline, pipeline.topology.ranks
    if not slice_s or plan_state.now >= guaranteed_from(pipeline, plan_state.limits):
        return asleep
    return [
        rank
        for rank in asleep
        if not trained_on_within(plan_state, ranks[rank], plan_state.rise_s(name, rank) + slice_s, but=name)
    ]


def _asleep(plan_state: PlanState, pipeline: PipelineState) -> Sequence[int]:
    up, claimed, warm = pipeline.awake, pipeline.claimed_ranks, pipeline.warm
    asleep: Sequence[int] = pipeline.wake_order
    if up or claimed:
        asleep = [rank for rank in asleep if rank not in up and rank not in claimed]
    if warm and len(warm) < len(pipeline.topology.ranks):
        asleep = [rank for rank in asleep if rank in warm] + [rank for rank in asleep if rank not in warm]
    if pipeline.cooling:
        asleep = [rank for rank in asleep if pipeline.cooling.get(rank, 0.0) <= plan_state.now]
    return asleep


def expand(
    plan_state: PlanState, result: Plan, name: str, rank: int, because: Reason, *, guaranteed: bool = False
) -> None:
    gpus, kind = plan_state.pipelines[name].topology.ranks[rank], plan_state.kind
    for gpu in gpus:
        kind[gpu] = BLOCKED
    plan_state.counts[name] += 1
    result.expands.append(Expand(name, rank, gpus, guaranteed, because))
