"""What can go wrong while shards come and go, by name.

Errors of single requests are `GenerationError` in `interfaces`; these are about shards as a whole.
"""

from __future__ import annotations

from nemo_rl.models.generation.interfaces import GenerationError


class ShardPreemptedError(GenerationError):
    """The shard of a request was taken away before it answered; the request goes on elsewhere."""


class ShardStateError(GenerationError):
    """A shard was asked for what its state does not allow, such as a sync while it sleeps."""


class MemoryNotFreedError(GenerationError):
    """A shard slept, but its memory did not come back."""


class WakeError(GenerationError):
    """A shard could not make its memory resident again; it sleeps, and the others live on."""


class StaleVersionError(GenerationError):
    """Weights were offered that are older than what the shard has."""
