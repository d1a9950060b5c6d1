"""A pool's figures for Prometheus: who has how many GPUs for what, demand, hand-overs, steps and faults.

A projection of the timeline and of the pool's standings; computed when it is scraped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.viewing.standings_table import steps_of
from nemo_rl.time_sharing.viewing.timeline import Timeline

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def prometheus_text(timeline: Timeline, standings: Sequence[Standing]) -> bytes:
    """The figures in Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Figures:
        def collect(self) -> Iterable[Metric]:
            return _metrics(timeline, standings)

    registry = CollectorRegistry()
    registry.register(Figures())
    return generate_latest(registry)


def _metrics(timeline: Timeline, standings: Sequence[Standing]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    yield GaugeMetricFamily("nrl_pool_gpus", "GPUs of the pool.", timeline.pool.gpus)
    gpus = GaugeMetricFamily("nrl_pool_gpus_in_use", "GPUs by pipeline and use.", labels=("pipeline", "use"))
    for (pipeline, use), count in sorted(_in_use(timeline).items()):
        gpus.add_metric((pipeline, use), count)
    yield gpus
    closed = [o for o in timeline.outages if o.kind == "quarantined" and o.end >= timeline.end]
    out = sum(timeline.pool.gpus_in(outage.gpus) for outage in closed)
    yield GaugeMetricFamily("nrl_pool_gpus_quarantined", "GPUs out of use.", out)
    demand = GaugeMetricFamily("nrl_pool_demand_samples", "Samples still to be generated.", labels=("pipeline",))
    for pipeline, samples in {level.pipeline: level.value for level in timeline.demand}.items():
        demand.add_metric((pipeline,), samples)
    yield demand
    spans = [handover.seconds for handover in timeline.handovers]
    buckets = [(str(edge), float(sum(span <= edge for span in spans))) for edge in _BUCKETS_S]
    yield HistogramMetricFamily(
        "nrl_pool_handover_seconds",
        "From the decision to give GPUs until they are used.",
        buckets=[*buckets, ("+Inf", float(len(spans)))],
        sum_value=sum(spans),
    )
    yield CounterMetricFamily(
        "nrl_pool_faults", "Pipelines cut off, quarantines, ranks taken out.", len(timeline.faults)
    )
    steps = CounterMetricFamily("nrl_pool_steps", "Completed steps.", labels=("pipeline",))
    waited = CounterMetricFamily("nrl_pool_waited_seconds", "Waits for training GPUs.", labels=("pipeline",))
    share = GaugeMetricFamily("nrl_pool_share", "Part of the pool's GPU time held so far.", labels=("pipeline",))
    slowdown = GaugeMetricFamily(
        "nrl_pool_slowdown", "Time passed over time not lost to other pipelines, estimated.", labels=("pipeline",)
    )
    gain = GaugeMetricFamily(
        "nrl_pool_sharing_gain",
        "How many times the work of one after the other those do that share this one's GPUs, measured.",
        labels=("pipeline",),
    )
    for standing in standings:
        if standing.sharing is not None and standing.sharing.gain is not None:
            gain.add_metric((standing.name,), standing.sharing.gain.of_all)
        if standing.sharing is not None:
            share.add_metric((standing.name,), standing.sharing.share)
            slowdown.add_metric((standing.name,), standing.sharing.slowdown)
        progress, outcome = standing.progress, standing.outcome
        seconds = outcome.waited_s if outcome is not None else progress.waited_s if progress is not None else 0.0
        steps.add_metric((standing.name,), steps_of(standing))
        waited.add_metric((standing.name,), seconds)
    yield from (steps, waited, share, slowdown, gain)


def _in_use(timeline: Timeline) -> dict[tuple[str, str], float]:
    """GPUs by pipeline and use, of what is open at the end."""
    uses = {"TRN": "training", "INIT": "initialising"}
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for o in timeline.occupations:
        if o.end >= timeline.end:
            generating = "generating" if o.phase == "active" else "handover"
            use = "ended" if o.phase == "fenced" else generating if o.tag == "GEN" else uses.get(o.tag, "log_probs")
            found[o.pipeline, use] += timeline.pool.gpus_in(o.gpus)
    return found
