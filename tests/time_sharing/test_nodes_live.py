"""Nodes of an open pool leave and come back, on two Ray nodes: a job that trains on one goes on at the other from its
step, and trains every step once; engines of a running job come back with their node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._private.state import actors
from ray.util.placement_group import placement_group, remove_placement_group

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.time_sharing.agents.ray_reaper import actors_in, agent_namespace
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pipelines.shared_cluster import reservations
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.record_events import GroupTrained, StepFinished
from tests.end_to_end.test_runs import BASE, ROOT
from tests.time_sharing.watched import Watched, served
from tests.two_nodes import second_node

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

_SLOTS = 3
_THERE, _HERE = 0, _SLOTS  # the first slot of the node that leaves, and of the one that stays


@contextmanager
def first_on_second_node() -> Iterator[None]:
    """The pool's node 0 is the second Ray node: this one has too few free slots until that is reserved."""
    here = ray.get_runtime_context().get_node_id()
    held = placement_group([{"cpu_slot": 2}], strategy="STRICT_PACK", _soft_target_node_id=here)
    assert held.wait(30)

    def let_go() -> None:
        deadline = time.monotonic() + 60
        while 0 not in reservations() and time.monotonic() < deadline:
            time.sleep(0.2)
        remove_placement_group(held)

    thread = threading.Thread(target=let_go)
    thread.start()
    yield
    thread.join()


def job(folder: Path, model: Path, name: str, steps: int, **mapping: list[int]) -> Job:
    content = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml"),
        "policy": {"model_name": str(model)},
        "logger": {"log_dir": str(folder / "logs" / name), "tensorboard_enabled": False},
        "checkpointing": {"enabled": True, "checkpoint_dir": str(folder / "saved" / name), "save_period": 1000},
    }
    (folder / f"{name}_recipe.yaml").write_text(yaml.safe_dump(content))
    wrapper = {"nemo_config_path": f"{name}_recipe.yaml", **mapping}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(wrapper))
    (made,) = read_jobs([folder / f"{name}.yaml"], Pool(2, _SLOTS), [*BASE, f"grpo.max_num_steps={steps}"])
    return replace(made, options={**made.options, "rank_batch": 1}, measures_batch=False)


def submit_here(pool: Watched, job: Job) -> None:
    """Submits a job until its process is on this Ray node: Ray chooses one."""
    for _ in range(20):
        pool.ask("submit", job)
        namespace, (name,) = agent_namespace(job.name), actors_in(agent_namespace(job.name))
        actor = ray.get_actor(name, namespace=namespace)
        found: Any = actors(actor._actor_id.hex())
        if found["Address"]["NodeID"] == ray.get_runtime_context().get_node_id():
            return
        pool.ask("cancel", job.name)
        pool.until(lambda: pool.standing(job.name).outcome is not None)
    raise AssertionError("Ray never chose this node")


def test_a_node_leaves_while_a_job_trains_on_it_and_comes_back(
    ray_session: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    log_dir = tmp_path / "pool"
    log_dir.mkdir()
    moves = job(tmp_path, tiny_model, "moves", 6, infer_device_mapping=[_THERE, _HERE])
    stays = job(tmp_path, tiny_model, "stays", 1000, train_device_mapping=[_HERE], infer_device_mapping=[_THERE, _HERE])
    with second_node(tmp_path, _SLOTS) as ray_node:
        with first_on_second_node():
            actor: Any = open_pool(Pool(2, _SLOTS), CPU, log_dir, LIVE_LIMITS)
        pool = Watched(actor)
        try:
            assert [node.state for node in pool.ask("nodes")] == ["here", "here"]
            assert pool.ask("nodes")[0].ray_id == ray_node
            pool.ask("submit", moves)
            assert pool.standing("moves").train == (_THERE,)
            pool.until(lambda: pool.steps("moves") >= 2)
            said = pool.ask("drain_node", "0")
            assert said[1] == "moves: finishes its step, saves, and goes on where it has a place"
            assert pool.standing("moves").state == "moving"
            pool.until(lambda: pool.ask("nodes")[0].state == "away")
            assert 0 not in reservations()
            pool.until(lambda: pool.standing("moves").outcome is not None)
            moved = pool.standing("moves")
            assert moved.outcome is not None and moved.outcome.kind == "done", moved.outcome
            assert (moved.train, moved.infer) == ((_HERE,), (_HERE,))
            assert pool.ask("add_node", ray_node[:8])[0].endswith(": here")
            submit_here(pool, stays)
            pool.until(lambda: pool.steps("stays") >= 2)
            pool.ask("drain_node", ray_node[:8], 120.0)
            pool.until(lambda: pool.ask("nodes")[0].state == "away")
            steps = pool.steps("stays")
            pool.until(lambda: pool.steps("stays") > steps)
            pool.ask("add_node", "0")
            back = time.time()
            logs = tmp_path / "logs" / "stays"
            pool.until(lambda: any(shard == 0 and at > back for shard, at in served(logs)))
            assert not pool.standing("stays").moving
            pool.ask("drain", "stays")
            pool.until(lambda: pool.standing("stays").outcome is not None)
        finally:
            close_pool(actor)
    entries = list(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    assert check(entries) == []
    events = [entry.event for entry in entries if entry.source.partition("/")[0] == "moves"]
    assert [event.step for event in events if isinstance(event, StepFinished)] == list(range(6))
    trained = [event.group_id for event in events if isinstance(event, GroupTrained)]
    assert len(trained) == len(set(trained)) == 6 * 4
    kinds = [type(e.event) for e in entries if isinstance(e.event, ev.NodeDraining | ev.NodeAway | ev.NodeHere)]
    assert kinds == [ev.NodeDraining, ev.NodeAway, ev.NodeHere] * 2
