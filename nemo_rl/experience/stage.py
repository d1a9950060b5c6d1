"""Token stages: functions over per-token columns that run where the rows are.

A stage sees some rows of a batch, writes per-token columns for them and sends back scalars per row; it never sees other
rows, so it gives the same bits whether it runs in the driver's process or on the data plane. A statistic over all rows
is two stages with a reduction by the driver between them. Knows no store.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class StageOutput:
    """What a stage made of its rows.

    Attributes:
        columns: new per-token columns [B, S], which stay with the rows.
        rows: scalars per row [B], which travel to the driver.
    """

    columns: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]


@dataclass(frozen=True)
class TokenStage:
    """A stage with the columns it declares. Can be pickled: `run` is a module-level function, `params` are plain
    values.

    Attributes:
        run: called with the columns it reads and `params`.
        reads: columns it needs.
        writes: columns it makes.
        params: keyword arguments of `run`.
    """

    run: Callable[..., StageOutput]
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For logs and timers."""
        return self.run.__name__

    def __call__(self, columns: BatchedDataDict) -> StageOutput:
        """Run on some rows.

        Raises:
            KeyError: a declared column is missing.
        """
        missing = [name for name in self.reads if name not in columns]
        if missing:
            raise KeyError(f"stage {self.name} reads {missing}, which the batch lacks; it has {sorted(columns)}")
        return self.run(columns, **self.params)
