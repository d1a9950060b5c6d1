"""One rank of `test_communicators`: trains with communicators dropped before each step, and without; writes free memory
and results.

    python -m tests.gpu.communicator_rank BACKEND MODEL OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.policy_worker import PolicyWorker
from tests.gpu.test_communicators import CASES, TIMES
from tests.models.policy_ranks import MEGATRON, ROWS, run_config, shard_of, training_batch


def _train(worker: PolicyWorker, loss: Any) -> Any:
    data = shard_of(worker, training_batch())
    return worker.train(data, loss, eval_mode=False, gbs=ROWS, mbs=2)["loss"]


def measure(backend: str, model: str) -> dict[str, Any]:
    """Free bytes with and without communicators, losses, and whether weights equal those of a worker that keeps its
    communicators.
    """
    overrides = [*(MEGATRON if backend == "megatron" else ()), *CASES[backend], "cluster.device=cuda"]
    config = run_config(model, 2, *overrides)
    loss = ClippedPGLossFn(config.loss_fn)
    seen: dict[str, Any] = {"with": [], "without": [], "losses": []}
    worker = PolicyWorker(config.policy, init_reference_model=False)
    worker.build()
    for _ in range(TIMES):
        # Using communicators is what makes them take their memory.
        seen["losses"].append(_train(worker, loss))
        worker.release_cached_memory()
        torch.cuda.synchronize()
        seen["with"].append(torch.cuda.mem_get_info()[0])
        worker.drop_communicators()
        torch.cuda.synchronize()
        seen["without"].append(torch.cuda.mem_get_info()[0])
    worker.backend.rebuild_communicators()
    seen["weights"] = worker.weight_checksums()
    kept = PolicyWorker(config.policy, init_reference_model=False)
    kept.build()
    seen["losses kept"] = [_train(kept, loss) for _ in range(TIMES)]
    seen["weights kept"] = kept.weight_checksums()
    return seen


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], sys.argv[2])))
