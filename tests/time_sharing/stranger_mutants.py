"""A hundred defects of the scheduler and its agents as a stranger would write them, for `tools/mutants.py`.

Each was written from the code that it changes, without a look at the checker that has to find it.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which occurs once in `file` (a path in nemo_rl/time_sharing), becomes `new`; `what` goes wrong then."""

    name: str
    file: str
    old: str
    new: str
    what: str


_TYPES, _TOPOLOGY, _WELLFORMED = "protocol/types.py", "protocol/topology.py", "protocol/wellformed.py"
_STATE, _LEDGER, _SAVED = "log/state.py", "log/ledger.py", "log/segments.py"
_PLANNER, _PLAN_STATE, _SHARING = "planning/planner.py", "planning/plan_state.py", "planning/apportionment.py"
_WAKING, _MOVES = "planning/waking.py", "planning/busy_ranks.py"
_SHARES = "planning/entitlement.py"
_EXECUTOR, _SCHEDULER, _INVENTORY = "scheduling/executor.py", "scheduling/scheduler.py", "scheduling/inventory.py"
_LIVENESS, _REQUESTS = "scheduling/liveness.py", "scheduling/requests.py"
_AGENT, _RANKS = "agents/agent.py", "agents/agent_ranks.py"

MUTANTS = (
    # What is said.
    Mutant(
        "demand-counts-what-is-done",
        _TYPES,
        "return max(self.target - self.done, 0) * self.unit",
        "return self.target * self.unit",
        "remaining demand never goes down",
    ),
    Mutant(
        "commands-ordered-by-number-first",
        _TYPES,
        "return int(term), int(number)",
        "return int(number), int(term)",
        "commands of a new scheduler come before those of the last one",
    ),
    Mutant(
        "failed-is-no-sleep-phase",
        _TYPES,
        "SLEEP_PHASES = frozenset({Phase.FALLING, Phase.FAILED, Phase.BUILDING})",
        "SLEEP_PHASES = frozenset({Phase.FALLING, Phase.BUILDING})",
        "a failed rank counts as awake",
    ),
    Mutant(
        "building-is-no-sleep-phase",
        _TYPES,
        "SLEEP_PHASES = frozenset({Phase.FALLING, Phase.FAILED, Phase.BUILDING})",
        "SLEEP_PHASES = frozenset({Phase.FALLING, Phase.FAILED})",
        "a rank whose engine is built ahead counts as awake",
    ),
    Mutant(
        "training-gpus-are-all-gpus",
        _TOPOLOGY,
        "return frozenset(self.clusters[ACTOR_TRAIN].gpus) if ACTOR_TRAIN in self.clusters else frozenset()",
        "return frozenset(g for cluster in self.spec.clusters for g in cluster.gpus)",
        "every GPU of a pipeline is taken for one that it trains on",
    ),
    Mutant(
        "shares-swapped",
        _TOPOLOGY,
        "    topology = Topology(PipelineSpec(",
        "    given = PipelineOptions(**options)\n"
        "    options |= {'min_share': given.max_share, 'max_share': given.min_share}\n"
        "    topology = Topology(PipelineSpec(",
        "minimum and maximum share are swapped at registration",
    ),
    # What is known, and restored.
    Mutant(
        "unscheduled-since-begins-anew",
        _STATE,
        "        elif pipeline.unscheduled_since is None:\n            pipeline.unscheduled_since = at",
        "        else:\n            pipeline.unscheduled_since = at",
        "the wait for a first rank begins anew with each event",
    ),
    Mutant(
        "leaving-pipelines-are-unscheduled",
        _STATE,
        "pipeline.demand.remaining > 0 and not has_rank and not pipeline.withdraws and not pipeline.fenced",
        "pipeline.demand.remaining > 0 and not has_rank",
        "a pipeline that leaves or is fenced still waits for a rank",
    ),
    Mutant(
        "quarantined-gpus-are-free",
        _STATE,
        "return self.owner[gpu] is None and gpu not in self.quarantined",
        "return self.owner[gpu] is None",
        "a claim becomes a lease on GPUs in quarantine",
    ),
    Mutant(
        "segment-forgets-recovery",
        _STATE,
        "    state.recovering, state.unsure = event.recovering, event.unsure\n",
        "",
        "a log read from a segment forgets that it had lost its end",
    ),
    Mutant(
        "segment-forgets-quarantined-gpus",
        _STATE,
        "    state.quarantined = {gpu for quarantine in state.quarantines for gpu in quarantine.gpus}\n",
        "",
        "GPUs in quarantine are free after a segment is read",
    ),
    Mutant(
        "segment-forgets-commands",
        _STATE,
        "    state.commands = {command.command: replace(command) for command in event.commands}",
        "    state.commands = {}",
        "open commands are forgotten when a segment is read",
    ),
    Mutant(
        "segment-forgets-incarnations",
        _STATE,
        "    state.incarnations = dict(event.incarnations)\n",
        "",
        "used incarnations are forgotten when a segment is read",
    ),
    Mutant(
        "segment-forgets-claims",
        _SAVED,
        "claims=tuple(copy.copy(claim) for claim in state.claims.values()),",
        "claims=(),",
        "a segment begins without the claims",
    ),
    Mutant(
        "segment-forgets-unsure",
        _SAVED,
        "        unsure=state.unsure,\n",
        "",
        "a segment does not say that the log may have lost its end",
    ),
    Mutant(
        "demand-begins-no-wait",
        _STATE,
        "    pipeline.demand = demand\n    state.update_unscheduled_since(pipeline, at)",
        "    pipeline.demand = demand",
        "new demand does not begin the wait for a first rank",
    ),
    Mutant(
        "request-numbers-forgotten",
        _STATE,
        "    pipeline.last_request = max(pipeline.last_request, event.request)\n    if event.cluster not in",
        "    if event.cluster not in",
        "a request that is over may be taken again",
    ),
    Mutant(
        "passing-not-counted",
        _STATE,
        "                queued.passed += 1",
        "                queued.passed += 0",
        "a waiting request is passed without end",
    ),
    Mutant(
        "grant-leaves-request-queued",
        _STATE,
        "    pipeline.wants.pop(event.cluster, None)\n"
        "    pipeline.last_request = max(pipeline.last_request, event.request)\n\n\ndef _priority_changed",
        "    pipeline.last_request = max(pipeline.last_request, event.request)\n\n\ndef _priority_changed",
        "a granted request stays in the queue",
    ),
    Mutant(
        "grant-does-not-raise-epoch",
        _STATE,
        "    state.epoch = max(state.epoch, event.epoch)\n    pipeline.held",
        "    pipeline.held",
        "the epoch of a grant is given again",
    ),
    Mutant(
        "change-keeps-request",
        _STATE,
        "event.priority, event.step, at, event.request\n    pipeline.wants.pop(event.cluster, None)",
        "event.priority, event.step, at, event.request",
        "a request for another priority stays in the queue after it was fulfilled",
    ),
    Mutant(
        "holds-not-measured",
        _STATE,
        "    _note_hold(pipeline, held, at)\n    state.give_back",
        "    state.give_back",
        "how long holds last is never learnt from releases",
    ),
    Mutant(
        "wake-does-not-raise-epoch",
        _STATE,
        "        state.epoch = max(state.epoch, event.epoch)\n        pipeline.awake",
        "        pipeline.awake",
        "the epoch of a rank is given again",
    ),
    Mutant(
        "failed-rank-does-not-cool",
        _STATE,
        "            pipeline.cooling[event.rank] = at + state.limits.quarantine_s\n",
        "",
        "a rank whose processes had to be ended wakes again at once",
    ),
    Mutant(
        "fencing-keeps-requests",
        _STATE,
        "    pipeline.fenced = True\n    pipeline.wants.clear()",
        "    pipeline.fenced = True",
        "the requests of a fenced pipeline stay in the queue",
    ),
    Mutant(
        "unregistered-ranks-keep-gpus",
        _STATE,
        "    for rank in gone.awake:\n        state.give_back(gone.topology.ranks[rank])\n",
        "",
        "the GPUs of the ranks of a pipeline that is gone are never free again",
    ),
    Mutant(
        "quarantine-lifted-for-all",
        _STATE,
        "q for q in state.quarantines if (q.gpus, q.whose) != (event.gpus, whose)]",
        "q for q in state.quarantines if q.gpus != event.gpus]",
        "the end of one quarantine ends those of others on the same GPUs",
    ),
    Mutant(
        "isolation-costs-holds-time",
        _STATE,
        "            held.hold_until += event.seconds",
        "            held.hold_until += 0.0",
        "a hold gets no time for what an isolation lasted",
    ),
    # What is decided.
    Mutant(
        "priority-ignored",
        _PLANNER,
        "items.append(QueueItem(queued.since + aging * queued.want.priority, name, cluster, queued))",
        "items.append(QueueItem(queued.since, name, cluster, queued))",
        "requests are served in order of arrival alone",
    ),
    Mutant(
        "priority-turned-round",
        _PLANNER,
        "queued.since + aging * queued.want.priority",
        "queued.since - aging * queued.want.priority",
        "the least urgent kind of request goes first",
    ),
    Mutant(
        "leaving-pipelines-are-served",
        _PLANNER,
        "        if pipeline.fenced or (pipeline.withdraws and not pipeline.held):\n            continue",
        "        if pipeline.fenced:\n            continue",
        "requests of a pipeline that leaves stay in the queue",
    ),
    Mutant(
        "changes-while-waking",
        _PLANNER,
        "if want.priority is Priority.ACTOR_TRAINING and pipeline.waking():\n        result.waits",
        "if want.priority is Priority.INITIALIZATION and pipeline.waking():\n        result.waits",
        "log-probs become training while a rank of the same pipeline wakes",
    ),
    Mutant(
        "one-more-initialises",
        _PLANNER,
        "if len(others) >= plan_state.limits.max_initialising",
        "if len(others) > plan_state.limits.max_initialising",
        "one pipeline more than allowed initialises",
    ),
    Mutant(
        "backfill-without-end",
        _PLANNER,
        "if seconds is None or plan_state.now + seconds > found.passed[first]:",
        "if seconds is None:",
        "a later request is let past though it lasts longer than the wait of the one before it",
    ),
    Mutant(
        "guarantee-ignored",
        _PLANNER,
        "if awake.guaranteed and lease.pipeline != name and in_slice:",
        "if awake.guaranteed and lease.pipeline == name and in_slice:",
        "a guaranteed rank is evicted in its slice",
    ),
    Mutant(
        "guarantee-without-end",
        _PLANNER,
        "in_slice = awake.phase is Phase.RISING or plan_state.now < slice_ends",
        "in_slice = True",
        "a guaranteed rank is never evicted again",
    ),
    Mutant(
        "waiting-reserves-nothing",
        _PLANNER,
        'plan_state.reserve(gpus, Reservation(f"{item.name}#{want.request}", item.name, found.free_at, queued))',
        "pass",
        "a request that waits keeps its GPUs from nobody behind it",
    ),
    Mutant(
        "leaving-ranks-stay",
        _PLANNER,
        "        if pipeline.withdraws and not pipeline.fenced:\n            for rank in pipeline.awake:",
        "        if pipeline.withdraws and pipeline.fenced:\n            for rank in pipeline.awake:",
        "ranks of a pipeline that leaves are not put to sleep",
    ),
    Mutant(
        "some-victims-forgotten",
        _PLANNER,
        "    for name, rank in sorted(found.victims):\n        plan_state.shrink",
        "    for name, rank in sorted(found.victims)[:1]:\n        plan_state.shrink",
        "a grant evicts the first of its victims only",
    ),
    Mutant(
        "useful-ranks-rounded-down",
        _PLAN_STATE,
        "return min(math.ceil(remaining / pipeline.rank_batch), most, ranks)",
        "return min(remaining // pipeline.rank_batch, most, ranks)",
        "the last samples of a batch get no rank",
    ),
    Mutant(
        "max-share-ignored",
        _PLAN_STATE,
        "return min(math.ceil(remaining / pipeline.rank_batch), most, ranks)",
        "return min(math.ceil(remaining / pipeline.rank_batch), ranks)",
        "the maximum share bounds nothing",
    ),
    Mutant(
        "plans-with-quarantined-gpus",
        _PLAN_STATE,
        "        for gpu in self.quarantined:\n            kind[gpu] = BLOCKED\n",
        "",
        "a plan takes GPUs in quarantine",
    ),
    Mutant(
        "fenced-ranks-are-donors",
        _PLAN_STATE,
        "kind[gpu] = BLOCKED if fenced else what",
        "kind[gpu] = what",
        "a plan takes GPUs from ranks of a fenced pipeline",
    ),
    Mutant(
        "one-passing-too-many",
        _PLAN_STATE,
        "queued.passed + self.passings[reservation.label] < self.limits.max_backfills",
        "queued.passed + self.passings[reservation.label] <= self.limits.max_backfills",
        "a request is passed once more than allowed",
    ),
    Mutant(
        "held-gpus-free-at-once",
        _PLAN_STATE,
        "max(held.since + self._usual(lease.pipeline, held.priority), self.now)",
        "self.now",
        "held GPUs are expected back at once, so that nothing is ever let past",
    ),
    Mutant(
        "training-not-next",
        _SHARING,
        "return bool(wants) and any(queued.want.priority is Priority.ACTOR_TRAINING for queued in wants.values())",
        "return False",
        "ranks of a pipeline wake while its training waits",
    ),
    Mutant(
        "cooling-ignored",
        _WAKING,
        "asleep = [rank for rank in asleep if pipeline.cooling.get(rank, 0.0) <= plan_state.now]",
        "asleep = list(asleep)",
        "a rank that failed is woken again at once",
    ),
    Mutant(
        "slices-ignored",
        _MOVES,
        "awake[rank].slice_began() + slice_seconds(plan_state, name)",
        "awake[rank].slice_began()",
        "a rank is moved before its time slice is over",
    ),
    Mutant(
        "worse-served-give",
        _MOVES,
        "                giver.now < bar\n                or giver.less_one < after\n",
        "                giver.now < -1\n",
        "a rank moves from one that is served worse",
    ),
    Mutant(
        "own-training-forgotten-by-builds",
        _WAKING,
        "        if pipeline.fenced or name == but or pipeline.topology.training_gpus.isdisjoint(gpus):",
        "        if pipeline.fenced or not pipeline.wants or pipeline.topology.training_gpus.isdisjoint(gpus):",
        "engines are built ahead where somebody will train soon",
    ),
    Mutant(
        "starved-reserve-nothing",
        _SHARING,
        "    elif starved:\n",
        "    elif starved and pipeline.held:\n",
        "a pipeline that waits for its first rank reserves nothing",
    ),
    Mutant(
        "remainder-given-twice",
        _SHARES,
        "            ranks[c.name] += 1\n            left -= c.rank_gpus",
        "            ranks[c.name] += 1",
        "more whole ranks are given than there are GPUs",
    ),
    Mutant(
        "reservations-ignored",
        _PLANNER,
        'found.block(("reserved", gpu, reservation.label), reservation.free_at)',
        "pass",
        "a request takes GPUs that one ahead of it has reserved",
    ),
    Mutant(
        "trains-beside-its-own-wakes",
        _PLANNER,
        'found.block(("expanding",), plan_state.now)',
        "pass",
        "training begins while ranks of its own pipeline are on their way up",
    ),
    Mutant(
        "granted-gpus-stay-free",
        _PLAN_STATE,
        "        self.claim(gpus)\n        self.fixed_gpus[name]",
        "        self.fixed_gpus[name]",
        "what a request is granted is handed out again by the same plan",
    ),
    # What is done.
    Mutant(
        "answer-of-another-incarnation",
        _EXECUTOR,
        "(pending.pipeline, pending.incarnation) != (answer.pipeline, answer.incarnation):",
        "pending.pipeline != answer.pipeline:",
        "an answer of another incarnation is taken",
    ),
    Mutant(
        "superseded-command-stays-open",
        _EXECUTOR,
        '        self._end_command_of(name, rank, "superseded")\n',
        "",
        "the command that a rank was obeying is not ended when it is sent to sleep",
    ),
    Mutant(
        "deadline-ignored",
        _EXECUTOR,
        "if now >= pending.deadline and not isolated:",
        "if now >= pending.deadline + 1e6 and not isolated:",
        "a command without an answer never expires",
    ),
    Mutant(
        "fence-keeps-claims",
        _EXECUTOR,
        '        self.drop_claims(name, "fenced")',
        "        pass",
        "claims of a fenced pipeline stay",
    ),
    Mutant(
        "contested-not-quarantined",
        _EXECUTOR,
        "        if contested:\n            until",
        "        if not contested and reason:\n            until",
        "GPUs that a fenced pipeline occupies against the ledger are given on",
    ),
    Mutant(
        "epochs-of-lost-log-again",
        _EXECUTOR,
        "return max(self._state.epoch, self._state.term * _EPOCHS_PER_TERM) + 1",
        "return self._state.epoch + 1",
        "epochs that are in the lost part of a log are given again",
    ),
    Mutant(
        "refused-grant-of-another-epoch",
        _EXECUTOR,
        "return held if held is not None and held.epoch == pending.epoch else None",
        "return held",
        "the refusal of an old grant releases the new one",
    ),
    Mutant(
        "reaped-by-another-incarnation",
        _EXECUTOR,
        "if pipeline is None or pipeline.incarnation != pending.incarnation:",
        "if pipeline is None:",
        "the end of an earlier incarnation is taken for that of the present one",
    ),
    Mutant(
        "rank-freed-though-not-ended",
        _EXECUTOR,
        "                if not done and not quarantines:",
        "                if done and not quarantines:",
        "GPUs of a rank that could not be ended are given on",
    ),
    Mutant(
        "claims-become-leases-in-recovery",
        _EXECUTOR,
        "if not all(self._state.free(gpu) for gpu in claim.gpus) or self._state.recovering:",
        "if not all(self._state.free(gpu) for gpu in claim.gpus):",
        "claims become leases before the inventory is done",
    ),
    Mutant(
        "silent-never-fenced",
        _LIVENESS,
        "if silent > limits.lease_s:",
        "if silent > limits.lease_s * 1000:",
        "a silent pipeline keeps its GPUs",
    ),
    Mutant(
        "isolation-again-and-again",
        _LIVENESS,
        "            self._given_up = self._given_up and most\n",
        "            self._given_up = False\n",
        "an isolation that was given up begins again at once",
    ),
    Mutant(
        "withdrawn-claim-kept",
        _REQUESTS,
        "                if (name, cluster, -1) in self._state.claims:\n"
        '                    self._emit(ev.ClaimDropped(name, cluster, -1, "withdrawn"))\n',
        "",
        "the claim of a request that was withdrawn stays",
    ),
    Mutant(
        "holds-not-adopted",
        _INVENTORY,
        "            or (known is not None and known.epoch >= held.epoch)",
        "            or known is None\n            or known.epoch >= held.epoch",
        "what an agent holds and the ledger does not know is left out",
    ),
    Mutant(
        "old-leases-adopted",
        _INVENTORY,
        "            or epoch <= executor.slept.get((name, status.incarnation, rank), -1)\n",
        "",
        "a rank is adopted by an inventory from before it slept",
    ),
    Mutant(
        "drained-ranks-stay",
        _INVENTORY,
        "            executor.begin_shrink(name, rank)\n\n\ndef _clear",
        "            continue\n\n\ndef _clear",
        "a rank that was drained in the lost part of the log stays as it is for ever",
    ),
    Mutant(
        "late-statuses-taken",
        _SCHEDULER,
        "        if status.seq <= self._seqs.get(status.pipeline, -1):\n            return reply\n",
        "",
        "a status that was overtaken undoes the later one",
    ),
    Mutant(
        "inventory-of-another-term",
        _SCHEDULER,
        "if status.term < self.state.term or status.seq <= self._answered.get(status.pipeline, -1):",
        "if status.seq <= self._answered.get(status.pipeline, -1):",
        "an inventory from before the restart is taken",
    ),
    Mutant(
        "unregistered-keep-numbers",
        _SCHEDULER,
        "                    notes.pop(event.pipeline, None)",
        "                    notes.get(event.pipeline)",
        "the next incarnation's statuses are taken for late ones",
    ),
    Mutant(
        "terms-of-lost-log-again",
        _SCHEDULER,
        "self._restart(self.state.term + (1 if complete else _LOST_TERMS), complete=complete)",
        "self._restart(self.state.term + 1, complete=complete)",
        "a scheduler uses a term that is in the lost part of its log",
    ),
    Mutant(
        "no-grace-after-loss",
        _SCHEDULER,
        "self._grace_until = self.clock.now + (0.0 if complete else self.state.limits.lease_s)",
        "self._grace_until = self.clock.now",
        "nobody waits for pipelines whose registration was lost",
    ),
    Mutant(
        "broken-ranks-ignored",
        _SCHEDULER,
        "        for rank in status.broken:",
        "        for rank in status.broken[1:]:",
        "a rank that cannot serve is left awake",
    ),
    Mutant(
        "leaves-with-open-commands",
        _SCHEDULER,
        "        if any(command.pipeline == name for command in self.state.commands.values()):\n            return\n",
        "",
        "a pipeline is let go while a command to it is open",
    ),
    Mutant(
        "plans-in-recovery",
        _SCHEDULER,
        "if not self._dirty or self.state.recovering or not",
        "if not self._dirty or not",
        "plans are made before the inventory is done",
    ),
    Mutant(
        "clock-jumps-believed",
        _LIVENESS,
        "self.now += min(step, self._max_step_s)",
        "self.now += step",
        "a clock that is set forward lets every deadline pass at once",
    ),
    Mutant(
        "quarantine-never-lifted",
        _EXECUTOR,
        "            if now >= quarantine.until and not busy:",
        "            if now >= quarantine.until and busy:",
        "nobody tries again to free GPUs in quarantine",
    ),
    Mutant(
        "quarantine-lifted-by-failure",
        _EXECUTOR,
        "        for quarantined in quarantines:\n            if done:",
        "        for quarantined in quarantines:\n            if quarantined.until:",
        "a quarantine ends though the processes could not be ended",
    ),
    Mutant(
        "requests-taken-again",
        _REQUESTS,
        "if want.request <= pipeline.last_request or",
        "if want.request < pipeline.last_request or",
        "a request that was granted is taken again from a status that crosses the grant",
    ),
    # What is obeyed.
    Mutant(
        "given-back-under-no-epoch",
        _AGENT,
        "GivenBack(cluster, held.epoch, self.published)",
        "GivenBack(cluster, 0, self.published)",
        "a release names an epoch that is long over",
    ),
    Mutant(
        "demand-number-stands-still",
        _AGENT,
        "self.demand = Demand(target, min(done, target), unit, self.demand.seq + 1, self._rank_batch)",
        "self.demand = Demand(target, min(done, target), unit, self.demand.seq, self._rank_batch)",
        "the demand of a new batch is taken for the old one",
    ),
    Mutant(
        "past-terms-obeyed",
        _AGENT,
        "if command.incarnation != self.incarnation or command.term < self._term or self._dismissed:",
        "if command.incarnation != self.incarnation or self._dismissed:",
        "a command of a scheduler that was replaced is obeyed",
    ),
    Mutant(
        "commands-of-past-incarnations-obeyed",
        _AGENT,
        "if command.incarnation != self.incarnation or command.term < self._term or self._dismissed:",
        "if command.term < self._term or self._dismissed:",
        "a command to the incarnation before is obeyed",
    ),
    Mutant(
        "answers-forgotten",
        _AGENT,
        "            self._host.answer(known)",
        "            pass",
        "a repeated command whose answer was lost is never answered",
    ),
    Mutant(
        "grants-without-request",
        _AGENT,
        "want is None or want.request != command.request or (back is not None and command.epoch <= back.epoch)",
        "back is not None and command.epoch <= back.epoch",
        "a grant that crosses the withdrawal of its request is taken",
    ),
    Mutant(
        "old-grants-taken",
        _AGENT,
        "want is None or want.request != command.request or (back is not None and command.epoch <= back.epoch)",
        "want is None",
        "a grant of an earlier request is taken for the present one",
    ),
    Mutant(
        "expired-request-stays",
        _AGENT,
        "            del self.wants[want.cluster]\n            self._record.emit(rec.WaitEnded(self._wait_id("
        'want.request), "expired"))',
        '            self._record.emit(rec.WaitEnded(self._wait_id(want.request), "expired"))',
        "a request that expired is still asked for",
    ),
    Mutant(
        "sleeping-rank-keeps-its-lease",
        _RANKS,
        "self.ranks[index] = LocalRank(epoch=rank.epoch, newest=rank.newest, over=rank.epoch)",
        "self.ranks[index] = LocalRank(epoch=rank.epoch, newest=rank.newest)",
        "a rank whose processes were ended wakes under its old lease",
    ),
    Mutant(
        "ended-rank-is-refreshed",
        _RANKS,
        "        self._refreshing.discard(index)\n        self.ranks[index] = LocalRank(",
        "        self.ranks[index] = LocalRank(",
        "a refresh waits for a rank whose processes were ended",
    ),
    Mutant(
        "past-epochs-obeyed",
        _RANKS,
        "        if command.epoch < rank.epoch:",
        "        if command.epoch < 0:",
        "a rank obeys commands of a lease that is over",
    ),
    Mutant(
        "overtaken-commands-obeyed",
        _RANKS,
        "        elif command.order < rank.newest:",
        "        elif command.order < (0, 0):",
        "a rank obeys a command that a later one has overtaken",
    ),
    Mutant(
        "published-with-old-weights",
        _RANKS,
        "phase is not LocalPhase.READY or rank.version < self.cached:",
        "phase is not LocalPhase.READY:",
        "a rank is published with weights that are being replaced",
    ),
    Mutant(
        "published-before-refreshed",
        _RANKS,
        "if not self._refresh_begun or self._refreshing or self.published == self.cached:",
        "if not self._refresh_begun or self.published == self.cached:",
        "a version is published before every serving rank has it",
    ),
    Mutant(
        "failed-steps-are-done",
        _RANKS,
        "        self._note(rank, operation, ok)\n",
        "        ok = True\n        self._note(rank, operation, ok)\n",
        "a drain, sleep or sync that failed is answered as done",
    ),
    Mutant(
        "rise-goes-on-beside-the-fall",
        _RANKS,
        "elif command is not None and following is not None and rank.phase is not LocalPhase.ASLEEP:",
        "elif command is not None and following is not None and command.verb is Verb.GRANT:",
        "a rank goes on with a command beside the one that takes over",
    ),
    Mutant(
        "drain-leaves-route",
        _RANKS,
        "            if phase is LocalPhase.ROUTED:\n                self._unroute(rank, index)\n"
        "            rank.phase = LocalPhase.DRAINING",
        "            rank.phase = LocalPhase.DRAINING",
        "a rank that is drained still gets requests",
    ),
)

EQUIVALENT = {
    "answer-of-another-incarnation": (
        "No command's name is used twice (its term is on the disk before anybody hears of it), agents answer only "
        "commands to their own incarnation, and the daemon that ends processes repeats the incarnation of its command: "
        "an answer to an open command has always the incarnation of the command. That agents look is another mutant."
    ),
}
"""Mutants that change nothing, and why."""
