"""A Ray cluster has one control plane: a second one is refused by name, before it takes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.time_sharing.agents.actors import SchedulerInUse
from nemo_rl.time_sharing.agents.ray_reaper import agent_actor_name, agent_namespace, foreign_actors
from nemo_rl.time_sharing.opening import open_pool
from nemo_rl.time_sharing.protocol.topology import Pool

pytestmark = pytest.mark.ray


class Stranger:
    """An actor of another control plane."""

    def there(self) -> bool:
        return True


def _start(name: str, namespace: str) -> Any:
    actor: Any = ray.remote(Stranger).options(name=name, namespace=namespace, num_cpus=0).remote()
    assert ray.get(actor.there.remote(), timeout=60)
    return actor


def test_a_second_pool_on_a_cluster_is_refused_with_the_name_of_the_first(pool: Any, tmp_path: Path) -> None:
    about = ray.get(pool.about.remote(), timeout=60)
    with pytest.raises(SchedulerInUse, match=rf"the pool {about.name} is open .* its log in {about.log_dir}: submit"):
        open_pool(Pool(1, 1), CPU, tmp_path)
    assert ray.get(pool.standings.remote(), timeout=60) == []


@pytest.mark.parametrize("namespace", ["pipeline_ft_0123456789ab_NS", "rlix", "ROLL_cluster"])
def test_a_pool_is_refused_where_another_control_plane_lends_the_gpus(
    namespace: str, ray_session: None, tmp_path: Path
) -> None:
    actor = _start("coordinator", namespace)
    try:
        with pytest.raises(SchedulerInUse, match=rf"has the actors {namespace}/coordinator; end it"):
            open_pool(Pool(1, 1), CPU, tmp_path)
    finally:
        ray.kill(actor)


def test_what_is_left_of_a_pools_own_jobs_is_not_taken_for_another_control_plane(ray_session: None) -> None:
    left = [_start(name, agent_namespace("a")) for name in (agent_actor_name(7), "rank_0.7")]
    assert foreign_actors() == []
    for actor in left:
        ray.kill(actor)
