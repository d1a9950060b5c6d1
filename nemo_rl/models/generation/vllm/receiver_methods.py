"""The receiver's methods for sync services that drive them one by one: group, buckets, finalise, verify.

The names and arguments are those that schedulers call through `collective_rpc`; underneath it is the same layout, the
same transports and the same loading as in a sync session. Invariants: a rank that is not in a mask does nothing; a
group is destroyed at most once; nothing is finalised twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.weight_sync.layout import BucketLayout, TensorMeta, dtype_of, unpack
from nemo_rl.weight_sync.receiver import ChecksumMismatchError, LoadTarget, SyncProtocolError, make_opener
from nemo_rl.weight_sync.transports.base import TransportName
from nemo_rl.weight_sync.transports.nccl import BroadcastGroup


def bucket_stats(weights: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
    """Sum, largest and smallest value of each tensor: what `verify_model` compares."""
    return {name: (float(t.double().sum()), float(t.max()), float(t.min())) for name, t in weights.items() if t.numel()}


_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.(?P<kind>lora_[AB])(?:\.\w+)?(?:\.weight)?")


def factor_name(name: str) -> str | None:
    """The name of an adapter's factor as engines take it, `<layer>.lora_A` `[rank, in]` or `<layer>.lora_B` `[out,
    rank]`, from that or from PEFT's name; None for a whole weight. The scale of the product (alpha / rank) is in
    `lora_B`, and an engine adds the product to the weight in its own model files.
    """
    found = _PEFT.fullmatch(name)
    return None if found is None else f"{found['layer']}.{found['kind']}"


class ReceiverMethods:
    """Mixed into the worker extension; `self` is vLLM's worker."""

    device: torch.device
    rank: int

    def nrl_load_target(self) -> LoadTarget:
        """The model, ready to take weights."""
        raise NotImplementedError

    def _nrl_update(self) -> dict[str, Any]:
        if not hasattr(self, "_nrl_direct"):
            self._nrl_direct: dict[str, object] = {"groups": {}, "open": False, "stats": {}}
        return self._nrl_direct

    def _nrl_load(self, weights: dict[str, torch.Tensor], is_lora: bool) -> None:
        named = {factor_name(name) or name if is_lora else name: tensor for name, tensor in weights.items()}
        for name in weights:
            if is_lora != (factor_name(name) is not None):
                what = "is no factor of an adapter" if is_lora else "is a factor of an adapter"
                raise SyncProtocolError(f"is_lora={is_lora}: {name!r} {what}; send factors and whole weights apart")
        update = self._nrl_update()
        if not update["open"]:
            # It keeps what has come until it is finalised.
            update["target"] = self.nrl_load_target()
            update["target"].begin_load()
            update["open"] = True
            update["stats"].clear()
        update["target"].load_weights(named.items())
        update["stats"] |= bucket_stats(weights)

    def setup_collective_group(
        self, model_update_name: str, comm_plan: dict[int, dict[str, Any]], mode: str, timeout_s: float | None
    ) -> bool:
        """Joins a group that `broadcast_parameter` receives from: over NCCL, or gloo on CPU slots.

        Args:
            comm_plan: Per local rank `{address, port, rank, world_size}`; a rank that is not named takes no part.
            mode: `receiver`.
            timeout_s: Deadline of rendezvous and collectives; null is 120 s.

        Returns true: this rank is ready, as a member or because it takes no part.
        """
        if mode != "receiver":
            raise ValueError(f"mode={mode!r}: an engine worker only receives; expected 'receiver'")
        plan = comm_plan.get(self.rank)
        if plan is None:
            return True
        place = (plan["address"], plan["port"], plan["rank"], plan["world_size"], timeout_s or 120.0)
        self._nrl_update()["groups"][model_update_name] = BroadcastGroup(*place, self.device)
        return True

    def update_parameter_in_bucket(
        self,
        payload_list: Sequence[Mapping[str, Any]],
        is_lora: bool,
        ipc_local_ranks: Sequence[int],
        model_update_transport: str,
    ) -> None:
        """Loads buckets that this rank can map or is handed.

        Args:
            payload_list: Buckets `{param_names, shapes, dtypes, offsets, used_bytes}` with the bytes under
                `cpu_uint8_bucket` (bytes; `cpu_serialize`) or a staging buffer's `handle` (`cuda_ipc`, `host`).
            is_lora: Whether these are factors of low-rank adapters; see `factor_name`.
            ipc_local_ranks: Ranks that take these buckets.
            model_update_transport: `cpu_serialize`, `cuda_ipc` or `host`.
        """
        if self.rank not in ipc_local_ranks:
            return
        opener = (
            None
            if model_update_transport == "cpu_serialize"
            else make_opener(_transport(model_update_transport), self.device)
        )
        for payload in payload_list:
            metas = tuple(
                TensorMeta(n, tuple(s), d)
                for n, s, d in zip(payload["param_names"], payload["shapes"], payload["dtypes"], strict=True)
            )
            layout = BucketLayout(metas, tuple(payload["offsets"]), payload["used_bytes"])
            if opener is not None:
                received_B = opener.open(payload["handle"])
            else:
                received_B = torch.frombuffer(bytearray(payload["cpu_uint8_bucket"]), dtype=torch.uint8).to(self.device)
            if received_B.numel() < layout.nbytes:
                raise SyncProtocolError(f"a bucket of {layout.nbytes} bytes came with {received_B.numel()}")
            self._nrl_load(dict(unpack(received_B, layout)), is_lora)
        if opener is not None:
            opener.close()

    def broadcast_parameter(
        self,
        group_name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        is_lora: bool,
        broadcast_local_ranks: Sequence[int],
    ) -> None:
        """Receives tensors one by one from rank 0 of a group, and loads them; `is_lora` as for buckets."""
        if self.rank not in broadcast_local_ranks:
            return
        group = self._nrl_update()["groups"].get(group_name)
        if group is None:
            raise SyncProtocolError(f"group {group_name!r} was not set up on rank {self.rank}")
        weights = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weights[name] = torch.empty(tuple(shape), dtype=dtype_of(dtype), device=self.device)
            group.broadcast(weights[name])
        self._nrl_load(weights, is_lora)

    def destroy_collective_group(self, group_name: str) -> None:
        """Leaves a group; nothing to do on a rank that never joined."""
        group = self._nrl_update()["groups"].pop(group_name, None)
        if group is not None:
            group.close()

    def finalize_weight_update(self) -> None:
        """Finalises the model once all buckets were loaded; nothing to do when none was."""
        update = self._nrl_update()
        if update["open"]:
            update["target"].finish_load()
            update["open"] = False

    def verify_model(self, expected_stats: dict[str, Sequence[float]]) -> None:
        """Compares sum, largest and smallest value of every tensor that was received with the sender's. Raises
        ChecksumMismatchError: a tensor is missing or differs.
        """
        got = self._nrl_update()["stats"]
        for name, expected in expected_stats.items():
            if name not in got:
                raise ChecksumMismatchError(f"{name!r} was never received")
            if any(abs(a - b) > 1e-6 * max(1.0, abs(b)) for a, b in zip(got[name], expected, strict=True)):
                raise ChecksumMismatchError(f"{name!r}: received {tuple(got[name])}, sent {tuple(expected)}")


def _transport(name: str) -> TransportName:
    if name == "cuda_ipc" or name == "host":
        return name
    raise ValueError(f"model_update_transport={name!r}: choose cpu_serialize, cuda_ipc or host")
