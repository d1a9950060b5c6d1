"""A model made of a dict, and engines of such models as targets of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nemo_rl.distributed.devices import device_uuid
from nemo_rl.weight_sync.receiver import WeightReceiver

CPU = torch.device("cpu")


class DictModel:
    """Takes weights as an engine does, window by window."""

    def __init__(self, on_load: Callable[[], None] = lambda: None) -> None:
        self.loading: dict[str, torch.Tensor] | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.windows = 0
        self._on_load = on_load

    def begin_load(self) -> None:
        self.loading = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._on_load()
        assert self.loading is not None
        self.loading |= {name: tensor.clone() for name, tensor in weights}
        self.windows += 1

    def abandon_load(self) -> None:
        assert self.loading is not None
        self.loading = None

    def finish_load(self) -> None:
        assert self.loading is not None
        self.weights, self.loading = self.loading, None


class Engines:
    """Targets, each a receiver on a model of its own."""

    def __init__(self, *models: DictModel) -> None:
        self.models = models
        self.receivers = [WeightReceiver(model, CPU) for model in models]
        self.aborted = 0
        self.before_finish: Callable[[], None] = lambda: None

    def only(self, *chosen: int) -> Engines:
        """Some of them, with the very receivers they have."""
        some = Engines()
        some.models = tuple(self.models[index] for index in chosen)
        some.receivers = [self.receivers[index] for index in chosen]
        return some

    def devices(self) -> list[str]:
        return [device_uuid(CPU)] * len(self.receivers)

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        return [receiver.kept_group() for receiver in self.receivers]

    def begin(self, session: dict[str, Any], routes: Sequence[dict[str, Any]], timeout_s: float) -> None:
        for receiver, route in zip(self.receivers, routes, strict=True):
            receiver.begin(session | route)

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        for receiver in self.receivers:
            receiver.receive(window)

    def finish(self, version: int, timeout_s: float) -> list[float]:
        self.before_finish()
        for receiver in self.receivers:
            receiver.finish(version)
        return [0.0] * len(self.receivers)

    def abort(self, session_id: str) -> None:
        self.aborted += 1
        for receiver in self.receivers:
            receiver.abort(session_id)

    @property
    def versions(self) -> list[int | None]:
        return [receiver.version for receiver in self.receivers]


def weights(fill: float = 0.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {f"w{index}": torch.randn(17, 23 + index, generator=draw) + fill for index in range(9)}
