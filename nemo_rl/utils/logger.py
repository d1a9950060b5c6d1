"""The run's logger: metrics go to `metrics.jsonl` and every enabled backend, samples to JSON-lines files.

Tensors and numbers are converted to floats once. The first failure of a tracker's own kind switches that tracker off
with one log line; later calls skip it. Invariant: backends show what the file holds.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import orjson

from nemo_rl.config import ConfigError, LoggerConfig
from nemo_rl.config.errors import first_line
from nemo_rl.lazy import names_of
from nemo_rl.utils import log_backends
from nemo_rl.utils.files import dump_yaml
from nemo_rl.utils.log_backends import LoggerInterface, MetricValue, TrackerUnreachable
from nemo_rl.utils.metrics_file import METRICS_FILE, MetricsFile
from nemo_rl.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

logger = logging.getLogger(__name__)

__all__ = ["Logger", "LoggerInterface", "flatten_dict", "get_next_experiment_dir", "print_message_log_samples"]
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


class Logger:
    """Logs to all backends. `cfg.log_dir` is used as it is (see `get_next_experiment_dir`) and created. Raises
    BackendMissing: an enabled backend is not installed; OSError: the directory cannot be written.
    """

    def __init__(self, cfg: LoggerConfig | Mapping[str, object]) -> None:
        cfg = LoggerConfig.read(cfg)
        self.log_dir = Path(cfg.log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        switched_on: dict[str, tuple[bool, Callable[[], LoggerInterface]]] = {
            "tensorboard": (
                cfg.tensorboard_enabled,
                lambda: log_backends.TensorboardLogger(cfg.tensorboard, self.log_dir),
            ),
            "wandb": (cfg.wandb_enabled, lambda: log_backends.WandbLogger(cfg.wandb, self.log_dir)),
            "mlflow": (cfg.mlflow_enabled, lambda: log_backends.MlflowLogger(cfg.mlflow, self.log_dir)),
            "swanlab": (cfg.swanlab_enabled, lambda: log_backends.SwanlabLogger(cfg.swanlab, self.log_dir)),
        }
        self.backends = [
            ReachableTracker(name, make, self.log_dir) for name, (enabled, make) in switched_on.items() if enabled
        ]
        self._file = MetricsFile(self.log_dir)
        self.samples_dir = self.log_dir / "samples"
        self.samples_dir.mkdir(exist_ok=True)
        self._ignored: set[str] = set()
        self._lock = threading.Lock()

    def log_metrics(
        self,
        metrics: Mapping[str, object],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Metrics of a step.

        Args:
            metrics: numbers, scalar tensors and lists or 1-D tensors of numbers, by name. Anything else is left out,
                with one warning per name.
            step: the step they belong to, from 1; 0 is before training.
            prefix: group of the metrics, such as `train`, `validation`, `timing/train`.
            step_metric: name of a metric that is the x axis instead of the step, for backends that can.
            step_finished: nothing more is expected for this step; trackers show it.
        """
        plain = self._plain(metrics, prefix)
        # Monitors log from their own threads.
        with self._lock:
            self._file.append(plain, step, prefix)
            for backend in self.backends:
                backend.log_metrics(plain, step, prefix, step_metric, step_finished)

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """The configuration, nested; backends get it flat, and it is saved as `config.yaml` beside the metrics."""
        plain = json.loads(json.dumps(params, default=str))
        (self.log_dir / "config.yaml").write_text(dump_yaml(plain, allow_unicode=True, width=160), encoding="utf-8")
        flat = flatten_dict(params)
        for backend in self.backends:
            backend.log_hyperparams(flat)

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """Values to show as a distribution."""
        prefix, _, short = name.rpartition("/")
        with self._lock:
            self._file.append({short: [float(value) for value in histogram]}, step, prefix)
            for backend in self.backends:
                backend.log_histogram(histogram, step, name)

    def log_plot(self, figure: Figure, step: int, name: str) -> None:
        """A matplotlib figure, for backends that show figures."""
        with self._lock:
            for backend in self.backends:
                backend.log_plot(figure, step, name)

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        """Rows of text and numbers as columns by name, for every tracker."""
        with self._lock:
            for backend in self.backends:
                backend.log_table(table, step, name)

    def log_batched_dict_as_jsonl(self, columns: Mapping[str, object], filename: str) -> Path:
        """Write a batch as one JSON object per row to `<log_dir>/samples/<filename>`, and return that path.

        Args:
            columns: tensors or lists with one item per row.
            filename: for example `train_data_step3.jsonl`.

        Raises ValueError: the columns differ in length.
        """
        path = self.samples_dir / filename
        write_rows(path, columns)
        return path

    def close(self) -> None:
        """Flush and close all backends."""
        self._file.close()
        for backend in self.backends:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plain(self, metrics: Mapping[str, object], prefix: str) -> dict[str, MetricValue]:
        plain: dict[str, MetricValue] = {}
        for name, value in metrics.items():
            item = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(item, (bool, int, float)):
                plain[name] = float(item)
            elif isinstance(item, (list, tuple)) and all(isinstance(x, (bool, int, float)) for x in item):
                plain[name] = [float(x) for x in item]
            elif (full := log_backends.full_name(prefix, name)) not in self._ignored:
                self._ignored.add(full)
                logger.warning(
                    "metric_ignored name=%s type=%s: metrics are numbers or lists of numbers",
                    full,
                    type(value).__name__,
                )
        return plain


def flatten_dict(nested: Mapping[str, object], sep: str = ".") -> dict[str, object]:
    """Nested mappings and lists as one level, with joined names.

    >>> flatten_dict({"a": {"b": 1}, "c": [2, {"d": 3}]})
    {'a.b': 1, 'c.0': 2, 'c.1.d': 3}
    """
    flat: dict[str, object] = {}
    for key, value in nested.items():
        children = (
            value
            if isinstance(value, Mapping)
            else {str(i): item for i, item in enumerate(value)}
            if isinstance(value, (list, tuple))
            else None
        )
        if children:
            flat.update({f"{key}{sep}{name}": item for name, item in flatten_dict(children, sep).items()})
        else:
            flat[str(key)] = value
    return flat


def get_next_experiment_dir(base_log_dir: str | Path) -> Path:
    """Create and return `<base_log_dir>/exp_NNN`, one above the highest there; `<base_log_dir>/latest` links to it.

    Two runs that start at once get different ones.

    Raises OSError: the directory cannot be written.
    """
    base = Path(base_log_dir)
    base.mkdir(parents=True, exist_ok=True)
    while True:
        taken = [int(match[1]) for path in base.iterdir() if (match := re.fullmatch(r"exp_(\d+)", path.name))]
        candidate = base / f"exp_{max(taken, default=-1) + 1:03d}"
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        aside = base / f".latest_{candidate.name}"
        aside.symlink_to(candidate.name, target_is_directory=True)
        aside.replace(base / "latest")
        return candidate


def print_message_log_samples(
    message_logs: Sequence[Sequence[Mapping[str, object]]],
    rewards: Sequence[float],
    num_samples: int = 5,
    step: int = 0,
    console: Console | None = None,
    expected: Sequence[object] = (),
) -> None:
    """Show conversations with their rewards on the terminal: the best, the worst and some between, turn by turn.

    Args:
        message_logs: conversations, lists of `{role, content, ...}`.
        console: where to show; standard error by default.
        expected: the answer expected of each, None where none is; nothing where none is known.

    Raises ValueError: there are not as many rewards as conversations.
    """
    if len(message_logs) != len(rewards):
        raise ValueError(f"{len(message_logs)} conversations but {len(rewards)} rewards")
    if num_samples <= 0 or not message_logs:
        return
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    styles = {"user": "cyan", "assistant": "green", "system": "magenta"}
    panels = []
    for i in best_to_worst(rewards, num_samples):
        text = Text()
        for message in message_logs[i]:
            role = str(message["role"])
            text.append(f"{printable(role)}: ", style=f"bold {styles.get(role, 'yellow')}")
            text.append(f"{printable(str(message['content']))}\n")
        text.rstrip()
        if expected and expected[i] is not None:
            text.append("\nexpected: ", style="bold").append(printable(str(expected[i])))
        turns = sum(message["role"] == "assistant" for message in message_logs[i])
        said = f"sample {i} · reward {float(rewards[i]):.3g}" + (f" · {turns} turns" if turns > 1 else "")
        panels.append(Panel(text, title=said, title_align="left"))
    mean = sum(float(reward) for reward in rewards) / len(rewards)
    (console or Console(stderr=True)).print(
        Group(
            Text(f"step {step}: {len(panels)} of {len(rewards)} samples, mean reward {mean:.3f}", style="bold"), *panels
        )
    )


def best_to_worst(rewards: Sequence[float], count: int) -> list[int]:
    """Up to `count` samples from the best to the worst, evenly spread; the worst is among them from two on.

    >>> best_to_worst([0.0, 1.0, 0.5], 2)
    [1, 0]
    """
    order = sorted(range(len(rewards)), key=lambda i: -float(rewards[i]))
    count = min(count, len(order))
    return list(dict.fromkeys(order[round(k * (len(order) - 1) / max(count - 1, 1))] for k in range(count)))


class ReachableTracker:
    """A `LoggerInterface`: a tracker while it can be reached, and nothing afterwards. `log_dir`: where the metrics are
    kept anyway, for the message. Raises BackendMissing: its package is not installed.
    """

    def __init__(self, name: str, make: Callable[[], LoggerInterface], log_dir: Path) -> None:
        self._name = name
        self._log_dir = log_dir
        self._tracker: LoggerInterface | None = None
        try:
            self._tracker = make()
        except (TrackerUnreachable, OSError) as error:
            self._switch_off(error)
        except TypeError as error:
            raise ConfigError([f"logger.{name}: {name} does not take these arguments: {error}"]) from error

    def __getattr__(self, method: str) -> Callable[..., None]:
        """Any other method of `LoggerInterface`."""
        return partial(self._call, method)

    def close(self) -> None:
        self._call("close")
        self._tracker = None

    def _call(self, method: str, *arguments: object) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*arguments)
        except self._tracker.failures as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self._tracker = None
        logger.warning(
            "tracker=%s event=switched_off: %s; the run goes on, its metrics are in %s",
            self._name,
            first_line(error),
            self._log_dir / METRICS_FILE,
        )


def write_rows(path: Path, columns: Mapping[str, Any], *, append: bool = False) -> None:
    """Writes a batch.

    Args:
        path: the file; its directory exists.
        columns: tensors, or sequences of anything JSON can say, arrays and tensors, with one item per row.
        append: add to the file instead of replacing it.

    Raises ValueError: the columns differ in length; OSError: the file cannot be written.
    """
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"columns of {path.name} differ in length: {sizes}")
    plain = {name: _rows(column) for name, column in columns.items()}
    with path.open("ab" if append else "wb") as file:
        for row in zip(*plain.values(), strict=True):
            file.write(orjson.dumps(dict(zip(plain, row, strict=True)), default=_plain, option=_OPTIONS))


def _rows(column: Any) -> Sequence[object]:
    if hasattr(column, "detach"):
        array = column.detach().cpu().numpy()
        return array.tolist() if array.ndim == 1 else [np.ascontiguousarray(row) for row in array]
    return column


def _plain(value: object) -> object:
    if hasattr(value, "detach"):
        return np.ascontiguousarray(value.detach().cpu().numpy())
    return value.tolist() if hasattr(value, "tolist") else str(value)


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
