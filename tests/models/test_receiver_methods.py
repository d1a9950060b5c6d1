"""The receiver's methods one by one, as a scheduler's sync service calls them: masks, buckets, finalising once,
statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from nemo_rl.models.generation.vllm.extension import ArrivedAdapters, ReceiverMethods, bucket_stats
from nemo_rl.weight_sync.layout import TensorMeta, pack_tensor, plan_buckets
from nemo_rl.weight_sync.receiver import ChecksumMismatchError, SyncProtocolError
from nemo_rl.weight_sync.transports import HostStaging
from tests.weight_sync.models import DictModel, weights

CPU = torch.device("cpu")


class Rank(ReceiverMethods):
    """One engine rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, CPU
        self.model = DictModel()

    def nrl_load_target(self) -> DictModel:
        return self.model


def payloads(tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    found = []
    for bucket in plan_buckets([TensorMeta(name, tuple(t.shape), "float32") for name, t in tensors.items()], 4096):
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            pack_tensor(buffer, offset, meta, tensors[meta.name])
        found.append(
            {
                "param_names": [meta.name for meta in bucket.tensors],
                "shapes": [list(meta.shape) for meta in bucket.tensors],
                "dtypes": [meta.dtype for meta in bucket.tensors],
                "offsets": list(bucket.offsets),
                "used_bytes": bucket.nbytes,
                "cpu_uint8_bucket": buffer.numpy().tobytes(),
            }
        )
    return found


def test_ranks_in_the_mask_take_the_buckets_and_are_finalised_once() -> None:
    tensors = weights()
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.update_parameter_in_bucket(payloads(tensors), False, [0], "cpu_serialize")
        rank.finalize_weight_update()
        rank.finalize_weight_update()
    assert all(torch.equal(ranks[0].model.weights[name], tensor) for name, tensor in tensors.items())
    assert ranks[1].model.weights == {} and ranks[1].model.windows == 0
    ranks[0].verify_model(bucket_stats(tensors))


def test_statistics_that_differ_name_the_tensor() -> None:
    rank, tensors = Rank(0), weights()
    rank.update_parameter_in_bucket(payloads(tensors), False, [0], "cpu_serialize")
    wrong = {**tensors, "w3": tensors["w3"] + 1}
    with pytest.raises(ChecksumMismatchError, match="'w3': received"):
        rank.verify_model(bucket_stats(wrong))
    with pytest.raises(ChecksumMismatchError, match="'w99' was never received"):
        rank.verify_model({"w99": (0.0, 0.0, 0.0)})


def test_buckets_in_shared_memory_are_mapped() -> None:
    rank, tensors = Rank(0), weights()
    for payload in payloads(tensors):
        data = torch.frombuffer(bytearray(payload.pop("cpu_uint8_bucket")), dtype=torch.uint8)
        staging = HostStaging(data.numel(), CPU)
        staging.buffer_B.copy_(data)
        rank.update_parameter_in_bucket([payload | {"handle": staging.publish(data.numel())}], False, [0], "host")
        staging.close()
    rank.finalize_weight_update()
    assert all(torch.equal(rank.model.weights[name], tensor) for name, tensor in tensors.items())


def test_what_cannot_be_received_is_refused() -> None:
    rank = Rank(0)
    short = payloads(weights())[0]
    short["cpu_uint8_bucket"] = short["cpu_uint8_bucket"][:-8]
    with pytest.raises(SyncProtocolError, match="a bucket of .* bytes came with"):
        rank.update_parameter_in_bucket([short], False, [0], "cpu_serialize")
    factor = {"a.lora_A": torch.ones(2, 3)}
    for tensors, is_lora in ((weights(), True), (factor, False)):
        with pytest.raises(SyncProtocolError, match=f"is_lora={is_lora}: .* send factors and whole weights apart"):
            rank.update_parameter_in_bucket(payloads(tensors), is_lora, [0], "cpu_serialize")
    assert rank.model.windows == 0
    with pytest.raises(ValueError, match="choose cpu_serialize, cuda_ipc or host"):
        rank.update_parameter_in_bucket([], False, [0], "pigeon")
    with pytest.raises(SyncProtocolError, match="group 'g' was not set up on rank 0"):
        rank.broadcast_parameter("g", [], [], [], False, [0])
    with pytest.raises(ValueError, match="an engine worker only receives"):
        rank.setup_collective_group("g", {}, "sender", None)
    assert rank.setup_collective_group("g", {3: {}}, "receiver", None) is True, "outside the plan a rank is ready"
    rank.destroy_collective_group("g")


class AdaptedModel(DictModel):
    """A model that adds the product of factors to its files, as engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.files = {"layers.0.q_proj.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}
        self.arrived = ArrivedAdapters()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(self.arrived.take(weights))

    def finish_load(self) -> None:
        super().load_weights(self.arrived.merged(self.files.items(), CPU))
        super().finish_load()


@pytest.mark.parametrize(
    "named",
    ["layers.0.q_proj.lora_{}", "base_model.model.layers.0.q_proj.lora_{}.weight", "layers.0.q_proj.lora_{}.x.weight"],
)
def test_factors_of_an_adapter_are_added_to_the_engines_own_weights(named: str) -> None:
    rank, made = Rank(0), list[AdaptedModel]()

    def begin() -> AdaptedModel:
        made.append(AdaptedModel())
        return made[-1]

    rank.nrl_load_target = begin  # type: ignore[method-assign]
    down, up = torch.randn(2, 3), torch.randn(4, 2)
    factors = {named.format("A"): down, named.format("B"): up}
    rank.update_parameter_in_bucket(payloads(factors), True, [0], "cpu_serialize")
    rank.finalize_weight_update()
    (model,) = made
    assert torch.equal(model.weights["layers.0.q_proj.weight"], 1 + up @ down)
    assert torch.equal(model.weights["norm.weight"], torch.ones(3))
    rank.verify_model(bucket_stats(factors))
