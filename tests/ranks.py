"""Runs a function on every rank of a small gloo world, one process per rank, without Ray.

A spawned launcher imports the function's module once and forks the ranks, since importing torch costs more than most
tests.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

from nemo_rl.distributed.ports import free_ports


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """`function(*args)` on ranks 0..world-1, each with torch.distributed's variables set; results in rank order.

    Raises:
        RuntimeError: A rank raised, ended without an answer or passed the deadline; all are ended then.
    """
    context = mp.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    launcher = context.Process(target=_launch, args=(there, function, world, args, timeout_s))
    launcher.start()
    there.close()
    try:
        results, failure = here.recv() if here.poll(timeout_s + 60.0) else (None, f"no answer within {timeout_s:.0f} s")
    except EOFError:
        results, failure = None, f"the launcher ended with exit code {launcher.exitcode}"
    finally:
        launcher.join(timeout=10.0)
        launcher.kill()
    if failure is not None:
        raise RuntimeError(failure)
    return results


def _launch(answer: Any, function: Callable[..., Any], world: int, args: tuple[Any, ...], timeout_s: float) -> None:
    context = mp.get_context("fork")
    answers: Any = context.Queue()
    (port,) = free_ports(1)
    processes = [
        context.Process(target=_rank, args=(function, rank, world, port, answers, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        answer.send((_gather(answers, processes, time.monotonic() + timeout_s), None))
    except RuntimeError as error:
        answer.send((None, str(error)))
    finally:
        for process in processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()


def _gather(answers: Any, processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        try:
            rank, result, failure = answers.get(timeout=1.0)
        except Empty:
            gone = [
                rank
                for rank, process in enumerate(processes)
                if process.exitcode not in (None, 0) and rank not in results
            ]
            if gone or time.monotonic() > deadline:
                raise RuntimeError(f"ranks {gone or 'all'} gave no answer") from None
            continue
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed:\n{failure}")
        results[rank] = result
    return [results[rank] for rank in range(len(processes))]


def _rank(function: Callable[..., Any], rank: int, world: int, port: int, answers: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        answers.put((rank, function(*args), None))
    except BaseException:  # noqa: BLE001 - whatever happened is the parent's to report
        answers.put((rank, None, traceback.format_exc()))
