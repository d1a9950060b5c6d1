"""What a rank of the tests of resumed schedules runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nemo_rl.loss import ClippedPGLossFn
from tests.models.policy_ranks import ROWS, make_worker, run_config, shard_of, training_batch


def resumed_rates(model: str, folder: str, overrides: Sequence[str], changed: Sequence[str]) -> dict[str, list[float]]:
    """Learning rates of three steps: of a run with the changed overrides; of the last one alone, resumed with them from
    the second step of the unchanged run, with its optimizer's state and without.
    """
    before, after = run_config(model, 1, *overrides), run_config(model, 1, *overrides, *changed)
    data, loss = training_batch(), ClippedPGLossFn(before.loss_fn)

    def rate(worker: object) -> float:
        part = shard_of(worker, data)  # type: ignore[arg-type]
        return float(worker.train(part, loss, eval_mode=False, gbs=ROWS, mbs=2)["lr"])  # type: ignore[attr-defined]

    first, whole = make_worker(before), make_worker(after)
    seen = {"unchanged": [rate(first) for _ in range(2)], "changed": [rate(whole) for _ in range(3)]}
    first.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    while not first.checkpoint_written():
        time.sleep(0.02)
    weights = f"{folder}/weights"
    seen["with state"] = [rate(make_worker(after, weights_path=weights, optimizer_path=f"{folder}/optimizer"))]
    seen["without state"] = [rate(make_worker(after, weights_path=weights, steps_done=2))]
    return seen
