"""A step whose agents branched, so that a sample has several rows: what each optimizer step trains, and what is left of
one that fails.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.step_trainer import StepTrainer
from nemo_rl.config import load_master_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import InProcessStore
from nemo_rl.utils.record import NullRecord
from nemo_rl.utils.timer import Timer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
ROWS = [1, 3, 1, 2]
"""Of each sample."""


class Workers:
    """A policy that writes down what it trains; its calls fail from the one whose number is `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.happened: list[Any] = []
        self._fails_at = fails_at

    def prepare_for_training(self) -> None: ...

    def begin_train_step(self, loss_fn: Any, *, gbs: int) -> None:
        self.happened.append(f"begin {gbs}")

    def train_microbatches(self, data: BatchedDataDict, timer: Any = None) -> None:
        if self._fails_at == len([what for what in self.happened if isinstance(what, list)]):
            raise RuntimeError("out of memory")
        self.happened.append(data["sample_index"].tolist())

    def finish_train_step(self) -> Any:
        self.happened.append("finish")
        return self._result()

    def submit_finish_train_step(self) -> Any:
        self.happened.append("finish")
        return SimpleNamespace(result=self._result)

    def submit_train(self, data: BatchedDataDict, loss_fn: Any, timer: Any = None) -> Any:
        self.happened.append(data["sample_index"].tolist())
        return SimpleNamespace(result=self._result)

    def abort_train_step(self) -> None:
        self.happened.append("abort")

    @staticmethod
    def _result() -> dict[str, Any]:
        return {"loss": torch.ones(1), "skipped_steps": 0, "all_mb_metrics": {"lr": [0.5]}, "total_flops": 2.0}


def _run(workers: Workers) -> Any:
    config = load_master_config(CONFIG, ["policy.train_global_batch_size=2"])
    return SimpleNamespace(
        config=config,
        policy=workers,
        store=InProcessStore(pad_token_id=0),
        timer=Timer(),
        loss_fn=None,
        record=NullRecord(),
        state=SimpleNamespace(step=0),
        progress=SimpleNamespace(phase=lambda name: None),
    )


def _experience(rows_of_samples: list[int]) -> Experience:
    sample_of = [sample for sample, count in enumerate(rows_of_samples) for _ in range(count)]
    size, names = len(sample_of), ("input_ids", "generation_logprobs", "token_mask", "advantages", "prev_logprobs")
    columns = {name: torch.ones(size, 3) for name in (*names, "reference_policy_logprobs")}
    columns |= {"input_lengths": torch.full((size,), 3), "sample_mask": torch.ones(size)}
    rows = {"prompt_number": torch.tensor(sample_of) // 2, "sample_number": torch.tensor(sample_of) % 2}
    return Experience(BatchedDataDict(sample_index=torch.arange(size), **columns), BatchedDataDict(rows))


def _train(workers: Workers, rows_of_samples: list[int]) -> Any:
    with StepTrainer(_run(workers)) as trainer:
        trainer.add(_experience(rows_of_samples))
        return trainer.finish(lambda: None).result


def test_an_optimizer_step_takes_all_rows_of_its_samples() -> None:
    workers = Workers()
    result = _train(workers, ROWS)
    assert workers.happened == ["begin 2", [0, 1, 2, 3], "finish", "begin 2", [4, 5, 6], "finish"]
    assert result["loss"].tolist() == [1.0, 1.0] and result["all_mb_metrics"] == {"lr": [0.5, 0.5]}
    assert result["total_flops"] == 4.0


def test_where_no_agent_branched_the_step_is_one_call() -> None:
    workers = Workers()
    _train(workers, [1, 1, 1, 1])
    assert workers.happened == [[0, 1, 2, 3]]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_step_that_fails_is_aborted(fails_at: int) -> None:
    workers = Workers(fails_at)
    with pytest.raises(RuntimeError, match="out of memory"):
        _train(workers, ROWS)
    assert workers.happened.count("abort") == 1 and workers.happened[-1] == "abort"
