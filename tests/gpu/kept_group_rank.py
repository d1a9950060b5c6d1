"""One member of `test_kept_group`: uses a group, holds it beyond its deadline, uses it again, and leaves it.

python -m tests.gpu.kept_group_rank RANK PORT OUTPUT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from nemo_rl.weight_sync.transports import GroupMeeting, KeptGroup

DEADLINE_S = 15.0
ALONE_S = 10.0


def main() -> None:
    """Writes what was received, and free memory with the group and without."""
    rank, port, output = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = KeptGroup()
    meeting = GroupMeeting("members-1", 2, "127.0.0.1", port, keep=True)
    received = []
    for number in (1.0, 2.0):
        tensor_N = torch.full((1 << 20,), number if rank == 0 else 0.0, device=device)
        groups.join(meeting, rank, DEADLINE_S, device).broadcast(tensor_N)
        received.append([float(tensor_N.min()), float(tensor_N.max())])
        if number == 1.0:
            time.sleep(DEADLINE_S + 5.0)
    held = torch.cuda.mem_get_info(device)[0]
    # The sender leaves first, and its store with it: the receiver stays unharmed until it leaves itself.
    if rank:
        time.sleep(ALONE_S)
    groups.drop()
    torch.cuda.synchronize(device)
    freed = torch.cuda.mem_get_info(device)[0]
    output.write_text(json.dumps({"received": received, "held": held, "freed": freed}))


if __name__ == "__main__":
    main()
