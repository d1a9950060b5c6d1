"""The receiving side of a sync session, inside one engine worker.

Opens each window by the session's transport, checks it, and hands named tensors to the model, which is seen through a
protocol. Invariants: a session that fails or is aborted leaves the old version's label; the version is set only after
every window has been loaded and the model has been finalised.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.devices import device_uuid, host_of, synchronize
from nemo_rl.weight_sync.layout import BucketLayout, TensorMeta, Window, checksum
from nemo_rl.weight_sync.transports import (
    PUSHED,
    CudaIpcOpener,
    GroupMeeting,
    GroupOpener,
    HostOpener,
    KeptGroup,
    Opener,
    Published,
    TransportError,
    TransportName,
)


class SyncProtocolError(RuntimeError):
    """Messages of a session came in the wrong order, or for another session."""


class ChecksumMismatchError(UserError, RuntimeError):
    """Bytes arrived that are not the bytes that were sent."""


class LoadTarget(Protocol):
    """A model that can take new weights."""

    def begin_load(self) -> None:
        """Prepares the model for new weights."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes some of the new weights; called once per window, with a `Window`."""
        ...

    def finish_load(self) -> None:
        """Finalises the model once all weights were taken."""
        ...

    def abandon_load(self) -> None:
        """Ends a load half-way: the model may hold old and new weights, and takes a whole set of new ones next."""
        ...


def place_of(transport: TransportName, device: str) -> str:
    """Place from which a staged copy can be read, as a key that source and target compute alike: its device, its host,
    or the members of the group.
    """
    if transport in PUSHED:
        return f"{transport}:group"
    return f"{transport}:{device if transport == 'cuda_ipc' else host_of(device)}"


def make_opener(name: TransportName, device: torch.device) -> Opener:
    """A receiver's end that needs no group. Raises TransportError: the transport needs a group (nccl, tcp)."""
    if name == "host":
        return HostOpener(device)
    if name == "cuda_ipc":
        return CudaIpcOpener(device)
    raise TransportError(f"transport {name!r} opens only inside a session's group")


def encode_buckets(buckets: Sequence[BucketLayout]) -> bytes:
    """The layout of a window as one value that any RPC carries unopened."""
    return json.dumps(
        [
            {
                "names": [t.name for t in bucket.tensors],
                "shapes": [t.shape for t in bucket.tensors],
                "dtypes": [t.dtype for t in bucket.tensors],
                "offsets": bucket.offsets,
                "nbytes": bucket.nbytes,
            }
            for bucket in buckets
        ]
    ).encode()


@functools.lru_cache(maxsize=512)
def decode_buckets(encoded: bytes) -> tuple[BucketLayout, ...]:
    """The layout behind `encode_buckets`; sessions send the same ones again and again."""
    return tuple(
        BucketLayout(
            tuple(
                TensorMeta(name, tuple(shape), dtype)
                for name, shape, dtype in zip(plain["names"], plain["shapes"], plain["dtypes"], strict=True)
            ),
            tuple(plain["offsets"]),
            plain["nbytes"],
        )
        for plain in json.loads(encoded)
    )


@dataclass(frozen=True)
class _Arrived:
    """A window, and the checksums of its buckets where they are compared."""

    window: Window
    checksums: list[str]


class WeightReceiver:
    """Receives sessions one after the other."""

    def __init__(self, target: LoadTarget, device: torch.device) -> None:
        self._target = target
        self._device = device
        self._opener: Opener | None = None
        self._session: dict[str, Any] = {}
        self._next_window = 0
        self._loading = False
        self._staged: list[Window] = []
        self._arriving: _Arrived | None = None
        self._groups = KeptGroup()
        self.version: int | None = None

    def begin(self, session: dict[str, Any]) -> None:
        """Opens a session: `{id, windows, verify, timeout_s, staged}` and this worker's route in it, `{transport,
        group}`. `group` is `{rank}` and a `GroupMeeting`'s values if the route uses the session's group, else None. If
        staged, windows are kept beside the live weights, which stay untouched until `finish`.

        Raises SyncProtocolError: another session is open; TransportError: this worker lacks the group that the session
        uses.
        """
        if self._session:
            raise SyncProtocolError(
                f"session {session['id']} cannot begin: session {self._session['id']} is open; abort it first"
            )
        of = session.get("group")
        if of:
            meeting = GroupMeeting(**{name: value for name, value in of.items() if name != "rank"})
            group = self._groups.join(meeting, of["rank"], session["timeout_s"], self._device)
            self._opener = GroupOpener(group, self._device)
        else:
            self._groups.drop()
            self._opener = make_opener(session["transport"], self._device)
        self._session = session
        self._next_window = 0
        if not session.get("staged"):
            self._begin_load()

    def _begin_load(self) -> None:
        self._loading = True
        self._target.begin_load()

    def receive(self, window: Mapping[str, Any]) -> None:
        """Loads one window: `{index, buckets, senders: {place: {handle, checksums}}}`. Raises SyncProtocolError: no
        session is open, or a window was skipped; ChecksumMismatchError: the bytes differ from the sender's.
        """
        if self._opener is None or window["index"] != self._next_window:
            raise SyncProtocolError(
                f"window {window['index']} arrived, expected {self._next_window if self._opener else 'a begin'}"
            )
        sender = self._choose_sender(window["senders"])
        opened_B = self._opener.open(sender["handle"])
        arrived = _Arrived(Window(opened_B, decode_buckets(window["buckets"])), sender["checksums"])
        # While these bytes travel, those that came before them are taken in.
        if self._arriving is not None:
            self._take(self._arriving)
        self._arriving = arrived if self._opener.copies else None
        if self._arriving is None or window["index"] + 1 == self._session["windows"]:
            self._take(arrived)
            self._arriving = None
        # What later sessions read too stays as it is until this one ends: its bytes may still be on their way.
        if not sender["handle"].get("keep"):
            synchronize(self._device)
        self._next_window += 1

    def _take(self, arrived: _Arrived) -> None:
        self._verify(arrived)
        if not self._session.get("staged"):
            self._target.load_weights(arrived.window)
        elif self._opener is not None and self._opener.copies:
            self._staged.append(arrived.window)
        else:
            self._staged.append(replace(arrived.window, bytes_B=arrived.window.bytes_B.clone()))

    def _choose_sender(self, senders: Mapping[str, Published]) -> Published:
        place = place_of(self._session["transport"], device_uuid(self._device))
        if place not in senders:
            raise SyncProtocolError(
                f"no weights are staged at {place}, where this worker must read them; senders are at {sorted(senders)}"
            )
        return senders[place]

    def _verify(self, arrived: _Arrived) -> None:
        if not arrived.checksums:
            return
        for (part_B, bucket), want in zip(arrived.window.parts(), arrived.checksums, strict=True):
            got = checksum(part_B, bucket.nbytes)
            if got != want:
                raise ChecksumMismatchError(
                    f"bucket with {bucket.tensors[0].name!r}: received {got}, sent {want} (session "
                    f"{self._session['id']})"
                )

    def finish(self, version: int) -> int:
        """Finalises the model, ends the session and takes over its version. Raises SyncProtocolError: windows are
        missing.
        """
        if not self._session or self._next_window != self._session["windows"]:
            raise SyncProtocolError(f"finish after {self._next_window} of {self._session.get('windows', 0)} windows")
        if self._session.get("staged"):
            self._begin_load()
            for window in self._staged:
                self._target.load_weights(window)
        self._target.finish_load()
        self._loading = False
        synchronize(self._device)
        self.version = version
        keeps = bool((self._session.get("group") or {}).get("keep"))
        self._close()
        if not keeps:
            self._groups.drop()
        return version

    def abort(self, session_id: str | None = None) -> None:
        """Ends a session without a new version; does nothing if another one is open, or none."""
        if session_id is not None and self._session.get("id") != session_id:
            return
        try:
            if self._loading:
                self._target.abandon_load()
            synchronize(self._device)
        finally:
            self._loading = False
            self._close()
            self._groups.drop()

    def kept_group(self) -> str | None:
        """Id of the group that is held for the next session, if one is."""
        return self._groups.group_id

    def drop_group(self) -> None:
        """Gives the memory of the held group back."""
        self._groups.drop()

    def _close(self) -> None:
        self._staged.clear()
        self._arriving = None
        if self._opener is not None:
            self._opener.close()
        self._opener = None
        self._session = {}
