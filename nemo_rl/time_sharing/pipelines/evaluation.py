"""An evaluation on a shared pool: engines only, which come and go with their model.

Its weights never change: an engine that leaves keeps them on the host and serves again as soon as it is awake.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from nemo_rl.config import EvalMasterConfig
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.lent import LentPlacement


class EvaluationPipeline(LentPipeline):
    """An evaluation."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._config = cast("EvalMasterConfig", job.config)
        self._placement: LentPlacement | None = None

    def progress(self) -> Progress:
        """Problems answered so far, as steps."""
        placement = self._placement
        if placement is None or placement.answered[1] == 0:
            return Progress("starting", 0, 0, "")
        saved = self._config.eval.save_path
        folder = str(Path(saved).absolute()) if saved else ""
        return Progress("evaluation", *placement.answered, folder)

    def live(self) -> Outcome:
        """See `LentPipeline.live`; the score is the outcome's reason."""
        from nemo_rl.algorithms.evaluation import evaluate

        self._placement = self.placed(self._config.eval.num_tests_per_prompt)
        score = evaluate(self._config, self._placement)
        said = f"{score.metric} {score.value:.4f} on {score.problems} problems"
        return Outcome("done", said, steps=score.problems)
