"""Registration: every mistake is refused with the pipeline, the cluster and the GPU in the message."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from nemo_rl.time_sharing.protocol import topology as topo
from nemo_rl.time_sharing.protocol.topology import Pool, register

POOL = Pool(2, 4)
GOOD: dict[str, Any] = {
    "tps": {"actor_train": 1, "actor_infer": 2},
    "mappings": {"actor_train": [0, 1], "actor_infer": [0, 1, 2, 3]},
}


def attempt(
    tps: dict[str, Any] | None = None, mappings: dict[str, Any] | None = None, name: str = "p", **options: Any
) -> topo.Topology:
    return register(
        POOL, name, "ns", {**GOOD["tps"], **(tps or {})}, {**GOOD["mappings"], **(mappings or {})}, **options
    )


def test_a_good_registration_has_one_table_of_ranks() -> None:
    assert attempt().ranks == ((0, 1), (2, 3))
    assert attempt().training_gpus == {0, 1}


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (topo.UnknownCluster, "'judge': unknown", {"tps": {"judge": 1}, "mappings": {"judge": [0]}}),
        (topo.DuplicateGpu, "GPU 1 is named twice", {"mappings": {"actor_train": [1, 1]}}),
        (topo.DuplicateGpu, "GPU 0 is named twice", {"mappings": {"actor_train": [0, 1, 0]}}),
        (topo.UnsortedMapping, "GPU 0 comes after 1", {"mappings": {"actor_train": [1, 0]}}),
        (topo.GpuOutsidePool, "GPU 8 is outside the pool of 8", {"mappings": {"actor_train": [8]}}),
        (topo.GpuOutsidePool, "GPU -1 is outside", {"mappings": {"actor_train": [-1]}}),
        (topo.RegistrationError, "holds '0'; GPU ids are integers", {"mappings": {"actor_train": ["0"]}}),
        (topo.BadRankSize, "tp=0 must be", {"tps": {"actor_infer": 0}}),
        (topo.BadRankSize, "cannot be divided into ranks of tp=3", {"tps": {"actor_infer": 3}}),
        (
            topo.BadRankSize,
            "tp=3 must be 1, 2, 4, 8 or whole nodes",
            {"tps": {"actor_infer": 3}, "mappings": {"actor_infer": [0, 1, 2, 3, 4, 5]}},
        ),
        (topo.BadRankSize, "rank 0 on GPUs .* is not contiguous", {"mappings": {"actor_infer": [0, 2, 3, 4]}}),
        (topo.BadRankSize, "crosses a node border", {"mappings": {"actor_train": [3], "actor_infer": [3, 4, 5, 6]}}),
        (topo.RegistrationError, "mapping is empty", {"mappings": {"actor_train": []}}),
        (
            topo.UnknownCluster,
            "the clusters are actor_train, actor_infer",
            {"tps": {"critic": 1}, "mappings": {"critic": [0]}},
        ),
        (topo.UnknownCluster, "'reference'.*unknown", {"tps": {"reference": 1}, "mappings": {"reference": [4]}}),
        (topo.UnknownCluster, "'reward'.*unknown", {"tps": {"reward": 1}, "mappings": {"reward": []}}),
        (topo.RegistrationError, "only one of them has critic", {"tps": {"critic": 1}}),
        (topo.TrainingOutsideInference, "GPU 4 is not in actor_infer", {"mappings": {"actor_train": [4]}}),
        (topo.BadShare, "weight=0", {"weight": 0}),
        (topo.BadShare, "min_share=0.6", {"min_share": 0.6, "max_share": 0.5}),
        (topo.BadShare, "staleness=-1", {"staleness": -1}),
        (topo.RegistrationError, "id must match", {"name": "a:b"}),
        (topo.RegistrationError, "within 256 characters", {"name": "a" * 250}),
    ],
)
def test_a_mistake_is_named(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        attempt(**arguments)


def test_a_mistake_crosses_processes_whole() -> None:
    with pytest.raises(topo.GpuOutsidePool) as caught:
        attempt(mappings={"actor_train": [8]})
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is topo.GpuOutsidePool and (str(again), again.cluster) == (str(caught.value), "actor_train")


def test_a_whole_rank_must_survive_training_not_just_enough_gpus() -> None:
    """Inference on 0-3 with tp 2 and training on 0 and 2 leaves two GPUs over, but hits both ranks."""
    with pytest.raises(topo.NoSurvivingRank, match="touches each of the 2 inference ranks of tp=2"):
        attempt(mappings={"actor_train": [0, 2]})
    assert attempt(mappings={"actor_train": [0, 2]}, full_overlap=True).ranks == ((0, 1), (2, 3))


def test_a_single_rank_of_tp_two_cannot_be_a_partial_sleeper() -> None:
    with pytest.raises(topo.NoSurvivingRank):
        attempt(mappings={"actor_train": [0, 1], "actor_infer": [0, 1]})


def test_the_pool_has_at_least_one_gpu() -> None:
    with pytest.raises(ValueError, match="nodes=0"):
        Pool(0, 8)
