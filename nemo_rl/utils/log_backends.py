"""Metric backends besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, SwanLab.

Each is a small class with `LoggerInterface`, whose package is imported when it is switched on. They get only what they
can show: numbers, lists of numbers, figures, parameters.
"""

import importlib
import logging
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nemo_rl.config import MlflowConfig, SwanlabConfig, WandbConfig
from nemo_rl.config.errors import UserError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Scalars: TypeAlias = dict[str, float]
Lists: TypeAlias = dict[str, list[float]]
MetricValue: TypeAlias = float | list[float]


class BackendMissing(UserError, ImportError):
    """A metrics backend is switched on but its package is not installed."""


# Seconds that a tracker may take to answer before a run goes on without it.
_REACH_S = 20.0


Metrics = dict[str, Any]
"""Numbers and lists of numbers, by name."""


class TrackerUnreachable(UserError, RuntimeError):
    """A tracker cannot be started: no server, no network, no credentials."""


class LoggerInterface(Protocol):
    """Something that shows metrics. `failures`: errors that its package raises when the tracker is unreachable."""

    failures: tuple[type[Exception], ...]

    def log_metrics(
        self,
        metrics: Metrics,
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Metrics of a step.

        Args:
            metrics: numbers and lists of numbers, by name.
            step: the step they belong to.
            prefix: put before each name with a slash.
            step_metric: name of a metric that is the x axis instead of the step.
            step_finished: nothing more is expected for this step.
        """
        ...

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """The configuration, nested."""
        ...

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Values to show as a distribution."""
        ...

    def log_plot(self, figure: "Figure", step: int, name: str) -> None:
        """A matplotlib figure."""
        ...

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        """Rows of text and numbers, as columns by name."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


def require(package: str, switch: str) -> Any:
    """Import a backend's package. Raises BackendMissing: it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".", maxsplit=1)[0]
        raise BackendMissing(
            f"{switch}=true needs the package {name!r}, which cannot be imported ({error}); pip install "
            f"{name}, or set {switch}=false"
        ) from error


def full_name(prefix: str, name: str) -> str:
    """`prefix/name`, or `name` without a prefix."""
    return f"{prefix}/{name}" if prefix else name


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and max of a list, for backends without histograms."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def markdown_table(table: Mapping[str, Sequence[object]]) -> str:
    """A table in Markdown; line breaks and bars of its cells are kept from ending rows and cells."""
    rows = [list(table), ["---"] * len(table), *zip(*table.values(), strict=True)]
    return "\n".join(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)


def _cell(value: object) -> str:
    escaped = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return escaped.replace("\n", "<br>")


def _warn_offline(tracker: str, error: object, upload: str) -> None:
    logger.warning("tracker=%s mode=offline: %s; the run goes on, `%s` uploads it later", tracker, error, upload)


class Tracker(ABC):
    """Base of the backends."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def log_metrics(
        self,
        metrics: Mapping[str, MetricValue],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        named = {full_name(prefix, name): value for name, value in metrics.items()}
        lists = {name: value for name, value in named.items() if isinstance(value, list)}
        scalars = {name: value for name, value in named.items() if not isinstance(value, list)}
        axis = {} if step_metric is None else {step_metric: metrics.get(step_metric, step)}
        self._log(scalars, lists, step, axis, finished=step_finished)

    @abstractmethod
    def _log(self, scalars: Scalars, lists: Lists, step: int, axis: Mapping[str, object], *, finished: bool) -> None:
        """Metrics of a step, by their full names. `axis`: the metric that is the x axis instead of the step, if any."""


class TensorboardLogger(Tracker):
    """TensorBoard event files in `<log_dir>/tensorboard`; lists become histograms."""

    def __init__(self, cfg: Mapping[str, Any], log_dir: Path) -> None:
        tensorboard = require("torch.utils.tensorboard", "logger.tensorboard_enabled")
        self._writer = tensorboard.SummaryWriter(**{"log_dir": str(log_dir / "tensorboard"), **cfg})

    def _log(self, scalars: Scalars, lists: Lists, step: int, axis: Mapping[str, object], *, finished: bool) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, values in lists.items():
            self.log_histogram(values, step, name)
        if finished:
            self._writer.flush()

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """See `LoggerInterface`; shown as text, since TensorBoard's own table opens another run."""
        lines = "\n".join(f"    {name}: {value}" for name, value in params.items())
        self._writer.add_text("config", lines)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        if len(histogram):
            import numpy as np

            self._writer.add_histogram(name, np.asarray(histogram, dtype=np.float64), step)

    def log_plot(self, figure: "Figure", step: int, name: str) -> None:
        self._writer.add_figure(name, figure, step)

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        """See `LoggerInterface`; as Markdown."""
        self._writer.add_text(name, markdown_table(table), step)

    def close(self) -> None:
        self._writer.close()


_AXIS = "step"


class WandbLogger(Tracker):
    """Weights & Biases; a step is committed when it is finished. If unreachable, the run is recorded offline for `wandb
    sync`.

    W&B drops what is logged below its newest step. Late values (the report's picture, steps that a resumed run repeats)
    go into rows of their own; every row has its step, which is the axis of all charts.
    """

    def __init__(self, cfg: WandbConfig, log_dir: Path) -> None:
        self._wandb = require("wandb", "logger.wandb_enabled")
        self.failures = (OSError, self._wandb.Error)
        arguments = {key: value for key, value in cfg.model_dump().items() if key != "log_nemo_gym_full_result_tables"}
        settings = self._wandb.Settings(init_timeout=_REACH_S, silent=True)
        if os.environ.get("WANDB_MODE", "online") == "online" and arguments.get("mode", "online") == "online":
            self._run = self._online_or_offline(arguments, settings, log_dir)
        else:
            self._run = self._wandb.init(dir=str(log_dir), settings=settings, **arguments)
        self._run.define_metric(_AXIS, hidden=True)
        self._run.define_metric("*", step_metric=_AXIS)
        # Rows of a W&B run that is taken up again are there already.
        self._open = int(self._run.step or 0)

    def _row(self, payload: dict[str, object], step: int, *, commit: bool = False) -> None:
        row = max(step, self._open)
        commit = commit or step < self._open
        self._run.log({**payload, _AXIS: step}, step=row, commit=commit)
        self._open = row + commit

    def _online_or_offline(self, arguments: dict[str, object], settings: object, log_dir: Path) -> Any:
        reason = "there are no credentials (set WANDB_API_KEY or run `wandb login`)"
        if self._wandb.login(prompt=False):
            try:
                return self._wandb.init(dir=str(log_dir), settings=settings, **arguments)
            except self._wandb.Error as error:
                reason = first_line(error)
        _warn_offline("wandb", reason, f"wandb sync {log_dir}/wandb/offline-run-*")
        return self._wandb.init(dir=str(log_dir), settings=settings, **{**arguments, "mode": "offline"})

    def _log(self, scalars: Scalars, lists: Lists, step: int, axis: Mapping[str, object], *, finished: bool) -> None:
        shown = {name: self._wandb.Histogram(values) for name, values in lists.items() if values}
        payload: dict[str, object] = {**scalars, **shown}
        if not axis:
            self._row(payload, step, commit=finished)
            return
        for name in payload:
            self._run.define_metric(name, step_metric=next(iter(axis)))
        self._run.log({**payload, **axis}, commit=finished)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        self._row({name: self._wandb.Histogram(list(histogram))}, step)

    def log_plot(self, figure: "Figure", step: int, name: str) -> None:
        self._row({name: self._wandb.Image(figure)}, step)

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        self._row({name: self._wandb.Table(columns=list(table), data=rows)}, step)

    def close(self) -> None:
        self._run.finish()
        # Its service process would stay for further runs of this process.
        self._wandb.teardown()


class SummarisingLogger(Tracker):
    """Base of backends that show numbers only: a list is logged as its summary."""

    @abstractmethod
    def log_scalars(self, scalars: Scalars, step: int) -> None:
        """Numbers of a step, by their full names."""

    def _log(self, scalars: Scalars, lists: Lists, step: int, axis: Mapping[str, object], *, finished: bool) -> None:
        summaries = (
            (f"{name}/{kind}", value) for name, values in lists.items() for kind, value in summarize(values).items()
        )
        self.log_scalars({**scalars, **dict(summaries)}, step)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        self.log_metrics({name: list(histogram)}, step)


class SwanlabLogger(SummarisingLogger):
    """SwanLab. Out of reach, the run is recorded offline, for `swanlab sync`."""

    failures = (OSError, RuntimeError)

    def __init__(self, cfg: SwanlabConfig, log_dir: Path) -> None:
        self._swanlab = require("swanlab", "logger.swanlab_enabled")
        directory = log_dir / "swanlab"
        directory.mkdir(exist_ok=True)
        arguments = {"project": cfg.project, "name": cfg.name, "log_dir": str(directory), **(cfg.model_extra or {})}
        try:
            self._run = self._swanlab.init(**arguments)
        except (OSError, RuntimeError, self._swanlab.exceptions.AuthenticationError) as error:
            _warn_offline("swanlab", first_line(error), f"swanlab sync {directory}/run-*")
            self._run = self._swanlab.init(**{**arguments, "mode": "offline"})

    def log_scalars(self, scalars: Scalars, step: int) -> None:
        self._run.log(scalars, step=step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        self._run.config.update(dict(params))

    def log_plot(self, figure: "Figure", step: int, name: str) -> None:
        self._run.log({name: self._swanlab.Image(figure)}, step=step)

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        """See `LoggerInterface`; as Markdown."""
        self._run.log({name: self._swanlab.Text(markdown_table(table))}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger(SummarisingLogger):
    """MLflow, in a database under `<log_dir>/mlflow` unless a tracking server is named."""

    def __init__(self, cfg: MlflowConfig, log_dir: Path) -> None:
        self._mlflow = require("mlflow", "logger.mlflow_enabled")
        self.failures = (OSError, self._mlflow.exceptions.MlflowException)
        directory = (log_dir / "mlflow").absolute()
        directory.mkdir(exist_ok=True)
        artifacts = cfg.artifact_location or (None if cfg.tracking_uri else (directory / "artifacts").as_uri())
        # Its own wait bound with a server out of reach is minutes per call, which training would spend waiting.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(_REACH_S)))
        self._mlflow.set_tracking_uri(cfg.tracking_uri or f"sqlite:///{directory / 'mlflow.db'}")
        try:
            if self._mlflow.get_experiment_by_name(cfg.experiment_name) is None:
                self._mlflow.create_experiment(cfg.experiment_name, artifact_location=artifacts)
            self._mlflow.set_experiment(cfg.experiment_name)
            self._mlflow.start_run(run_id=cfg.run_id, run_name=cfg.run_name)
        except self._mlflow.exceptions.MlflowException as error:
            raise TrackerUnreachable(first_line(error)) from error

    def log_scalars(self, scalars: Scalars, step: int) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """See `LoggerInterface`; long values are cut to the 500 characters MLflow takes."""
        self._mlflow.log_params({name: str(value)[:500] for name, value in params.items()})

    def log_plot(self, figure: "Figure", step: int, name: str) -> None:
        self._mlflow.log_figure(figure, f"plots/{name.replace('/', '.')}_{step}.png")

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        columns = {column: list(values) for column, values in table.items()}
        self._mlflow.log_table(columns, f"tables/{name.replace('/', '.')}_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()
