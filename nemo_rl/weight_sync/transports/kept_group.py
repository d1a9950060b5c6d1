"""One member's end of a process group that sessions with the same members reuse, since creating one takes seconds.

At most one group is held. Its id is a digest of its members plus random letters per creation, so a rebuilt member does
not know it; a session reuses a group only if every member reports that id. Invariants: no rank waits for a member that
holds another group; dropping a group needs no other member.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.weight_sync.transports.base import TransportError
from nemo_rl.weight_sync.transports.nccl import BroadcastGroup, nccl_group


@dataclass(frozen=True)
class GroupMeeting:
    """A session's group."""

    group_id: str  # see `new_group_id`
    world_size: int  # the sender and its receivers
    address: str = ""  # of the sender, and `port` a free one there; of no use where the group is held already
    port: int = 0
    held: bool = False  # whether every member holds it from a session before
    keep: bool = False  # whether members hold it for sessions to come


def members_digest(sender: str, receivers: Sequence[str], timeout_s: float) -> str:
    """What a group's id begins with: who sends, who receives in rank order, and the deadline of its collectives."""
    return hashlib.blake2b(repr((sender, list(receivers), timeout_s)).encode(), digest_size=8).hexdigest()


def new_group_id(members: str) -> str:
    """An id that no other meeting of the same members has."""
    return f"{members}-{uuid.uuid4().hex}"


def is_of(group_id: str | None, members: str) -> bool:
    """Whether an id is that of a group of these members."""
    return group_id is not None and group_id.startswith(f"{members}-")


class KeptGroup:
    """What one member holds; empty at first."""

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self.group_id: str | None = None

    def join(self, meeting: GroupMeeting, rank: int, timeout_s: float, device: torch.device) -> BroadcastGroup:
        """The session's group: the one that is held, or a new one in its place. Raises TransportError: the session
        counts on a group that is not held, or the device is no GPU.
        """
        if self._group is not None and self.group_id == meeting.group_id:
            return self._group
        self.drop()
        if meeting.held:
            raise TransportError(f"rank {rank} does not hold group {meeting.group_id}, which the session counts on")
        self._group = nccl_group(meeting.address, meeting.port, rank, meeting.world_size, timeout_s, device)
        self.group_id = meeting.group_id
        return self._group

    def drop(self) -> None:
        """Leaves the group, without waiting for the others; nothing to do where none is held."""
        group, self._group, self.group_id = self._group, None, None
        if group is not None:
            group.close()
