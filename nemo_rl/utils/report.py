"""`python -m nemo_rl.utils.report RUN_DIR`: an HTML page and a picture of a run, from what its logger wrote.

Reads `metrics.jsonl`, `config.yaml` and `samples/val_data_stepN.jsonl`. The page is self-contained. Invariants: model
output is escaped and cannot run as script; updating a page beside a run takes a small share of the time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from nemo_rl.cli import EXIT_FAILED, EXIT_OK, one_message
from nemo_rl.utils import plots
from nemo_rl.utils.files import load_yaml, replace_file
from nemo_rl.utils.logger import Logger, best_to_worst
from nemo_rl.utils.metrics_file import NoMetrics, RunMetrics, metrics_paths, read_metrics
from nemo_rl.utils.progress import format_duration
from nemo_rl.utils.record import RecordDamaged, RecordError, read_record
from nemo_rl.utils.step_timeline import figure, most_telling, read_timeline
from nemo_rl.utils.text import filled_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

_EVERY_S, _LOWEST_PRIORITY = 30.0, 19
_SHARE = 0.05
"""Of one core at the lowest priority."""
_PAGE_S = 900.0
_SAMPLES_SHOWN = 3
# Compressing as far as the default does takes a third of the time in which a picture is made.
_QUICK_PNG = {"compress_level": 1}
RECORD_FILE = "record.jsonl"


class ReportPaths(NamedTuple):
    """Files that `write_report` wrote."""

    html: Path
    png: Path


class _Shown:
    """What a page and a picture show of a run. Raises NoMetrics: the directory holds no metrics."""

    def __init__(self, run_dir: Path | str, title: str | None = None) -> None:
        self.run = read_metrics(run_dir)
        self.part = metrics_paths(run_dir)[-1].parent
        self.graded = _is_graded(self.part)
        config = self.part / "config.yaml"
        self.config = load_yaml(config.read_text(encoding="utf-8")) if config.is_file() else None
        self.title = title or _title(self.part)
        self.subtitle = _subtitle(self.run, self.config, self.graded)

    def picture(self) -> Figure:
        """Raises NothingToShow: none of the metrics that it shows were logged."""
        return plots.figure(self.run, self.title, self.subtitle, graded=self.graded)

    def write_page(self, path: Path, *, live: bool) -> None:
        last = ((name, self.run.last(name)) for name in sorted(self.run.series))
        page: dict[str, object] = {
            "title": self.title,
            "subtitle": self.subtitle,
            "live": live,
            "tiles": _tiles(self.run, self.graded),
            "panels": [_panel(panel) for panel in plots.main_panels(self.run, graded=self.graded)],
            "more": [_panel(panel) for panel in plots.more_panels(self.run)],
            "timeline": _timeline(self.part),
            "samples": _samples(self.part),
            "last": [[name, _plain(value)] for name, value in last if value is not None],
            "config": self.config,
        }
        replace_file(path, filled_page(Path(__file__).with_name("report.html"), "", page))


def write_report(run_dir: Path | str, out_dir: Path | str | None = None, title: str | None = None) -> ReportPaths:
    """Write `report.html` and `report.png`.

    Args:
        run_dir: a run's log directory, or a `logger.log_dir` (its newest run); runs that it resumed from are included.
        out_dir: where to write; `run_dir` by default.
        title: name of the run; its directory by default.

    Raises NoMetrics: the directory holds no metrics; NothingToShow: none of the metrics a report shows were logged.
    """
    shown = _Shown(run_dir, title)
    out = Path(out_dir) if out_dir is not None else Path(run_dir)
    out.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(out / "report.html", out / "report.png")
    shown.picture().savefig(paths.png, pil_kwargs=_QUICK_PNG)
    shown.write_page(paths.html, live=False)
    return paths


def write_page(run_dir: Path | str) -> Path | None:
    """Write `report.html` alone, for a run in progress; it reloads itself. None while there is nothing to show."""
    try:
        shown = _Shown(run_dir)
    except NoMetrics:
        return None
    if not plots.main_panels(shown.run):
        return None
    path = Path(run_dir) / "report.html"
    shown.write_page(path, live=True)
    return path


def log_report(logger: Logger) -> None:
    """Sends the report's picture to the run's trackers; does nothing without trackers or metrics."""
    if not logger.backends:
        return
    try:
        shown = _Shown(logger.log_dir)
        picture = shown.picture()
    except (NoMetrics, plots.NothingToShow):
        return
    logger.log_plot(picture, _last_step(shown.run), "report")


def damages(run_dir: Path | str) -> list[RecordDamaged]:
    """The damaged records of a run; one that is just cut off at the end does not count."""
    found: list[RecordDamaged] = []
    for path in metrics_paths(run_dir):
        try:
            for _ in read_record(path.parent / RECORD_FILE):
                pass
        except RecordDamaged as damage:
            found += [] if damage.torn else [damage]
        except (OSError, RecordError):
            continue
    return found


def _timeline(part: Path) -> str | None:
    """The picture of the newest whole step, as the address of an image; None where the record has no such step."""
    try:
        timeline = read_timeline(read_record(part / RECORD_FILE, recover=True))
    except (OSError, RecordError):
        return None
    step = most_telling(timeline)
    if step is None:
        return None
    hidden = f"{timeline.hidden_share(first=1):.0%} of scoring and training under generation" if step.step else ""
    picture = io.BytesIO()
    figure(timeline, step, f"Step {step.step + 1}   {hidden}").savefig(picture, format="png", pil_kwargs=_QUICK_PNG)
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()


def _title(part: Path) -> str:
    """A run is called as its directory is: `grpo_arithmetic_cpu, exp_003`."""
    real = part.resolve()
    return f"{real.parent.name}, {real.name}" if real.name.startswith("exp_") else real.name


def _what(config: Mapping[str, Any] | None) -> str | None:
    model = (config or {}).get("policy", {}).get("model_name")
    if not model:
        return None
    path = Path(str(model))
    # A link to the newest checkpoint says nothing; the directories that hold it do.
    name = "/".join(path.parts[-3:-1]) if path.name == "latest" else path.name
    loops = {"sft": "SFT", "distillation": "Distillation"}
    return f"{next((title for section, title in loops.items() if section in (config or {})), 'GRPO')} of {name}"


def _is_graded(part: Path) -> bool:
    """Whether rewards of the newest validation are other than 0 and 1: their mean is then no accuracy."""
    files = _validation_samples(part)
    if not files:
        return False
    return any(row.get("rewards") not in (0, 1, None) for row in sample_lines(files[-1][1]))


def _finite(run: RunMetrics, name: str) -> list[float]:
    return [value for value in run.scalars(name)[1] if math.isfinite(value)]


def run_seconds(run: RunMetrics) -> float:
    """Time spent in steps; between the first and last line where steps were not timed."""
    if timed := _finite(run, "timing/train/total_step_time"):
        return sum(timed)
    moments = [moment for points in run.times.values() for moment in points.values()]
    return max(moments) - min(moments) if moments else 0.0


def _last_step(run: RunMetrics) -> int:
    return max((step for name, points in run.series.items() if name.startswith("train/") for step in points), default=0)


def _subtitle(run: RunMetrics, config: dict[str, object] | None, graded: bool) -> str:
    parts = [f"{_last_step(run)} steps in {format_duration(run_seconds(run))}"]
    if accuracy := _finite(run, "validation/accuracy"):
        form, named = (".3g", "reward") if graded else (".1%", "accuracy")
        parts.append(f"validation {named} {accuracy[0]:{form}} → {accuracy[-1]:{form}}")
    if reward := _finite(run, "train/reward"):
        parts.append(f"reward {reward[0]:.3g} → {reward[-1]:.3g}")
    if (what := _what(config)) is not None:
        parts.insert(0, what)
    return "  ·  ".join(parts)


def _tiles(run: RunMetrics, graded: bool) -> list[list[str]]:
    judged, judged_form = ("best validation reward", ".3f") if graded else ("best validation accuracy", ".1%")
    figures: tuple[tuple[str, Callable[[list[float]], float], str, str], ...] = (
        ("validation/accuracy", max, judged, judged_form),
        ("train/reward", max, "best reward", ".3f"),
        ("timing/train/total_step_time", fmean, "seconds per step", ".1f"),
        ("performance/samples_per_sec", fmean, "samples per second", ",.1f"),
        ("performance/tokens_per_sec", fmean, "tokens per second", ",.0f"),
        ("train/token_mult_prob_error", max, "worst engine mismatch", ".4f"),
    )
    known = ((_finite(run, name), reduce, label, form) for name, reduce, label, form in figures)
    tiles = [[format(reduce(values), form), label] for values, reduce, label, form in known if values]
    return [[str(_last_step(run)), "steps"], [format_duration(run_seconds(run)), "in steps"], *tiles]


def _panel(panel: plots.Panel) -> dict[str, object]:
    series = [{**vars(one), "values": [_plain(value) for value in one.values]} for one in panel.series]
    return {**vars(panel), "series": series}


def _plain(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _validation_samples(log_dir: Path, kind: str = "val") -> list[tuple[int, Path]]:
    """Step and file of every validation (or training step: `kind` is `train`) that wrote its samples."""
    return sorted(
        (int(match[1]), path)
        for path in (log_dir / "samples").glob(f"{kind}_data_step*.jsonl")
        if (match := re.fullmatch(rf"{kind}_data_step(\d+)\.jsonl", path.name))
    )


def _samples(log_dir: Path) -> list[dict[str, Any]]:
    """Conversations at the first and last validation that wrote them, or else those of the first and last step."""
    title, numbered = "Validation samples", _validation_samples(log_dir)
    if not numbered:
        title, numbered = "Samples", _validation_samples(log_dir, "train")
    chosen = numbered[:: max(len(numbered) - 1, 1)]
    groups = [{"title": f"{title} at step {step}", "samples": _sample_rows(path)} for step, path in chosen]
    return [group for group in groups if group["samples"]]


Sample = dict[str, Any]
"""A line of a samples file, or what the page shows of it."""


def _sample_rows(path: Path) -> list[Sample]:
    """Some samples of a file, from the best to the worst: `text` and `reward`, and where the file has them, `turns` of
    role and text and the `expected` answer.
    """
    rows = []
    for row in sample_lines(path):
        content, reward = row.get("content"), row.get("rewards", row.get("reward"))
        if content is None:
            continue
        text = "\n\n".join(str(turn) for turn in content) if isinstance(content, list) else str(content)
        sample: Sample = {
            "text": text,
            "reward": reward if isinstance(reward, (int, float)) and math.isfinite(reward) else None,
        }
        if row.get("messages"):
            sample["turns"] = [[str(turn["role"]), str(turn["content"])] for turn in row["messages"]]
        if row.get("expected") is not None:
            sample["expected"] = str(row["expected"])
        rows.append(sample)
    rewards = [-math.inf if row["reward"] is None else row["reward"] for row in rows]
    return [rows[index] for index in best_to_worst(rewards, _SAMPLES_SHOWN)]


def sample_lines(path: Path) -> Iterator[Sample]:
    """The samples of a file; damaged lines are left out with a warning."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                logger.warning("sample_skipped path=%s line=%d: %s", path, number, error)


class LiveReport:
    """Writes `report.html` every so often, in a process of its own: a page takes memory and time in proportion to the
    steps so far. A context manager. `every_s`: seconds between pages, more where a page takes long.
    """

    def __init__(self, log_dir: Path, every_s: float = _EVERY_S) -> None:
        self._log_dir = log_dir
        self._pause_s = every_s
        self._ended = threading.Event()
        self._writer: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="live-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            self._ended.set()
            if self._writer is not None:
                self._writer.kill()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            began = time.monotonic()
            if problem := self._write():
                logger.warning("report=not_written log_dir=%s: %s", self._log_dir, problem)
            self._pause_s = max(self._pause_s, (time.monotonic() - began) / _SHARE)

    def _write(self) -> str:
        """Writes the page; why it could not, or nothing."""
        command = [sys.executable, "-m", "nemo_rl.utils.report", str(self._log_dir), "--page"]
        with self._starting:
            if self._ended.is_set():
                return ""
            # Ctrl-C in the run's terminal is the run's.
            self._writer = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        try:
            said = self._writer.communicate(timeout=_PAGE_S)[1].strip()
        except subprocess.TimeoutExpired:
            self._writer.kill()
            self._writer.communicate()
            return f"it took over {_PAGE_S:.0f} s"
        failed = self._writer.returncode and not self._ended.is_set()
        return (said.splitlines() or [f"exit code {self._writer.returncode}"])[-1] if failed else ""


@one_message
def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog=prog or "python -m nemo_rl.utils.report", description="Write report.html and report.png of a run."
    )
    parser.add_argument("run_dir", help="a run's log directory, or a logger.log_dir, whose newest run is meant")
    parser.add_argument("--out", help="directory to write into (default: run_dir)")
    parser.add_argument("--title", help="name of the run")
    parser.add_argument("--page", action="store_true", help="only report.html, for a run in progress; at low priority")
    parsed = parser.parse_args(arguments)
    if parsed.page:
        os.nice(_LOWEST_PRIORITY)
        write_page(parsed.run_dir)
        return 0
    paths = write_report(parsed.run_dir, parsed.out, parsed.title)
    sys.stdout.write(f"{paths.html}\n{paths.png}\n")
    found = damages(parsed.run_dir)
    for damage in found:
        sys.stderr.write(f"{damage.path}: line {damage.line} {damage.reason}; the steps behind it are not shown\n")
    return EXIT_FAILED if found else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
