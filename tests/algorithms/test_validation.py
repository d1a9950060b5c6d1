"""What a validation shows: samples from best to worst, as many as `logger.num_val_samples_to_print` says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from nemo_rl.algorithms.accelerators import OwnAccelerators
from nemo_rl.algorithms.grpo.run import GRPOState, ValidationParts
from nemo_rl.algorithms.grpo.step_reports import DeviceCount, StepReports
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.config import LoggerConfig, load_master_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import Trajectory
from nemo_rl.experience.store import InProcessStore, RolloutColumns, conversation_text
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.timer import Timer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


class Rollouts:
    def roll_out(self, batch: BatchedDataDict[Any], plan: Any, attempt: int) -> Any:
        rewards = torch.arange(batch.size, dtype=torch.float32)
        tokens = BatchedDataDict(
            input_ids=torch.zeros((batch.size, 2), dtype=torch.long),
            input_lengths=torch.full((batch.size,), 2),
            content=[f"answer number {row}" for row in range(batch.size)],
            conversation=[
                conversation_text(
                    [
                        {"role": "user", "content": f"question {row}"},
                        {"role": "assistant", "content": f"answer number {row}"},
                        {"role": "environment", "content": "once more"},
                        {"role": "assistant", "content": "again"},
                    ],
                    {"ground_truth": f"gold {row}"},
                )
                for row in range(batch.size)
            ],
        )
        return SimpleNamespace(
            columns=RolloutColumns(
                tokens,
                BatchedDataDict(
                    total_reward=rewards,
                    generated_lengths=torch.ones(batch.size),
                    truncated=torch.zeros(batch.size, dtype=torch.bool),
                ),
            ),
            samples=[Trajectory([], truncated=row % 2 == 0).outcome(1) for row in range(batch.size)],
        )


@pytest.mark.parametrize("shown", [0, 2])
def test_validation_shows_as_many_samples_as_asked_for(shown: int, tmp_path: Path) -> None:
    config = load_master_config(
        CONFIG, [f"logger.num_val_samples_to_print={shown}", "grpo.max_val_samples=4", "grpo.val_batch_size=4"]
    )
    terminal = io.StringIO()
    prompts = BatchedDataDict(
        task_name=["arithmetic"] * 4, idx=list(range(4)), loss_multiplier=torch.ones(4), length=torch.ones(4)
    )
    store = InProcessStore(0)
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        run: Any = SimpleNamespace(
            config=config,
            val_loader=[prompts],
            validation=ValidationParts(Rollouts(), {}, {}),  # type: ignore[arg-type]
            progress=RunProgress(1, console=Console(file=terminal, width=120)),
            timer=Timer(),
            accelerators=OwnAccelerators(None, Timer(), lambda name: None),
            state=GRPOState(),
            store=store,
            logger=logger,
            record=MemoryRecord(),
        )
        run.reports = StepReports(config, store, logger, run.record, run.progress, None, DeviceCount(1, 1, 0))
        validate(run, 0)
        run.reports.wait()
        [said] = [entry.event for entry in run.record.entries]
        assert (said.version, said.samples) == (0, 4)
        store.close()
    text = terminal.getvalue()
    assert ("answer number 3" in text) == ("answer number 0" in text) == bool(shown)
    assert "answer number 1" not in text
    # Turns with their roles and the expected answer, of the worst sample too.
    assert (
        ("user: question 0" in text)
        == ("expected: gold 0" in text)
        == ("environment: once more" in text)
        == bool(shown)
    )
    assert "validation at step 0: 50% of the samples were cut off" in text
    rows = [json.loads(line) for line in (tmp_path / "samples" / "val_data_step0.jsonl").read_text().splitlines()]
    assert [row["expected"] for row in rows] == [f"gold {row}" for row in range(4)]
    assert [turn["role"] for turn in rows[3]["messages"]] == ["user", "assistant", "environment", "assistant"]
