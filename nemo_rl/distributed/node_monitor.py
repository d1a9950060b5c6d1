"""Samples memory and accelerator use of every node, from one small Ray actor per node.

Invariant: a slow or lost node only loses its own numbers: every call has a deadline.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.config.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from nemo_rl.utils.logger import Logger


logger = logging.getLogger(__name__)

_GIB = 2**30
_QUERY_DEADLINE_S = 10.0
PREFIX = "ray"


class NodeSampler:
    """Reads the node it runs on."""

    def __init__(self) -> None:
        self._nvidia_smi = shutil.which("nvidia-smi")
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """`mem_gb`, `cpu_util` (percent of all cores since the last sample), and per GPU `gpu.M.util` (percent) and
        `gpu.M.mem_gb`.
        """
        usage = {"mem_gb": psutil.virtual_memory().used / _GIB, "cpu_util": psutil.cpu_percent()}
        if self._nvidia_smi is None:
            return usage
        query = [self._nvidia_smi, "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_DEADLINE_S, check=False)
        return usage | parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> dict[str, float]:
    """`gpu.M.util` and `gpu.M.mem_gb` from lines of `index, percent, MiB`; values that are no number (`[N/A]`) are left
    out.

    >>> parse_nvidia_smi("0, 87, 2048")
    {'gpu.0.util': 87.0, 'gpu.0.mem_gb': 2.0}
    """
    usage: dict[str, float] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].isdigit():
            continue
        index, utilization, mebibytes = fields
        if utilization.isdigit():
            usage[f"gpu.{index}.util"] = float(utilization)
        if mebibytes.isdigit():
            usage[f"gpu.{index}.mem_gb"] = float(mebibytes) / 1024
    return usage


class RaySamplers:
    """One `NodeSampler` per node that was alive when this was made; node numbers follow the order of node addresses."""

    def __init__(self) -> None:
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
        )
        sampler: Any = ray.remote(num_cpus=0)(NodeSampler)
        self._actors: list[Any] = [
            sampler.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
            for node in nodes
        ]
        self._silent: set[int] = set()

    def __call__(self) -> dict[str, float]:
        """`node.N.<usage>` of every node that answers within the deadline."""
        answers = {actor.sample.remote(): number for number, actor in enumerate(self._actors)}
        ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=_QUERY_DEADLINE_S)
        usage: dict[str, float] = {}
        for answer in late:
            self._report(answers[answer], f"no answer within {_QUERY_DEADLINE_S:g} s")
        for answer in ready:
            try:
                own = ray.get(answer, timeout=_QUERY_DEADLINE_S)
            except (ray.exceptions.RayError, subprocess.TimeoutExpired) as error:
                self._report(answers[answer], first_line(error))
                continue
            usage |= {f"node.{answers[answer]}.{name}": value for name, value in own.items()}
        return usage

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)

    def _report(self, number: int, reason: str) -> None:
        if number not in self._silent:
            self._silent.add(number)
            logger.warning(
                "node_usage_missing node=%d: %s; its memory and GPU curves end here or have gaps", number, reason
            )


class NodeMonitor:
    """Logs the use of all nodes under `ray/` every so often, from a thread; a context manager (`logger.monitor_gpus`).

    Args:
        sink: gets the numbers; the step is the whole seconds since the start.
        collection_interval_s: seconds between samples.
        flush_interval_s: seconds between writes; a write holds the mean of the samples since the last.
        sample: takes one sample; asks every Ray node by default.
        show_memory: called with the GiB in use on the fullest GPU.
    """

    def __init__(
        self,
        sink: Logger,
        collection_interval_s: float = 10.0,
        flush_interval_s: float = 10.0,
        sample: Callable[[], dict[str, float]] | None = None,
        show_memory: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._sink = sink
        self._show_memory = show_memory
        self._collection_interval_s = collection_interval_s
        self._flush_interval_s = flush_interval_s
        self._samplers = RaySamplers() if sample is None else None
        self._sample = sample or self._samplers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-monitor", daemon=True)
        self._pending: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * _QUERY_DEADLINE_S)
        if self._samplers is not None:
            self._samplers.close()

    def _run(self) -> None:
        started = last_flush = time.monotonic()
        while not self._ended.wait(self._collection_interval_s):
            for name, value in (self._sample() if self._sample is not None else {}).items():
                self._pending.setdefault(name, []).append(value)
            if time.monotonic() - last_flush >= self._flush_interval_s:
                last_flush = time.monotonic()
                self._flush(round(last_flush - started))
        self._flush(round(time.monotonic() - started))

    def _flush(self, seconds: int) -> None:
        if self._pending:
            means = {name: sum(values) / len(values) for name, values in self._pending.items()}
            self._pending = {}
            memory = [value for name, value in means.items() if ".gpu." in name and name.endswith(".mem_gb")]
            if memory:
                self._show_memory(max(memory))
            self._sink.log_metrics(means, seconds, PREFIX, step_metric=f"{PREFIX}/seconds")
