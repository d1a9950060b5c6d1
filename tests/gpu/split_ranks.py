"""One rank of steps that several processes share, which writes what it found.

    python -m tests.gpu.split_ranks MODEL DEVICE OUTPUT CASES

CASES: overrides of each step, as JSON. The result is `one_step` of each.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from tests.models.policy_ranks import one_step

if __name__ == "__main__":
    model, device, output, cases = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    found = [one_step(model, world, [f"cluster.device={device}", *overrides]) for overrides in json.loads(cases)]
    Path(output).write_bytes(pickle.dumps(found))
    # Threads of communicators would keep the process.
    os._exit(0)
