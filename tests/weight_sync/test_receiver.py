"""A receiver takes over a version with every byte of it, checked, or keeps the version that it had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.devices import device_uuid
from nemo_rl.weight_sync import receiver as receiving
from nemo_rl.weight_sync.layout import TensorMeta, checksum, plan_buckets
from nemo_rl.weight_sync.receiver import (
    ChecksumMismatchError,
    SyncProtocolError,
    WeightReceiver,
    encode_buckets,
    place_of,
)
from tests.weight_sync.models import CPU, DictModel


class OneBuffer:
    """A sender's only buffer: each window is written over the one before, or copied to the receiver."""

    def __init__(self, copies: bool) -> None:
        self.copies, self.bytes_B = copies, torch.zeros(4096, dtype=torch.uint8)

    def open(self, handle: dict[str, Any]) -> torch.Tensor:
        content = handle["content"]
        if self.copies:
            return content.clone()
        self.bytes_B[: content.numel()] = content
        return self.bytes_B[: content.numel()]

    def close(self) -> None:
        self.bytes_B.zero_()


def window(number: int, version: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A window of two weights, and their values."""
    metas = [TensorMeta(f"w{number}.{name}", (3, 2), "float32") for name in "ab"]
    (bucket,) = plan_buckets(metas, 4096)
    content = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    values = {}
    for place, (meta, offset) in enumerate(zip(metas, bucket.offsets, strict=True)):
        value = torch.full((3, 2), 100.0 * version + 10 * number + place)
        content[offset : offset + value.nbytes] = value.view(torch.uint8).reshape(-1)
        values[meta.name] = value
    sender = {"handle": {"content": content}, "checksums": [checksum(content, bucket.nbytes)]}
    place_here = place_of("host", device_uuid(CPU))
    return {"index": number, "buckets": encode_buckets([bucket]), "senders": {place_here: sender}}, values


def opened(count: int, *, staged: bool, copies: bool, version: int) -> tuple[WeightReceiver, DictModel]:
    """A receiver that has version 1, and an open session of `count` windows for another."""
    model = DictModel()
    receiver = WeightReceiver(model, CPU)
    for number in (1, version):
        session = {"id": f"s{number}", "version": number, "windows": count, "verify": True, "timeout_s": 9.0}
        receiver.begin(session | {"staged": staged and number > 1, "transport": "host", "group": None})
        receiver._opener = OneBuffer(copies)  # type: ignore[assignment]
        if number == 1:
            for index in range(count):
                receiver.receive(window(index, 1)[0])
            receiver.finish(1)
    return receiver, model


def holds(model: DictModel, version: int, count: int) -> bool:
    expected = {name: value for number in range(count) for name, value in window(number, version)[1].items()}
    return model.weights.keys() == expected.keys() and all(
        torch.equal(model.weights[name], value) for name, value in expected.items()
    )


@given(st.integers(1, 4), st.booleans(), st.booleans())
def test_a_finished_session_has_every_weight_of_the_new_version(count: int, staged: bool, copies: bool) -> None:
    receiver, model = opened(count, staged=staged, copies=copies, version=2)
    for number in range(count):
        receiver.receive(window(number, 2)[0])
        # A staged session leaves what serves alone until its end; the other one is not serving.
        assert holds(model, 1, count)
    receiver.finish(2)
    assert receiver.version == 2 and holds(model, 2, count)


@given(st.integers(1, 4), st.booleans(), st.booleans(), st.data())
def test_a_flipped_byte_of_any_window_is_found_before_the_version_is_taken(
    count: int, staged: bool, copies: bool, data: Any
) -> None:
    receiver, model = opened(count, staged=staged, copies=copies, version=2)
    broken = data.draw(st.integers(0, count - 1))
    with pytest.raises(ChecksumMismatchError, match=rf"bucket with 'w{broken}\.a'"):
        for number in range(count):
            sent = window(number, 2)[0]
            if number == broken:
                next(iter(sent["senders"].values()))["handle"]["content"][5] ^= 1
            receiver.receive(sent)
        receiver.finish(2)
    receiver.abort("s2")
    assert receiver.version == 1 and holds(model, 1, count)


@given(st.integers(1, 4), st.booleans(), st.booleans(), st.data())
def test_windows_that_are_missing_or_come_twice_never_become_a_version(
    count: int, staged: bool, copies: bool, data: Any
) -> None:
    receiver, model = opened(count, staged=staged, copies=copies, version=2)
    order = data.draw(st.lists(st.integers(0, count - 1), max_size=count + 1).filter(lambda o: o != list(range(count))))
    with pytest.raises(SyncProtocolError):
        for number in order:
            receiver.receive(window(number, 2)[0])
        receiver.finish(2)
    receiver.abort("another session")
    with pytest.raises(SyncProtocolError, match="is open"):
        receiver.begin({"id": "s3", "windows": 1, "transport": "host"})
    receiver.abort("s2")
    assert receiver.version == 1 and holds(model, 1, count)
    assert receiving.WeightReceiver(DictModel(), CPU).version is None
