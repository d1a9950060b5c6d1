"""Samples as JSON lines, written where their rows are: one object per row, token columns without their padding.

A token stage like any other, so that samples never travel through the driver only to be logged. Invariant: line i of a
file is row i of the batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from nemo_rl.config.errors import why_not_written
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import StageOutput, TokenStage
from nemo_rl.utils.logger import write_rows

logger = logging.getLogger(__name__)


def sample_log_stage(path: Path, columns: Mapping[str, str], *, append: bool = False) -> TokenStage:
    """The stage that writes a file.

    Args:
        path: The file; on a cluster, on storage that the driver's node sees.
        columns: Columns to write, with the name of each in the file, in order.
        append: Add to the file instead of replacing it.
    """
    reads = tuple(dict.fromkeys([*columns, "input_lengths"]))
    return TokenStage(write_samples, reads, params={"path": str(path), "names": dict(columns), "append": append})


def write_samples(columns: BatchedDataDict, *, path: str, names: Mapping[str, str], append: bool) -> StageOutput:
    """Writes one line per row; a conversation is written as its `messages` and the `expected` answer."""
    lengths = columns["input_lengths"].tolist()
    written = {name: _per_row(columns[column], lengths) for column, name in names.items() if column != "conversation"}
    if "conversation" in names:
        samples = [json.loads(text) for text in columns["conversation"]]
        written |= {name: [sample[name] for sample in samples] for name in ("messages", "expected")}
    write_rows(Path(path), written, append=append)
    return StageOutput({}, {})


def _per_row(column: object, lengths: list[int]) -> object:
    if not isinstance(column, torch.Tensor) or column.ndim < 2:
        return column
    return [row[:length] for row, length in zip(column.cpu().numpy(), lengths, strict=True)]


class SampleFiles:
    """Writes sample files; if that fails, warns once and goes on."""

    def __init__(self) -> None:
        self._warned = False

    @contextmanager
    def best_effort(self) -> Generator[None]:
        """An `OSError` inside is a warning, the first time."""
        try:
            yield
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            if not self._warned:
                why = why_not_written(error)
                logger.warning(
                    "samples=not_written path=%s reason=%s; the run goes on without such files where they cannot be "
                    "written, and says this once",
                    error.filename,
                    why,
                )
            self._warned = True
