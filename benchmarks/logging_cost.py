"""What logging costs a step: metrics, run record and samples, at the demo's size and at 512 samples of 1,000 tokens.

    python benchmarks/logging_cost.py [--run LOG_DIR]

Prints the time that a step waits for its logging and, with a run's log directory, that time as a share of the run's
median step. Metrics, record and samples are written by a thread while the next step generates, whose time is printed
too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.grpo.step_reports import Backlog
from nemo_rl.config import LoggerConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.sample_log import sample_log_stage
from nemo_rl.experience.store import InProcessStore
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import RecordWriter
from nemo_rl.utils.record_events import GroupAdmitted, GroupCommitted, GroupTrained

COLUMNS = (
    "content",
    "rewards",
    "input_lengths",
    "sample_mask",
    "input_ids",
    "token_mask",
    "advantages",
    "generation_logprobs",
    "prev_logprobs",
)


def columns(samples: int, tokens: int) -> BatchedDataDict[Any]:
    """A step's columns, random."""
    generator = torch.Generator().manual_seed(0)
    floats = {
        name: -torch.rand(samples, tokens, generator=generator)
        for name in ("advantages", "generation_logprobs", "prev_logprobs")
    }
    return BatchedDataDict(
        {
            "content": ["a response of some length " * (tokens // 8)] * samples,
            "rewards": torch.rand(samples, generator=generator),
            "input_lengths": torch.full((samples,), tokens),
            "sample_mask": torch.ones(samples),
            "input_ids": torch.randint(0, 150_000, (samples, tokens), generator=generator),
            "token_mask": torch.ones(samples, tokens, dtype=torch.int64),
            **floats,
        }
    )


def measure(samples: int, tokens: int, group: int, steps: int) -> tuple[float, float]:
    """Median seconds that a step waits for its logging, and until all is written."""
    waited, written = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Logger(LoggerConfig(log_dir=folder, tensorboard_enabled=True)) as logger,
    ):
        record = RecordWriter(Path(folder) / "record.jsonl", source="driver")
        store, batch, reports = InProcessStore(0), columns(samples, tokens), Backlog("step-report")

        def report(step: int) -> None:
            stage = sample_log_stage(logger.samples_dir / f"train_data_step{step}.jsonl", {n: n for n in COLUMNS})
            store.apply(store.write(batch), stage)
            for prefix, count in (("train", 40), ("performance", 12), ("timing/train", 15)):
                logger.log_metrics({f"metric_{index}": float(index) for index in range(count)}, step, prefix)
            lengths = {"histogram/gen_tokens_length": [float(tokens)] * samples}
            logger.log_metrics(lengths, step, "train", step_finished=True)
            record.flush()

        for step in range(1, steps + 1):
            began = time.perf_counter()
            for prompt in range(samples // group):
                record.emit(GroupAdmitted(f"{step}-{prompt}", f"0-{prompt}", group, step))
                record.emit(GroupCommitted(f"{step}-{prompt}", step, group * tokens))
                record.emit(GroupTrained(f"{step}-{prompt}", step))
            reports.put(partial(report, step))
            waited.append(time.perf_counter() - began)
            reports.wait()
            written.append(time.perf_counter() - began)
        reports.close()
        record.close()
    return statistics.median(waited), statistics.median(written)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="log directory of a run of the demo")
    chosen = parser.parse_args()
    demo, demo_written = measure(512, 10, 8, 9)
    large, until_written = measure(512, 1000, 8, 9)
    for size, wait, written in (("   10", demo, demo_written), ("1,000", large, until_written)):
        print(
            f"512 samples of {size} tokens: a step waits {1e3 * wait:5.1f} ms; all is written after "
            f"{1e3 * written:.0f} ms"
        )
    if chosen.run is not None:
        step = statistics.median(read_metrics(chosen.run).scalars("timing/train/total_step_time")[1])
        print(f"{demo / step:.2%} of the run's median step of {step:.2f} s")


if __name__ == "__main__":
    main()
