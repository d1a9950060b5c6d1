"""Low-rank adapters as files in PEFT's format, and their merging into a model on disk.

A directory with `adapter_config.json` and `adapter_model.safetensors`, which PEFT and vLLM read; tensors are called
`base_model.model.<module>.lora_A.weight` (`[rank, in]`) and `lora_B.weight` (`[out, rank]`). Invariant: merged, a
weight is `W + scale * B @ A` (https://arxiv.org/abs/2106.09685), added in float32; other kinds of adapters are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import UserError

if TYPE_CHECKING:
    import torch

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
FACTORS = ("lora_A", "lora_B")
_PREFIX = "base_model.model."


class AdapterError(UserError, ValueError):
    """A directory holds no adapter, or one that does not fit."""


@dataclass(frozen=True)
class AdapterInfo:
    """The fields of `adapter_config.json` that are used here."""

    base_model_name_or_path: str  # the model that it adapts
    r: int
    lora_alpha: float
    target_modules: list[str]  # last names of the adapted modules
    use_rslora: bool = False  # whether the scale is alpha / sqrt(r), of https://arxiv.org/abs/2312.03732

    @classmethod
    def of(cls, model: str, rank: int, alpha: float, layers: Iterable[str]) -> AdapterInfo:
        """Of an adapter of these layers."""
        return cls(model, rank, alpha, sorted({layer.rpartition(".")[2] for layer in layers}))

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


# Keys of PEFT that make a weight of something else than two factors and one scale, and their values without effect.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("alpha_pattern", "rank_pattern", "modules_to_save", "layer_replication"), (None, {}, [])),
}
# Ways to begin that take the product out of the base model's weights.
_OF_OTHER_BASES = ("pissa", "olora", "corda", "loftq")


def is_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter."""
    return (Path(directory) / CONFIG_FILE).is_file()


def write_adapter(directory: str | Path, info: AdapterInfo, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes an adapter.

    Args:
        directory: made where it is not there.
        info: goes into `adapter_config.json`.
        tensors: by `<module>.lora_A` and `<module>.lora_B`.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    named = {f"{_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, path / TENSORS_FILE, {"format": "pt"})
    fixed = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    (path / CONFIG_FILE).write_text(json.dumps({**fixed, **asdict(info)}, indent=2), encoding="utf-8")


def read_adapter(directory: str | Path) -> tuple[AdapterInfo, dict[str, torch.Tensor]]:
    """An adapter's configuration, and its tensors by `<module>.lora_A` and `<module>.lora_B`. Raises AdapterError:
    there is none, or it is not one of plain low-rank factors.
    """
    from safetensors.torch import load_file

    path = Path(directory)
    if not is_adapter(path) or not (path / TENSORS_FILE).is_file():
        raise AdapterError(f"{path}: holds no adapter ({CONFIG_FILE} and {TENSORS_FILE})")
    written: dict[str, Any] = {"use_rslora": False, **json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))}
    _check_plain(written, path / CONFIG_FILE)
    try:
        info = AdapterInfo(**{name: written[name] for name in AdapterInfo.__dataclass_fields__})
    except KeyError as error:
        raise AdapterError(f"{path / CONFIG_FILE}: says nothing of {error}") from error
    tensors = {}
    for name, tensor in load_file(path / TENSORS_FILE).items():
        short = name.removeprefix(_PREFIX).removesuffix(".weight")
        if short.rpartition(".")[2] not in FACTORS:
            raise AdapterError(f"{path / TENSORS_FILE}: {name} is no factor of a low-rank adapter")
        tensors[short] = tensor
    return info, tensors


def _check_plain(written: Mapping[str, object], path: Path) -> None:
    found = next((key for key, values in _PLAIN.items() if key in written and written[key] not in values), None)
    begun = str(written.get("init_lora_weights", "")).lower()
    if found is None and begun.startswith(_OF_OTHER_BASES):
        found = "init_lora_weights"
    if found is not None:
        raise AdapterError(
            f"{path}: {found} is {written[found]!r}, and only adapters of two factors and one scale are read; merge it "
            "with PEFT (merge_and_unload) and use the whole model"
        )


def with_product(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """A weight with the scaled product of two factors added, in float32."""
    return weight.float() + scale * (up.float() @ down.float())


def merged(name: str, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """A weight of the base model with its adapter added; as it is where it has none."""
    module = name.removesuffix(".weight")
    down, up = (adapters.get(f"{module}.{factor}") for factor in FACTORS)
    return weight if down is None or up is None else with_product(weight, down, up, scale).to(weight.dtype)


def base_directory(name_or_path: str) -> Path:
    """The directory of an adapter's base model, downloaded where it is a name on the hub. Raises AdapterError: it is
    neither.
    """
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AdapterError(
            f"{name_or_path}: the adapter's base model is neither here nor on the hub: {error}"
        ) from error
