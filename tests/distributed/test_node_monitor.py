"""Node monitoring: what is read, how it is averaged, and a real Ray node."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from nemo_rl.distributed.node_monitor import NodeMonitor, NodeSampler, parse_nvidia_smi


class Sink:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], str]] = []
        self.seen = threading.Event()

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        self.logged.append((dict(metrics), prefix))
        self.seen.set()


def test_gpu_lines_without_numbers_are_left_out() -> None:
    text = "0, 87, 2048\n1, [N/A], 1024\nNVIDIA-SMI has failed because it could not talk to the driver\n"
    assert parse_nvidia_smi(text) == {"gpu.0.util": 87.0, "gpu.0.mem_gb": 2.0, "gpu.1.mem_gb": 1.0}


def test_the_memory_of_this_node_is_read() -> None:
    usage = NodeSampler().sample()
    assert 0 < usage["mem_gb"] < 100_000
    assert 0 <= usage["cpu_util"] <= 100


def test_samples_between_writes_are_averaged_and_the_last_are_not_lost() -> None:
    samples = iter([{"node.0.mem_gb": 1.0}, {"node.0.mem_gb": 3.0}])
    taken = threading.Event()

    def sample() -> dict[str, float]:
        value = next(samples, None)
        if value is None:
            taken.set()
            return {}
        return value

    sink = Sink()
    with NodeMonitor(sink, collection_interval_s=0.001, flush_interval_s=3600, sample=sample):
        assert taken.wait(60.0)
    assert sink.logged == [({"node.0.mem_gb": 2.0}, "ray")]


@pytest.mark.ray
@pytest.mark.slow
def test_every_node_of_a_cluster_is_sampled(ray_session: None) -> None:
    sink = Sink()
    with NodeMonitor(sink, collection_interval_s=0.01, flush_interval_s=0.01):
        assert sink.seen.wait(60)
    metrics, prefix = sink.logged[0]
    assert prefix == "ray"
    assert metrics["node.0.mem_gb"] > 0
