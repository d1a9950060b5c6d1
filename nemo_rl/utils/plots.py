"""The curves of a run: assignment of metrics to panels, and their picture.

Panels are plain data that the HTML page and the PNG both draw from. Invariant: a panel shows only what was logged; one
without data does not exist.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nemo_rl.config.errors import UserError
from nemo_rl.utils.metrics_file import RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INDIGO, TEAL, AMBER, ROSE, VIOLET, SKY, SLATE, GREEN = (
    "#4c5fd5",
    "#159a8c",
    "#e09f1f",
    "#d9485f",
    "#8f5bd6",
    "#3b9ddd",
    "#8a94a6",
    "#5aa545",
)
_PHASE_COLORS = (INDIGO, TEAL, AMBER, ROSE, VIOLET, SKY, GREEN)
_FEW_STEPS, _MANY_STEPS = 40, 60  # points are marked up to the first; curves are smoothed above the second
_INK, _MUTED, _GRID = "#1f2733", "#6b7585", "#e8ebf0"

_NOTABLE = 0.01  # phases below this fraction of the time are joined
# Timers under timing/train that are not seconds of a phase.
_NOT_PHASES = frozenset({"total_step_time", "valid_tokens_per_sec_per_gpu"})


class NothingToShow(UserError, ValueError):
    """A run has logged none of the metrics that its picture shows."""


@dataclass(frozen=True)
class Series:
    """One curve: a value per step, not-a-number where there is a gap."""

    label: str
    color: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    note: str  # how to read it, in a few words
    series: list[Series]
    kind: Literal["line", "stack"] = "line"  # lines, or areas stacked on each other
    unit: Literal["", "%", "s"] = ""  # of the values: a percentage, seconds, or a plain number
    smooth: bool = False  # draw a moving average over the raw curve
    min_span: float = 0.0  # the axis covers at least this much, so that rounding noise does not look like a curve


def main_panels(run: RunMetrics, *, graded: bool = False) -> list[Panel]:
    """The panels of the picture: reward, validation, lengths, KL, agreement of the engines, time per step. `graded`:
    whether rewards are other than 0 and 1, so that their mean is no accuracy.
    """
    pick = _picker(run)
    judged = "reward" if graded else "accuracy"
    rewards = pick(("train/reward", INDIGO), ("train/filtered_reward", SKY, "trained on"))
    validation = pick(("validation/accuracy", GREEN, judged), ("validation/pass_k", TEAL, "pass@k"))
    held_out = "mean over held-out problems" if graded else "held-out problems"
    lengths = pick(
        ("train/mean_gen_tokens_per_sample", TEAL, "response"),
        ("train/mean_prompt_length", SLATE, "prompt"),
        ("validation/avg_length", GREEN, "validation response"),
    )
    # Without a penalty the divergence is not measured, and logged as 0.
    divergence = _not_zero(pick(("train/kl_penalty", VIOLET)))
    agreement = pick(("train/token_mult_prob_error", ROSE))
    candidates = [
        Panel("Reward", "mean of a step's samples", rewards, smooth=True),
        Panel(f"Validation {judged}", held_out, validation, unit="" if graded else "%"),
        Panel("Validation loss", "per token, held-out", pick(("validation/val_loss", GREEN)), smooth=True),
        Panel("Tokens per sample", "mean lengths", lengths, smooth=True),
        Panel("KL divergence", "from the reference policy", divergence, smooth=True),
        Panel(
            "Generation and training agree",
            "mean of exp|log-prob gap|; 1 is perfect",
            agreement,
            smooth=True,
            min_span=0.002,
        ),
        Panel("Time per step", "seconds by phase", phase_series(run), kind="stack", unit="s"),
    ]
    return [panel for panel in candidates if panel.series]


def more_panels(run: RunMetrics) -> list[Panel]:
    """Further panels of the page: the optimizer, the distribution of the policy, and speed."""
    pick = _picker(run)
    mismatch = pick(("train/gen_kl_error", AMBER))
    ratios = pick(
        ("train/probs_ratio_max", ROSE, "max"),
        ("train/probs_ratio", INDIGO, "mean"),
        ("train/probs_ratio_min", SKY, "min"),
    )
    outcomes = pick(
        ("train/baseline_reward/pct_0", ROSE, "none right"),
        ("train/baseline_reward/pct_mixed", AMBER, "mixed"),
        ("train/baseline_reward/pct_1", GREEN, "all right"),
    )
    unverified = _not_zero(pick(("train/unverified_rate", ROSE)))
    generated = [
        *pick(("performance/generation_tokens_per_sec", TEAL, "generation")),
        *_responses_over_the_step(run),
    ]
    trained = pick(
        ("performance/policy_training_tokens_per_sec", AMBER, "training"),
        ("performance/tokens_per_sec", INDIGO, "whole step"),
    )
    while_training = "prompts and responses, while training, and over the whole step"
    candidates = [
        Panel("Loss", "policy gradient and penalties", pick(("train/loss", INDIGO)), smooth=True),
        Panel("Gradient norm", "before clipping", pick(("train/grad_norm", ROSE)), smooth=True),
        Panel("Mismatch of the engines", "KL from generation to training", mismatch, smooth=True, min_span=0.001),
        Panel("Entropy", "approximate, of sampled tokens", pick(("train/approx_entropy", TEAL)), smooth=True),
        Panel("Probability ratio", "current over previous policy", ratios),
        Panel("Group outcomes", "fraction of samples by their group's baseline", outcomes, kind="stack", unit="%"),
        Panel("Truncated samples", "cut off at the length limit", pick(("train/truncation_rate", AMBER)), unit="%"),
        Panel("Unverified samples", "given up by their verifier; they earn 0", unverified, unit="%"),
        Panel("Response tokens per second", "while generating, and over the whole step", generated),
        Panel("Trained tokens per second", while_training, trained),
        Panel("Learning rate", "of the step", pick(("train/lr", SLATE))),
    ]
    return [panel for panel in candidates if panel.series]


def _not_zero(series: Sequence[Series]) -> list[Series]:
    """Series with a value other than 0."""
    return [one for one in series if any(value != 0 for value in one.values if math.isfinite(value))]


def _responses_over_the_step(run: RunMetrics) -> list[Series]:
    """Response tokens by the time of their whole step, which is never above the rate of generation itself."""
    rates = dict(zip(*run.scalars("performance/generation_tokens_per_sec"), strict=True))
    generating = dict(zip(*run.scalars("timing/train/generation"), strict=True))
    whole = dict(zip(*run.scalars("timing/train/total_step_time"), strict=True))
    steps = [step for step in rates if generating.get(step) and whole.get(step)]
    values = [rates[step] * generating[step] / whole[step] for step in steps]
    return [Series("whole step", INDIGO, steps, values)] if steps else []


def phase_series(run: RunMetrics) -> list[Series]:
    """Seconds of each phase per step, largest first; time without a timer is `other`. `x/total` stands for `x`; other
    timers with a slash are part of one of these and skipped.
    """
    prefix = "timing/train/"
    phases: dict[str, dict[int, float]] = {}
    for name in run.series:
        label = name.removeprefix(prefix).removesuffix("/total")
        if name.startswith(prefix) and "/" not in label and label not in _NOT_PHASES:
            phases[label] = dict(zip(*run.scalars(name), strict=True))
    if not phases:
        return []
    totals = dict(zip(*run.scalars(prefix + "total_step_time"), strict=True))
    steps = sorted(totals or set().union(*phases.values()))
    seconds = {
        label: sum(value for value in points.values() if math.isfinite(value)) for label, points in phases.items()
    }
    order = sorted(
        (label for label in phases if seconds[label] > _NOTABLE * sum(seconds.values())),
        key=lambda label: -seconds[label],
    )
    shown = list(zip(order, _PHASE_COLORS, strict=False))
    series = [
        Series(label.replace("_", " "), color, steps, [phases[label].get(step, 0.0) for step in steps])
        for label, color in shown
    ]
    covered = [sum(values) for values in zip(*(one.values for one in series), strict=True)]
    rest = [max(totals.get(step, done) - done, 0.0) for step, done in zip(steps, covered, strict=True)]
    if sum(rest) > _NOTABLE * sum(covered):
        series.append(Series("other", SLATE, steps, rest))
    return series


def spanned(low: float, high: float, least: float) -> tuple[float, float]:
    """The range, widened evenly to at least `least`."""
    missing = max(least - (high - low), 0.0) / 2
    return low - missing, high + missing


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average over a twelfth of the curve (less at its ends); gaps stay gaps."""
    reach = len(values) // 24
    result: list[float] = []
    for i, value in enumerate(values):
        near = [other for other in values[max(i - reach, 0) : i + reach + 1] if math.isfinite(other)]
        result.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return result


def figure(run: RunMetrics, title: str, subtitle: str = "", *, graded: bool = False) -> "Figure":
    """The picture of a run. `subtitle`: its result in one line. `graded`: see `main_panels`. Raises NothingToShow:
    nothing that can be drawn was logged.
    """
    from matplotlib.figure import Figure

    panels = main_panels(run, graded=graded)
    if not panels:
        raise NothingToShow(f"none of the metrics this picture shows were logged; there are {sorted(run.series)[:20]}")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    fig = Figure(figsize=(5.2 * columns, 3.5 * rows + 0.9), dpi=140, facecolor="white")
    fig.text(
        0.5 / (5.2 * columns),
        1 - 0.42 / fig.get_figheight(),
        title,
        fontsize=17,
        fontweight="bold",
        color=_INK,
        va="center",
    )
    fig.text(0.5 / (5.2 * columns), 1 - 0.76 / fig.get_figheight(), subtitle, fontsize=10.5, color=_MUTED, va="center")
    width, height = 5.2 * columns, fig.get_figheight()
    edges = {"left": 0.62 / width, "right": 1 - 0.3 / width, "top": 1 - 1.45 / height, "bottom": 0.5 / height}
    grid = fig.add_gridspec(rows, columns, **edges, hspace=0.46, wspace=0.2)
    for panel, (row, column) in zip(panels, itertools.product(range(rows), range(columns)), strict=False):
        _draw(fig.add_subplot(grid[row, column]), panel)
    return fig


def _picker(run: RunMetrics) -> Callable[..., list[Series]]:
    """Makes the curves of metrics, each a name, a color and a label, by default the last part of the name."""

    def pick(*wanted: tuple[str, ...]) -> list[Series]:
        with_data: list[Series] = []
        for name, color, *label in wanted:
            series = Series(label[0] if label else name.rpartition("/")[2], color, *run.scalars(name))
            # Without dynamic sampling both rewards are the same curve.
            if any(map(math.isfinite, series.values)) and not any(series.values == one.values for one in with_data):
                with_data.append(series)
        return with_data

    return pick


def _draw(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title(panel.title, loc="left", fontsize=12.5, fontweight="bold", color=_INK, pad=21)
    axes.text(0, 1.04, panel.note, transform=axes.transAxes, fontsize=9.5, color=_MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_xlabel("step", fontsize=9, color=_MUTED)
    if panel.unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    draw = _draw_stack if panel.kind == "stack" else _draw_lines
    draw(axes, panel)
    if len(panel.series) > 1:
        stacked = panel.kind == "stack"
        axes.legend(
            fontsize=8.5,
            frameon=False,
            labelcolor=_INK,
            ncols=2 if len(panel.series) > 4 else 1,
            handlelength=1.0,
            loc="upper left" if stacked else "best",
            borderaxespad=0.1,
        )


def _draw_stack(axes: "Axes", panel: Panel) -> None:
    steps = panel.series[0].steps
    tops = [sum(values) for values in zip(*(series.values for series in panel.series), strict=True)]
    if len(steps) > _MANY_STEPS:
        curves = [smoothed(series.values) for series in panel.series]
        colors = [series.color for series in panel.series]
        axes.stackplot(steps, curves, colors=colors, labels=[series.label for series in panel.series], linewidth=0)
    else:
        # Bars: with few steps an area would suggest values between them.
        floor = [0.0] * len(steps)
        for series in panel.series:
            axes.bar(
                steps, series.values, width=0.82, bottom=floor, color=series.color, label=series.label, linewidth=0
            )
            floor = [low + value for low, value in zip(floor, series.values, strict=True)]
    legend_rows = math.ceil(len(panel.series) / (2 if len(panel.series) > 4 else 1))
    # Room for the legend above the bars.
    axes.set_ylim(0, max(tops) * (1 + 0.13 * legend_rows))
    axes.margins(x=0.02)


def _draw_lines(axes: "Axes", panel: Panel) -> None:
    curves: list[list[float]] = []
    for series in panel.series:
        smooth = panel.smooth and len(series.steps) > _MANY_STEPS
        curves.append(smoothed(series.values) if smooth else series.values)
        if smooth:
            axes.plot(series.steps, series.values, color=series.color, linewidth=1, alpha=0.28)
        marker = "o" if len(series.steps) <= _FEW_STEPS else None
        axes.plot(
            series.steps,
            curves[-1],
            color=series.color,
            linewidth=2.2,
            label=series.label,
            marker=marker,
            markersize=3.8,
            solid_capstyle="round",
        )
    finite = [value for series in panel.series for value in series.values if math.isfinite(value)]
    low, high = spanned(min(finite), max(finite), panel.min_span)
    room = 0.12 * (high - low) or 0.05 * abs(high) or 0.5
    axes.set_ylim((0.0, min(1.02, high * 1.15) or 1.0) if panel.unit == "%" else (low - room, high + room))
    axes.margins(x=0.03)
    if len(panel.series) == 1:
        [series] = panel.series
        axes.fill_between(series.steps, curves[0], axes.get_ylim()[0], color=series.color, alpha=0.08, linewidth=0)
        _mark_last(axes, panel, series, curves[0])


def _mark_last(axes: "Axes", panel: Panel, series: Series, curve: Sequence[float]) -> None:
    step, value = next(
        point for point in zip(reversed(series.steps), reversed(curve), strict=True) if math.isfinite(point[1])
    )
    shown = f"{value:.1%}" if panel.unit == "%" else f"{value:.4g}" if abs(value - 1) > 0.01 else f"{value:.5f}"
    axes.annotate(
        shown,
        (step, value),
        xytext=(0, 9),
        textcoords="offset points",
        ha="right",
        fontsize=10,
        fontweight="bold",
        color=series.color,
        annotation_clip=False,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
    )
