"""What a process measures of its own device."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from nemo_rl.distributed.accelerator_slots import resolve_accelerator
from nemo_rl.distributed.devices import allocated_bytes

CPU, MIB = torch.device("cpu"), 1 << 20


def test_allocated_bytes_of_a_cpu_slot_are_exact_whichever_thread_allocated_them() -> None:
    gc.collect()
    tensors: list[torch.Tensor] = []
    before = allocated_bytes(CPU)
    thread = threading.Thread(target=lambda: tensors.extend(torch.empty(n * MIB, dtype=torch.uint8) for n in (1, 8)))
    thread.start()
    thread.join()
    tensors.append(torch.empty(40 * MIB, dtype=torch.uint8))
    # What else runs in the tests' process allocates and frees a little at any time.
    assert 45 * MIB <= allocated_bytes(CPU) - before < 53 * MIB
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    assert abs(allocated_bytes(CPU) - before) < 4 * MIB


def test_gpus_are_counted_without_starting_cuda_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> bool:
        raise AssertionError("this process would become a client of the Multi-Process Service")

    monkeypatch.setattr(torch.cuda, "is_available", start)
    for count, kind in ((2, "cuda"), (0, "cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert resolve_accelerator("auto").kind == kind
