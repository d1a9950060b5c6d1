"""How long one full plan takes, at five sizes; the last line is the figure in milliseconds for the largest.

    python benchmarks/planner.py

Each pipeline is mapped to 64 GPUs. Two states are timed and the slower counts: an empty pool with everybody waiting,
and a full one after demand has changed. Times are CPU time of one core. The validator is reported beside it and not
counted. The largest size comes once more as a team's pool, of sixty users in six groups with shares and limits.
"""

from __future__ import annotations

import random
import time

from nemo_rl.time_sharing.log.events import QuotasSet, Registered
from nemo_rl.time_sharing.log.state import AwakeRank, HeldCluster, Lease, QueuedWant, SchedulerState
from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import Pool, register
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Demand, Phase, Priority, Want

SIZES = ((16, 256), (64, 1024), (256, 2560), (1000, 10000), (3000, 30000))
WIDTH, TRAIN, REPEATS = 64, 16, 5


GROUPS, USERS = 6, 60


def quotas(gpus: int) -> QuotasSet:
    """Groups with a sixth of the pool each and a limit of a quarter, and their users."""
    nodes = [QuotaNode(f"group g{number}", share=1 / GROUPS, limit=gpus / 4) for number in range(GROUPS)]
    nodes += [QuotaNode(f"user u{number}", f"group g{number % GROUPS}") for number in range(USERS)]
    return QuotasSet(tuple(nodes), 14400.0)


def fleet(pipelines: int, gpus: int, rng: random.Random, *, team: bool = False) -> SchedulerState:
    """A pool with pipelines at random places, all with demand, three in ten waiting to train."""
    state = SchedulerState()
    state.pool = Pool(gpus // 8, 8)
    state.owner, state.trainers = [None] * gpus, [0] * gpus
    if team:
        state.apply(quotas(gpus), 0.0)
    for number in range(pipelines):
        start = rng.randrange(gpus // 8) * 8
        mapping = sorted({(start + i) % gpus for i in range(min(WIDTH, gpus))})
        mappings = {ACTOR_TRAIN: mapping[:TRAIN], ACTOR_INFER: mapping}
        whose = {"user": f"u{number % USERS}", "group": f"g{number % GROUPS}"} if team else {}
        tps = {ACTOR_TRAIN: 1, ACTOR_INFER: 1}
        spec = register(state.pool, f"p{number}", "ns", tps, mappings, rank_batch=8, **whose).spec
        state.apply(Registered(spec.pipeline, 0, "ns", spec.clusters, **spec.options()), 0.0)
        pipeline = state.pipelines[spec.pipeline]
        pipeline.demand = Demand(rng.randrange(64, 1024), 0, 1, 1)
        state.update_unscheduled_since(pipeline, 0.0)
        if rng.random() < 0.3:
            pipeline.wants[ACTOR_TRAIN] = QueuedWant(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0), rng.random())
    return state


def fill(state: SchedulerState, plan: Plan, rng: random.Random) -> None:
    """Carries the plan out at once and changes all demands."""
    epoch = 0
    for expand in plan.expands:
        epoch += 1
        state.take(expand.gpus, Lease(expand.pipeline, ACTOR_INFER, expand.rank, epoch))
        state.pipelines[expand.pipeline].awake[expand.rank] = AwakeRank(Phase.SERVING, epoch, 0.0)
    for grant in plan.grants:
        epoch += 1
        pipeline = state.pipelines[grant.pipeline]
        state.take(grant.gpus, Lease(grant.pipeline, grant.cluster, -1, epoch))
        pipeline.held[grant.cluster] = HeldCluster(epoch, grant.gpus, grant.priority, 0, 0.0, 1e9, grant.request)
        pipeline.wants.clear()
    for pipeline in state.pipelines.values():
        pipeline.demand = Demand(rng.randrange(64, 1024), rng.randrange(0, 200), 1, 2)
        state.update_unscheduled_since(pipeline, 50.0)


def timed(state: SchedulerState) -> tuple[Plan, float, float]:
    """The plan, and the best times in milliseconds of planner and validator."""
    best, check = float("inf"), float("inf")
    snapshot = Snapshot.of(state)
    for _ in range(REPEATS):
        began = time.process_time()
        plan = planner.plan(snapshot, 100.0)
        best = min(best, time.process_time() - began)
        began = time.process_time()
        problems = validate(snapshot, plan)
        check = min(check, time.process_time() - began)
        if problems:
            raise SystemExit(f"the plan is not valid: {problems[0]}")
    return plan, best * 1e3, check * 1e3


def main() -> None:
    print("pipelines    GPUs   empty pool ms   full pool ms   validator ms   moves")
    figure = 0.0
    for pipelines, gpus, team in [*((*size, False) for size in SIZES), (*SIZES[-1], True)]:
        rng = random.Random(0)
        state = fleet(pipelines, gpus, rng, team=team)
        plan, empty, check = timed(state)
        fill(state, plan, rng)
        moved, full, check_full = timed(state)
        figure = figure if team else max(empty, full)
        moves = f"{len(plan.expands) + len(plan.grants)} / {len(moved.expands)}{' (a team)' * team}"
        print(f"{pipelines:>9} {gpus:>7} {empty:>15.1f} {full:>14.1f} {max(check, check_full):>14.1f}   {moves}")
    print(f"{figure:.1f}")


if __name__ == "__main__":
    main()
