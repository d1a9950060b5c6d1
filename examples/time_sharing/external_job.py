"""Two jobs that are no RL pipelines share two GPUs of a pool: one takes both, yields one when the other needs it, and
gets it back.

    python examples/time_sharing/external_job.py

It starts Ray on this machine, needs no GPU (the jobs only say what they would do with theirs), takes about twenty
seconds and leaves nothing behind but its records, which the history checker has read. Copy `Job`: every job that the
scheduler serves is such an actor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.time_sharing.agents.actors import RayLink, start_scheduler, stop_scheduler
from nemo_rl.time_sharing.agents.external import ExternalJob
from nemo_rl.time_sharing.agents.ray_reaper import agent_actor_name, agent_namespace
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, Command, Limits, Reply
from nemo_rl.utils.record import RecordWriter

LIMITS = Limits(
    heartbeat_s=0.5, lease_s=20.0, retry_s=0.5, min_hold_s=1.0, aging_s=2.0, replan_s=0.5, plan_interval_s=0.05
)
WAIT_S = 60.0


class Job:
    """A job of its own kind: an actor that registers, holds an `ExternalJob`, and hands on what the scheduler says to
    it.
    """

    def __init__(self, name: str, gpus: list[int], scheduler: Any, log_dir: str, incarnation: int) -> None:
        self._name = name
        # One rank is one GPU here; with {ACTOR_INFER: 8} it would be eight of one node, acquired and yielded together.
        topology = ray.get(
            scheduler.register.remote(
                name, "examples", {ACTOR_INFER: 1}, {ACTOR_INFER: gpus}, {"incarnation": incarnation}
            ),
            timeout=WAIT_S,
        )
        record = RecordWriter(Path(log_dir) / f"{name}.{incarnation}.jsonl", source=f"{name}/driver")
        # From here on a heartbeat goes out every heartbeat_s, whatever the job does.
        self._client = ExternalJob(
            topology, incarnation, RayLink(scheduler), record, LIMITS, asked_to_yield=self._make_room
        )
        self._record = record

    # What the scheduler calls.

    def command(self, command: Command) -> None:
        self._client.command(command)

    def heard(self, reply: Reply) -> None:
        self._client.heard(reply)

    def rank_ended(self, rank: int) -> None:
        self._client.rank_ended(rank)

    # What the job does.

    def acquire(self, ranks: int) -> list[tuple[int, ...]]:
        return self._client.acquire(ranks, WAIT_S)

    def held(self) -> list[tuple[int, ...]]:
        return self._client.held()

    def release(self) -> None:
        self._client.release(WAIT_S)
        self._record.close()

    def _make_room(self, rank: int) -> None:
        """A real job ends its work on these GPUs here, and frees their memory, before it says so."""
        self._client.yielded(rank)


def start_job(name: str, gpus: list[int], scheduler: Any, log_dir: str, incarnation: int = 0) -> Any:
    """The job's actor, under the name by which the scheduler finds it; after a crash, start it with the next
    incarnation.
    """
    options = {
        "name": agent_actor_name(incarnation),
        "namespace": agent_namespace(name),
        "num_cpus": 0,
        "max_concurrency": 8,
    }
    return ray.remote(Job).options(**options).remote(name, gpus, scheduler, log_dir, incarnation)


def gpus_of(job: Any) -> list[int]:
    return [gpu for rank in ray.get(job.held.remote(), timeout=WAIT_S) for gpu in rank]


def share(scheduler: Any, log_dir: str) -> None:
    """The story that the module tells."""
    batch = start_job("batch", [0, 1], scheduler, log_dir)
    ray.get(batch.acquire.remote(2), timeout=2 * WAIT_S)
    print(f"batch asked for two GPUs and has {gpus_of(batch)}")
    urgent = start_job("urgent", [0, 1], scheduler, log_dir)
    ray.get(urgent.acquire.remote(1), timeout=2 * WAIT_S)
    print(f"urgent asked for one: batch was asked to yield, and urgent has {gpus_of(urgent)}, batch {gpus_of(batch)}")
    time.sleep(2 * LIMITS.heartbeat_s)
    ray.get(urgent.release.remote(), timeout=2 * WAIT_S)
    # The request of batch still stands; asking again only waits for what is missing.
    ray.get(batch.acquire.remote(2), timeout=2 * WAIT_S)
    print(f"urgent released, and batch has {gpus_of(batch)} again")
    ray.get(batch.release.remote(), timeout=2 * WAIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--log-dir", type=Path, help="where the records go; a new folder under the system's temporary one if not given"
    )
    log_dir = parser.parse_args().log_dir or Path(tempfile.mkdtemp(prefix="time_sharing_"))
    log_dir.mkdir(parents=True, exist_ok=True)
    init_ray(device="cpu", cpu_slots=2)
    try:
        scheduler = start_scheduler(log_dir, Pool(nodes=1, gpus_per_node=2), LIMITS)
        try:
            share(scheduler, str(log_dir))
        finally:
            stop_scheduler(scheduler)
    finally:
        shutdown_ray()
    violations = check(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    if violations:
        raise SystemExit(f"records in {log_dir}: " + "; ".join(str(violation) for violation in violations))
    print(f"records in {log_dir}: every invariant held")


if __name__ == "__main__":
    main()
