"""Transports make the bytes of a staging buffer readable in another process.

A sender stages bytes in a buffer and publishes a small picklable `handle`; the receiver opens the handle and gets the
bytes as a tensor on its device. Invariant: the bytes stay unchanged until the receiver has answered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Required, TypedDict

import torch

from nemo_rl.config.errors import UserError

TransportName = Literal["host", "cuda_ipc", "nccl", "tcp"]
PUSHED: tuple[TransportName, ...] = ("nccl", "tcp")
"""Transports whose bytes one sender broadcasts to a session's group; a session has one of them at most."""


class TransportError(UserError, RuntimeError):
    """Bytes could not be staged, published or opened."""


class Handle(TypedDict, total=False):
    """Published bytes, as their transport finds them."""

    nbytes: Required[int]
    path: str  # host: the segment
    mapped: int  # host: the segment's size
    offset: int  # host: where in the segment the bytes start
    keep: bool  # host: later sessions read the segment too
    ipc: dict[str, Any]  # cuda_ipc: arguments that map the buffer
    capacity: int  # cuda_ipc: the buffer's size


class Published(TypedDict):
    """A window at one place, with the checksums of its buckets where they are compared."""

    handle: Handle
    checksums: list[str]


class Staging(ABC):
    """A sender's staging buffer."""

    buffer_B: torch.Tensor  # uint8 tensor that the sender packs into

    @abstractmethod
    def publish(self, nbytes: int) -> Handle:
        """Makes the first `nbytes` visible to receivers; the handle they open, which can be pickled."""

    @abstractmethod
    def close(self) -> None:
        """Frees the buffer. No receiver may still read it."""


class Opener(ABC):
    """A receiver's side: opens handles. Buffers may be kept mapped between calls until `close`.

    Attributes:
        copies: Whether opened bytes are the receiver's own, which it may read after it has answered. They may still be
            on their way: whatever is enqueued on the device's stream after `open` finds them there.
    """

    copies: bool = False

    @abstractmethod
    def open(self, handle: Handle) -> torch.Tensor:
        """The published bytes as a uint8 tensor on the receiver's device."""

    @abstractmethod
    def close(self) -> None:
        """Drops every mapping."""
