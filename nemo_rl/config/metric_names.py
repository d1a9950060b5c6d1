"""Names of metrics in keys: `val:<name>` or `train:<name>`.

Every rule and every reader goes through `MetricName`, so that what a rule accepts is what a run looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricName:
    """A metric of training steps or of validations, under the name by which it is measured."""

    kind: Literal["train", "val"]
    name: str

    @classmethod
    def read(cls, text: str) -> MetricName:
        """Reads `val:<name>` or `train:<name>`, and as logs have them `validation/<name>` or `train/<name>`; a name
        alone is one of validation. `total_reward/mean` of a validation, which is what NeMo-RL measures of NeMo-Gym's
        rollouts, is `accuracy`.
        """
        for prefix, kind in _PREFIXES.items():
            if text.startswith(prefix):
                name = text.removeprefix(prefix)
                return cls(kind, "accuracy" if kind == "val" and name == _OF_NEMO_GYM else name)
        return cls("val", "accuracy" if text == _OF_NEMO_GYM else text)


_OF_NEMO_GYM = "total_reward/mean"
_PREFIXES: dict[str, Literal["train", "val"]] = {
    "val:": "val",
    "validation:": "val",
    "validation/": "val",
    "train:": "train",
    "train/": "train",
}
