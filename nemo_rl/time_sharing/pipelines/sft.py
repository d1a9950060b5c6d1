"""An SFT run on a shared pool: whole GPUs, asked for like any training, and given back between steps.

It registers no generation of its own, so it has no demand and its ranks get no commands. Invariants: training touches
its GPUs only while they are granted; between two slices everything of it lies on the host.
"""

from __future__ import annotations

from typing import cast

from nemo_rl.algorithms.sft.assembly import setup
from nemo_rl.algorithms.sft.driver import SFTRun, sft_train
from nemo_rl.config import SFTMasterConfig
from nemo_rl.time_sharing.pipelines.grpo import TrainingPipeline
from nemo_rl.time_sharing.pipelines.lent import LentPlacement


class SFTPipeline(TrainingPipeline[SFTRun]):
    """An SFT run."""

    def setup(self, placement: LentPlacement) -> SFTRun:
        return setup(cast("SFTMasterConfig", self._job.config), placement=placement)

    def drive(self, run: SFTRun) -> None:
        sft_train(run)
