"""A policy's weight cache: built by all ranks together, owned by the first, served to sync sessions.

Ties the cache to the policy's workers. By the host transport sessions read the cache without disturbing any rank; by
the others the owner rank stages and pushes. Invariant: there is one owner, and only it stores bytes.
"""

from __future__ import annotations

from typing import Any

from nemo_rl.distributed.worker_calls import wait_for_workers
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.weight_sync.cache import BucketCache, CachedSource, CacheManifest
from nemo_rl.weight_sync.sender import SendSpec

_OWNER = 0


class PolicyWeightCache:
    """The cache of one policy.

    Args:
        policy: Whose weights.
        bucket_bytes: `weight_sync.bucket_bytes`.
        timeout_s: Deadline of a build, and of waiting for a session to end.
    """

    def __init__(self, policy: Policy, *, bucket_bytes: int, timeout_s: float = 150.0) -> None:
        self._policy = policy
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self.cache = BucketCache(self._build, timeout_s=timeout_s)

    @property
    def version(self) -> int | None:
        """The version that the cache serves."""
        return self.cache.version

    def build(self, version: int) -> CacheManifest:
        """Packs the policy's current weights as `version`; they must be resident.

        Raises:
            CacheError: Two copies do not fit into host memory, or another build is under way.
            WorkerError: A rank failed.
        """
        return self.cache.build(version)

    def _build(self, version: int, served: str | None) -> CacheManifest:
        group = self._policy.worker_group
        manifests = group.run(
            "build_cpu_bucket_cache",
            step=version,
            bucket_bytes=self._bucket_bytes,
            served=served,
            timeout_s=self._timeout_s,
        )
        manifest: CacheManifest = manifests[_OWNER]
        return manifest

    def source(self, version: int) -> CachedSource:
        """A session's source of `version`."""
        return self.cache.source(version, through=self)

    # -- the owner rank as a sender -----------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        """Device identity of every rank, the owner first."""
        return self._policy.devices()

    def rendezvous(self) -> tuple[str, int]:
        """Address of the owner and a free port there."""
        return self._policy.rendezvous()

    def begin_cached(self, spec: SendSpec, manifest: CacheManifest, timeout_s: float) -> None:
        """Opens a session that sends a built version from the owner."""
        self._on_owner("begin_cached_export", timeout_s, spec=spec, manifest=manifest)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, object] | None]:
        """Packs a window on the owner."""
        return [self._on_owner("export_window", timeout_s, index=index)]

    def send_window(self, index: int, timeout_s: float) -> None:
        """Pushes a window from the owner."""
        self._on_owner("send_window", timeout_s, index=index)

    def close(self) -> None:
        """Ends the session on the owner."""
        self._on_owner("close_export", 60.0)

    def _on_owner(self, method: str, timeout_s: float, **kwargs: object) -> Any:
        group = self._policy.worker_group
        ref = group.run_single_worker_single_data(method, _OWNER, **kwargs)
        return wait_for_workers([ref], group.identities[:1], what=method, timeout_s=timeout_s)[0]
