"""Invariants 2, 3 and 4: prompts are trained once or accounted for, tokens carry the version and adapter that made
them, and none is too old.

Token stamps are compared with the versions that syncs loaded into a shard while a request ran there. A shard serves on
as soon as it has the weights, before the sync is over for all its targets: a request that ends in between may have
tokens of the new version, if the sync succeeds. Where several adapters share a base, each is a pipeline, a sync loads
one of them, and a request keeps the version of it that it began with.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.ledger import Checks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry
from nemo_rl.utils.record_events import RecordedSpan, job_of_adapter


@dataclass(slots=True)
class _Group:
    prompt: str
    samples: int
    adapter: str = ""
    done: int = 0
    oldest: int | None = None
    newest: int = -1
    committed: bool = False


@dataclass(slots=True)
class _Request:
    sample: str
    shard: int
    versions: list[int]
    adapter: str = ""
    keeps_kv: bool = False


@dataclass(slots=True)
class _Pipeline:
    """Open groups and weight versions of one pipeline. `staleness` is None where no registration sets a bound."""

    staleness: int | None = None
    groups: dict[str, _Group] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    prompts: dict[str, int] = field(default_factory=dict)
    """The step in which each was trained."""
    begins_again: bool = False
    earlier: set[str] = field(default_factory=set)
    """Groups that were open when the run before ended: lost with it, or dropped by the next one."""
    trained_in_step: Counter[int] = field(default_factory=Counter)
    made: int | None = None
    """The newest version of its weights; None until a step has ended."""
    loaded: dict[tuple[int, str], int] = field(default_factory=dict)
    """By shard and adapter."""
    syncs: dict[str, rec.SyncStarted] = field(default_factory=dict)
    running: dict[str, _Request] = field(default_factory=dict)
    on_shard: dict[int, set[str]] = field(default_factory=dict)
    seen_versions: dict[str, list[int]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    across: set[str] = field(default_factory=set)
    during: dict[str, dict[str, bool]] = field(default_factory=dict)
    """By sync that is under way: the samples with a request that ended on one of its targets meanwhile, and whether
    they are stamped with its version."""
    checksums: dict[int, set[str]] = field(default_factory=dict)
    gone: bool = False


class PromptChecks(Checks):
    """Watches groups, requests and syncs of every pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self._pipelines: defaultdict[str, _Pipeline] = defaultdict(_Pipeline)

    def finish(self, clocks: Clocks, ended: bool) -> None:
        if not ended:
            return
        for name, pipeline in self._pipelines.items():
            if not pipeline.gone:
                for group in pipeline.groups.keys() - pipeline.earlier:
                    self._bad(2, f"prompt group {group} of {name} was admitted and never trained or dropped")

    def _of(self, entry: Entry) -> _Pipeline:
        return self._pipelines[entry.source.partition("/")[0]]

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        pipeline = self._pipelines[event.pipeline]
        pipeline.staleness, pipeline.gone = event.staleness, False
        pipeline.loaded.clear()
        pipeline.running.clear()
        pipeline.on_shard.clear()
        pipeline.syncs.clear()
        pipeline.during.clear()
        pipeline.trained_in_step.clear()

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        pipeline = self._pipelines[event.pipeline]
        # Groups of a pipeline that was ended by force are lost with it; one that left by itself had to account for
        # them.
        pipeline.gone = event.reason != "left"
        for name, of in self._pipelines.items():
            if job_of_adapter(name) == event.pipeline:
                of.gone = pipeline.gone

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        """Marks open groups of adapters that are ended by force as lost, also where their job goes on and leaves by
        itself.
        """
        if event.verb == "reap":
            for name, pipeline in self._pipelines.items():
                if job_of_adapter(name) == event.pipeline:
                    pipeline.earlier |= pipeline.groups.keys()

    def _opened(self, entry: Entry, event: rec.RecordOpened) -> None:
        """A pipeline that was submitted again numbers its groups as before: from its checkpoint on, or from 0."""
        if event.source.endswith("/driver") and not event.resumed:
            pipeline = self._of(entry)
            pipeline.gone = False
            for requests in (pipeline.running, pipeline.on_shard, pipeline.seen_versions, pipeline.tokens):
                requests.clear()
            pipeline.earlier = set(pipeline.groups)
            pipeline.ended.clear()
            pipeline.begins_again = True

    def _step_begun(self, entry: Entry, event: rec.StepBegun) -> None:
        pipeline = self._of(entry)
        if event.adapter:
            # Adapters roll out in turn with their training.
            pipeline.staleness = 0
        if pipeline.begins_again:
            # Prompts trained after the checkpoint were lost with the previous run, and are trained again.
            pipeline.begins_again = False
            pipeline.prompts = {prompt: step for prompt, step in pipeline.prompts.items() if step < event.step}
        elif event.adapter and pipeline.made not in (None, event.step):
            self._bad(3, f"step {event.step} of adapter {event.adapter} begins, which is at version {pipeline.made}")

    def _admitted(self, entry: Entry, event: rec.GroupAdmitted) -> None:
        pipeline = self._of(entry)
        is_open = event.group_id in pipeline.groups and event.group_id not in pipeline.earlier
        pipeline.earlier.discard(event.group_id)
        if is_open or event.group_id in pipeline.ended:
            self._bad(2, f"prompt group {event.group_id} is admitted twice")
        pipeline.groups[event.group_id] = _Group(event.prompt_id, event.samples, event.adapter)

    def _committed(self, entry: Entry, event: rec.GroupCommitted) -> None:
        pipeline = self._of(entry)
        group, who = pipeline.groups.get(event.group_id), f"prompt group {event.group_id}"
        if group is None or group.committed:
            self._bad(2, f"{who} is committed {'twice' if group else 'without having been admitted'}")
            return
        group.committed = True
        if event.restored:
            group.newest = event.version
            return
        if group.done != group.samples:
            self._bad(2, f"{who} is committed with {group.done} of {group.samples} samples")
        if event.version != group.newest:
            self._bad(3, f"{who} is committed as version {event.version}, its newest tokens are of {group.newest}")

    def _trained(self, entry: Entry, event: rec.GroupTrained) -> None:
        pipeline = self._of(entry)
        group, who = pipeline.groups.pop(event.group_id, None), f"prompt group {event.group_id}"
        if group is None:
            how = "twice" if event.group_id in pipeline.ended else "without having been admitted"
            self._bad(2, f"{who} is trained {how}")
            return
        pipeline.ended.add(event.group_id)
        pipeline.trained_in_step[event.step] += 1
        if group.adapter != event.adapter:
            self._bad(3, f"{who} of adapter {group.adapter} is trained in a step of adapter {event.adapter}")
        if not group.committed:
            self._bad(2, f"{who} is trained in step {event.step} before it is complete")
        if group.prompt in pipeline.prompts:
            again = f"as group {event.group_id} of step {event.step}"
            self._bad(2, f"prompt {group.prompt} is trained a second time, {again}")
        pipeline.prompts[group.prompt] = event.step
        what, bound = f"step {event.step} trains group {event.group_id} with tokens of version", pipeline.staleness
        if group.oldest is not None and bound is not None and group.oldest < event.step - bound:
            self._bad(4, f"{what} {group.oldest}; the bound is {bound} versions back")
        if group.newest > event.step:
            self._bad(3, f"{what} {group.newest}, which that step had not made yet")

    def _dropped(self, entry: Entry, event: rec.GroupDropped) -> None:
        pipeline = self._of(entry)
        if pipeline.groups.pop(event.group_id, None) is None:
            self._bad(2, f"prompt group {event.group_id} is dropped ({event.reason}) but is not open")
        pipeline.ended.add(event.group_id)

    def _step(self, entry: Entry, event: rec.StepFinished) -> None:
        pipeline = self._of(entry)
        trained = pipeline.trained_in_step.pop(event.step, 0)
        pipeline.made = event.version
        if event.groups and trained != event.groups:
            self._bad(2, f"step {event.step} says {event.groups} groups, {trained} were trained in it")
        if event.version != event.step + 1:
            what = f"step {event.step} says that it made version {event.version}"
            self._bad(3, f"{what}; a version is the number of completed steps")

    def _submitted(self, entry: Entry, event: rec.RequestSubmitted) -> None:
        pipeline = self._of(entry)
        version = pipeline.loaded.get((event.shard, event.adapter))
        pipeline.running[event.request_id] = _Request(
            event.sample_id, event.shard, [] if version is None else [version], event.adapter
        )
        pipeline.on_shard.setdefault(event.shard, set()).add(event.request_id)

    def _finished(self, entry: Entry, event: rec.RequestFinished) -> None:
        pipeline = self._of(entry)
        request = pipeline.running.pop(event.request_id, None)
        if request is None:
            self._bad(7, f"request {event.request_id} finishes on shard {event.shard} without having been submitted")
            return
        pipeline.on_shard[request.shard].discard(event.request_id)
        if event.tokens:
            for started in pipeline.syncs.values():
                if request.shard in started.targets and started.adapter == request.adapter:
                    pipeline.during.setdefault(started.sync_id, {})[request.sample] = False
                    request.versions.append(started.version)
            pipeline.seen_versions.setdefault(request.sample, []).extend(request.versions)
            pipeline.tokens[request.sample] += event.tokens
            if request.keeps_kv:
                pipeline.across.add(request.sample)

    def _sync_started(self, entry: Entry, event: rec.SyncStarted) -> None:
        self._of(entry).syncs[event.sync_id] = event

    def _synced(self, entry: Entry, event: rec.SyncFinished) -> None:
        pipeline = self._of(entry)
        started = pipeline.syncs.pop(event.sync_id, None)
        ended = pipeline.during.pop(event.sync_id, {})
        if started is None:
            return
        if event.outcome != "done":
            for sample, stamped in ended.items():
                if stamped:
                    self._bad(3, f"sample {sample} is stamped with version {started.version}, whose sync failed")
                elif started.version in (seen := pipeline.seen_versions.get(sample, [])):
                    seen.remove(started.version)
            return
        for checksum in event.checksums.values():
            known = pipeline.checksums.setdefault(event.version, set())
            known.add(checksum)
            if len(known) > 1:
                self._bad(3, f"version {event.version} has different checksums on different shards: {sorted(known)}")
        for shard in started.targets:
            pipeline.loaded[shard, started.adapter] = event.version
            for name in () if started.adapter else pipeline.on_shard.get(shard, ()):
                request = pipeline.running[name]
                request.keeps_kv |= bool(request.versions) and not started.recompute_kv
                request.versions.append(event.version)

    def _tokens(self, entry: Entry, event: rec.TokensGenerated) -> None:
        pipeline = self._of(entry)
        seen = pipeline.seen_versions.pop(event.sample_id, [])
        produced = pipeline.tokens.pop(event.sample_id, 0)
        crossed = event.sample_id in pipeline.across
        pipeline.across.discard(event.sample_id)
        self._check_spans(event.sample_id, event.spans, seen, produced)
        stamped = [span.version for span in event.spans]
        for sync, samples in pipeline.during.items():
            if event.sample_id in samples:
                samples[event.sample_id] = pipeline.syncs[sync].version in stamped
        if crossed and len(set(stamped)) > 1 and not event.mixed_kv:
            self._bad(3, f"sample {event.sample_id} went on through a refresh over old KV entries and is not marked")
        group = pipeline.groups.get(event.group_id)
        if group is None:
            self._bad(2, f"sample {event.sample_id} belongs to group {event.group_id}, which is not open")
            return
        if event.spans and event.adapter != group.adapter:
            self._bad(3, f"sample {event.sample_id} of adapter {group.adapter} was drawn with adapter {event.adapter}")
        group.done += 1
        if stamped:
            group.oldest = min(stamped) if group.oldest is None else min(group.oldest, *stamped)
            group.newest = max(group.newest, *stamped)

    def _check_spans(self, sample: str, spans: tuple[RecordedSpan, ...], seen: list[int], produced: int) -> None:
        for before, after in itertools.pairwise(spans):
            if before.end != after.start:
                self._bad(3, f"sample {sample}: tokens {before.end} to {after.start} carry no version")
        total = sum(span.end - span.start for span in spans)
        if total != produced:
            self._bad(3, f"sample {sample}: its spans cover {total} tokens, its requests produced {produced}")
        wrong = {span.version for span in spans} - set(seen)
        if wrong:
            held = f"its shards held {sorted(set(seen))} while it ran"
            self._bad(3, f"sample {sample} is stamped with version {sorted(wrong)}, {held}")
