"""Builds engines on idle GPUs, ahead of their first wake."""

from __future__ import annotations

from nemo_rl.time_sharing.planning.plan import Expand, Plan
from nemo_rl.time_sharing.planning.plan_state import FREE, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, trained_on_within


def build_ahead(plan_state: PlanState, result: Plan) -> None:
    """Has engines that do not stand yet built on GPUs that are left over, so that their first wakes are short.

    A build cannot be broken off. It begins where no pipeline trains, elsewhere only if past steps and builds show that
    it will have ended when the next training is asked for. Call it last.
    """
    for name, pipeline in plan_state.pipelines.items():
        if not pipeline.builds or pipeline.withdraws or pipeline.fenced:
            continue
        if len(pipeline.warm) == len(pipeline.topology.ranks):
            continue
        for rank in candidates(plan_state, pipeline):
            gpus = pipeline.topology.ranks[rank]
            if (
                rank not in pipeline.warm
                and all(plan_state.kind[gpu] == FREE and gpu not in plan_state.reserved for gpu in gpus)
                and not trained_on_within(plan_state, gpus, pipeline.build_s)
            ):
                plan_state.claim(gpus)
                result.expands.append(Expand(name, rank, gpus, guaranteed=False, because=("ahead",), ahead=True))
