"""Inputs of a simulation: the pool, the jobs, what hand-overs cost, how the network behaves and what breaks.

These are the schemas of the scenario YAML files, each key with its meaning (`tools/pages` makes
docs/time_sharing_scenarios.md of them). Mappings are checked by the same rules as a real registration. Nothing is
converted: text is no number and `true` is not 1. Times are in seconds, all virtual.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from nemo_rl.time_sharing.planning import job_placement
from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    ADAPTERS_STOP_S,
    KILLED_S,
    LONGEST_STOP_S,
)

MOST_SAMPLES = 1_000_000  # that are simulated at once

Int = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0.0, le=1e7, allow_inf_nan=False)]
Probability = Annotated[float, Field(strict=True, ge=0.0, le=1.0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0.0, le=1e4, allow_inf_nan=False)]


def _key(
    default: object, meaning: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> Any:
    return Field(default, description=meaning, ge=ge, gt=gt, le=le)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolSection(_Section):
    """The GPUs to share: equal nodes. GPU g is local GPU g % gpus_per_node of node g // gpus_per_node."""

    nodes: Int = _key(1, "How many nodes.", ge=1, le=100_000)
    gpus_per_node: Int = _key(8, "GPUs of each node.", ge=1, le=1024)
    slots_per_gpu: Int = _key(
        1,
        "Jobs that may use a GPU at once, one of them training. Mappings name slots where it is above 1: slot s lies "
        "on GPU s // slots_per_gpu. The other ways of running the jobs use whole GPUs.",
        ge=1,
        le=64,
    )
    neighbours_slow: Number = _key(
        0.0,
        "How much longer work on a GPU takes for each other piece of work there, an engine with requests or a trainer: "
        "with 0.4 two at once take 1.4 times as long.",
        ge=0,
        le=100,
    )


class Tokens(_Section):
    """How long completions are: log-normal, cut at `max`. Each prompt of a seed has the same length in every way of
    running the jobs.
    """

    median: Number = _key(256, "Median length in tokens.", gt=0, le=1e7)
    sigma: Number = _key(0.8, "Spread of the logarithm: 0 gives equal lengths, 1.2 a long tail.", ge=0, le=3)
    max: Int = _key(8192, "Longest completion in tokens; at least the median.", ge=1, le=10**8)


class EngineSpeed(_Section):
    """One generation rank. With n requests running it gives each tokens_per_s / (1 + n / half_batch), so that its rate
    saturates as n grows.
    """

    tokens_per_s: Number = _key(100.0, "Tokens a second of a request that runs alone.", gt=0, le=1e6)
    half_batch: Number = _key(
        64.0,
        "So many requests at once halve the speed of each. A rank more is worth having per half_batch / 4 "
        "samples left.",
        gt=0,
        le=1e6,
    )
    max_running: Int = _key(256, "Requests that a rank runs at once; further ones wait.", ge=1, le=1_000_000)

    @property
    def good_batch(self) -> int:
        """Requests that a rank runs at once at good speed."""
        return max(int(self.half_batch / 4), 1)


class Costs(_Section):
    """What hand-overs take, in seconds. The defaults are those of an H200 with a small model, weights of 1 GB synced
    through the host.
    """

    start_s: Seconds = _key(5.0, "First wake of a rank: building its engine.")
    drain_s: Seconds = _key(0.05, "Taking the requests off a rank.")
    sleep_s: Seconds = _key(0.03, "Sending a rank to sleep: its memory is free afterwards.")
    wake_s: Seconds = _key(0.2, "Waking a rank whose engine stands already.")
    sync_s: Seconds = _key(0.3, "Loading the newest weights into a rank that wakes.")
    refresh_s: Seconds = _key(0.3, "Loading new weights into a rank that generates on, after a training step.")
    load_s: Seconds = _key(0.3, "Bringing the trainer back to its GPUs, before log-probs or training.")
    cache_s: Seconds = _key(0.3, "Copying new weights to host memory after a training step.")
    offload_s: Seconds = _key(0.2, "Taking the trainer off its GPUs.")
    reap_s: Seconds = _key(0.5, "Ending processes from outside.")
    jitter: Number = _key(
        0.1, "Each duration is multiplied by a log-normal factor of this spread; 0 for none.", ge=0, le=2
    )


class Network(_Section):
    """Messages between scheduler and jobs. Reordering follows from the spread of the delays."""

    delay_s: Seconds = _key(0.002, "Mean delay, exponentially distributed.")
    loss: Probability = _key(0.0, "Part of the messages that is lost (0 to 1).")
    duplicate: Probability = _key(0.0, "Part of the messages that arrives twice.")
    slow: Probability = _key(0.0, "Part of the messages that takes longer, by up to slow_s.")
    slow_s: Seconds = _key(1.0, "Longest extra delay of a slow message.")


class Faults(_Section):
    """What breaks, at random by the seed. Rates are per hour of the whole simulation, each strike hitting one job
    picked at random. Running alone has none.
    """

    agent_crashes: Rate = _key(
        0.0, "A job's processes die, per hour; they start again after restart_s and go on after the last trained step."
    )
    scheduler_crashes: Rate = _key(0.0, "The scheduler dies, per hour; the next one reads the log soon after.")
    scheduler_restart_s: Seconds = _key(
        6.0, "Longest time until the next scheduler reads the log; the shortest is a sixth of it."
    )
    log_losses: Probability = _key(
        0.0, "Chance that the scheduler's machine dies with it, and the last entries of its log are lost."
    )
    lost_entries: Int = _key(40, "How many these are at most.", ge=0, le=1_000_000)
    cancels: Rate = _key(0.0, "A job is ended from outside and started again, per hour.")
    drains: Rate = _key(0.0, "A job is asked to leave once it has given back what it holds, per hour.")
    withdrawals: Rate = _key(
        0.0, "A job takes back what it asks for, if it asks for anything, and asks again within a second, per hour."
    )
    partitions: Rate = _key(0.0, "A job and the scheduler do not hear each other, per hour.")
    partition_s: Seconds = _key(
        20.0, "Mean length of a partition; one longer than limits.lease_s costs the job its GPUs."
    )
    one_way_partitions: Rate = _key(
        0.0, "A job does not hear the scheduler, or is not heard by it, per hour, for partition_s as well."
    )
    outages: Rate = _key(
        0.0, "The scheduler is cut off from all jobs, or from some of them at once, per hour; both ways."
    )
    outage_s: Seconds = _key(20.0, "Mean length of such an outage.")
    stuck_shards: Rate = _key(0.0, "A generation rank stands still, per hour, until it is put to sleep and restarted.")
    slow_shards: Rate = _key(0.0, "A generation rank falls to 5 % of its speed, per hour.")
    clock_jumps: Rate = _key(0.0, "The scheduler's machine sets its clock (by -1 h, -1 s, 20 s or a day), per hour.")
    operation_fails: Probability = _key(0.0, "Chance that a drain, sleep, wake, sync or refresh fails.")
    operation_hangs: Probability = _key(0.0, "Chance that a drain, sleep, wake, sync or refresh never ends.")
    reap_fails: Probability = _key(
        0.0, "Chance that processes cannot be ended; their GPUs are quarantined and it is tried again."
    )
    restart_s: Seconds = _key(5.0, "How long a job's supervisor waits before it starts the job again.")
    restarts: Int = _key(
        20, "How often it does; a job that is ended once more is given up and counts as unfinished.", ge=0, le=1_000_000
    )
    until_s: Seconds = _key(1e7, "No crash, partition, stall, jump or failed operation after this time.")


class ScenarioQuota(_Section):
    """A group, or a user, of the team that has the pool."""

    parent: Text = _key("", "The group above it; of a user its group; empty at the top.")
    share: Number | None = _key(
        None, "Part of what its parent has (0 to 1) that it may count on; null where none is said.", ge=0, le=1
    )
    limit: Number | None = _key(None, "GPUs that its jobs hold at once at most; null for any number.", gt=0)


class Validation(_Section):
    """Samples that are generated to see how good the weights are, and not trained; the job waits for them."""

    samples: Int = _key(0, "How many at a time; 0 for no validation.", ge=0, le=MOST_SAMPLES)
    at_start: Bool = _key(False, "Whether the weights that it starts with are validated.")
    period: Int = _key(0, "After every so many steps; 0 for never.", ge=0, le=1_000_000)
    at_end: Bool = _key(False, "Whether the last weights are validated.")


class ScenarioJob(_Section):
    """One RL job: where it runs, what a step is, when it comes and goes."""

    name: Text = Field(description="Its name: letters, digits, `_`, `.` and `-`; each job has another.")
    train: tuple[Int, ...] = Field(
        description="GPUs it trains on, ascending; all of them in `infer`, and some whole rank of `infer` "
        "not among them. None for a scavenger, whose steps are samples that it generates alone."
    )
    infer: tuple[Int, ...] = Field(description="GPUs it may generate on, ascending; rank r is the r-th `tp` of them.")
    tp: Int = _key(1, "GPUs of one generation rank: 1, 2, 4, 8 or whole nodes.", ge=1)
    weight: Number = _key(1.0, "Its claim on contended GPUs relative to other jobs.", gt=0)
    min_share: Number = _key(
        0.0, "Part of its GPUs (0 to 1) it is entitled to at least while it has samples to generate.", ge=0, le=1
    )
    max_share: Number = _key(1.0, "Part of its GPUs it is entitled to at most; free GPUs may go beyond it.", gt=0, le=1)
    steps: Int = _key(10, "Training steps; the job has finished when all are trained.", ge=1, le=1_000_000)
    groups: Int = _key(
        8, "Prompt groups per step: a step trains when all samples of its groups are there.", ge=1, le=100_000
    )
    samples_per_group: Int = _key(8, "Completions of each prompt.", ge=1, le=100_000)
    turns: Int = _key(
        1,
        "Equal parts of a completion, between which its environment answers; none is shorter than a token.",
        ge=1,
        le=1000,
    )
    environment_s: Seconds = _key(0.0, "Seconds that the environment takes for each answer between two turns.")
    staleness: Int = _key(
        1,
        "How many steps generation may be ahead of training; 0 is on-policy: generation waits for the new weights.",
        ge=0,
        le=1_000_000,
    )
    train_s: Seconds = _key(10.0, "Seconds of one training step on the `train` GPUs.")
    compile_s: Seconds = _key(
        0.0, "Seconds more of the first training step, whenever the job starts: its kernels are compiled in it."
    )
    log_probs_s: Seconds = _key(0.0, "Seconds of the log-probs pass before each step, on the same GPUs; 0 for none.")
    measures_batch: Bool = _key(
        False,
        "Whether it is registered with a rank_batch of 64, as real GRPO runs are, and measures half_batch / 4 in its "
        "first step, rather than knows that from the start.",
    )
    user: Text = _key("", "Whose it is: one of `users`, or empty.")
    priority: Text = _key("normal", "`high`, `normal` or `scavenger`; see docs/time_sharing.md.")
    slice_s: Seconds = _key(0.0, "Seconds that a rank must serve to be of use, as for a command.", le=3600)
    drain_s: Seconds = _key(0.0, "Seconds that taking its work off a rank may take, if above the limit.", le=3600)
    builds_ahead: Bool = _key(
        False,
        "Whether its engines are built on idle GPUs, ahead of their first wakes, as those of real GRPO runs are.",
    )
    begin_s: Seconds = _key(0.0, "Seconds from its registration to its request for initialisation, off the GPUs.")
    init_s: Seconds = _key(2.0, "Seconds of the trainer's initialisation, whenever the job starts.")
    tokens: Tokens = _key(Tokens(), "Completion lengths.")
    engine: EngineSpeed = _key(EngineSpeed(), "How fast a rank generates.")
    validation: Validation = _key(Validation(), "What is generated beside what is trained.")
    arrive_s: Seconds = _key(0.0, "When the job is started.")
    leaves_s: Seconds | None = _key(
        None, "When its user stops it, finished or not; null for never. Such a job has no slowdown."
    )
    full_overlap: Bool = _key(False, "Lets training cover every generation rank: nothing is generated beside training.")
    teacher: Text = _key("", "The teacher of `teachers` that scores a step's samples before it trains; empty for none.")
    placed: Bool = _key(
        False,
        "Whether its mapping is moved, when it comes, to the GPUs on which the least goes on, as a pool does with jobs "
        "that name no GPUs.",
    )

    def moved(
        self, others: Iterable[job_placement.Mapped], pool_size: int, without: Set[int] = frozenset()
    ) -> ScenarioJob | None:
        """The job as it is placed on a pool where `others` are: its mapping keeps its shape, and its ranks their
        alignment; of one as wide as the pool its training moves. None of its GPUs is in `without`, or else, where it is
        too wide for that, none that it trains on; None where that is not possible either.
        """
        others = list(others)
        first, last = (pick(gpu for gpus in self.mappings.values() for gpu in gpus) for pick in (min, max))
        width = -(-(last + 1 - first) // self.tp) * self.tp
        if width > pool_size:
            return self
        try:
            if width == pool_size and self.train:
                raise ValueError("there is one place for it")
            by = job_placement.place(range(pool_size), width, others, without)[0] - first
        except ValueError:
            if not self.train:
                return self
            left = [gpu for gpu in self.infer if gpu not in without]
            if len(self.train) > len(left):
                return None
            return self.model_copy(update={"train": job_placement.place(left, len(self.train), others)})
        return self.model_copy(
            update={name: tuple(gpu + by for gpu in getattr(self, name)) for name in ("train", "infer")}
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of its registration, but for its batch and its user's group."""
        names = ("weight", "min_share", "max_share", "staleness", "slice_s", "drain_s", "user", "priority")
        return {name: getattr(self, name) for name in (*names, "full_overlap")}

    @property
    def rank_sizes(self) -> dict[str, int]:
        """GPUs of one rank of each of its clusters."""
        return dict.fromkeys(self.mappings, 1) | {ACTOR_INFER: self.tp}

    @property
    def mappings(self) -> dict[str, tuple[int, ...]]:
        """The GPUs of each of its clusters; what trains nothing has one."""
        return ({ACTOR_TRAIN: self.train} if self.train else {}) | {ACTOR_INFER: self.infer}


class ScenarioTeacher(_Section):
    """A frozen model that scores the samples of all jobs that name it: engines alone, awake while samples wait for
    scores. It ends with the last of these jobs.
    """

    name: Text = Field(description="Its name, as of a job; no job has the same.")
    infer: tuple[Int, ...] = Field(description="GPUs it may score on, ascending; rank r is the r-th `tp` of them.")
    tp: Int = _key(1, "GPUs of one rank: 1, 2, 4, 8 or whole nodes.", ge=1)
    weight: Number = _key(1.0, "Its claim on contended GPUs relative to jobs.", gt=0)
    engine: EngineSpeed = Field(
        description="How fast a rank scores: keys as of a job's `engine`, tokens of completions."
    )
    arrive_s: Seconds = _key(0.0, "When it is started.")

    def as_job(self) -> ScenarioJob:
        """Its job for the scheduler, which trains nothing and whose weights never change."""
        shared = {name: getattr(self, name) for name in type(self).model_fields}
        return ScenarioJob(**shared, train=(), steps=1, staleness=0)


class ScenarioAdapter(_Section):
    """A LoRA adapter of a job of adapters."""

    name: Text = Field(description="Its name: letters, digits, `_`, `.` and `-`; each of its job has another.")
    steps: Int = _key(5, "Training steps; it has ended when all are trained.", ge=1, le=1_000_000)
    groups: Int = _key(4, "Prompt groups per step, which are drawn from the version that the step trains.", ge=1)
    samples_per_group: Int = _key(4, "Completions of each prompt.", ge=1, le=100_000)
    weight: Number = _key(1.0, "Its share in training passes relative to other adapters.", gt=0)
    joins_s: Seconds = _key(0.0, "When it is added; it begins when the job runs and has a slot for it.")
    leaves_s: Seconds | None = _key(None, "When it is removed, finished or not; null for never.")


class AdapterJob(_Section):
    """Adapters that share one base model, its engines and training passes: a command on a whole rank. When the rank is
    wanted back, each adapter finishes its step; with its next rank the command goes on from their checkpoints. There
    is at least one of `jobs` beside such jobs.
    """

    name: Text = Field(description="Its name, as of a job; no job has the same.")
    infer: tuple[Int, ...] = Field(description="GPUs it may run on, ascending; rank r is the r-th `tp` of them.")
    tp: Int = _key(1, "GPUs that it runs on at once: 1, 2, 4, 8 or whole nodes.", ge=1)
    weight: Number = _key(1.0, "Its claim on contended GPUs relative to jobs.", gt=0)
    adapters: tuple[ScenarioAdapter, ...] = Field(description="Its adapters.")
    slots: Int = _key(8, "Adapters that it holds at once; further ones wait for one of them to end.", ge=1)
    pass_tokens: Int | None = Field(None, ge=1, description="Tokens of a training pass, at most; null has no limit.")
    pass_share: Number = _key(0.5, "Share of the adapters in a training pass, at most, rounded up.", gt=0, le=1)
    wait_s: Seconds = _key(0.5, "How long a ready adapter waits for others to share its training pass.")
    train_s: Seconds = _key(2.0, "Seconds of a training pass for each adapter in it.")
    stop_s: Seconds = _key(
        ADAPTERS_STOP_S, "How long adapters may take to finish their steps before it is killed.", le=LONGEST_STOP_S
    )
    save_period: Int = _key(1, "Steps of an adapter between two of its checkpoints.", ge=1)
    tokens: Tokens = _key(Tokens(), "Completion lengths: keys as of a job's `tokens`.")
    engine: EngineSpeed = _key(EngineSpeed(), "How fast a rank generates: keys as of a job's `engine`.")
    arrive_s: Seconds = _key(0.0, "When it is started.")

    def as_job(self) -> ScenarioJob:
        """Its job for the scheduler, which trains nothing and whose weights never change."""
        names = ("name", "infer", "tp", "weight", "tokens", "engine", "arrive_s")
        shared = {name: getattr(self, name) for name in names}
        return ScenarioJob(**shared, train=(), steps=1, staleness=0, drain_s=self.stop_s + KILLED_S)


class Fleet(_Section):
    """Many jobs of one kind, called by the fleet's name and a number: their mappings of `width` GPUs lie at even
    distances round the pool.
    """

    count: Int = Field(description="How many jobs.", ge=1, le=10_000)
    width: Int = Field(description="GPUs that each may generate on.", ge=1)
    train_gpus: Int = Field(description="The first so many of them are trained on.", ge=1)
    stride: Int = Field(
        description="From the first GPU of one job to that of the next, starting over at the pool's end.", ge=1
    )
    first: Int = _key(0, "First GPU of the first job.", ge=0)
    arrive_every_s: Seconds = _key(0.0, "Seconds between the arrivals of two jobs.")
    job: dict[str, Any] = Field(
        default_factory=dict, description="What else its jobs have: any key of a job but `name`, `train` and `infer`."
    )


class Absence(_Section):
    """A node that leaves the pool for a time. From the notice on no engine wakes there, and a job that trains there
    leaves at its step's end; it goes on from there elsewhere, if it is `placed`, or when the node is back.
    """

    node: Int = Field(description="Its number, from 0 on.", ge=0)
    notice_at_s: Seconds = Field(description="When it is to be cleared.")
    leaves_at_s: Seconds = Field(description="When it leaves: a job that still trains there then is ended.")
    returns_at_s: Seconds | None = _key(None, "When it is there again; null for never.")

    def gone_s(self, until: float) -> float:
        """Seconds until `until` in which it is not there."""
        back = until if self.returns_at_s is None else min(self.returns_at_s, until)
        return max(back - self.leaves_at_s, 0.0)


class Scenario(_Section):
    """Everything one simulation needs besides its seed."""

    name: Text = _key("scenario", "Title of tables and reports.")
    about: Text = _key("", "What the mix is to show.")
    pool: PoolSection = _key(PoolSection(), "The GPUs.")
    jobs: tuple[ScenarioJob, ...] = _key(
        (),
        "The jobs; together with the fleets at least one. Where several arrive at once, one after the other "
        "goes by this order.",
    )
    fleets: dict[str, Fleet] = Field(default_factory=dict, description="Many jobs of one kind, by name.")
    teachers: tuple[ScenarioTeacher, ...] = _key((), "Teachers that jobs share.")
    groups: dict[str, ScenarioQuota] = Field(default_factory=dict, description="Groups of the team, by name.")
    users: dict[str, ScenarioQuota] = Field(default_factory=dict, description="Users of the team, by name.")
    half_life_hours: Number = _key(4.0, "After so many hours, use of the pool counts half for the shares.", gt=0)
    adapter_jobs: tuple[AdapterJob, ...] = _key((), "Jobs of many adapters on one base model.")
    costs: Costs = _key(Costs(), "What hand-overs take.")
    network: Network = _key(Network(), "How messages travel.")
    faults: Faults = _key(Faults(), "What breaks.")
    absences: tuple[Absence, ...] = _key(
        (), "Nodes that leave. Every other way of running the jobs, and running alone, has all nodes throughout."
    )
    limits: dict[str, Annotated[float, Field(strict=True)]] = Field(
        default_factory=dict, description="The scheduler's bounds and delays."
    )
    horizon_s: Seconds = _key(
        1e6, "The simulation ends here at the latest; jobs that are not done by then are unfinished.", gt=0
    )

    @property
    def gpu_pool(self) -> Pool:
        return Pool(self.pool.nodes, self.pool.gpus_per_node, self.pool.slots_per_gpu)

    @property
    def quota_nodes(self) -> tuple[QuotaNode, ...]:
        """The nodes of the quotas."""
        groups = (QuotaNode(f"group {name}", *_under(one)) for name, one in self.groups.items())
        return (*groups, *(QuotaNode(f"user {name}", *_under(one)) for name, one in self.users.items()))


def _under(quota: ScenarioQuota) -> tuple[str, float | None, float | None]:
    return f"group {quota.parent}" if quota.parent else "", quota.share, quota.limit
