"""Timelines of steps (generation, scoring, training) from the run record, and their pictures.

Generation is the time in which any request runs, whatever its step; other spans are as the driver recorded them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.utils.plots import AMBER, INDIGO, ROSE, SKY, SLATE, TEAL
from nemo_rl.utils.record import Entry
from nemo_rl.utils.record_events import (
    GroupCommitted,
    GroupTrained,
    RequestFinished,
    RequestSubmitted,
    StepBegun,
    StepFinished,
    StepSpan,
    TokensGenerated,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATION, LOGPROBS, TRAINING, REFIT = "generation", "log-probabilities", "training", "refit"
OTHERS = "other steps' generation"
_COLORS = {OTHERS: SKY, LOGPROBS: TEAL, TRAINING: AMBER, REFIT: ROSE}


class Span(NamedTuple):
    """From `begun` to `ended`, in seconds on the record's clock."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.ended - self.begun


@dataclass
class StepTimeline:
    """One step."""

    step: int  # its number, from 0
    span: Span  # from the moment at which the step begins to wait for rollouts to its new weights
    groups: dict[str, Span] = field(default_factory=dict)  # when each of its prompt groups was generated, by its name
    parts: dict[str, list[Span]] = field(default_factory=dict)  # when the driver did what, by what it did


@dataclass(frozen=True)
class RunTimeline:
    """All finished steps of a run, and when anything was generated."""

    steps: list[StepTimeline]
    generating: list[Span]  # spans in which at least one request ran, in order, apart from each other

    def hidden_share(self, first: int = 0, end: int | None = None) -> float:
        """The share of scoring and training, from step `first` on and before step `end`, during which something was
        generated; not-a-number where nothing was trained.
        """
        spans = [
            span
            for step in self.steps
            if step.step >= first and (end is None or step.step < end)
            for what in (LOGPROBS, TRAINING)
            for span in step.parts.get(what, [])
        ]
        total = sum(span.seconds for span in spans)
        return sum(_covered(span, self.generating) for span in spans) / total if total else float("nan")


def read_timeline(entries: Iterable[Entry]) -> RunTimeline:
    """The timeline of one run's record."""
    submitted: dict[str, float] = {}
    running: list[Span] = []
    begun_of_sample: dict[str, float] = {}
    samples_of: dict[str, list[str]] = {}
    committed: dict[str, float] = {}
    begun: dict[int, float] = {}
    steps: dict[int, StepTimeline] = {}
    trained: dict[int, list[str]] = {}
    parts: dict[int, dict[str, list[Span]]] = {}
    for entry in entries:
        event, now = entry.event, entry.time
        if isinstance(event, RequestSubmitted):
            submitted[event.request_id] = now
            begun_of_sample.setdefault(event.sample_id, now)
        elif isinstance(event, RequestFinished) and event.request_id in submitted:
            running.append(Span(submitted.pop(event.request_id), now))
        elif isinstance(event, TokensGenerated):
            samples_of.setdefault(event.group_id, []).append(event.sample_id)
        elif isinstance(event, GroupCommitted):
            committed[event.group_id] = now
        elif isinstance(event, StepBegun):
            begun[event.step] = now
        elif isinstance(event, StepSpan):
            parts.setdefault(event.step, {}).setdefault(event.what, []).append(Span(event.begun, event.ended))
        elif isinstance(event, GroupTrained):
            trained.setdefault(event.step, []).append(event.group_id)
        elif isinstance(event, StepFinished):
            steps[event.step] = StepTimeline(event.step, Span(begun.get(event.step, now), now))
    for number, step in steps.items():
        step.parts = parts.get(number, {})
        for name in trained.get(number, []):
            begins = [begun_of_sample[sample] for sample in samples_of.get(name, []) if sample in begun_of_sample]
            if begins and name in committed:
                step.groups[name] = Span(min(begins), committed[name])
    return RunTimeline([steps[number] for number in sorted(steps)], _joined(running))


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.begun <= joined[-1].ended:
            joined[-1] = Span(joined[-1].begun, max(joined[-1].ended, span.ended))
        else:
            joined.append(span)
    return joined


def _covered(span: Span, by: Sequence[Span]) -> float:
    """Seconds of a span that others cover, which are in order and apart from each other."""
    first = bisect_left(by, span.begun, key=lambda other: other.ended)
    overlapping = takewhile(lambda other: other.begun < span.ended, islice(by, first, None))
    return sum(min(span.ended, other.ended) - max(span.begun, other.begun) for other in overlapping)


def figure(timeline: RunTimeline, step: StepTimeline, title: str) -> Figure:
    """The picture of one step: a bar for every prompt group while it is generated, and below them when groups of other
    steps were, and what the driver did. `step`: one of its steps, with at least one group or part.
    """
    from matplotlib.figure import Figure

    groups = sorted(step.groups.values(), key=lambda span: (span.begun, span.ended))
    start = min([step.span.begun, *(span.begun for span in groups)])
    spans = {OTHERS: _within(timeline, step, Span(start, step.span.ended)), **step.parts}
    lanes = [what for what in (OTHERS, LOGPROBS, TRAINING, REFIT) if spans.get(what)]
    fig = Figure(figsize=(9.5, 1.9 + 0.3 * len(lanes) + min(3.2, 0.09 * len(groups))), dpi=120, facecolor="white")
    axes = fig.add_axes((0.19, 0.2, 0.78, 0.66))
    height = 3.0 / max(1, len(groups))
    for number, span in enumerate(groups):
        axes.barh(-number * height, span.seconds, height * 0.8, left=span.begun - start, color=INDIGO)
    ticks, labels = [-(len(groups) - 1) * height / 2] if groups else [], [GENERATION] if groups else []
    for number, what in enumerate(lanes):
        level = -3.4 - 0.75 * number
        bars = [(span.begun - start, span.seconds) for span in spans[what]]
        axes.broken_barh(bars, (level - 0.25, 0.5), color=_COLORS[what])
        ticks.append(level)
        labels.append(what)
    axes.set_yticks(ticks, labels)
    axes.axvline(step.span.begun - start, color=SLATE, linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return fig


def _within(timeline: RunTimeline, step: StepTimeline, window: Span) -> list[Span]:
    """Spans in which groups of other steps were generated in a window."""
    others = [span for other in timeline.steps if other is not step for span in other.groups.values()]
    clipped = [Span(max(span.begun, window.begun), min(span.ended, window.ended)) for span in others]
    return _joined([span for span in clipped if span.seconds > 0])


def most_telling(timeline: RunTimeline) -> StepTimeline | None:
    """The step to show: the newest with groups and at least one part; None where no step has both."""
    known = [step for step in timeline.steps if step.groups and {LOGPROBS, TRAINING} & step.parts.keys()]
    return known[-1] if known else None
