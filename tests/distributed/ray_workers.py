"""Workers of the worker-group tests, importable by Ray's processes."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch

from nemo_rl.config.errors import UserError


class Probe:
    """Says who it is, and fails when told to."""

    def __init__(self, fail_at_start: str = "") -> None:
        if fail_at_start:
            raise ValueError(fail_at_start)
        self.rank = int(os.environ["RANK"])

    def environment(self, *names: str) -> dict[str, str]:
        return {
            name: os.environ.get(name, "")
            for name in (
                "RANK",
                "LOCAL_RANK",
                "WORLD_SIZE",
                "NODE_RANK",
                "MASTER_ADDR",
                "MASTER_PORT",
                "OMP_NUM_THREADS",
            )
        }

    def pid(self) -> int:
        return os.getpid()

    def echo(self, data: Any = None, common: Any = None) -> tuple[int, Any, Any]:
        return self.rank, data, common

    def join(self) -> None:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))

    def reduce(self, failing_rank: int, kill: bool) -> float:
        """A collective that one rank never reaches."""
        if self.rank == failing_rank:
            time.sleep(0.5)
            if kill:
                os.kill(os.getpid(), 9)
            raise ArithmeticError("planted")
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return float(value)

    def refuse(self) -> None:
        raise UserError("key: wrong; put it right")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
