"""Whole runs of `examples/run_grpo.py`: equal runs are equal, an interrupted run goes on as if it had not been, and
nothing is left behind.
"""

from __future__ import annotations

import glob
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import PolicyStarted, RequestFinished, RequestSubmitted
from tests import forks
from tests.data_plane.conftest import has_mooncake, require_mooncake
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
STEPS = 4
BASE = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "data.validation=null",
    "env.parity.class=tests.end_to_end.parity.Parity",
    "data.train.env_name=parity",
    # As many rows are read before a run begins.
    "data.train.num_problems=96",
    "data.train.held_out=0",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.logprob_batch_size=8",
    "policy.sequence_packing.train_mb_tokens=64",
    "policy.optimizer.kwargs.lr=0.001",
    "checkpointing.save_period=1",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=null",
    "logger.tensorboard_enabled=false",
)


@dataclass
class Command:
    """A run as a user starts it, in a folder of its own."""

    model: Path
    folder: Path
    config: str = "grpo_arithmetic_cpu.yaml"
    script: tuple[str, ...] = ("examples/run_grpo.py", "--config")
    processes: set[int] = field(default_factory=set)
    """Those of the run that were seen while it was waited for."""

    def start(self, *overrides: str) -> Any:
        """The process; everything it starts carries a mark of its own."""
        self.mark = uuid.uuid4().hex
        places = [
            f"policy.model_name={self.model}",
            f"logger.log_dir={self.folder}/logs",
            f"checkpointing.checkpoint_dir={self.folder}/checkpoints",
        ]
        line = [*self.script, f"examples/configs/{self.config}", *BASE, *places, *overrides]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "NRL_TEST_RUN": self.mark,
            "NRL_OBJECT_STORE_BYTES": str(256 << 20),
        }
        with open(self.folder / "output.txt", "a") as log:
            return forks.start(line, environment, log.fileno())

    def finish(self, *overrides: str) -> None:
        """Runs to the end, which must be a good one."""
        self.ends_well(self.start(*overrides))

    def ends_well(self, process: Any) -> None:
        """Waits for the end of a started run, which must be a good one."""
        deadline = time.monotonic() + 600
        while process.poll() is None:
            assert time.monotonic() < deadline, self.output()
            self.processes.update(self.left())
            time.sleep(0.5)
        assert process.returncode == 0, self.output()

    def is_of_run(self, pid: int) -> bool:
        """Whether a process belongs to the last run, and lives."""
        try:
            process = psutil.Process(pid)
            return process.environ().get("NRL_TEST_RUN") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def output(self) -> str:
        """What all runs in this folder have written."""
        return (self.folder / "output.txt").read_text()

    def wait_for_checkpoint(self, process: Any, step: int) -> None:
        """Waits until a checkpoint is visible."""
        deadline = time.monotonic() + 600
        while not (self.checkpoint(step)).exists():
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step}"

    def weights(self, step: int) -> Any:
        return load_file(self.checkpoint(step) / "policy" / "weights" / "model.safetensors")

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The `train/` metrics of every step, over all runs in this folder."""
        steps: dict[int, dict[str, Any]] = {}
        for name, series in read_metrics(self.folder / "logs").series.items():
            if name.startswith("train/"):
                for step, value in series.items():
                    steps.setdefault(step, {})[name] = value
        return steps

    def left(self) -> list[int]:
        """Processes of the last run that still live."""
        return [pid for pid in psutil.pids() if self.is_of_run(pid)]

    def shared_memory(self) -> list[str]:
        """What processes of the run made in shared memory, which bears its maker's number, and did not remove."""
        return [name for pid in self.processes for name in glob.glob(f"/dev/shm/nemo_rl-{pid}-*")]


def assert_equal_weights(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    assert all((got[name] == want[name]).all() for name in want)


def test_a_run_learns_and_its_engines_agree(whole: Command) -> None:
    steps = whole.metrics()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for metrics in steps.values():
        assert 1.0 <= metrics["train/token_mult_prob_error"] <= 1.001
        assert abs(metrics["train/gen_kl_error"]) < 1e-3
    assert any(metrics["train/grad_norm"] > 0 for metrics in steps.values())
    first, last = whole.weights(1), whole.weights(STEPS)
    assert any((first[name] != last[name]).any() for name in first)
    assert not whole.left()
    assert len(whole.processes) > 2  # Driver, trainer and engine at least, or the next line would look at nothing.
    assert not whole.shared_memory()
    logs = whole.folder / "logs" / "exp_000"
    assert (logs / "report.html").exists()
    (trains,) = [entry.event for entry in read_record(logs / "record.jsonl") if isinstance(entry.event, PolicyStarted)]
    assert trains == PolicyStarted("dtensor", "transformers:Qwen3ForCausalLM, packed attention (sdpa)", 1)


OWN_SLOTS = (
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
)
# With generation beside training and with slots of its own, one of several engines: a storage knows nothing of where
# engines are.
ON_THE_DATA_PLANE = {
    "simple": (*OWN_SLOTS, "policy.generation.vllm_cfg.engines_per_gpu=2"),
    "mooncake_cpu": (),
}


@pytest.fixture(scope="module")
def data_plane_runs(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Command, Any]]]:
    """A run under way on each storage; what the tests do beside them is what happens to other users of a machine."""
    runs: dict[str, tuple[Command, Any]] = {}
    for backend, placement in ON_THE_DATA_PLANE.items():
        if backend == "mooncake_cpu" and not has_mooncake():
            continue
        command = Command(tiny_model, tmp_path_factory.mktemp(backend))
        sizes = ("data_plane.global_segment_size=268435456", "data_plane.local_buffer_size=67108864")
        runs[backend] = (
            command,
            command.start(
                "grpo.max_num_steps=2", "data_plane.enabled=true", f"data_plane.backend={backend}", *sizes, *placement
            ),
        )
    yield runs
    for _, process in runs.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.usefixtures("data_plane_runs")
def test_a_run_that_is_killed_and_interrupted_ends_as_if_it_had_not_been(whole: Command, tmp_path: Path) -> None:
    command = Command(whole.model, tmp_path)
    process = command.start()
    command.wait_for_checkpoint(process, 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_gone(command.left())

    process = command.start()
    command.wait_for_checkpoint(process, 2)
    # Ctrl-C reaches every process of the terminal.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130, command.output()
    assert "interrupted: ending workers" in command.output()
    wait_until_gone(command.left())
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(command.checkpoint(2) / "policy" / "weights")

    command.finish()
    assert not command.left()
    assert_equal_weights(command.weights(STEPS), whole.weights(STEPS))
    assert command.metrics() == whole.metrics()


def test_replayed_rollouts_train_the_same_weights_without_an_engine(whole: Command, tmp_path: Path) -> None:
    command = Command(whole.model, tmp_path)
    command.finish(f"grpo.rollout_replay={whole.folder}/rollouts")
    assert_equal_weights(command.weights(STEPS), whole.weights(STEPS))
    assert command.metrics() == whole.metrics()


@pytest.mark.parametrize("backend", list(ON_THE_DATA_PLANE))
def test_a_run_on_the_data_plane_wherever_its_engines_are_trains_the_same(
    backend: str, whole: Command, data_plane_runs: dict[str, tuple[Command, Any]]
) -> None:
    if backend == "mooncake_cpu":
        require_mooncake()
    command, process = data_plane_runs[backend]
    command.ends_well(process)
    assert_equal_weights(command.weights(2), whole.weights(2))
    assert {step: metrics for step, metrics in whole.metrics().items() if step <= 2} == command.metrics()
    assert not command.left()
    # Requests that another process sends are in the record too, each with its end.
    entries = list(read_record(next(command.folder.glob("logs/exp_*/record.jsonl"))))
    begun = [e.event.request_id for e in entries if isinstance(e.event, RequestSubmitted) and e.source == "generation"]
    ended = [e.event.request_id for e in entries if isinstance(e.event, RequestFinished) and e.source == "generation"]
    assert sorted(begun) == sorted(ended) and len(begun) >= 2 * 16
    assert check(entries) == []
