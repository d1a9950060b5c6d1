"""Sources of a step's rollouts: live generation, with or without recording, and replay of a recording.

A recording holds the columns of every generation batch, so a run can be repeated without an engine, for equality tests,
debugging and profiling. Invariant: replay yields the recorded tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.data_plane.field_schema import replayed_fields
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import RolloutPlan, RolloutRunner, SampleOutcome, Trajectory
from nemo_rl.experience.store import RolloutColumns, in_process, rollout_columns, sample_starts
from nemo_rl.models.generation.decisions import (
    Recording,
    check_columns,
    columns_of,
    decision_metrics,
)
from nemo_rl.models.policy.router_replay import validates_every_batch
from nemo_rl.utils.record import Entry
from nemo_rl.utils.route_trace import route_trace

if TYPE_CHECKING:
    from nemo_rl.utils.log_backends import Metrics


class RecordingError(UserError, FileNotFoundError):
    """A recording is incomplete."""


@dataclass(frozen=True)
class Rollout:
    """Columns of a generation batch and its samples' outcomes; where it was made in another process, also entries for
    the run record, and the shards that were found dead there.
    """

    columns: RolloutColumns
    samples: list[SampleOutcome] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)  # of the batch as a whole, besides those of its samples
    events: tuple[Entry, ...] = ()
    lost_shards: Mapping[int, str] = field(default_factory=dict)


class RolloutSource(Protocol):
    """Gives the rollouts of a numbered batch of prompts."""

    def roll_out(self, batch: BatchedDataDict, plan: RolloutPlan, attempt: int) -> Rollout:
        """Rolls out generation batch `attempt` (from 0) of step `plan.step`."""
        ...


class LiveRollouts:
    """A `RolloutSource` that generates.

    Args:
        pad_token_id: Padding of `input_ids`.
        multiple: Widths are rounded up to a multiple of this.
        conversations: Whether columns hold each sample's messages and expected answer, to be shown.
        branches: Whether further branches of agents' sessions become rows, as training wants them.
        recording: Decisions of generation that the columns hold; none by default.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        *,
        pad_token_id: int,
        multiple: int,
        conversations: bool = False,
        branches: bool = True,
        recording: Recording | None = None,
    ) -> None:
        self._runner = runner
        self._pad_token_id = pad_token_id
        self._multiple = multiple
        self._conversations = conversations
        self._branches = branches
        self._recording = recording
        self._checked = False

    def roll_out(self, batch: BatchedDataDict, plan: RolloutPlan, attempt: int) -> Rollout:
        return self._finished(batch, self._runner.run(batch, plan), plan)

    async def roll_out_group(self, batch: BatchedDataDict, plan: RolloutPlan) -> Rollout:
        """The samples of one prompt, on the dispatch loop; with a column of each token's weight version."""
        return self._finished(batch, await self._runner.run_group(batch, plan), plan, token_versions=True)

    def _finished(
        self,
        batch: BatchedDataDict,
        trajectories: list[Trajectory],
        plan: RolloutPlan,
        *,
        token_versions: bool = False,
    ) -> Rollout:
        columns = rollout_columns(
            batch,
            trajectories,
            pad_token_id=self._pad_token_id,
            multiple=self._multiple,
            token_versions=token_versions,
            conversations=self._conversations,
            branches=self._branches,
            recording=self._recording,
        )
        metrics: Metrics = {}
        if self._recording is not None:
            tokens = in_process(columns.tokens)
            if not self._checked or validates_every_batch():
                check_columns(tokens, self._recording, f"rollouts of step {plan.step + 1}")
                self._checked = True
            metrics = decision_metrics(tokens)
            if (trace := route_trace()) is not None:
                trace.produced(plan.step, tokens)
        return Rollout(columns, [one.outcome(plan.limits.max_turns) for one in trajectories], metrics)


class RecordedRollouts:
    """A `RolloutSource` that generates through another one and writes every batch to a directory."""

    def __init__(self, source: RolloutSource, directory: str) -> None:
        self._source = source
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def roll_out(self, batch: BatchedDataDict, plan: RolloutPlan, attempt: int) -> Rollout:
        rollout = self._source.roll_out(batch, plan, attempt)
        columns = rollout.columns
        plain = {
            "tokens": in_process(columns.tokens).get_dict(),
            "rows": columns.rows.get_dict(),
            "samples": [list(sample) for sample in rollout.samples],
            "metrics": rollout.metrics,
        }
        path = _file(self._directory, plan.step, attempt)
        torch.save(plain, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        return rollout


class ReplayedRollouts:
    """Replays the batches that `RecordedRollouts` wrote. `recording`: decisions of generation that the columns must
    hold; others are left out.
    """

    def __init__(self, directory: str, recording: Recording | None = None) -> None:
        self._directory = Path(directory)
        self._recording = recording
        if not any(self._directory.glob("rollout_step*.pt")):
            raise RecordingError(
                f"grpo.rollout_replay={directory}: there is no rollout_step*.pt; record a run with "
                "grpo.rollout_record first"
            )

    def roll_out(self, batch: BatchedDataDict, plan: RolloutPlan, attempt: int) -> Rollout:
        """See `RolloutSource`. Raises RecordingError: the step was not recorded, or for another number of samples;
        RecordedDecisionsError: generation's decisions were not recorded, or are of another model.
        """
        path = _file(self._directory, plan.step, attempt)
        if not path.exists():
            raise RecordingError(f"{path} does not exist: the recording ends before step {plan.step + 1}")
        plain = torch.load(path, weights_only=True)
        tokens: BatchedDataDict = BatchedDataDict(plain["tokens"])
        columns = RolloutColumns(tokens, BatchedDataDict({"task_name": list(batch["task_name"]), **plain["rows"]}))
        if (samples := int(sample_starts(columns.rows).sum())) != batch.size:
            raise RecordingError(
                f"{path} holds {samples} samples, this run needs {batch.size}; batch sizes must "
                "equal the recorded run's"
            )
        replayed = columns_of(self._recording)
        for name in replayed_fields(tokens):
            if name not in replayed:
                del tokens[name]
        if self._recording is not None:
            check_columns(tokens, self._recording, f"grpo.rollout_replay: {path}")
        return Rollout(columns, [SampleOutcome(*sample) for sample in plain["samples"]], plain["metrics"])


def _file(directory: Path, step: int, attempt: int) -> Path:
    return directory / f"rollout_step{step + 1}_{attempt}.pt"
